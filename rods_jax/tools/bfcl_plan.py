"""Stage I for BFCL (paper section 2): a variant with the call structure of a base task, and
other people, files, amounts, routes, dates, ids and prices.

There is no language model. One request may turn into another of its shape (bfcl_functions).
Values are swapped consistently in config, gold calls and texts
(bfcl_swaps, bfcl_entities); id counters, prices and the random seeds of the classes change
too, so what a call returns is new, and where the gold passes such a value on, the plan holds
a Ref to the earlier result. Every plan has been executed here before it is handed out: it
must answer like the seed (same keys, same booleans, no error) and every value a user said in
the seed must still be said in time. Where that fails, fewer kinds of value change.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence

from rods_jax.tools import bfcl_entities as entities
from rods_jax.tools.bfcl_functions import with_other_functions
from rods_jax.tools.bfcl_sandbox import Sandbox
from rods_jax.tools.bfcl_swaps import NUMBER, Swaps, map_config, mentions, scalars, token_value
from rods_jax.types import Json, Plan, PlannedCall, Ref, Task, ToolCall

Path = tuple[str | int, ...]
OTHER_FUNCTIONS_SHARE = 0.7  # of variants that first try another function than the seed's

KINDS = ("places", "dates", "numbers", "prices", "paths", "counters", "credentials", "words",
         "names", "symbols", "destinations", "vehicle", "towns", "fuel")
# Kinds that change, attempt by attempt: everything first, then without what is most often
# to blame, at last words, names and random seeds alone.
_MOST = ("places", "dates", "numbers", "prices", "towns", "fuel")
_ATTEMPTS: tuple[frozenset[str], ...] = tuple(frozenset(KINDS) - set(drop) for drop in (
    (), (), (), ("places", "towns"), ("numbers", "prices", "fuel"), ("places", "numbers", "prices"),
    ("places", "dates", "numbers", "prices"), _MOST,
    (*_MOST, "paths"),
    (*_MOST, "symbols"),
    (*_MOST, "paths", "counters", "symbols"),
    (*_MOST, "counters", "symbols", "words"),
    (*_MOST, "paths", "counters", "symbols", "credentials"),
    (*_MOST, "paths", "counters", "symbols", "credentials", "names"),
))


def parse_result(text: str) -> Json:
    """The JSON value of a result text, None where it is no JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def leaves(value: Json, path: Path = ()) -> Iterator[tuple[Path, Json]]:
    """Scalar leaves with their paths."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from leaves(child, (*path, key))
    elif isinstance(value, list):
        for i, child in enumerate(value):
            yield from leaves(child, (*path, i))
    else:
        yield path, value


def at(value: Json, path: Sequence[str | int]) -> Json:
    """The leaf at a path; ValueError where there is none."""
    for step in path:
        try:
            value = value[step]
        except (LookupError, TypeError):
            raise ValueError(f"a result has no value at {list(path)}") from None
    return value


def distinctive(value: Json) -> bool:
    """Whether equality with an output can hardly be by chance."""
    if isinstance(value, bool) or value is None:
        return False
    if isinstance(value, (int, float)):
        return abs(value) >= 100 or value != int(value)
    return len(value) >= 3 and value not in ("Buy", "Sell", "Open", "auto", "economy", "business")


def _same(a: Json, b: Json) -> bool:
    return isinstance(a, bool) == isinstance(b, bool) and type(a) is type(b) and a == b


def _id_like(path: Path, argument: str) -> bool:
    return bool(path) and "id" in str(path[-1]).split("_") and argument.endswith("id")


# ------------------------------------------------------------------------- configuration


def _filled(task: Task) -> Task:
    """The task with those defaults of the classes written out that hold names."""
    wanted = {"MessageAPI": ("user_map", "inbox"), "TwitterAPI": ("username", "password",
                                                                  "following_list")}
    config = {d: dict(task.initial_config.get(d, {})) for d in task.domains}
    state = Sandbox(task.domains, config, False).state()
    for domain, attributes in wanted.items():
        for name in attributes if domain in config else ():
            config[domain].setdefault(name, copy.deepcopy(state[domain][name]))
    return dataclasses.replace(task, initial_config=config)


def _swaps(task: Task, outputs: Sequence[Json], kinds: frozenset[str],
           rng: random.Random) -> Swaps:
    def pick(kind, draw, empty):
        return draw() if kind in kinds else empty
    files, bare = pick("paths", lambda: entities.paths(task, outputs, rng), ({}, {}))
    exact = dict(files)
    exact |= pick("credentials", lambda: entities.credentials(task, rng), {})
    exact |= pick("destinations", lambda: entities.destinations(task, rng), {})
    exact |= pick("symbols", lambda: entities.symbols(task, rng), {})
    exact |= pick("places", lambda: entities.places(task, rng), {})
    exact |= pick("towns", lambda: entities.towns(task, rng), {})
    words = pick("words", lambda: entities.words(task, rng), {})
    words = {old: new for old, new in words.items() if old not in {b.lower() for b in bare}}
    words |= pick("names", lambda: entities.names(task, rng), {})
    tank = pick("fuel", lambda: entities.fuel(task, outputs, rng), None)
    # An exact swap wins over the words inside it, so those are swapped in its new form.
    by_word = Swaps(words=words)
    exact = {old: by_word.data(new) for old, new in exact.items()}
    return Swaps(words=words, exact=exact, names=bare,
                 dates=pick("dates", lambda: entities.dates(task, rng), {}),
                 numbers=pick("numbers", lambda: entities.numbers(task, outputs, rng), {})
                 | ({} if tank is None else {tank[0]: tank[1]}))


def _shift_counters(config: dict[str, dict[str, Json]], texts: str, kept: frozenset[float],
                    rng: random.Random) -> None:
    for domain, name, low, high in (("TradingBot", "order_counter", 20_000, 89_999),
                                    ("TicketAPI", "ticket_counter", 1_000, 8_999),
                                    ("TwitterAPI", "tweet_counter", 100, 899)):
        old = config.get(domain, {}).get(name)
        if isinstance(old, int) and old not in kept and not mentions(texts, old):
            config[domain][name] = rng.randint(low, high)


def _shift_prices(config: dict[str, dict[str, Json]], texts: str, rng: random.Random) -> None:
    bot = config.get("TradingBot", {})
    for stock in bot.get("stocks", {}).values():
        price = stock.get("price")
        if isinstance(price, (int, float)) and not mentions(texts, price):
            stock["price"] = round(price * rng.uniform(0.8, 1.2), 2)
    account = bot.get("account_info", {})
    balance = account.get("balance")
    if isinstance(balance, (int, float)) and not mentions(texts, balance):
        account["balance"] = round(balance * rng.uniform(1.25, 2.0), 2)


def _shift_vehicle(task: Task, config: dict[str, dict[str, Json]], kept: frozenset[float],
                   rng: random.Random) -> None:
    """Another car: readings that no gold call of such a task is derived from."""
    car = config.get("VehicleControlAPI", {})
    used = {call.name for turn in task.turns for call in turn.gold}
    for name, low, high in (("batteryVoltage", 11.8, 13.9), ("humidityLevel", 30.0, 70.0)):
        if name in car and car[name] not in kept:
            car[name] = round(rng.uniform(low, high), 1)
    fuel = {"fillFuelTank", "estimate_drive_feasibility_by_mileage", "displayCarStatus"}
    if "fuelLevel" in car and car["fuelLevel"] not in kept and not used & fuel:
        car["fuelLevel"] = round(rng.uniform(6.0, 44.0), 1)
    tires = [name for name in car if name.endswith("TirePressure")]
    if "check_tire_pressure" not in used:
        for name in tires:
            if car[name] in kept:
                continue
            car[name] = float(rng.randint(28, 36))


def _fill_differently(task: Task, config: dict[str, dict[str, Json]], swaps: Swaps) -> None:
    """The fuel that is left, where another amount fills the tank now."""
    car = config.get("VehicleControlAPI", {})
    for _, call in entities.calls_of(task):
        old = call.arguments.get("fuelAmount")
        if call.name == "fillFuelTank" and old in swaps.numbers and (
                old + car.get("fuelLevel", 0.0) == entities.TANK):
            car["fuelLevel"] = entities.TANK - swaps.numbers[old]


def _config(task: Task, swaps: Swaps, outputs: Sequence[Json], kinds: frozenset[str],
            rng: random.Random) -> dict[str, dict[str, Json]]:
    config = copy.deepcopy(map_config(task.initial_config, swaps))
    texts = "\n".join(turn.user for turn in task.turns)
    kept = entities.unsaid_numbers(task, outputs)
    if "counters" in kinds:
        _shift_counters(config, texts, kept, rng)
    computed = entities.spoken_numbers(task, outputs) is None
    if "prices" in kinds and not computed and not entities.conditions(task):
        _shift_prices(config, texts, rng)
    if "fuel" in kinds:
        _fill_differently(task, config, swaps)
    if "vehicle" in kinds:
        _shift_vehicle(task, config, kept, rng)
    for domain in ("TravelAPI", "MessageAPI", "TradingBot", "VehicleControlAPI"):
        if domain in config:
            config[domain]["random_seed"] = rng.randint(1, 10**6)
    return config


# ------------------------------------------------------------------------- references


@dataclasses.dataclass
class _Trace:
    """What the seed and its variant have returned up to now, call by call."""

    old: list[Json]
    new: list[Json] = dataclasses.field(default_factory=list)

    def changed(self) -> Iterator[tuple[int, Path, Json, Json]]:
        """Leaves that differ, latest call first."""
        for i in range(len(self.new) - 1, -1, -1):
            fresh = dict(leaves(self.new[i]))
            for path, value in leaves(self.old[i]):
                if path in fresh and not _same(fresh[path], value):
                    yield i, path, value, fresh[path]

    def source(self, value: Json, argument: str) -> tuple[int, Path] | None:
        """The latest call of the seed that returned the value."""
        for i in range(len(self.new) - 1, -1, -1):
            for path, leaf in leaves(self.old[i]):
                if _same(leaf, value) and (distinctive(value) or _id_like(path, argument)):
                    return i, path
        return None


def _patched(text: str, trace: _Trace) -> str:
    """A string argument with the outputs it quotes replaced by the variant's."""
    for _, _, old, new in trace.changed():
        quoted = isinstance(old, (int, float)) and not isinstance(old, bool)
        token = str(old)
        if (quoted or token.isdigit()) and len(token) >= 4:
            text = re.sub(rf"(?<![\w.]){re.escape(token)}(?![\w])", str(new), text)
    return text


