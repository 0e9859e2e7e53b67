"""The figures of docs/synthesis.md, made small: they are counted, not claimed."""

import dataclasses
import json

import pytest

from experiments import synthesis_study
from experiments.docs_block import marks
from rods_jax.tools.suites import SuiteName, SuiteSpec, make_suite
from synthesis_variants import SUITES, score, suite_of, variants, with_turn


def test_a_call_that_is_not_needed_and_gold_that_fails_are_counted():
    suite = suite_of("toolbox")
    tasks = [task for task, _ in variants("toolbox", count=6)]
    calls = sum(len(turn.gold) for task in tasks for turn in task.turns)
    assert synthesis_study._played(suite, tasks) == (0, 0, calls)
    looked = [with_turn(task, len(task.turns) - 1, gold=(*task.turns[-1].gold, call))
              for task in tasks for turn in task.turns[:-1] for call in turn.gold]
    last = [sum(len(turn.gold) for turn in task.turns) - 1 for task in looked]
    idle = [task for task, i in zip(looked, last)  # a look-up made twice
            if score(suite, task) == score(suite, task, drop=i) == 1.0]
    assert idle and synthesis_study._played(suite, idle)[:2] == (0, len(idle))
    hidden = with_turn(tasks[0], 0, tools=())
    assert tasks[0].turns[0].gold and synthesis_study._played(suite, [hidden])[0] == 1


def test_leaks_are_found_in_every_form():
    suite = make_suite(SuiteSpec(SuiteName.TOOLBOX))
    held = suite.split("held_in")[:5]
    found = synthesis_study._leaks(suite, [*held, suite.split("train")[7]])
    assert found["sibling"] == found["content"] == found["text"] == 5
    assert synthesis_study._leaks(suite, [
        dataclasses.replace(held[0], scenario=f"{held[0].scenario}~1.0")])["sibling"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", SUITES)
def test_the_lines_hold_on_a_small_run(name, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("\n".join(marks("synthesis_study")))
    command = ["--suites", name, "--count", "200", "--leakage", "300", "--workers", "1", "--dir",
               str(tmp_path), "--out", str(page), "--json", str(tmp_path / "s.json")]
    synthesis_study.main(command)
    (row,) = json.loads((tmp_path / "s.json").read_text())["suites"]
    assert row["funnel"]["accepted"] == 200 and row["accepted_share"] >= 0.6
    assert row["exact"] >= 0.9 and row["gold_fails"] == row["idle_calls"] == 0
    assert row["n_leaks"] == 300 and not any(row["leaks"].values())
    assert row["calls"] > 400 and sum(n > 0 for n in row["functions"].values()) > 25
    first = page.read_text()
    assert "| critique |" in first and "Held-in leakage" in first
    synthesis_study.main(command)  # what was made is used again
    assert page.read_text() == first
