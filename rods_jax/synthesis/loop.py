"""The synthesizer beside training: one host thread, the same tasks whatever its timing.

    synthesizer = Synthesizer(suite, config, run_seed, guard, known)
    synthesizer.request(step, [(task, 2), ...])     # never blocks
    fresh = synthesizer.collect(step - 1, 60.0)     # waits for what was asked up to then
    synthesizer.settle([c.task.uid for c in ...])   # admitted or dropped: forget them

Jobs run in the order (step, order asked, index). Each draws from a generator named after
it, and only this one thread decides novelty, in that order. What is refused for want of
room depends on what was asked and collected, never on how fast the thread is.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Iterable, Mapping, Sequence

from rods_jax.synthesis.novelty import Known
from rods_jax.synthesis.outcome import Candidate, Funnel, Outcome, outcome_from_json
from rods_jax.synthesis.pipeline import SynthesisConfig, crash, make_maker
from rods_jax.tasks.leakage import HeldOutGuard
from rods_jax.tools.env import Suite
from rods_jax.types import Json, Task

STATE_VERSION = 1


@dataclasses.dataclass(frozen=True)
class _Job:
    seed: Task
    step: int
    index: int


class Synthesizer:
    """Owns one daemon thread from construction to `close`. The methods are called from
    one thread (the trainer's).

    known: content hashes of all tasks that exist already, held-in ones included.
    max_outstanding: attempts asked for and not yet collected; what would go beyond it is
    not taken and counted in `refused`.
    """

    def __init__(self, suite: Suite, config: SynthesisConfig, run_seed: int,
                 guard: HeldOutGuard, known: Iterable[str] = (), *, max_outstanding: int = 256):
        self._setup(suite, config, run_seed, guard, max_outstanding)
        self._known = Known.from_json(known)
        self._thread.start()

    def _setup(self, suite, config, run_seed, guard, max_outstanding) -> None:
        if max_outstanding < 1:
            raise ValueError(f"max_outstanding is {max_outstanding}: give at least 1")
        self._suite, self._config, self._run_seed = suite, config, run_seed
        self._maker = make_maker(suite, config, guard, run_seed)
        self._max_outstanding = max_outstanding
        self._changed = threading.Condition()
        # All below is guarded by the condition's lock.
        self._known = Known()
        self._jobs: collections.deque[_Job] = collections.deque()  # the first may be running
        self._done: collections.deque[Outcome] = collections.deque()  # not collected
        self._waiting: dict[str, Candidate] = {}  # collected, not settled
        self._funnel = Funnel()
        self._last_step = -1
        self._next_index: dict[str, int] = {}  # by seed uid, in the last step
        self._refused = 0
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="synthesizer", daemon=True)

    # ------------------------------------------------------------ asked by the trainer

    def request(self, step: int, tasks_with_counts: Sequence[tuple[Task, int]]) -> int:
        """Asks for `count` x `variants_per_seed` attempts at each task; returns how many
        attempts were taken. Steps must not go back. Raises RuntimeError when closed."""
        with self._changed:
            self._check_alive()
            if step < self._last_step:
                raise ValueError(f"step {step} was asked after step {self._last_step}: "
                                 "ask in the order of steps")
            if step > self._last_step:
                self._last_step, self._next_index = step, {}
            jobs = []
            for seed, count in tasks_with_counts:
                start = self._next_index.get(seed.uid, 0)
                end = start + count * self._config.variants_per_seed
                jobs.extend(_Job(seed, step, i) for i in range(start, end))
                self._next_index[seed.uid] = end
            room = self._max_outstanding - len(self._jobs) - len(self._done)
            taken = jobs[:max(room, 0)]
            self._jobs.extend(taken)
            self._refused += len(jobs) - len(taken)
            self._changed.notify_all()
            return len(taken)

    def collect(self, upto_step: int, timeout_s: float) -> list[Candidate]:
        """Accepted candidates of all requests with step <= `upto_step`, in job order.

        Waits for them; TimeoutError after `timeout_s` seconds loses nothing. They also
        stay in `waiting` until settled."""
        with self._changed:
            finished = self._changed.wait_for(
                lambda: not self._jobs or self._jobs[0].step > upto_step
                or not self._thread.is_alive(), timeout_s)
            if not finished:
                raise TimeoutError(
                    f"synthesis of step {self._jobs[0].step} has not ended after {timeout_s} s "
                    f"({len(self._jobs)} attempts to go): wait longer or ask for less")
            if self._jobs and self._jobs[0].step <= upto_step:
                self._check_alive()
            fresh = []
            while self._done and self._done[0].step <= upto_step:
                outcome = self._done.popleft()
                self._funnel.add(outcome)
                if isinstance(outcome, Candidate):
                    fresh.append(outcome)
                    self._waiting[outcome.task.uid] = outcome
            return fresh

    def settle(self, uids: Iterable[str]) -> None:
        """Forgets candidates that were admitted or dropped. Their hashes stay known."""
        with self._changed:
            for uid in uids:
                self._waiting.pop(uid, None)

    @property
    def waiting(self) -> tuple[Candidate, ...]:
        """Collected and not settled, in the order of collection."""
        with self._changed:
            return tuple(self._waiting.values())

    @property
    def funnel(self) -> Funnel:
        """Counts of the attempts collected so far (a copy)."""
        with self._changed:
            return Funnel.from_json(self._funnel.to_json())

    @property
    def refused(self) -> int:
        """Attempts asked for that found no room."""
        with self._changed:
            return self._refused

    @property
    def outstanding(self) -> int:
        """Attempts taken and not collected."""
        with self._changed:
            return len(self._jobs) + len(self._done)

    def close(self, timeout_s: float = 30.0) -> None:
        """Lets the attempt at work end and joins the thread; `state` still answers, and
        what was not begun is part of it. Raises TimeoutError when the attempt hangs."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the synthesizer's thread did not end within {timeout_s} s: "
                               "its attempt hangs in the suite")

    def __enter__(self) -> Synthesizer:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    # ------------------------------------------------------------ checkpointing

    def state(self) -> dict[str, Json]:
        """Everything a restart needs, as JSON; an attempt at work counts as not begun."""
        with self._changed:
            seeds = {job.seed.uid: job.seed.to_json() for job in self._jobs}
            return {
                "version": STATE_VERSION,
                "run_seed": self._run_seed,
                "known": self._known.to_json(),
                "seeds": seeds,
                "jobs": [[job.seed.uid, job.step, job.index] for job in self._jobs],
                "done": [outcome.to_json() for outcome in self._done],
                "waiting": [candidate.to_json() for candidate in self._waiting.values()],
                "funnel": self._funnel.to_json(),
                "last_step": self._last_step,
                "next_index": dict(self._next_index),
                "refused": self._refused,
            }

    @classmethod
    def restore(cls, state: Mapping[str, Json], suite: Suite, config: SynthesisConfig,
                run_seed: int, guard: HeldOutGuard, *, max_outstanding: int = 256) -> Synthesizer:
        """A synthesizer that goes on as the one that gave `state` would have."""
        if state["version"] != STATE_VERSION or state["run_seed"] != run_seed:
            raise ValueError(
                f"synthesizer state has version {state['version']} and run seed "
                f"{state['run_seed']}, this run has {STATE_VERSION} and {run_seed}: "
                "resume with the run's own code and seed")
        new = cls.__new__(cls)
        new._setup(suite, config, run_seed, guard, max_outstanding)
        seeds = {uid: Task.from_json(row) for uid, row in state["seeds"].items()}
        new._known = Known.from_json(state["known"])
        new._jobs.extend(_Job(seeds[uid], step, index) for uid, step, index in state["jobs"])
        new._done.extend(outcome_from_json(row) for row in state["done"])
        new._waiting = {c.task.uid: c for c in map(Candidate.from_json, state["waiting"])}
        new._funnel = Funnel.from_json(state["funnel"])
        new._last_step, new._refused = state["last_step"], state["refused"]
        new._next_index = dict(state["next_index"])
        new._thread.start()
        return new

    # ------------------------------------------------------------ the thread

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if self._closed:
                    return
                job = self._jobs[0]
            try:  # reading _known without the lock is safe: only this thread writes it
                outcome = self._maker.attempt(job.seed, job.step, job.index, self._known)
            except BaseException as error:  # no attempt, whatever it does, ends the thread
                outcome = crash(job.seed.uid, job.step, job.index, error)
            with self._changed:
                if isinstance(outcome, Candidate):
                    self._known.add(outcome.task)
                self._jobs.popleft()
                self._done.append(outcome)
                self._changed.notify_all()

    def _check_alive(self) -> None:
        if self._closed or not self._thread.is_alive():
            raise RuntimeError("the synthesizer was closed and its thread has ended: "
                               "make a new one with Synthesizer.restore(state, ...)")

