"""Held-in evaluation tasks never enter the pool, under no other name.

A free-text source field cannot be trusted, so a candidate is compared by what it holds:
its content hash, what the user says, what the gold calls do, how the user says it with all
entities masked, and its scenario. Turns are joined first, so that a withheld function or
parameter does not hide an equal story. Repeating a call or a turn, or changing their order,
does hide it: no writer here does so.

The masked form refuses too, although a suite's own held-in tasks may share structures with
its seeds by design: a variant in the very sentences of a held-in task, about another file and
another sum, would train on the wording that the evaluation asks. It needs other words; where
a suite has only a few for a short request, some variants are lost (docs/synthesis.md counts
them).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence

from rods_jax.tasks.fingerprint import fingerprint
from rods_jax.types import Source, Task

VARIANT_MARK = "~"  # joins a variant's uid and scenario to its parent's


class Leak(str, enum.Enum):
    CONTENT = "same_content"  # content hash: texts and gold, blind to case and spacing
    # user texts, blind to punctuation, spelling, fillers and to how turns split them
    TEXT = "same_text"
    GOLD = "same_gold"  # call names and arguments, blind to texts and to how turns split them
    MASKED = "same_masked_text"  # user texts with the entities of each task masked
    SCENARIO = "same_scenario"  # the scenario, or the one that the parent came from


def root_scenario(scenario: str) -> str:
    """The scenario of the seed at the start of a line of variants."""
    return scenario.split(VARIANT_MARK, 1)[0]


def crossing(train: Iterable[Task], held_in: Sequence[Task]) -> float:
    """Share of held-in tasks whose scenario also trains."""
    scenarios = {task.scenario for task in train}
    return sum(task.scenario in scenarios for task in held_in) / max(len(held_in), 1)


_FIELDS = {Leak.CONTENT: ("content",), Leak.TEXT: ("text", "core"), Leak.GOLD: ("gold",),
           Leak.MASKED: ("masked",)}


class HeldOutGuard:
    """Refuses candidates that equal a held-in evaluation task.

    A variant whose line began at a held-in scenario is refused too. With `siblings_cross` the
    split itself puts siblings on both sides: seeds pass and scenarios are not looked at, but a
    variant with a held-in task's texts, masked or not, or gold is still refused. Seeds may
    share a masked text with a held-in task: a split is what it is. `counts` says how many were
    refused, by reason.
    """

    def __init__(self, held_in: Iterable[Task] = (), *, siblings_cross: bool = False):
        self._siblings_cross = siblings_cross
        self._scenarios: set[str] = set()
        self._hashes: dict[Leak, set[str | None]] = {leak: set() for leak in _FIELDS}
        for task in held_in:
            self._scenarios.add(task.scenario.casefold())
            held = fingerprint(task)
            for leak, names in _FIELDS.items():
                self._hashes[leak].update(getattr(held, name) for name in names)
        for hashes in self._hashes.values():
            hashes.discard(None)
        self.counts: Counter[Leak] = Counter()

    def leak(self, task: Task) -> Leak | None:
        """The reason why the task must stay out, or None. Pure: counts nothing."""
        if self._siblings_cross and task.source is Source.SEED:
            return None
        scenario = task.scenario.casefold()
        if task.content_hash in self._hashes[Leak.CONTENT]:
            return Leak.CONTENT
        if not self._siblings_cross and (
                {scenario, root_scenario(scenario)} & self._scenarios):
            return Leak.SCENARIO
        found = fingerprint(task)
        for leak, names in _FIELDS.items():
            if leak is Leak.MASKED and task.source is Source.SEED:
                continue
            if any(getattr(found, name) in self._hashes[leak] for name in names):
                return leak
        return None

    def refuse(self, task: Task) -> Leak | None:
        """As `leak`, and counts the refusal."""
        reason = self.leak(task)
        if reason is not None:
            self.counts[reason] += 1
        return reason

    def to_json(self) -> dict[str, int]:
        return {reason.value: self.counts[reason] for reason in Leak}

