"""What a user text must not hold: calls spelled out, and names of things that do not exist."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence

from rods_jax.tasks.spelling import plain
from rods_jax.tasks.trace import leaves, normal, scalars, words
from rods_jax.tools.env import Name, NamesThings, Suite
from rods_jax.types import Json, Task, ToolCall, ToolSpec

_FILE = (r"[\w-]+\.(?:txt|pdf|csv|tsv|docx?|md|json|ya?ml|xml|html?|log|py|js|sh|sql|xlsx?|pptx?|png"
         r"|jpe?g|gif|zip|tar|gz|ini|cfg|tex)\b")
_HANDLE = r"(?<![\w.])@\w+"
_ID = r"\b[A-Za-z]{2,}[-_]?\d{3,}\b"  # "USR001", "bk-1234"
_NAME = re.compile("|".join((_FILE, _HANDLE, _ID)))
_JOINED = re.compile(r"[A-Za-z]+(?:[_.-]+[A-Za-z]+)+|[A-Za-z]*[a-z][A-Z][A-Za-z]*")
_SEAM = re.compile(r"[_.-]+|(?<=[a-z])(?=[A-Z])")  # between the parts of a name
_BRACKET, _ASSIGNS = re.compile(r"[(\[{]"), re.compile(r"[=:]")
_JSON = re.compile(r"\{\s*[\"'“][^\"'”\n]+[\"'”]\s*:|\[\s*[\"'“][^\"'”\n]*[\"'”]\s*[,\]]")


# ---------------------------------------------------------------- code


def code_in(texts: Sequence[str], specs: Sequence[ToolSpec],
            calls: Iterable[ToolCall]) -> list[str | None]:
    """For each text the first piece that spells a call in code form, or None.

    Code is: a function name of several parts, in whatever case, its parts joined by "_", "-",
    "." or capitals; any function's name before "(", also with spaces between its parts; an
    argument name with "=" or as a quoted key; a JSON object that begins with a quoted key, a
    JSON list that begins with a quoted text. What the user dictates (a gold argument) may look
    so. Texts are looked at in their `plain` form.
    """
    names, arguments = [spec.name for spec in specs], set()
    for spec in specs:
        arguments |= set(spec.parameters.get("properties", {}))
    code = _code(tuple(names), tuple(sorted(arguments)))
    dictated = _dictated(calls, names)
    found = []
    for text in map(plain, texts):
        for value in dictated:
            if value in text:
                text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", " ", text)
        found.append(code.first_in(text))
    return found


@dataclasses.dataclass(frozen=True)
class _Code:
    """The code forms of a set of functions. `joined`: names of several parts, between "_"."""

    joined: tuple[str, ...]
    before_bracket: re.Pattern[str]
    argument: re.Pattern[str]

    def first_in(self, text: str) -> str | None:
        # Most texts hold none of the marks, so that little is searched.
        for match in _JOINED.finditer(text):
            token = f"_{_SEAM.sub('_', match.group()).lower()}_"
            if any(name in token for name in self.joined):
                return match.group()
        for mark, pattern in ((_BRACKET, self.before_bracket), (_ASSIGNS, self.argument),
                              (_BRACKET, _JSON)):
            if mark.search(text) and (found := pattern.search(text)):
                return found.group()
        return None


@functools.lru_cache(maxsize=256)
def _code(names: tuple[str, ...], arguments: tuple[str, ...]) -> _Code:
    joined, bracket = [], []
    for name in sorted(names, key=len, reverse=True):
        parts = [part for part in re.split(r"_|(?<=[a-z])(?=[A-Z])", name) if part]
        if len(parts) > 1:
            joined.append(f"_{'_'.join(parts).lower()}_")
        bracket.append("[ _-]?".join(map(re.escape, parts)))
    keys = "|".join(map(re.escape, arguments)) or "(?!)"
    return _Code(
        tuple(joined),
        re.compile(rf"\b(?:{'|'.join(bracket) or '(?!)'})\s?\(", re.IGNORECASE),
        re.compile(rf"(?<![\w-])(?:{keys})\s?=(?!=)|[\"'`“](?:{keys})[\"'`”]\s?:", re.IGNORECASE))


def _dictated(calls: Iterable[ToolCall], names: Sequence[str]) -> list[str]:
    """What the user wants written or looked for, longest first, function names left out: these
    may be dictated, but then "sort (" is no less code."""
    own = {name.lower() for name in names}
    found = {plain(value) for call in calls for value in scalars(dict(call.arguments))
             if isinstance(value, str) and value and value.lower() not in own}
    return sorted(found, key=len, reverse=True)


# ---------------------------------------------------------------- names


def names_in(text: str) -> tuple[Name, ...]:
    """Names that can be told from words in any suite: files, handles and ids."""
    return tuple(Name(match.group()) for match in _NAME.finditer(text))


def unknown_names(task: Task, suite: Suite, results: Sequence[Json]) -> list[tuple[int, str]]:
    """(turn, name) of all that a text names and nothing holds: not the initial state, no
    result of an earlier turn, no gold argument (what the user wants made is one)."""
    own = suite.names_in if isinstance(suite, NamesThings) else lambda text: ()
    texts = [plain(turn.user) for turn in task.turns]
    asked = [(t, name) for t, text in enumerate(texts)
             for name in dict.fromkeys((*names_in(text), *own(text)))]
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
    shown = (plain(value) if isinstance(value, str) else value for value in values)
    return "|" + "|".join(f" {normal(value)} " for value in shown if value is not None) + "|"


def _is_held(name: Name, row: str) -> bool:
    spellings = (" ".join(words(spelling)) for spelling in (name.said, *name.spellings))
    return any(not spelling or f" {spelling} " in row for spelling in spellings)
