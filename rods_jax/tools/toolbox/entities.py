"""Surfaces of entities: one word each, never a word of the lexicon.

Lexicon words are `[a-z_]+`; every entity holds a digit, "-", ".", "/" or "@" inside, so the
two cannot meet. Names are built from syllables, so that no real person or place appears.
"""

from __future__ import annotations

import random
import re

_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_ENDINGS = (".txt", ".csv", ".pdf", ".doc")
_PREFIXES = {
    "pin": "pin", "message": "ms", "trip": "tr", "hold": "hd", "booking": "bk", "bill": "bl",
    "payment": "py", "link": "ln", "request": "rq", "receipt": "rc",
}
_PATTERNS = {
    "file": r"[a-z]{4,9}\.[a-z]{3}",
    "folder": r"/[a-z]{4,9}",
    "user": r"@[a-z]{4,9}",
    "topic": r"[a-z]{4,9}-[a-z]{4}",
    "name": r"[a-z]{4,9}-[a-z]{4}",
    "note": r"[a-z]{4,9}-[a-z]{4}-[a-z]{4}",
    "city": r"[a-z]{4,9}-city",
    "date": r"[a-z]{3}-[0-9]{1,2}",
    "amount": r"[0-9]{1,9}",
    "fee": r"[0-9]{1,9}",
    **{kind: prefix + r"-[0-9]{3,4}" for kind, prefix in _PREFIXES.items()},
}
ENTITY = re.compile("|".join(f"(?:{p})" for p in dict.fromkeys(_PATTERNS.values())))
# What the spelling of an entity shows, as patterns with * ? [seq]; the first match counts.
KINDS = ("@*", "/*", "[0-9]*", *(prefix + "-[0-9]*" for prefix in _PREFIXES.values()),
         "???-[0-9]*", "*-city", "*.???")


def is_entity(word: str) -> bool:
    return ENTITY.fullmatch(word) is not None


class Maker:
    """Draws entities, each at most once. `taken` are surfaces that must not come again.
    For planning, `content` is the kind that the next file or message to be read will hold,
    and `read` names those whose text is settled since they were read before."""

    def __init__(self, rng: random.Random, taken: set[str] | None = None):
        self.rng = rng
        self.taken = taken if taken is not None else set()
        self.content = "note"
        self.read: set[str] = set()

    def new(self, kind: str) -> str | int:
        """A surface of this kind not drawn before; an int for amounts and fees."""
        while True:
            value = self._draw(kind)
            if str(value) not in self.taken:
                self.taken.add(str(value))
                return value

    def several(self, kind: str, count: int) -> list:
        return [self.new(kind) for _ in range(count)]

    def _word(self, syllables: int) -> str:
        choice = self.rng.random
        return "".join(
            _CONSONANTS[int(choice() * 14)] + _VOWELS[int(choice() * 5)] for _ in range(syllables)
        )

    def _draw(self, kind: str) -> str | int:
        roll = self.rng.random
        if kind in _PREFIXES:
            return f"{_PREFIXES[kind]}-{100 + int(roll() * 9900)}"
        if kind == "amount":
            return 11 + int(roll() * 980)
        if kind == "fee":
            return 1001 + int(roll() * 990)
        if kind == "date":
            return f"{_MONTHS[int(roll() * 12)]}-{1 + int(roll() * 28)}"
        word = self._word(2 + int(roll() * 2))
        if kind == "file":
            return word + _ENDINGS[int(roll() * 4)]
        if kind == "folder":
            return "/" + word
        if kind == "user":
            return "@" + word
        if kind == "city":
            return word + "-city"
        if kind in ("topic", "name"):
            return f"{word}-{self._word(2)}"
        if kind == "note":
            return f"{word}-{self._word(2)}-{self._word(2)}"
        raise ValueError(f"unknown entity kind {kind!r}: use one of {', '.join(sorted(_PATTERNS))}")
