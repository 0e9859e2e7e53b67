"""Which values of a BFCL task may change, and what they become.

A value changes only where the task itself says it: a file, an amount or a date that no user
text mentions is left alone, because the agent could not learn the new one. Each function
returns a piece of a Swaps table and draws from `rng` alone.
"""

from __future__ import annotations

import datetime
import functools
import random
import re
from collections.abc import Iterator, Mapping, Sequence

from rods_jax.tools.bfcl_data import tool_class
from rods_jax.tools.bfcl_swaps import NUMBER, mentions, mentions_date, scalars, token_value
from rods_jax.tools.bfcl_words import (
    FEMALE_NAMES,
    FILE_TAGS,
    KNOWN_FEMALE,
    KNOWN_MALE,
    KNOWN_NAMES,
    LAST_NAMES,
    MALE_NAMES,
    STREETS,
    WORD_CLASSES,
)
from rods_jax.types import Json, Task, ToolCall

# Arguments whose number is a free choice of the user, with the least value that makes sense.
FREE_NUMBERS = frozenset({
    "amount", "fuelAmount", "liter", "gallon", "temperature", "budget_limit", "insurance_cost",
    "distanceToNextVehicle", "speed", "value", "a", "b", "number", "distance", "fanSpeed", "price",
})
TANK = 50.0  # gallons that a tank holds
_CONDITION = re.compile(
    r"\b(above|below|under|over|exceed\w*|less|more than|at least|greater|higher|lower|enough"
    r"|full|half|double|twice|percent)\b|%", re.IGNORECASE)


def calls_of(task: Task) -> Iterator[tuple[int, ToolCall]]:
    for t, turn in enumerate(task.turns):
        for call in turn.gold:
            yield t, call


