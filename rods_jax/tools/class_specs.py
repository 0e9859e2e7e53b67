"""The tools of an ordinary Python class, read off its public methods.

    class Notes:
        def add(self, title: str, tags: list[str] = []) -> dict:
            '''Write a note.

            title: a few words
            '''

A method without a leading underscore is a tool. Its parameters are annotated with literal
types; the docstring's first paragraph describes it, lines `parameter: text` its parameters.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rods_jax.tools import schema
from rods_jax.types import Json, ToolSpec, copy_json

_TYPES: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean",
                             list: "array", dict: "object", types.NoneType: "null"}
_KNOWN = "str, int, float, bool, list[...], dict, Literal[...] or a union of them"
_SAID = re.compile(r"\s*(\w+)\s*:\s+(\S.*)")


def public_methods(cls: type) -> dict[str, Callable]:
    """Name -> function of every tool, inherited ones first, in the order of definition."""
    found: dict[str, Callable] = {}
    for klass in reversed(cls.__mro__[:-1]):
        for name, member in vars(klass).items():
            if not name.startswith("_") and inspect.isfunction(member):
                found[name] = member
            else:
                found.pop(name, None)  # the subclass made it something else
    return found


def class_specs(cls: type, domain: str) -> tuple[ToolSpec, ...]:
    """A spec for each public method. ValueError, one line, that names the method and remedy."""
    specs = tuple(_spec(name, method, f"tool {cls.__name__}.{name}", domain)
                  for name, method in public_methods(cls).items())
    if not specs:
        raise ValueError(f"class {cls.__name__} has no public method: give it at least one tool")
    return specs


def check_spec(spec: ToolSpec, cls: type) -> None:
    """ValueError, one line, where the class cannot serve the declared tool."""
    method = public_methods(cls).get(spec.name)
    if method is None:
        raise ValueError(f"tool {spec.name!r} is declared of domain {spec.domain}, but class "
                         f"{cls.__name__} has no such public method: add it or drop the tool")
    where = f"tool {cls.__name__}.{spec.name}"
    given = spec.parameters.get("properties") or {}
    takes = list(inspect.signature(method).parameters.values())[1:]
    if not any(p.kind is p.VAR_KEYWORD for p in takes):
        for name in given:
            if name not in [p.name for p in takes if p.kind in _BY_NAME]:
                raise ValueError(f"{where} is declared with parameter {name!r}, which the method "
                                 "does not take by name: add it or drop it from the declaration")
    required = spec.parameters.get("required") or ()
    for p in takes:
        if p.kind in (*_BY_NAME, p.POSITIONAL_ONLY) and p.default is p.empty and (
                p.name not in required):
            raise ValueError(f"{where} needs parameter {p.name!r}, which its declaration does not "
                             "require: require it or give it a default")


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _spec(name: str, method: Callable, where: str, domain: str) -> ToolSpec:
    takes = list(inspect.signature(method).parameters.values())[1:]
    summary, said = _docs(inspect.getdoc(method) or "", [p.name for p in takes])
    if not summary:
        raise ValueError(f"{where} has no docstring: say in one line what it does, or start its "
                         "name with _ if it is no tool")
    try:
        kinds = typing.get_type_hints(method)
    except (NameError, TypeError) as error:
        raise ValueError(f"{where} has an annotation that cannot be read ({error}): use "
                         f"{_KNOWN}") from error
    properties, required = {}, []
    for p in takes:
        here = f"{where}: parameter {p.name!r}"
        if p.kind not in _BY_NAME:
            raise ValueError(f"{here} cannot be given by name: write plain parameters")
        if p.name not in kinds:
            raise ValueError(f"{here} has no annotation: use {_KNOWN}")
        properties[p.name] = _schema(kinds[p.name], here)
        if p.name in said:
            properties[p.name]["description"] = said[p.name]
        if p.default is p.empty:
            required.append(p.name)
            continue
        properties[p.name]["default"] = _default(p.default, here)
        wrong = schema.complaint({p.name: p.default}, {"properties": properties})
        if wrong:
            raise ValueError(f"{here} has the default {p.default!r}, but {wrong}: change one")
    return ToolSpec(name, summary, {
        "type": "object", "properties": properties, "required": required,
        "additionalProperties": False}, domain)


def _docs(doc: str, parameters: list[str]) -> tuple[str, dict[str, str]]:
    """The first paragraph on one line, and what lines `parameter: text` say."""
    summary, said, open_ = [], {}, True
    for line in doc.strip().splitlines():
        found = _SAID.fullmatch(line)
        if found and found[1] in parameters:
            said[found[1]] = found[2].strip()
            open_ = False
        elif open_ and line.strip():
            summary.append(line)
        else:
            open_ = False
    return " ".join(" ".join(summary).split()), said


def _schema(kind: Any, where: str) -> dict[str, Json]:
    """JSON schema of an annotation. ValueError where it is not a literal type."""
    if isinstance(kind, type) and kind in _TYPES:
        return {"type": _TYPES[kind]}
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        items = {} if inner[0] is Any else {"items": _schema(inner[0], where)}
        return {"type": "array"} | items
    if origin is dict and inner[0] is str:
        if inner[1] is not Any:
            _schema(inner[1], where)  # raises where values are not literals
        return {"type": "object"}
    if origin is typing.Literal:
        names = list(dict.fromkeys(_TYPES.get(type(value), "") for value in inner))
        if "" not in names:
            return {"type": names[0] if len(names) == 1 else names, "enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        return _either([_schema(option, where) for option in inner], where)
    shown = getattr(kind, "__name__", None) if isinstance(kind, type) else str(kind)
    raise ValueError(f"{where} is annotated {shown}: use {_KNOWN}")


def _either(options: list[dict[str, Json]], where: str) -> dict[str, Json]:
    """One schema for several: their types together. Of arrays or choices only one can be."""
    merged: dict[str, Json] = {"type": list(_types_of(options))}
    for option in options:
        for key, value in option.items():
            if key == "enum":  # null is a choice too where the union has it
                others = [None] if {"type": "null"} in options else []
                value = [*value, *others]
                if len(options) > 1 + len(others):
                    raise ValueError(f"{where}: Literal[...] goes with None alone in a union")
            if key != "type":
                merged[key] = value
    return merged


def _types_of(options: list[dict[str, Json]]) -> Iterator[str]:
    for option in options:
        kinds = option["type"]
        yield from [kinds] if isinstance(kinds, str) else kinds


def _default(value: Any, where: str) -> Json:
    """A copy of a default that is JSON data."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, (list, tuple)):
            left += part
        elif isinstance(part, dict) and all(isinstance(key, str) for key in part):
            left += part.values()
        elif part is not None and not isinstance(part, (str, int, float, bool)):
            raise ValueError(f"{where} has a default of type {type(part).__name__}: use "
                             f"{_KNOWN}, or None")
    return copy_json(value)
