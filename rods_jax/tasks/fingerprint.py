"""Hashes under which two tasks count as the same: by content, by what is said, by how it is
said, by what is done.

The entity-masked text is what the users say with every entity of the task struck out: values
of gold arguments, names and ids of the initial state, all numbers. Two tasks that share it
tell one story in one wording about other things.

Texts are compared by words that spelling cannot disguise: compatible characters, invisible
ones, accents and written numbers are evened out. The core of a text also lacks the greetings
and fillers that template writers put around a turn. Not caught: calls or turns repeated or in
another order, letters of another script that look alike, other words.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence

from rods_jax.tasks.spelling import plain
from rods_jax.tasks.trace import leaves, scalars
from rods_jax.tasks.trace import words as plain_words
from rods_jax.tools import bfcl_words
from rods_jax.tools.toolbox import phrases
from rods_jax.types import Json, Task

MASK = "_"  # stands for one entity; no word is it
_PLAIN = re.compile(r"[a-z]+(?:[A-Z_][a-z]*)*|[a-z_]+")  # "user_map", "fuelLevel", "file"
_MAX_WORDS = 40  # of one entity; a longer text in the state is no name


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """All but `content` are None where the task holds too little to be told by."""

    content: str
    text: str | None
    masked: str | None
    gold: str | None
    core: str | None = None


_TENS = {name: 10 * (i + 2) for i, name in enumerate(
    "twenty thirty forty fifty sixty seventy eighty ninety".split())}
_UNITS = {name: i + 1 for i, name in enumerate(
    "one two three four five six seven eight nine".split())}
_WRITTEN = re.compile(rf"\b({'|'.join(_TENS)})(?:[ -]({'|'.join(_UNITS)}))?\b", re.IGNORECASE)
_NUMERAL = re.compile(r"\s*[+-]?\d+(?:\.\d+)?\s*")


def words(text: str) -> list[str]:
    """The words of a text whatever its spelling: in its plain form, without accents,
    "twenty-two" as 22."""
    text = plain(text)
    if not text.isascii():
        text = "".join(c for c in unicodedata.normalize("NFD", text)
                       if unicodedata.category(c) != "Mn")
    return plain_words(_WRITTEN.sub(_in_digits, text))


def _in_digits(match: re.Match[str]) -> str:
    tens, units = match.groups()
    return str(_TENS[tens.lower()] + (_UNITS[units.lower()] if units else 0))


@functools.cache
def _fillers() -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
    """Rows of words that template writers begin and end a turn with, longest first."""
    before = (*bfcl_words.GREETINGS, *bfcl_words.OPENINGS,
              *(o.format("") for o in (*phrases.OPENINGS, *phrases.MORE_OPENINGS)))
    rows = ({tuple(words(text)) for text in texts} - {()}
            for texts in (before, (*bfcl_words.CLOSINGS, *phrases.CLOSINGS)))
    first, last = (tuple(sorted(found, key=lambda row: (-len(row), row))) for found in rows)
    return first, last


def core_words(text: str) -> list[str]:
    """The words of one turn without the fillers around it."""
    first, last = _fillers()
    said = words(text)
    while row := next((row for row in first if tuple(said[:len(row)]) == row), ()):
        said = said[len(row):]
    while row := next((row for row in last if tuple(said[-len(row):]) == row), ()):
        said = said[:-len(row)]
    return said


def fingerprint(task: Task) -> Fingerprint:
    global _last
    known, found = _last
    if known is not task:  # guard, novelty and admission ask about one task in a row
        found = Fingerprint(task.content_hash, text_hash(task), masked_hash(task), gold_hash(task),
                            core_hash(task))
        _last = task, found
    return found


_last: tuple[Task | None, Fingerprint | None] = (None, None)


def text_hash(task: Task) -> str | None:
    """Of all words the user says; None when nothing is said."""
    said = words(" ".join(turn.user for turn in task.turns))
    return _hash(said) if said else None


def core_hash(task: Task) -> str | None:
    """Of the core words of all turns; None when nothing but fillers is said."""
    said = [word for turn in task.turns for word in core_words(turn.user)]
    return _hash(said) if said else None


def masked_hash(task: Task) -> str | None:
    """Of `masked_words`; None when nothing but entities is said."""
    masked = masked_words(task)
    return _hash(masked) if any(word != MASK for word in masked) else None


def masked_words(task: Task) -> list[str]:
    """All words the user says, each entity one MASK, neighbouring entities one too.

    Turns are joined, so it does not matter how a withheld value splits them. What the state
    spells in plain lower case or camel case is a key or a status and no entity, unless a gold
    argument is just that."""
    by_first = _entities(task)
    said = words(" ".join(turn.user for turn in task.turns))
    masked: list[str] = []
    i = 0
    while i < len(said):
        length = 1 if said[i][0].isdigit() else 0
        for entity in by_first.get(said[i], ()):
            if len(entity) > length and tuple(said[i:i + len(entity)]) == entity:
                length = len(entity)
        if not length:
            masked.append(said[i])
        elif masked[-1:] != [MASK]:
            masked.append(MASK)
        i += max(length, 1)
    return masked


def _entities(task: Task) -> dict[str, set[tuple[str, ...]]]:
    """The task's entities as rows of words, by their first word."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for text in {*_names(task)}:
        row = _row(text)
        if 0 < len(row) <= _MAX_WORDS:
            found.setdefault(row[0], set()).add(row)
    return found


@functools.lru_cache(maxsize=1 << 14)  # a category's form of a task has the task's names
def _row(text: str) -> tuple[str, ...]:
    return tuple(words(text))


def _names(task: Task) -> Iterator[str]:
    for turn in task.turns:
        for call in turn.gold:
            yield from (v for v in scalars(dict(call.arguments)) if isinstance(v, str))
    for _, value in leaves(task.initial_config):
        if isinstance(value, str) and not _PLAIN.fullmatch(value):
            yield value


def gold_hash(task: Task) -> str | None:
    """Of all gold calls in order, strings compared by their words, numbers by value, also
    those that stand in a string.
    None for a task without gold arguments: too little to tell tasks apart."""
    calls = [[call.name, _plain(dict(call.arguments))] for turn in task.turns for call in turn.gold]
    return _hash(calls) if any(arguments for _, arguments in calls) else None


def _plain(value: Json) -> Json:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, str) and _NUMERAL.fullmatch(value):
        value = float(value) if "." in value else int(value)
    if isinstance(value, str):
        return " ".join(words(value)) or value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _hash(value: Json | Sequence[str]) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
