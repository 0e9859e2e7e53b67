"""The synthesizer as a process: killed, left behind, interrupted, on another endpoint."""

import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from rods_jax.synthesis.exchange import LOG, OUTCOMES
from rods_jax.synthesis.journal import Stopped
from synthesis_cases import EXPECTED, ask, restore, start, uids

ROOT = pathlib.Path(__file__).resolve().parents[1]
PATHS = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
ENVIRON = os.environ | {"PYTHONPATH": PATHS}


def until(true, seconds=30):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def alive(pid):
    """Whether it runs; a zombie does not."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@contextlib.contextmanager
def elsewhere(folder, *more):
    """The entry point as a user starts it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.synthesizer", str(folder), *more], env=ENVIRON,
        cwd=folder.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def ended(process):
    """Exit code, output and what it said."""
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def test_a_killed_process_is_started_again_and_nothing_changes(tmp_path):
    with start(tmp_path, factory="SlowNotes", host="process") as synthesizer:
        ask(synthesizer)
        for answered in (1, 4):
            until(lambda: synthesizer.poll() or synthesizer.answered >= answered)
            os.kill(synthesizer.pid, signal.SIGKILL)
        assert uids(synthesizer.collect(9, 30)) == EXPECTED
        assert synthesizer.restarts == 2
        pid = synthesizer.pid
    assert not alive(pid)
    numbers = [json.loads(line)["n"] for line in (tmp_path / OUTCOMES).read_text().splitlines()]
    assert numbers == list(range(9))


def test_a_process_that_dies_at_once_ends_the_run_with_one_line(tmp_path):
    with start(tmp_path, factory="DeadlyNotes", host="process") as synthesizer:
        ask(synthesizer)
        with pytest.raises(Stopped, match="ended 4 times in a row, last with exit code 9") as error:
            synthesizer.collect(9, 60)
        assert LOG in str(error.value) and "\n" not in str(error.value)


def test_a_process_that_cannot_begin_says_why(tmp_path):
    with start(tmp_path, factory="Missing", host="process") as synthesizer:
        ask(synthesizer)
        with pytest.raises(Stopped, match="exit code 2 .*synthesis_cases:Missing.*cannot be"):
            synthesizer.collect(9, 60)


TRAINER = """
import pathlib, sys, time
from synthesis_cases import ask, start
synthesizer = start(pathlib.Path(sys.argv[1]), factory="HangingNotes", host="process")
ask(synthesizer)
print(synthesizer.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_trainer_leaves_no_orphan(tmp_path, number):
    """Also where its attempt hangs."""
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(tmp_path)], env=ENVIRON,
                               cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               text=True)
    pid = int(trainer.stdout.readline())
    until((tmp_path / "hangs").exists)
    assert alive(pid)
    trainer.send_signal(number)
    assert trainer.wait(10) != 0
    until(lambda: not alive(pid))
    trainer.stdout.close()


LIFE = """
import json, os, pathlib, sys
from synthesis_cases import SlowFewNotes as Notes, restore, start
from test_synthesis_suite import notes_task
folder, host = pathlib.Path(sys.argv[1]), sys.argv[2]
saved = folder / "saved.json"
step, found = 0, []
if saved.exists():
    step, found, state = json.loads(saved.read_text())
    synthesizer = restore(state, folder / "synthesis", Notes(), factory="SlowFewNotes", host=host)
else:
    synthesizer = start(folder / "synthesis", Notes(), factory="SlowFewNotes", host=host)
while step < 12:
    found += [c.task.uid for c in synthesizer.collect(step - 1, 30)]
    synthesizer.request(step, [(notes_task((step + n) % 5), 2) for n in range(4)])
    synthesizer.settle(found[:-3])
    step += 1
    if step % 3 == 0:
        (folder / "part").write_text(json.dumps([step, found, synthesizer.state()]))
        os.replace(folder / "part", saved)
