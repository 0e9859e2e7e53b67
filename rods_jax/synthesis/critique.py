"""Stage IV: the rule checks that a synthesized task must pass before training sees it.

Each check yields typed remarks. A remark on the text may be cured by a rewrite; a remark
on the ground truth drops the task (paper section 2).
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Mapping, Sequence

from rods_jax.synthesis.text_rules import code_in, unknown_names
from rods_jax.tasks.profile import Profile, profile_of
from rods_jax.tasks.replay import replay, result_json
from rods_jax.tasks.trace import NO_SOURCE, ValueTrace, trace
from rods_jax.tools.env import Suite
from rods_jax.types import Category, Task, ToolSpec


class CritiqueReason(str, enum.Enum):
    # the text: a rewrite may help
    NO_SOURCE = "argument_without_source"  # nobody said or returned the value
    CODE_IN_TEXT = "code_in_text"  # the user speaks in calls
    EMPTY_TEXT = "empty_text"  # a user turn says nothing although nothing else happens
    UNKNOWN_NAME = "unknown_name"  # the text names a thing that is nowhere
    # what is withheld
    NOTHING_WITHHELD = "nothing_withheld"  # miss_*: the agent could act at once
    UNEXPLAINED = "absence_unexplained"  # what is missing is not what the category withholds
    # the ground truth: dropped
    UNKNOWN_TOOL = "unknown_tool"  # gold uses a tool that is not visible in its turn
    GOLD_FAILS = "gold_fails"  # the gold calls do not score 1.0
    NOT_REPRODUCIBLE = "not_reproducible"  # two fresh runs gave different results
    ALREADY_SATISFIED = "already_satisfied"  # a turn passes without a call
    CALL_NOT_NEEDED = "call_not_needed"  # the score is 1.0 without that call


TEXT_REASONS = frozenset({CritiqueReason.NO_SOURCE, CritiqueReason.CODE_IN_TEXT,
                          CritiqueReason.EMPTY_TEXT, CritiqueReason.UNKNOWN_NAME})


@dataclasses.dataclass(frozen=True)
class Remark:
    reason: CritiqueReason
    detail: str  # one line, for the writer and for people


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`profile` is measured on the way; None when the gold calls do not run through."""

    remarks: tuple[Remark, ...]
    profile: Profile | None

    @property
    def accepted(self) -> bool:
        return not self.remarks

    @property
    def curable(self) -> bool:
        """All remarks are about the text, so that a rewrite may help."""
        return bool(self.remarks) and all(r.reason in TEXT_REASONS for r in self.remarks)

    @property
    def feedback(self) -> str:
        return "; ".join(remark.detail for remark in self.remarks)


def critique(task: Task, suite: Suite, *, inherited: Mapping[tuple[str, str], int] | None = None,
             gold_checked: bool = False) -> Verdict:
    """All rule checks on a task with its texts.

    `inherited` is `Profile.unsourced` of the seed: a benchmark's own task may leave a value to
    inference, and its variant may do so with the same argument, no more often.
    `gold_checked` skips the costly leave-one-out runs where a task with the same gold
    calls and state has passed them.
    """
    remarks = _visible(task)
    if remarks:
        return Verdict(tuple(remarks), None)
    first, second = replay(suite, task), replay(suite, task)
    if first.progress < 1.0 or not all(result.ok for result in first.results):
        return Verdict((Remark(CritiqueReason.GOLD_FAILS, _first_failure(first)),), None)
    if first != second:
        return Verdict((Remark(CritiqueReason.NOT_REPRODUCIBLE,
                               "two runs of the gold calls gave different results"),), None)
    specs = suite.tools(task.domains)
    results = [result_json(result) for result in first.results]
    traces = trace(task, specs, results)
    remarks = [*_sources(task, traces, inherited or {}), *_texts(task, specs),
               *_names(task, suite, results)]
    remarks += _withheld(task, specs, results, traces)
    if not any(r.reason not in TEXT_REASONS for r in remarks):
        remarks += _needed(task, suite, gold_checked)
    return Verdict(tuple(remarks), profile_of(task, traces))


def _visible(task: Task) -> list[Remark]:
    return [Remark(CritiqueReason.UNKNOWN_TOOL, f"turn {t}: {call.name} is not visible")
            for t, turn in enumerate(task.turns) for call in turn.gold
            if call.name not in turn.tools]


def _first_failure(run) -> str:
    for t, outcome in enumerate(run.outcomes):
        if not outcome.passed:
            return (f"turn {t}: the gold calls do not pass (state_ok {outcome.state_ok}, "
                    f"exec_ok {outcome.exec_ok})")
    return next((f"gold call {i} fails: {result.text}"
                 for i, result in enumerate(run.results) if not result.ok),
                "the environment ended before the last turn")


