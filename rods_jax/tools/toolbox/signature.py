"""What a tool takes and yields, by value kind: the typed graph's raw material.

A kind says what a value stands for ("file", "booking", "amount"); the JSON type follows
from it. The planner links an output to an input of the same kind.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rods_jax.types import ToolSpec

CURRENCIES = ("eur", "usd", "gbp", "jpy")


class ToolError(Exception):
    """A tool's refusal; its text is shown to the agent."""


@dataclasses.dataclass(frozen=True)
class Param:
    """`fresh`: the value names something the call creates, so it is always new."""

    name: str
    kind: str
    fresh: bool = False


@dataclasses.dataclass(frozen=True)
class Tool:
    """`outputs` are (result key, kind). Kind "content" is whatever the text holds.
    `needs_door`: refused before the domain's door tool (sign in, open a folder) ran.
    `lists`: in a cluttered world the result also lists other entries."""

    name: str
    domain: str
    description: str
    params: tuple[Param, ...]
    outputs: tuple[tuple[str, str], ...] = ()
    needs_door: bool = True
    lists: bool = False

    def spec(self) -> ToolSpec:
        properties = {p.name: schema(p.kind) for p in self.params}
        return ToolSpec(
            name=self.name,
            description=self.description,
            parameters={
                "type": "object",
                "properties": properties,
                "required": [p.name for p in self.params],
                "additionalProperties": False,
            },
            domain=self.domain,
        )


def schema(kind: str) -> dict[str, Any]:
    """JSON schema of one value of this kind."""
    if kind == "amount":
        return {"type": "integer", "description": "amount of money"}
    if kind == "currency":
        return {"type": "string", "enum": list(CURRENCIES)}
    return {"type": "string", "description": kind}
