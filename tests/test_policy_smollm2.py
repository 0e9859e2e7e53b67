"""The SmolLM2 config on real BFCL tasks, whole way, with a policy of a few hundred weights."""

import json
import pathlib

import pytest
from policy_cases import biased_params, call, small_model, small_tokenizer

from experiments import train as command
from rods_jax import metrics
from rods_jax.models import gguf
from rods_jax.text import tokenizer
from rods_jax.text.hermes import signature
from rods_jax.tools import bfcl_sandbox
from rods_jax.tools.bfcl import BFCLSuite
from rods_jax.types import Source, Task

CONFIG = pathlib.Path(__file__).resolve().parents[1] / "configs" / "bfcl_smollm2.py"
GOOD, BAD = call("ls"), call("cd", folder="nowhere")


def words():
    suite = BFCLSuite(domains=("GorillaFileSystem",))
    return ([signature(spec) for spec in suite.tools(suite.domains)]
            + [turn.user for task in suite.split("train") for turn in task.turns])


TOKENIZER = small_tokenizer(words(), (GOOD, BAD))
MODEL = small_model(TOKENIZER)
LIKELY = {"<|im_end|>": 6.0, GOOD: 6.0, BAD: 5.0}
SIZES = {"tasks.domains": ("GorillaFileSystem",), "tasks.seeds": 4, "tasks.held_in": 1,
         "tasks_per_step": 4, "group_size": 4, "sampler.slots": 16, "sampler.max_new": 4,
         "sampler.prompt_len": 1024, "sampler.max_len": 1280,
         "engine.max_steps": 2, "boundary.alpha_minus": 0.1, "synthesis.variants_per_seed": 2}


def trained(folder, **more):
    """(folder of a run, its summary, what it printed, tool calls that ran in this process)."""
    called = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "smollm2_path", lambda: "tiny.gguf")
        patch.setattr(gguf, "load_gguf", lambda path: (MODEL, biased_params(MODEL, TOKENIZER, LIKELY)))
        patch.setattr(tokenizer, "tokenizer_from_gguf", lambda path: TOKENIZER)
        call = bfcl_sandbox.Sandbox.call
        patch.setattr(bfcl_sandbox.Sandbox, "call",
                      lambda self, what: called.append(what.name) or call(self, what))
        sets = [part for name, value in (SIZES | more).items()
                for part in ("--set", f"{name}={value!r}")]
        shown = []
        patch.setattr("builtins.print", lambda *words, **_: shown.append(" ".join(map(str, words))))
        command.main(["--config", str(CONFIG), "--out", str(folder), "--cache", str(folder), *sets])
    return folder, json.loads((folder / "summary.json").read_text()), shown, called


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("smollm2") / "run", **{"workers.count": 0})


@pytest.mark.slow
def test_workers_hints_and_the_papers_split(run, tmp_path):
    """The same tools in worker processes; hints change what is said, and no score of a step."""
    plain = metrics.read(run[0] / "metrics.jsonl")[0]
    folder, _, shown, called = trained(tmp_path / "workers", steps=1)
    row, = metrics.read(folder / "metrics.jsonl")
    same = ("reward_mean", "progress_mean", "format_mean", "zone_boundary", "grad_norm", "ends")
    assert {name: row[name] for name in same} == {name: plain[name] for name in same}
    assert row["tool_crashes"] == row["workers_replaced"] == row["env_errors"] == 0
    folder, _, shown, called = trained(
        tmp_path / "paper", steps=1, synthesis_on=False, **{
            "tasks.split": "paper", "tasks.held_in": 16, "tasks.seeds": 16, "tasks.hints": True,
            "pool.capacity": 48})
    assert not called  # all tools ran in workers, and nothing was planned
    line, = (text for text in shown if text.startswith("split paper: "))
    assert 0 < int(line.split()[2].rstrip("%")) <= 100
    row, = metrics.read(folder / "metrics.jsonl")
    assert row["env_errors"] == 0 and 0 < row["format_mean"] < 1


@pytest.mark.slow
def test_tools_ran_and_the_format_reward_trained(run):
    folder, summary, shown, called = run
    rows = metrics.read(folder / "metrics.jsonl")
    assert len(rows) == 2 and {"ls", "cd"} <= set(called)
    assert summary["reward_trained"] == ["format"]
    for row, step in zip(rows, ("first_step", "last_step")):
        assert row["reward_mean"] == pytest.approx(row["format_mean"])
        assert 0 < row["format_mean"] < 1 and row["dead_share"] < 1 and row["grad_norm"] > 0
        assert row["env_errors"] == row["drifts"] == 0
        assert summary[step]["progress_mean"] == row["progress_mean"]
    assert shown[-1].startswith("trained by the reward format")
    assert f"format {rows[0]['format_mean']:.3f} -> {rows[1]['format_mean']:.3f}" in shown[-1]
    assert f"progress {rows[0]['progress_mean']:.3f}" in shown[-1]


@pytest.mark.slow
def test_variants_of_boundary_seeds_enter_the_pool(run):
    folder, summary, _, _ = run
    rows = metrics.read(folder / "metrics.jsonl")
    assert rows[0]["zone_boundary"] > 0 and rows[0]["admitted"] == 0
    assert 1 <= rows[1]["admitted"] <= rows[1]["born"]
    assert rows[1]["admitted"] == rows[1]["pool_generated"] + rows[1]["retired"]
    assert summary["admitted"] == rows[1]["admitted"]
    (host,) = (folder / "checkpoints").glob("*/host.json")
    table = json.loads(host.read_text())["table"]
    variants = [Task.from_json(row) for _, row in table["generated"]]
    assert len(variants) == rows[1]["admitted"]
    assert all(v.source is Source.GENERATED and v.domains == ("GorillaFileSystem",)
               for v in variants)
