"""The files between trainer and synthesizer: cut anywhere, taken up, the same outcomes."""

import json
import pathlib
import shutil

import pytest

from experiments import synthesizer
from rods_jax.config import UserError
from rods_jax.synthesis.exchange import HEADER, OUTCOMES, REQUESTS, Asked, Header, serving
from rods_jax.synthesis.journal import Appender, JournalError, Tail
from rods_jax.synthesis.outcome import outcome_from_json
from rods_jax.synthesis.worker import Bell, serve
from synthesis_cases import EXPECTED
from synthesis_cases import REQUESTS as ASKED
from synthesis_cases import (FewNotes, ServedNotes, ask, header_of, maker_of, restore, start,
                             uids)
from test_synthesis_suite import notes_task


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def served(folder, suite=None):
    """Answers what is asked there, as a synthesizer that is started and ended. By hand: the
    bell stops it once all is answered."""
    bell = Bell()

    def report(progress):
        if not progress.waiting:
            bell.stopped = True

    return serve(folder, bell, maker_of(suite or FewNotes()), report=report)


def final(folder):
    """What a reader of both files alone finds: each request's outcome, exactly one."""
    asked = Asked()
    Tail(folder / REQUESTS).feed(asked.apply)
    answers = {}
    for row in lines(folder / OUTCOMES):
        answers.setdefault((row["n"], row["g"]), []).append(outcome_from_json(row["outcome"]))
    found = [answers[request.number, request.generation] for request in asked.requests]
    assert all(len(each) == 1 for each in found)
    names = [(request.seed.uid, request.step, request.index) for request in asked.requests]
    assert [(o.seed, o.step, o.index) for [o] in found] == names
    return [outcome for [outcome] in found]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing interrupts: its folder, its state after the first request and what
    became of all."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = start(folder, host="elsewhere", say=lambda line: None)
    ask(trainer, ASKED[:1])
    served(folder)
    state = trainer.state()
    ask(trainer, ASKED[1:])
    served(folder)
    trainer.close()
    return folder, state, final(folder)


def test_the_whole_run_has_both_kinds_of_outcomes(whole):
    _, _, outcomes = whole
    accepted = [outcome for outcome in outcomes if hasattr(outcome, "task")]
    assert len(outcomes) == 9 and 3 < len(accepted) < 9


def cuts(data, last):
    """Places in the last lines: all at both ends of each line, between them some."""
    lines = data.splitlines(keepends=True)
    for number in range(len(lines) - last, len(lines)):
        begin, size = sum(map(len, lines[:number])), len(lines[number])
        yield from (begin + n for n in range(size) if n < 3 or n > size - 3 or n % 211 == 0)
    yield from range(len(data) - 40, len(data) + 1)


def test_outcomes_cut_at_any_byte(whole, tmp_path):
    """The synthesizer was killed while it wrote its last two lines."""
    folder, _, expected = whole
    data = (folder / OUTCOMES).read_bytes()
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for cut in cuts(data, 2):
        (copy / OUTCOMES).write_bytes(data[:cut])
        served(copy)
        assert (copy / OUTCOMES).read_bytes() == data, cut
    assert final(copy) == expected


def test_requests_cut_at_any_byte(whole, tmp_path):
    """The trainer was killed while it asked, and takes up its checkpoint; what the synthesizer
    has made of the void requests meanwhile may be there or not."""
    folder, state, expected = whole
    data = (folder / REQUESTS).read_bytes()
    copy = tmp_path / "copy"
    for cut in cuts(data, len(data.splitlines()) - state["asked"]):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        (copy / REQUESTS).write_bytes(data[:cut])
        if cut % 2:
            (copy / OUTCOMES).write_bytes(
                b"".join((folder / OUTCOMES).read_bytes().splitlines(keepends=True)[:5]))
        trainer = restore(state, copy, host="elsewhere", say=lambda line: None)
        assert len(lines(copy / REQUESTS)) > state["asked"]  # append-only
        ask(trainer, ASKED[1:])
        served(copy)
        assert final(copy) == expected, cut
        trainer.close()


def test_a_checkpoint_taken_up_again_and_again(whole, tmp_path):
    folder, state, expected = whole
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for upto in (2, 1, 3):
        trainer = restore(state, copy, host="elsewhere", say=lambda line: None)
        ask(trainer, ASKED[1:upto])
        served(copy)
        trainer.close()
    generations = [row["g"] for row in lines(copy / REQUESTS) if "rewind" in row]
    assert generations == [1, 2, 3]
    assert final(copy) == expected


def test_a_synthesizer_that_runs_on_sees_the_rewind(whole, tmp_path):
    """It is asked by a trainer that dies and by the next one, and is never started anew."""
    _, _, expected = whole
    with start(tmp_path, FewNotes()) as first:
        ask(first, ASKED[:1])
        first.collect(0, 20)
        state = first.state()
        ask(first, ASKED[1:])
        die(first)
        second = restore(state, tmp_path, host="elsewhere", say=lambda line: None)
        ask(second, ASKED[1:])
        second.collect(9, 20)
        assert final(tmp_path) == expected
        second.close()


