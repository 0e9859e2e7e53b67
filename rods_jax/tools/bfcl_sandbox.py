"""BFCL's tool classes, run safely: one private state a sandbox.

A call is a tool name and literal keyword arguments; it reaches the class by getattr. What the
classes share between instances is cut here: mutable default arguments, long-context records
that enter a state by reference, the precision that mpmath and decimal keep globally. Result
texts equal those of BFCL's own executor, but for what is clamped or refused here (huge
precisions, powers and trees) and for the records that rollouts no longer share.
"""

from __future__ import annotations

import contextlib
import copy
import decimal
import functools
import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rods_jax.tools.bfcl_data import tool_class, tool_domains, tool_module
from rods_jax.types import Category, Json, Task, ToolCall, ToolResult, copy_json

MAX_STRING = 20_000  # characters of one string argument
MAX_NODES = 5_000  # values in all arguments of one call
MAX_DEPTH = 12
MAX_INT = 2**256  # magnitude
MAX_ENTRIES = 20_000  # of the file system
MAX_DIGITS = 1_000  # precision of logarithm, square_root, round_number
_PRECISE = frozenset({"logarithm", "square_root"})  # tools that set a global precision
MAX_POWER_BITS = 14_000  # size of an integer power, below the 4300 digits Python prints


# ------------------------------------------------------------------------- arguments


def _complaint(value: Any, budget: list[int], depth: int = 0) -> str | None:
    """Why a value is not an acceptable literal, or None. `budget[0]` counts down."""
    budget[0] -= 1
    if budget[0] < 0 or depth > MAX_DEPTH:
        return "the arguments are too large"
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, int):
        return None if abs(value) < MAX_INT else "a number is too large"
    if isinstance(value, float):
        return None if math.isfinite(value) else "a number is not finite"
    if isinstance(value, str):
        if len(value) > MAX_STRING:
            return "a string is too long"
        return "a string holds a NUL character" if "\0" in value else None
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            return "the keys of an object must be strings"
        children = list(value.values())
    elif isinstance(value, (list, tuple)):
        children = list(value)
    else:
        return f"{type(value).__name__} is not a literal"
    return next((c for v in children if (c := _complaint(v, budget, depth + 1))), None)


def _clamp(value: Any, low: int, high: int) -> Any:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return min(max(value, low), high) if number else value


def _power_bits(arguments: Mapping[str, Any]) -> float:
    """Bits of an integer power; 0 where floats make an overflow fail at once."""
    base, exponent = arguments.get("base"), arguments.get("exponent")
    if isinstance(base, int) and isinstance(exponent, int):
        return abs(base).bit_length() * abs(exponent)
    return 0


