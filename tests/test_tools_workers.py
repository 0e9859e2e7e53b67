"""Environments in worker processes against the same in this process, and what kills workers."""

import collections
import dataclasses
import logging
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
import worker_suite
from worker_suite import add, bystanders, call, damaged, first_row, go_on, kill, task

from rods_jax.tasks.replay import gold_transcript, play
from rods_jax.tools.host import (
    Crash, EnvError, HostConfig, InProcessHost, Outage, ToolCrash, cut, make_host)
from rods_jax.tools.scoring import Scoring
from rods_jax.tools.suites import SuiteName, SuiteSpec, make_suite
from rods_jax.types import ToolResult

ODD = SuiteSpec(SuiteName.CUSTOM, "worker_suite:make")
TOOLBOX = SuiteSpec(SuiteName.TOOLBOX)
GENEROUS = HostConfig(count=2, call_s=60.0)
STRICT_S = 1.2


def alive(pid):
    """Whether the process exists, as a zombie too."""
    return pathlib.Path(f"/proc/{pid}").exists()


def gone(pids, within_s=20.0):
    until = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(map(alive, pids))


@pytest.fixture(scope="module")
def shared():
    """A pool for tests that leave it whole."""
    pool = make_host(worker_suite.make(), ODD, GENEROUS)
    yield pool
    pool.close()


@pytest.fixture
def pools():
    """Makes pools of the odd suite: call_s, memory_mb and count by keyword."""
    made = []

    def make(spec=ODD, **given):
        config = HostConfig(**({"count": 1, "call_s": 60.0} | given))
        made.append(make_host(None, spec, config))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def drive(host, items, rng, hints=False):
    """Plays all transcripts at once; answers are waited for in a random order. Returns what
    each rollout got: result tuples, then outcomes and next turns."""
    got = [[] for _ in items]
    todo = {i: collections.deque(
        op for turn in transcript
        for op in [*((host.execute, step) for step in turn), (host.end_turn, f"said {i}")])
        for i, (_, transcript) in enumerate(items)}
    handle = {i: host.start(items[i][0], hints) for i in todo}
    while todo:
        some = rng.sample(sorted(todo), rng.randint(1, len(todo)))
        pending = {i: [do(handle[i], given) for do, given in
                       [todo[i].popleft() for _ in range(min(len(todo[i]), rng.randint(1, 2)))]]
                   for i in some}
        for i in rng.sample(some, len(some)):
            got[i] += [p.result() for p in pending[i]]
            if not todo[i]:
                host.finish(handle[i])
                del todo[i]
    return got


@pytest.mark.parametrize("count", [1, 3])
def test_toolbox_rollouts_are_the_same_in_workers(pools, count):
    suite, rng = make_suite(TOOLBOX), random.Random(count)
    tasks = rng.sample(suite.split("train"), 12)
    items = [(t, damaged(gold_transcript(t), rng) if i % 2 else gold_transcript(t))
             for i, t in enumerate(tasks + tasks[:4])]
    wanted = drive(InProcessHost(suite), items, random.Random(1))
    pool = pools(TOOLBOX, count=count)
    assert drive(pool, items, random.Random(2)) == wanted
    outcomes = [g[0] for got in wanted for g in got if not isinstance(g[0], ToolResult)]
    assert {o.passed for o in outcomes} == {True, False}
    assert not pool.crashes and pool.replaced == 0


def test_hints_and_scoring_reach_the_worker(pools, shared):
    hinted = shared.start(task("h"), True)
    assert shared.execute(hinted, [add(0)]).result() == (ToolResult('{"total": 0}!', True),)
    shared.finish(hinted)
    twice = dataclasses.replace(task("s"), turns=task("s").turns[:1] * 2)
    for needs_call in (True, False):
        spec = dataclasses.replace(ODD, scoring=Scoring(needs_call=needs_call))
        pool = pools(spec)
        rollout = pool.start(twice, False)
        pool.execute(rollout, [add(0), add(0)])
        outcome, turn = pool.end_turn(rollout, "done").result()
        assert outcome.passed and (turn.index, turn.text, turn.new_tools) == (1, "add 0", ())
        outcome, turn = pool.end_turn(rollout, "done").result()
        assert outcome.passed is not needs_call and turn is None


def test_bulk_replay_is_play(pools):
    suite, rng = make_suite(TOOLBOX), random.Random(5)
    tasks = rng.sample(suite.split("train"), 50)
    items = [(t, damaged(gold_transcript(t), rng)) for t in tasks]
    wanted = [play(suite, *item) for item in items]
    pool = pools(TOOLBOX, count=2)
    assert pool.play_many(items) == wanted
    gold = [play(suite, t, gold_transcript(t)) for t in tasks]
    found = pool.play_many([(t, None) for t in tasks], texts=False)
    assert [f.outcomes for f in found] == [g.outcomes for g in gold]
    assert all(f.valid and f.results == () for f in found)
    assert pool.play_many([]) == [] and pool.play_many([(tasks[0], [])])[0].valid is False


