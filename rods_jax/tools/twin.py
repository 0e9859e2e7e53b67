"""The environment of one rollout: the agent's world beside what the gold calls make of another.

A suite brings the world (its tools and their state); turns, visible tools, counts and scores
are the same for all. Gold goes on with every turn, also where the agent failed. It depends on
the task alone, so the rollouts of a group share one gold run.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from rods_jax.tools.env import UserTurn
from rods_jax.tools.scoring import Mode, Scoring, empty_turn_passes, holds_results
from rods_jax.types import Task, ToolCall, ToolResult, TurnOutcome

GOLD_RUNS = 256  # kept: the tasks of several batches


class World(Protocol):
    """One private state of a task and the tools that act on it. Deterministic: the same calls
    give the same results and the same state."""

    def call(self, call: ToolCall, visible: frozenset[str]) -> ToolResult:
        """Runs one call. Never raises for what a model wrote: an unknown or invisible name,
        wrong arguments and any failure of the tool are a result with ok False."""

    def same(self, other: World, mode: Mode) -> bool:
        """Whether both states are equal as far as an agent is judged by them. `other` may be a
        snapshot; neither changes."""

    def snapshot(self) -> World | None:
        """The state as it is now, for `same` alone; None where it cannot be copied."""


@dataclasses.dataclass(frozen=True)
class GoldTurn:
    """Result texts of a turn's gold calls, and the world they left; it is only read."""

    texts: tuple[str, ...]
    world: World


def every_tool(task: Task) -> frozenset[str]:
    return frozenset().union(*(turn.tools for turn in task.turns))


def gold_turns(task: Task, world: World) -> Iterator[GoldTurn]:
    """Runs the gold calls turn by turn in a fresh world, the one that goes on."""
    tools = every_tool(task)
    for turn in task.turns:
        yield GoldTurn(tuple(world.call(call, tools).text for call in turn.gold), world)


def kept_turns(task: Task, world: World) -> tuple[GoldTurn, ...]:
    """The same with every turn's world as that turn left it; () where a copy of the state is
    not to be had or does not equal it."""
    last = max((i for i, turn in enumerate(task.turns) if turn.gold), default=-1)
    found: list[GoldTurn] = []
    for i, gold in enumerate(gold_turns(task, world)):
        if i < last:
            kept = found[-1].world if found and not task.turns[i].gold else world.snapshot()
            if kept is None or not all(world.same(kept, mode) for mode in Mode):
                return ()
            gold = GoldTurn(gold.texts, kept)
        found.append(gold)
    return tuple(found)


class GoldRuns:
    """The gold runs of the tasks that were played last. A task's first rollout has a run of its
    own; from the second on they share one, whose snapshots then pay. Where the state cannot be
    copied, every rollout has its own. Tasks are told apart by identity: two with one uid may
    differ, and a task never changes. Safe between threads."""

    def __init__(self, make_world: Callable[[Task], World]):
        self._make_world = make_world
        # None of a task that was played once, () of one whose state cannot be copied.
        self._runs: collections.OrderedDict[int, tuple[Task, tuple[GoldTurn, ...] | None]] = \
            collections.OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, task: Task) -> Iterator[GoldTurn]:
        with self._lock:
            known = id(task) in self._runs
            _, run = self._runs.get(id(task), (task, None))
        if run is None:
            run = kept_turns(task, self._make_world(task)) if known else None
            with self._lock:
                self._runs[id(task)] = task, run  # holding the task keeps its id from another
                if len(self._runs) > GOLD_RUNS:
                    self._runs.popitem(last=False)
        return iter(run) if run else gold_turns(task, self._make_world(task))

    def __getstate__(self):
        return self._make_world

    def __setstate__(self, make_world):
        self.__init__(make_world)


class TwinEnv:
    """Implements rods_jax.tools.env.Environment. The order is begin_turn, execute (any number
    of times), end_turn; another order is a mistake of the caller and raises ValueError."""

    def __init__(self, task: Task, world: World, gold: GoldRuns, scoring: Scoring):
        self.task, self.world = task, world
        self._gold, self._scoring = gold, scoring
        self._gold_turns: Iterator[GoldTurn] | None = None  # until the first turn is scored
        self._turn = -1
        self._open = False
        self._visible: frozenset[str] = frozenset()
        self._seen: collections.Counter[str] = collections.Counter()
        self._n_calls = self._n_errors = 0

    def begin_turn(self) -> UserTurn | None:
        if self._open:
            raise ValueError("begin_turn during a turn: call end_turn first")
        if self._turn + 1 >= len(self.task.turns):
            return None
        self._turn += 1
        self._open, self._n_calls, self._n_errors = True, 0, 0
        turn = self.task.turns[self._turn]
        official = self._scoring.mode is Mode.OFFICIAL
        self._visible = every_tool(self.task) if official else frozenset(turn.tools)
        before = set(self.task.turns[self._turn - 1].tools if self._turn else turn.tools)
        new = tuple(name for name in turn.tools if name not in before)
        return UserTurn(self._turn, turn.user, turn.tools, new)

    def visible(self) -> frozenset[str]:
        """Tools that may be called in this turn. BFCL's checker withholds a tool's document
        but not the tool, and OFFICIAL scores are its."""
        return self._visible

    def execute(self, calls: Sequence[ToolCall]) -> tuple[ToolResult, ...]:
        if not self._open:
            raise ValueError("execute outside a turn: call begin_turn first")
        results = tuple(self.world.call(call, self._visible) for call in calls)
        self._n_calls += len(results)
        self._n_errors += sum(not r.ok for r in results)
        self._seen.update(r.text for r in results)
        return results

    def end_turn(self, said: str) -> TurnOutcome:
        if not self._open:
            raise ValueError("end_turn outside a turn: call begin_turn first")
        self._open = False
        if self._gold_turns is None:
            self._gold_turns = self._gold(self.task)
        gold, mode = next(self._gold_turns), self._scoring.mode
        if self.task.turns[self._turn].gold:
            state_ok = self.world.same(gold.world, mode)
            exec_ok = holds_results(self._seen, gold.texts, mode) and (
                self._n_calls > 0 or not self._scoring.needs_call)
        else:
            state_ok = exec_ok = empty_turn_passes(
                self._scoring, self._n_calls, said, lambda: self.world.same(gold.world, mode))
        return TurnOutcome(state_ok, exec_ok, self._n_calls, self._n_errors)
