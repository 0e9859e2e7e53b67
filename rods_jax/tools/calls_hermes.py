"""The Hermes and Qwen form: each call a JSON object between <tool_call> tags."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Sequence

from rods_jax.tools.calls_json import json_call, parse_json_calls
from rods_jax.tools.calls_step import THINK, UNTHINK, Found, ParsedText, call_of, too_long
from rods_jax.tools.literals import LIMITS, Limits, Unreadable, load_json, value_of
from rods_jax.types import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_SPACE = re.compile(r"\s*")
_TAG = re.compile("|".join(re.escape(t) for t in (OPEN, THINK, UNTHINK)))
_MAX_CLOSERS = 4  # quoted closers to look past in a block that is no JSON


def parse_hermes(text: str, declared: Collection[str] | None = None,
                 limits: Limits = LIMITS) -> ParsedText:
    """Calls in <tool_call> tags, each a JSON object with name and arguments.

    With `declared` tool names, a message without any tag is also read by `parse_json_calls`:
    untagged or fenced JSON then counts as a call of a declared tool, and is text otherwise.
    Without `declared` it is always text.
    """
    if refused := too_long(text, limits):
        return refused
    if declared is not None and OPEN not in text:
        return parse_json_calls(text, declared, limits)
    found = Found()
    at, tagged, thought = 0, False, 0
    while (match := _TAG.search(text, at)) and not found.full(limits):
        if match[0] == UNTHINK:
            # The prompt opened the block: all up to here was thought.
            found, tagged, thought = Found(), False, match.start()
            at = match.end()
            continue
        found.text.append(text[at: match.start()])
        if match[0] == THINK:
            end = text.find(UNTHINK, match.end())
            if end < 0:
                found.reasoning.append(text[match.end():])
                found.errors.append("truncated: the reasoning is not closed")
                return _parsed(found, text[:thought], limits)
            found.reasoning.append(text[match.end(): end])
            at = end + len(UNTHINK)
        else:
            tagged = True
            at = _read_block(text, match.end(), found, limits)
    found.text.append(text[at:])
    if declared is not None and not tagged:  # all tags stood in the reasoning
        bare = parse_json_calls("".join(found.text), declared, limits)
        reasoning = _parsed(found, text[:thought], limits).reasoning
        return dataclasses.replace(bare, reasoning=reasoning)
    return _parsed(found, text[:thought], limits)


def _parsed(found: Found, thought: str, limits: Limits) -> ParsedText:
    """`thought`: what stood before the last closer without an opener."""
    found.reasoning.insert(0, thought.replace(THINK, ""))
    return found.parsed(limits)


def _read_block(text: str, start: int, found: Found, limits: Limits) -> int:
    """Reads the block after an opening tag and returns the place where it ends."""
    at = _SPACE.match(text, start).end()
    try:
        value, end = load_json(text, at, limits)
        rest = _SPACE.match(text, end).end()
        if text.startswith(CLOSE, rest):
            end = rest + len(CLOSE)
        elif rest == len(text) or text.startswith(OPEN, rest):
            found.notes.append("unclosed: a call has no closing tag")
        else:
            found.errors.append("text follows the JSON of a call")
            return _skip(text, rest)
        found.calls.append(call_of(value, limits))
        return end
    except Unreadable as error:
        found.errors.append(str(error))
        return _skip(text, at)
    except json.JSONDecodeError:
        return _read_literal_block(text, at, found, limits)


def _skip(text: str, at: int) -> int:
    """The place after the next closer, or the next opener, or the end."""
    close, following = text.find(CLOSE, at), text.find(OPEN, at)
    if close >= 0 and not 0 <= following < close:
        return close + len(CLOSE)
    return following if following >= 0 else len(text)


def _read_literal_block(text: str, at: int, found: Found, limits: Limits) -> int:
    """A block that is no JSON: a Python literal up to one of the next closers, or an error."""
    close = text.find(CLOSE, at)
    if close < 0:
        following = text.find(OPEN, at)
        if following < 0:
            found.errors.append("truncated: a call is cut off")
            return len(text)
        found.errors.append("a call is cut off")
        return following
    reason, end = "", close + len(CLOSE)
    for _ in range(_MAX_CLOSERS):
        try:
            found.calls.append(call_of(value_of(text[at:close], limits), limits))
            return close + len(CLOSE)
        except Unreadable as error:
            reason = reason or str(error)
        close = text.find(CLOSE, close + 1)
        if close < 0:
            break
    found.errors.append(reason)
    return end


# ------------------------------------------------------------------------------ writing


def format_call(call: ToolCall) -> str:
    """The JSON object that stands in a <tool_call> block. ValueError for what could not be
    read back: no tool's name, values that are not JSON or nest too deep."""
    return json_call(call, "arguments")


def format_hermes(calls: Sequence[ToolCall]) -> str:
    """Inverse of `parse_hermes`: one block a call, joined by newlines."""
    return "\n".join(f"{OPEN}\n{format_call(call)}\n{CLOSE}" for call in calls)