def strings_of(value: Json) -> Iterator[str]:
    """Every string in a config, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield key
            yield from strings_of(child)
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from strings_of(child)


def _vocabulary(task: Task) -> set[str]:
    """Alphabetic runs anywhere in the task, in lower case."""
    texts = [*strings_of(task.initial_config), *(t.user for t in task.turns)]
    texts += [leaf for _, c in calls_of(task) for leaf in scalars(c.arguments)
              if isinstance(leaf, str)]
    return {word.lower() for text in texts for word in re.findall(r"[A-Za-z]+", text)}


# ------------------------------------------------------------------------------- words


def _people(config: Mapping[str, Json]) -> set[str]:
    """Lower-case names that the config itself uses for people."""
    found: list[str] = list(config.get("MessageAPI", {}).get("user_map", {}))
    travel = config.get("TravelAPI", {})
    found += [travel.get("user_first_name") or "", travel.get("user_last_name") or ""]
    for card in travel.get("credit_card_list", {}).values():
        found.append(str(card.get("cardholder_name", "")))
    words = {w.lower() for name in found for w in re.findall(r"[A-Z][a-z]{2,}", name)}
    return words - {"will", "mark", "may", "rose", "grant", "team", "user", "manager", "support"}


def names(task: Task, rng: random.Random) -> dict[str, str]:
    """Person -> person, over all strings."""
    present = _vocabulary(task)
    said = "\n".join(turn.user for turn in task.turns)
    plain = {w for w in re.findall(r"(?<![\w@#'\"])[a-z]+(?![\w'\"@])", said)}  # "colleague"
    people = sorted((_people(task.initial_config) - plain | KNOWN_NAMES) & present)
    if "kennedy" in present:  # an airport, not a person
        people = [p for p in people if p != "john"]
    last = {str(task.initial_config.get("TravelAPI", {}).get("user_last_name")).lower(),
            "smith", "johnson", "thompson"}
    pools = {}
    for kind, all_names in (("last", LAST_NAMES), ("female", FEMALE_NAMES), ("male", MALE_NAMES)):
        pool = [n for n in all_names if n.lower() not in present]
        rng.shuffle(pool)
        pools[kind] = iter(pool)
    spoken_of = re.search(r"\b(?:she|her|hers|he|him|his)\b", said, re.IGNORECASE) is not None
    kept = _in_handles(task, people)
    out = {}
    for person in people:
        kind = "last" if person in last else _gender(person)
        if kind is None and not spoken_of:
            kind = rng.choice(("female", "male"))
        new = None if kind is None or person in kept else next(pools[kind], None)
        if new is not None:
            out[person] = new
    return out


def _gender(name: str) -> str | None:
    """The pool of a first name; None where the name does not tell."""
    if name in KNOWN_FEMALE or name.capitalize() in FEMALE_NAMES:
        return "female"
    return "male" if name in KNOWN_MALE or name.capitalize() in MALE_NAMES else None


_LETTERS = str.maketrans("013@", "oiea")  # as handles spell them


def _in_handles(task: Task, people: Sequence[str]) -> set[str]:
    """People whose name is a part of a longer word, also short or with digits for letters
    ("cmartinez", "MaxID" of a Maxwell, "m0llyTr@vel"), who keep it; the traveller keeps both
    names where one is."""
    texts = [*strings_of(task.initial_config), *(t.user for t in task.turns)]
    texts += [leaf for _, c in calls_of(task) for leaf in scalars(c.arguments)
              if isinstance(leaf, str)]
    runs = {run for text in texts for spelled in (text, text.translate(_LETTERS))
            for run in re.findall(r"[A-Za-z]+", spelled) if run.lower() not in people}
    kept = {p for p in people if any(len(p) >= 4 and p in run.lower() for run in runs)}
    short = {p: "|".join(p[:n].capitalize() for n in range(3, len(p) + 1)) for p in people}
    kept |= {p for p, starts in short.items() if starts and any(
        re.search(rf"(?<=[a-z])(?:{starts})(?![a-z])|(?:{starts})(?=[A-Z])", run) for run in runs)}
    travel = task.initial_config.get("TravelAPI", {})
    traveller = {str(travel.get(key)).lower() for key in ("user_first_name", "user_last_name")}
    return kept | (traveller if traveller & kept else set())


def words(task: Task, rng: random.Random) -> dict[str, str]:
    """Word -> another word of its class that the task does not use yet."""
    present = _vocabulary(task)
    out = {}
    for group in WORD_CLASSES:
        for vowel in (True, False):  # so that "a" and "an" stay right
            alike = [w for w in group if (w[0] in "aeiou") == vowel]
            free = [w for w in alike if w not in present]
            rng.shuffle(free)
            out |= dict(zip([w for w in alike if w in present], free, strict=False))
    return out


# ------------------------------------------------------------------------------- exact strings


def _digits(text: str, rng: random.Random) -> str:
    """Fresh digits in the places of the old ones; a leading digit stays a nonzero one."""
    return re.sub(r"\d", lambda m: rng.choice("123456789"), text)


def credentials(task: Task, rng: random.Random) -> dict[str, str]:
    """Tokens, passwords, card and user ids: the same shape with other digits."""
    config = task.initial_config
    travel = config.get("TravelAPI", {})
    found = [travel.get("access_token") or "", config.get("TwitterAPI", {}).get("password") or ""]
    found += list(travel.get("credit_card_list", {}))
    found += [str(c.get("card_number", "")) for c in travel.get("credit_card_list", {}).values()]
    found += list(travel.get("booking_record", {}))
    found += [str(v) for v in config.get("MessageAPI", {}).get("user_map", {}).values()]
    found += [str(call.arguments.get("passport_number", "")) for _, call in calls_of(task)]
    said = "\n".join(turn.user for turn in task.turns)
    used = {v for _, c in calls_of(task) for v in scalars(c.arguments) if isinstance(v, str)}
    out: dict[str, str] = {}
    for old in dict.fromkeys(found):
        if sum(ch.isdigit() for ch in old) < 3 or old in used and not mentions(said, old):
            continue
        if not any(run in said.replace(old, "") for run in re.findall(r"\d{3,}", old)):
            new = _digits(old, rng)
            while new in out.values() or new in found:
                new = _digits(old, rng)
            out[old] = new
    return out


def _tree_names(entries: Mapping[str, Json]) -> Iterator[str]:
    for name, node in entries.items():
        yield name
        yield from _tree_names(node.get("contents", {}))


_NEW_PATHS = {"touch": "file_name", "mkdir": "dir_name", "mv": "destination", "cp": "destination"}


def _tagged(name: str, tag: str) -> str:
    """The name with a tag before its extension, joined in the name's own style."""
    stem, dot, extension = name.rpartition(".") if "." in name[1:] else (name, "", "")
    plain = "_" in stem or stem == stem.lower()
    return f"{stem}{'_' + tag if plain else tag.capitalize()}{dot}{extension}"