def _argument(value: Json, name: str, said: str, swaps: Swaps, trace: _Trace) -> Json | Ref:
    """One gold argument for the variant: a Ref, or a literal."""
    if not isinstance(value, (list, dict)):
        source = trace.source(value, name)
        if source is not None:
            i, path = source
            fresh = dict(leaves(trace.new[i]))
            moved = path in fresh and not _same(fresh[path], value)
            if path in fresh and (not mentions(said, value) or (
                    moved and _id_like(path, name))):
                return Ref(i, path)
        swapped = swaps.value(value)
        return _patched(swapped, trace) if isinstance(swapped, str) else swapped
    nested = {}
    for _, _, old, new in trace.changed():
        if distinctive(old):
            nested.setdefault((type(old), old), new)

    def deep(v: Json) -> Json:
        if isinstance(v, list):
            return [deep(x) for x in v]
        if isinstance(v, dict):
            return {k: deep(x) for k, x in v.items()}
        if not mentions(said, v) and (type(v), v) in nested:
            return nested[(type(v), v)]
        swapped = swaps.value(v)
        return _patched(swapped, trace) if isinstance(swapped, str) else swapped
    return deep(value)


def resolve(arguments: Mapping[str, Json | Ref], results: Sequence[Json]) -> dict[str, Json]:
    """Arguments with every Ref replaced by what it stands for."""
    return {k: at(results[v.call], v.path) if isinstance(v, Ref) else v
            for k, v in arguments.items()}


