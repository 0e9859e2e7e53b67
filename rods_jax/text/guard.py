"""Keeps a template's control tokens apart from text that merely spells them.

A rendered prompt is one string: the template's own <|im_end|> and one that stood in a tool's
result look the same. So contents are changed before they are rendered. Each place where a
control token is spelled gets a stand-in for one of its characters: a lone surrogate, which no
text can hold (one that does is damaged and shows "?"). The template then neither sees nor can
build that token, and `encode` writes the control tokens that are left by id and puts the
characters back for the rest.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from rods_jax.text.tokenizer import TextTokenizer
from rods_jax.types import Json

# Stands for itself alone: a place in a rendered text that a caller looks for.
MARK = "\udfff"
_STAND_INS = 0xD800


class Guard:
    """For all control tokens of a tokenizer. `looked_for`: what a template also seeks in
    contents; a user's text must not look like a tool's result to it."""

    def __init__(self, tokenizer: TextTokenizer, looked_for: Collection[str] = ()):
        self.tokenizer = tokenizer
        control = set(tokenizer.control)
        self.token = re.compile(f"({_any_of(control)})")
        self._control = _spelled(control)
        self._sought = _spelled(control.union(looked_for))
        self._starts = {name[:n] for name in control for n in range(1, len(name))}
        self._ends = {name[n:] for name in control for n in range(1, len(name))}
        self._firsts = tuple({name[0] for name in control})
        self._lasts = tuple({name[-1] for name in control})
        self._longest = max(map(len, control), default=0)
        shown = sorted({*self._firsts, *self._lasts, *(name[0] for name in looked_for)})
        self._stand_in = {c: chr(_STAND_INS + i) for i, c in enumerate(shown)}
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
        # "<|im_" with a template's "end|>" behind it is a token too, also once it is trimmed.
        bare = text.rstrip()
        if any(c in bare[-self._longest:] for c in self._firsts):
            for at in range(max(0, len(bare) - self._longest), len(bare)):
                if bare[at:] in self._starts:
                    text = text[:at] + self._stand_in[text[at]] + text[at + 1:]
        bare = text.lstrip()
        if any(c in bare[:self._longest] for c in self._lasts):
            cut = len(text) - len(bare)
            for n in range(1, min(len(bare) + 1, self._longest)):
                if bare[:n] in self._ends:
                    at = cut + n - 1
                    text = text[:at] + self._stand_in[text[at]] + text[at + 1:]
        return text


def _any_of(names: Iterable[str]) -> str:
    """Matches each of the names, of two at one place the longer one."""
    longest_first = sorted(names, key=lambda name: (-len(name), name))
    return "|".join(re.escape(name) for name in longest_first) or "(?!)"


def _spelled(names: Iterable[str]) -> re.Pattern[str]:
    """Matches the first character of each name wherever it stands, and damaged text."""
    return re.compile(f"[\ud800-\udfff]|(?=(?:{_any_of(names)})).", re.DOTALL)
