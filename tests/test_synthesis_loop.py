import json
import threading
import time

import pytest

from rods_jax.synthesis.novelty import Known
from rods_jax.synthesis.offline import synthesize_many
from rods_jax.synthesis.outcome import Candidate
from rods_jax.synthesis.pipeline import make_maker
from rods_jax.tasks.leakage import HeldOutGuard
from synthesis_cases import CONFIG, EXPECTED, REQUESTS, ServedNotes, ask, restore, start, uids
from test_synthesis_suite import NotesSuite, notes_task


class Gate(ServedNotes):
    """Lets the thread plan only as often as the test says."""

    def __init__(self, tickets=0, faults=()):
        super().__init__(faults)
        self.tickets = threading.Semaphore(tickets)

    def plan(self, seed, rng):
        assert self.tickets.acquire(timeout=20)
        return super().plan(seed, rng)


def test_order_is_that_of_the_requests(tmp_path):
    with start(tmp_path) as synthesizer:
        assert ask(synthesizer) == [3, 2, 4]
        first, rest = synthesizer.collect(1, 20), synthesizer.collect(9, 20)
        assert [c.task.uid for c in first + rest] == EXPECTED
        assert [c.step for c in first] == [0, 0, 0, 1, 1]
        assert synthesizer.collect(9, 20) == [] and synthesizer.outstanding == 0
        assert synthesizer.funnel.accepted == 9
        assert synthesizer.waiting == tuple(first + rest)
        synthesizer.settle([c.task.uid for c in first] + ["unknown"])
        assert synthesizer.waiting == tuple(rest)


def test_asking_again_in_a_step_gives_new_names(tmp_path):
    with start(tmp_path) as synthesizer:
        synthesizer.request(2, [(notes_task(0), 1)])
        synthesizer.request(2, [(notes_task(0), 1), (notes_task(0), 1)])
        uids = [c.task.uid for c in synthesizer.collect(2, 20)]
        assert uids == ["seed0~2.0", "seed0~2.1", "seed0~2.2"]
        with pytest.raises(ValueError, match="step 1 was asked after step 2"):
            synthesizer.request(1, [(notes_task(0), 1)])


@pytest.mark.parametrize("done_before_cut", range(0, 10, 3))
@pytest.mark.parametrize("faults", [(), ("same",)])
def test_interrupted_equals_uninterrupted(tmp_path, done_before_cut, faults):
    with start(tmp_path / "whole", ServedNotes(faults)) as whole:
        ask(whole)
        expected = whole.collect(0, 20), whole.collect(9, 20)
        expected_funnel = whole.funnel.to_json()
    assert (len(expected[0]) < 3) == bool(faults)  # "same": what is new depends on the order
    suite = Gate(done_before_cut, faults)
    first = start(tmp_path / "cut", suite)
    ask(first)
    deadline = time.monotonic() + 20
    while first.answered < done_before_cut:
        assert time.monotonic() < deadline
        time.sleep(0.001)
        first.poll()
    collected = first.collect(0, 20) if done_before_cut >= 3 else []
    state = json.loads(json.dumps(first.state()))
    assert len(json.dumps(state)) < 500  # counts into the folder, no tasks
    suite.tickets.release(99)
    first.close()
    with restore(state, tmp_path / "cut", ServedNotes(faults)) as second:
        assert second.waiting == tuple(collected)
        collected += second.collect(0, 20)
        rest = second.collect(9, 20)
        assert (collected, rest) == expected
        assert second.funnel.to_json() == expected_funnel
        assert second.waiting == tuple(collected + rest)
        again = second.request(3, [(notes_task(0), 1)])
        assert again == 1 and second.collect(3, 20)[:1] == (
            [] if faults else [c for c in second.waiting if c.task.uid == "seed0~3.3"])


def test_room_depends_on_what_was_asked_not_on_speed(tmp_path):
    suite = Gate(0)
    slow, fast = (start(tmp_path / "slow", suite, max_outstanding=4),
                  start(tmp_path / "fast", max_outstanding=4))
    taken = ask(slow), ask(fast)
    assert taken[0] == taken[1] == [3, 1, 0]
    assert slow.refused == fast.refused == 5
    suite.tickets.release(99)
    assert slow.collect(9, 20) == fast.collect(9, 20)
    assert slow.request(4, [(notes_task(0), 9)]) == 4
    slow.close()
    fast.close()


