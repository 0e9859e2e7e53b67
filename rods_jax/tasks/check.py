"""Whether tasks and tools fit together: on paper, then by running the gold calls."""

from __future__ import annotations

import dataclasses
import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rods_jax.tasks.replay import Replay, replay, result_json
from rods_jax.tasks.trace import NO_SOURCE, trace, words
from rods_jax.tools import schema
from rods_jax.tools.env import Suite
from rods_jax.types import Category, Task, ToolSpec, TurnOutcome

WITHHOLDING = (Category.MISS_FUNC, Category.MISS_PARAM)
LONG_TEXT = 4  # words; shorter values can be known codes, file names or one of a few options


@dataclasses.dataclass(frozen=True)
class Fault:
    """`where` is the field of the task, `what` is wrong with it and the remedy. `arguments`: it
    is about how a gold call's arguments fit the declared schema."""

    uid: str
    where: str
    what: str
    arguments: bool = False

    def __str__(self) -> str:
        return f"task {self.uid}, {self.where}: {self.what}"

    def accepted_by_tools(self, verdict: Verdict) -> bool:
        """Whether the task's gold ran and scored all the same, so that the document is off."""
        return self.arguments and verdict.sound and not verdict.errors


def faults(tasks: Iterable[Task], tools: Sequence[ToolSpec]) -> tuple[Fault, ...]:
    """Everything in the tasks that the declared tools do not allow; () where all fits."""
    found, seen = [], set()
    for task in tasks:
        if task.uid in seen:
            found.append(Fault(task.uid, "uid", "another task has it; give every task its own"))
        seen.add(task.uid)
        found += [Fault(task.uid, *fault) for fault in _faults(task, tools)]
    return tuple(found)


def _faults(task: Task, tools: Sequence[ToolSpec]) -> Iterator[tuple]:
    """The fields of each Fault after the uid."""
    declared = {spec.name: spec for spec in tools if spec.domain in task.domains}
    for domain in task.domains:
        if domain not in {spec.domain for spec in tools}:
            yield "domains", (f"no tool is declared of domain {domain!r}"
                              + _closest(domain, {spec.domain for spec in tools}))
    if not any(turn.gold for turn in task.turns):
        yield "turns", "no turn has a gold call; give at least one"
    if task.category in WITHHOLDING and all(turn.gold for turn in task.turns):
        yield "category", (f"{task.category.value} needs a turn with empty gold, in which the "
                           "agent must ask or decline; add it or write base")
    before: tuple[str, ...] = ()
    for t, turn in enumerate(task.turns):
        for name, count in Counter(turn.tools).items():
            if count > 1:
                yield f"turns[{t}].tools", f"{name!r} is listed {count} times; list it once"
            if name not in declared:
                yield f"turns[{t}].tools", _undeclared(name, declared, tools)
        gone = [name for name in before if name not in turn.tools]
        if gone:
            yield f"turns[{t}].tools", (f"{gone[0]!r} was visible in the turn before; a tool "
                                        "stays, so list it again")
        before = turn.tools
        for c, call in enumerate(turn.gold):
            where = f"turns[{t}].gold[{c}]"
            if call.name not in declared:
                yield where, _undeclared(call.name, declared, tools)
                continue
            if call.name not in turn.tools:
                yield where, f"{call.name!r} is not visible; add it to turns[{t}].tools"
            wrong = schema.complaint(call.arguments, declared[call.name].parameters)
            if wrong:
                yield (where, f"{call.name}: {wrong}; correct the call or the tool's parameters",
                       True)


def _undeclared(name: str, declared: dict[str, ToolSpec], tools: Sequence[ToolSpec]) -> str:
    other = next((spec.domain for spec in tools if spec.name == name), None)
    if other is not None:
        return f"{name!r} is a tool of domain {other!r}; add it to domains"
    return f"{name!r} is not a declared tool{_closest(name, declared)}"


def _closest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else "; declare it or correct the name"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How a task's own gold calls do. `progress` is the share of turns they pass, which must
    be 1; `reason` says why it is less; `errors` are gold calls that were answered with one.
    `unsourced` are "tool.argument" of values that nobody said or returned: the agent has to
    look around or infer them. `unsaid` are those that are texts of LONG_TEXT words or more,
    which nobody can guess word by word: such a task can fail for ever."""

    uid: str
    progress: float
    reason: str
    errors: tuple[str, ...]
    unsourced: tuple[str, ...]
    unsaid: tuple[str, ...]

    @property
    def sound(self) -> bool:
        return self.progress == 1.0


def verdict(task: Task, suite: Suite, played: Replay | Exception | None = None) -> Verdict:
    """Runs the gold calls in a fresh environment of the suite; `played` is what they did
    elsewhere, or why they did not come to an end there."""
    try:
        played, why = replay(suite, task) if played is None else played, "the gold did not run"
    except ValueError as error:
        played, why = error, "no environment"
    if isinstance(played, Exception):
        return Verdict(task.uid, 0.0, f"{why}: {played}", (), (), ())
    names = [call.name for turn in task.turns for call in turn.gold]
    errors = tuple(f"{name}: {result.text}"
                   for name, result in zip(names, played.results, strict=True) if not result.ok)
    results = [result_json(result) for result in played.results]
    open_ = [(f"{names[v.call]}.{v.argument}", v.value)
             for v in trace(task, suite.tools(task.domains), results) if v.origin in NO_SOURCE]
    failed = next(((t, o) for t, o in enumerate(played.outcomes) if not o.passed), None)
    return Verdict(
        task.uid, played.progress, _reason(task, *failed) if failed else "", errors,
        tuple(sorted({name for name, _ in open_})),
        tuple(f"{name}: {value}" for name, value in open_
              if isinstance(value, str) and len(words(value)) >= LONG_TEXT))


def _reason(task: Task, t: int, outcome: TurnOutcome) -> str:
    if not task.turns[t].gold:
        return f"turn {t} has no gold calls and the closing words alone do not pass it"
    if not outcome.state_ok:
        return (f"turn {t}: two runs of the same calls end in different states; keep state in "
                "plain data and draw no random numbers")
    return f"turn {t}: two runs of the same calls answer differently; draw no random numbers"