def test_bulk_replay_names_the_item_that_kills(pools):
    pool = pools(count=2, memory_mb=300)
    fine = [(task(f"t{i}"), None) for i in range(9)]
    bad = [(task("exits"), [[[call("exit")]]]), (task("greedy"), [[[call("allocate", mb=900)]]]),
           (task("raises"), [[[call("boom")]]])]
    found = pool.play_many(fine[:3] + bad + fine[3:])
    exits, greedy, raises = found[3:6]
    assert (exits.reason, exits.task_uid) == (Crash.DIED, "exits")
    assert (greedy.reason, greedy.task_uid) == (Crash.MEMORY, "greedy")
    assert str(raises) == "LookupError: the simulator broke"
    assert all(f.valid for f in found[:3] + found[6:])
    assert pool.crashes == {Crash.DIED: 1, Crash.MEMORY: 1}


def test_worker_has_no_jax(shared):
    rollout = shared.start(task("m"), False)
    result, = shared.execute(rollout, [call("modules")]).result()
    assert "rods_jax" in result.text and "'jax" not in result.text
    shared.finish(rollout)


def test_output_is_cut_after_scoring(pools):
    long = task("w", turns=1)
    long = dataclasses.replace(long, turns=(dataclasses.replace(
        long.turns[0], gold=(call("write", chars=30_000),)),))
    for host in (InProcessHost(worker_suite.make(), 1000), pools(output_chars=1000)):
        rollout = host.start(long, False)
        result, = host.execute(rollout, [call("write", chars=30_000)]).result()
        assert result.text == "x" * 1000 + "\n[29000 more characters cut]"
        assert host.end_turn(rollout, "done").result()[0].passed
    assert cut("abc", 3) == "abc" and cut("abcd", 3) == "abc\n[1 more characters cut]"


@pytest.mark.parametrize("name, kind", [
    ("boom", "LookupError"), ("leave", "SystemExit"), ("interrupt", "KeyboardInterrupt"),
    ("recurse", "RecursionError"), ("no_such_tool", "AssertionError")])
def test_what_an_environment_raises_is_an_error_of_this_rollout_alone(shared, name, kind):
    broken, other = shared.start(task("b"), False), shared.start(task("o"), False)
    results = shared.execute(broken, [add(0), call(name), add(1)])
    with pytest.raises(EnvError) as caught:
        results.result()
    assert caught.value.kind == kind and len(str(caught.value)) < 600
    assert shared.execute(other, [add(5)]).result()[0].text == '{"total": 5}'
    if name != "interrupt":  # that is Ctrl-C in this process
        host = InProcessHost(worker_suite.make())
        with pytest.raises(EnvError) as here:
            host.execute(host.start(task("b"), False), [add(0), call(name), add(1)]).result()
        assert str(here.value).startswith(kind)
    for rollout in (broken, other):
        shared.finish(rollout)
    assert not shared.crashes and shared.replaced == 0


def test_a_broken_making_shows_in_every_operation(shared):
    for host in (shared, InProcessHost(worker_suite.make())):
        rollout = host.start(task("b", making="boom"), False)
        for _ in range(2):
            with pytest.raises(EnvError, match="LookupError: the simulator broke"):
                host.execute(rollout, [add(1)]).result()
        host.finish(rollout)
        host.finish(rollout)
        with pytest.raises(ValueError, match="not live: start it first"):
            host.execute(rollout, [add(1)])


def test_a_tool_that_prints_and_reads_harms_nothing(shared, capfd):
    rollout = shared.start(task("p"), False)
    results = shared.execute(rollout, [call("show", text="\0\0\0\4null\n"), add(2)]).result()
    assert [r.text for r in results] == ["", '{"total": 2}']
    assert shared.execute(rollout, []).result() == ()
    shared.finish(rollout)


def test_large_answers_to_many_rollouts_do_not_block(pools):
    pool = pools(count=2, output_chars=2**21)
    text = "y" * 2**18
    rollouts = [pool.start(task(f"r{i}"), False) for i in range(64)]
    pending = []
    for _ in range(2):
        pending += [pool.execute(r, [call("write", chars=2**20), call("show", text=text)])
                    for r in rollouts[:12]]
        pending += [pool.execute(r, [call("write", chars=2**20)]) for r in rollouts]
    for answer in reversed(pending):
        assert len(answer.result()[0].text) == 2**20


