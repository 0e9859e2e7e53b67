"""Asking for the answers of environments without being held up: ready, poll and wait."""

import collections
import fcntl
import os
import random
import resource
import select
import signal
import time

import pytest
import worker_suite
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_suite import add, bystanders, call, damaged, first_row, go_on, kill, task

from rods_jax.tasks.replay import gold_transcript
from rods_jax.tools import worker_process
from rods_jax.tools.host import (
    Crash, EnvError, HostConfig, InProcessHost, Outage, ToolCrash, make_host)
from rods_jax.tools.suites import SuiteName, SuiteSpec, make_suite
from rods_jax.tools.worker_process import pipe_share
from rods_jax.tools.workers import WorkerPool

ODD = SuiteSpec(SuiteName.CUSTOM, "worker_suite:make")
TOOLBOX = SuiteSpec(SuiteName.TOOLBOX)
HUNG_S = 1.2


class Counted(WorkerPool):
    """Counts how often it looked at its workers, and how often it would have slept."""

    looks = sleeps = 0

    def pump(self, *most_s):
        self.looks += 1
        self.sleeps += not most_s
        super().pump(*most_s)


@pytest.fixture
def pools():
    """Makes pools of the odd suite: call_s, memory_mb and count by keyword."""
    made = []

    def make(spec=ODD, **given):
        made.append(Counted(spec, HostConfig(**({"count": 1, "call_s": 60.0} | given))))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def by_poll(host, pendings):
    while not all(pending.ready() for pending in pendings):
        host.poll()
        time.sleep(0.002)


def by_wait(host, pendings):
    while late := [pending for pending in pendings if not pending.ready()]:
        host.wait(late)


def failure(pending):
    """What result raises, the same every time; it does not look at the workers."""
    with pytest.raises((ToolCrash, EnvError, Outage)) as caught:
        pending.result()
    with pytest.raises(type(caught.value)) as again:
        pending.result()
    assert str(again.value) == str(caught.value)
    return caught.value


def test_in_this_process_all_is_ready_at_once():
    host = InProcessHost(worker_suite.make())
    fine, broken = host.start(task("a"), False), host.start(task("b"), False)
    answers = [host.execute(fine, [add(0)]), host.execute(broken, [call("boom")]),
               host.end_turn(fine, "done")]
    assert all(answer.ready() for answer in answers)
    host.poll()
    host.wait(answers)
    assert answers[0].result()[0].text == '{"total": 0}' and answers[2].result()[0].passed
    assert failure(answers[1]).kind == "LookupError" and answers[1].ready()


def test_nobody_waits_for_nothing(pools):
    for host in (InProcessHost(worker_suite.make()), pools()):
        with pytest.raises(ValueError, match="no operations to wait for: give one or more"):
            host.wait([])
        host.poll()


def test_ready_only_looks_at_what_poll_has_seen(pools):
    pool = pools(call_s=60.0)
    rollout = pool.start(task("t"), False)
    pool.execute(rollout, [add(1)]).result()
    looks = pool.looks
    answer, hung = pool.execute(rollout, [add(2)]), pool.execute(rollout, [call("sleep")])
    assert not any(answer.ready() for _ in range(50)) and pool.looks == looks
    by_poll(pool, [answer])
    looks, sleeps = pool.looks, pool.sleeps
    assert answer.result()[0].text == '{"total": 3}' and answer.ready() and pool.looks == looks
    pool.poll()  # had it waited for the tool that sleeps, this one would be lost now
    assert not hung.ready() and (pool.looks, pool.sleeps) == (looks + 1, sleeps)
    assert not pool.crashes


def test_wait_sleeps_until_one_is_ready(pools):
    pool = pools(count=2)
    slow, quick = (pool.start(task(name), False) for name in ("slow", "quick"))
    for rollout in (slow, quick):
        pool.execute(rollout, [add(0)]).result()
    asked = [pool.execute(slow, [call("sleep")]), pool.execute(quick, [call("sleep", s=0.4)])]
    looks = pool.looks
    pool.wait(asked)
    assert pool.looks == looks + 1  # it slept in that one, and was woken by the answer
    assert [answer.ready() for answer in asked] == [False, True]
    pool.wait(asked)
    assert asked[1].result()[0].ok and pool.looks == looks + 1


def test_many_rollouts_over_few_workers_all_end(pools):
    """As an engine does it: each slot goes on when its own answer is here."""
    pool = pools(count=4)
    rollouts = [pool.start(task(f"r{i}"), False) for i in range(64)]
    got = collections.defaultdict(list)
    out = {r: pool.execute(r, [call("sleep", s=0.001), add(r)]) for r in rollouts}
    while out:
        pool.wait(out.values())
        pool.poll()
        for rollout in [r for r, answer in out.items() if answer.ready()]:
            got[rollout].append(out.pop(rollout).result()[1].text)
            if len(got[rollout]) < 3:
                out[rollout] = pool.execute(rollout, [call("sleep", s=0.001), add(rollout)])
    assert got == {r: [f'{{"total": {n * r}}}' for n in (1, 2, 3)] for r in rollouts}
    assert not pool.crashes and pool.replaced == 0


