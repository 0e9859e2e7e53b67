"""The whole state of one task, and the dispatch of calls to it.

Nothing is evaluated: a name is looked up in the declared tools, arguments are checked
against the tool's schema, and the domain's method of that declared name runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rods_jax.tools.toolbox.domain import Domain
from rods_jax.tools.toolbox.graph import DOMAINS, TOOLS
from rods_jax.tools.toolbox.signature import CURRENCIES, Tool, ToolError
from rods_jax.types import ToolResult

World = dict[str, Domain]

_INTEGER = re.compile(r"-?[0-9]{1,12}")
_LONGEST = 200  # characters of one argument


def make_world(config: Mapping[str, Any]) -> World:
    """Fresh state; raises ValueError on an unknown domain or a wrong field."""
    unknown = [name for name in config if name not in DOMAINS]
    if unknown:
        raise ValueError(f"initial_config has an unknown domain {unknown[0]!r}")
    return {name: DOMAINS[name].from_config(fields) for name, fields in config.items()}


def world_config(world: World) -> dict[str, Any]:
    return {name: domain.to_config() for name, domain in world.items()}


def run_tool(world: World, name: Any, arguments: Any, visible: frozenset[str]) -> ToolResult:
    """Runs one call; every refusal is a ToolResult with ok False."""
    try:
        if not isinstance(name, str) or name not in visible or name not in TOOLS:
            raise ToolError("unknown tool")
        tool = TOOLS[name]
        if tool.domain not in world:
            raise ToolError("unknown tool")
        checked = check_arguments(tool, arguments)
        result = getattr(world[tool.domain], tool.name)(**checked)
    except ToolError as error:
        return ToolResult(json.dumps({"error": str(error)}), ok=False)
    clutter = world[tool.domain].clutter
    if tool.lists and clutter:
        result["others"] = list(clutter)
    return ToolResult(json.dumps(result), ok=True)


def check_arguments(tool: Tool, arguments: Any) -> dict[str, Any]:
    """Arguments in the types of the schema; raises ToolError. Whole numbers may come as
    text and texts as whole numbers, since neither loses anything."""
    if not isinstance(arguments, Mapping):
        raise ToolError("wrong argument")
    names = [p.name for p in tool.params]
    if any(key not in names for key in arguments):
        raise ToolError("unknown argument")
    if any(name not in arguments for name in names):
        raise ToolError("missing argument")
    return {p.name: _convert(p.kind, arguments[p.name]) for p in tool.params}


def _convert(kind: str, value: Any) -> str | int:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e12:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ToolError("wrong argument")
    if isinstance(value, int) and abs(value) >= 10**12:
        raise ToolError("wrong argument")
    if kind == "amount":
        if isinstance(value, str):
            if not _INTEGER.fullmatch(value):
                raise ToolError("wrong argument")
            return int(value)
        return value
    text = str(value)
    if len(text) > _LONGEST or (kind == "currency" and text not in CURRENCIES):
        raise ToolError("wrong argument")
    return text