def _sources(task: Task, traces: Sequence[ValueTrace],
             inherited: Mapping[tuple[str, str], int]) -> list[Remark]:
    names = [call.name for turn in task.turns for call in turn.gold]
    left, remarks = Counter(inherited), []
    for v in traces:
        if v.origin not in NO_SOURCE:
            continue
        left[names[v.call], v.argument] -= 1
        if left[names[v.call], v.argument] < 0:
            remarks.append(Remark(
                CritiqueReason.NO_SOURCE,
                f"turn {v.turn}: say the value {v.value!r} of {v.argument} of {names[v.call]}"))
    return remarks


def _texts(task: Task, specs: Sequence[ToolSpec]) -> list[Remark]:
    calls = [call for turn in task.turns for call in turn.gold]
    remarks = []
    code = code_in([turn.user for turn in task.turns], specs, calls)
    for t, (turn, found) in enumerate(zip(task.turns, code)):
        if found is not None:
            remarks.append(Remark(CritiqueReason.CODE_IN_TEXT,
                                  f"turn {t}: say in words what {found!r} does"))
        brings_tools = t > 0 and set(turn.tools) != set(task.turns[t - 1].tools)
        if not turn.user.strip() and not brings_tools:
            remarks.append(Remark(CritiqueReason.EMPTY_TEXT, f"turn {t}: say something"))
    return remarks


def _names(task: Task, suite: Suite, results: Sequence) -> list[Remark]:
    return [Remark(CritiqueReason.UNKNOWN_NAME,
                   f"turn {t}: {name!r} does not exist, leave it out or name what does")
            for t, name in unknown_names(task, suite, results)]


def _withheld(task: Task, specs: Sequence[ToolSpec], results: Sequence,
              traces: Sequence[ValueTrace]) -> list[Remark]:
    """A miss_* task must have a turn in which the agent cannot act, and there lack just what
    its category withholds: a function, or a value with all functions at hand."""
    remarks = []
    if task.category is not Category.MISS_FUNC and len({t.tools for t in task.turns}) > 1:
        remarks.append(Remark(CritiqueReason.UNEXPLAINED,
                              f"a {task.category.value} task shows other functions later on"))
    if task.category not in (Category.MISS_FUNC, Category.MISS_PARAM):
        return remarks
    asking = [t for t, turn in enumerate(task.turns) if not turn.gold]
    if not asking:
        return [*remarks, Remark(CritiqueReason.NOTHING_WITHHELD, "no turn withholds anything")]
    for t in asking:
        gold = task.turns[t + 1].gold if t + 1 < len(task.turns) else ()
        if not gold:
            remarks.append(Remark(CritiqueReason.UNEXPLAINED,
                                  f"turn {t}: what is missing here never comes"))
            continue
        if task.category is Category.MISS_FUNC:
            withheld = any(call.name not in task.turns[t].tools for call in gold)
        else:
            withheld = _lacks_value(task, t, specs, results, traces)
        if not withheld:
            remarks.append(Remark(CritiqueReason.NOTHING_WITHHELD,
                                  f"turn {t}: the agent could already act"))
    return remarks


def _lacks_value(task: Task, t: int, specs: Sequence[ToolSpec], results: Sequence,
                 traces: Sequence[ValueTrace]) -> bool:
    """Without the words of turn t + 1 more arguments of its gold calls have no source."""
    turns = list(task.turns[:t + 2])
    turns[t + 1] = dataclasses.replace(turns[t + 1], user="")
    cut = dataclasses.replace(task, turns=tuple(turns))

    def missing(values: Sequence[ValueTrace]) -> int:
        return sum(v.turn == t + 1 and v.origin in NO_SOURCE for v in values)
    return missing(trace(cut, specs, results)) > missing(traces)


def _needed(task: Task, suite: Suite, gold_checked: bool) -> list[Remark]:
    idle = replay(suite, task, silent=True)
    for t, (turn, outcome) in enumerate(zip(task.turns, idle.outcomes)):
        if turn.gold and outcome.passed:
            return [Remark(CritiqueReason.ALREADY_SATISFIED, f"turn {t} passes without a call")]
    if gold_checked:
        return []
    names = [call.name for turn in task.turns for call in turn.gold]
    for i, name in enumerate(names):
        run = replay(suite, task, drop=i, stop_at_failure=True)
        if run.progress == 1.0:
            return [Remark(CritiqueReason.CALL_NOT_NEEDED,
                           f"the task passes without gold call {i} ({name})")]
    return []
