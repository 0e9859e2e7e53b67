"""What becomes of one synthesis attempt, and the funnel that counts them."""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Mapping

from rods_jax.types import Json, Task


class Stage(str, enum.Enum):
    """Where an attempt ended; in the order in which an attempt passes them. CRASH: the
    suite raised, at whatever stage; its reasons are names of exception types."""

    CRASH = "crash"
    PLAN = "plan"
    EXECUTE = "execute"
    WRITE = "write"
    CRITIQUE = "critique"
    PROFILE = "profile"
    AUGMENT = "augment"
    AUGMENT_CRITIQUE = "augment_critique"
    HELD_OUT = "held_out"
    NOVELTY = "novelty"


class PipelineReason(str, enum.Enum):
    """Reasons that are not those of one stage's own enum."""

    NO_PLAN = "no_plan"  # the suite has no variant of this seed
    WRONG_TURNS = "wrong_number_of_turns"  # the writer wrote more or fewer texts than turns
    TOO_FAR = "profile_too_far"
    NOT_SUITED = "not_suited"  # the story does not lend itself to the category
    CHANGED_GOLD = "changed_gold"  # augmentation must keep the gold calls of a withheld turn
    DUPLICATE = "duplicate"  # content hash known


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A task that passed. `distance` is its base form's profile distance to the seed's."""

    task: Task
    seed: str
    step: int
    index: int
    distance: float = 0.0
    tries: int = 1
    repairs: int = 0
    rewrites: int = 0

    def to_json(self) -> dict[str, Json]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return fields | {"task": self.task.to_json()}

    @classmethod
    def from_json(cls, row: Mapping[str, Json]) -> Candidate:
        return cls(**(dict(row) | {"task": Task.from_json(row["task"])}))


@dataclasses.dataclass(frozen=True)
class Rejection:
    """`reason` is a value of the stage's own enum or of PipelineReason."""

    stage: Stage
    reason: str
    detail: str
    seed: str
    step: int
    index: int
    tries: int = 0
    repairs: int = 0
    rewrites: int = 0

    def to_json(self) -> dict[str, Json]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return fields | {"stage": self.stage.value}

    @classmethod
    def from_json(cls, row: Mapping[str, Json]) -> Rejection:
        return cls(**(dict(row) | {"stage": Stage(row["stage"])}))


Outcome = Candidate | Rejection


def outcome_from_json(row: Mapping[str, Json]) -> Outcome:
    """Either kind, told apart by the task that only a candidate has."""
    return Candidate.from_json(row) if "task" in row else Rejection.from_json(row)


class Funnel:
    """Counts of attempts, by the stage and reason that ended them. Mergeable, JSON."""

    def __init__(self):
        self.attempts = 0
        self.accepted = 0
        self.rewritten = 0  # accepted after a rewrite
        self.repaired = 0  # accepted after a repaired or new plan
        self.rejected: Counter[tuple[Stage, str]] = Counter()

    def add(self, outcome: Outcome) -> None:
        self.attempts += 1
        if isinstance(outcome, Candidate):
            self.accepted += 1
            self.rewritten += outcome.rewrites > 0
            self.repaired += outcome.tries > 1
        else:
            self.rejected[outcome.stage, outcome.reason] += 1

    def merge(self, other: Funnel) -> None:
        self.attempts += other.attempts
        self.accepted += other.accepted
        self.rewritten += other.rewritten
        self.repaired += other.repaired
        self.rejected.update(other.rejected)

    @property
    def accepted_share(self) -> float:
        return self.accepted / self.attempts if self.attempts else 0.0

    def to_json(self) -> dict[str, Json]:
        return {
            "attempts": self.attempts, "accepted": self.accepted,
            "rewritten": self.rewritten, "repaired": self.repaired,
            "rejected": {stage.value: by_reason for stage in Stage
                         if (by_reason := {reason: n for (s, reason), n
                                           in sorted(self.rejected.items()) if s is stage})},
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Json]) -> Funnel:
        funnel = cls()
        funnel.attempts, funnel.accepted = row["attempts"], row["accepted"]
        funnel.rewritten, funnel.repaired = row["rewritten"], row["repaired"]
        for stage, by_reason in row["rejected"].items():
            for reason, n in by_reason.items():
                funnel.rejected[Stage(stage), reason] = n
        return funnel

    def __str__(self) -> str:
        left, lines = self.attempts, [f"{'attempts':<17}{self.attempts:>8}"]
        for stage in Stage:
            lost = {reason: n for (s, reason), n in sorted(self.rejected.items()) if s is stage}
            left -= sum(lost.values())
            reasons = ", ".join(f"{reason} {n}" for reason, n in lost.items())
            lines.append(f"{stage.value:<17}{left:>8}" + (f"  lost: {reasons}" if lost else ""))
        return "\n".join(lines)
