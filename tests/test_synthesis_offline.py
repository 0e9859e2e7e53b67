import contextlib
import dataclasses
import json
import pathlib
import random
import signal
import subprocess
import sys

import pytest

from experiments import synthesize as entry
from rods_jax.config import UserError
from rods_jax.synthesis.journal import Journal
from rods_jax.synthesis.novelty import Known
from rods_jax.synthesis.offline import synthesize_many
from rods_jax.synthesis.outcome import Candidate, Funnel
from rods_jax.synthesis.pipeline import SynthesisConfig, make_maker
from rods_jax.tasks.jsonl import read_tasks, write_tasks
from rods_jax.tasks.leakage import HeldOutGuard
from rods_jax.tasks.profile import base_form, distance, profile
from rods_jax.tasks.replay import replay
from rods_jax.tools.toolbox import RequestedProfile, ToolboxSuite, generate
from rods_jax.types import CATEGORIES
from synthesis_cases import start
from test_synthesis_process import alive, until
from test_synthesis_suite import NotesSuite, notes_task

SUITE = ToolboxSuite()
HEADER = {"suite": "notes", "seed": 3}


def maker(suite=SUITE, run_seed=1):
    return make_maker(suite, SynthesisConfig(), HeldOutGuard(), run_seed)


@pytest.fixture(scope="module")
def seeds():
    rng = random.Random(0)
    return [generate(RequestedProfile(("files", "messaging"), (1, 2), depth, category), rng,
                     f"t-{category.value}-{depth}") for category in CATEGORIES for depth in (1, 2)]


# ---------------------------------------------------------------- the toolbox


def test_toolbox_profiles_have_the_depth_asked_for(seeds):
    for seed in seeds:
        measured = profile(seed, SUITE)
        assert measured.depth == int(seed.uid[-1])
        assert sum(measured.calls_per_turn) == 3 and measured.category is seed.category
        assert profile(base_form(seed), SUITE).calls_per_turn == (1, 2)


def test_toolbox_variants_are_sound_and_alike(seeds):
    outcomes = list(synthesize_many(seeds, 60, maker(), Known(seeds)))
    by_uid = {s.uid: s for s in seeds}
    tasks = [o.task for o in outcomes if isinstance(o, Candidate)]
    assert len(tasks) == 60 and len({t.content_hash for t in tasks}) == 60
    assert {t.category for t in tasks} == set(CATEGORIES)
    for task in tasks:
        assert replay(SUITE, task).progress == 1.0
        assert replay(SUITE, task, silent=True).progress < 1.0
        seed = by_uid[task.parent]
        assert task.category is seed.category
        assert distance(profile(base_form(task), SUITE), profile(base_form(seed), SUITE)) <= 0.2


def test_thread_and_batch_make_the_same_toolbox_variants(tmp_path, seeds):
    config = SynthesisConfig()
    with start(tmp_path, SUITE, run_seed=1) as synthesizer:
        for step in (0, 1):
            synthesizer.request(step, [(seed, 1) for seed in seeds])
        beside = synthesizer.collect(1, 60)
    batch = synthesize_many(seeds, 10 ** 6, maker(), max_attempts=2 * len(seeds))
    assert beside == [o for o in batch if isinstance(o, Candidate)]


# ---------------------------------------------------------------- the journal


def outcomes_of(count, done=()):
    return synthesize_many([notes_task(0), notes_task(1, "miss_func")], count,
                           maker(NotesSuite(["mute_once"]), 3), done=done)


@pytest.mark.parametrize("cut", [0, 1, 5, 40])
def test_torn_last_line_is_dropped(tmp_path, cut):
    path = tmp_path / "sub" / "j"
    whole = list(outcomes_of(8))
    with Journal(path, HEADER) as journal:
        for outcome in whole[:4]:
            journal.append(outcome)
    data = path.read_bytes()
    path.write_bytes(data[:len(data) - cut])
    with Journal(path, HEADER) as journal:
        assert journal.outcomes == whole[:4 if cut == 0 else 3]
        for outcome in outcomes_of(8, journal.outcomes):
            journal.append(outcome)
    with Journal(path, HEADER) as journal:
        assert journal.outcomes == whole


def test_journal_cut_inside_its_header_begins_anew(tmp_path):
    path = tmp_path / "j"
    path.write_bytes(b'{"suite": "no')
    with Journal(path, HEADER) as journal:
        assert journal.outcomes == []
    assert json.loads(path.read_text()) == HEADER


def test_journal_of_other_settings_or_damaged(tmp_path):
    path = tmp_path / "j"
    Journal(path, HEADER).close()
    with pytest.raises(ValueError, match=r"other settings \(seed was 3, now 4\)"):
        Journal(path, HEADER | {"seed": 4})
    with open(path, "a") as file:
        file.write('{"nonsense": 1}\n')
    with pytest.raises(ValueError, match="line 2: damaged"):
        Journal(path, HEADER)


# ---------------------------------------------------------------- the entry point


@pytest.fixture
def files(tmp_path, seeds):
    write_tasks(tmp_path / "seeds.jsonl", seeds)
    write_tasks(tmp_path / "held.jsonl", [dataclasses.replace(
        generate(RequestedProfile(("files",), (1, 1), 0), random.Random(9)), uid="held")])
    return tmp_path


def run_entry(monkeypatch, folder, *more):
    monkeypatch.setattr(sys, "argv", [
        "synthesize", "--seeds", str(folder / "seeds.jsonl"), "--held-in",
        str(folder / "held.jsonl"), "--out", str(folder / "out.jsonl"),
        "--json", str(folder / "result.json"), *more])
    entry.main()
    return json.loads((folder / "result.json").read_text())


