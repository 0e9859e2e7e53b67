"""Many variants at once, from fixed seeds: the pool of the offline baseline.

The attempts go round the seeds in order; attempt n is a function of n, the run seed and
the seed task, and novelty is decided in order of n. So the accepted tasks depend neither
on the number of worker processes nor on interruptions.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence

from rods_jax.synthesis.novelty import Known
from rods_jax.synthesis.outcome import Candidate, Outcome
from rods_jax.synthesis.pipeline import Maker, decide, stop_for
from rods_jax.types import Task

CHUNK = 16  # attempts sent to a worker at once; one where each waits for an endpoint


def synthesize_many(seeds: Sequence[Task], count: int, maker: Maker, known: Known | None = None, *,
                    done: Sequence[Outcome] = (), workers: int = 1,
                    max_attempts: int | None = None) -> Iterator[Outcome]:
    """Yields the outcome of each attempt until `count` are accepted, `done` included.

    known: the tasks that exist already; it stays as it is. done: the outcomes of an earlier,
    interrupted call with the same arguments, in order; they are not yielded again.
    max_attempts: ends sooner (default 20 x count). `workers` > 1 uses that many processes;
    the suite must then be picklable. With a language model they ask it at the same time.
    Raises OutageError where the endpoint does not answer and the config says to stop.
    """
    if not seeds:
        raise ValueError("no seed tasks: give at least one")
    if workers < 1:
        raise ValueError(f"workers is {workers}: give at least 1")
    limit = 20 * count if max_attempts is None else max_attempts
    known = Known.from_json(known.to_json()) if known else Known()
    made = [outcome.task for outcome in done if isinstance(outcome, Candidate)]
    known.update(made)
    accepted = len(made)
    worker = _Worker(tuple(seeds), maker)
    outcomes = (_in_order(worker, len(done), limit) if workers == 1
                else _in_processes(worker, len(done), limit, workers))
    try:
        if accepted >= count:
            return
        for outcome in outcomes:
            stop_for(outcome, maker.config)
            outcome = decide(outcome, known)
            accepted += isinstance(outcome, Candidate)
            yield outcome
            if accepted >= count:
                return
    finally:
        outcomes.close()


@dataclasses.dataclass(frozen=True)
class _Worker:
    """Attempt number to outcome; novelty aside, which only the caller can decide."""

    seeds: tuple[Task, ...]
    maker: Maker

    def __call__(self, n: int) -> Outcome:
        lap, which = divmod(n, len(self.seeds))
        step, index = divmod(lap, self.maker.config.variants_per_seed)
        return self.maker.attempt(self.seeds[which], step, index, Known())


def _in_order(worker: _Worker, start: int, end: int) -> Iterator[Outcome]:
    for n in range(start, end):
        yield worker(n)


_worker: _Worker | None = None  # of a worker process


def _begin(worker: _Worker) -> None:
    global _worker
    _worker = worker
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Waits at a pipe that the parent alone holds open, however the parent ends."""
    multiprocessing.parent_process().join()
    os._exit(1)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C is the parent's to handle: it comes after the block, and processes that are started
    within never see it, not even while they start."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_chunk(start: int, end: int) -> list[Outcome]:
    return [_worker(n) for n in range(start, end)]


def _in_processes(worker: _Worker, start: int, end: int, workers: int) -> Iterator[Outcome]:
    # spawn: a fork would copy the locks of whatever threads the caller has.
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _begin, (worker,))
    size = 1 if worker.maker.config.asks else CHUNK
    chunks = iter(range(start, end, size))
    pending: collections.deque = collections.deque()

    def send() -> None:
        if (first := next(chunks, None)) is not None:
            with _uninterrupted():
                pending.append(pool.submit(_run_chunk, first, min(first + size, end)))

    try:
        for _ in range(3 * workers):
            send()
        while pending:
            outcomes = pending.popleft().result()
            send()
            yield from outcomes
    except concurrent.futures.BrokenExecutor as error:
        raise RuntimeError("a synthesis worker process was killed (often: out of memory); "
                           "start again to go on from the journal, with fewer workers") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