# ------------------------------------------------------------------------- plan


def _alike(old: Json, new: Json) -> bool:
    """Same keys at the top, same booleans everywhere, errors in neither."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        if old.keys() != new.keys():
            # Keys may be data (users, cards): their number must agree.
            return len(old) == len(new) and "error" not in new
        return all(_alike(v, new[k]) for k, v in old.items())
    if isinstance(old, bool) or isinstance(new, bool):
        return old is new
    if isinstance(old, list) and isinstance(new, list):
        return bool(old) == bool(new)
    return (old is None) == (new is None)


def _said_in_time(seed: Task, calls: Sequence[Sequence[PlannedCall]],
                  texts: Sequence[str]) -> bool:
    """Every literal that a user said by its turn in the seed is said by then here too."""
    for t, turn in enumerate(seed.turns):
        old_text = "\n".join(u.user for u in seed.turns[:t + 1])
        new_text = "\n".join(texts[:t + 1])
        for call, planned in zip(turn.gold, calls[t], strict=True):
            for name, value in call.arguments.items():
                fresh = planned.arguments[name]
                if isinstance(fresh, Ref):
                    continue
                for a, b in zip(scalars(value), scalars(fresh), strict=True):
                    if mentions(old_text, a) and not mentions(new_text, b):
                        return False
    return True


def _mentions_of_outputs(texts: Sequence[str], turn_of: Sequence[int],
                         trace: _Trace) -> list[Json]:
    """[turn, old token, call, path] of changed outputs that a later user text quotes."""
    out: list[Json] = []
    for i, path, old, _ in trace.changed():
        numeric = isinstance(old, (int, float)) and not isinstance(old, bool)
        if not ((numeric or str(old).isdigit()) and len(str(old)) >= 4):
            continue
        for t in range(turn_of[i] + 1, len(texts)):
            tokens = [m.group() for m in NUMBER.finditer(texts[t])
                      if token_value(m) == float(old)]
            out += [[t, token, i, list(path)] for token in dict.fromkeys(tokens)]
    return out


def _quoted_early(texts: Sequence[str], turn_of: Sequence[int], trace: _Trace) -> bool:
    """Whether a user text quotes a figure before the call that returns it, and the variant's
    call returns another one: the text would be wrong."""
    return any(isinstance(old, (int, float)) and not isinstance(old, bool) and abs(old) >= 50
               and mentions("\n".join(texts[:turn_of[i] + 1]), old)
               for i, _, old, _ in trace.changed())


def _same_data(seed: Task, config: Mapping[str, Mapping[str, Json]]) -> bool:
    """Whether only random seeds differ from the seed's config."""
    return all({k: v for k, v in attributes.items() if k != "random_seed"}
               == seed.initial_config.get(domain, {}) for domain, attributes in config.items())


