"""Stage II: run a plan in the real environment, so that ground truth exists before text.

The plan's calls run turn by turn on one shared state; a `Ref` is replaced by the value
that the named earlier call returned. When a call fails the suite patches the plan, or it
is planned again, at most `k_max` tries in all (paper section 2: 3).
"""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Callable, Mapping, Sequence

from rods_jax.tasks.replay import result_json
from rods_jax.tools.env import Suite
from rods_jax.types import Category, Json, Plan, Ref, Source, Task, ToolCall, Turn


class ExecuteReason(str, enum.Enum):
    NO_CALLS = "no_calls"  # the plan holds no call at all
    BAD_REFERENCE = "bad_reference"  # a Ref to a later call or to a value that is not there
    CALL_FAILED = "call_failed"  # the tool answered with an error
    ENV_ENDED = "env_ended"  # the environment had fewer turns than the plan


@dataclasses.dataclass(frozen=True)
class Executed:
    """`calls` per turn with literal arguments; `results` their JSON results, flat."""

    plan: Plan
    calls: tuple[tuple[ToolCall, ...], ...]
    results: tuple[Json, ...]
    tries: int = 1
    repairs: int = 0

    def result_objects(self) -> tuple[Mapping[str, Json], ...]:
        """Results as the suite's writer takes them: what is no object becomes
        {"result": value}."""
        return tuple(r if isinstance(r, Mapping) else {"result": r} for r in self.results)


@dataclasses.dataclass(frozen=True)
class ExecuteFailure:
    """`call` is the flat index of the call that failed, -1 where no call did."""

    reason: ExecuteReason
    call: int
    error: str
    tries: int = 1
    repairs: int = 0


def execute(plan: Plan, suite: Suite, rng: random.Random, replan: Callable[[], Plan],
            k_max: int = 3) -> Executed | ExecuteFailure:
    """Runs the plan, repaired or replaced after each failure, at most `k_max` times."""
    repairs = 0
    for tries in range(1, k_max + 1):
        outcome = run_plan(plan, suite)
        outcome = dataclasses.replace(outcome, tries=tries, repairs=repairs)
        if isinstance(outcome, Executed) or tries == k_max:
            return outcome
        patched = None
        if outcome.call >= 0:
            patched = suite.repair(plan, outcome.call, outcome.error, rng)
        repairs += patched is not None
        plan = replan() if patched is None else patched
    raise ValueError(f"k_max is {k_max}: allow at least one try")


def run_plan(plan: Plan, suite: Suite) -> Executed | ExecuteFailure:
    """One run from the plan's fresh initial state; stops at the first failure."""
    if not any(plan.turns):
        return ExecuteFailure(ExecuteReason.NO_CALLS, -1, "the plan holds no call")
    env = suite.make_env(_provisional(plan, suite))
    calls, results = [], []
    for planned_turn in plan.turns:
        if env.begin_turn() is None:
            return ExecuteFailure(ExecuteReason.ENV_ENDED, len(results),
                                  f"the environment ended after {len(calls)} turns")
        done = []
        for planned in planned_turn:
            flat = len(results)
            try:
                arguments = resolve(dict(planned.arguments), results)
            except LookupError as error:
                return ExecuteFailure(ExecuteReason.BAD_REFERENCE, flat, error.args[0])
            call = ToolCall(planned.name, arguments)
            (result,) = env.execute((call,))
            if not result.ok:
                return ExecuteFailure(ExecuteReason.CALL_FAILED, flat, result.text)
            done.append(call)
            results.append(result_json(result))
        env.end_turn("")
        calls.append(tuple(done))
    return Executed(plan, tuple(calls), tuple(results))


def resolve(value: Json | Ref, results: Sequence[Json]) -> Json:
    """`value` with every Ref inside replaced. Raises LookupError that names the Ref."""
    if isinstance(value, Ref):
        return _look_up(value, results)
    if isinstance(value, Mapping):
        return {key: resolve(item, results) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [resolve(item, results) for item in value]
    return value


def _look_up(ref: Ref, results: Sequence[Json]) -> Json:
    if not 0 <= ref.call < len(results):
        raise LookupError(f"reference to call {ref.call}, but only {len(results)} ran before")
    found = results[ref.call]
    for key in ref.path:
        try:
            found = found[key]
        except (KeyError, IndexError, TypeError):
            raise LookupError(f"call {ref.call} returned nothing at {list(ref.path)}") from None
    return found


def _provisional(plan: Plan, suite: Suite) -> Task:
    """A task to execute in: no gold, no text, every tool of the domains visible."""
    tools = tuple(spec.name for spec in suite.tools(plan.domains))
    return Task(
        uid="provisional", domains=plan.domains, category=Category.BASE,
        initial_config=plan.initial_config, turns=(Turn("", (), tools),) * len(plan.turns),
        scenario="provisional", source=Source.GENERATED, parent=plan.parent)
