"""The side-by-side bench of the tools: its figures, its clean slate, and wrong input."""

import copy
import decimal
import importlib.util
import json
import subprocess
import sys

import pytest

from experiments.bench import __main__ as cli
from experiments.bench import tools as bench
from rods_jax.config import UserError
from rods_jax.tools import bfcl_data
from rods_jax.tools.bfcl import BFCLSuite
from rods_jax.types import CATEGORIES


@pytest.fixture(scope="module")
def sides():
    return bench.official_suite(), bench.Package(), bench.entries()


@pytest.mark.slow
def test_one_run_from_the_command_line():
    done = subprocess.run(
        [sys.executable, "-m", "experiments.bench", "tools", "--repeats", "1", "--json", "-"],
        capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    seconds, rows = found["seconds"], found["per_category"]
    assert set(rows) == {c.value for c in CATEGORIES}
    assert found["tasks"] == sum(row["tasks"] for row in rows.values()) == 800
    for side in ("group", "first", "package"):
        assert seconds[side] == pytest.approx(sum(r["seconds"][side] for r in rows.values()))
    assert found["ratio_one_process"] == pytest.approx(seconds["package"] / seconds["group"])
    assert found["ratio_first"] == pytest.approx(seconds["package"] / seconds["first"])
    assert found["ratio_two_workers"] == pytest.approx(seconds["alone"] / seconds["two_workers"])
    assert found["tasks_per_s"] == pytest.approx(800 / seconds["group"])
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert set(found["shares"]) == {
        "set_up", "agent_calls", "gold_calls_and_comparison", "rest"}
    assert min(found["shares"].values()) > 0


def test_figures_are_medians_of_the_passes():
    flat = lambda value: dict.fromkeys((c.value for c in CATEGORIES), value)  # noqa: E731
    passes = [bench.Pass(flat(1.0), flat(1.5), flat(2.0)),
              bench.Pass(flat(2.0), flat(4.0), flat(6.0)),
              bench.Pass({**flat(9.0), "base": 4.0}, flat(2.0), flat(4.0))]
    found = bench.figures(passes, alone=[5.0, 1.0, 3.0], spread=[2.0, 1.0, 9.0])
    base = found["per_category"]["base"]
    assert base["seconds"] == {"group": 2.0, "first": 2.0, "package": 4.0}
    assert (base["ratio"], base["ratio_first"]) == (2.0, 2.0)
    assert base["ratio_range"] == [1.0, 3.0] and base["ratio_first_range"] == [2 / 1.5, 2.0]
    assert (base["tasks_per_s"], base["package_tasks_per_s"]) == (100.0, 50.0)
    assert found["seconds"] == {"group": 8.0, "first": 8.0, "package": 16.0, "alone": 3.0,
                                "two_workers": 2.0}
    assert (found["ratio_one_process"], found["ratio_two_workers"]) == (2.0, 1.5)
    assert found["ratio_range"] == [16 / 31, 3.0]
    table = bench.tools_table({**found, "repeats": 3, "parse_seconds": 0.1,
                               "shares": {"set_up": 0.25, "agent_calls": 0.75}})
    assert "agent calls 75 %, set up 25 %" in table and "400 rollouts/s, 1.50 times" in table
    assert [line.split()[0] for line in table.splitlines()[2:7]] == [
        *(c.value for c in CATEGORIES), "all"]


def test_the_package_starts_every_task_clean(sides):
    suite, package, rows = sides
    module = bfcl_data.tool_module("TravelAPI")
    mp = bfcl_data.tool_module("MathAPI").mpmath.mp
    post_tweet = bfcl_data.tool_class("TwitterAPI").post_tweet
    weather = bfcl_data.tool_module("VehicleControlAPI").LONG_WEATHER_EXTENSION
    saved = copy.deepcopy([module.CREDIT_CARD_EXTENSION, weather])
    dps, precision = mp.dps, decimal.getcontext().prec
    uid = "multi_turn_base_0"
    assert package.check(rows[uid], [[calls] for calls in rows[uid].gold])
    assert any(name.endswith("_instance") for name in vars(package.utils))
    next(iter(module.CREDIT_CARD_EXTENSION.values()))["balance"] = -1
    weather["outsideTemperature"] = 0.0
    post_tweet.__defaults__[1].append("@leak")
    mp.dps, decimal.getcontext().prec = 7, 7
    package.clean()
    assert not any(name.endswith("_instance") for name in vars(package.utils))
    assert [module.CREDIT_CARD_EXTENSION, weather] == saved
    assert post_tweet.__defaults__ == ([], [])
    assert (mp.dps, decimal.getcontext().prec) == (dps, precision)


def test_both_sides_see_every_task_and_an_invalid_one_ends_the_run(sides, monkeypatch):
    suite, package, rows = sides
    tasks = [t for t in suite.tasks if t.scenario == "bfcl-3"]
    timed = bench.interleaved(package, rows, tasks)
    for side in (timed.group, timed.first, timed.package):
        assert set(side) == {c.value for c in CATEGORIES} and min(side.values()) > 0
    monkeypatch.setattr(bench, "one_step_a_turn", lambda task: [])
    with pytest.raises(UserError, match="gold calls of multi_turn_base_3 are not valid here"):
        bench.interleaved(package, rows, tasks)
    monkeypatch.undo()
    monkeypatch.setattr(package, "check", lambda entry, transcript: False)
    with pytest.raises(UserError, match="multi_turn_base_3 are not valid in bfcl-eval"):
        bench.interleaved(package, rows, tasks)


def test_wrong_input_is_one_line(monkeypatch, tmp_path):
    with pytest.raises(UserError, match="--repeats is 0: give at least 1"):
        cli.main(["tools", "--repeats", "0"])
    with pytest.raises(UserError, match="is a folder"):
        cli.main(["tools", "--json", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        cli.main([])
    assert end.value.code == 2
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: (
        None if name.split(".")[0] == "bfcl_eval" else found(name, *more)))
    bfcl_data.load_tasks.cache_clear()
    for make in (bench.Package, BFCLSuite):
        with pytest.raises(ValueError, match="pip install --no-deps bfcl-eval==") as error:
            make()
        assert "\n" not in str(error.value)


def test_jax_stays_out_of_the_workers():
    code = ("import sys, experiments.bench.__main__; "
            "assert not {'jax', 'bfcl_eval'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True)
