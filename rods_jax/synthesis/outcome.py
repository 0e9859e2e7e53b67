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
    JUDGE = "judge"
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
    JUDGE_REFUSED = "judge_refused"  # the rules passed, the judge's rubric did not
    CHANGED_GOLD = "changed_gold"  # augmentation must keep the gold calls of a withheld turn


@dataclasses.dataclass(frozen=True)
class Usage:
    """What asking an endpoint took. `requests` were sent, `retries` of them again;
    `failures` of single requests by kind, also where a retry then succeeded; tokens as the
    endpoint counts them, 0 where it does not say; `seconds` with all waiting."""

    requests: int = 0
    retries: int = 0
    failures: Mapping[str, int] = dataclasses.field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        failures = Counter(self.failures) + Counter(other.failures)
        return Usage(self.requests + other.requests, self.retries + other.retries,
                     dict(sorted(failures.items())), self.prompt_tokens + other.prompt_tokens,
                     self.completion_tokens + other.completion_tokens,
                     self.seconds + other.seconds)

    def to_json(self) -> dict[str, Json]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | {
            "failures": dict(self.failures)}

    @classmethod
    def from_json(cls, row: Mapping[str, Json]) -> Usage:
        return cls(**row)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Course:
    """How an attempt at a variant of `seed` went, whatever became of it. `writer` whose text it
    has, "" where none was written; `fell_back` why that is not the writer's that was asked
    first, `unjudged` why no judge ruled on it although one was asked: kinds of failure, or ""."""

    seed: str
    step: int
    index: int
    tries: int = 0
    repairs: int = 0
    rewrites: int = 0
    writer: str = ""
    fell_back: str = ""
    unjudged: str = ""
    usage: Usage = Usage()

    def course(self) -> dict[str, str | int | Usage]:
        """These fields alone, for another outcome of the same attempt."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(Course)}


@dataclasses.dataclass(frozen=True)
class Candidate(Course):
    """A task that passed. `distance` is its base form's profile distance to the seed's."""

    task: Task
    distance: float = 0.0

    def to_json(self) -> dict[str, Json]:
        return self.course() | {"usage": self.usage.to_json(), "distance": self.distance,
                                "task": self.task.to_json()}

    @classmethod
    def from_json(cls, row: Mapping[str, Json]) -> Candidate:
        before_writers = {"tries": 1, "writer": "template"}  # what older rows leave out
        return cls(**(before_writers | dict(row) | {"task": Task.from_json(row["task"]),
                                                    "usage": _usage(row)}))


@dataclasses.dataclass(frozen=True)
class Rejection(Course):
    """`reason` is a value of the stage's own enum or of PipelineReason, that of a writer or
    a judge that could not be asked a FailureKind."""

    stage: Stage
    reason: str
    detail: str

    def to_json(self) -> dict[str, Json]:
        return {"stage": self.stage.value, "reason": self.reason, "detail": self.detail} \
            | self.course() | {"usage": self.usage.to_json()}

    @classmethod
    def from_json(cls, row: Mapping[str, Json]) -> Rejection:
        return cls(**(dict(row) | {"stage": Stage(row["stage"]), "usage": _usage(row)}))


def _usage(row: Mapping[str, Json]) -> Usage:
    return Usage.from_json(row.get("usage", {}))


Outcome = Candidate | Rejection


def outcome_from_json(row: Mapping[str, Json]) -> Outcome:
    """Either kind, told apart by the task that only a candidate has."""
    return Candidate.from_json(row) if "task" in row else Rejection.from_json(row)


_COUNTS = ("writers", "fallbacks", "unjudged")


class Funnel:
    """Counts of attempts, by the stage and reason that ended them. Mergeable, JSON."""

    def __init__(self):
        self.attempts = 0
        self.accepted = 0
        self.rewritten = 0  # accepted after a rewrite
        self.repaired = 0  # accepted after a repaired or new plan
        self.rejected: Counter[tuple[Stage, str]] = Counter()
        self.writers: Counter[str] = Counter()  # attempts that had a text, by whose it was last
        self.fallbacks: Counter[str] = Counter()  # texts of the second writer, by why
        self.unjudged: Counter[str] = Counter()  # that passed without the judge, by why
        self.usage = Usage()

    def add(self, outcome: Outcome) -> None:
        self.attempts += 1
        if isinstance(outcome, Candidate):
            self.accepted += 1
            self.rewritten += outcome.rewrites > 0
            self.repaired += outcome.tries > 1
        else:
            self.rejected[outcome.stage, outcome.reason] += 1
        for counts, what in ((self.writers, outcome.writer), (self.fallbacks, outcome.fell_back),
                             (self.unjudged, outcome.unjudged)):
            if what:
                counts[what] += 1
        self.usage += outcome.usage

    def merge(self, other: Funnel) -> None:
        self.attempts += other.attempts
        self.accepted += other.accepted
        self.rewritten += other.rewritten
        self.repaired += other.repaired
        for name in ("rejected", *_COUNTS):
            getattr(self, name).update(getattr(other, name))
        self.usage += other.usage

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
            **{name: dict(sorted(getattr(self, name).items())) for name in _COUNTS},
            "usage": self.usage.to_json(),
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Json]) -> Funnel:
        funnel = cls()
        funnel.attempts, funnel.accepted = row["attempts"], row["accepted"]
        funnel.rewritten, funnel.repaired = row["rewritten"], row["repaired"]
        for stage, by_reason in row["rejected"].items():
            for reason, n in by_reason.items():
                funnel.rejected[Stage(stage), reason] = n
        for name in _COUNTS:
            getattr(funnel, name).update(row.get(name, {}))
        funnel.usage = _usage(row)
        return funnel

    def __str__(self) -> str:
        left, lines = self.attempts, [f"{'after':<17}{'left':>8}",
                                      f"{'attempts':<17}{self.attempts:>8}"]
        for stage in Stage:
            lost = {reason: n for (s, reason), n in sorted(self.rejected.items()) if s is stage}
            left -= sum(lost.values())
            reasons = ", ".join(f"{reason} {n}" for reason, n in lost.items())
            lines.append(f"{stage.value:<17}{left:>8}" + (f"  lost: {reasons}" if lost else ""))
        for name in _COUNTS:
            if self.usage.requests and (counts := getattr(self, name)):
                lines.append(f"{name:<17}" + ", ".join(
                    f"{what} {n}" for what, n in sorted(counts.items())))
        if self.usage.requests:
            lines.append(f"{'requests':<17}{self.usage.requests:>8}  {self.usage.retries} retries, "
                         f"{self.usage.prompt_tokens} + {self.usage.completion_tokens} tokens, "
                         f"{self.usage.seconds:.0f} s")
        return "\n".join(lines)