def _visible(task: Task, outputs: Sequence[Json], name: str) -> bool:
    """Whether an output shows a name before the first gold call that needs it."""
    for i, (_, call) in enumerate(calls_of(task)):
        used = any(isinstance(v, str) and name in v for v in scalars(call.arguments))
        if used:
            shown = [s for o in outputs[:i] for s in strings_of(o)]
            return any(mentions(s, name) for s in shown)
    return False


def paths(task: Task, outputs: Sequence[Json],
          rng: random.Random) -> tuple[dict[str, str], dict[str, str]]:
    """Files and directories that a user text names or an output shows in time: (with an
    extension or a separator, bare words). The old name stays a part of the new one, so
    "the report" still refers to it; a name built on another ("same name as docx") follows."""
    root = task.initial_config.get("GorillaFileSystem", {}).get("root", {})
    top = next(iter(root.values()), {"contents": {}})
    found = set(_tree_names(top.get("contents", {})))
    made = {str(call.arguments[key]) for _, call in calls_of(task)
            if (key := _NEW_PATHS.get(call.name)) and key in call.arguments}
    said = "\n".join(turn.user for turn in task.turns)
    patterns = {c.arguments.get("name" if c.name == "find" else "pattern")
                for _, c in calls_of(task) if c.name in ("find", "grep")}
    tags = list(FILE_TAGS)
    rng.shuffle(tags)
    new: dict[str, str] = {}
    for name in sorted((found | made) - patterns - {"", ".", ".."}):
        known = mentions(said, name) or (name in found and _visible(task, outputs, name))
        if tags and "/" not in name and known:
            new[name] = _tagged(name, tags.pop())
    for name in sorted(made - set(new)):
        for old in sorted(new, key=len, reverse=True):
            stem = old.rpartition(".")[0] or old
            if len(stem) >= 3 and name.startswith(stem):
                new[name] = (new[old].rpartition(".")[0] or new[old]) + name[len(stem):]
                break
    bare = {k: v for k, v in new.items() if re.fullmatch(r"[A-Za-z]+", k)}
    return {k: v for k, v in new.items() if k not in bare}, bare


def destinations(task: Task, rng: random.Random) -> dict[str, str]:
    """Street addresses that the user dictates: another number and street, same city."""
    said = "\n".join(turn.user for turn in task.turns)
    out = {}
    for _, call in calls_of(task):
        place = call.arguments.get("destination") if call.name == "set_navigation" else None
        match = re.match(r"(\d+) ([A-Z][a-z]+)", place) if isinstance(place, str) else None
        if match and mentions(said, place) and "Oakwood" not in place:
            out[place] = f"{rng.randint(11, 989)} {rng.choice(STREETS)}{place[match.end():]}"
    return out


