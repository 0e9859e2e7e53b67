"""The synthesizer: answers the requests in a folder, until it is told to end.

    serve(folder, bell, make)       # holds the folder's lock; one a folder

The texts of an attempt do not depend on what else was made, so with a writer or a judge that
waits for an endpoint several attempts are in flight at once. Whether a task is new is decided
when its outcome is written, in the order of the requests, as the offline synthesis does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from rods_jax.synthesis.exchange import (OUTCOMES, REQUESTS, Asked, Header, Request, answer,
                                         outcome_row, serving)
from rods_jax.synthesis.journal import Appender, JournalError, Stopped, Tail, sync
from rods_jax.synthesis.novelty import Known
from rods_jax.synthesis.outcome import Candidate, Outcome, outcome_from_json
from rods_jax.synthesis.pipeline import (Maker, OutageError, SynthesisConfig, crash, decide,
                                         stop_for)
from rods_jax.tasks.leakage import HeldOutGuard
from rods_jax.tools.env import Suite
from rods_jax.types import Json

QUICK_S, IDLE_S = 0.005, 0.25  # between looks at the requests: at first, and when long idle
AHEAD = 4  # attempts that may be done and wait for an earlier one, by those in flight


class OutageStop(Stopped):
    """The endpoint does not answer and the config says to stop then."""


class Bell:
    """Wakes a synthesizer that waits for requests, or tells it to end. Safe in a signal
    handler: nothing here takes a lock that the interrupted code may hold."""

    def __init__(self):
        self.stopped = False
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()

    def ring(self) -> None:
        self._queue.put(None)

    def stop(self) -> None:
        self.stopped = True
        self.ring()

    def wait(self, timeout_s: float) -> None:
        """Until it rings; rings that came together count as one."""
        try:
            self._queue.get(timeout=timeout_s)
            while True:
                self._queue.get_nowait()
        except queue.Empty:
            pass


@dataclasses.dataclass
class Progress:
    """Of one `serve`: attempts done and accepted by it, requests that wait."""

    done: int = 0
    accepted: int = 0
    waiting: int = 0


def serve(folder: Path, bell: Bell, make: Callable[[Header], Maker], *, lock_wait_s: float = 0.0,
          report: Callable[[Progress], None] = lambda progress: None) -> Progress:
    """Answers requests until the bell stops it or the run is over; what is in flight then is
    left to the next one. The folder has a header. `report` is called after each outcome and
    each look at the requests. Raises JournalError for a damaged file or where another
    synthesizer serves the folder, OutageStop."""
    with serving(folder, lock_wait_s), _Book(folder) as book:
        maker = make(book.header)
        with _Crew(in_flight(maker), maker, bell) as crew:
            return _answer(book, crew, maker.config, bell, report)


def _answer(book: _Book, crew: _Crew, config: SynthesisConfig, bell: Bell,
            report: Callable[[Progress], None]) -> Progress:
    progress, pause_s = Progress(), QUICK_S
    while not bell.stopped:
        if book.look():
            crew.forget()
        if book.asked.ended:
            break
        waiting = book.asked.requests[book.answered:book.answered + crew.most]
        crew.ask([request for request in waiting if book.made_before(request) is None])
        outcome = None
        if waiting:
            outcome = book.made_before(waiting[0]) or crew.answer(waiting[0])
        if outcome is not None:
            try:
                stop_for(outcome, config)
            except OutageError as error:
                book.halt(str(error))
            outcome = book.write(waiting[0], outcome)
            progress.done += 1
            progress.accepted += isinstance(outcome, Candidate)
            pause_s = QUICK_S
        else:
            bell.wait(pause_s)
            pause_s = min(2 * pause_s, IDLE_S)
        progress.waiting = len(book.asked.requests) - book.answered
        report(progress)
    return progress


def in_flight(maker: Maker) -> int:
    """Attempts at once: more than one only where they wait for an endpoint."""
    return maker.config.endpoint.concurrency if maker.config.asks else 1


def guard_of(suite: Suite) -> HeldOutGuard:
    """Keeps out the tasks of all splits that the suite holds back for evaluation."""
    return HeldOutGuard((task for name in suite.held_out for task in suite.split(name)),
                        siblings_cross=suite.siblings_cross)


class _Book:
    """The files as the synthesizer sees and writes them."""

    def __init__(self, folder: Path):
        self._folder, self.header = folder, Header.read(folder)
        self._requests = Tail(folder / REQUESTS)
        self._out = Appender(folder / OUTCOMES)
        self.asked = Asked()
        self._requests.feed(self.asked.apply)
        self._recall()

    def __enter__(self) -> _Book:
        return self

    def __exit__(self, *exc_info) -> None:
        self._out.close()
        sync(self._out.path)

    def look(self) -> bool:
        """Reads new requests; whether some became void."""
        self._out.check()
        generation = self.asked.generation
        self._requests.feed(self.asked.apply)
        if self.asked.generation == generation:
            return False
        if Header.read(self._folder) != self.header:
            raise JournalError(f"{self._folder}: the run goes on with other settings; start the "
                               "synthesizer again")
        self._recall()
        return True

    def made_before(self, request: Request) -> Candidate | None:
        """What an equal request brought that became void: a run that was killed asks for much
        of the same again, and a text may have cost an endpoint's time."""
        before, candidate = self._void.get(_name(request), (None, None))
        return candidate if before is not None and before.seed == request.seed else None

    def write(self, request: Request, outcome: Outcome) -> Outcome:
        """Decides whether the task is new and appends; returns what was decided."""
        outcome = decide(outcome, self._known)
        self._out.append([outcome_row(request, outcome)])
        self.answered += 1
        return outcome

    def halt(self, why: str) -> NoReturn:
        """Gives up, without an outcome: a run that is resumed asks for the attempt again."""
        self._out.append([{"halt": why, "g": self.asked.generation}])
        raise OutageStop(why)

    def _recall(self) -> None:
        """What the outcomes on file answer of the requests that are not void."""
        self.answered, self._known = 0, Known.from_json(self.header.known)
        self._void: dict[tuple[str, int, int], tuple[Request, Candidate]] = {}
        Tail(self._folder / OUTCOMES).feed(self._recall_one)

    def _recall_one(self, row: Mapping[str, Json]) -> None:
        if "halt" in row:
            return
        if (outcome := answer(row, self.asked, self.answered)) is not None:
            self.answered += 1
            if isinstance(outcome, Candidate):
                self._known.add(outcome.task)
        elif (request := self.asked.void.get((row["n"], row["g"]))) is not None:
            outcome = outcome_from_json(row["outcome"])
            if isinstance(outcome, Candidate):
                self._void[_name(request)] = request, outcome


