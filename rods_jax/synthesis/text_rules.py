"""What a user text must not hold: calls spelled out, and names of things that do not exist."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence

from rods_jax.tasks.trace import leaves, normal, scalars, words
from rods_jax.tools.env import Name, NamesThings, Suite
from rods_jax.types import Json, Task, ToolCall, ToolSpec

_FILE = (r"[\w-]+\.(?:txt|pdf|csv|tsv|docx?|md|json|ya?ml|xml|html?|log|py|js|sh|sql|xlsx?|pptx?|png"
         r"|jpe?g|gif|zip|tar|gz|ini|cfg|tex)\b")
_HANDLE = r"(?<![\w.])@\w+"
_ID = r"\b[A-Za-z]{2,}[-_]?\d{3,}\b"  # "USR001", "bk-1234"
_NAME = re.compile("|".join((_FILE, _HANDLE, _ID)))
_CAMEL = re.compile(r"[a-z][A-Z]")
_JSON = re.compile(r"\{\s*[\"'“]\w+[\"'”]\s*:|\[\s*[\"'“][^\"'”\n]*[\"'”]\s*[,\]]")


# ---------------------------------------------------------------- code


def code_in(text: str, specs: Sequence[ToolSpec], calls: Iterable[ToolCall]) -> str | None:
    """The first piece of the text that spells a call in code form, or None.

    Code is: a function name that is no plain word, in whatever case, also with hyphens; any
    function name before a bracket, also spelled with spaces; an argument name with "=" or as a
    quoted key; a JSON object or list. What the user dictates (a gold argument) may look so.
    """
    names, arguments = [spec.name for spec in specs], set()
    for spec in specs:
        arguments |= set(spec.parameters.get("properties", {}))
    for value in _dictated(calls, names):
        if value in text:
            text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", " ", text)
    pattern = _code_pattern(tuple(names), tuple(sorted(arguments)))
    found = (pattern.search(text) if pattern else None) or _JSON.search(text)
    return found.group(0) if found else None


def _dictated(calls: Iterable[ToolCall], names: Sequence[str]) -> list[str]:
    """What the user wants written or looked for, longest first, function names left out: these
    may be dictated, but then "sort (" is no less code."""
    plain = {name.lower() for name in names}
    found = {value for call in calls for value in scalars(dict(call.arguments))
             if isinstance(value, str) and value and value.lower() not in plain}
    return sorted(found, key=len, reverse=True)


@functools.lru_cache(maxsize=256)
def _code_pattern(names: tuple[str, ...], arguments: tuple[str, ...]) -> re.Pattern[str] | None:
    forms = []
    for name in sorted(names, key=len, reverse=True):
        parts = [re.escape(part) for part in re.split(r"_|(?<=[a-z])(?=[A-Z])", name) if part]
        if len(parts) > 1:
            forms.append(rf"\b{'[_-]'.join(parts)}\b")
        if _CAMEL.search(name):
            forms.append(rf"(?-i:\b{re.escape(name)}\b)")
        forms.append(rf"\b{'[ _-]?'.join(parts)}\s?\(")
    for argument in arguments:
        forms.append(rf"(?<![\w-]){re.escape(argument)}\s?=(?!=)")
        forms.append(rf"[\"'`“]{re.escape(argument)}[\"'`”]\s?:")
    return re.compile("|".join(forms), re.IGNORECASE) if forms else None


# ---------------------------------------------------------------- names


def names_in(text: str) -> tuple[Name, ...]:
    """Names that can be told from words in any suite: files, handles and ids."""
    return tuple(Name(match.group()) for match in _NAME.finditer(text))


def unknown_names(task: Task, suite: Suite, results: Sequence[Json]) -> list[tuple[int, str]]:
    """(turn, name) of all that a text names and nothing holds: not the initial state, no
    result of an earlier turn, no gold argument (what the user wants made is one)."""
    own = suite.names_in if isinstance(suite, NamesThings) else lambda text: ()
    asked = [(t, name) for t, turn in enumerate(task.turns)
             for name in dict.fromkeys((*names_in(turn.user), *own(turn.user)))]
    if not asked:
        return []
    calls = [call for turn in task.turns for call in turn.gold]
    made = _held(v for call in calls for v in scalars(dict(call.arguments)))
    asked = [(t, name) for t, name in asked if not _is_held(name, made)]
    if not asked:
        return []
    state = _held(v for _, v in leaves(task.initial_config))
    ends = [sum(len(turn.gold) for turn in task.turns[:t]) for t in range(len(task.turns))]
    unknown = []
    for t, name in asked:
        seen = _held(v for result in results[:ends[t]] for _, v in leaves(_opened(result)))
        if not _is_held(name, state) and not _is_held(name, seen):
            unknown.append((t, name.said))
    return unknown


def _opened(result: Json) -> Json:
    """A result, with JSON inside its strings opened, as in {"result": "[...]"}."""
    if isinstance(result, str) and result[:1] in "[{":
        try:
            return json.loads(result)
        except ValueError:
            return result
    if isinstance(result, Mapping):
        return {key: _opened(value) for key, value in result.items()}
    return result


def _held(values: Iterable[Json]) -> str:
    """All values as one row of words, each between bars."""
    return "|" + "|".join(f" {normal(value)} " for value in values if value is not None) + "|"


def _is_held(name: Name, row: str) -> bool:
    spellings = (" ".join(words(spelling)) for spelling in (name.said, *name.spellings))
    return any(not spelling or f" {spelling} " in row for spelling in spellings)