# -------------------------------------------------------------------- lost workers


@pytest.mark.parametrize("settle", [by_poll, by_wait])
@pytest.mark.parametrize("killer, reason", [
    (call("sleep"), Crash.TIME), (call("spin"), Crash.TIME), (call("exit"), Crash.DIED),
    (call("segfault"), Crash.DIED), (call("allocate", mb=5000), Crash.MEMORY)])
def test_what_kills_a_worker_is_found_without_result(pools, settle, killer, reason):
    pool = pools(call_s=HUNG_S, memory_mb=400)
    others, victim = bystanders(pool), pool.start(task("victim"), False)
    lost = [pool.execute(victim, [add(1), killer]), pool.end_turn(victim, "done")]
    spared = pool.execute(others[0], [add(0)])
    settle(pool, [*lost, spared])
    looks = pool.looks
    for pending in lost:
        crash = failure(pending)
        assert (crash.reason, crash.task_uid, crash.call) == (reason, "victim", killer)
    assert spared.result()[0].text == '{"total": 0}' and pool.looks == looks
    assert pool.execute(victim, [add(1)]).ready()
    go_on(pool, others)
    assert pool.crashes == {reason: 1} and pool.replaced == 1


@pytest.mark.parametrize("settle", [by_poll, by_wait])
def test_killed_from_outside_in_the_middle_of_an_operation(pools, settle):
    pool = pools()
    others, victim = bystanders(pool), pool.start(task("victim"), False)
    fatal = pool.execute(victim, [add(1), call("sleep")])
    first_row(pool, fatal)
    kill(pool.pids[0])
    assert not fatal.ready()
    settle(pool, [fatal])
    assert (failure(fatal).reason, pool.crashes) == (Crash.DIED, {Crash.DIED: 1})
    go_on(pool, others)


def test_one_late_look_ends_what_hangs_and_spares_what_has_answered(pools):
    pool = pools(count=2, call_s=HUNG_S)
    hanging, quick = (pool.start(task(name), False) for name in ("hanging", "quick"))
    pool.execute(quick, [add(1)]).result()
    hung = pool.execute(hanging, [add(1), call("spin")])
    first_row(pool, hung)
    answer = pool.execute(quick, [add(2)])
    select.select([pool.workers[1].answers], [], [])  # it is here, and nobody has read it
    time.sleep(HUNG_S + 0.1)  # the device has the host's whole attention
    assert not hung.ready() and not answer.ready()
    pool.poll()
    assert hung.ready() and failure(hung).reason is Crash.TIME
    assert answer.ready() and answer.result()[0].text == '{"total": 3}'
    assert pool.crashes == {Crash.TIME: 1} and pool.replaced == 1


def test_an_idle_worker_that_was_killed_is_replaced_by_a_look(pools):
    pool = pools()
    others = bystanders(pool)
    kill(pool.pids[0])
    while not pool.replaced:
        pool.poll()
    go_on(pool, others)
    assert not pool.crashes and pool.replaced == 1


@pytest.mark.parametrize("settle", [by_poll, by_wait])
@pytest.mark.parametrize("factory, line", [
    ("make_refused", "odd tools are not installed"), ("make_dead", "do not stay up")])
def test_an_outage_is_said_by_the_results_alone(pools, settle, factory, line):
    pool = pools(SuiteSpec(SuiteName.CUSTOM, f"worker_suite:{factory}"), count=2)
    asked = [pool.execute(pool.start(task(f"t{i}"), False), [add(1)]) for i in range(4)]
    settle(pool, asked)
    assert all(line in str(failure(answer)) for answer in asked)
    pool.poll()
    pool.wait(asked)


def test_a_closed_pool_keeps_nobody_waiting(pools):
    pool = pools()
    rollout = pool.start(task("t"), False)
    done, left = pool.execute(rollout, [add(1)]), pool.execute(rollout, [call("sleep")])
    pool.wait([done])
    pool.close()
    pool.poll()
    pool.wait([left])
    assert left.ready() and "closed" in str(failure(left))
    assert done.ready() and done.result()[0].text == '{"total": 1}'


# -------------------------------------------------------- every order of asking


