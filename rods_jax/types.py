"""The nouns every part of the loop shares. Host only: nothing here imports jax.

Dim letters, used as suffixes of array names (`rewards_TxG`):

    T  tasks in a batch          P  prompt tokens shared by a group
    G  rollouts a task           S  tokens after the prompt
    L  sequence length           V  vocabulary
    R  packed rows               D  model width
    N  pool capacity             A  rows offered to the pool at once
    B  sequences in a forward pass (slots, rows), C tokens in a chunk
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

_HOLDERS = (dict, list, tuple)
Json = Any  # null, bool, int, float, str, list of Json, dict[str, Json]

TASK_SCHEMA_VERSION = 1


def copy_json(value: Json) -> Json:
    """Deep copy of JSON data, tuples made lists; several times faster than copy.deepcopy."""
    if isinstance(value, dict):
        return {k: copy_json(v) if isinstance(v, _HOLDERS) else v for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [copy_json(v) if isinstance(v, _HOLDERS) else v for v in value]
    return value


class Category(str, enum.Enum):
    """What the task withholds from the agent (paper section 1)."""

    BASE = "base"
    MISS_FUNC = "miss_func"
    MISS_PARAM = "miss_param"
    LONG_CONTEXT = "long_context"


CATEGORIES: tuple[Category, ...] = tuple(Category)


class Source(str, enum.Enum):
    SEED = "seed"
    GENERATED = "generated"


class Author(enum.IntEnum):
    """Who wrote a token. Only SAMPLED tokens carry loss."""

    PROMPT = 0  # system text, tools and the first user turn
    SAMPLED = 1  # the policy
    INSERTED = 2  # tool results and later user turns


class EndReason(str, enum.Enum):
    DONE = "done"  # every user turn was answered
    FAILED_TURN = "failed_turn"  # stopped at the first turn that scored 0 (a config choice)
    STEP_LIMIT = "step_limit"  # too many assistant steps in one turn
    TOKEN_LIMIT = "token_limit"  # a message or the whole dialogue ran out of tokens
    ENV_ERROR = "env_error"  # the environment itself broke; never scored as hardness
    TOOL_CRASH = "tool_crash"  # a call took the worker down or ran past a limit; scored as failed
    DRIFT = "drift"  # device and host disagree on the tokens so far; dropped from the loss

    @property
    def usable(self) -> bool:
        """Whether the rollout says anything about the policy."""
        return self not in (EndReason.ENV_ERROR, EndReason.DRIFT)

    @property
    def truncated(self) -> bool:
        return self in (EndReason.STEP_LIMIT, EndReason.TOKEN_LIMIT)


@dataclasses.dataclass(frozen=True)
class ToolSpec:
    """A tool as shown to the agent. `parameters` is a JSON schema of type object;
    the order of its properties is the order of positional arguments."""

    name: str
    description: str
    parameters: Mapping[str, Json]
    domain: str


@dataclasses.dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Json]


@dataclasses.dataclass(frozen=True)
class ToolResult:
    """Text shown to the agent, and whether the call ran without an error."""

    text: str
    ok: bool


@dataclasses.dataclass(frozen=True)
class Turn:
    """One user turn. `gold` is empty where the agent must ask or decline.
    `tools` names every tool visible from this turn on."""

    user: str
    gold: tuple[ToolCall, ...]
    tools: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Task:
    """A multi-turn tool-use task. `scenario` is what a held-in task must not share
    with a training task; `parent` is the uid of the seed a variant came from."""

    uid: str
    domains: tuple[str, ...]
    category: Category
    initial_config: Mapping[str, Json]
    turns: tuple[Turn, ...]
    scenario: str
    source: Source = Source.SEED
    parent: str | None = None
    generation: int = 0

    def __post_init__(self):
        for name, kind in (("category", Category), ("source", Source)):
            value = getattr(self, name)
            if not isinstance(value, kind):  # a plain string must not be told apart later
                if value not in [member.value for member in kind]:
                    raise ValueError(f"task {self.uid}: {name} {value!r} is not one of "
                                     + ", ".join(member.value for member in kind))
                object.__setattr__(self, name, kind(value))

    @property
    def content_hash(self) -> str:
        """Hash of what the agent sees and must do, blind to uid, case and spacing."""
        content = [
            [" ".join(t.user.lower().split()), [[c.name, dict(c.arguments)] for c in t.gold]]
            for t in self.turns
        ]
        text = json.dumps(content, sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def to_json(self) -> dict[str, Json]:
        return {
            "schema_version": TASK_SCHEMA_VERSION,
            "uid": self.uid,
            "domains": list(self.domains),
            "category": self.category.value,
            "initial_config": dict(self.initial_config),
            "turns": [
                {
                    "user": t.user,
                    "gold": [{"name": c.name, "arguments": dict(c.arguments)} for c in t.gold],
                    "tools": list(t.tools),
                }
                for t in self.turns
            ],
            "scenario": self.scenario,
            "source": self.source.value,
            "parent": self.parent,
            "generation": self.generation,
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Json]) -> Task:
        """Raises ValueError that names the first unknown, missing or mistyped field."""
        check_fields("task", row, {
            "schema_version": int, "uid": str, "domains": list, "category": str,
            "initial_config": dict, "turns": list, "scenario": str, "source": str,
            "parent": (str, type(None)), "generation": int,
        })
        if row["schema_version"] != TASK_SCHEMA_VERSION:
            raise ValueError(
                f"schema_version is {row['schema_version']}, this code reads {TASK_SCHEMA_VERSION}")
        if row["category"] not in {c.value for c in Category}:
            raise ValueError(f"category {row['category']!r} is not one of "
                             + ", ".join(c.value for c in Category))
        if row["source"] not in {s.value for s in Source}:
            raise ValueError(f"source {row['source']!r} is not one of seed, generated")
        if not row["uid"]:
            raise ValueError("uid is empty: give every task a name")
        if row["generation"] < 0:
            raise ValueError(f"generation is {row['generation']}: 0 is a seed")
        _texts("domains", row["domains"])
        if not row["turns"]:
            raise ValueError("turns is empty: a task needs at least one user turn")
        turns = []
        for i, turn in enumerate(row["turns"]):
            check_fields(f"turns[{i}]", turn, {"user": str, "gold": list, "tools": list})
            _texts(f"turns[{i}].tools", turn["tools"])
            for j, call in enumerate(turn["gold"]):
                check_fields(f"turns[{i}].gold[{j}]", call, {"name": str, "arguments": dict})
            gold = tuple(ToolCall(c["name"], c["arguments"]) for c in turn["gold"])
            turns.append(Turn(turn["user"], gold, tuple(turn["tools"])))
        return cls(
            uid=row["uid"], domains=tuple(row["domains"]), category=Category(row["category"]),
            initial_config=row["initial_config"], turns=tuple(turns), scenario=row["scenario"],
            source=Source(row["source"]), parent=row["parent"], generation=row["generation"],
        )


def _texts(where: str, items: list) -> None:
    for i, item in enumerate(items):
        if not isinstance(item, str):
            raise ValueError(f"{where}[{i}] has the wrong type {type(item).__name__}")


def check_fields(where: str, row: Json, types: Mapping[str, Any]) -> None:
    """ValueError that names the first field which is unknown, missing or of a wrong type."""
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} is not an object")
    for key in row:
        if key not in types:
            raise ValueError(f"{where} has an unknown field {key!r}")
    for key, kind in types.items():
        if key not in row:
            raise ValueError(f"{where} lacks the field {key!r}")
        wrong_bool = isinstance(row[key], bool) and kind is int
        if not isinstance(row[key], kind) or wrong_bool:
            raise ValueError(f"{where}.{key} has the wrong type {type(row[key]).__name__}")


# ---------------------------------------------------------------- what a rollout yields


@dataclasses.dataclass(frozen=True)
class TurnOutcome:
    """How one user turn ended. The turn counts (paper: R_P) iff both flags hold."""

    state_ok: bool
    exec_ok: bool
    n_calls: int = 0
    n_errors: int = 0  # calls answered with an error

    @property
    def passed(self) -> bool:
        return self.state_ok and self.exec_ok


@dataclasses.dataclass(frozen=True)
class ParsedStep:
    """One assistant message, parsed. Never an exception: what could not be read is in
    `errors`, each with a reason. No calls and no errors means the message ends the turn."""

    calls: tuple[ToolCall, ...] = ()
    text: str = ""
    reasoning: str = ""
    errors: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """The token ids exactly as sampled and as inserted, never tokenized again.

    `rows`: where in the ids each row begins. A rollout is one row, append-only from its prompt
    on, unless the chat format rewrites earlier turns (see text/formats.py): then every user
    turn begins a row with the whole prompt of that turn, and nothing before it is context.
    """

    task_uid: str
    sample: int  # index in the group
    tokens_L: np.ndarray  # int32 [L]
    author_L: np.ndarray  # int8 [L], an Author each
    logprobs_L: np.ndarray  # float32 [L], the sampler's, 0 where not sampled
    outcomes: tuple[TurnOutcome, ...]  # of the turns reached
    n_turns: int  # expected turns
    end: EndReason
    n_steps: int = 0  # assistant messages
    n_malformed: int = 0  # messages with a parse error
    rows: tuple[int, ...] = (0,)

    def __post_init__(self):
        shapes = {self.tokens_L.shape, self.author_L.shape, self.logprobs_L.shape}
        if len(shapes) != 1 or self.tokens_L.ndim != 1:
            raise ValueError(f"trajectory of {self.task_uid}: arrays disagree in shape: {shapes}")
        length = len(self.tokens_L)
        if self.rows[:1] != (0,) or (length and any(a >= b for a, b in self.spans)):
            raise ValueError(f"trajectory of {self.task_uid}: rows {self.rows} do not divide its "
                             f"{length} tokens")

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(begin, end) of each row."""
        return tuple(zip(self.rows, (*self.rows[1:], len(self.tokens_L))))


# ---------------------------------------------------------------- what synthesis passes on


@dataclasses.dataclass(frozen=True)
class Ref:
    """Stands for a value that an earlier call yields: the value at `path` (keys and
    indices) in the JSON result of the call with flat index `call`."""

    call: int
    path: tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class PlannedCall:
    name: str
    arguments: Mapping[str, Json | Ref]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Stage I of synthesis: a call structure before any text exists (paper section 2).
    `narrative` is the planner's own material for the writer; JSON only."""

    domains: tuple[str, ...]
    initial_config: Mapping[str, Json]
    turns: tuple[tuple[PlannedCall, ...], ...]
    parent: str | None
    narrative: Mapping[str, Json]
