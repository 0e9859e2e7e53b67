"""Whether a checkpoint is of a run with these settings, also one from before some of them."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from rods_jax import checkpoint
from rods_jax.config import UserError, to_json
from rods_jax.resume import FREE_OF_WEIGHTS, FREE_ON_RESUME, check_config, take_up
from rods_jax.run_config import RunConfig
from rods_jax.synthesis.endpoint import EndpointConfig
from rods_jax.synthesis.pipeline import SynthesisConfig
from rods_jax.synthesis.writers import WriterKind

PLACE = pathlib.Path("checkpoints")
RUN = RunConfig(seed=0, steps=1)


def written(**changes):
    return {"config": to_json(dataclasses.replace(RUN, **changes))}


def test_the_runs_own_settings_pass():
    check_config(PLACE, written(), RUN)


def test_the_readme_names_what_may_change():
    text = (pathlib.Path(__file__).resolve().parents[1] / "README.md").read_text()
    names = text.split("the run's own settings; only ")[1].split(" may change")[0].split("`")[1::2]
    assert sorted(names) == sorted(FREE_ON_RESUME)


def test_free_fields_may_differ():
    check_config(PLACE, written(steps=RUN.steps + 1), RUN)


def test_the_language_model_may_be_elsewhere_but_not_be_left_out():
    host, moved = (SynthesisConfig(writer=WriterKind.LLM, endpoint=EndpointConfig(url, "m"))
                   for url in ("http://a:8000/v1", "http://b:9000/v1"))
    check_config(PLACE, written(synthesis=host), dataclasses.replace(RUN, synthesis=moved))
    with pytest.raises(UserError, match=r"another config\.synthesis \(writer: 'llm' then"):
        check_config(PLACE, written(synthesis=host), RUN)


def test_another_value_is_named():
    with pytest.raises(UserError, match=rf"another config\.seed \({RUN.seed + 1} then"):
        check_config(PLACE, written(seed=RUN.seed + 1), RUN)


def test_a_setting_that_was_not_there_is_at_its_default():
    host = written()
    del host["config"]["queue"], host["config"]["sampler"]["max_new"]
    check_config(PLACE, host, RUN)
    other = dataclasses.replace(RUN.sampler, max_new=RUN.sampler.max_new + 1)
    with pytest.raises(UserError, match=r"another config\.sampler \(max_new: "):
        check_config(PLACE, host, dataclasses.replace(RUN, sampler=other))


def test_a_setting_that_is_gone_is_one_line():
    host = written()
    host["config"]["rows"] = 8
    with pytest.raises(UserError, match=r"another version of rods_jax.*rows.*go on with that"):
        check_config(PLACE, host, RUN)
    # Weights are told by the policy alone.
    check_config(PLACE, host, RUN, ("policy",), FREE_OF_WEIGHTS)


def test_a_checkpoint_without_a_config_is_one_line():
    with pytest.raises(UserError, match="is not the checkpoint of a training run"):
        check_config(PLACE, {}, RUN)


# ---------------------------------------------------------------- the run's folder

STEP = 8
AT_END = dataclasses.replace(RUN, steps=STEP)
BEFORE, SUMMARY = {"held_in_sampled": {"progress": 0.25}}, {"steps": STEP, "before": 0.25}


@pytest.fixture
def place(tmp_path):
    """A run of STEP steps that has ended: its checkpoint and its folder."""
    path = checkpoint.save(tmp_path / "checkpoints", STEP, {"x": np.zeros(1)}, written(steps=STEP))
    (tmp_path / "before.json").write_text(json.dumps(BEFORE))
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}}}\n' for n in range(STEP)))
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    return path, tmp_path


def test_a_run_without_steps_left_gives_its_summary(place, capsys):
    path, folder = place
    taken = take_up(*place, AT_END)
    assert (taken.before, taken.summary) == (BEFORE, SUMMARY)
    assert capsys.readouterr().out == f"{path} is at step 8 already: nothing to train\n"
    assert take_up(*place, dataclasses.replace(RUN, steps=STEP + 1)).summary is None
    with pytest.raises(UserError, match="steps is 2, but .* is at step 8 already: nothing to"):
        take_up(*place, dataclasses.replace(RUN, steps=2))
    for other in ({"steps": 4}, {}, []):  # of an earlier end, or no summary: the end is to be made
        (folder / "summary.json").write_text(json.dumps(other))
        assert take_up(*place, AT_END).summary is None
    (folder / "summary.json").unlink()
    assert take_up(*place, AT_END).before == BEFORE


@pytest.mark.parametrize("name, text, words", [
    ("before.json", None, "missing"), ("before.json", "{}", "holds no score of held-in tasks"),
    ("before.json", '{"held_in_sampled": {"progress": null}}', "holds no score"),
    ("before.json", "{", "is not JSON"), ("metrics.jsonl", None, "holds none of the 8 steps"),
    ("metrics.jsonl", "", "holds none of the 8 steps"),
    ("metrics.jsonl", '{"step": 9}\n', "holds none of the 8 steps before step_000000008"),
    ("summary.json", "{", "is not JSON"),
])
def test_a_damaged_folder_is_one_line_at_the_start(place, name, text, words):
    file = place[1] / name
    file.unlink()
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=f"{file}: {words}.*; restore it, or begin the run anew"):
        take_up(*place, AT_END)


def test_a_checkpoint_of_no_step_needs_no_metrics(place):
    _, folder = place
    first = checkpoint.save(folder / "other", 0, {"x": np.zeros(1)}, written())
    (folder / "metrics.jsonl").unlink()
    assert take_up(first, folder, RUN).before == BEFORE
