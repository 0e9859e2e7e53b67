"""A failed call as the hints of one BFCL class see it, and how they put things."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from rods_jax.types import Json, ToolCall, ToolResult

RAISED = "Error during execution: "
TELL = "tell the user"
_LONGEST = 80  # characters of a name in a list
_MOST = 8  # names in a list


@dataclasses.dataclass(frozen=True)
class Failed:
    """`state`: the class's own object after the call. `error`: the bare message."""

    state: Any
    name: str
    args: Mapping[str, Json]
    error: str
    visible: frozenset[str]

    def says(self, *starts: str) -> bool:
        return self.error.startswith(starts)

    def text(self, argument: str) -> str:
        """The argument as it was given, "" where it is no string."""
        value = self.args.get(argument)
        return value if isinstance(value, str) else ""

    def by(self, *ways: tuple[str, str], otherwise: str = TELL) -> str:
        """What to do with the first of these tools that is visible: (tool, sentence part)."""
        return next((said for tool, said in ways if tool in self.visible), otherwise)


def failed(state: Any, call: ToolCall, result: ToolResult, visible: frozenset[str]) -> Failed:
    args = call.arguments if isinstance(call.arguments, Mapping) else {}
    return Failed(state, call.name, args, _error(result.text), visible)


def _error(text: str) -> str:
    if text.startswith(RAISED):
        return text[len(RAISED):]
    try:
        value = json.loads(text)
    except ValueError:  # a list is shown in Python's spelling
        return text.removeprefix("[{'error': '").removesuffix("'}]")
    return str(value["error"]) if isinstance(value, dict) and "error" in value else text


def listed(names: Iterable[Any]) -> str:
    """Names in quotes, the first few of them; "none" where there are none."""
    names = [str(name)[:_LONGEST] for name in names]
    shown = ", ".join(repr(name) for name in names[:_MOST])
    return (shown + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")) or "none"
