"""Calls as a Python list of calls with literal arguments: BFCL's prompt asks for it."""

from __future__ import annotations

import ast
import keyword
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence

from rods_jax.tools.calls_json import json_call
from rods_jax.tools.calls_step import (
    FENCE, PYTHON_TAG, Found, ParsedText, closing, cut_reasoning, make_call, too_long)
from rods_jax.tools.literals import LIMITS, Limits, Unreadable, literal, parse_python
from rods_jax.types import Json, ToolCall, ToolSpec

_NAME = r"[^\W\d][\w.]*"
_LIST_START = re.compile(rf"\[\s*{_NAME}\s*\(")
_ONE_START = re.compile(rf"{_NAME}\(")
LIST_OPENS = re.compile(
    rf"\s*(?:{re.escape(PYTHON_TAG)}\s*)?(?:```\w*\s*)?"
    rf"({_LIST_START.pattern}|{_ONE_START.pattern})")


def parse_call_list(text: str, tools: Sequence[ToolSpec],
                    limits: Limits = LIMITS) -> ParsedText:
    """A message that starts with `[name(`, or that is one call `name(...)`, as BFCL's prompt
    asks for; other messages are text. Prose after the list is kept as text.

    Arguments are literals, by keyword or by position in schema order. Refused: names that
    are not declared, star arguments, repeated arguments, any expression that is no literal.
    Python folds a wide letter in a name into the plain one; what counts is the name after that.
    """
    if refused := too_long(text, limits):
        return refused
    found = Found()
    for part in cut_reasoning(text, LIST_OPENS, found):
        read_list(part, found, tools, limits)
    return found.parsed(limits)


def read_list(text: str, found: Found, tools: Sequence[ToolSpec], limits: Limits) -> None:
    """Adds the calls, errors and text of one part of a message, without reasoning."""
    body = _unfenced(text.strip())
    if _ONE_START.match(body) and closing(body) == (len(body), 0):
        body = f"[{body}]"
    if not _LIST_START.match(body):
        # The blanks around a part keep its words apart from the next part's.
        found.text.append("" if body == "[]" else f" {body} ")
        return
    end, depth = closing(body)
    if depth == 1 and body.endswith(")"):
        found.notes.append("unclosed: the call list has no closing bracket")
        body, end = body + "]", len(body) + 1
    elif depth:
        found.errors.append("truncated: a call is cut off")
        return
    found.text.append(body[end:])
    try:
        listed = parse_python(body[:end])
    except Unreadable as error:
        found.errors.append(str(error))
        return
    specs = {spec.name: spec for spec in tools}
    for node in listed.elts if isinstance(listed, ast.List) else [listed]:
        if found.full(limits):
            return
        try:
            found.calls.append(_call_of_node(node, specs, limits))
        except Unreadable as error:
            found.errors.append(str(error))


def _unfenced(body: str) -> str:
    head, last = FENCE.match(body), body.rfind("\n")
    if head and last > head.end() and FENCE.fullmatch(body, last + 1):
        return body[head.end(): last].strip()
    return body


def _call_of_node(node: ast.expr, specs: Mapping[str, ToolSpec], limits: Limits) -> ToolCall:
    if not isinstance(node, ast.Call):
        raise Unreadable(f"{type(node).__name__} is not a call")
    name = ".".join(_dotted(node.func))
    if name not in specs:
        raise Unreadable(f"{name[:limits.max_name]!r} is not a declared tool")
    properties = list(specs[name].parameters.get("properties") or {})
    if len(node.args) > len(properties):
        raise Unreadable(f"{name} takes at most {len(properties)} arguments")
    arguments: dict[str, Json] = {}
    pairs = [*zip(properties, node.args, strict=False),
             *((k.arg, k.value) for k in node.keywords)]
    for key, value in pairs:
        if key is None:
            raise Unreadable(f"{name} has a ** argument")
        if key in arguments:
            raise Unreadable(f"{name} has the argument {key!r} twice")
        arguments[key] = literal(value, limits)
    return make_call(name, arguments, limits)


def _dotted(node: ast.expr) -> Iterator[str]:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise Unreadable("a call names its tool directly")
    return reversed([*parts, node.id])


# ------------------------------------------------------------------------------ writing


def format_call_list(calls: Sequence[ToolCall]) -> str:
    """Inverse of `parse_call_list`. Raises ValueError for a tool or argument name that Python
    cannot write as it is, and for a value that is not JSON."""
    written = []
    for call in calls:
        json_call(call, "arguments")  # refuses NaN, sets and the like
        if not all(_plain(part) for part in call.name.split(".")):
            raise ValueError(f"{call.name!r} is no name in Python: rename the tool")
        for key in call.arguments:
            if not _plain(key):
                raise ValueError(f"{call.name}: argument {key!r} is no keyword name: rename it")
        inner = ", ".join(f"{key}={value!r}" for key, value in call.arguments.items())
        written.append(f"{call.name}({inner})")
    return "[" + ", ".join(written) + "]"


def _plain(name: str) -> bool:
    """Whether Python reads the name as a name, and as this one."""
    return (name.isidentifier() and not keyword.iskeyword(name)
            and unicodedata.normalize("NFKC", name) == name)
