"""Task and tool files: one JSON object a line, read strictly and written atomically.

A task line is `Task.to_json`. A tool line has schema_version, name, description, parameters
(a JSON schema of type object) and domain. Tool files take the part of JSON schema that calls
are checked by (tools/schema.py); another keyword is an error, since it would do nothing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from rods_jax.tools import schema
from rods_jax.tools.literals import encodable
from rods_jax.types import Json, Task, ToolSpec, check_fields

TOOL_SCHEMA_VERSION = 1

TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")
KEYWORDS = frozenset({"type", "description", "title", "default", "enum", "items", "properties",
                      "required", "additionalProperties"})
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_TOOL_FIELDS: Mapping[str, type] = {"schema_version": int, "name": str, "description": str,
                                    "parameters": dict, "domain": str}

Row = TypeVar("Row", Task, ToolSpec)


def read_tasks(path: str | os.PathLike) -> list[Task]:
    """All tasks of a JSON-lines file; empty lines are skipped.

    Raises ValueError, one line, that names the file, the line, the field and the remedy.
    Two tasks with one uid are an error too, since the pool tells tasks apart by uid.
    """
    return _read(path, "task", Task.from_json, "uid")


def read_tools(path: str | os.PathLike) -> list[ToolSpec]:
    """All tools of a JSON-lines file. Raises ValueError as `read_tasks` does; names must be
    unique over all domains, since a call names a tool and no domain."""
    return _read(path, "tool", tool_from_json, "name")


def write_tasks(path: str | os.PathLike, tasks: Iterable[Task]) -> None:
    """Writes a JSON-lines file; after a crash `path` holds all of the old or all of the new.
    ValueError where a task's text cannot be written."""
    def lines() -> Iterator[str]:
        for task in tasks:
            if not encodable(line := _line(task.to_json())):
                raise ValueError(f"task {task.uid}: a text holds half a surrogate pair; correct it")
            yield line
    write_atomically(path, lines())


def write_tools(path: str | os.PathLike, tools: Iterable[ToolSpec]) -> None:
    """As `write_tasks`. Raises ValueError, and writes nothing, where `read_tools` would."""
    rows, names = [], set()
    for tool in tools:
        rows.append(tool_to_json(tool))
        tool_from_json(rows[-1])
        if tool.name in names:
            raise ValueError(f"two tools are named {tool.name!r}: give every tool its own name")
        names.add(tool.name)
    write_atomically(path, map(_line, rows))


def tool_to_json(tool: ToolSpec) -> dict[str, Json]:
    return {"schema_version": TOOL_SCHEMA_VERSION, "name": tool.name,
            "description": tool.description, "parameters": dict(tool.parameters),
            "domain": tool.domain}


def tool_from_json(row: Mapping[str, Json]) -> ToolSpec:
    """Raises ValueError that names the first field that is wrong."""
    check_fields("tool", row, _TOOL_FIELDS)
    if row["schema_version"] != TOOL_SCHEMA_VERSION:
        raise ValueError(
            f"schema_version is {row['schema_version']}, this code reads {TOOL_SCHEMA_VERSION}")
    if not _NAME.fullmatch(row["name"]):
        raise ValueError(f"name {row['name']!r} is not a letter followed by up to 63 letters, "
                         "digits, '_', '.' or '-'")
    for key in ("description", "domain"):
        if not row[key].strip():
            raise ValueError(f"{key} is empty")
    wrong = schema_fault(row["parameters"], "parameters")
    if wrong:
        raise ValueError(wrong)
    if row["parameters"].get("type") != "object":
        raise ValueError(f"parameters.type is {row['parameters'].get('type')!r}, must be 'object'")
    return ToolSpec(row["name"], row["description"], row["parameters"], row["domain"])


def schema_fault(node: Json, where: str) -> str | None:
    """What is wrong with a JSON schema, or None; `where` names it in the message."""
    if not isinstance(node, Mapping):
        return f"{where} is not an object"
    for keyword in node:
        if keyword not in KEYWORDS:
            return (f"{where} has the keyword {keyword!r}, which no call is checked by (say it in "
                    "the description)")
    kind = node.get("type")
    kinds = kind if isinstance(kind, list) and kind else [kind]
    unknown = [k for k in kinds if not isinstance(k, str) or k not in TYPES]
    if unknown:
        return f"{where}.type {unknown[0]!r} is not one of {', '.join(TYPES)}"
    properties, required = node.get("properties", {}), node.get("required", [])
    if not isinstance(properties, Mapping):
        return f"{where}.properties is not an object"
    if not isinstance(required, list):
        return f"{where}.required is not a list"
    for name in required:
        if name not in properties:
            return f"{where}.required names {name!r}, which is not in properties"
    if node.get("additionalProperties", False) is not False:
        return f"{where}.additionalProperties is not false, but no call may hold others"
    if "enum" in node and not (isinstance(node["enum"], list) and node["enum"]):
        return f"{where}.enum is not a list of values"
    inner = [schema_fault(part, f"{where}.properties.{name}") for name, part in properties.items()]
    if "items" in node:
        inner.append(schema_fault(node["items"], f"{where}.items"))
    if any(inner):
        return next(filter(None, inner))
    if "default" in node:
        wrong = schema.complaint({"default": node["default"]}, {"properties": {"default": node}})
        return wrong and f"{where}.default does not fit its own schema: {wrong}"
    return None


def write_atomically(path: str | os.PathLike, lines: Iterable[str]) -> None:
    """Text to a temporary file beside `path`, synced, then renamed over it."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as out:
            out.writelines(lines)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _read(path: str | os.PathLike, noun: str, parse: Callable[[Json], Row], key: str) -> list[Row]:
    rows, line_of = [], {}
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                value = json.loads(line, object_pairs_hook=_unique)
                if b"\\ud" in line.lower() and not encodable(_line(value)):
                    raise ValueError("a text holds half a surrogate pair")
                row = parse(value)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: not JSON ({error.msg}, column {error.colno}); "
                                 f"write one {noun} a line") from error
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: not UTF-8 text ({error.reason}); "
                                 f"write one {noun} a line") from error
            except RecursionError as error:
                raise ValueError(f"{where}: nested too deeply; write one {noun} a line") from error
            except ValueError as error:
                raise ValueError(
                    f"{where}: {error}; correct that field or drop the line") from error
            name = getattr(row, key)
            if name in line_of:
                raise ValueError(f"{where}: {key} {name!r} was used in line {line_of[name]}; "
                                 f"give every {noun} its own {key}")
            line_of[name] = number
            rows.append(row)
    return rows


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """A JSON object; with a field twice, one of the two would be lost."""
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in [k for k, _ in pairs[:i]])
        raise ValueError(f"field {twice!r} is there twice")
    return row


def _line(row: Json) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"
