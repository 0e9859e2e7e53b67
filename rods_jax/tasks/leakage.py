"""Held-in evaluation tasks never enter the pool, under no other name.

A free-text source field cannot be trusted, so a candidate is compared by what it holds:
its content hash, what the user says, what the gold calls do, and its scenario. Turns are
joined first, so that a withheld function or parameter does not hide an equal story.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rods_jax.tasks.trace import words
from rods_jax.types import Json, Source, Task

VARIANT_MARK = "~"  # joins a variant's uid and scenario to its parent's


class Leak(str, enum.Enum):
    CONTENT = "same_content"  # content hash: texts and gold, blind to case and spacing
    TEXT = "same_text"  # user texts, blind to punctuation and to how turns split them
    GOLD = "same_gold"  # call names and arguments, blind to texts and to how turns split them
    SCENARIO = "same_scenario"  # the scenario, or the one that the parent came from


def root_scenario(scenario: str) -> str:
    """The scenario of the seed at the start of a line of variants."""
    return scenario.split(VARIANT_MARK, 1)[0]


def text_hash(task: Task) -> str | None:
    """Of all words the user says; None when nothing is said."""
    said = words(" ".join(turn.user for turn in task.turns))
    return _hash(said) if said else None


def gold_hash(task: Task) -> str | None:
    """Of all gold calls in order, strings compared by their words, numbers by value.
    None for a task without gold arguments: too little to tell tasks apart."""
    calls = [[call.name, _plain(dict(call.arguments))] for turn in task.turns for call in turn.gold]
    return _hash(calls) if any(arguments for _, arguments in calls) else None


def crossing(train: Iterable[Task], held_in: Sequence[Task]) -> float:
    """Share of held-in tasks whose scenario also trains."""
    scenarios = {task.scenario for task in train}
    return sum(task.scenario in scenarios for task in held_in) / max(len(held_in), 1)


class HeldOutGuard:
    """Refuses candidates that equal a held-in evaluation task.

    A variant whose line began at a held-in scenario is refused too. With `siblings_cross` the
    split itself puts siblings on both sides: seeds pass and scenarios are not looked at, but a
    variant with a held-in task's texts or gold is still refused. `counts` says how many were
    refused, by reason.
    """

    def __init__(self, held_in: Iterable[Task] = (), *, siblings_cross: bool = False):
        self._siblings_cross = siblings_cross
        self._content, self._texts, self._golds, self._scenarios = set(), set(), set(), set()
        for task in held_in:
            self._content.add(task.content_hash)
            self._texts.add(text_hash(task))
            self._golds.add(gold_hash(task))
            self._scenarios.add(task.scenario)
        self._texts.discard(None)
        self._golds.discard(None)
        self.counts: Counter[Leak] = Counter()

    def leak(self, task: Task) -> Leak | None:
        """The reason why the task must stay out, or None. Pure: counts nothing."""
        if self._siblings_cross and task.source is Source.SEED:
            return None
        if task.content_hash in self._content:
            return Leak.CONTENT
        if not self._siblings_cross and (
                task.scenario in self._scenarios or root_scenario(task.scenario) in self._scenarios):
            return Leak.SCENARIO
        if text_hash(task) in self._texts:
            return Leak.TEXT
        if gold_hash(task) in self._golds:
            return Leak.GOLD
        return None

    def refuse(self, task: Task) -> Leak | None:
        """As `leak`, and counts the refusal."""
        reason = self.leak(task)
        if reason is not None:
            self.counts[reason] += 1
        return reason

    def to_json(self) -> dict[str, int]:
        return {reason.value: self.counts[reason] for reason in Leak}


def _plain(value: Json) -> Json:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return " ".join(words(value)) or value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _hash(value: Json) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