def test_entry_point_resumes_and_extends(monkeypatch, files, seeds):
    result = run_entry(monkeypatch, files, "--count", "10")
    assert result["accepted"] == 10 and result["accepted_per_s"] > 0
    assert result["accepted_share"] == 10 / result["funnel"]["attempts"]
    first = read_tasks(files / "out.jsonl")
    journal = files / "out.jsonl.journal"
    journal.write_bytes(journal.read_bytes()[:-300])
    result = run_entry(monkeypatch, files, "--count", "20")
    tasks = read_tasks(files / "out.jsonl")
    assert tasks[:10] == first and len(tasks) == result["accepted"] == 20
    assert {t.parent for t in tasks} <= {s.uid for s in seeds}
    with pytest.raises(ValueError, match="other settings"):
        run_entry(monkeypatch, files, "--count", "20", "--seed", "1")


def test_entry_point_from_the_shell(files):
    command = [sys.executable, "-m", "experiments.synthesize", "--seeds",
               str(files / "seeds.jsonl"), "--held-in", str(files / "held.jsonl"), "--out",
               str(files / "out.jsonl"), "--json", "-", "--count"]
    done = subprocess.run([*command, "5"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert {"accepted", "accepted_share", "accepted_per_s", "funnel"} <= set(result)
    assert Funnel.from_json(result["funnel"]).accepted == 5
    done = subprocess.run([*command, "0"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: --count is 0: give at least 1\n"


# ---------------------------------------------------------------- signals


def processes_below(pid):
    """The direct children that still run."""
    below = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                below.append(int(folder.name))
    return below


@pytest.mark.skipif(not pathlib.Path("/proc").is_dir(), reason="no /proc")
@pytest.mark.parametrize("number, code, said", [
    (signal.SIGTERM, 143, "terminated: the same command goes on with what is in the journal\n"),
    (signal.SIGINT, 130, "interrupted\n"), (signal.SIGKILL, -9, "")])
def test_worker_processes_end_with_their_parent(files, number, code, said):
    out = files / "out.jsonl"
    with subprocess.Popen(
            [sys.executable, "-m", "experiments.synthesize", "--seeds", files / "seeds.jsonl",
             "--held-in", files / "held.jsonl", "--out", out, "--count", "100000",
             "--workers", "2"], stderr=subprocess.PIPE, text=True) as process:
        journal = files / "out.jsonl.journal"
        until(lambda: journal.exists() and journal.read_bytes().count(b"\n") > 1)
        below = processes_below(process.pid)
        process.send_signal(number)
        process.wait()
        until(lambda: not any(map(alive, below)))
        stderr = process.stderr.read()
    assert len(below) == 3 and process.returncode == code  # the workers and Python's own
    assert number == signal.SIGKILL or stderr.endswith(said) and "Traceback" not in stderr


def test_ctrl_c_while_modules_load_is_one_line(files):
    code = ("import os, runpy, signal, sys\n"
            "class Finder:\n"
            "    def find_spec(self, name, *rest):\n"
            "        if name == 'rods_jax.config': os.kill(os.getpid(), signal.SIGINT)\n"
            "sys.meta_path.insert(0, Finder())\n"
            "runpy.run_module('experiments.synthesize', run_name='__main__', alter_sys=True)")
    done = subprocess.run([sys.executable, "-c", code, "--out", files / "out.jsonl"],
                          capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize("more, said", [
    (("--suite", "toolbox", "--seeds", "notes.jsonl"), "is of notes, which suite toolbox has not"),
    (("--held-in", "notes.jsonl"), "is of notes, which suite toolbox has not"),
    (("--held-in", "empty.jsonl"), "holds no task"), (("--seeds", "empty.jsonl"), "holds no task"),
    (("--seeds", "."), "is a folder; give a file"), (("--out", "-"), "--out is -: .* its name"),
    (("--writer", "llm", "--model", "m", "--base-url", "http://a/v1", "--set",
      "base_url=http://b/v1"), "base_url=http://b/v1 contradicts 'http://a/v1'")])
def test_mistakes_are_one_line(monkeypatch, files, more, said):
    write_tasks(files / "notes.jsonl", [notes_task()])
    (files / "empty.jsonl").write_text("")
    monkeypatch.chdir(files)
    with pytest.raises(UserError, match=said) as error:
        run_entry(monkeypatch, files, *more)
    assert "\n" not in str(error.value) and not list(files.glob("*.journal"))


def test_no_accepted_task_is_no_success(monkeypatch, files, capsys):
    monkeypatch.setattr(entry, "HeldOutGuard", lambda held_in: HeldOutGuard(
        [*held_in, *read_tasks(files / "seeds.jsonl")]))  # no variant of a seed may pass
    monkeypatch.setattr(sys, "argv", [
        "synthesize", "--seeds", str(files / "seeds.jsonl"), "--held-in",
        str(files / "held.jsonl"), "--out", str(files / "out.jsonl"), "--max-attempts", "3"])
    assert entry.main() == 1 and not (files / "out.jsonl").exists()
    assert "3 of them lost at stage held_out (same_scenario)" in capsys.readouterr().err


def test_entry_point_needs_no_jax():
    code = ("import sys, experiments.synthesize, rods_jax.synthesis.loop, rods_jax.tools.toolbox;"
            "print('jax' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
