"""Literal values as text: JSON, and Python literals of the same shape, within limits.

Nothing is evaluated: JSON goes through the json module, Python through `ast.parse`, whose tree
is walked for constants, lists and objects. Integers stay exact. NaN, Infinity, numbers beyond
a float, repeated keys, sets, bytes and every expression are refused with a reason.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import math
import re
import warnings
from collections.abc import Mapping

from rods_jax.types import Json


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a message may hold before it is refused unread."""

    max_chars: int = 50_000
    max_depth: int = 32  # of nested lists and objects in an argument
    max_calls: int = 64
    max_digits: int = 300  # of an integer
    max_name: int = 200  # characters of a tool's or an argument's name


LIMITS = Limits()


class Unreadable(Exception):
    """Carries a reason to the parser's top; callers turn it into an error text."""


# Escapes that mean the same in JSON and in Python; group 1 catches any other. A surrogate is
# another: JSON joins a pair of them, Python does not.
_ESCAPE = re.compile(r"\\(?:[\\'\"nrtbf]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})|(\\)")
_SPACE = re.compile(r"\s*")
_PARSE_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError)


@functools.lru_cache(maxsize=8)
def _decoder(limits: Limits) -> json.JSONDecoder:
    def integer(digits: str) -> int:
        if len(digits) > limits.max_digits:
            raise Unreadable(f"an integer has over {limits.max_digits} digits")
        return int(digits)

    def number(digits: str) -> float:
        if not math.isfinite(value := float(digits)):
            raise Unreadable(f"the number {digits[:20]} is too large")
        return value

    def constant(name: str) -> None:
        raise Unreadable(f"{name} is not a JSON number")

    def fields(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        if len(made := dict(pairs)) < len(pairs):
            raise Unreadable("an object has the same key twice")
        return made

    return json.JSONDecoder(parse_int=integer, parse_float=number, parse_constant=constant,
                            object_pairs_hook=fields)


def load_json(text: str, at: int, limits: Limits) -> tuple[Json, int]:
    """The JSON value that starts at `at` and the place after it. Raises Unreadable, or
    json.JSONDecodeError where the text is no JSON."""
    try:
        return _decoder(limits).raw_decode(text, at)
    except RecursionError:
        raise Unreadable(f"nests deeper than {limits.max_depth}") from None


def encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_python(text: str) -> ast.expr:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of escapes it then keeps as they are
        try:
            return ast.parse(text, mode="eval").body
        except _PARSE_ERRORS as error:
            reason = getattr(error, "msg", None) or "nests too deep or has a bad character"
            raise Unreadable(f"not readable: {reason}") from None


def literal(node: ast.expr, limits: Limits, depth: int = 0) -> Json:
    """The JSON value of a literal expression; anything else is refused by its kind."""
    if depth > limits.max_depth:
        raise Unreadable(f"nests deeper than {limits.max_depth}")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = node.operand.value if isinstance(node.operand, ast.Constant) else None
        if type(value) in (int, float):
            checked = _constant(value, limits)
            return -checked if isinstance(node.op, ast.USub) else checked
    if isinstance(node, ast.Constant):
        return _constant(node.value, limits)
    if isinstance(node, (ast.List, ast.Tuple)):
        return [literal(item, limits, depth + 1) for item in node.elts]
    if isinstance(node, ast.Dict):
        fields: dict[str, Json] = {}
        for key_node, item in zip(node.keys, node.values, strict=True):
            key = key_node.value if isinstance(key_node, ast.Constant) else None
            if not isinstance(key, str):
                raise Unreadable("an object needs text as keys")
            if key in fields:
                raise Unreadable(f"an object has the key {key!r} twice")
            fields[key] = literal(item, limits, depth + 1)
        return fields
    raise Unreadable(f"{type(node).__name__} is not a literal value")


def _constant(value: object, limits: Limits) -> Json:
    if isinstance(value, float) and not math.isfinite(value):
        raise Unreadable("a number is too large")
    if type(value) is int and abs(value) >= 10**limits.max_digits:
        raise Unreadable(f"an integer has over {limits.max_digits} digits")
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise Unreadable(f"a value of type {type(value).__name__} is not JSON")


def value_of(text: str, limits: Limits) -> Json:
    """A whole text as JSON, or else as a Python literal."""
    try:
        value, end = load_json(text, _SPACE.match(text).end(), limits)
        if text[end:].strip():
            raise Unreadable("text follows the JSON value")
        return value
    except json.JSONDecodeError as error:
        try:
            if any(match[1] for match in _ESCAPE.finditer(text)):
                raise Unreadable("an escape that a guess could change")
            node = parse_python(text.strip())
        except Unreadable:
            raise Unreadable(f"not JSON: {error.msg}") from None
        return literal(node, limits)


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
                number, _ = load_json(value, 0, LIMITS)
            except (Unreadable, json.JSONDecodeError):
                continue
            if type(number) is float and json.dumps(number) == value:
                made[key] = number
    return made
