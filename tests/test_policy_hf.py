"""A policy in Hugging Face form, whole way: a folder in, its own chat template, LoRA, restart,
evaluation, and a folder and an adapter out. The model is tiny; every path is the real one."""

import dataclasses
import importlib.util
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from kept_programs import kept_in
from policy_cases import biased_params, call, small_model, small_tokenizer

from experiments import evaluate as evaluation
from experiments import export as exporting
from experiments import train as command
from rods_jax import checkpoint, metrics, policy
from rods_jax.config import UserError
from rods_jax.config import load as load_config
from rods_jax.models.attention import causal_mask
from rods_jax.models.config import LoraConfig
from rods_jax.models.decoder import Decoder
from rods_jax.models.hf.adapter import load_adapter
from rods_jax.models.hf.config import Family
from rods_jax.models.hf.export import export
from rods_jax.models.hf.load import load
from rods_jax.rollout.writing import Writing
from rods_jax.run_config import RunConfig
from rods_jax.synthesis.exchange import FOLDER, HEADER, OUTCOMES
from rods_jax.synthesis.outcome import Candidate, outcome_from_json
from rods_jax.synthesis.policy_endpoint import PolicyEndpoint
from rods_jax.synthesis.writers import TemplateWriter, writer_messages
from rods_jax.text.free import Text
from rods_jax.text.hermes import full_schema
from rods_jax.text.tokenizer_files import SpecialTokens, write_tokenizer
from rods_jax.tools.toolbox import ToolboxSuite
from test_synthesis_process import until

CONFIG = pathlib.Path(__file__).resolve().parents[1] / "configs" / "hf_lora.py"
TEMPLATES = pathlib.Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
SUITE = ToolboxSuite()
GOOD, BAD = call("check_balance"), call("cancel_booking", booking_id="bk-0")
THOUGHT = "<think>\nhm\n</think>\n\n"
TOKENIZER = small_tokenizer(
    [full_schema(spec) for spec in SUITE.tools(SUITE.domains)]
    + [turn.user for task in SUITE.split("train")[:50] for turn in task.turns]
    + [(TEMPLATES / "qwen3.jinja").read_text()] * 3, (GOOD, BAD, THOUGHT), pieces=1400)
LIKELY = {"<|im_end|>": 5.0, GOOD: 5.0, BAD: 4.5, THOUGHT: 4.5}
SETS = {"steps": 2, "tasks_per_step": 4, "group_size": 4, "batch.rows": 4, "tasks.seeds": 8,
        "tasks.held_in": 2, "sampler.slots": 16, "sampler.max_new": 4, "sampler.sharers": 4,
        "sampler.prefill": ((2, 128),), "sampler.extend": ((8, 128),), "sampler.prompt_len": 2048,
        "sampler.max_len": 2240, "sampler.cache_sizes": (), "engine.max_steps": 2,
        "engine.stop_on_failed_turn": False, "pool.capacity": 16, "pool.p_max": 8,
        "policy.lora": {"targets": "q_proj|down_proj", "rank": 2, "alpha": 4.0},
        "policy.remat": "none", "optimizer.lr": 1e-2, "checkpoint_every": 1,
        "curriculum": {"stages": ({"steps": None, "reward": "format", "synthesis": False},)}}


def write_model(folder, template="qwen3", **sizes):
    """A folder as a user would bring it."""
    model = small_model(TOKENIZER, qk_norm=True, **sizes)
    export(folder, biased_params(model, TOKENIZER, LIKELY), model, family=Family.QWEN3,
           dtype="bfloat16")
    stop = (TOKENIZER.control["<|im_end|>"], TOKENIZER.control["<|endoftext|>"])
    write_tokenizer(folder, TOKENIZER, (TEMPLATES / f"{template}.jinja").read_text(),
                    SpecialTokens(stop, pad_id=stop[1]))
    return folder


def arguments(model, **more):
    sets = SETS | {"policy.path": str(model)} | more
    return ["--config", str(CONFIG),
            *(part for name, value in sets.items() for part in ("--set", f"{name}={value!r}"))]


def run(model, out, *flags, **more):
    command.main([*arguments(model, **more), "--out", str(out), "--cache", str(out), *flags])
    return metrics.read(out / "metrics.jsonl")


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory):
    with kept_in(tmp_path_factory.mktemp("programs")):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "tiny-qwen3")


