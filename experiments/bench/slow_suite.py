"""A tool that takes as long as its task says, and a chat format in which any message calls it.

Weights that nobody has trained write nonsense; here every complete message of it is one call,
whose result depends on what was said. Nothing imports jax, so worker processes start quickly.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from rods_jax.tools.env import UserTurn
from rods_jax.tools.suites import SuiteName, SuiteSpec
from rods_jax.types import (
    Category, ParsedStep, Task, ToolCall, ToolResult, ToolSpec, Turn, TurnOutcome)

SPEC = SuiteSpec(SuiteName.CUSTOM, "experiments.bench.slow_suite:make_suite")
TOOL = "look_up"


@dataclasses.dataclass(frozen=True)
class Talk:
    """Shape of the rollouts, in tokens but for `calls`. message: of the mean message, where all
    tokens are equally likely. most, least: of a tool result."""

    prompt: int = 512
    calls: int = 4
    message: int = 32
    least: int = 50
    most: int = 200

    @property
    def length(self) -> int:
        """What few rollouts exceed: all results of full length, messages of one and a half."""
        return self.prompt + self.calls * (self.most + self.message * 3 // 2)


def make_task(talk: Talk, number: int, seconds: float) -> Task:
    """`seconds`: how long each call takes. It does not change a token."""
    uid = f"slow-{number}"
    prompt = " ".join(str(i * i + number) for i in range(talk.prompt))
    return Task(uid, ("slow",), Category.BASE,
                {"seconds": seconds, "least": talk.least, "most": talk.most},
                (Turn(prompt, (), (TOOL,)),), uid)


# ---------------------------------------------------------------- the tool


class SlowEnv:
    """Implements Environment: one turn, which anything said passes."""

    def __init__(self, task: Task):
        self.task, self._begun = task, False

    def begin_turn(self) -> UserTurn | None:
        if self._begun:
            return None
        self._begun = True
        return UserTurn(0, self.task.turns[0].user, self.task.turns[0].tools)

    def execute(self, calls: Sequence[ToolCall]) -> tuple[ToolResult, ...]:
        config = self.task.initial_config
        results = []
        for call in calls:
            time.sleep(config["seconds"])
            n = call.arguments["n"]
            words = range(config["least"] + n % (config["most"] - config["least"] + 1))
            results.append(ToolResult(" ".join(str(n + i * i) for i in words), True))
        return tuple(results)

    def end_turn(self, said: str) -> TurnOutcome:
        return TurnOutcome(True, True)


class SlowSuite:
    """As much of a Suite as rollouts need."""

    name = "slow"
    domains = ("slow",)

    def tools(self, domains: Sequence[str]) -> tuple[ToolSpec, ...]:
        return (ToolSpec(TOOL, "Look a number up.", {
            "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
            "slow"),)

    def make_env(self, task: Task, hints: bool = False) -> SlowEnv:
        return SlowEnv(task)


def make_suite() -> SlowSuite:
    return SlowSuite()


# ---------------------------------------------------------------- the chat format


class NumberFormat:
    """Implements ChatFormat: texts are numbers, each of them one id. The first ids, one of
    `message`, end a message."""

    rewrites = False
    pad_id = 0

    def __init__(self, vocab_size: int, message: int):
        self.vocab_size = vocab_size
        self.stop_ids = tuple(range(max(1, vocab_size // message)))

    def start(self, task: Task, tools: Sequence[ToolSpec]) -> NumberDialogue:
        return NumberDialogue(self)


class NumberDialogue:
    """Implements Dialogue; it has nothing to remember."""

    def __init__(self, form: NumberFormat):
        self._form = form

    def clone(self) -> NumberDialogue:
        return self

    def prompt(self, turn: UserTurn) -> list[int]:
        return self._ids(turn.text)

    def user(self, turn: UserTurn) -> list[int]:
        return self._ids(turn.text)

    def results(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[int]:
        return self._ids(" ".join(result.text for result in results))

    def errors(self, errors: Sequence[str]) -> list[int]:
        return self._ids("0")

    def parse(self, ids: Sequence[int]) -> ParsedStep:
        return ParsedStep((ToolCall(TOOL, {"n": sum(ids)}),))

    def step(self, calls: Sequence[ToolCall], text: str = "") -> list[int]:
        return [*self._ids(text), self._form.stop_ids[0]]

    def text(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def _ids(self, text: str) -> list[int]:
        first = len(self._form.stop_ids)
        return [first + int(word) % (self._form.vocab_size - first) for word in text.split()]
