"""Whole transcripts in bulk: chunks of tasks, so that messages cost little beside the tools."""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from typing import Protocol

from rods_jax.tasks.replay import Replay, Transcript
from rods_jax.tools.host import EnvError, ToolCrash
from rods_jax.tools.worker import Request
from rods_jax.tools.worker_process import Operation, WorkerProcess, call_row
from rods_jax.types import Json, Task, ToolResult, TurnOutcome

CHUNK = 32  # tasks that a worker is given at once, at most
AHEAD = 2  # chunks a worker has

Item = tuple[Task, Transcript | None]  # None plays the task's own gold calls
Played = Replay | ToolCrash | EnvError


class Pool(Protocol):
    workers: list[WorkerProcess]
    slow_s: float

    def number(self, task: Task) -> int: ...
    def check(self) -> None: ...
    def pump(self) -> None: ...


def play_many(pool: Pool, items: Sequence[Item], texts: bool) -> list[Played]:
    """`rods_jax.tasks.replay.play` of every item, in their order. What goes wrong with one
    stands in its place. Without `texts` the results are empty. A task may take `pool.slow_s`
    seconds; texts are not cut. Raises Outage."""
    pool.check()
    found: list[Played | None] = [None] * len(items)
    todo = collections.deque(range(len(items)))
    alone: collections.deque[int] = collections.deque()  # of chunks that were lost
    given: list[tuple[list[int], Operation]] = []
    while todo or alone or given:
        for worker in pool.workers:
            while (todo or alone) and len(worker.queue) < AHEAD:
                # Small chunks in the end, so that all workers end at about one time.
                size = min(CHUNK, 1 + len(todo) // (4 * len(pool.workers)))
                chunk = [alone.popleft()] if alone else [todo.popleft() for _ in range(size)]
                operation = _operation(pool, [items[i] for i in chunk], texts)
                given.append((chunk, operation))
                worker.ask(operation)
        pool.pump()
        for chunk, operation in [g for g in given if g[1].settled]:
            given.remove((chunk, operation))
            for i, row in zip(chunk, operation.rows, strict=False):
                found[i] = _played(items[i][0], row)
            left = chunk[len(operation.rows):]
            if len(left) == 1:
                found[left[0]] = operation.lost
            else:  # one of them it was
                alone.extend(left)
    return found


def _operation(pool: Pool, items: Sequence[Item], texts: bool) -> Operation:
    tasks = tuple((pool.number(task), task) for task, _ in items)
    rows = [[number, transcript and [[[call_row(call) for call in step] for step in turn]
                                     for turn in transcript]]
            for (number, _), (_, transcript) in zip(tasks, items, strict=True)]
    return Operation(Request.PLAY, [rows, texts], len(rows), pool.slow_s, tasks=tasks)


def _played(task: Task, row: Json) -> Replay | EnvError:
    if len(row) == 2:
        return EnvError(*row)
    outcomes, results, n_given = row
    return Replay(tuple(ToolResult(*r) for r in results), tuple(_outcome(*o) for o in outcomes),
                  len(task.turns), n_given)


_outcome = functools.lru_cache(1024)(TurnOutcome)  # few different ones, and they never change
