"""The environment contract: what an agent acts on, and what knows the ground truth.

An `Environment` serves one rollout of one task:

    env = suite.make_env(task)             # fresh state, nothing shared with any other
    while (turn := env.begin_turn()) is not None:
        results = env.execute(calls)       # as often as the agent likes
        outcome = env.end_turn(said)       # scores this turn

`execute` never raises for what a model wrote and never evaluates it: a call is a name and
literal arguments, dispatched to a declared tool that is visible in this turn. `end_turn`
compares with a second copy of the state on which the gold calls ran.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from rods_jax.types import Plan, Task, ToolCall, ToolResult, ToolSpec, TurnOutcome


@dataclasses.dataclass(frozen=True)
class UserTurn:
    """`tools` are all tools visible now; `new_tools` those that became visible with this
    turn (empty in the first turn). `text` may be empty when the turn only brings tools."""

    index: int
    text: str
    tools: tuple[str, ...]
    new_tools: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Name:
    """A thing that a text names, and the `spellings` under which data may hold it instead (a
    city's airport code)."""

    said: str
    spellings: tuple[str, ...] = ()


@runtime_checkable
class NamesThings(Protocol):
    """A suite that can tell more names in a text than files, handles and ids."""

    def names_in(self, text: str) -> tuple[Name, ...]:
        """All names in a user text of things that must exist for the text to make sense."""


class Environment(Protocol):
    task: Task

    def begin_turn(self) -> UserTurn | None:
        """The next user turn, or None after the last. The first call gives turn 0."""

    def execute(self, calls: Sequence[ToolCall]) -> tuple[ToolResult, ...]:
        """Runs the calls in order, one result each; later calls run after a failed one."""

    def end_turn(self, said: str) -> TurnOutcome:
        """Scores the turn; `said` is the agent's closing message without calls."""


class Suite(Protocol):
    """A family of tools with its tasks and with what synthesis needs of the domain."""

    name: str
    domains: tuple[str, ...]
    split_names: tuple[str, ...]
    held_out: tuple[str, ...]  # splits kept for evaluation, whole, however few a run looks at
    plans: bool  # whether `plan` and what follows it are there, so that variants can be made
    siblings_cross: bool  # whether held-in tasks may have siblings in "train", as declared

    def split(self, name: str) -> Sequence[Task]:
        """The tasks of "train", "held_in" or another of `split_names`, categories
        interleaved, the same ones every time. Raises ValueError on another name."""

    def wordings(self, task: Task, count: int) -> Sequence[Task]:
        """The task and up to count - 1 others that differ from it in the users' texts alone,
        the same ones every time; just the task where the suite has no other words for it."""

    def tools(self, domains: Sequence[str]) -> tuple[ToolSpec, ...]:
        """All tools of these domains, in a fixed order."""

    def make_env(self, task: Task, hints: bool = False) -> Environment:
        """A fresh rollout of the task. `hints`: failed calls are answered with what was wrong
        and what would help (the environment-augmentation baseline); never in evaluation."""

    def gold_reply(self, task: Task, turn: int) -> str:
        """A closing message an expert would say in that turn, after the gold calls."""

    # Synthesis (paper section 2). All draw from `rng` alone: same rng, same answer.

    def plan(self, seed: Task, rng: random.Random) -> Plan:
        """Stage I: a plan with the seed's structural profile, its BASE form."""

    def repair(self, plan: Plan, call: int, error: str, rng: random.Random) -> Plan | None:
        """Stage II: a plan patched after flat call `call` failed; None: plan again."""

    def write(self, plan: Plan, results: Sequence[Mapping], rng: random.Random,
              feedback: str = "") -> tuple[str, ...]:
        """Stage III: all user turns at once. `results` are the JSON results by flat call.
        `feedback` is the critic's remark on an earlier text."""

    def augment(self, task: Task, category: str, rng: random.Random) -> Task | None:
        """Stage V: the same story in another category; None where it does not lend itself."""