COMPANIES = {
    "AAPL": "Apple", "GOOG": "Google", "TSLA": "Tesla", "MSFT": "Microsoft", "NVDA": "Nvidia",
    "ZETA": "Zeta Corp", "ALPH": "Alpha Tech", "OMEG": "Omega Industries", "QUAS": "Quasar Ltd.",
    "NEPT": "Neptune Systems", "SYNX": "Synex Solutions", "AMZN": "Amazon",
}
_IN_SECTORS = {"AAPL", "GOOG", "MSFT", "NVDA", "TSLA", "F", "GM"}


def symbols(task: Task, rng: random.Random) -> dict[str, str]:
    """Stocks that the user names. A company the classes know trades places with another one,
    symbol and name alike; any other symbol becomes a new one. Where the gold lists a sector,
    the stocks of sectors stay."""
    said = "\n".join(turn.user for turn in task.turns)
    stocks = task.initial_config.get("TradingBot", {}).get("stocks", {})
    fixed = _IN_SECTORS if any(c.name == "get_available_stocks" for _, c in calls_of(task)) else ()
    named = {s for s in stocks if mentions(said, s) or mentions(said, COMPANIES.get(s, s))}
    shown = {s for _, c in calls_of(task) for s in scalars(c.arguments) if isinstance(s, str)}
    # A symbol that its company's name spells is said with it; another one would not be.
    spelled = {s for s, name in COMPANIES.items() if s.lower() in name.lower().split()}
    partners = [s for s in stocks if s in COMPANIES and s not in named | shown | spelled
                and s not in fixed]
    rng.shuffle(partners)
    out: dict[str, str] = {}
    for old in sorted(named):
        if old in fixed or old in spelled and not mentions(said, old):
            continue
        if old in COMPANIES and partners:
            new = partners.pop()
            out |= {old: new, new: old, COMPANIES[old]: COMPANIES[new],
                    COMPANIES[new]: COMPANIES[old]}
        elif old not in COMPANIES:
            new = "".join(rng.choice(s) for s in ("BDKMRTVZ", "AEIOU", "LNRSXZ", "AEIOUXY"))
            if new not in stocks and new not in out.values():
                out[old] = new
    return out


# ------------------------------------------------------------------------------- dates, places


def _iso_date(text: str) -> datetime.date | None:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        return None


def dates(task: Task, rng: random.Random) -> dict[str, str]:
    """Travel dates that the user says in full; the new one keeps year and weekday."""
    said = "\n".join(turn.user for turn in task.turns)
    out: dict[str, str] = {}
    for _, call in calls_of(task):
        old = call.arguments.get("travel_date")
        if isinstance(old, str) and re.fullmatch(r"\d{4}-\d\d-\d\d", old) and old not in out:
            day = _iso_date(old) if mentions_date(said, old) else None
            if day is not None:
                first = datetime.date(day.year, 1, 1) + datetime.timedelta(
                    days=(day.timetuple().tm_yday - 1) % 7)
                weeks = [w for w in range(52) if first + datetime.timedelta(weeks=w) != day]
                out[old] = (first + datetime.timedelta(weeks=rng.choice(weeks))).isoformat()
    return out


CITIES = {
    "RMS": "Rivermist", "SBK": "Stonebrook", "MPC": "Maplecrest", "SVP": "Silverpine",
    "SHD": "Shadowridge", "SSV": "Sunset Valley", "OKD": "Oakendale", "WLB": "Willowbend",
    "CRH": "Crescent Hollow", "ATV": "Autumnville", "PHV": "Pinehaven", "GFD": "Greenfield",
    "SFO": "San Francisco", "LAX": "Los Angeles", "JFK": "New York", "ORD": "Chicago",
    "BOS": "Boston", "PEK": "Beijing", "HKG": "Hong Kong", "CIA": "Rome", "HND": "Tokyo",
    "LHR": "London", "CDG": "Paris",
}


def _renamed(cities: dict[str, str]) -> dict[str, str]:
    """With "New York City", whose last word belongs to no other city."""
    return cities | {f"{old} City": new for old, new in cities.items()}


