"""experiments.tasks: every command on real suites, and every mistake as one line."""

import importlib.util
import json
import runpy
import sys

import pytest

from experiments import tasks as cli
from rods_jax.tasks.api_graph import ApiGraph, api_graph
from rods_jax.tasks.jsonl import read_tasks, read_tools, write_tasks
from rods_jax.tasks.profile import Profile, profile
from rods_jax.tasks.tfds_builder import load_tasks
from rods_jax.tools import bfcl_data
from rods_jax.tools.toolbox import ToolboxSuite
from rods_jax.types import Task

SUITE = ToolboxSuite()

COUNTER = '''
import random

from rods_jax.tools.classes import ClassSuite
from rods_jax.types import Category, Task, ToolCall, Turn


class Counter:
    def __init__(self, n: int = 0):
        self.n = n

    def add(self, by: int) -> int:
        """Count up."""
        self.n += by
        return self.n

    def roll(self) -> str:
        """Roll a die."""
        self.n = random.random()
        return "rolled"


def make_suite(**options):
    def task(i, *gold):
        return Task(f"c{i}", ("counter",), Category.BASE, {"counter": {"n": i}}, (
            Turn("Count two up.", gold, ("add", "roll")),), f"c{i}")
    return ClassSuite("counter", {"counter": Counter}, {
        "train": [task(1, ToolCall("add", {"by": 2}))], "held_in": [task(2, ToolCall("roll", {}))],
        "broken": [task(3, ToolCall("add", {"by": "2"}))]}, **options)


def nothing():
    pass
'''


@pytest.fixture
def counter(tmp_path, monkeypatch):
    """A module of a name of its own on the path; the factory's name."""
    name = f"counter_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(COUNTER)
    monkeypatch.syspath_prepend(str(tmp_path))
    return f"{name}:make_suite"


@pytest.fixture
def run(capsys):
    """Exit code and JSON of a command."""
    def run(*arguments):
        code = cli.main([*map(str, arguments), "--json", "-"])
        out = capsys.readouterr().out
        assert out.count("\n") == 1
        return code, json.loads(out)
    return run


@pytest.fixture
def text(capsys):
    """What a command prints for people."""
    def text(*arguments):
        cli.main([*map(str, arguments)])
        return capsys.readouterr().out
    return text


def failing(monkeypatch, capsys, *arguments):
    """Exit code and error output of the real command line."""
    monkeypatch.setattr(sys, "argv", ["tasks", *map(str, arguments)])
    monkeypatch.delitem(sys.modules, "experiments.tasks", raising=False)
    with pytest.raises(SystemExit) as end:
        runpy.run_module("experiments.tasks", run_name="__main__")
    return end.value.code, capsys.readouterr().err


# ------------------------------------------------------------------- list


def test_list_of_the_toolbox(run, text):
    code, found = run("list")
    assert code == 0 and list(found["splits"]) == ["held_in", "new_structures", "train", "warm"]
    for name, row in found["splits"].items():
        tasks = SUITE.split(name)
        assert row["tasks"] == len(tasks) == sum(row["categories"].values())
        assert row["categories"]["miss_func"] == sum(t.category == "miss_func" for t in tasks)
        assert row["suspects"] == 0
    assert found["crossing"] == {"own": {"held_in": 0.0, "new_structures": 0.0}}
    assert "0.0% of held_in have a sibling in train\n" in text("list")


def test_list_of_bfcl_compares_both_split_rules(run, text):
    pytest.importorskip("bfcl_eval")
    code, found = run("--suite", "bfcl", "list")
    assert code == 0 and found["crossing"]["grouped"] == {"held_in": 0.0}
    # Independent halves of each category: a held-in task's three siblings are all held in too
    # with chance 1/8, and a few training tasks are left out as suspect.
    assert 0.8 < found["crossing"]["paper"]["held_in"] < 0.93
    assert found["splits"]["train"]["suspects"] == 0 < found["splits"]["held_in"]["suspects"]
    assert found["splits"]["held_in"]["categories"] == dict.fromkeys(
        ("base", "miss_func", "miss_param", "long_context"), 100)
    _, other = run("list", "--suite", "bfcl", "--split-rule", "paper", "--split-seed", "5")
    assert other["crossing"]["paper"] != found["crossing"]["paper"]
    assert "have a sibling in train where the split rule is paper" in text(
        "list", "--suite", "bfcl")