class Player:
    """Rollouts played in any order; `got[i]`: what rollout i's operations gave, by number."""

    def __init__(self, host, items):
        self.host, n = host, len(items)
        self.handles = [host.start(item[0], False) for item in items]
        self.todo = [collections.deque(enumerate(operations(host, item))) for item in items]
        self.out = [{} for _ in range(n)]
        self.got = [{} for _ in range(n)]

    def ask(self, i):
        if self.todo[i]:
            number, (operate, what) = self.todo[i].popleft()
            self.out[i][number] = operate(self.handles[i], what)

    def poll(self, i):
        self.host.poll()
        for k in range(len(self.out)):
            self.take(k)

    def take(self, i):
        for number in [n for n, pending in self.out[i].items() if pending.ready()]:
            self.got[i][number] = self.out[i].pop(number).result()

    def wait(self, i):
        """For any operation of two rollouts."""
        asked = [*self.out[i].values(), *self.out[i - 1].values()]
        if asked:
            self.host.wait(asked)
            assert any(pending.ready() for pending in asked)

    def last(self, i):
        """The result of what was asked last, though those before it were not looked at."""
        if self.out[i]:
            number, pending = self.out[i].popitem()
            self.got[i][number] = pending.result()

    def finish(self):
        for i, handle in enumerate(self.handles):
            while self.todo[i] or self.out[i]:
                self.ask(i)
                self.wait(i)
                self.poll(i)
            self.host.finish(handle)
        return [[got[number] for number in sorted(got)] for got in self.got]


def operations(host, item):
    for turn in item[1]:
        yield from ((host.execute, step) for step in turn)
        yield host.end_turn, "said"


def some_items():
    suite, rng = make_suite(TOOLBOX), random.Random(7)
    tasks = rng.sample(suite.split("train"), 5)
    return [(t, damaged(gold_transcript(t), rng) if i % 2 else gold_transcript(t))
            for i, t in enumerate([*tasks, tasks[0]])]


@pytest.fixture(scope="module")
def toolbox():
    """(pool, host in this process, items, what result() alone gives)"""
    suite, items = make_suite(TOOLBOX), some_items()
    host = InProcessHost(suite)
    wanted = []
    for item in items:
        rollout = host.start(item[0], False)
        wanted.append([operate(rollout, what).result() for operate, what in
                       operations(host, item)])
        host.finish(rollout)
    pool = make_host(suite, TOOLBOX, HostConfig(count=2, call_s=60.0))
    yield pool, host, items, wanted
    assert not pool.crashes and pool.replaced == 0
    assert not any(worker.rollouts for worker in pool.workers)
    pool.close()


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(
    st.sampled_from([Player.ask, Player.ask, Player.poll, Player.take, Player.wait, Player.last]),
    st.integers(0, 5)), max_size=60))
def test_results_do_not_depend_on_how_they_are_asked_for(toolbox, steps):
    pool, host, items, wanted = toolbox
    for one in (pool, host):
        player = Player(one, items)
        for do, i in steps:
            do(player, i)
        assert player.finish() == wanted


# ------------------------------------------------------------------- many workers


@pytest.mark.parametrize("count", [1, 2, 16, 17, 31, 33, 64, 100, 256])
def test_the_pipes_of_a_pool_stay_within_their_share(count):
    size = pipe_share(count)
    assert 2**16 <= size <= 2**20 and size.bit_count() == 1  # as the system rounds
    assert 2 * count * size <= 2**25 and (size == 2**20 or 4 * count * size > 2**25)
    assert pipe_share(10**9) == 2**16


@pytest.mark.skipif(not hasattr(fcntl, "F_GETPIPE_SZ"), reason="the system does not say")
def test_workers_have_pipes_of_that_size(pools, monkeypatch):
    monkeypatch.setattr(worker_process, "PIPES_BYTES", 2**19)
    pool = pools(count=2)
    assert {fcntl.fcntl(end, fcntl.F_GETPIPE_SZ) for worker in pool.workers
            for end in (worker.requests, worker.answers)} == {2**17}


def handles():
    return sorted(map(int, os.listdir("/proc/self/fd")))


def test_more_workers_than_the_system_allows_are_one_line_and_leave_nothing():
    before = handles()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [end for end in range(before[-1] + 30) if end not in before]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[20], hard))  # 20 may be opened
    try:
        with pytest.raises(Outage) as caught:
            make_host(None, ODD, HostConfig(count=40))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "Too many open files" in str(caught.value) and "\n" not in str(caught.value)
    assert "set a lower workers.count" in str(caught.value)
    assert handles() == before


def test_what_no_process_can_be_replaced_by_is_an_outage(pools, monkeypatch):
    """Nobody waits in result: the look that finds a dead worker raises nothing itself."""
    pool = pools()
    rollout = pool.start(task("t"), False)
    hung = pool.execute(rollout, [add(1), call("sleep")])
    first_row(pool, hung)
    other = pool.execute(pool.start(task("o"), False), [add(1)])
    monkeypatch.setattr(worker_process.sys, "executable", "/no/such/python")
    os.kill(pool.pids[0], signal.SIGKILL)
    by_poll(pool, [hung, other])
    assert isinstance(failure(hung), ToolCrash)
    assert "cannot be started" in str(failure(other)) and pool.crashes == {Crash.DIED: 1}
