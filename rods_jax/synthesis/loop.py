"""The trainer's side of synthesis beside training: the same tasks whatever its timing.

    synthesizer = Synthesizer(folder, header, config, make, LoopConfig())
    synthesizer.request(step, [(task, 2), ...])     # never blocks
    fresh = synthesizer.collect(step - 1, 60.0)     # waits for what was asked up to then
    synthesizer.settle([c.task.uid for c in ...])   # admitted or dropped: forget them

The attempts are made by a thread, a process of its own or another machine (`Host`), with which
this side shares a folder and nothing else, see exchange.py. They are asked for in the order
(step, order asked, index); each draws from a generator named after it, and the synthesizer
alone decides novelty, in that order. What is refused for want of room depends on what was asked
and collected, never on how fast the synthesizer is.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rods_jax.synthesis import hosts
from rods_jax.synthesis.exchange import (OUTCOMES, REQUESTS, Asked, Digest, Header, answer, begin,
                                         newest_generation, training)
from rods_jax.synthesis.hosts import Host
from rods_jax.synthesis.journal import Appender, JournalError, Tail, sync
from rods_jax.synthesis.outage import OutageWatch
from rods_jax.synthesis.outcome import Candidate, Funnel, Outcome
from rods_jax.synthesis.pipeline import Maker, SynthesisConfig
from rods_jax.synthesis.worker import OutageStop
from rods_jax.types import Json, Task

STATE_VERSION = 2
_PAUSES_S = 0.001, 0.05  # between looks at the outcomes while waiting: first, longest


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """host: where the synthesizer runs; with another than THREAD it makes the suite and the
    writer itself. wait: an admission waits for all variants asked for in earlier steps, at most
    timeout_s seconds, so that the run does not depend on how fast they are made; False takes
    those that are there. max_outstanding: attempts asked for and not yet collected; what would
    go beyond it is not asked, and counted."""

    host: Host = Host.THREAD
    wait: bool = True
    timeout_s: float = 600.0
    max_outstanding: int = 256

    def __post_init__(self):
        if self.max_outstanding < 1:
            raise ValueError(f"max_outstanding is {self.max_outstanding}: give at least 1")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s is {self.timeout_s}: give seconds above 0")


class TrainersWriter(Protocol):
    """A writer that needs the trainer's thread. The synthesizer asks it through an endpoint; it
    answers from `poll`, and so also while `collect` waits."""

    def answer(self) -> None:
        """Answers what was asked by now; what comes later waits for the next call."""

    def close(self) -> None:
        """Tells those that wait that there will be no answer."""


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Synthesizer:
    """Owns the folder's requests, and the host from the first request, or `open`, to `close`.
    Called from one thread, the trainer's; nothing here runs beside it.

    A folder that an earlier run left is emptied at `open`. make: the maker of a THREAD host.
    say: takes the lines for the person, on standard error by itself. writer: one that needs the
    trainer's thread; it is closed after the host, so that no attempt fails for it, and needs an
    endpoint with a concurrency of 2 or more, so that the host itself waits for no answer."""

    def __init__(self, folder: Path, header: Header, config: SynthesisConfig,
                 make: Callable[[Header], Maker], loop: LoopConfig = LoopConfig(), *,
                 say: Callable[[str], None] = _say, writer: TrainersWriter | None = None):
        self._folder, self._header, self._config = Path(folder), header, config
        self._make, self._loop, self._say = make, loop, say
        self._writer, self.writing_s = writer, 0.0  # seconds that the trainer's thread wrote
        self._asked = Asked()
        self._outcomes = Tail(self._folder / OUTCOMES)
        self._watch = OutageWatch(config.on_outage, say)
        self._done: collections.deque[Outcome] = collections.deque()  # not collected
        self._collected = 0
        self._told = Digest()  # of what was collected
        self._waiting: dict[str, Candidate] = {}  # collected, not settled
        self._numbers: dict[str, int] = {}  # of the requests that those answer
        self._funnel = Funnel()
        self._last_step = -1
        self._next_index: dict[str, int] = {}  # by seed uid, in the last step
        self._refused = 0
        self._halted = ""
        self._held = contextlib.ExitStack()  # the folder, as its one trainer
        self._requests: Appender | None = None
        self._host: hosts.ThreadHost | hosts.ProcessHost | hosts.Elsewhere | None = None
        self._closed = False

    def open(self) -> None:
        """Begins the folder and starts the host, unless that is done."""
        if self._requests is None:
            self._held.enter_context(training(self._folder))
            generation = begin(self._folder, self._header)
            self._requests = Appender(self._folder / REQUESTS)
            if generation:
                self._requests.append([self._asked.rewind(0, generation)])
        if self._host is None and not self._closed:
            self._host = hosts.start(self._loop.host, self._folder, self._make, self._say)

    # ------------------------------------------------------------ asked by the trainer

    def request(self, step: int, tasks_with_counts: Sequence[tuple[Task, int]]) -> int:
        """Asks for `count` x `variants_per_seed` attempts at each task; returns how many
        attempts were taken. Steps must not go back. Raises RuntimeError when closed."""
        self._check_open()
        if step < self._last_step:
            raise ValueError(f"step {step} was asked after step {self._last_step}: "
                             "ask in the order of steps")
        if step > self._last_step:
            self._last_step, self._next_index = step, {}
        self.open()
        jobs = []
        for seed, count in tasks_with_counts:
            start = self._next_index.get(seed.uid, 0)
            end = start + count * self._config.variants_per_seed
            jobs.extend((seed, index) for index in range(start, end))
            self._next_index[seed.uid] = end
        room = self._loop.max_outstanding - self.outstanding
        taken = jobs[:max(room, 0)]
        self._refused += len(jobs) - len(taken)
        self._requests.append([self._asked.ask(seed, step, index) for seed, index in taken])
        self._host.ring()
        return len(taken)

    def poll(self) -> None:
        """Lets a writer in this thread answer, reads what has been made, and starts a process
        that died again. Waits for nobody. Raises JournalError for a damaged file, Stopped where
        the synthesizer cannot be kept alive or stopped because its endpoint is down; `state` is
        then as it was."""
        if self._writer is not None and self._requests is not None and not self._closed:
            began = time.monotonic()
            self._writer.answer()
            self.writing_s += time.monotonic() - began
        self._look()

    def _look(self) -> None:
        if self._requests is None:
            return
        if not self._closed:
            self._requests.check()
        self._outcomes.feed(self._take)
        if self._host is not None and not self._closed:
            self._host.check(self.answered)
        if self._halted and not self._closed:
            raise OutageStop(self._halted)

    def collect(self, upto_step: int, timeout_s: float | None = None) -> list[Candidate]:
        """Accepted candidates of requests with step <= `upto_step`, in the order asked.

        Waits for all of them, TimeoutError after `timeout_s` seconds (the config's, unless
        given) loses nothing; or, as the config says, takes those that are there. They also stay
        in `waiting` until settled."""
        limit = self._loop.timeout_s if timeout_s is None else timeout_s
        end, (pause, longest) = time.monotonic() + limit - self.writing_s, _PAUSES_S
        self._look()
        while self._due(upto_step):
            self._check_open()
            if not self._loop.wait:
                break
            if time.monotonic() - self.writing_s >= end:  # writing is no waiting
                to_go = len(self._asked.requests) - self.answered
                raise TimeoutError(
                    f"synthesis of step {self._asked.requests[self.answered].step} has not ended "
                    f"after {limit} s ({to_go} attempts to go): see that a synthesizer serves "
                    f"{self._folder}, or raise synthesizer.timeout_s")
            time.sleep(pause)
            pause = min(2 * pause, longest)
            self.poll()
        fresh = []
        while self._done and self._done[0].step <= upto_step:
            outcome = self._done.popleft()
            self._count(outcome)
            if isinstance(outcome, Candidate):
                fresh.append(outcome)
                self._keep(outcome, self._collected - 1)
        return fresh

    def settle(self, uids: Iterable[str]) -> None:
        """Forgets candidates that were admitted or dropped. They stay known."""
        for uid in uids:
            self._waiting.pop(uid, None)
            self._numbers.pop(uid, None)

    @property
    def waiting(self) -> tuple[Candidate, ...]:
        """Collected and not settled, in the order of collection."""
        return tuple(self._waiting.values())

    @property
    def funnel(self) -> Funnel:
        """Counts of the attempts collected so far (a copy)."""
        return Funnel.from_json(self._funnel.to_json())

    @property
    def refused(self) -> int:
        """Attempts asked for that found no room."""
        return self._refused

    @property
    def answered(self) -> int:
        """Attempts whose outcomes have been read, collected or not."""
        return self._collected + len(self._done)

    @property
    def outstanding(self) -> int:
        """Attempts taken and not collected."""
        return len(self._asked.requests) - self._collected

    @property
    def pid(self) -> int | None:
        """Of its process, where it has one that this started."""
        return self._host.pid if isinstance(self._host, hosts.ProcessHost) else None

    @property
    def restarts(self) -> int:
        """Times that its process was started again, since this was made."""
        return 0 if self._host is None else self._host.restarts

    @property
    def outages(self) -> int:
        """Times that its endpoint stopped answering, since this was made."""
        return self._watch.outages

    def close(self, timeout_s: float = 30.0, *, ended: bool = False) -> None:
        """Lets the attempt at work end, and the host; `state` still answers, and what was not
        begun is part of it. ended: the run is over, which a synthesizer elsewhere is told.
        Raises TimeoutError when the attempt hangs."""
        if self._closed:
            return
        self._closed = True
        if self._requests is not None:
            if ended:
                self._requests.append([{"end": True}])
            self._requests.close()
        with contextlib.closing(self._writer) if self._writer else contextlib.nullcontext():
            if self._host is not None:
                self._host.close(timeout_s)
        self._held.close()

    def __enter__(self) -> Synthesizer:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    # ------------------------------------------------------------ checkpointing

    def state(self) -> dict[str, Json]:
        """What a restart needs beside the folder, as JSON. What it speaks of is on disk."""
        if self._asked.requests:
            for name in (REQUESTS, OUTCOMES):
                sync(self._folder / name)
        return {
            "version": STATE_VERSION, "run_seed": self._header.run_seed,
            "asked": len(self._asked.requests), "asked_digest": self._asked.digest,
            "collected": self._collected, "collected_digest": str(self._told),
            "waiting": list(self._numbers.values()), "last_step": self._last_step,
            "next_index": dict(self._next_index), "refused": self._refused,
        }

    @classmethod
    def restore(cls, state: Mapping[str, Json], folder: Path, header: Header,
                config: SynthesisConfig, make: Callable[[Header], Maker],
                loop: LoopConfig = LoopConfig(), *, say: Callable[[str], None] = _say,
                writer: TrainersWriter | None = None) -> Synthesizer:
        """A synthesizer that goes on as the one that gave `state` would have. Raises
        JournalError where the folder does not hold what the state speaks of."""
        if state["version"] != STATE_VERSION or state["run_seed"] != header.run_seed:
            raise JournalError(
                f"synthesizer state has version {state['version']} and run seed "
                f"{state['run_seed']}, this run has {STATE_VERSION} and {header.run_seed}: "
                "resume with the run's own code and seed")
        new = cls(folder, header, config, make, loop, say=say, writer=writer)
        new._last_step, new._refused = state["last_step"], state["refused"]
        new._next_index = dict(state["next_index"])
        if state["asked"]:
            try:
                new._resume(state)
            except BaseException:
                new._held.close()
                raise
        return new

    def _resume(self, state: Mapping[str, Json]) -> None:
        """Reads the files, and only then writes where the run goes on."""
        asked, collected = state["asked"], state["collected"]
        try:
            header = Header.read(self._folder)
        except FileNotFoundError:
            raise self._lost(f"{asked} requests", "no header") from None
        self._held.enter_context(training(self._folder))
        Tail(self._folder / REQUESTS).feed(self._asked.apply)
        if (found := len(self._asked.requests)) < asked:
            raise self._lost(f"{asked} requests", f"{found}")
        row = self._asked.rewind(asked, newest_generation(self._folder) + 1)
        if self._asked.digest != state["asked_digest"]:
            raise self._lost(f"{asked} requests", "others")
        self._watch = OutageWatch(self._config.on_outage, lambda line: None)  # was said then
        self._outcomes.feed(self._take)
        self._watch = OutageWatch(self._config.on_outage, self._say)
        if (found := self.answered) < collected:
            raise self._lost(f"{collected} outcomes", f"{found}")
        waiting = set(state["waiting"])
        for number in range(collected):
            outcome = self._done.popleft()
            self._count(outcome)
            if number in waiting:
                self._keep(outcome, number)
        if str(self._told) != state["collected_digest"]:
            raise self._lost(f"{collected} outcomes", "others")
        if header != self._header:  # the same run, but it asks another endpoint
            self._header.write(self._folder)
        self._requests = Appender(self._folder / REQUESTS)
        self._requests.append([row])
        sync(self._requests.path)
        self.open()

    def _lost(self, wanted: str, found: str) -> JournalError:
        return JournalError(f"{self._folder}: the checkpoint speaks of {wanted}, the folder has "
                            f"{found}; restore the folder, or begin the run anew")

    # ------------------------------------------------------------ the outcomes

    def _take(self, row: dict[str, Json]) -> None:
        """Reads a line of the outcomes."""
        if "halt" in row:
            if row["g"] == self._asked.generation:
                self._halted = row["halt"]
        elif (outcome := answer(row, self._asked, self.answered)) is not None:
            self._done.append(outcome)
            self._watch.see(outcome)

    def _count(self, outcome: Outcome) -> None:
        self._collected += 1
        self._told.add(outcome)
        self._funnel.add(outcome)

    def _keep(self, candidate: Candidate, number: int) -> None:
        self._waiting[candidate.task.uid] = candidate
        self._numbers[candidate.task.uid] = number

    def _due(self, upto_step: int) -> bool:
        """Whether an attempt of a step up to that one has no outcome yet."""
        left = self.answered
        return left < len(self._asked.requests) and self._asked.requests[left].step <= upto_step

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the synthesizer was closed: make a new one with "
                               "Synthesizer.restore(state, ...)")
