"""Whether a checkpoint is of a run with these settings, also one from before some of them."""

import dataclasses
import pathlib

import pytest

from rods_jax.config import UserError, to_json
from rods_jax.resume import FREE_OF_WEIGHTS, FREE_ON_RESUME, check_config
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
