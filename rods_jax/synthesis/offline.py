"""Many variants at once, from fixed seeds: the pool of the offline baseline.

The attempts go round the seeds in order; attempt n is a function of n, the run seed and
the seed task, and novelty is decided in order of n. So the accepted tasks depend neither
on the number of worker processes nor on interruptions.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import multiprocessing
import signal
from collections.abc import Iterable, Iterator, Sequence

from rods_jax.synthesis.outcome import Candidate, Outcome, PipelineReason, Rejection, Stage
from rods_jax.synthesis.pipeline import SynthesisConfig, attempt
from rods_jax.tasks.leakage import HeldOutGuard
from rods_jax.tasks.profile import Profile
from rods_jax.tools.env import Suite
from rods_jax.types import Task

CHUNK = 16  # attempts sent to a worker at once


def synthesize_many(seeds: Sequence[Task], count: int, suite: Suite, config: SynthesisConfig,
                    guard: HeldOutGuard, run_seed: int, known: Iterable[str] = (), *,
                    done: Sequence[Outcome] = (), workers: int = 1,
                    max_attempts: int | None = None) -> Iterator[Outcome]:
    """Yields the outcome of each attempt until `count` are accepted, `done` included.

    known: content hashes of tasks that exist already. done: the outcomes of an earlier,
    interrupted call with the same arguments, in order; they are not yielded again.
    max_attempts: ends sooner (default 20 x count). `workers` > 1 uses that many processes;
    the suite must then be picklable.
    """
    if not seeds:
        raise ValueError("no seed tasks: give at least one")
    if workers < 1:
        raise ValueError(f"workers is {workers}: give at least 1")
    limit = 20 * count if max_attempts is None else max_attempts
    known = set(known)
    accepted = 0
    for outcome in done:
        if isinstance(outcome, Candidate):
            known.add(outcome.task.content_hash)
            accepted += 1
    worker = _Worker(tuple(seeds), suite, config, guard, run_seed)
    outcomes = (_in_order(worker, len(done), limit) if workers == 1
                else _in_processes(worker, len(done), limit, workers))
    try:
        if accepted >= count:
            return
        for outcome in outcomes:
            outcome = _novel(outcome, known)
            accepted += isinstance(outcome, Candidate)
            yield outcome
            if accepted >= count:
                return
    finally:
        outcomes.close()


def _novel(outcome: Outcome, known: set[str]) -> Outcome:
    if isinstance(outcome, Rejection):
        return outcome
    content = outcome.task.content_hash
    if content in known:
        return Rejection(
            Stage.NOVELTY, PipelineReason.DUPLICATE.value,
            f"{outcome.task.uid} equals a known task", outcome.seed, outcome.step,
            outcome.index, outcome.tries, outcome.repairs, outcome.rewrites)
    known.add(content)
    return outcome


@dataclasses.dataclass
class _Worker:
    """Attempt number to outcome; novelty aside, which only the caller can decide."""

    seeds: tuple[Task, ...]
    suite: Suite
    config: SynthesisConfig
    guard: HeldOutGuard
    run_seed: int
    profiles: dict[str, Profile] = dataclasses.field(default_factory=dict)

    def __call__(self, n: int) -> Outcome:
        lap, which = divmod(n, len(self.seeds))
        step, index = divmod(lap, self.config.variants_per_seed)
        return attempt(self.seeds[which], self.suite, self.run_seed, self.config, self.guard,
                       frozenset(), step, index, self.profiles)


def _in_order(worker: _Worker, start: int, end: int) -> Iterator[Outcome]:
    for n in range(start, end):
        yield worker(n)


_worker: _Worker | None = None  # of a worker process


def _begin(worker: _Worker) -> None:
    global _worker
    _worker = worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle


def _run_chunk(start: int, end: int) -> list[Outcome]:
    return [_worker(n) for n in range(start, end)]


def _in_processes(worker: _Worker, start: int, end: int, workers: int) -> Iterator[Outcome]:
    # spawn: a fork would copy the locks of whatever threads the caller has.
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _begin, (worker,))
    chunks = iter(range(start, end, CHUNK))
    pending: collections.deque = collections.deque()

    def send() -> None:
        if (first := next(chunks, None)) is not None:
            pending.append(pool.submit(_run_chunk, first, min(first + CHUNK, end)))

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
