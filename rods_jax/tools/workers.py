"""Environments in worker processes: limits on time and memory, lost workers replaced.

A worker serves many rollouts, one operation at a time. `WorkerPool` sends operations at once
and reads answers while it waits for one, or when it is told to look. When a worker is lost, so
is the rollout whose operation ran; all its other rollouts are made again in a new worker from
their recorded operations, since environments are deterministic. For one thread at a time.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import math
import os
import select
import signal
import time
import weakref
from collections.abc import Callable, Collection, Sequence

from rods_jax.tools.bulk import Item, Played, play_many
from rods_jax.tools.env import UserTurn
from rods_jax.tools.host import (
    Closed, Crash, EnvError, HostConfig, Outage, Pending, ToolCrash, any_ready)
from rods_jax.tools.suites import SuiteSpec
from rods_jax.tools.worker import MEMORY_EXIT, Answer, Request, frame
from rods_jax.tools.worker_process import (
    Operation, Rollout, WorkerProcess, call_row, pipe_share)
from rods_jax.types import Json, Task, ToolCall, ToolResult, TurnOutcome

log = logging.getLogger(__name__)

SLOW = 6  # times call_s: to make an environment, to end a turn, to play one task
START_S = 120.0  # to import and make the suite
MOST_LOST = 3  # workers in one place in a row without one operation done
KNOWN_TASKS = 4096  # tasks that are not sent again


class _Answered:
    """Implements Pending over an operation of the pool."""

    def __init__(self, pool: WorkerPool, operation: Operation,
                 read: Callable[[list[Json]], object]):
        self._pool, self._operation, self._read = pool, operation, read

    def ready(self) -> bool:
        return self._operation.settled or self._pool.down is not None

    def result(self):
        while not self._operation.settled:
            self._pool.pump()
        failure = self._operation.lost or self._operation.error
        if failure is not None:
            raise failure
        return self._read(self._operation.rows)


class WorkerPool:
    """Implements Host. Raises Outage, one line, where workers do not come up: at once if no
    process can be started, else with the results, so that their start costs nobody time."""

    def __init__(self, spec: SuiteSpec, config: HostConfig):
        if config.count < 1:
            raise ValueError(f"workers.count is {config.count}: a pool needs 1 or more")
        self.crashes: collections.Counter[Crash] = collections.Counter()
        self.replaced = 0
        self.slow_s = SLOW * config.call_s
        self._spec, self._config = spec, config
        self._ids, self._numbers = itertools.count(), itertools.count()
        self._rollouts: dict[int, Rollout] = {}
        self._known: collections.OrderedDict[str, tuple[int, Task]] = collections.OrderedDict()
        self._outage: Outage | None = None
        self.workers: list[WorkerProcess] = []
        self._closed = weakref.finalize(self, _end_all, self.workers, os.getpid())
        try:
            for _ in range(config.count):
                self.workers.append(self._begin())
        except Outage:
            self.close()
            raise

    # ------------------------------------------------------------------ operations

    def start(self, task: Task, hints: bool) -> int:
        self.check()
        worker = min(self.workers, key=lambda w: len(w.rollouts))
        rollout = Rollout(next(self._ids), task, worker)
        self._rollouts[rollout.number] = worker.rollouts[rollout.number] = rollout
        number = self.number(task)
        self._submit(Operation(
            Request.START, [rollout.number, number, hints], 1, self.slow_s,
            rollout, tasks=((number, task),)))
        return rollout.number

    def execute(self, rollout: int, calls: Sequence[ToolCall]) -> Pending[tuple[ToolResult, ...]]:
        calls = tuple(calls)
        return self._submit(Operation(
            Request.EXECUTE, [rollout, [call_row(call) for call in calls]], len(calls),
            self._config.call_s, self._live(rollout), calls=calls),
            lambda rows: tuple(ToolResult(*row) for row in rows))

    def end_turn(self, rollout: int, said: str) -> Pending[Closed]:
        return self._submit(Operation(
            Request.END, [rollout, said], 1, self.slow_s, self._live(rollout)),
            lambda rows: _closed(*rows[0]))

    def finish(self, rollout: int) -> None:
        if (found := self._rollouts.pop(rollout, None)) is not None:
            found.home.finish(rollout)

    def poll(self) -> None:
        with contextlib.suppress(Outage):  # which every result raises from now on
            self.pump(0.0)

    def wait(self, pendings: Collection[Pending]) -> None:
        while not any_ready(pendings):
            with contextlib.suppress(Outage):
                self.pump()

    def close(self) -> None:
        self._closed()

    def play_many(self, items: Sequence[Item], texts: bool = True) -> list[Played]:
        """Transcripts in bulk, see rods_jax.tools.bulk; may run beside live rollouts."""
        return play_many(self, items, texts)

    def number(self, task: Task) -> int:
        """What the workers call the task."""
        number, known = self._known.get(task.uid, (-1, None))
        # Not by ==, to which 1, 1.0 and true are one.
        if known is not task and (known is None or frame(known.to_json()) != frame(task.to_json())):
            self._forget(number)
            number = next(self._numbers)
        self._known[task.uid] = number, task
        self._known.move_to_end(task.uid)
        if len(self._known) > KNOWN_TASKS:
            self._forget(self._known.popitem(last=False)[1][0])
        return number

    def _forget(self, number: int) -> None:
        for worker in self.workers:
            worker.forget(number)

    def _live(self, rollout: int) -> Rollout:
        self.check()
        if rollout not in self._rollouts:
            raise ValueError(f"rollout {rollout} is not live: start it first")
        return self._rollouts[rollout]

    def _submit(self, operation: Operation,
                read: Callable[[list[Json]], object] = lambda rows: None) -> _Answered:
        rollout = operation.rollout
        operation.lost = rollout.lost
        if not operation.settled:
            rollout.history.append(operation)
            rollout.home.ask(operation)
        return _Answered(self, operation, read)

    # ------------------------------------------------------------------ workers

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(worker.pid for worker in self.workers)

    def _begin(self, barren: tuple[str, ...] = ()) -> WorkerProcess:
        """It makes its suite while others begin; see WorkerProcess."""
        config = self._config
        hello = Operation(Request.HELLO, [self._spec.to_json(), config.output_chars,
                                          config.memory_mb], 1, START_S)
        return WorkerProcess(hello, pipe_share(config.count), barren)

    @property
    def down(self) -> Outage | None:
        """Why nothing can be asked any more."""
        if self._outage is None and not self._closed.alive:
            return Outage("the tool workers are closed: make a new host")
        return self._outage

    def check(self) -> None:
        if (down := self.down) is not None:
            raise down

    def pump(self, most_s: float = math.inf) -> None:
        """Waits until a worker says something, takes bytes or is out of time, for `most_s` at
        most, and acts on it. Time is up only for what had nothing to say after we looked,
        however late we look."""
        self.check()
        poll = select.poll()
        for worker in self.workers:
            poll.register(worker.answers, select.POLLIN)
            if worker.writing:
                poll.register(worker.requests, select.POLLOUT)
        ends = [worker.expires for worker in self.workers if worker.expires is not None]
        wait_s = min(most_s, max(0.0, min(ends, default=math.inf) - time.monotonic()))
        if wait_s == math.inf:
            raise ValueError("no worker was asked anything: there is nothing to wait for")
        ready = {end for end, _ in poll.poll(1000 * wait_s)}
        looked = time.monotonic()
        for worker in list(self.workers):
            if worker.requests in ready:
                worker.write()
            if worker.answers in ready:
                for kind, rest in worker.read():
                    self._take(worker, kind, rest)
                if worker.closed:
                    self._replace(worker)
            elif worker.expires is not None and worker.expires <= looked:
                self._replace(worker)

    def _take(self, worker: WorkerProcess, kind: Answer, rest: list[Json]) -> None:
        """One frame of the answer to the operation that runs."""
        operation = worker.queue[0]
        if kind is Answer.ERROR:
            operation.error = EnvError(*rest)
        else:
            operation.rows.extend(rest[0])
        if not operation.answered:
            return
        worker.queue.popleft()
        if operation.request is not Request.HELLO:
            worker.done = True
        elif operation.error is not None:
            self._fail(operation.error.text if operation.error.kind == "ValueError" else
                       f"the suite cannot be made in a worker process: {operation.error}")
        first = operation.first
        if first is not None and not _same_answer(first, operation):
            self._lose(operation.rollout, EnvError("NotDeterministic", (
                f"task {operation.rollout.task.uid} answered otherwise when it was made again "
                "in a new worker: give the environment its own seeded randomness")))

    def _fail(self, reason: str) -> None:
        self._outage = Outage(" ".join(reason.split()))
        raise self._outage

    def _lose(self, rollout: Rollout, why: Exception) -> None:
        rollout.lost = why
        for operation in rollout.history:
            if not operation.settled:
                operation.lost = why

    def _replace(self, worker: WorkerProcess) -> None:
        """Ends a worker that has ended by itself or is out of time, and starts another."""
        code = worker.end()
        if code == -signal.SIGKILL and not worker.closed:
            reason = Crash.TIME
        else:
            reason = Crash.MEMORY if code == MEMORY_EXIT else Crash.DIED
        what = self._what(reason, code, worker)
        uid = self._blame(worker.running, reason, what)
        barren = () if worker.done else worker.barren
        if not worker.done and uid is not None and (uid == "" or uid not in barren):
            barren += (uid,)
        if len(barren) >= MOST_LOST:
            self._fail(f"tool workers do not stay up: {len(barren)} in a row got nothing done, "
                       f"the last {what}: mend the tools, or set workers.count to 0 to run "
                       "them in this process")
        self.replaced += 1
        try:
            fresh = self._begin(barren)
        except Outage as error:
            self._outage = error
            raise
        self.workers[self.workers.index(worker)] = fresh
        for number, rollout in worker.rollouts.items():
            if rollout.lost is None:
                rollout.home = fresh
                fresh.rollouts[number] = rollout
                for operation in rollout.history:
                    fresh.ask(operation.fresh())
        for operation in worker.queue:
            if operation.settled or operation.request is Request.HELLO:
                continue
            if operation.request is Request.PLAY:
                fresh.ask(operation.fresh())
            elif operation.rollout.number not in fresh.rollouts:  # finished meanwhile
                operation.lost = ToolCrash(reason, operation.rollout.task.uid, None)

    def _blame(self, running: Operation | None, reason: Crash, what: str) -> str | None:
        """Gives up what the worker was doing. Returns the uid of its task, "" where it did
        nothing, None where it is not known which task it was."""
        if running is None or running.request is Request.HELLO:
            log.warning("tool worker %s %s: replaced, no rollout is lost", what,
                        "while idle" if running is None else "before it was ready")
            return ""
        left = running.due - len(running.rows)
        task = running.tasks[-left][1] if running.rollout is None else running.rollout.task
        crash = ToolCrash(reason, task.uid, running.call)
        running.lost = crash
        if running.rollout is not None:
            self._lose(running.rollout, crash)
        elif left > 1:
            log.warning("tool worker %s in one of %d tasks: replaced, they are played again "
                        "one by one", what, left)
            return None
        self.crashes[reason] += 1
        log.warning("task %s: tool worker %s in %s: replaced, the rollout is lost",
                    task.uid, what, running.shown)
        return task.uid

    def _what(self, reason: Crash, code: int, worker: WorkerProcess) -> str:
        if reason is Crash.TIME:
            return f"gave no answer within {worker.queue[0].limit_s:g} s"
        if reason is Crash.MEMORY:
            return f"wanted more than {self._config.memory_mb} MB"
        return f"ended ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})"


def _closed(outcome: Json, turn: Json) -> Closed:
    return TurnOutcome(*outcome), turn and UserTurn(turn[0], turn[1], *map(tuple, turn[2:]))


def _same_answer(a: Operation, b: Operation) -> bool:
    return a.rows == b.rows and str(a.error) == str(b.error)


def _end_all(workers: list[WorkerProcess], owner: int) -> None:
    """Idle workers may end by themselves, for half a second; the others are killed."""
    if os.getpid() != owner:  # a fork of the process that started them
        return
    idle = [worker for worker in workers if not worker.queue and not worker.ended]
    for worker in idle:
        worker.dismiss()
    until = time.monotonic() + 0.5
    for worker in idle:
        poll = select.poll()
        poll.register(worker.answers, select.POLLIN)
        poll.poll(1000 * max(0.0, until - time.monotonic()))
    for worker in workers:
        worker.end()