def test_what_was_made_before_is_not_made_again(whole, tmp_path):
    """An endpoint's text is paid for once, also where the requests of it became void."""
    folder, state, expected = whole
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    made = []

    class Counting(FewNotes):
        def plan(self, seed, rng):
            made.append(seed.uid)
            return super().plan(seed, rng)

    trainer = restore(state, copy, host="elsewhere", say=lambda line: None)
    ask(trainer, ASKED[1:])
    served(copy, Counting())
    trainer.close()
    void = expected[state["asked"]:]
    assert final(copy) == expected
    assert len(made) == sum(not hasattr(outcome, "task") for outcome in void) < len(void)


@pytest.mark.parametrize("spoil, words", [
    (lambda f: shutil.rmtree(f), "speaks of 3 requests, the folder has no header"),
    (lambda f: (f / REQUESTS).unlink(), "speaks of 3 requests, the folder has 0"),
    (lambda f: (f / OUTCOMES).unlink(), "speaks of 3 outcomes, the folder has 0"),
    (lambda f: (f / OUTCOMES).write_text("{}\n"), "outcomes.jsonl, line 1: damaged"),
    (lambda f: (f / REQUESTS).write_text("nonsense\n"), "requests.jsonl, line 1: damaged"),
    (lambda f: swap(f / REQUESTS), "requests.jsonl, line 1: damaged"),
    (lambda f: swap(f / OUTCOMES), "outcomes.jsonl, line 1: damaged"),
    (lambda f: (f / HEADER).write_text('{"version": 99}'), "has version 99"),
])
def test_a_folder_that_lost_what_the_checkpoint_says_is_one_line(tmp_path, spoil, words):
    with start(tmp_path / "f") as trainer:
        ask(trainer, ASKED[:1])
        trainer.collect(0, 20)
        state = trainer.state()
    spoil(tmp_path / "f")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json*")}
    with pytest.raises(JournalError, match=words) as error:
        restore(state, tmp_path / "f")
    assert "\n" not in str(error.value)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json*")} == before


def swap(path):
    """The first two lines, each whole."""
    first, second, *rest = path.read_text().splitlines(keepends=True)
    path.write_text("".join([second, first, *rest]))


def test_another_runs_folder_is_not_taken(tmp_path):
    states = []
    for name, tasks in (("a", [(notes_task(0), 2)]), ("b", [(notes_task(1), 2)])):
        with start(tmp_path / name) as trainer:
            trainer.request(0, tasks)
            trainer.collect(0, 20)
            states.append(trainer.state())
    with pytest.raises(JournalError, match="speaks of 2 requests, the folder has others"):
        restore(states[0], tmp_path / "b")


def test_a_new_run_begins_anew_where_an_earlier_one_was_killed(tmp_path):
    with start(tmp_path, run_seed=4) as trainer:
        ask(trainer)
        trainer.collect(9, 20)
    (tmp_path / REQUESTS).write_bytes((tmp_path / REQUESTS).read_bytes()[:-5])
    with start(tmp_path) as trainer:
        ask(trainer)
        assert uids(trainer.collect(9, 20)) == EXPECTED
        assert Header.read(tmp_path) == header_of()
        assert not [row for row in lines(tmp_path / REQUESTS) if "rewind" in row]


def test_a_synthesizer_left_over_serves_the_same_run_begun_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("rods_jax.synthesis.exchange.BUSY_S", 0.05)
    with start(tmp_path) as first:
        ask(first)
        first.collect(9, 20)
        with pytest.raises(JournalError, match="another run uses it"):
            start(tmp_path).open()
        die(first)
        with pytest.raises(JournalError, match="another synthesizer serves it"):
            start(tmp_path, run_seed=4).open()
        second = start(tmp_path, host="elsewhere", say=lambda line: None)
        ask(second)
        assert uids(second.collect(9, 20)) == EXPECTED
        second.close()


def die(trainer):
    """As a trainer that is killed, whose synthesizer goes on: the system frees its lock."""
    trainer._held.close()


@pytest.mark.parametrize("host", ["thread", "process"])
@pytest.mark.parametrize("gone", ["moved", "removed"])
def test_a_folder_that_is_gone_is_told_at_once(tmp_path, host, gone):
    folder = tmp_path / "synthesis"
    trainer = start(folder, host=host)
    ask(trainer, ASKED[:1])
    trainer.collect(0, 60)  # so it serves the folder
    if gone == "moved":
        folder.rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(folder)
    ask(trainer, ASKED[1:])
    with pytest.raises(JournalError, match=r"requests.jsonl: removed, moved or replaced"):
        trainer.collect(9, 60)
    trainer.close()


