"""The page on a tool domain of one's own, done as it says: its files, its commands."""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from rods_jax.tasks.jsonl import read_tasks, read_tools
from rods_jax.tasks.tfds_builder import load_tasks

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "new_domain.md").read_text(encoding="utf-8")

FILES = {name: text for name, text in re.findall(
    r"^`([\w.]+)`\n\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)}
DOMAIN = ("my_notes.py", "held_in.jsonl")  # the domain itself: class, tasks, factory
COMMANDS = [line for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
            for line in block.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("domain")
    for name, text in FILES.items():
        (made / name).write_text(text, encoding="utf-8")
    return made


def run(folder, *arguments):
    environment = {**os.environ, "PYTHONPATH": f".{os.pathsep}{ROOT}", "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=folder, env=environment,
                          capture_output=True, text=True, timeout=120)


def command(folder, word, *more):
    """The page's command with that word, run in the folder; its JSON."""
    (line,) = [line for line in COMMANDS if word in shlex.split(line)]
    program, *arguments = shlex.split(line)
    assert program == "python"
    done = run(folder, *arguments, *more, "--json", "-")
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def test_the_domain_is_small():
    lines = sum(len(FILES[name].splitlines()) for name in DOMAIN)
    assert 30 < lines < 60
    assert all(len(line) <= 100 for name, text in FILES.items() if name.endswith(".py")
               for line in text.splitlines())


def test_every_gold_scores_1_and_the_splits_are_seen(folder):
    code, found = command(folder, "check")
    assert (code, found["tasks"], found["sound"]) == (0, 8, 8)
    assert found["faults"] == found["errors"] == [] and not found["suspects"]
    _, found = command(folder, "list")
    assert {name: row["tasks"] for name, row in found["splits"].items()} == {
        "train": 6, "held_in": 2}
    assert found["splits"]["held_in"]["categories"]["miss_func"] == 1
    assert found["crossing"] == {"own": {"held_in": 0.0}}
    _, found = command(folder, "show")
    assert found["progress"] == 1.0 and found["results"] == ['{"id": "7"}', "pinned"]


def test_the_graph_is_the_true_one(folder):
    _, found = command(folder, "graph")
    assert found["edges"] == [{"producer": "find_note", "path": "id", "consumer": "pin_note",
                               "argument": "id", "count": 6}]


def test_what_is_exported_comes_back(folder):
    code, found = command(folder, "export")
    assert code == 0 and found["splits"] == {"train": 6}
    tasks = read_tasks(folder / "train.jsonl")
    assert load_tasks(folder / "data", "my_notes", "train") == tasks
    assert [task.uid for task in tasks] == [f"train-{100 * i}" for i in range(1, 7)]
    tools = read_tools(folder / "tools.jsonl")
    assert [tool.name for tool in tools] == ["add_note", "find_note", "pin_note"]
    # The files do as well as the lists did.
    own = ("ClassSuite('my_notes', {'notes': Notes}, {'train': 'train.jsonl'}, "
           "tools='tools.jsonl', held_out=(), **options)")
    (folder / "from_files.py").write_text(
        "from my_notes import ClassSuite, Notes\n\n\n"
        f"def make_suite(**options):\n    return {own}\n")
    done = run(folder, "-m", "experiments.tasks", "--suite", "custom", "--factory",
               "from_files:make_suite", "check")
    assert done.returncode == 0 and "6 tasks, 3 tools: the gold of 6 scores 1" in done.stdout


def test_the_damaged_transcript_scores_as_the_page_says(folder):
    done = run(folder, "score.py")
    (said,) = re.findall(r"`python score.py` prints `([^`]+)`", PAGE)
    assert (done.stdout.strip(), done.stderr) == (said, "") and said == "1.0 0.5"


@pytest.mark.parametrize("old, new, needle", [
    ('"pin_note", "arguments": {"id": "41"}', '"pin_note", "arguments": {"id": "43"}',
     "task held-0: pin_note: Error: there is no note 43"),
    ('"arguments": {"id": "41"}', '"arguments": {"ID": "41"}', "unknown argument 'ID', known: id"),
    ('"gold": [], "tools": ["add_note", "find_note"]', '"gold": [], "tools": ["find"]',
     "'find' is not a declared tool; did you mean 'find_note'?"),
])
def test_a_damaged_task_is_found(folder, tmp_path, old, new, needle):
    assert old in FILES["held_in.jsonl"]
    (tmp_path / "bad.jsonl").write_text(FILES["held_in.jsonl"].replace(old, new))
    code, found = command(folder, "check", "--tasks", tmp_path / "bad.jsonl")
    assert code == 1
    assert any(needle in line for line in found["errors"] + found["faults"])


def test_a_line_that_is_no_task_is_one_clear_line(folder, tmp_path):
    (tmp_path / "bad.jsonl").write_text(FILES["held_in.jsonl"].replace('"uid"', '"id"', 1))
    done = run(folder, "-m", "experiments.tasks", "--suite", "custom", "--factory",
               "my_notes:make_suite", "check", "--tasks", tmp_path / "bad.jsonl")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "bad.jsonl, line 1: task has an unknown field 'id'" in done.stderr


def test_the_training_config_is_one(folder):
    (line,) = [line for line in COMMANDS if "experiments.train" in line]
    config = line.split("--config ")[1].split()[0]
    done = run(folder, "-c", f"""
from rods_jax.config import load
from rods_jax.run_config import RunConfig
from rods_jax.tools.suites import make_suite
config = load({config!r}, [], RunConfig)
suite = make_suite(config.tasks.spec())
for name, wanted in (("train", config.tasks.seeds), ("held_in", config.tasks.held_in)):
    assert len(suite.split(name)) == wanted, name
print(suite.name, config.synthesis_on, config.policy.source.value)
""")
    assert done.stdout.split() == ["my_notes", "False", "smollm2"], done.stderr
