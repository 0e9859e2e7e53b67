"""The environment of one rollout in the toolbox."""

from __future__ import annotations

import copy

from rods_jax.tools.scoring import Mode, Scoring
from rods_jax.tools.toolbox.world import make_world, run_tool
from rods_jax.tools.twin import GoldRuns, TwinEnv
from rods_jax.types import Task, ToolCall, ToolResult


# An agent that looked a value up earlier need not look again.
SCORING = Scoring(needs_call=False)


class ToolboxWorld:
    """Implements rods_jax.tools.twin.World."""

    def __init__(self, task: Task):
        self.domains = make_world(task.initial_config)

    def call(self, call: ToolCall, visible: frozenset[str]) -> ToolResult:
        return run_tool(self.domains, call.name, call.arguments, visible)

    def same(self, other: ToolboxWorld, mode: Mode) -> bool:
        del mode  # the tools turn every number into an int before they keep it
        return self.domains == other.domains

    def snapshot(self) -> ToolboxWorld:
        return copy.deepcopy(self)


class ToolboxEnv(TwinEnv):
    """ValueError where the task's initial_config is not a world of the toolbox."""

    def __init__(self, task: Task, scoring: Scoring = SCORING, gold: GoldRuns | None = None):
        """`gold` is shared by the rollouts of a suite."""
        super().__init__(task, ToolboxWorld(task), gold or GoldRuns(ToolboxWorld), scoring)
