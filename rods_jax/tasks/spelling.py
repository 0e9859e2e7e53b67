"""One spelling of a text, so that code and people look at the same characters."""

from __future__ import annotations

import unicodedata

_SHOWN_AS = {"Zl": " ", "Zp": " ", "Pd": "-", "Pc": "_", "Cf": ""}  # by category


def plain(text: str) -> str:
    """A text as a reader sees it: one form of each letter, digit, dash and underline (NFKC),
    nothing that is not shown (category Cf), line ends as spaces."""
    if text.isascii():
        return text
    return "".join(_SHOWN_AS.get(unicodedata.category(c), c)
                   for c in unicodedata.normalize("NFKC", text))
