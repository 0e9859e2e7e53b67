"""The environment of one BFCL rollout: the package's tool classes behind our gate."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from rods_jax.tools import schema
from rods_jax.tools.bfcl_data import domain_specs, tool_domains
from rods_jax.tools.bfcl_sandbox import Sandbox, sandbox_of, undefined
from rods_jax.tools.scoring import Mode, Scoring, same_value
from rods_jax.tools.twin import GoldRuns, TwinEnv
from rods_jax.types import Json, Task, ToolCall, ToolResult

# The benchmark stops a turn when more than 20 steps were taken, so 21 run.
MAX_STEPS = 21

# Documents that the ground truth itself contradicts: types that are accepted beside theirs.
_ALSO = {("close_ticket", "ticket_id"): "string"}


@functools.cache
def _parameters(name: str) -> Mapping[str, Json]:
    spec = next(s for s in domain_specs(tool_domains()[name]) if s.name == name)
    properties = dict(spec.parameters["properties"])
    for (tool, argument), kind in _ALSO.items():
        if tool == name:
            properties[argument] = properties[argument] | {
                "type": [properties[argument]["type"], kind]}
    return spec.parameters | {"properties": properties}


class BFCLWorld:
    """Implements rods_jax.tools.twin.World. `typed`: arguments must fit the declared schema;
    without it a call meets the class as it is, as in the benchmark."""

    def __init__(self, sandbox: Sandbox, typed: bool):
        self.sandbox, self._typed = sandbox, typed

    def call(self, call: ToolCall, visible: frozenset[str]) -> ToolResult:
        if not isinstance(call.name, str) or call.name not in visible:
            return ToolResult(f"Error during execution: {undefined(call.name)}", False)
        if self._typed and call.name in tool_domains():
            wrong = schema.complaint(call.arguments, _parameters(call.name))
            if wrong:
                return ToolResult(f"Error during execution: {call.name}: {wrong}", False)
        return self.sandbox.call(call)

    def same(self, other: BFCLWorld, mode: Mode) -> bool:
        """False also where a state has become a tree without end."""
        touched = sorted(self.sandbox.touched | other.sandbox.touched)  # others are as they were
        mine, theirs = self.sandbox.state(touched), other.sandbox.state(touched)
        try:
            return mine == theirs if mode is Mode.OFFICIAL else same_value(mine, theirs)
        except RecursionError:
            return False

    def snapshot(self) -> BFCLWorld:
        return BFCLWorld(self.sandbox.snapshot(), self._typed)


def bfcl_world(task: Task, mode: Mode) -> BFCLWorld:
    """The task's initial world. ValueError where it names an unknown domain."""
    return BFCLWorld(sandbox_of(task), typed=mode is Mode.TRAIN)


def gold_runs(scoring: Scoring) -> GoldRuns:
    return GoldRuns(functools.partial(bfcl_world, mode=scoring.mode))


class BFCLEnv(TwinEnv):
    """The Environment of one rollout. `gold` is shared by the rollouts of a suite."""

    def __init__(self, task: Task, scoring: Scoring = Scoring(), gold: GoldRuns | None = None):
        super().__init__(task, bfcl_world(task, scoring.mode), gold or gold_runs(scoring), scoring)