def _has_route(start: str, end: str) -> bool:
    travel = tool_class("TravelAPI")()
    travel._load_scenario({}, long_context=False)
    try:
        travel.get_flight_cost(start, end, "2026-01-01", "economy")
    except ValueError:
        return False
    return True


def places(task: Task, rng: random.Random) -> dict[str, str]:
    """One route for another: airport codes and city names together, where the user says each
    end by its code or its full city name and no other tool knows the cities."""
    if "TravelAPI" not in task.domains or "VehicleControlAPI" in task.domains:
        return {}
    said = "\n".join(turn.user for turn in task.turns)
    routes = {(c.arguments.get("travel_from"), c.arguments.get("travel_to"))
              for _, c in calls_of(task) if "travel_from" in c.arguments}
    used = sorted({code for route in routes for code in route if code in CITIES})
    if not routes or any(code not in CITIES for route in routes for code in route):
        return {}
    if not all(mentions(said, code) or mentions(said, CITIES[code]) for code in used):
        return {}
    if any(mentions(said, alias) for alias in ("LA", "NYC", "SF")):
        return {}
    if any(c.name == "compute_exchange_rate" for _, c in calls_of(task)) and any(
            mentions(said, code) for code in used):
        return {}  # three capitals may be a currency there
    for _ in range(40):
        fresh = dict(zip(used, rng.sample(sorted(CITIES), len(used)), strict=True))
        apart = all(old != new for old, new in fresh.items())
        if apart and all(_has_route(fresh[a], fresh[b]) for a, b in routes):
            return fresh | _renamed({CITIES[old]: CITIES[new] for old, new in fresh.items()})
    return {}


@functools.cache
def _roads() -> tuple[dict[str, str], frozenset[tuple[str, str]]]:
    """Zip codes of the cities that the car's map knows, and the pairs it has a distance for."""
    car = tool_class("VehicleControlAPI")()
    car._load_scenario({}, long_context=False)
    codes = {city: car.get_zipcode_based_on_city(city)["zipcode"] for city in CITIES.values()}
    codes = {city: code for city, code in codes.items() if code.strip("0")}
    pairs = {(a, b) for a in codes for b in codes if a != b
             and "distance" in car.estimate_distance(codes[a], codes[b])}
    return codes, frozenset(pairs)


def towns(task: Task, rng: random.Random) -> dict[str, str]:
    """Cities of a drive for others with a known distance, and their zip codes; only where the
    user says every one of them and no flight knows them too."""
    said = "\n".join(turn.user for turn in task.turns)
    if "VehicleControlAPI" not in task.domains or "TravelAPI" in task.domains or re.search(
            r"\b(?:thousand|hundred)\b|\d+ (?:km|kilometers|miles)\b", said):
        return {}
    codes, pairs = _roads()
    city_of = {code: city for city, code in codes.items()}
    used = {str(c.arguments["city"]) for _, c in calls_of(task)
            if c.name == "get_zipcode_based_on_city"}
    driven = {(city_of.get(str(c.arguments["cityA"])), city_of.get(str(c.arguments["cityB"])))
              for _, c in calls_of(task) if c.name == "estimate_distance"}
    used |= {city for pair in driven for city in pair if city in used or mentions(said, city or "")}
    if not used or not driven or not all(city in codes and mentions(said, city) for city in used):
        return {}
    for _ in range(60):
        fresh = dict(zip(sorted(used), rng.sample(sorted(codes), len(used)), strict=True))
        apart = all(old != new for old, new in fresh.items())
        if apart and all((fresh.get(a), fresh.get(b)) in pairs for a, b in driven):
            return _renamed(fresh) | {codes[old]: codes[new] for old, new in fresh.items()}
    return {}


# ------------------------------------------------------------------------------- numbers


