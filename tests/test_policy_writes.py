"""A training run whose policy is the writer of its own variants, whole way. The model is tiny and
untrained, so what it writes is nonsense: what counts is what becomes of that."""

import dataclasses
import json

import pytest
from kept_programs import kept_in
from loop_cases import tiny_config
from test_policy_hf import run, write_model

from rods_jax.config import to_json
from rods_jax.resume import check_config
from rods_jax.synthesis.exchange import FOLDER, HEADER
from rods_jax.synthesis.outcome import outcome_from_json
from rods_jax.synthesis.policy_endpoint import PolicyEndpoint
from test_synthesis_policy import until

SETS = {"steps": 3, "tasks_per_step": 2, "tasks.seeds": 4, "admit_every": 1,
        "synthesis.writer": "policy", "writing.max_new": 8, "synthesis.endpoint.tries": 1,
        "synthesis.max_rewrites": 0, "boundary.alpha_minus": 0.01,
        "curriculum": {"stages": ({"steps": None, "reward": "format", "synthesis": True},)}}
USELESS = {"not_json", "wrong_shape", "empty_content", "truncated"}  # somebody answered


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory):
    with kept_in(tmp_path_factory.mktemp("programs"), quick=True):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "tiny-qwen3")


def outcomes(out):
    return [outcome_from_json(json.loads(line)["outcome"])
            for line in (out / FOLDER / "outcomes.jsonl").read_text().splitlines()]


def header(out):
    return json.loads((out / FOLDER / HEADER).read_text())["config"]


def assert_trained(rows):
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[0]["grad_norm"] > 0 and all(row["drifts"] == 0 for row in rows)
    assert not rows[1]["compiled"]  # writing needs no program of its own


def test_nonsense_falls_back_to_the_template(model, tmp_path):
    out = tmp_path / "out"
    rows = run(model, out, **SETS)
    told, made, endpoint = rows[-1]["synthesis"], outcomes(out), header(out)["endpoint"]
    assert_trained(rows)
    assert made and {o.writer for o in made} == {"template"}
    assert all(o.fell_back in USELESS and o.usage.prompt_tokens > 500 for o in made)
    assert told["fallbacks"] == told["requests"] == sum(told["failures"].values()) == len(made)
    assert told["outages"] == 0 and told["writing_s"] > 0 and rows[-1]["born"] > 0
    assert endpoint["model"] == "policy" and endpoint["base_url"].startswith("http://127.0.0.1:")
    assert (endpoint["max_tokens"], endpoint["concurrency"], endpoint["timeout_s"]) == (8, 8, 600)


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
    sets = SETS | {"synthesizer.wait": False, "synthesizer.host": "process",
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


@pytest.mark.parametrize("changes, words", [
    ({}, "source compact has words for tools alone, .*policy.source to hf or smollm2"),
    ({"synthesizer": {"host": "elsewhere"}},
     "host is elsewhere, .*on this machine alone: .*vLLM and set synthesis.writer to llm"),
    ({"synthesis": {"writer": "policy", "endpoint": {"base_url": "http://localhost:8000/v1"}}},
     "endpoint.base_url has no effect with synthesis.writer policy.* leave it out"),
    ({"synthesis": {"writer": "policy", "endpoint": {"max_tokens": 64}}},
     "endpoint.max_tokens has no effect .*writing has length"),
    ({"synthesis": {}, "writing": {"max_new": 64}},
     "writing is set, but synthesis.writer is template: set it to policy"),
    ({"writing": {"max_new": 0}}, "writing.max_new is 0")])
def test_what_cannot_be_is_named_before_anything_is_loaded(changes, words):
    plain = {"warm_start": None, "synthesis": {"writer": "policy"}}
    if changes:
        plain["policy"] = {"source": "hf", "path": "model"}
    with pytest.raises(ValueError, match=words) as error:
        tiny_config(**plain | changes)
    assert "\n" not in str(error.value)


def test_how_it_writes_may_change_in_a_resumed_run(tmp_path):
    mine = tiny_config(warm_start=None, synthesis={"writer": "policy"},
                       policy={"source": "hf", "path": "model"})
    theirs = dataclasses.replace(mine, writing=dataclasses.replace(mine.writing, max_new=64))
    check_config(tmp_path, {"config": to_json(theirs)}, mine)
