"""What a tool takes: its schema (a JSON schema of type object) as a line, and against a call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rods_jax.types import Json, ToolSpec


_PYTHON = {"string": "str", "integer": "int", "number": "float", "float": "float",
           "boolean": "bool", "object": "dict", "dict": "dict", "null": "None"}


def signature(spec: ToolSpec) -> str:
    """`name(a: str, b: int = 1)`: as prompts state a tool, and hints remind of it."""
    required = set(spec.parameters.get("required", ()))
    shown = []
    for name, part in (spec.parameters.get("properties") or {}).items():
        default = "" if name in required else f" = {part.get('default')!r}"
        shown.append(f"{name}: {_type_name(part)}{default}")
    return f"{spec.name}({', '.join(shown)})"


def _type_name(part: Mapping[str, Json]) -> str:
    if part.get("enum"):
        return " | ".join(json.dumps(v, ensure_ascii=False) for v in part["enum"])
    kind = part.get("type")
    if kind in ("array", "list", "tuple"):
        return f"list[{_type_name(part.get('items') or {})}]"
    kinds = kind if isinstance(kind, (list, tuple)) else [kind]
    return " | ".join(_PYTHON.get(k, "any") for k in kinds)


def complaint(arguments: Any, parameters: Mapping[str, Json]) -> str | None:
    """What is wrong with the arguments, or None. An int is a number, a float without a
    fraction is an integer, true is neither; null stands for a default that is null."""
    if not isinstance(arguments, Mapping):
        return "the arguments are not an object"
    properties = parameters.get("properties") or {}
    for name in arguments:
        if name not in properties:
            known = ", ".join(properties) or "none"
            return f"unknown argument {str(name)[:80]!r}, known: {known}"
    for name in parameters.get("required") or ():
        if name not in arguments:
            return f"missing argument {name!r}"
    for name, value in arguments.items():
        wrong = _mismatch(value, properties[name])
        if wrong and not (value is None and properties[name].get("default", 0) is None):
            return f"argument {name!r} {wrong}"
    return None


def _mismatch(value: Json, schema: Mapping[str, Json]) -> str | None:
    """Why a value does not fit its schema: type, enum, items, properties."""
    kind = schema.get("type")
    kinds = kind if isinstance(kind, (list, tuple)) else [kind] if kind else []
    if kinds and not any(_is(value, k) for k in kinds):
        return f"must be of type {' or '.join(kinds)}"
    if "enum" in schema and value not in schema["enum"]:
        return f"must be one of {', '.join(map(str, schema['enum']))}"
    if isinstance(value, Sequence) and not isinstance(value, str) and schema.get("items"):
        wrong = next((w for v in value if (w := _mismatch(v, schema["items"]))), None)
        return f"has an item that {wrong}" if wrong else None
    if isinstance(value, Mapping) and schema.get("properties"):
        for name, inner in schema["properties"].items():
            if name in value and (wrong := _mismatch(value[name], inner)):
                return f"has a field {name!r} that {wrong}"
    return None


def _is(value: Json, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, (int, float)):
        whole = isinstance(value, int) or value.is_integer()
        return kind == "number" or (kind == "integer" and whole)
    if value is None:
        return kind == "null"
    return kind == ("string" if isinstance(value, str)
                    else "object" if isinstance(value, Mapping) else "array")
