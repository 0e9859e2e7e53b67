"""Where each argument value of a task's gold calls came from.

A value counts as known to the agent when the user said it, when an earlier call returned
it, or when the tool's schema suggests it. Matching is on normal forms, so `1,200.50` in a
text equals the number 1200.5, and `Two` equals 2.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterator, Mapping, Sequence

from rods_jax.types import Json, Task, ToolSpec


class Origin(str, enum.Enum):
    USER = "user"  # said in a user text, literally or in parts
    RESULT = "result"  # returned by an earlier call
    DEFAULT = "default"  # the schema's default, one of its enum values, or a yes/no
    CONFIG = "config"  # only in the hidden initial state: the agent cannot know it
    UNKNOWN = "unknown"  # nowhere


NO_SOURCE = frozenset({Origin.CONFIG, Origin.UNKNOWN})

MAX_PARTS = 6  # words of a value put together from words said here and there


@dataclasses.dataclass(frozen=True)
class ValueTrace:
    """One scalar inside one argument. `call` is the flat index of the consuming call;
    `producer` that of the earliest call that returned the value (origin RESULT);
    `said_in` the turn of the user text that holds it (origin USER)."""

    call: int
    turn: int
    argument: str
    value: Json
    origin: Origin
    producer: int | None = None
    said_in: int | None = None


_NUMBER_WORDS = {word: str(i) for i, word in enumerate(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty".split())}
_MONTHS = {name: str(i + 1) for i, name in enumerate(
    "january february march april may june july august september october november december"
    .split())}
_MONTHS.update({name[:3]: number for name, number in list(_MONTHS.items())})
_TOKEN = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_CLOCK = re.compile(r"\b(\d{1,2})(?::(\d\d))?\s*([ap])\.?m\b")


def words(text: str) -> list[str]:
    """The comparable words of a text: lower case, numbers in one spelling."""
    found = _TOKEN.findall(_THOUSANDS.sub("", text.casefold()))
    return [_number(float(w)) if w[0].isdigit() and len(w) < 16 else _NUMBER_WORDS.get(w, w)
            for w in found]


def normal(value: Json) -> str:
    """The normal form of a scalar; two scalars with one form read alike to an agent."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(abs(value))
    if isinstance(value, float):
        return _number(abs(value))
    return " ".join(words(str(value)))


def leaves(value: Json, path: tuple = ()) -> Iterator[tuple[tuple, Json]]:
    """Every scalar inside a JSON value with its path. Keys of objects count as strings."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield (*path, key), key
            yield from leaves(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from leaves(item, (*path, i))
    else:
        yield path, value


def scalars(value: Json) -> Iterator[Json]:
    """Every scalar inside an argument value; keys are not values."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from scalars(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from scalars(item)
    else:
        yield value


def trace(task: Task, specs: Sequence[ToolSpec], results: Sequence[Json]) -> tuple[ValueTrace, ...]:
    """Origins of all argument values of the gold calls.

    `results` are the JSON results by flat call. What the user said since the last turn
    with gold calls comes first, then earlier results, then older user texts, the schema,
    the hidden state.
    """
    schema = {spec.name: spec.parameters.get("properties", {}) for spec in specs}
    texts = [_Text(turn.user) for turn in task.turns]
    seen = _Seen()
    config: set[str] | None = None
    found, flat, request_start = [], 0, 0
    for t, turn in enumerate(task.turns):
        for call in turn.gold:
            for argument, whole in call.arguments.items():
                for value in scalars(whole):
                    origin, producer, said_in = _origin(
                        value, argument, schema.get(call.name, {}).get(argument, {}),
                        texts[:t + 1], request_start, seen)
                    if origin is Origin.UNKNOWN:
                        if config is None:
                            config = {normal(v) for _, v in leaves(task.initial_config)}
                        origin = Origin.CONFIG if normal(value) in config else origin
                    found.append(ValueTrace(flat, t, argument, value, origin, producer, said_in))
            if flat < len(results):
                seen.add(flat, results[flat])
            flat += 1
        if turn.gold:
            request_start = t + 1
    return tuple(found)


def _number(value: float) -> str:
    whole = value.is_integer() and value < 1e15  # infinite and NaN are not integers
    return str(int(value)) if whole else repr(value)


class _Text:
    """A user text made searchable: its words in a row, and as a set with the other
    spellings of months and clock times."""

    def __init__(self, text: str):
        row = words(text)
        self.row = f" {' '.join(row)} "
        self.bag = set(row)
        self.bag.update(_MONTHS[word] for word in row if word in _MONTHS)
        for hour, minute, half in _CLOCK.findall(text.casefold()):
            self.bag.add(str(int(hour) % 12 + (12 if half == "p" else 0)))
            self.bag.add(str(int(minute or 0)))

    def holds(self, form: str) -> bool:
        return f" {form} " in self.row


class _Seen:
    """What the calls so far returned."""

    def __init__(self):
        self.by_form: dict[str, list[tuple[int, tuple]]] = {}
        self.long: list[tuple[int, str]] = []
        self.bag: set[str] = set()

    def add(self, call: int, result: Json) -> None:
        for path, value in leaves(result):
            form = normal(value)
            if not form:
                continue
            self.by_form.setdefault(form, []).append((call, path))
            self.bag.update(form.split())
            if " " in form:
                self.long.append((call, f" {form} "))

    def producer(self, form: str, argument: str, weak: bool) -> int | None:
        """The earliest call that returned the value. A weak value (a small number, a
        single letter) turns up by chance, so it counts only under a fitting key."""
        for call, path in self.by_form.get(form, ()):
            if not weak or _same_key(path, argument):
                return call
        if not weak:
            for call, row in self.long:
                if f" {form} " in row:
                    return call
        return None


def _same_key(path: tuple, argument: str) -> bool:
    keys = [key for key in path if isinstance(key, str)]
    if not keys:
        return True
    a, b = set(words(argument)), set(words(keys[-1]))
    return bool(a & b)


def _origin(value: Json, argument: str, schema: Mapping, texts: Sequence[_Text],
            request_start: int, seen: _Seen) -> tuple[Origin, int | None, int | None]:
    form = normal(value)
    plain = isinstance(value, bool) or value is None or not form
    if not plain:
        for t in range(len(texts) - 1, request_start - 1, -1):
            if texts[t].holds(form):
                return Origin.USER, None, t
        weak = len(form) < 2
        producer = seen.producer(form, argument, weak)
        if producer is not None:
            return Origin.RESULT, producer, None
        for t in range(request_start - 1, -1, -1):
            if texts[t].holds(form):
                return Origin.USER, None, t
    if plain or value == schema.get("default", _NOTHING) or value in schema.get("enum", ()):
        return Origin.DEFAULT, None, None
    parts = form.split()
    if isinstance(value, str) and len(parts) <= MAX_PARTS:
        return _in_parts(set(parts), texts, seen)
    return Origin.UNKNOWN, None, None


def _in_parts(parts: set[str], texts: Sequence[_Text], seen: _Seen
              ) -> tuple[Origin, int | None, int | None]:
    """A short string put together from said and returned words: a date in another
    spelling, a path made of a folder and a name."""
    for t in range(len(texts) - 1, -1, -1):
        if parts <= texts[t].bag:
            return Origin.USER, None, t
    if len(parts) > 1 and parts <= seen.bag.union(*(text.bag for text in texts)):
        return Origin.USER, None, len(texts) - 1
    return Origin.UNKNOWN, None, None


_NOTHING = object()
