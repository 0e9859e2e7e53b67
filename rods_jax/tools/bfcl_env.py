"""Runs BFCL's tool classes safely, and scores a rollout turn by turn.

A call is a visible tool name and literal keyword arguments; it reaches the class by getattr.
What the classes share between instances is cut here: mutable default arguments, long-context
records that enter a state by reference, the precision that mpmath and decimal keep globally.
Result texts equal those of BFCL's own executor for every call that runs there.
"""

from __future__ import annotations

import collections
import copy
import decimal
import enum
import functools
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rods_jax.tools.bfcl_data import MODULES, tool_class, tool_domains, tool_module
from rods_jax.tools.env import UserTurn
from rods_jax.types import Category, Json, Task, ToolCall, ToolResult, TurnOutcome

MAX_STRING = 20_000  # characters of one string argument
MAX_NODES = 5_000  # values in all arguments of one call
MAX_DEPTH = 12
MAX_INT = 2**256  # magnitude
MAX_DIGITS = 1_000  # precision of logarithm, square_root, round_number
MAX_POWER_BITS = 14_000  # size of an integer power, below the 4300 digits Python prints


class Scoring(enum.Enum):
    """NUMERIC: 65 equals 65.0, true differs from 1, and a turn without gold calls wants an
    answer and no call. OFFICIAL: what the package's checker does turn by turn: exact texts,
    turns without gold calls always pass. A task is officially solved iff all turns pass."""

    NUMERIC = "numeric"
    OFFICIAL = "official"


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
    instance._load_scenario(copy.deepcopy(dict(config)), long_context=long_context)
    if domain == "TravelAPI" and long_context:  # records of a module constant, by reference
        instance.credit_card_list = copy.deepcopy(instance.credit_card_list)
        instance.booking_record = copy.deepcopy(instance.booking_record)
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


def _undefined(name: Any) -> str:
    shown = name[:80] if isinstance(name, str) else type(name).__name__
    return f"name {shown!r} is not defined"


def _is_error(value: Any) -> bool:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return isinstance(value, Mapping) and "error" in value


def _run_isolated(domain: str, run: Callable[[], Any]) -> tuple[str, bool]:
    """Text and ok of one call, with global precision and the shared weather table restored."""
    if domain == "MathAPI":
        mpmath = tool_module(domain).mpmath
        dps = mpmath.mp.dps
        try:
            with decimal.localcontext():
                value = run()
                return _text(value), not _is_error(value)
        finally:
            mpmath.mp.dps = dps
    if domain == "VehicleControlAPI":
        table = tool_module(domain).LONG_WEATHER_EXTENSION
        before = dict(table)
        try:
            value = run()
            return _text(value), not _is_error(value)
        finally:
            table.clear()
            table.update(before)
    value = run()
    return _text(value), not _is_error(value)


class Sandbox:
    """One private state: an instance of each domain's class, loaded with a copied config."""

    def __init__(self, domains: Sequence[str], config: Mapping[str, Json], long_context: bool):
        self.instances = {d: _instance(d, config.get(d, {}), long_context) for d in domains}

    def call(self, call: ToolCall) -> ToolResult:
        """Runs one call; any failure becomes an error text. `ok` is False also where the
        tool itself answered with an error."""
        try:
            return self._call(call)
        except Exception as error:  # RecursionError and MemoryError included
            return ToolResult(f"Error during execution: {error}", False)

    def _call(self, call: ToolCall) -> ToolResult:
        domain = tool_domains().get(call.name) if isinstance(call.name, str) else None
        if domain is None or domain not in self.instances:
            raise ValueError(_undefined(call.name))
        if not isinstance(call.arguments, Mapping):
            raise ValueError("the arguments are not an object")
        complaint = _complaint(call.arguments, [MAX_NODES])
        if complaint:
            raise ValueError(complaint)
        # Copies, because the classes keep and extend lists they were given.
        arguments = _tamed(call.name, copy.deepcopy(dict(call.arguments)))
        for name, make in _mutable_defaults(domain, call.name).items():
            arguments.setdefault(name, make())
        if call.name == "power" and _power_bits(arguments) > MAX_POWER_BITS:
            raise ValueError("the power has too many digits")
        self._refuse_cycle(call.name, arguments)
        method = getattr(self.instances[domain], call.name)
        return ToolResult(*_run_isolated(domain, lambda: method(**arguments)))

    def _refuse_cycle(self, name: str, arguments: Mapping[str, Any]) -> None:
        """A directory put into itself would be a tree without end."""
        source = arguments.get("source")
        if name not in ("cp", "mv") or source != arguments.get("destination"):
            return
        entry = self.instances["GorillaFileSystem"]._current_dir.contents.get(source)
        if hasattr(entry, "contents"):
            raise ValueError(f"{name}: cannot put directory '{source}' into itself")

    def state(self) -> dict[str, dict[str, Any]]:
        """What a comparison sees: the attributes without a leading underscore."""
        return {
            domain: {k: v for k, v in vars(instance).items() if not k.startswith("_")}
            for domain, instance in self.instances.items()
        }


