"""Keeps a template's control tokens apart from text that merely spells them.

A rendered prompt is one string: the template's own <|im_end|> and one that stood in a tool's
result look the same. So contents are changed before they are rendered. Each place where a
control token is spelled gets a stand-in for one of its characters: a lone surrogate, which no
text can hold (one that does is damaged and shows "?"). The template then neither sees nor can
build that token, and `encode` writes the control tokens that are left by id and puts the
characters back for the rest. A template's `tojson` escapes what a stand-in stands for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable

from rods_jax.text.tokenizer import TextTokenizer
from rods_jax.types import Json

# Stands for itself alone: a place in a rendered text that a caller looks for.
MARK = "\udfff"
_STAND_INS, _OTHERS = 0xD800, 0xD880  # of ASCII characters in order; of others as they come
# What JSON writes for the stand-ins of characters that it escapes, for str.translate. A quote
# or backslash comes again in its own escape, so there the stand-in stays.
AS_JSON = ({_STAND_INS + c: json.dumps(chr(c))[1:-1] for c in range(32)}
           | {_STAND_INS + ord(c): "\\" + chr(_STAND_INS + ord(c)) for c in '"\\'})


class Guard:
    """For all control tokens of a tokenizer. `looked_for`: what a template also seeks in
    contents; a user's text must not look like a tool's result to it. `enclosed`: the template
    puts signs on both sides of some texts.

    `middles`: what is left of a control token without some of the signs at both its ends."""

    def __init__(self, tokenizer: TextTokenizer, looked_for: Collection[str] = (),
                 enclosed: bool = False):
        self.tokenizer, self.enclosed = tokenizer, enclosed
        control = set(tokenizer.control)
        self.token = re.compile(f"({_any_of(control)})")
        self._control = _spelled(control)
        self._sought = _spelled(control.union(looked_for))
        self._starts = {name[:n] for name in control for n in range(1, len(name))}
        self._ends = {name[n:] for name in control for n in range(1, len(name))}
        self._firsts = tuple({name[0] for name in control})
        self._lasts = tuple({name[-1] for name in control})
        self._longest = max(map(len, control), default=0)
        self._spaced = any(re.search(r"\s", name) for name in control)
        self.middles = frozenset(middle for name in control for middle in _middles(name))
        self._stand_in = _stand_ins({
            *self._firsts, *self._lasts, *(text[0] for text in (*looked_for, *self.middles))})
        self._shown = {ord(s): c for c, s in self._stand_in.items()}
        self._name = {i: name for name, i in tokenizer.control.items()}

    def hide(self, value: Json) -> Json:
        """A copy of JSON data whose texts, keys included, neither spell a control token nor
        could with text that a template puts on one side of them."""
        if isinstance(value, str):
            return self._hide(value, self._sought)
        if isinstance(value, dict):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(item) for item in value]
        return value

    def encode(self, rendered: str) -> list[int]:
        """Ids of a rendered text: control tokens by id, the text between two of them in one
        piece, as a tokenizer that knows them would cut it. Nothing is added."""
        ids: list[int] = []
        for i, part in enumerate(self.token.split(rendered)):
            if i % 2:
                ids.append(self.tokenizer.control[part])
            elif part:
                ids += self.tokenizer.encode(part.translate(self._shown))
        return ids

    def read(self, ids: Iterable[int]) -> str:
        """Text of the assistant's own ids: a control token only where there is its id. The
        template may look into it as it likes."""
        parts: list[str] = []
        run: list[int] = []
        for i in ids:
            if i not in self._name:
                run.append(i)
                continue
            parts += [self._hide(self.tokenizer.decode(run), self._control), self._name[i]]
            run = []
        return "".join([*parts, self._hide(self.tokenizer.decode(run), self._control)])

    def _hide(self, text: str, spelled: re.Pattern[str]) -> str:
        text = spelled.sub(lambda match: self._stand_in.get(match[0], "?"), text)
        if self.enclosed and text.strip() in self.middles:
            text = self._without(text, len(text) - len(text.lstrip()))
        # "<|im_" with a template's "end|>" behind it is a token too, also once it is trimmed.
        bare = len(text.rstrip())
        if any(c in text[max(0, bare - self._longest):] for c in self._firsts):
            for end in range(bare, len(text) + 1 if self._spaced else bare + 1):
                for at in range(max(0, end - self._longest), end):
                    if text[at:end] in self._starts:
                        text = self._without(text, at)
        bare = len(text) - len(text.lstrip())
        if any(c in text[:bare + self._longest] for c in self._lasts):
            for start in range(0 if self._spaced else bare, bare + 1):
                for end in range(start + 1, min(len(text), start + self._longest) + 1):
                    if text[start:end] in self._ends:
                        text = self._without(text, end - 1)
        return text

    def _without(self, text: str, at: int) -> str:
        return text[:at] + self._stand_in[text[at]] + text[at + 1:]


def _stand_ins(shown: Collection[str]) -> dict[str, str]:
    others = sorted(c for c in shown if not c.isascii())
    if _OTHERS + len(others) > ord(MARK):
        raise ValueError(f"control tokens begin and end with {len(others)} characters beyond "
                         f"ASCII, over {ord(MARK) - _OTHERS}: take a tokenizer with fewer")
    return ({chr(c): chr(_STAND_INS + c) for c in range(128)}
            | {c: chr(_OTHERS + i) for i, c in enumerate(others)})


def _middles(name: str) -> Iterable[str]:
    first = len(name) - len(re.sub(r"^\W+", "", name))
    last = len(re.sub(r"\W+$", "", name))
    return (name[i:j] for i in range(1, first + 1) for j in range(last, len(name)) if i < j)


def _any_of(names: Iterable[str]) -> str:
    """Matches each of the names, of two at one place the longer one."""
    longest_first = sorted(names, key=lambda name: (-len(name), name))
    return "|".join(re.escape(name) for name in longest_first) or "(?!)"


def _spelled(names: Iterable[str]) -> re.Pattern[str]:
    """Matches the first character of each name wherever it stands, and damaged text."""
    return re.compile(f"[\ud800-\udfff]|(?=(?:{_any_of(names)})).", re.DOTALL)