def _tamed(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments without those that take minutes or gigabytes (found by measurement)."""
    if name in ("logarithm", "square_root") and "precision" in arguments:
        precision = _clamp(arguments["precision"], -MAX_DIGITS, MAX_DIGITS)
        return arguments | {"precision": precision}
    if name == "round_number" and "decimal_places" in arguments:
        places = _clamp(arguments["decimal_places"], -MAX_DIGITS, MAX_DIGITS)
        return arguments | {"decimal_places": places}
    return arguments


@functools.cache
def _mutable_defaults(domain: str, tool: str) -> Mapping[str, Any]:
    """Defaults that calls could share; every one of the classes' is an empty container."""
    parameters = inspect.signature(getattr(tool_class(domain), tool)).parameters.values()
    return {p.name: type(p.default) for p in parameters if isinstance(p.default, (list, dict))}


# ------------------------------------------------------------------------- one state


def _instance(domain: str, config: Mapping[str, Json], long_context: bool) -> Any:
    instance = tool_class(domain)()
    if domain == "MathAPI":
        return instance
    instance._load_scenario(copy_json(dict(config)), long_context=long_context)
    if domain == "TravelAPI" and long_context:  # records of a module constant, by reference
        instance.credit_card_list = copy_json(instance.credit_card_list)
        instance.booking_record = copy_json(instance.booking_record)
    return instance


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        try:
            return json.dumps(value)
        except Exception:  # Decimal, mpf and their like: the package falls back the same way
            return str(value)
    return str(value)


def undefined(name: Any) -> str:
    shown = name[:80] if isinstance(name, str) else type(name).__name__
    return f"name {shown!r} is not defined"


def _is_error(value: Any) -> bool:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return isinstance(value, Mapping) and "error" in value


def _run(run: Callable[[], Any]) -> ToolResult:
    value = run()
    return ToolResult(_text(value), not _is_error(value))


def _run_isolated(name: str, run: Callable[[], Any]) -> ToolResult:
    """One call, with what it may change for every instance put back: the precision of mpmath
    and decimal, the weather table (the text is made before, as values print with it)."""
    if name in _PRECISE:
        mpmath = tool_module("MathAPI").mpmath
        dps = mpmath.mp.dps
        try:
            with decimal.localcontext():
                return _run(run)
        finally:
            mpmath.mp.dps = dps
    if name == "get_outside_temperature_from_google":
        table = tool_module("VehicleControlAPI").LONG_WEATHER_EXTENSION
        before = dict(table)
        try:
            return _run(run)
        finally:
            table.clear()
            table.update(before)
    return _run(run)


class Sandbox:
    """One private state: an instance of each domain's class, loaded with a copied config when
    it is first looked at. ValueError where a domain is unknown."""

    def __init__(self, domains: Sequence[str], config: Mapping[str, Json], long_context: bool):
        for domain in domains:
            tool_class(domain)
        self.domains = tuple(domains)
        self._config, self._long_context = config, long_context
        self._instances: dict[str, Any] = {}

    def instance(self, domain: str) -> Any:
        if domain not in self._instances:
            self._instances[domain] = _instance(
                domain, self._config.get(domain, {}), self._long_context)
        return self._instances[domain]

    @property
    def touched(self) -> frozenset[str]:
        """Domains whose state may no longer be the initial one."""
        return frozenset(self._instances)

    def call(self, call: ToolCall) -> ToolResult:
        """Runs one call; any failure becomes an error text, but MemoryError, which is the
        process's affair. `ok` is False also where the tool itself answered with an error."""
        try:
            return self._call(call)
        except MemoryError:
            raise
        except Exception as error:  # RecursionError included
            return ToolResult(f"Error during execution: {error}", False)

    def _call(self, call: ToolCall) -> ToolResult:
        domain = tool_domains().get(call.name) if isinstance(call.name, str) else None
        if domain is None or domain not in self.domains:
            raise ValueError(undefined(call.name))
        if not isinstance(call.arguments, Mapping):
            raise ValueError("the arguments are not an object")
        complaint = _complaint(call.arguments, [MAX_NODES])
        if complaint:
            raise ValueError(complaint)
        # Copies, because the classes keep and extend lists they were given.
        arguments = _tamed(call.name, copy_json(dict(call.arguments)))
        for name, make in _mutable_defaults(domain, call.name).items():
            arguments.setdefault(name, make())
        if call.name == "power" and _power_bits(arguments) > MAX_POWER_BITS:
            raise ValueError("the power has too many digits")
        method = getattr(self.instance(domain), call.name)
        with self._bounded_tree(call.name, arguments):
            return _run_isolated(call.name, lambda: method(**arguments))

    @contextlib.contextmanager
    def _bounded_tree(self, name: str, arguments: Mapping[str, Any]) -> Iterator[None]:
        """Undoes a cp or mv that leaves a directory inside itself, or a tree that listing
        tools take minutes for: copies share what they hold, so a few calls double it."""
        if name not in ("cp", "mv"):
            yield
            return
        system = self.instance("GorillaFileSystem")
        here = system._current_dir.contents
        name_of = arguments.get("destination")
        there = getattr(here.get(name_of if isinstance(name_of, str) else ""), "contents", None)
        places = [(place, dict(place)) for place in (here, there) if place is not None]
        yield
        # What was moved into itself, and where one stands after a removal, is not below the root.
        if any(_n_entries(place) > MAX_ENTRIES
               for place in (system.root.contents, here, there or {})):
            for place, before in places:
                place.clear()
                place.update(before)
            raise ValueError(f"{name}: the directory would hold itself, or the tree over "
                             f"{MAX_ENTRIES} entries")

    def state(self, domains: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        """What a comparison sees: the attributes without a leading underscore, of these domains
        or of all."""
        return {
            domain: {k: v for k, v in vars(self.instance(domain)).items() if k[0] != "_"}
            for domain in (self.domains if domains is None else domains)
        }


    def snapshot(self) -> Sandbox:
        """A copy of the comparable state, which must not be called."""
        frozen = Sandbox(self.domains, self._config, self._long_context)
        for domain, instance in self._instances.items():
            frozen._instances[domain] = copy_ = object.__new__(type(instance))
            vars(copy_).update((k, _copy_state(v)) for k, v in vars(instance).items()
                               if k[0] != "_")
        return frozen


def _n_entries(contents: dict[str, Any]) -> float:
    """Files and directories below, each as often as a walk meets it; infinite where a directory
    holds itself, or where the tree is deeper than Python recurses."""
    known: dict[int, float] = {}

    def count(contents: dict[str, Any]) -> float:
        if id(contents) not in known:
            known[id(contents)] = math.inf  # for whoever meets it inside itself
            known[id(contents)] = len(contents) + sum(
                count(entry.contents) for entry in contents.values() if hasattr(entry, "contents"))
        return known[id(contents)]

    try:
        return count(contents)
    except RecursionError:
        return math.inf


def _copy_state(value: Any) -> Any:
    """Faster than deepcopy on the plain data that states mostly are."""
    if type(value) is dict:
        return {k: _copy_state(v) for k, v in value.items()}
    if type(value) is list:
        return [_copy_state(v) for v in value]
    return value if isinstance(value, (str, int, float, type(None))) else copy.deepcopy(value)


def sandbox_of(task: Task) -> Sandbox:
    """The task's initial state. ValueError where it names an unknown domain."""
    return Sandbox(task.domains, task.initial_config, task.category is Category.LONG_CONTEXT)


def replay(task: Task) -> tuple[ToolResult, ...]:
    """Results of all gold calls in order, on a fresh state."""
    sandbox = sandbox_of(task)
    return tuple(sandbox.call(call) for turn in task.turns for call in turn.gold)
