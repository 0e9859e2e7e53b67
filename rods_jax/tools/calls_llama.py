"""Llama 3's two forms of calls, over the readers of bare JSON and of call lists.

    <|python_tag|>{"name": "book", "parameters": {"id": 7}}<|eom_id|>    parse_llama_json
    <|python_tag|>[book(id=7), pay(amount=12.5)]<|eot_id|>               parse_llama_pythonic

The tag says that calls follow; models leave it out as often as not. End tokens are no part of
a message and are dropped where a decoder left them in the text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rods_jax.tools.calls_json import OBJECT_OPENS, json_call, read_objects
from rods_jax.tools.calls_list import LIST_OPENS, read_list
from rods_jax.tools.calls_step import PYTHON_TAG, Found, ParsedText, cut_reasoning, too_long
from rods_jax.tools.literals import LIMITS, Limits
from rods_jax.types import ToolCall, ToolSpec

END_TOKENS = ("<|eot_id|>", "<|eom_id|>")


def parse_llama_json(text: str, declared: Collection[str],
                     limits: Limits = LIMITS) -> ParsedText:
    """JSON objects with name and parameters, joined by ";" or newlines, prose around them.

    In a message that starts with the tag, an object or a list of them, a call of a tool that
    is not declared is an error; elsewhere such JSON is text. A tag that no call follows is an
    error.
    """
    if refused := too_long(text, limits):
        return refused
    found = Found()
    for part in cut_reasoning(_cut_ends(text), OBJECT_OPENS, found):
        body, tagged = _untagged(part)
        before = len(found.calls) + len(found.errors)
        read_objects(body, found, declared, limits, strict=tagged or body.startswith(("{", "[{")))
        _check_tag(tagged, before, found)
    return found.parsed(limits)


def parse_llama_pythonic(text: str, tools: Sequence[ToolSpec],
                         limits: Limits = LIMITS) -> ParsedText:
    """A call list as in `parse_call_list`, which has the same writer, `format_call_list`. A tag
    that no call follows is an error."""
    if refused := too_long(text, limits):
        return refused
    found = Found()
    for part in cut_reasoning(_cut_ends(text), LIST_OPENS, found):
        body, tagged = _untagged(part)
        before = len(found.calls) + len(found.errors)
        read_list(body, found, tools, limits)
        _check_tag(tagged, before, found)
    return found.parsed(limits)


def _cut_ends(text: str) -> str:
    end = 0
    while end != len(text):
        text = text.rstrip()
        end = len(text)
        for token in END_TOKENS:
            text = text.removesuffix(token)
    return text


def _untagged(part: str) -> tuple[str, bool]:
    body = part.strip()
    bare = body.removeprefix(PYTHON_TAG)
    return bare.lstrip(), len(bare) < len(body)


def _check_tag(tagged: bool, before: int, found: Found) -> None:
    if tagged and len(found.calls) + len(found.errors) == before:
        found.errors.append(f"no call follows {PYTHON_TAG}")


def format_llama_json(calls: Sequence[ToolCall]) -> str:
    """Inverse of `parse_llama_json`, without tag and end token."""
    return "; ".join(json_call(call, "parameters") for call in calls)