class _Crew:
    """Makes attempts: one at a time in the caller's thread, or `count` in daemon threads, so
    that one that hangs does not keep the process from ending."""

    def __init__(self, count: int, maker: Maker, bell: Bell):
        self._count, self._maker, self._bell = count, maker, bell
        self.most = AHEAD * count  # requests that it looks at
        self._jobs: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # By number and generation; None as long as it is not made.
        self._given: dict[tuple[int, int], Outcome | None] = {}
        for _ in range(count if count > 1 else 0):
            threading.Thread(target=self._work, name="synthesis-attempt", daemon=True).start()

    def __enter__(self) -> _Crew:
        return self

    def __exit__(self, *exc_info) -> None:
        self.forget()
        for _ in range(self._count):
            self._jobs.put(None)

    def ask(self, waiting: Sequence[Request]) -> None:
        """Begins on the first of these that are not begun, as far as there is room."""
        if self._count == 1:
            return
        with self._lock:
            room = self._count - sum(outcome is None for outcome in self._given.values())
            fresh = [request for request in waiting
                     if _key(request) not in self._given][:max(room, 0)]
            self._given |= dict.fromkeys(map(_key, fresh))
        for request in fresh:
            self._jobs.put(request)

    def answer(self, request: Request) -> Outcome | None:
        """What became of it, None as long as that is not known; told once."""
        if self._count == 1:
            return _attempt(self._maker, request)
        with self._lock:
            outcome = self._given.get(_key(request))
            if outcome is not None:
                del self._given[_key(request)]
            return outcome

    def forget(self) -> None:
        """Drops what is not begun, and what comes of the rest."""
        with self._lock:
            self._given = {}
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()

    def _work(self) -> None:
        while (request := self._jobs.get()) is not None:
            outcome = _attempt(self._maker, request)
            with self._lock:
                if _key(request) in self._given:
                    self._given[_key(request)] = outcome
            self._bell.ring()


def _name(request: Request) -> tuple[str, int, int]:
    return request.seed.uid, request.step, request.index


def _key(request: Request) -> tuple[int, int]:
    return request.number, request.generation


def _attempt(maker: Maker, request: Request) -> Outcome:
    try:
        # Nothing is known to it: whether its task is new is decided in the requests' order.
        return maker.attempt(request.seed, request.step, request.index, Known())
    except BaseException as error:  # no attempt, whatever it does, ends the synthesizer
        return crash(request.seed.uid, request.step, request.index, error)