# ------------------------------------------------------------------- show, graph


def test_show_is_the_task_with_its_results_and_profile(run, text):
    task = SUITE.split("train")[1]
    code, found = run("show", task.uid)
    assert code == 0 and Task.from_json(found["task"]) == task
    assert found["progress"] == 1.0
    assert len(found["results"]) == sum(len(turn.gold) for turn in task.turns)
    assert Profile.from_json(found["profile"]) == profile(task, SUITE)
    said = text("show", task.uid)
    for turn in task.turns:
        assert turn.user in said
        assert all(cli.call_text(call) in said for call in turn.gold)
    assert found["results"][0][:40] in said and str(profile(task, SUITE)) in said


def test_show_finds_tasks_of_a_file_and_of_no_split(run, tmp_path):
    pytest.importorskip("bfcl_eval")
    write_tasks(tmp_path / "some.jsonl", SUITE.split("warm")[:2])
    code, found = run("show", SUITE.split("warm")[0].uid, "--tasks", tmp_path / "some.jsonl")
    assert code == 0 and found["progress"] == 1.0
    _, suspect = run("show", "--suite", "bfcl", "multi_turn_base_4")  # in no training split
    assert suspect["unsaid"]


def test_graph_is_that_of_the_split(run, text):
    code, found = run("graph", "messaging", "--split", "warm", "--gates")
    whole = api_graph(SUITE.split("warm"), SUITE, gates=True)
    assert code == 0 and ApiGraph.from_json(found) == whole.of_domain("messaging")
    assert text("graph", "--split", "warm").strip() == str(api_graph(SUITE.split("warm"), SUITE))


# ------------------------------------------------------------------- check


def test_check_of_sound_tasks(run, text, tmp_path):
    code, found = run("check")
    assert (code, found["tasks"], found["sound"], found["tools"]) == (0, 1150, 1150, 33)
    assert found["faults"] == found["errors"] == found["remarks"] == []
    write_tasks(tmp_path / "some.jsonl", SUITE.split("held_in")[:5])
    said = text("check", "--tasks", tmp_path / "some.jsonl")
    assert said.startswith("5 tasks, 33 tools: the gold of 5 scores 1\n")


def test_check_reports_what_is_wrong_with_ones_own_tasks(run, text, counter):
    code, found = run("check", "--suite", "custom", "--factory", counter)
    assert (code, found["tasks"], found["sound"]) == (1, 3, 2)
    assert list(found["unsound"]) == ["c2"]
    assert "draw no random numbers" in found["unsound"]["c2"]["reason"]
    assert found["faults"] == ["task c3, turns[0].gold[0]: add: argument 'by' must be of type "
                               "integer; correct the call or the tool's parameters"]
    assert found["errors"] == ["task c3: add: Error: add: argument 'by' must be of type integer"]
    assert found["remarks"] == []
    assert "gold does not score 1: 1\n  task c2: 0.00, turn 0" in text(
        "check", "--suite", "custom", "--factory", counter)


def test_check_of_bfcl_is_sound_with_known_remarks(run):
    pytest.importorskip("bfcl_eval")
    code, found = run("--suite", "bfcl", "check")
    assert (code, found["tasks"], found["sound"]) == (0, 800, 800)
    assert len(found["remarks"]) == 4 and all("close_ticket" in r for r in found["remarks"])
    assert "multi_turn_base_4" in found["suspects"]
    assert set(found["suspects"]) <= set(found["unsourced"])