def test_two_hundred_rollouts_leave_nothing(shared):
    handles = len(os.listdir("/proc/self/fd"))
    pids = shared.pids
    for i in range(200):
        rollout = shared.start(task(f"c{i % 7}"), False)
        shared.execute(rollout, [add(i)])
        if i % 3:
            assert shared.end_turn(rollout, "done").result()[1].index == 1
        shared.finish(rollout)
    assert len(os.listdir("/proc/self/fd")) == handles and shared.pids == pids
    assert not any(w.rollouts for w in shared.workers)


# ------------------------------------------------------------------ what kills a worker


KILLERS = {
    "sleep": (Crash.TIME, "gave no answer within 1.2 s"),
    "spin": (Crash.TIME, "gave no answer within 1.2 s"),
    "orphan": (Crash.DIED, "ended (exit code 5)"),
    "allocate": (Crash.MEMORY, "wanted more than 400 MB"),
    "exit": (Crash.DIED, "ended (exit code 3)"),
    "segfault": (Crash.DIED, "ended (SIGSEGV)"),
}


@pytest.mark.parametrize("name", KILLERS)
def test_a_killer_costs_its_own_rollout_only(pools, caplog, name):
    reason, what = KILLERS[name]
    pool = pools(call_s=STRICT_S, memory_mb=400)
    killer = call(name, **({"mb": 5000} if name == "allocate" else {}))
    others, victim = bystanders(pool), pool.start(task("victim"), False)
    pool.execute(victim, [add(0)]).result()
    old = pool.pids
    fatal = pool.execute(victim, [add(1), killer, add(2)])
    queued, after = pool.execute(others[0], [add(0)]), pool.end_turn(victim, "done")
    assert queued.result()[0].text == '{"total": 0}'
    for lost in (fatal, after, pool.execute(victim, [add(1)])):
        with pytest.raises(ToolCrash) as caught:
            lost.result()
        assert (caught.value.reason, caught.value.task_uid) == (reason, "victim")
        assert caught.value.call == killer
    pool.finish(victim)
    pool.finish(victim)
    go_on(pool, others)
    assert pool.crashes == {reason: 1} and pool.replaced == 1 and gone(old)
    record, = [r for r in caplog.records if r.name == "rods_jax.tools.workers"]
    assert record.levelno == logging.WARNING and "\n" not in record.getMessage()
    for part in ("task victim", name, what):
        assert part in record.getMessage()


@pytest.mark.parametrize("making, reason, n", [("exit", Crash.DIED, 2), ("sleep", Crash.TIME, 1)])
def test_a_killer_that_waits_in_the_making(pools, making, reason, n):
    pool = pools(call_s=0.5)
    other = pool.start(task("other"), False)
    group = [pool.start(task("trap", making=making), False) for _ in range(n)]
    last = pool.start(task("last"), False)
    assert pool.execute(other, [add(3)]).result()[0].text == '{"total": 3}'
    for rollout in group:
        with pytest.raises(ToolCrash) as caught:
            pool.execute(rollout, [add(1)]).result()
        assert (caught.value.reason, caught.value.call) == (reason, None)
    assert pool.execute(last, [add(4)]).result()[0].text == '{"total": 4}'
    assert pool.crashes == {reason: n}


def test_one_bad_task_is_no_outage(pools):
    pool = pools(count=1)
    group = [pool.start(task("trap", making="exit"), False) for _ in range(5)]
    for rollout in group:
        with pytest.raises(ToolCrash):
            pool.execute(rollout, [add(1)]).result()
        pool.finish(rollout)
    go_on(pool, bystanders(pool))
    assert pool.crashes == {Crash.DIED: 5}


def test_killed_from_outside_while_idle_loses_nothing(pools, caplog):
    pool = pools(count=2)
    rollouts = bystanders(pool, 5)
    for pid in pool.pids:
        kill(pid)
    go_on(pool, rollouts)
    assert not pool.crashes and pool.replaced == 2
    assert sum("SIGKILL" in r.getMessage() and "no rollout is lost" in r.getMessage()
               for r in caplog.records) == 2


def test_killed_from_outside_while_busy(pools):
    pool = pools()
    others, victim = bystanders(pool), pool.start(task("v"), False)
    fatal = pool.execute(victim, [add(1), call("sleep")])
    first_row(pool, fatal)
    kill(pool.pids[0])
    with pytest.raises(ToolCrash) as caught:
        fatal.result()
    assert (caught.value.reason, caught.value.call) == (Crash.DIED, call("sleep"))
    go_on(pool, others)


def test_a_worker_lost_again_while_it_is_rebuilt(pools):
    pool = pools()
    others = bystanders(pool)
    kill(pool.pids[0])
    pending = [pool.execute(rollout, [add(0)]) for rollout in others]
    while pool.replaced == 0:
        pool.pump()
    kill(pool.pids[0])
    for i, answer in enumerate(pending):
        assert answer.result()[0].text == f'{{"total": {10 * i}}}'
    go_on(pool, others)
    assert not pool.crashes and pool.replaced == 2