def fuel(task: Task, outputs: Sequence[Json], rng: random.Random) -> tuple[float, float] | None:
    """(old, new) amount that fills the tank to the brim, where nobody says or shows it and it
    follows from the fuel that is left; None elsewhere."""
    level = task.initial_config.get("VehicleControlAPI", {}).get("fuelLevel")
    amounts = [(turn, c.arguments.get("fuelAmount")) for turn, c in calls_of(task)
               if c.name == "fillFuelTank"]
    unsaid = unsaid_numbers(task, outputs)
    said = "\n".join(turn.user for turn in task.turns)
    if len(amounts) != 1 or not _number(level) or level in unsaid or mentions(said, level):
        return None
    old = amounts[0][1]
    if not _number(old) or old + level != TANK or old not in unsaid or mentions(said, old):
        return None
    if sum(v == old for _, c in calls_of(task) for v in _numbers_in(c.arguments)) != 1:
        return None
    step = 1 if isinstance(old, int) else 0.5
    new = rng.choice([n * step for n in range(int(15 / step), int(46 / step)) if n * step != old])
    return float(old), float(new)


def _nearby(value: float, name: str, rng: random.Random) -> float:
    """Another number of about the size and with about as many trailing zeros."""
    if name == "speed":
        return float(5 * rng.randint(6, 20))
    if value != int(value):
        return round(value * rng.uniform(0.7, 1.3), 2)
    step = 1
    while value % (step * 10) == 0 and step * 10 <= value / 4:
        step *= 10
    if step == 1 and value % 5 == 0:
        step = 5
    return float(max(step, step * round(value * rng.uniform(0.6, 1.3) / step)))


def _number(value: Json) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _numbers_in(value: Json) -> Iterator[float]:
    """Numbers of an argument, also those that stand in a string."""
    for leaf in scalars(value):
        if _number(leaf):
            yield float(leaf)
        elif isinstance(leaf, str):
            yield from (token_value(m) for m in NUMBER.finditer(leaf))


def spoken_numbers(task: Task, outputs: Sequence[Json]) -> dict[float, str] | None:
    """Free numbers that the user says, with their argument; None where some gold number is
    neither said nor shown, so it was computed and would not follow a change."""
    out: dict[float, str] = {}
    config = {float(v) for v in scalars(dict(task.initial_config)) if _number(v)}
    for i, (turn, call) in enumerate(calls_of(task)):
        said = "\n".join(t.user for t in task.turns[:turn + 1])
        shown = config.union(*(_numbers_in(o) for o in outputs[:i]))
        for name, argument in call.arguments.items():
            for value in _numbers_in(argument):
                if mentions(said, value):
                    if name in FREE_NUMBERS and value >= 5 and value not in config:
                        out.setdefault(value, name)
                elif value > 5 and value not in shown:
                    return None
    return out


def unsaid_numbers(task: Task, outputs: Sequence[Json]) -> frozenset[float]:
    """Numbers of gold arguments that no user says and no earlier call returns: what stands in
    the hidden state for them has to stay."""
    out = set()
    for i, (turn, call) in enumerate(calls_of(task)):
        said = "\n".join(t.user for t in task.turns[:turn + 1])
        shown = frozenset().union(*(_numbers_in(o) for o in outputs[:i]))
        out |= {v for v in _numbers_in(call.arguments) if v not in shown and not mentions(said, v)}
    return frozenset(out)


def numbers(task: Task, outputs: Sequence[Json], rng: random.Random) -> dict[float, float]:
    """New amounts for those that the user says; none where a text compares numbers."""
    spoken = None if conditions(task) else spoken_numbers(task, outputs)
    new = {old: _nearby(old, name, rng) for old, name in (spoken or {}).items()}
    return {old: value for old, value in new.items() if old != value}


def conditions(task: Task) -> bool:
    """Whether some user text depends on a comparison, which other values could turn."""
    return any(_CONDITION.search(turn.user) for turn in task.turns)
