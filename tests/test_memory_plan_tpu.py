"""Runs on billions of weights, compiled by the TPU's own compiler, fit with a tenth to spare."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Qwen3-4B and Qwen2.5-7B; 32 tasks x 16 rollouts, prompts of 8,192 tokens and 4,096 behind them.
PLANS = (("qwen3_4b", "v6e:2x4"), ("qwen3_4b", "v5p:2x2x2", "--set", "rollout_tensor=1"),
         ("qwen3_4b_lora", "v5e:2x4"), ("qwen25_7b", "v5p:2x2x2"))

pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed; "
    "requirements-test.txt has the one for jax 0.10, which is what Python 3.11 gets")]


def command(config, topology, folder, *more):
    """(exit code, what was printed, JSON), of a process of its own: a TPU's compiler stays."""
    done = subprocess.run(
        [sys.executable, "-m", "experiments.memory_plan", "--config", f"configs/{config}.py",
         "--topology", topology, "--json", str(folder / "plan.json"), *more], cwd=ROOT, text=True,
        capture_output=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(
            [str(ROOT), os.environ.get("PYTHONPATH", "")])})
    assert done.returncode in (0, 1), done.stderr[-2000:]
    return done.returncode, done.stdout, json.loads((folder / "plan.json").read_text())


@pytest.mark.parametrize("run", PLANS, ids=lambda run: "-".join(run[:2]))
def test_it_fits(run, tmp_path):
    config, topology, *sets = run
    code, shown, found = command(config, topology, tmp_path, *sets)
    assert code == 0 and found["fits"] and found["free_fraction"] >= 0.1, shown
    assert found["devices"] == 8
    assert {name.partition("_")[0] for name in found["programs"]} == {
        "publish", "prefill", "extend", "wave", "update"}
    # The state is donated: what the update gives back takes the place of what it took.
    assert found["programs"]["update"]["outputs"] < 1e6
    # So are pages: no rollout's program has them twice.
    assert all(program["outputs"] < 1e6 for name, program in found["programs"].items()
               if name.startswith(("prefill", "extend", "wave")))


def test_a_model_too_large_is_refused_with_the_figures(tmp_path):
    """All weights of Qwen3-4B on chips of 16 GB, with eight rows on each at a time."""
    code, shown, found = command("qwen3_4b", "v5e:2x4", tmp_path, "--set", "batch.rows=64")
    assert code == 1 and not found["fits"]
    update = found["programs"]["update"]
    assert "Ran out of memory" in update["refused"] and update["refused"] in shown
    assert update["asked"] > found["memory_bytes"] > 16e9
    assert found["peak_bytes"] >= update["asked"]