def test_many_long_calls_are_not_one_that_is_too_long(pools):
    """The limit is on a call, and its clock starts when the worker can begin it."""
    pool = pools(call_s=1.2)
    rollouts = [pool.start(task(f"s{i}"), False) for i in range(3)]
    pending = [pool.execute(r, [call("sleep", s=0.3)] * 2) for r in rollouts]
    assert [len(p.result()) for p in reversed(pending)] == [2, 2, 2]
    quick = pool.execute(rollouts[0], [add(1)])
    time.sleep(1.4)  # nobody looks
    assert quick.result()[0].text == '{"total": 1}' and pool.replaced == 0


def test_an_environment_that_answers_otherwise_is_not_taken_for_the_same(pools):
    pool = pools()
    odd, fair = pool.start(task("odd"), False), pool.start(task("fair"), False)
    pool.execute(odd, [call("where")]).result()
    pool.execute(fair, [add(7)]).result()
    kill(pool.pids[0])
    with pytest.raises(EnvError, match="task odd answered otherwise"):
        pool.execute(odd, [add(1)]).result()
    assert pool.execute(fair, [add(1)]).result()[0].text == '{"total": 8}'


@pytest.mark.parametrize("factory, line", [
    ("make_refused", "odd tools are not installed: pip install odd-tools"),
    ("make_broken", "suite factory 'worker_suite:make_broken' raised KeyError: 'missing'; mend it"),
    ("no_such", "suite factory 'worker_suite:no_such' cannot be imported"),
    ("make_dead", "3 in a row got nothing done, the last ended (exit code 9)")])
def test_workers_that_do_not_come_up_are_one_line(pools, factory, line):
    pool = pools(SuiteSpec(SuiteName.CUSTOM, f"worker_suite:{factory}"))
    answer = pool.execute(pool.start(task("t"), False), [add(1)])
    for _ in range(2):
        with pytest.raises(Outage) as caught:
            answer.result()
        assert line in str(caught.value) and "\n" not in str(caught.value)
    assert pool.replaced <= 2
    pool.close()
    assert gone(pool.pids)


def test_tasks_that_each_kill_are_an_outage(pools):
    pool = pools()
    pending = [pool.execute(pool.start(task(f"t{i}", making="exit"), False), [add(1)])
               for i in range(4)]
    for answer, error in zip(pending, [ToolCrash, ToolCrash, Outage, Outage], strict=True):
        with pytest.raises(error):
            answer.result()


def test_close_ends_all_and_reaps_them(pools):
    pool = pools(count=3, call_s=60.0)
    busy = pool.execute(pool.start(task("t"), False), [add(1), call("spin")])
    first_row(pool, busy)
    handles = len(os.listdir("/proc/self/fd"))
    pool.close()
    assert not any(map(alive, pool.pids))  # not even zombies
    assert len(os.listdir("/proc/self/fd")) == handles - 9
    pool.close()
    for use in (busy.result, lambda: pool.start(task("t"), False)):
        with pytest.raises(Outage, match="closed"):
            use()


def test_a_pool_that_is_dropped_ends_its_workers():
    pool = make_host(worker_suite.make(), ODD, GENEROUS)
    pids = pool.pids
    del pool
    assert not any(map(alive, pids))


PARENT = """
import sys, time
from rods_jax.tools.host import HostConfig, make_host
from rods_jax.tools.suites import SuiteName, SuiteSpec
from rods_jax.types import ToolCall
import worker_suite
pool = make_host(None, SuiteSpec(SuiteName.CUSTOM, "worker_suite:make"),
                 HostConfig(count=2, call_s=60.0))
busy, idle = (pool.start(worker_suite.task(uid), False) for uid in "ab")
pool.execute(idle, [worker_suite.add(1)]).result()
spinning = pool.execute(busy, [worker_suite.add(1), ToolCall("spin", {})])
while not spinning._operation.rows and not spinning._operation.settled:
    pool.pump()
print(*pool.pids, flush=True)
"""


@pytest.mark.parametrize("last", ["time.sleep(600)", "raise SystemExit('the run broke')"])
def test_workers_end_with_their_parent(last):
    here = pathlib.Path(__file__).resolve().parent
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT + last], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])})
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    if "sleep" in last:
        assert all(map(alive, pids))
        parent.send_signal(signal.SIGKILL)
    parent.communicate()
    assert gone(pids)


@pytest.mark.parametrize("field, value", [
    ("count", -1), ("call_s", 0.0), ("call_s", float("nan")), ("output_chars", 0)])
def test_settings_that_make_no_sense_are_refused(field, value):
    with pytest.raises(ValueError, match=f"workers.{field} is .*: give ") as caught:
        HostConfig(**{field: value})
    assert "\n" not in str(caught.value)