def _attempt(seed: Task, outputs: list[Json], kinds: frozenset[str], parent: str,
             rng: random.Random) -> Plan | None:
    swaps = _swaps(seed, outputs, kinds, rng)
    config = _config(seed, swaps, outputs, kinds, rng)
    sandbox = Sandbox(seed.domains, config, False)
    trace = _Trace(outputs)
    texts = [swaps.text(turn.user) for turn in seed.turns]
    planned: list[list[PlannedCall]] = []
    turn_of: list[int] = []
    for t, turn in enumerate(seed.turns):
        said = "\n".join(u.user for u in seed.turns[:t + 1])
        planned.append([])
        for call in turn.gold:
            arguments = {k: _argument(v, k, said, swaps, trace)
                         for k, v in call.arguments.items()}
            result = sandbox.call(ToolCall(call.name, resolve(arguments, trace.new)))
            value = parse_result(result.text)
            if not result.ok or not _alike(outputs[len(trace.new)], value):
                return None
            planned[-1].append(PlannedCall(call.name, arguments))
            trace.new.append(value)
            turn_of.append(t)
    same_texts = texts == [t.user for t in seed.turns]
    if _quoted_early(texts, turn_of, trace):
        return None
    if not _said_in_time(seed, planned, texts) or same_texts and _same_data(seed, config):
        return None
    narrative = {
        "seed": seed.uid,
        "texts": texts,
        "same_texts": same_texts,
        "quoted_outputs": _mentions_of_outputs(texts, turn_of, trace),
        "changes": {**swaps.exact, **swaps.names, **swaps.words, **swaps.dates,
                    **{f"{k:g}": f"{v:g}" for k, v in swaps.numbers.items()}},
    }
    return Plan(seed.domains, config, tuple(tuple(turn) for turn in planned), parent, narrative)


def _outputs(task: Task) -> list[Json]:
    sandbox = Sandbox(task.domains, task.initial_config, False)
    return [parse_result(sandbox.call(c).text) for turn in task.turns for c in turn.gold]


def plan(seed: Task, parent: str, rng: random.Random) -> Plan:
    """A plan after the structure of `seed`, a task in BASE form; `parent` is the uid it is
    booked on. ValueError where no attempt gives other texts that still work."""
    seed = _filled(seed)
    outputs = _outputs(seed)
    if rng.random() < OTHER_FUNCTIONS_SHARE:
        other = with_other_functions(seed, outputs, rng)
        if other is not None:
            seed, outputs = other, _outputs(other)
    for kinds in _ATTEMPTS:
        made = _attempt(seed, outputs, kinds, parent, rng)
        if made is not None:
            return made
    raise ValueError(f"no variant of {seed.uid}: nothing in it can change safely, skip this seed")


# ------------------------------------------------------------------------- repair


def repair(plan: Plan, call: int, error: str) -> Plan | None:
    """The plan with its configuration patched so that flat call `call` can succeed; None
    where the error says nothing that a configuration could mend."""
    config = copy.deepcopy(dict(plan.initial_config))
    text = error.lower()
    travel, bot = config.get("TravelAPI", {}), config.get("TradingBot", {})
    if "insufficient funds" in text or "balance is less" in text:
        for card in travel.get("credit_card_list", {}).values():
            if "balance" in card:
                card["balance"] = card["balance"] * 4 + 20_000
        if "balance" in bot.get("account_info", {}):
            bot["account_info"]["balance"] = bot["account_info"]["balance"] * 4 + 20_000
    elif "exceeded budget" in text and travel.get("budget_limit"):
        travel["budget_limit"] = travel["budget_limit"] * 4
    elif "market is closed" in text and bot:
        bot["market_status"] = "Open"
    elif "not authenticated" in text or "no user is currently logged in" in text:
        for domain in ("TwitterAPI", "TradingBot"):
            if domain in config:
                config[domain]["authenticated"] = True
        users = config.get("MessageAPI", {}).get("user_map", {})
        if users:
            config["MessageAPI"]["current_user"] = next(iter(users.values()))
    if config == plan.initial_config:
        return None
    return dataclasses.replace(plan, initial_config=config)