# ------------------------------------------------------------------------- comparison


def same_value(a: Any, b: Any) -> bool:
    """Equality with numbers as numbers: 65 == 65.0, True != 1. Recurses into containers and
    into the file system's nodes; RecursionError on a cycle."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return a == b
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_value(v, b[k]) for k, v in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same_value(x, y) for x, y in zip(a, b, strict=True))
    if hasattr(a, "contents"):  # Directory; parent pointers are no part of its value
        return a.name == b.name and same_value(a.contents, b.contents)
    return bool(a == b)


def same_state(a: Sandbox, b: Sandbox, scoring: Scoring = Scoring.NUMERIC) -> bool:
    try:
        if scoring is Scoring.OFFICIAL:
            return a.state() == b.state()
        return same_value(a.state(), b.state())
    except RecursionError:
        return False


def _plain(value: Json) -> Json:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value


def answer_key(text: str, scoring: Scoring = Scoring.NUMERIC) -> str:
    """What two result texts are compared by: their JSON value, else the text itself."""
    if scoring is Scoring.OFFICIAL:
        return text
    try:
        return json.dumps(_plain(json.loads(text)), sort_keys=True)
    except (ValueError, RecursionError, OverflowError):
        return text


# ------------------------------------------------------------------------- environment


class BFCLEnv:
    """The Environment of one rollout (see env.py), with a gold twin that always advances.

    A turn with gold calls passes iff the agent called something, both states are equal and
    this turn's gold outputs are a sub-multiset of all outputs the agent has seen so far.
    """

    def __init__(self, task: Task, scoring: Scoring = Scoring.NUMERIC):
        long_context = task.category is Category.LONG_CONTEXT
        unknown = [d for d in task.domains if d not in MODULES]
        if unknown:
            raise ValueError(f"task {task.uid} names the unknown BFCL domain {unknown[0]!r}")
        self.task = task
        self._scoring = scoring
        self._agent = Sandbox(task.domains, task.initial_config, long_context)
        self._gold = Sandbox(task.domains, task.initial_config, long_context)
        self._turn = -1
        self._open = False
        self._seen: collections.Counter[str] = collections.Counter()
        self._n_calls = self._n_errors = 0

    def begin_turn(self) -> UserTurn | None:
        if self._open:
            raise ValueError("begin_turn during a turn: call end_turn first")
        if self._turn + 1 >= len(self.task.turns):
            return None
        self._turn += 1
        self._open = True
        self._n_calls = self._n_errors = 0
        turn = self.task.turns[self._turn]
        before = set(self.task.turns[self._turn - 1].tools) if self._turn else set(turn.tools)
        new = tuple(name for name in turn.tools if name not in before)
        return UserTurn(self._turn, turn.user, turn.tools, new)

    def execute(self, calls: Sequence[ToolCall]) -> tuple[ToolResult, ...]:
        if not self._open:
            raise ValueError("execute outside a turn: call begin_turn first")
        return tuple(self._execute(call) for call in calls)

    def _execute(self, call: ToolCall) -> ToolResult:
        self._n_calls += 1
        if call.name in self.task.turns[self._turn].tools:
            result = self._agent.call(call)
        else:
            result = ToolResult(f"Error during execution: {_undefined(call.name)}", False)
        self._n_errors += not result.ok
        self._seen[answer_key(result.text, self._scoring)] += 1
        return result

    def end_turn(self, said: str) -> TurnOutcome:
        if not self._open:
            raise ValueError("end_turn outside a turn: call begin_turn first")
        self._open = False
        gold = self.task.turns[self._turn].gold
        texts = [self._gold.call(call).text for call in gold]
        if gold:
            wanted = collections.Counter(answer_key(t, self._scoring) for t in texts)
            state_ok = same_state(self._agent, self._gold, self._scoring)
            exec_ok = self._n_calls > 0 and wanted <= self._seen
        elif self._scoring is Scoring.OFFICIAL:
            state_ok = exec_ok = True
        else:
            state_ok = self._n_calls == 0
            exec_ok = state_ok and bool(said.strip())
        return TurnOutcome(state_ok, exec_ok, self._n_calls, self._n_errors)


def replay(task: Task) -> tuple[ToolResult, ...]:
    """Results of all gold calls in order, on a fresh state."""
    sandbox = Sandbox(task.domains, task.initial_config, task.category is Category.LONG_CONTEXT)
    return tuple(sandbox.call(call) for turn in task.turns for call in turn.gold)