def test_request_never_blocks_and_collect_times_out_without_loss(tmp_path):
    suite = Gate(0)
    synthesizer = start(tmp_path, suite)
    ask(synthesizer)
    with pytest.raises(TimeoutError, match=r"step 0 has not ended after 0.01 s \(9 attempts"):
        synthesizer.collect(0, 0.01)
    suite.tickets.release(99)
    assert uids(synthesizer.collect(9, 20)) == EXPECTED
    synthesizer.close()


def test_without_waiting_what_is_there_is_taken_in_order(tmp_path):
    suite = Gate(0)
    with start(tmp_path, suite, wait=False) as synthesizer:
        ask(synthesizer)
        assert synthesizer.collect(9) == [] and synthesizer.outstanding == 9
        found = []
        for tickets in (2, 1, 5):
            suite.tickets.release(tickets)
            deadline, wanted = time.monotonic() + 20, len(found) + tickets
            while synthesizer.answered < wanted:
                assert time.monotonic() < deadline
                synthesizer.poll()
            found += synthesizer.collect(9)
            assert uids(found) == EXPECTED[:wanted]
        suite.tickets.release(99)


@pytest.mark.parametrize("fault, name", [("crash", "RuntimeError"), ("exit", "SystemExit")])
def test_a_crash_is_counted_and_the_thread_lives(tmp_path, fault, name):
    suite = ServedNotes([fault])
    with start(tmp_path, suite) as synthesizer:
        ask(synthesizer, REQUESTS[:1])
        assert synthesizer.collect(0, 20) == []
        assert synthesizer.funnel.to_json()["rejected"] == {"crash": {name: 3}}
        suite.faults = frozenset()
        ask(synthesizer, REQUESTS[1:2])
        assert len(synthesizer.collect(1, 20)) == 2


def test_closed_synthesizer_says_so_and_keeps_its_state(tmp_path):
    suite = Gate(1)
    synthesizer = start(tmp_path, suite)
    ask(synthesizer)
    suite.tickets.release(1)  # for the attempt that close() waits for
    synthesizer.close()
    assert not any(t.name == "synthesizer" and t is synthesizer._host.thread
                   for t in threading.enumerate())
    with pytest.raises(RuntimeError, match="was closed"):
        synthesizer.request(4, [(notes_task(0), 1)])
    with pytest.raises(RuntimeError, match="was closed"):
        synthesizer.collect(9, 20)
    state = synthesizer.state()
    assert state["asked"] == 9 and state["collected"] == 0
    with restore(state, tmp_path) as second:
        assert uids(second.collect(9, 20)) == EXPECTED
    with pytest.raises(ValueError, match="run seed 5, this run has 2 and 6"):
        restore(state, tmp_path, run_seed=6)


def test_known_tasks_are_not_made_again(tmp_path):
    with start(tmp_path / "first") as synthesizer:
        ask(synthesizer)
        tasks = [c.task for c in synthesizer.collect(9, 20)]
    with start(tmp_path / "again", known=Known(tasks).to_json()) as synthesizer:
        ask(synthesizer)
        assert synthesizer.collect(9, 20) == []
        rejected = synthesizer.funnel.to_json()["rejected"]
        assert set(rejected) == {"novelty"} and sum(rejected["novelty"].values()) == 9


# ---------------------------------------------------------------- offline


def offline(count, done=(), workers=1, faults=(), **options):
    seeds = [notes_task(0), notes_task(1, "miss_func"), notes_task(2, "miss_param")]
    maker = make_maker(NotesSuite(faults), CONFIG, HeldOutGuard(), 3)
    return list(synthesize_many(seeds, count, maker, Known(seeds), done=done, workers=workers,
                                **options))


def accepted(outcomes):
    return [o.task for o in outcomes if isinstance(o, Candidate)]


def test_offline_reaches_the_count_and_resumes_anywhere():
    whole = offline(20)
    assert len(accepted(whole)) == 20 and len({t.content_hash for t in accepted(whole)}) == 20
    for cut in (0, 7, 20):
        assert whole[:cut] + offline(20, done=whole[:cut]) == whole
    assert offline(20, done=whole) == []


def test_offline_worker_processes_change_nothing():
    assert offline(40, workers=2) == offline(40)


def test_offline_ends_when_nothing_new_is_found():
    outcomes = offline(5, faults=["same"], max_attempts=30)
    assert len(outcomes) == 30 and 1 <= len(accepted(outcomes)) <= 3  # at most one a category
    with pytest.raises(ValueError, match="no seed tasks"):
        next(synthesize_many([], 1, make_maker(NotesSuite(), CONFIG, HeldOutGuard(), 0)))