@pytest.fixture(scope="module")
def played(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    return out, run(model, out)


def logits(config, params):
    tokens = np.arange(24)[None] * 7 % config.vocab_size
    decoder = Decoder(config)
    hidden, _ = decoder.apply({"params": params}, tokens, np.arange(24)[None], causal_mask(24))
    return np.asarray(decoder.apply({"params": params}, hidden, method="logits"))


def test_the_shape_of_a_model_needs_its_config_alone(model, tmp_path):
    shutil.copy(model / "config.json", tmp_path)
    whole, alone = (load_config(str(CONFIG), arguments(path)[3::2], RunConfig)
                    for path in (model, tmp_path))
    parts = policy.build(whole)
    assert policy.model_of(alone) == (parts.decoder.config, str(parts.params["embed"].dtype))


def test_it_trains_its_adapters_alone(model, played):
    out, rows = played
    assert len(rows) == 2 and all(row["grad_norm"] > 0 for row in rows)
    assert all(row["drifts"] == 0 and row["env_errors"] == 0 for row in rows)
    # The sampler and the trainer see one distribution, over rows of several turns too.
    assert all(row["logprob_gap"] < 1e-4 for row in rows)
    manifest = json.loads(next(out.glob("checkpoints/*/manifest.json")).read_text())
    weights = [name for name in manifest["leaves"] if ".params." in f".{name}."]
    assert weights and all("_lora_" in name for name in weights)
    assert not any("frozen" in name for name in manifest["leaves"])


@pytest.mark.slow
def test_interrupted_equals_uninterrupted(model, played, tmp_path):
    run(model, tmp_path / "out", **{"steps": 1})
    rows = run(model, tmp_path / "out", "--resume")
    one, two = (checkpoint.latest(folder / "checkpoints") for folder in (played[0], tmp_path / "out"))
    timed = {"wall_s", "rollout_s", "device_s", "idle_s", "publish_s", "tokens_per_s", "compiles",
             "compiled"}
    for mine, theirs in zip(rows, played[1]):
        assert {k: v for k, v in mine.items() if k not in timed} \
            == {k: v for k, v in theirs.items() if k not in timed}
    assert json.loads((one / "host.json").read_text())["frozen"] \
        == json.loads((two / "host.json").read_text())["frozen"] is not None


def test_other_weights_under_the_adapters_are_refused(model, played, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(model, other)
    found, params = load(other)
    params["final_norm"] = params["final_norm"] * 2
    shutil.rmtree(tmp_path / "other")
    export(other, params, found.model, family=Family.QWEN3, dtype="bfloat16")
    for path in model.iterdir():
        if not (other / path.name).exists():
            shutil.copy(path, other)
    with pytest.raises(UserError, match="trained over other weights"):
        evaluation.main([*arguments(other), "--checkpoint", str(played[0])])


def test_another_template_under_a_run_is_refused(model, played, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(model, other)
    path = other / "tokenizer_config.json"
    data = json.loads(path.read_text())
    data["chat_template"] = (TEMPLATES / "qwen3_instruct_2507.jinja").read_text()
    path.write_text(json.dumps(data))
    shutil.copytree(played[0], tmp_path / "out")
    with pytest.raises(UserError, match="tokenizer_config.json: is not what it was"):
        run(other, tmp_path / "out", "--resume", steps=3)
    with pytest.raises(UserError, match="tokenizer_config.json: is not what it was"):
        exporting.main([*arguments(other), "--checkpoint", str(played[0]),
                        "--out", str(tmp_path / "hf")])
    shutil.copy(model / "tokenizer_config.json", other)
    data = json.loads((model / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(data | {"rope_theta": 5e5}))
    with pytest.raises(UserError, match="a model whose rope_theta is 10000.0, now it is 500000"):
        exporting.main([*arguments(other), "--checkpoint", str(played[0]),
                        "--out", str(tmp_path / "hf")])


def test_a_moved_model_and_another_way_to_compute_are_no_other_policy(model, played, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(model, moved)
    sets = arguments(f"{moved}/", **{"policy.remat": "layer", "policy.compute_dtype": "bfloat16"})
    exporting.main([*sets, "--checkpoint", str(played[0]), "--out", str(tmp_path / "hf")])
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    with pytest.raises(UserError, match="another config.policy .*lora"):
        exporting.main([*arguments(model, **{"policy.lora": {"rank": 3}}), "--checkpoint",
                        str(played[0]), "--out", str(tmp_path / "no")])
    with pytest.raises(UserError, match="lies within --checkpoint"):
        exporting.main([*arguments(model), "--checkpoint", str(played[0]),
                        "--out", str(played[0] / "checkpoints" / "step_000000009")])


def test_the_export_is_the_trained_policy(model, played, tmp_path, capsys):
    out = played[0]
    exporting.main([*arguments(model), "--checkpoint", str(out), "--out", str(tmp_path / "hf"),
                    "--json", "-"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["step"] == 2
    exporting.main([*arguments(model), "--checkpoint", str(out), "--out", str(tmp_path / "ad"),
                    "--adapter"])
    before, base = load(model)
    after, merged = load(tmp_path / "hf")
    assert after.raw == before.raw
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (model / name).read_bytes()
    changed = {name for name in base["layers"]
               if (np.asarray(base["layers"][name]) != np.asarray(merged["layers"][name])).any()}
    assert changed == {"q", "down"}
    # The adapter saved alone gives the same policy over the weights that came in.
    lora = LoraConfig("q_proj|down_proj", 2, 4.0)
    config = dataclasses.replace(before.model, lora=lora)
    adapters = load_adapter(tmp_path / "ad", config)
    whole = {**base, "layers": {**base["layers"], **adapters["layers"]}}
    assert np.abs(np.asarray(adapters["layers"]["q_lora_b"])).max() > 0
    got, wanted = logits(after.model, merged), logits(config, whole)
    # bfloat16 in the file rounds the sum that the adapter adds in float32.
    assert np.abs(got - wanted).max() < 2e-2 * np.abs(wanted).max()
    assert np.abs(logits(before.model, base) - wanted).max() > 1e-3


def test_evaluation_reads_the_adapters_or_nothing_trained(played, capsys):
    """With the run's own config.json no setting has to be said again."""
    own = ["--config", str(played[0] / "config.json"), "--json", "-"]
    summary = json.loads((played[0] / "summary.json").read_text())
    for more, when in ((["--checkpoint", str(played[0])], "after"), ([], "before")):
        evaluation.main([*own, *more])
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert found["sampled"] == summary["evaluations"][when]["held_in_sampled"]


def test_what_rounding_takes_from_merged_adapters_is_said(model, played, tmp_path, capsys):
    own = ["--config", str(played[0] / "config.json")]
    exporting.main([*own, "--out", str(tmp_path / "base"), "--json", "-"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["adapters_lost"] is None
    own += ["--checkpoint", str(played[0]), "--json", "-"]
    lost = {}
    for dtype in ("bfloat16", "float32"):
        exporting.main([*own, "--out", str(tmp_path / dtype), "--dtype", dtype])
        lost[dtype] = json.loads(capsys.readouterr().out.splitlines()[-1])["adapters_lost"]
    rounded, whole = (load(tmp_path / dtype)[1]["layers"]["q"] for dtype in lost)
    base = np.asarray(load(model)[1]["layers"]["q"], np.float32)
    assert whole.dtype == np.float32 and rounded.dtype == "bfloat16"
    missed = np.linalg.norm(np.asarray(rounded, np.float32) - whole) / np.linalg.norm(whole - base)
    assert lost["float32"] < 1e-4 and 1e-3 < missed < 1
    assert lost["bfloat16"] == pytest.approx(missed, rel=0.5)  # q is one of two weights
    assert "keeps it" in exporting.of_adapters(0.9) and "add nothing" in exporting.of_adapters(None)
    with pytest.raises(UserError, match="without --checkpoint the adapters are untrained"):
        exporting.main([*own[:2], "--adapter", "--out", str(tmp_path / "no")])


def test_an_adapter_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="holds an adapter, not a model"):
        run(tmp_path, tmp_path / "out")


@pytest.mark.slow
def test_all_weights_train_without_lora(model, tmp_path):
    rows = run(model, tmp_path / "out", **{"policy.lora": None, "steps": 1,
                                           "policy.thinking": "off"})
    assert rows[0]["grad_norm"] > 0
    exporting.main([*arguments(model, **{"policy.lora": None, "policy.thinking": "off",
                                         "steps": 1}),
                    "--checkpoint", str(tmp_path / "out"), "--out", str(tmp_path / "hf")])
    before, after = load(model)[1], load(tmp_path / "hf")[1]
    assert jax.tree.map(lambda x: x.dtype, before) == jax.tree.map(lambda x: x.dtype, after)
    assert all((np.asarray(a) != np.asarray(b)).any() for a, b in
               zip(jax.tree.leaves(before["layers"]), jax.tree.leaves(after["layers"])))


# ---------------------------------------------------------------- as the writer of its variants

# An untrained model writes nonsense; what counts is what becomes of that.
WRITES = {"steps": 3, "admit_every": 1, "synthesis.writer": "policy", "writing.max_new": 8,
          "synthesis.endpoint.tries": 1, "synthesis.max_rewrites": 0, "boundary.alpha_minus": 0.01,
          "curriculum": {"stages": ({"steps": None, "reward": "format", "synthesis": True},)}}
USELESS = {"not_json", "wrong_shape", "empty_content", "truncated"}  # somebody answered


def outcomes(out):
    return [outcome_from_json(json.loads(line)["outcome"])
            for line in (out / FOLDER / OUTCOMES).read_text().splitlines()]


def header(out):
    return json.loads((out / FOLDER / HEADER).read_text())["config"]


def assert_trained(rows):
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[0]["grad_norm"] > 0 and all(row["drifts"] == 0 for row in rows)
    assert not rows[1]["compiled"]  # writing needs no program of its own


def test_nonsense_falls_back_to_the_template(model, tmp_path):
    out = tmp_path / "out"
    rows = run(model, out, **WRITES)
    told, made, endpoint = rows[-1]["synthesis"], outcomes(out), header(out)["endpoint"]
    assert_trained(rows)
    assert made and {o.writer for o in made} == {"template"}
    assert all(o.fell_back in USELESS and o.usage.prompt_tokens > 500 for o in made)
    assert told["fallbacks"] == told["requests"] == sum(told["failures"].values()) == len(made)
    assert told["outages"] == 0 and told["writing_s"] > 0 and rows[-1]["born"] > 0
    assert endpoint["model"] == "policy" and endpoint["base_url"].startswith("http://127.0.0.1:")
    assert (endpoint["max_tokens"], endpoint["concurrency"], endpoint["timeout_s"]) == (8, 8, 600)


@pytest.mark.slow
def test_a_policy_that_writes_good_texts_is_trained_on_them(model, tmp_path, monkeypatch):
    """From the engine's place, where the templates' texts of a first run stand in for those of
    a good model, to the rows of the pool and into the rollouts."""
    texts, by_template = {}, TemplateWriter.write

    def key(messages):
        return json.dumps([dict(message) for message in messages])

    def recorded(self, story, rng, feedback):
        written = by_template(self, story, rng, feedback)
        texts[key(writer_messages(story, feedback))] = written.texts
        return written

    def write(self, params, asked, rng):
        assert "layers" in params
        return [Text(json.dumps({"turns": texts[key(each.messages)]}), True) for each in asked]

    monkeypatch.setattr(TemplateWriter, "write", recorded)
    plain = {name: value for name, value in WRITES.items()
             if not name.startswith(("writing.", "synthesis.endpoint", "synthesis.writer"))}
    run(model, tmp_path / "template", **plain)
    monkeypatch.setattr(Writing, "write", write)
    rows = run(model, tmp_path / "policy", **WRITES)
    made, told = outcomes(tmp_path / "policy"), rows[-1]["synthesis"]
    assert {o.writer for o in made} == {"policy"} and not told["failures"]
    assert rows[-1]["born"] == sum(isinstance(o, Candidate) for o in made)
    assert rows[-1]["admitted"] > 0 and any(row["drawn_generated"] for row in rows)
    assert all(row["drifts"] == row["env_errors"] == 0 for row in rows)


@pytest.mark.slow
def test_what_does_not_fit_is_rejected_and_a_resumed_run_serves_again(model, tmp_path,
                                                                      monkeypatch):
    """Without waiting, without a template to fall back to, and in a process."""
    out, answer, calls = tmp_path / "out", PolicyEndpoint.answer, []

    def patient(self, write, most):
        """Waits until the process that was started at step 0 has asked, and has its answer."""
        calls.append(most)
        if len(calls) == 2:
            until(lambda: self.waiting)
        elif len(calls) == 3:
            until(lambda: outcomes(out))
        return answer(self, write, most)

    monkeypatch.setattr(PolicyEndpoint, "answer", patient)
    sets = WRITES | {"synthesizer.wait": False, "synthesizer.host": "process",
                   "synthesis.on_outage": "go_on", "writing.max_new": 1800}
    run(model, out, **sets)
    before = header(out)["endpoint"]
    rows = run(model, out, "--resume", **sets | {"steps": 4})
    assert_trained(rows[:3])
    assert {(o.stage.value, o.reason, o.writer) for o in outcomes(out)} == {
        ("write", "prompt_too_long", "")}
    assert rows[-1]["born"] == 0 and rows[-1]["synthesis"]["outages"] == 0
    after = header(out)["endpoint"]
    assert after != before and after | {"base_url": ""} == before | {"base_url": ""}


# ---------------------------------------------------------------- what is no policy


@pytest.mark.parametrize("sets, words", [
    ({"policy.path": ""}, "do not go together"),
    ({"policy.path": "nowhere"}, "policy.path nowhere is no folder: .*hf download"),
    ({"policy.source": "compact", "policy.path": ""}, "lora needs weights"),
    ({"policy.lora": {"targets": "lm_head"}}, "lm_head"),
    ({"policy.shots": 3}, "shots has no effect with source hf and chat model"),
    ({"policy.chat": "hermes", "policy.system": "Be kind."}, "system has no effect"),
    ({"policy.source": "smollm2", "policy.path": "", "policy.wire": "hermes"},
     "wire has no effect with source smollm2"),
])
def test_wrong_policies_are_named(model, tmp_path, sets, words):
    with pytest.raises(ValueError, match=words):
        run(model, tmp_path / "out", **sets)