def test_check_against_other_tools(run, tmp_path):
    run("export", "--split", "warm", "--tools", tmp_path / "tools.jsonl")
    lines = (tmp_path / "tools.jsonl").read_text().splitlines()
    rows = [line for line in lines if json.loads(line)["name"] != "open_folder"]
    (tmp_path / "tools.jsonl").write_text("\n".join(rows))
    code, found = run("check", "--tools", tmp_path / "tools.jsonl")
    assert code == 1 and found["sound"] == 1150 and found["tools"] == 32
    assert any("'open_folder' is not a declared tool" in line for line in found["faults"])


# ------------------------------------------------------------------- export


def test_export_round_trips(run, tmp_path):
    out, tools = tmp_path / "new" / "warm.jsonl", tmp_path / "tools.jsonl"
    code, found = run("export", "--split", "warm", "--out", out, "--tools", tools,
                      "--tfds", tmp_path / "data")
    assert code == 0 and found == {"splits": {"warm": 150}, "out": str(out), "tools": str(tools),
                                   "tfds": str(tmp_path / "data")}
    assert tuple(read_tasks(out)) == SUITE.split("warm")
    assert tuple(load_tasks(tmp_path / "data", "toolbox", "warm")) == SUITE.split("warm")
    assert tuple(read_tools(tools)) == SUITE.tools(SUITE.domains)


def test_export_of_several_splits_is_one_data_set(run, tmp_path):
    run("export", "--split", "train", "--split", "held_in", "--tfds", tmp_path)
    for name in ("train", "held_in"):
        assert tuple(load_tasks(tmp_path, "toolbox", name)) == SUITE.split(name)


# ------------------------------------------------------------------- mistakes


@pytest.mark.parametrize("arguments, needle", [
    (("show", "toolbox-trian-0001"), "no task 'toolbox-trian-0001': 1150 are known, such as"),
    (("graph", "cooking"), "unknown domain 'cooking': the tasks use"),
    (("graph", "--split", "tests"), "unknown split 'tests'"),
    (("check", "--tasks", "/nowhere.jsonl"), "/nowhere.jsonl: No such file"),
    (("export", "--split", "warm"), "nothing to write: give --out FILE.jsonl, --tfds DIR or"),
    (("export", "--split", "train", "--split", "warm", "--out", "x.jsonl"),
     "--out takes one split"),
    (("export", "--split", "warm", "--out", "."), "is a folder; give the name of a file"),
    (("list", "--json", "."), "is a folder; give the name of a file"),
    (("list", "--split-seed", "3"), "split_seed is of suite bfcl only"),
    (("list", "--split-rule", "paper"), "split paper is of suite bfcl only"),
    (("--suite", "custom", "list"), "give both or neither"),
    (("--suite", "custom", "--factory", "no_such_thing:x", "list"), "cannot be imported"),
])
def test_a_mistake_is_one_line(monkeypatch, capsys, arguments, needle):
    code, err = failing(monkeypatch, capsys, *arguments)
    assert code == 2 and needle in err
    assert err.startswith("error: ") and err.count("\n") == 1


def test_a_factory_that_makes_no_suite(monkeypatch, capsys, counter):
    module = counter.partition(":")[0]
    code, err = failing(monkeypatch, capsys, "--suite", "custom", "--factory", f"{module}:nothing",
                        "list")
    assert code == 2 and f"{module}:nothing' returned a NoneType: return a suite" in err
    code, err = failing(monkeypatch, capsys, "--suite", "custom", "--factory", f"{module}:make",
                        "list")
    assert code == 2 and "has no attribute 'make'" in err and err.count("\n") == 1


def test_bfcl_without_its_package(monkeypatch, capsys):
    bfcl_data.load_tasks.cache_clear()
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: (
        None if name.split(".")[0] == "bfcl_eval" else found(name, *more)))
    code, err = failing(monkeypatch, capsys, "--suite", "bfcl", "list")
    assert code == 2 and "pip install --no-deps bfcl-eval" in err and err.count("\n") == 1


def test_a_failed_check_exits_with_1(monkeypatch, capsys, counter):
    code, err = failing(monkeypatch, capsys, "--suite", "custom", "--factory", counter, "check")
    assert (code, err) == (1, "")
