"""The same seed gives the same figures: the real quickstart, small, twice, in fresh processes
with fresh caches (the warm start is trained anew each time)."""

import json
import subprocess
import sys

import pytest

SMALL = ("steps=3", "tasks.held_in=24", "warm_start.passes=2", "eval.every=0")


def quickstart(folder):
    command = [sys.executable, "-m", "experiments.quickstart", "--out", str(folder / "run"),
               "--cache", str(folder / "cache")]
    for setting in SMALL:
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (folder / "run" / "curves.png").stat().st_size > 10_000
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary.pop("wall_s") > 0
    return summary


@pytest.mark.slow
def test_two_quickstarts_give_the_same_figures(tmp_path):
    first, second = (tmp_path / name for name in ("first", "second"))
    for folder in (first, second):
        folder.mkdir()
    summary = quickstart(first)
    assert summary["rods"]["rollouts"] == summary["static"]["rollouts"] == 3 * 16 * 16
    assert summary["rods"]["before"] == summary["static"]["before"]
    assert summary["static"]["synthesized"] == 0
    assert quickstart(second) == summary