def test_a_synthesizer_whose_folder_is_gone_ends(tmp_path):
    folder = tmp_path / "synthesis"
    with start(folder, host="elsewhere", say=lambda line: None) as trainer:
        trainer.open()

        def remove(progress):
            if folder.exists():
                shutil.rmtree(folder)

        with pytest.raises(JournalError, match=r"outcomes.jsonl: removed, moved or replaced"):
            serve(folder, Bell(), maker_of(), report=remove)


@pytest.mark.parametrize("change, message", [
    ({"suite": {"name": "nosuch"}}, "names no suite"), ({"suite": None}, "names no suite"),
    ({"config": {"k_max": -1}}, "k_max is -1"), ({"known": ["x"]}, "not a record of known tasks")])
def test_a_header_that_cannot_be_used_is_one_line_with_its_path(tmp_path, change, message):
    with start(tmp_path, host="elsewhere", say=lambda line: None) as trainer:
        trainer.open()
    row = json.loads((tmp_path / HEADER).read_text())
    (tmp_path / HEADER).write_text(json.dumps(row | change))
    with pytest.raises((JournalError, UserError)) as caught:
        synthesizer.main([str(tmp_path)])
    assert f"{tmp_path / HEADER}: " in str(caught.value) and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_synthesizer_a_folder(tmp_path):
    with start(tmp_path) as trainer:
        ask(trainer, ASKED[:1])
        trainer.collect(0, 20)
        with pytest.raises(JournalError, match="another synthesizer serves it; end that one"):
            serve(tmp_path, Bell(), maker_of())
    with serving(tmp_path):
        pass


def test_a_seed_is_written_once_and_referred_to(tmp_path):
    with start(tmp_path) as trainer:
        ask(trainer)
        rows = lines(tmp_path / REQUESTS)
    assert ["task" in row for row in rows] == [1, 0, 1, 1, 0, 0, 0, 0, 1]
    assert [row["n"] for row in rows] == list(range(9))


def test_lines_that_were_read_and_are_gone_are_an_error(tmp_path):
    with start(tmp_path) as trainer:
        ask(trainer, ASKED[:1])
        trainer.collect(0, 20)
        (tmp_path / OUTCOMES).write_bytes(b"")
        with pytest.raises(JournalError, match="lost lines that had been read already"):
            trainer.poll()


def test_a_full_disk_leaves_whole_lines(tmp_path):
    class Full:
        """The file, on a disk that takes 30 bytes more."""

        def __init__(self, file):
            self._file, self.room = file, 30

        def __getattr__(self, name):
            return getattr(self._file, name)

        def write(self, data):
            if not self.room:
                raise OSError(28, "No space left on device")
            written = self._file.write(data[:min(self.room, 20)])
            self.room -= written
            return written

    path = tmp_path / "j"
    with Appender(path) as file:
        file.append([{"a": 1}])
        file._file = Full(file._file)
        with pytest.raises(OSError, match="No space"):
            file.append([{"b": "x" * 100}])
        file._file.room = 1000
        file.append([{"c": 3}])
    assert lines(path) == [{"a": 1}, {"c": 3}]


def test_waiting_for_requests_takes_next_to_nothing(tmp_path):
    """Looks at the file are few: the pause grows while nothing comes, and a bell ends it."""
    folder = tmp_path
    trainer = start(folder, host="elsewhere", say=lambda line: None)
    trainer.open()
    waits = []

    class Patient(Bell):
        def wait(self, timeout_s):
            waits.append(timeout_s)
            if len(waits) == 12:
                self.stop()

    serve(folder, Patient(), maker_of())
    assert waits[0] < 0.01 and waits[-1] == max(waits) == 0.25 and sorted(waits) == waits
    trainer.close()


def test_the_run_is_over(tmp_path):
    trainer = start(tmp_path, host="elsewhere", say=lambda line: None)
    ask(trainer, ASKED[:1])
    trainer.close(ended=True)
    assert serve(tmp_path, Bell(), maker_of()).done == 0
    state = trainer.state()
    again = restore(state, tmp_path, host="elsewhere", say=lambda line: None)
    assert served(tmp_path, ServedNotes()).done == 3
    assert uids(again.collect(0, 20)) == EXPECTED[:3]
    again.close()


def test_elsewhere_says_what_to_run(tmp_path):
    said = []
    start(tmp_path / "run" / "synthesis", host="elsewhere", say=said.append).open()
    assert said == [f"synthesis: run `python -m experiments.synthesizer {tmp_path}/run/synthesis` "
                    "on any machine that reaches that folder"]
    assert sorted(p.name for p in pathlib.Path(tmp_path / "run" / "synthesis").iterdir()) == [
        HEADER, REQUESTS, "server.lock", "trainer.lock"]
