"""A call's arguments against the declared schema of its tool (a JSON schema of type object)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rods_jax.types import Json


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
