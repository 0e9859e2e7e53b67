"""Tool calls as text: the Hermes/Qwen form, bare JSON, and the call list of BFCL.

    <tool_call>{"name": "book", "arguments": {"id": 7}}</tool_call>      parse_hermes
    {"name": "book", "parameters": {"id": 7}}                            parse_json_calls
    [book(id=7), pay(amount=12.5)]                                       parse_call_list

What a model wrote is data: it is read by the json module and by `ast.parse`, whose tree is
walked for literals and never compiled or evaluated. No parser raises, whatever the text. What
cannot be read becomes an error with a reason, and never a call with fewer arguments than
were written. Rules that hold for all three:

* Reasoning (<think> ... </think>) is cut off first; a call drafted in it is no call.
* Integers stay exact; NaN, Infinity, numbers beyond a float and repeated keys are refused.
* An argument object may be JSON, or a Python literal of the same shape (None, True, single
  quotes). A string that holds one is unpacked once. An empty string means no arguments.
* A bad escape such as "\\d" in a JSON string is refused, not guessed at.
* A call that is complete but whose closer never came counts, with a note.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import keyword
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from rods_jax.tools.literals import (
    LIMITS, Limits, Unreadable, encodable, literal, load_json, parse_python, value_of)
from rods_jax.types import Json, ParsedStep, ToolCall, ToolSpec

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, UNTHINK = "<think>", "</think>"


@dataclasses.dataclass(frozen=True)
class ParsedText(ParsedStep):
    """`notes` flag what was odd but did not hinder a call, such as a missing closer."""

    notes: tuple[str, ...] = ()


def _make_call(name: str, arguments: dict[str, Json], limits: Limits) -> ToolCall:
    """The call, once its depth and its text are known to be harmless to what follows."""
    level: list[Json] = [name, arguments]
    for _ in range(limits.max_depth + 2):
        if any(isinstance(v, str) and not encodable(v) for v in level):
            raise Unreadable("a text holds half a surrogate pair")
        level = [item for v in level if isinstance(v, (dict, list))
                 for item in ((*v, *v.values()) if isinstance(v, dict) else v)]
        if not level:
            return ToolCall(name, arguments)
    raise Unreadable(f"nests deeper than {limits.max_depth}")


def _call_of(value: Json, limits: Limits) -> ToolCall:
    """A call from {"name": ..., "arguments" or "parameters": ...}."""
    if not isinstance(value, dict):
        raise Unreadable("a call is an object with name and arguments")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise Unreadable("a call needs a name")
    bags = [key for key in ("arguments", "parameters") if key in value]
    if len(bags) != 1:
        raise Unreadable(f"{name} needs arguments, given once")
    arguments = value[bags[0]]
    if isinstance(arguments, str):
        arguments = value_of(arguments, limits) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise Unreadable(f"the arguments of {name} are not an object")
    return _make_call(name, arguments, limits)


def _too_long(text: str, limits: Limits) -> ParsedText | None:
    if len(text) > limits.max_chars:
        return ParsedText(errors=(f"the message has over {limits.max_chars} characters",))
    return None


# ------------------------------------------------------------------------------ Hermes

_SPACE = re.compile(r"\s*")
_TAG = re.compile("|".join(re.escape(t) for t in (OPEN, THINK, UNTHINK)))
_MAX_CLOSERS = 4  # quoted closers to look past in a block that is no JSON


class _Found:
    """What a scan has gathered so far."""

    def __init__(self):
        self.calls: list[ToolCall] = []
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.errors: list[str] = []
        self.notes: list[str] = []

    def parsed(self, limits: Limits) -> ParsedText:
        if len(self.calls) + len(self.errors) > limits.max_calls:
            self.errors.append(f"over {limits.max_calls} calls in one message")
            self.calls = []
        return ParsedText(
            calls=tuple(self.calls), text="".join(self.text).strip(),
            reasoning="\n".join(r.strip() for r in self.reasoning if r.strip()),
            errors=tuple(self.errors), notes=tuple(self.notes))


def parse_hermes(text: str, declared: Collection[str] | None = None,
                 limits: Limits = LIMITS) -> ParsedText:
    """Calls in <tool_call> tags, each a JSON object with name and arguments.

    With `declared` tool names, a message without any tag is also read by `parse_json_calls`:
    untagged or fenced JSON then counts as a call of a declared tool, and is text otherwise.
    Without `declared` it is always text.
    """
    if refused := _too_long(text, limits):
        return refused
    found = _Found()
    at, tagged = 0, False
    while match := _TAG.search(text, at):
        if len(found.calls) + len(found.errors) > limits.max_calls:
            break  # counted and refused below; reading on would only take time
        if match[0] == UNTHINK:
            # The prompt opened the block: all up to here was thought.
            found, tagged = _Found(), False
            found.reasoning.append(text[: match.start()].replace(THINK, ""))
            at = match.end()
            continue
        found.text.append(text[at: match.start()])
        if match[0] == THINK:
            end = text.find(UNTHINK, match.end())
            if end < 0:
                found.reasoning.append(text[match.end():])
                found.errors.append("truncated: the reasoning is not closed")
                return found.parsed(limits)
            found.reasoning.append(text[match.end(): end])
            at = end + len(UNTHINK)
        else:
            tagged = True
            at = _read_block(text, match.end(), found, limits)
    found.text.append(text[at:])
    if declared is not None and not tagged and not found.errors:
        bare = parse_json_calls("".join(found.text), declared, limits)
        return dataclasses.replace(bare, reasoning=found.parsed(limits).reasoning)
    return found.parsed(limits)


def _read_block(text: str, start: int, found: _Found, limits: Limits) -> int:
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
        found.calls.append(_call_of(value, limits))
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


def _read_literal_block(text: str, at: int, found: _Found, limits: Limits) -> int:
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
            found.calls.append(_call_of(value_of(text[at:close], limits), limits))
            return close + len(CLOSE)
        except Unreadable as error:
            reason = reason or str(error)
        close = text.find(CLOSE, close + 1)
        if close < 0:
            break
    found.errors.append(reason)
    return end


# ------------------------------------------------------------------------------ bare JSON

_MAX_FAILURES = 64  # braces that open no JSON, before the rest is taken for text
_FENCE = re.compile(r"^[ \t]*```[A-Za-z0-9_+-]*[ \t]*$", re.MULTILINE)


def parse_json_calls(text: str, declared: Collection[str],
                     limits: Limits = LIMITS) -> ParsedText:
    """Calls as JSON objects in running text, fenced or not, with any separator between them
    (Llama's form). An object counts only if it has an argument bag and names a declared tool;
    everything else stays text. A declared tool whose arguments cannot be read is an error."""
    if refused := _too_long(text, limits):
        return refused
    found, at, kept, failures = _Found(), 0, 0, 0
    while (at := text.find("{", at)) >= 0 and failures < _MAX_FAILURES:
        try:
            value, end = load_json(text, at, limits)
        except (Unreadable, json.JSONDecodeError):
            if _looks_cut(text, at, declared):
                found.errors.append("truncated: a call is cut off")
                return found.parsed(limits)
            at += 1
            failures += 1
            continue
        name = value.get("name")
        if isinstance(name, str) and name in declared and (
                "arguments" in value or "parameters" in value):
            try:
                found.calls.append(_call_of(value, limits))
            except Unreadable as error:
                found.errors.append(str(error))
            found.text.append(text[kept:at])
            kept = end
        at = end
    found.text.append(text[kept:])
    if found.calls or found.errors:
        joined = _FENCE.sub("", "".join(found.text))
        found.text = [joined.strip().strip(";").strip()]
    return found.parsed(limits)


_NAME = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"')


def _looks_cut(text: str, at: int, declared: Collection[str]) -> bool:
    match = _NAME.match(text, at)
    return bool(match) and match[1] in declared


# ------------------------------------------------------------------------------ call list

_LIST_START = re.compile(r"\[\s*[^\W\d][\w.]*\s*\(")
_ONE_START = re.compile(r"[^\W\d][\w.]*\(")


def parse_call_list(text: str, tools: Sequence[ToolSpec],
                    limits: Limits = LIMITS) -> ParsedText:
    """A message that starts with `[name(`, or that is one call `name(...)`, as BFCL's prompt
    asks for; other messages are text. Prose after the list is kept as text.

    Arguments are literals, by keyword or by position in schema order. Refused: names that
    are not declared, star arguments, repeated arguments, any expression that is no literal.
    """
    if refused := _too_long(text, limits):
        return refused
    found = _Found()
    body = _cut_reasoning(text, found)
    if found.errors:
        return found.parsed(limits)
    body = body.strip()
    lines = body.splitlines()
    if len(lines) > 2 and _FENCE.fullmatch(lines[0]) and _FENCE.fullmatch(lines[-1]):
        body = "\n".join(lines[1:-1]).strip()
    if _ONE_START.match(body) and _closing(body) == len(body):
        body = f"[{body}]"
    if not _LIST_START.match(body):
        found.text.append("" if body == "[]" else body)
        return found.parsed(limits)
    end = _closing(body)
    if end is None:
        found.errors.append("truncated: a call is cut off")
        return found.parsed(limits)
    if end == 0:
        found.notes.append("unclosed: the call list has no closing bracket")
        body, end = body + "]", len(body) + 1
    found.text.append(body[end:])
    try:
        listed = parse_python(body[:end])
    except Unreadable as error:
        found.errors.append(str(error))
        return found.parsed(limits)
    specs = {spec.name: spec for spec in tools}
    for node in listed.elts if isinstance(listed, ast.List) else [listed]:
        try:
            found.calls.append(_call_of_node(node, specs, limits))
        except Unreadable as error:
            found.errors.append(str(error))
    return found.parsed(limits)


def _cut_reasoning(text: str, found: _Found) -> str:
    """Text after the reasoning. A closer outside the first list may lack its opener."""
    start = text.lstrip()
    if start.startswith(THINK):
        head, closer, tail = start[len(THINK):].partition(UNTHINK)
        found.reasoning.append(head)
        if not closer:
            found.errors.append("truncated: the reasoning is not closed")
        return tail
    # A list at the start may be a draft, or may quote the closer in an argument.
    listed = (_closing(start) or len(start)) if _LIST_START.match(start) else 0
    closer = start.find(UNTHINK, listed)
    if closer < 0:
        return start
    found.reasoning.append(start[:closer])
    return start[closer + len(UNTHINK):]


# A string, or its opening quote alone where it never ends, or a bracket.
_LEXEME = re.compile(
    r"'{3}(?:\\.|[^\\])*?'{3}|\"{3}(?:\\.|[^\\])*?\"{3}"
    r"|'(?:\\.|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\"|['\"]|[()\[\]{}]", re.DOTALL)


def _closing(body: str) -> int | None:
    """The place after the bracket that closes the one that opens first. 0: only the outer
    list is open at the end; None: something inside it, or a string, is."""
    stack, at = 0, 0
    for match in _LEXEME.finditer(body):
        lexeme, at = match[0], match.end()
        if lexeme[0] in "\"'":
            if len(lexeme) == 1:
                return None
        elif lexeme in "([{":
            stack += 1
        else:
            stack -= 1
            if stack <= 0:
                return at
    return 0 if stack == 1 and body.startswith("[") and body.rstrip()[-1] == ")" else None


def _call_of_node(node: ast.expr, specs: Mapping[str, ToolSpec], limits: Limits) -> ToolCall:
    if not isinstance(node, ast.Call):
        raise Unreadable(f"{type(node).__name__} is not a call")
    name = ".".join(_dotted(node.func))
    if name not in specs:
        raise Unreadable(f"{name!r} is not a declared tool")
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
    return _make_call(name, arguments, limits)


def _dotted(node: ast.expr) -> Iterator[str]:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise Unreadable("a call names its tool directly")
    return reversed([*parts, node.id])


# ------------------------------------------------------------------------------ writing


def format_call(call: ToolCall) -> str:
    """The JSON object that stands in a <tool_call> block."""
    value = {"name": call.name, "arguments": dict(call.arguments)}
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def format_hermes(calls: Sequence[ToolCall]) -> str:
    """Inverse of `parse_hermes`: one block a call, joined by newlines."""
    return "\n".join(f"{OPEN}\n{format_call(call)}\n{CLOSE}" for call in calls)


def format_call_list(calls: Sequence[ToolCall]) -> str:
    """Inverse of `parse_call_list`. Raises ValueError for an argument name that Python
    cannot write as a keyword, and for a value that is not JSON."""
    written = []
    for call in calls:
        format_call(call)  # refuses NaN, sets and the like
        for key in call.arguments:
            if not key.isidentifier() or keyword.iskeyword(key):
                raise ValueError(f"{call.name}: argument {key!r} is no keyword name: rename it")
        inner = ", ".join(f"{key}={value!r}" for key, value in call.arguments.items())
        written.append(f"{call.name}({inner})")
    return "[" + ", ".join(written) + "]"


_EXACT_INTEGER = re.compile(r"[+-]?[0-9]{1,300}")


def coerce(arguments: Mapping[str, Json], parameters: Mapping[str, Json]) -> dict[str, Json]:
    """Text given for an integer or number parameter, as that number where that is exact:
    "1234567890123456789" keeps every digit. Everything else is left as it is."""
    properties = parameters.get("properties") or {}
    made = dict(arguments)
    for key, value in arguments.items():
        kind = properties.get(key, {}).get("type")
        if not isinstance(value, str) or kind not in ("integer", "number", "float"):
            continue
        if _EXACT_INTEGER.fullmatch(value):
            made[key] = int(value)
        elif kind != "integer":
            try:
                number, _ = load_json(value, 0, Limits())
            except (Unreadable, json.JSONDecodeError):
                continue
            if type(number) is float and json.dumps(number) == value:
                made[key] = number
    return made
