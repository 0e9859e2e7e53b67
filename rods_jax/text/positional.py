"""Calls as flat sequences of words: the tool's name, then its values in schema order.

    book_table mario 7 [ ann bob ] ; pay 12.5

An atom is a `Mark` or a word (str). A string of several words stands between two QUOTE marks,
lists and objects between brackets; SKIP holds the place of an optional argument that is left
out before one that is given, and optional arguments at the end are just left out. A quoted
value is a string whatever it looks like. Numbers keep their digits: no detour through float
for an integer.

`decode_calls` is the exact inverse of `encode_calls` for calls that fit their schemas, and
turns everything else into errors with a reason. It never raises.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping, Sequence

from rods_jax.types import Json, ToolCall, ToolSpec


class Mark(enum.Enum):
    """Control atoms. Their spelling in a text is an ordinary word, never one of these."""

    PAD = "<pad>"
    UNK = "<unk>"
    USER = "<user>"
    ACT = "<act>"  # the assistant's message starts
    BAD = "<bad>"  # the message before this could not be read
    GO = "<go>"  # end of a message with calls
    END = "<end>"  # end of a message without calls, and so of the turn
    SEP = ";"
    QUOTE = '"'
    OPEN = "["
    CLOSE = "]"
    OPEN_OBJECT = "{"
    CLOSE_OBJECT = "}"
    SKIP = "_"


Atom = Mark | str

MAX_DEPTH = 16  # of nested lists and objects in an argument
MAX_DIGITS = 300  # keeps int() off Python's own limit and float() finite

_ALL = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_ALIASES = {"dict": "object", "float": "number", "tuple": "array", "list": "array"}
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")


class _Malformed(Exception):
    """Carries the reason out of the recursive reader; never leaves this module."""


def _types(schema: Mapping[str, Json]) -> frozenset[str]:
    """JSON types a schema allows; all of them where it does not say in a way known here."""
    declared = schema.get("type")
    names = declared if isinstance(declared, (list, tuple)) else [declared]
    names = frozenset(_ALIASES.get(n, n) for n in names if isinstance(n, str))
    return names if names and names <= _ALL else _ALL


def _scalar(word: str, types: frozenset[str]) -> Json:
    """Reads one unquoted word as the first type that fits; raises _Malformed if none does."""
    if "boolean" in types and word in ("true", "false"):
        return word == "true"
    if "null" in types and word == "null":
        return None
    if types & {"integer", "number"} and len(word) <= MAX_DIGITS:
        if _INTEGER.fullmatch(word):
            return int(word)
        match = _NUMBER.fullmatch(word)
        if match and "number" in types and math.isfinite(float(word)):
            return float(word)
        if match and match[1] and not match[2] and not match[1].strip(".0"):
            return int(word[: match.start(1)])  # 12.0 is the integer 12
    if "string" in types:
        return word
    raise _Malformed(f"{word!r} is not of type {' or '.join(sorted(types))}")


# ------------------------------------------------------------------------------ writing


def encode_calls(calls: Sequence[ToolCall], specs: Mapping[str, ToolSpec]) -> list[Atom]:
    """Atoms of these calls, SEP between them, no stop mark. Raises ValueError for a call that
    no declared tool can take."""
    atoms: list[Atom] = []
    for call in calls:
        if atoms:
            atoms.append(Mark.SEP)
        atoms += _encode_call(call, specs)
    return atoms


def _encode_call(call: ToolCall, specs: Mapping[str, ToolSpec]) -> list[Atom]:
    if call.name not in specs:
        raise ValueError(f"no tool {call.name!r} is declared: build the format with its spec")
    properties = specs[call.name].parameters.get("properties", {})
    for name in call.arguments:
        if name not in properties:
            raise ValueError(f"tool {call.name!r} has no parameter {name!r}: fix the call")
    for name in specs[call.name].parameters.get("required", ()):
        if name not in call.arguments:
            raise ValueError(f"a call of {call.name!r} lacks {name!r}: fix the call")
    atoms: list[Atom] = [call.name]
    skipped = 0
    for name, schema in properties.items():
        if name not in call.arguments:
            skipped += 1
            continue
        atoms += [Mark.SKIP] * skipped + _encode_value(call.arguments[name], schema, 0)
        skipped = 0
    return atoms


def _encode_value(value: Json, schema: Mapping[str, Json], depth: int) -> list[Atom]:
    if depth > MAX_DEPTH:
        raise ValueError(f"an argument nests deeper than {MAX_DEPTH}: flatten it")
    if value is None:
        return ["null"]
    if isinstance(value, bool):
        return ["true" if value else "false"]
    if isinstance(value, (int, float)):
        return [_spell_number(value)]
    if isinstance(value, str):
        return _encode_string(value, _types(schema))
    if isinstance(value, Mapping):
        inner: list[Atom] = []
        properties = schema.get("properties") or {}
        for key, item in value.items():
            inner += _encode_string(key, frozenset({"string"}))
            inner += _encode_value(item, properties.get(key, {}), depth + 1)
        return [Mark.OPEN_OBJECT, *inner, Mark.CLOSE_OBJECT]
    if isinstance(value, (list, tuple)):
        items = schema.get("items") or {}
        inner = [a for item in value for a in _encode_value(item, items, depth + 1)]
        return [Mark.OPEN, *inner, Mark.CLOSE]
    raise ValueError(f"an argument of type {type(value).__name__} is not JSON: convert it")


def _spell_number(value: int | float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"argument {value} is not a JSON number: use a finite one")
    if isinstance(value, int) and abs(value) >= 10 ** (MAX_DIGITS - 1):
        raise ValueError(f"an integer argument has over {MAX_DIGITS} digits: pass it as text")
    return repr(value)


def _encode_string(value: str, types: frozenset[str]) -> list[Atom]:
    words = value.split(" ") if value else []
    if any(w != "".join(w.split()) or not w for w in words):
        words = [value]  # odd spacing: the whole string is one word, so nothing is lost
    if len(words) == 1:
        try:
            plain = _scalar(words[0], types) == value and "string" in types
        except _Malformed:
            plain = False
        if plain:
            return list(words)
    return [Mark.QUOTE, *words, Mark.QUOTE]


# ------------------------------------------------------------------------------ reading


def decode_calls(
    atoms: Sequence[Atom], specs: Mapping[str, ToolSpec]
) -> tuple[tuple[ToolCall, ...], tuple[str, ...]]:
    """Calls of a message without its stop mark, and the reasons for those that are none."""
    calls, errors = [], []
    for part in _split(atoms):
        try:
            calls.append(_decode_call(part, specs))
        except _Malformed as error:
            errors.append(str(error))
    return tuple(calls), tuple(errors)


def _split(atoms: Sequence[Atom]) -> list[list[Atom]]:
    parts: list[list[Atom]] = [[]]
    for atom in atoms:
        if atom is Mark.SEP:
            parts.append([])
        else:
            parts[-1].append(atom)
    return parts


def _decode_call(atoms: Sequence[Atom], specs: Mapping[str, ToolSpec]) -> ToolCall:
    if not atoms:
        raise _Malformed("a call is empty")
    name = atoms[0]
    if isinstance(name, Mark) or name not in specs:
        spelled = name.value if isinstance(name, Mark) else name
        raise _Malformed(f"{spelled!r} is not a tool")
    parameters = specs[name].parameters
    properties = parameters.get("properties", {})
    required = set(parameters.get("required", ()))
    arguments: dict[str, Json] = {}
    at = 1
    for key, schema in properties.items():
        if at == len(atoms) or atoms[at] is Mark.SKIP:
            if key in required:
                raise _Malformed(f"{name} lacks a value for {key}")
            at = min(at + 1, len(atoms))
            continue
        try:
            arguments[key], at = _decode_value(atoms, at, schema, 0)
        except _Malformed as error:
            raise _Malformed(f"{name}, {key}: {error}") from None
    if at < len(atoms):
        raise _Malformed(f"{name} takes at most {len(properties)} values, got more")
    return ToolCall(name, arguments)


def _decode_value(
    atoms: Sequence[Atom], at: int, schema: Mapping[str, Json], depth: int
) -> tuple[Json, int]:
    """The value that starts at `at`, and the place after it."""
    if depth > MAX_DEPTH:
        raise _Malformed(f"nests deeper than {MAX_DEPTH}")
    atom, types = atoms[at], _types(schema)
    if isinstance(atom, str):
        return _scalar(atom, types), at + 1
    if atom is Mark.QUOTE and "string" in types:
        return _decode_string(atoms, at)
    if atom is Mark.OPEN and "array" in types:
        return _decode_list(atoms, at, schema, depth)
    if atom is Mark.OPEN_OBJECT and "object" in types:
        return _decode_object(atoms, at, schema, depth)
    raise _Malformed(f"{atom.value} where {' or '.join(sorted(types))} is due")


def _decode_string(atoms: Sequence[Atom], at: int) -> tuple[str, int]:
    """A word, or the words between two QUOTE marks, joined by one space."""
    if isinstance(atoms[at], str):
        return atoms[at], at + 1
    if atoms[at] is not Mark.QUOTE:
        raise _Malformed(f"{atoms[at].value} where string is due")
    words = []
    for i in range(at + 1, len(atoms)):
        if atoms[i] is Mark.QUOTE:
            return " ".join(words), i + 1
        if isinstance(atoms[i], Mark):
            raise _Malformed(f"{atoms[i].value} inside a string")
        words.append(atoms[i])
    raise _Malformed("a quote is not closed")


def _decode_list(
    atoms: Sequence[Atom], at: int, schema: Mapping[str, Json], depth: int
) -> tuple[list[Json], int]:
    items, at = [], at + 1
    while at < len(atoms):
        if atoms[at] is Mark.CLOSE:
            return items, at + 1
        item, at = _decode_value(atoms, at, schema.get("items") or {}, depth + 1)
        items.append(item)
    raise _Malformed("a list is not closed")


def _decode_object(
    atoms: Sequence[Atom], at: int, schema: Mapping[str, Json], depth: int
) -> tuple[dict[str, Json], int]:
    properties = schema.get("properties") or {}
    fields: dict[str, Json] = {}
    at += 1
    while at < len(atoms):
        if atoms[at] is Mark.CLOSE_OBJECT:
            return fields, at + 1
        key, at = _decode_string(atoms, at)
        if key in fields:
            raise _Malformed(f"the key {key!r} comes twice")
        if at == len(atoms):
            break
        fields[key], at = _decode_value(atoms, at, properties.get(key, {}), depth + 1)
    raise _Malformed("an object is not closed")
