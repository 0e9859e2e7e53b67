"""Consistent renaming: one table of swaps, applied in a single pass to texts and to data, so
that a new value is never swapped again and both sides keep agreeing."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

from rods_jax.types import Json

NUMBER = re.compile(r"(?<![\w.\-/#@])\$?(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?(?![\w/@]|-\d|\.\d)")


@dataclasses.dataclass(frozen=True)
class Swaps:
    """`words` swap in any case as whole alphabetic runs; `exact` as whole strings bounded by
    other than letters, digits and underscores; `names` are bare words (directories): in data
    they swap only as path elements, in text only quoted or beside "directory" or "folder".
    `dates` maps ISO dates. `numbers` maps values of number tokens."""

    words: Mapping[str, str] = dataclasses.field(default_factory=dict)
    exact: Mapping[str, str] = dataclasses.field(default_factory=dict)
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    dates: Mapping[str, str] = dataclasses.field(default_factory=dict)
    numbers: Mapping[float, float] = dataclasses.field(default_factory=dict)

    def data(self, text: str) -> str:
        """The string as data: a config value, a config key or an argument."""
        names = "|".join(map(re.escape, _longest(self.names)))
        return self._pass(text, rf"(?:(?<=^)|(?<=/))(?:{names})(?=$|/)" if names else "")

    def text(self, text: str) -> str:
        """The string as what a user says. Numbers and dates swap too."""
        names = "|".join(map(re.escape, _longest(self.names)))
        quote, place = "[\"'`‘’“”]", r"(?:folder|directory|dir)\b"
        pattern = "" if not names else (
            rf"(?<={quote})(?:{names})(?={quote})|(?<![\w])(?:{names})(?= {place})"
            rf"|(?:(?<=folder )|(?<=directory ))(?:{names})(?![\w])")
        return self._numbers(_dates(self._pass(text, pattern), self.dates))

    def _pass(self, text: str, names_pattern: str) -> str:
        parts, tables = [], []
        exact = "|".join(map(re.escape, _longest(self.exact)))
        if exact:
            parts.append(rf"(?<![A-Za-z0-9_])(?:{exact})(?![A-Za-z0-9_])")
            tables.append(lambda s: self.exact[s])
        if names_pattern:
            parts.append(names_pattern)
            tables.append(lambda s: self.names[s])
        words = "|".join(map(re.escape, _longest(self.words)))
        if words:
            parts.append(rf"(?<![A-Za-z])(?i:{words})(?![A-Za-z])")
            tables.append(lambda s: same_case(s, self.words[s.lower()]))
        if not parts:
            return text
        pattern = re.compile("|".join(f"({p})" for p in parts))
        return pattern.sub(lambda m: tables[m.lastindex - 1](m.group()), text)

    def _numbers(self, text: str) -> str:
        def swap(match: re.Match[str]) -> str:
            old = token_value(match)
            return match.group() if old not in self.numbers else write_number(
                self.numbers[old], match.group())
        return NUMBER.sub(swap, text) if self.numbers else text

    def value(self, value: Json) -> Json:
        """An argument: strings, lists and the values of objects, numbers and dates."""
        if isinstance(value, str):
            return self._numbers(_dates(self.data(value), self.dates))
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, (int, float)):
            new = self.numbers.get(float(value), value)
            return type(value)(new)
        if isinstance(value, list):
            return [self.value(v) for v in value]
        return {k: self.value(v) for k, v in value.items()}


def _longest(table: Mapping[str, str]) -> list[str]:
    return sorted(table, key=len, reverse=True)


def same_case(old: str, new: str) -> str:
    if old.isupper() and len(old) > 1:
        return new.upper()
    return new.capitalize() if old[:1].isupper() else new.lower()


def token_value(match: re.Match[str]) -> float:
    return float(match.group(1).replace(",", "") + (match.group(2) or ""))


def write_number(value: float, like: str) -> str:
    """The number in the manner of the token `like`: dollar sign, commas, decimals kept."""
    decimals = len(like.rsplit(".", 1)[1]) if "." in like else 0
    if not decimals and value != int(value):
        decimals = 2
    body = f"{value:,.{decimals}f}" if "," in like else f"{value:.{decimals}f}"
    return ("$" if like.startswith("$") else "") + body


# ---------------------------------------------------------------------------- dates

MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September",
          "October", "November", "December")
_ORDINAL = {1: "st", 2: "nd", 3: "rd", 21: "st", 22: "nd", 23: "rd"}


def _date_patterns(iso: str) -> list[tuple[str, Callable[[re.Match[str], str], str]]]:
    """Patterns of a date as people write it, each with how the new date goes there."""
    month, day = MONTHS[int(iso[5:7]) - 1], int(iso[8:10])

    def month_first(match: re.Match[str], new: str) -> str:
        d = int(new[8:10])
        ordinal = _ORDINAL.get(d, "th") if match.group(1) else ""
        return f"{MONTHS[int(new[5:7]) - 1]} {d}{ordinal}"

    def day_first(match: re.Match[str], new: str) -> str:
        d = int(new[8:10])
        ordinal = _ORDINAL.get(d, "th") if match.group(1) else ""
        return f"{d}{ordinal}{match.group(2)}{MONTHS[int(new[5:7]) - 1]}"

    return [
        (re.escape(iso), lambda match, new: new),
        (rf"\b{month} {day}(st|nd|rd|th)?\b(?!\d)", month_first),
        (rf"\b{day}(st|nd|rd|th)?( of | ){month}\b", day_first),
    ]


def _dates(text: str, dates: Mapping[str, str]) -> str:
    # Placeholders first: two dates may trade places.
    held: list[str] = []
    for old, new in dates.items():
        for pattern, form in _date_patterns(old):
            def hold(match: re.Match[str], new: str = new, form=form) -> str:
                held.append(form(match, new))
                return f"\x01{len(held) - 1}\x02"
            text = re.sub(pattern, hold, text)
    return re.sub("\x01(\\d+)\x02", lambda m: held[int(m.group(1))], text)


def mentions_date(text: str, iso: str) -> bool:
    return any(re.search(pattern, text) for pattern, _ in _date_patterns(iso))


# ---------------------------------------------------------------------------- mentions


def mentions(text: str, value: Json) -> bool:
    """Whether a text holds a value: a string between boundaries, a number as a token."""
    if isinstance(value, bool) or value is None or value == "":
        return False
    if isinstance(value, (int, float)):
        return any(token_value(m) == float(value) for m in NUMBER.finditer(text))
    if re.fullmatch(r"\d{4}-\d\d-\d\d", value) and mentions_date(text, value):
        return True
    return re.search(rf"(?<![A-Za-z0-9_]){re.escape(value)}(?![A-Za-z0-9_])", text) is not None


def scalars(value: Json) -> list[Json]:
    """All scalar leaves of an argument value."""
    if isinstance(value, Mapping):
        return [leaf for v in value.values() for leaf in scalars(v)]
    if isinstance(value, (list, tuple)):
        return [leaf for v in value for leaf in scalars(v)]
    return [value]


# Config attributes whose keys are data, and at which depth below the attribute.
_KEYED = {"credit_card_list", "booking_record", "user_map", "stocks", "comments", "retweets"}


def map_config(config: Mapping[str, Json], swaps: Swaps) -> dict[str, Json]:
    """A config with all data renamed and every schema key kept. Numbers stay."""
    def leaf(value: Json) -> Json:
        if isinstance(value, str):
            return swaps.dates.get(value, None) or swaps.data(value)
        if isinstance(value, list):
            return [leaf(v) for v in value]
        if isinstance(value, Mapping):
            return {k: leaf(v) for k, v in value.items()}
        return value

    def tree(entries: Mapping[str, Json]) -> dict[str, Json]:
        out = {}
        for name, node in entries.items():
            node = dict(node)
            if "contents" in node:
                node["contents"] = tree(node["contents"])
            if "content" in node:
                node["content"] = leaf(node["content"])
            out[swaps.data(name)] = node
        return out

    def attribute(name: str, value: Json) -> Json:
        if name == "root" and isinstance(value, Mapping):
            return tree(value)
        if name in _KEYED and isinstance(value, Mapping):
            return {swaps.data(k): leaf(v) for k, v in value.items()}
        if name == "inbox" and isinstance(value, Sequence):
            return [{swaps.data(k): leaf(v) for k, v in row.items()} for row in value]
        return leaf(value)

    return {domain: {k: attribute(k, v) for k, v in attributes.items()}
            for domain, attributes in config.items()}
