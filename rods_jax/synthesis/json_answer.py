"""The JSON that a model's text holds, among whatever else it says.

The whole text is tried first, then what stands between fences, then the first brace from
which an object can be read to its end. A fence counts only at the start of a line, where no
JSON string can put one, so backticks in prose or in a string never confuse.
"""

from __future__ import annotations

import json
import re

from rods_jax.types import Json

MOST_BRACES = 200  # tried as the beginning of an object

_FENCED = re.compile(r"^```[^\n`]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)


def find_json(text: str) -> Json:
    """An object, where the text holds one; another value only where it is all of the text.
    None where there is none, or where it is cut off."""
    text = text.strip()
    if (found := _loads(text)) is not None:
        return found
    for match in _FENCED.finditer(text):
        if isinstance(found := _loads(match.group(1)), dict):
            return found
    start = -1
    for _ in range(MOST_BRACES):
        if (start := text.find("{", start + 1)) < 0:
            return None
        try:
            return _DECODER.raw_decode(text, start)[0]
        except json.JSONDecodeError as error:
            # An object that the text's end cuts off: what lies inside it is not the answer.
            if error.pos >= len(text) or error.msg.startswith("Unterminated string"):
                return None
        except (ValueError, RecursionError):
            return None
    return None


def is_whole(text: str) -> bool:
    """Whether it can be written as UTF-8: an escape in JSON may spell half a character."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def _loads(text: str) -> Json:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)
