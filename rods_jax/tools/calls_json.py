"""Calls as bare JSON objects in running text, fenced or not."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from rods_jax.tools.calls_step import (
    FENCE, PYTHON_TAG, Found, ParsedText, call_of, closing, cut_reasoning, make_call, too_long)
from rods_jax.tools.literals import LIMITS, Limits, Unreadable, load_json, value_of
from rods_jax.types import Json, ToolCall

_MAX_FAILURES = 64  # unreadable objects that are no calls, before the rest is taken for text
# An object that has a key at all. Braces in prose open none.
_OBJECT = re.compile(r"\{\s*[\"']")
OBJECT_OPENS = re.compile(
    rf"[\s;]*(?:{re.escape(PYTHON_TAG)}\s*)?(?:```\w*\s*)?({_OBJECT.pattern})")
_NAME = re.compile(r"""["']name["']\s*:\s*["']([^"'\\]*)["']""")
_BAG = re.compile(r"""["'](?:arguments|parameters)["']\s*:""")


def parse_json_calls(text: str, declared: Collection[str],
                     limits: Limits = LIMITS) -> ParsedText:
    """Calls as JSON objects with any separator between them. An object counts only if it has
    an argument bag and names a declared tool; everything else stays text. A declared tool
    whose arguments cannot be read is an error."""
    if refused := too_long(text, limits):
        return refused
    found = Found()
    read_objects("".join(cut_reasoning(text, OBJECT_OPENS, found)), found, declared, limits)
    return found.parsed(limits)


def read_objects(text: str, found: Found, declared: Collection[str], limits: Limits,
                 strict: bool = False) -> None:
    """Adds the calls, errors and text of a message without reasoning. `strict`: a call of a
    tool that is not declared is an error and not text."""
    at = kept = failures = 0
    while (match := _OBJECT.search(text, at)) and not found.full(limits):
        if failures > _MAX_FAILURES:
            break
        value, at, reason = _read(text, match.start(), limits)
        failures += bool(reason)
        try:
            if reason:
                name = _name_of(text[match.start(): at])
            else:
                name = value["name"] if _is_call(value) else None
            if name is None or not (strict or name in declared):
                continue  # it stays text, whatever stands inside it
            if reason:
                raise Unreadable(reason)
            if name not in declared:
                raise Unreadable(f"{name!r} is not a declared tool")
            found.calls.append(call_of(value, limits))
        except Unreadable as error:
            found.errors.append(str(error))
        found.text.append(text[kept: match.start()])
        kept = at
    found.text.append(text[kept:])
    if found.calls or found.errors:
        found.text = [FENCE.sub("", "".join(found.text)).strip("; \t\r\n")]


def _read(text: str, at: int, limits: Limits) -> tuple[Json, int, str]:
    """The object that starts at `at`, the place after it, and why it cannot be read, or ""."""
    reason = ""
    try:
        return *load_json(text, at, limits), reason
    except Unreadable as error:
        reason = str(error)
    except json.JSONDecodeError:
        pass
    end, depth = closing(text, at)
    if depth:
        return None, end, reason or "truncated: a call is cut off"
    try:
        if not reason:
            return value_of(text[at:end], limits), end, reason
    except Unreadable as error:
        reason = str(error)
    return None, end, reason


def _is_call(value: Json) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and (
        "arguments" in value or "parameters" in value)


def _name_of(text: str) -> str | None:
    """The tool that an unreadable object seems to call."""
    name = _NAME.search(text)
    return name[1] if name and _BAG.search(text) else None


def json_call(call: ToolCall, bag: str) -> str:
    """The call as a JSON object. ValueError for what could not be read back."""
    try:
        made = make_call(call.name, dict(call.arguments), LIMITS)
        return json.dumps({"name": made.name, bag: made.arguments}, ensure_ascii=False,
                          allow_nan=False)
    except (Unreadable, TypeError) as error:
        raise ValueError(f"a call of {call.name!r} cannot be written: {error}") from None
