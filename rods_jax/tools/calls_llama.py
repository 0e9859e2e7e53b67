"""Llama 3's two forms of calls, over the readers of bare JSON and of call lists.

    <|python_tag|>{"name": "book", "parameters": {"id": 7}}<|eom_id|>    parse_llama_json
    <|python_tag|>[book(id=7), pay(amount=12.5)]<|eot_id|>               parse_llama_pythonic

The tag says that calls follow; models leave it out as often as not. End tokens are no part of
a message and are dropped where a decoder left them in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

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
    def read(body: str, tagged: bool, found: Found) -> None:
        strict = tagged or body.startswith(("{", "[{"))
        read_objects(body, found, declared, limits, strict)

    return _parse(text, limits, OBJECT_OPENS, read)


def parse_llama_pythonic(text: str, tools: Sequence[ToolSpec],
                         limits: Limits = LIMITS) -> ParsedText:
    """A call list as in `parse_call_list`, which has the same writer, `format_call_list`. A tag
    that no call follows is an error."""
    return _parse(text, limits, LIST_OPENS,
                  lambda body, tagged, found: read_list(body, found, tools, limits))


def _parse(text: str, limits: Limits, opens: re.Pattern[str],
           read: Callable[[str, bool, Found], None]) -> ParsedText:
    """`read` takes the calls of a part after the reasoning, and whether the tag stood there."""
    if refused := too_long(text, limits):
        return refused
    found = Found()
    for part in cut_reasoning(_cut_ends(text), opens, found):
        body = part.strip()
        bare = body.removeprefix(PYTHON_TAG)
        tagged, before = len(bare) < len(body), len(found.calls) + len(found.errors)
        read(bare.lstrip(), tagged, found)
        if tagged and len(found.calls) + len(found.errors) == before:
            found.errors.append(f"no call follows {PYTHON_TAG}")
    return found.parsed(limits)


def _cut_ends(text: str) -> str:
    end = 0
    while end != len(text):
        text = text.rstrip()
        end = len(text)
        for token in END_TOKENS:
            text = text.removesuffix(token)
    return text


def format_llama_json(calls: Sequence[ToolCall]) -> str:
    """Inverse of `parse_llama_json`, without tag and end token."""
    return "; ".join(json_call(call, "parameters") for call in calls)