found += [c.task.uid for c in synthesizer.collect(step, 30)]
synthesizer.close(ended=True)
print(json.dumps([found, synthesizer.funnel.to_json()]))
"""


def life(folder, host):
    folder.mkdir(exist_ok=True)
    return subprocess.Popen([sys.executable, "-c", LIFE, str(folder), host], env=ENVIRON,
                            stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_both_killed_at_random_times_again_and_again(tmp_path):
    expected = life(tmp_path / "whole", "thread").communicate(timeout=60)[0]
    assert len(json.loads(expected)[0]) > 20
    rng, kills, trainer = random.Random(0), 0, life(tmp_path / "killed", "process")
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            out = trainer.communicate(timeout=rng.uniform(0.2, 1.5) if kills < 20 else 60)[0]
            if trainer.returncode == 0:
                break
            trainer = life(tmp_path / "killed", "process")
            continue
        children = pathlib.Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children")
        pids = [int(pid) for pid in children.read_text().split()]
        os.kill(rng.choice([trainer.pid, *pids]), signal.SIGKILL)
        kills += 1
    assert out == expected and kills > 5


def test_one_elsewhere_that_is_killed_and_started_again(tmp_path):
    """It is started before the run and waits; the second one goes on where the first was."""
    folder = tmp_path / "synthesis"
    said = []
    with elsewhere(folder, "--json", "-") as first:
        assert "waiting for" in first.stderr.readline()
        synthesizer = start(folder, factory="SlowNotes", host="elsewhere", say=said.append)
        ask(synthesizer)
        until(lambda: synthesizer.poll() or synthesizer.answered >= 3)
        first.kill()
    with elsewhere(folder, "--json", "-") as second:
        assert uids(synthesizer.collect(9, 30)) == EXPECTED
        with elsewhere(folder) as third:
            code, _, err = ended(third)
            assert code == 2 and err.count("\n") == 1 and "another synthesizer serves it" in err
        synthesizer.close(ended=True)
        code, out, err = ended(second)
    found = json.loads(out.splitlines()[-1])
    assert code == 0 and found["done"] <= 6 and found["accepted"] == found["done"]
    assert found["accepted_share"] == 1 and found["waiting"] == 0 and found["per_s"] > 0
    assert f"{found['done']} attempts done, 100% accepted" in err.splitlines()[-1]
    assert len(said) == 1


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_told_to_end_it_ends_between_attempts(tmp_path, number, code):
    folder = tmp_path / "synthesis"
    synthesizer = start(folder, factory="SlowNotes", host="elsewhere", say=lambda line: None)
    ask(synthesizer)
    with elsewhere(folder) as process:
        until(lambda: synthesizer.poll() or synthesizer.answered >= 1)
        process.send_signal(number)
        assert ended(process)[0] == code
    assert (folder / OUTCOMES).read_bytes().endswith(b"\n")
    state = synthesizer.state()
    synthesizer.close()
    with restore(state, folder) as again:
        assert uids(again.collect(9, 30)) == EXPECTED


def test_jax_is_never_imported(tmp_path):
    """By a process that makes variants of the toolbox."""
    code = ("import sys, runpy\n"
            f"sys.argv = ['synthesizer', {str(tmp_path / 'synthesis')!r}]\n"
            "try:\n    runpy.run_module('experiments.synthesizer', run_name='__main__')\n"
            "except SystemExit as end:\n    print(end.code, 'jax' in sys.modules)\n")
    synthesizer = start(tmp_path / "synthesis", host="elsewhere", say=lambda line: None)
    ask(synthesizer)
    process = subprocess.Popen([sys.executable, "-c", code], env=ENVIRON, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert uids(synthesizer.collect(9, 30)) == EXPECTED
    synthesizer.close(ended=True)
    assert ended(process)[1] == "0 False\n"


@pytest.mark.parametrize("name, words", [("no/synthesis", "there is no folder"),
                                         (".", "is not the header of a run's synthesis")])
def test_a_wrong_folder_is_one_line(tmp_path, name, words):
    (tmp_path / "header.json").write_text("{")
    done = subprocess.run([sys.executable, "-m", "experiments.synthesizer", str(tmp_path / name)],
                          env=ENVIRON, capture_output=True, text=True)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1
