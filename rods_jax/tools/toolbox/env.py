"""One rollout of one task: the agent's world beside a second one that runs the gold calls."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from rods_jax.tools.env import UserTurn
from rods_jax.tools.toolbox.world import make_world, run_tool
from rods_jax.types import Task, ToolCall, ToolResult, TurnOutcome


class ToolboxEnv:
    """Implements `Environment`. The order is begin_turn, execute (any number of times),
    end_turn; another order is a mistake of the caller and raises ValueError."""

    def __init__(self, task: Task):
        self.task = task
        self._world = make_world(task.initial_config)
        self._gold_world = make_world(task.initial_config)
        self._turn = -1
        self._open = False
        self._visible: frozenset[str] = frozenset()
        self._seen: collections.Counter[str] = collections.Counter()
        self._calls = self._errors = 0

    def begin_turn(self) -> UserTurn | None:
        if self._open:
            raise ValueError("begin_turn before end_turn of the turn before")
        self._turn += 1
        if self._turn >= len(self.task.turns):
            return None
        turn = self.task.turns[self._turn]
        before = self.task.turns[self._turn - 1].tools if self._turn else turn.tools
        new = tuple(name for name in turn.tools if name not in before)
        self._open, self._calls, self._errors = True, 0, 0
        self._visible = frozenset(turn.tools)
        return UserTurn(self._turn, turn.user, turn.tools, new)

    def execute(self, calls: Sequence[ToolCall]) -> tuple[ToolResult, ...]:
        if not self._open:
            raise ValueError("execute outside a turn: call begin_turn first")
        results = tuple(
            run_tool(self._world, c.name, c.arguments, self._visible) for c in calls)
        self._calls += len(results)
        self._errors += sum(not r.ok for r in results)
        self._seen.update(r.text for r in results if r.ok)
        return results

    def end_turn(self, said: str) -> TurnOutcome:
        """state_ok: the whole state equals the gold world's after the same turn.
        exec_ok: each gold result of this turn is among the agent's results so far, as often
        as it comes; where gold is empty, no call was made and something was said."""
        if not self._open:
            raise ValueError("end_turn outside a turn: call begin_turn first")
        self._open = False
        turn = self.task.turns[self._turn]
        visible = frozenset(turn.tools)
        gold = [run_tool(self._gold_world, c.name, c.arguments, visible) for c in turn.gold]
        if gold:
            wanted = collections.Counter(r.text for r in gold)
            exec_ok = all(self._seen[text] >= count for text, count in wanted.items())
        else:
            exec_ok = self._calls == 0 and bool(said.strip())
        return TurnOutcome(
            state_ok=self._world == self._gold_world,
            exec_ok=exec_ok,
            n_calls=self._calls,
            n_errors=self._errors,
        )
