"""The names in a BFCL text that a reader takes for something that exists."""

from __future__ import annotations

import functools
import re

from rods_jax.tools.bfcl_entities import CITIES, COMPANIES
from rods_jax.tools.bfcl_words import FIRST_NAMES, KNOWN_NAMES, LAST_NAMES
from rods_jax.tools.env import Name

# Numbers are ids after these words alone; elsewhere they are amounts.
_NUMBERED = (r"\b(?:order|booking|ticket|tweet|post|message|transaction|reservation)"
             r"(?: id| ID| number| with id| with ID)?:? #?['\"]?(\d{3,})\b")
_SYMBOL = r"(?:\b(?:symbol|ticker|stock|shares of) ['\"]?|\$)([A-Z]{2,5})\b"


@functools.cache
def _places() -> tuple[re.Pattern[str], dict[str, Name]]:
    """Cities and companies, which data may hold by their codes, and people."""
    people = {*KNOWN_NAMES, *(n.lower() for n in (*FIRST_NAMES, *LAST_NAMES))}
    names = {person.capitalize(): Name(person.capitalize()) for person in people}
    names |= {name: Name(name, (code,)) for code, name in CITIES.items()}
    names |= {name: Name(name, (symbol,)) for symbol, name in COMPANIES.items()}
    longest = sorted(names, key=len, reverse=True)
    pattern = "|".join(re.escape(name) + (r"\b" if name[-1].isalpha() else "") for name in longest)
    return re.compile(rf"\b(?:{pattern})"), names


def names_in(text: str) -> tuple[Name, ...]:
    found = [Name(match.group(1)) for pattern in (_NUMBERED, _SYMBOL)
             for match in re.finditer(pattern, text)]
    pattern, names = _places()
    return (*found, *(names[match.group()] for match in pattern.finditer(text)))
