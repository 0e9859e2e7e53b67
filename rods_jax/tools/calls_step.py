"""What the parsers of calls share: their result, reasoning, brackets, and what a call is."""

from __future__ import annotations

import dataclasses
import re

from rods_jax.tools.literals import Limits, Unreadable, encodable, value_of
from rods_jax.types import Json, ParsedStep, ToolCall

THINK, UNTHINK = "<think>", "</think>"
PYTHON_TAG = "<|python_tag|>"  # opens Llama 3's calls
FENCE = re.compile(r"^[ \t]*```[A-Za-z0-9_+-]*[ \t]*$", re.MULTILINE)

_THOUGHT = re.compile(f"{THINK}|{UNTHINK}")
_TOOL_NAME = re.compile(r"[^\W\d]\w*(?:[.-]\w+)*")
_MAX_REASON = 200  # characters; reasons go back to the model


@dataclasses.dataclass(frozen=True)
class ParsedText(ParsedStep):
    """`notes` flag what was odd but did not hinder a call, such as a missing closer."""

    notes: tuple[str, ...] = ()


class Found:
    """What a scan has gathered so far."""

    def __init__(self):
        self.calls: list[ToolCall] = []
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.errors: list[str] = []
        self.notes: list[str] = []

    def full(self, limits: Limits) -> bool:
        """Then the message is refused, and reading on would only take time."""
        return len(self.calls) + len(self.errors) > limits.max_calls

    def parsed(self, limits: Limits) -> ParsedText:
        if self.full(limits):
            self.calls, self.errors = [], [f"over {limits.max_calls} calls in one message"]
        return ParsedText(
            calls=tuple(self.calls), text="".join(self.text).strip(),
            reasoning="\n".join(r.strip() for r in self.reasoning if r.strip()),
            errors=tuple(e[:_MAX_REASON] for e in self.errors), notes=tuple(self.notes))


def too_long(text: str, limits: Limits) -> ParsedText | None:
    if len(text) > limits.max_chars:
        return ParsedText(errors=(f"the message has over {limits.max_chars} characters",))
    return None


# ------------------------------------------------------------------------------ calls


def make_call(name: str, arguments: dict[str, Json], limits: Limits) -> ToolCall:
    """The call, once its names, depth and text are known to be harmless to what follows."""
    if len(name) > limits.max_name or not _TOOL_NAME.fullmatch(name):
        raise Unreadable(f"{name[:limits.max_name]!r} is not the name of a tool")
    if any(len(key) > limits.max_name for key in arguments):
        raise Unreadable(f"an argument of {name} has a name of over {limits.max_name} characters")
    level: list[Json] = [arguments]
    for _ in range(limits.max_depth + 2):
        if any(isinstance(v, str) and not encodable(v) for v in level):
            raise Unreadable("a text holds half a surrogate pair")
        level = [item for v in level if isinstance(v, (dict, list))
                 for item in ((*v, *v.values()) if isinstance(v, dict) else v)]
        if not level:
            return ToolCall(name, arguments)
    raise Unreadable(f"nests deeper than {limits.max_depth}")


def call_of(value: Json, limits: Limits) -> ToolCall:
    """A call from {"name": ..., "arguments" or "parameters": ...}."""
    if not isinstance(value, dict):
        raise Unreadable("a call is an object with name and arguments")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise Unreadable("a call needs a name")
    make_call(name, {}, limits)  # so that the reasons below may show the name
    bags = [key for key in ("arguments", "parameters") if key in value]
    if len(bags) != 1:
        raise Unreadable(f"{name} needs arguments, given once")
    arguments = value[bags[0]]
    if isinstance(arguments, str):
        arguments = value_of(arguments, limits) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise Unreadable(f"the arguments of {name} are not an object")
    return make_call(name, arguments, limits)


# ------------------------------------------------------------------------------ scanning

# A string, or its opening quote alone where it never ends, or a bracket. Without the lone
# triple quotes each of many would be looked for up to the end of the text.
_LEXEME = re.compile(
    r"'{3}(?:\\.|[^\\])*?'{3}|\"{3}(?:\\.|[^\\])*?\"{3}|'{3}|\"{3}"
    r"|'(?:\\.|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\"|['\"]|[()\[\]{}]", re.DOTALL)
_OPEN_QUOTES = frozenset(("'", '"', "'''", '"""'))


def closing(text: str, at: int = 0) -> tuple[int, int]:
    """(place, depth): the place after the bracket that closes the first one from `at` on, and
    0. Where it is never closed: the end of the text, and how many brackets are open there, or
    -1 where a string is. Brackets count alike, so () may close []: the readers tell."""
    depth = 0
    for match in _LEXEME.finditer(text, at):
        lexeme = match[0]
        if lexeme in "([{":
            depth += 1
        elif lexeme in ")]}":
            depth -= 1
            if depth <= 0:
                return match.end(), 0
        elif lexeme in _OPEN_QUOTES:
            return len(text), -1
    return len(text), depth or -1


def cut_reasoning(text: str, opens: re.Pattern[str], found: Found) -> list[str]:
    """The parts of the text that are no reasoning. A closer may lack its opener, which then
    stood in the prompt: all before it was thought.

    `opens` matches what calls begin with, group 1 from their first bracket or name on. Tags
    quoted in calls at the start of a part count for nothing."""
    parts: list[str] = []
    at = 0
    while True:
        after, depth = at, 0
        while not depth and (match := opens.match(text, after)):
            after, depth = closing(text, match.start(1))
        tag = _THOUGHT.search(text, after)
        if tag is None:
            return [*parts, text[at:]]
        before = text[at: tag.start()]
        if tag[0] == UNTHINK:
            found.reasoning.append("\n".join((*parts, before)))
            parts, at = [], tag.end()
            continue
        parts.append(before)
        end = text.find(UNTHINK, tag.end())
        if end < 0:
            found.reasoning.append(text[tag.end():])
            found.errors.append("truncated: the reasoning is not closed")
            return parts
        found.reasoning.append(text[tag.end(): end])
        at = end + len(UNTHINK)
