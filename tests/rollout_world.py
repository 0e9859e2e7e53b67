"""A small world and a small chat format in which a rollout can have any length and any ending.
Nothing here imports jax, so that worker processes start quickly with it."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence

from worker_suite import Marked

from rods_jax.tools.env import UserTurn
from rods_jax.tools.host import Crash, ToolCrash
from rods_jax.tools.scoring import Scoring
from rods_jax.tools.twin import GoldRuns, TwinEnv
from rods_jax.types import Category, ParsedStep, Task, ToolCall, ToolResult, ToolSpec, Turn

READ, BOOM, EXIT = (ToolCall(name, {}) for name in ("read", "boom", "exit"))
ADD = tuple(ToolCall("add", {"n": n}) for n in (1, 2))
SAFE = ("read", "add")


def make_task(uid: str, prompt: str = "hello there", turns: int = 1,
              texts: Sequence[str] = ("ok",), tools: Sequence[str] = SAFE,
              gold: Sequence[ToolCall] = ()) -> Task:
    """`texts`: what read answers, one after the other. Turns without gold calls want words and
    no call; `gold` is that of the last turn."""
    made = [Turn(prompt if i == 0 else f"and {i}" + "!" * i, (), tuple(tools))
            for i in range(turns - 1)]
    made.append(Turn(prompt if turns == 1 else "at last", tuple(gold), tuple(tools)))
    return Task(uid, ("small",), Category.BASE, {"texts": list(texts)}, tuple(made), uid)


# ------------------------------------------------------------------------------ the tools


class World:
    """State: a total, and how many texts were read."""

    def __init__(self, task: Task, leave: Callable[[], None]):
        self.total = self.n_read = 0
        self._texts, self._leave = task.initial_config["texts"], leave

    def call(self, call, visible):
        if call.name not in visible:
            return ToolResult(f"no {call.name}", False)
        if call.name == "boom":
            raise LookupError("the simulator broke")
        if call.name == "exit":
            self._leave()
        if call.name == "add":
            self.total += call.arguments["n"]
            return ToolResult(str(self.total), True)
        self.n_read += 1
        return ToolResult(self._texts[(self.n_read - 1) % len(self._texts)], True)

    def same(self, other, mode):
        return self.total == other.total

    def snapshot(self):
        return copy.copy(self)


def _exit():
    os._exit(3)


def _crash():
    raise ToolCrash(Crash.DIED, "", EXIT)


class SmallSuite:
    """`leave`: what the tool exit does. In a worker it ends the process; here it says so."""

    name = "small"
    domains = ("small",)

    def __init__(self, leave: Callable[[], None]):
        self._world = lambda task: World(task, leave)
        self._gold = GoldRuns(self._world)

    def tools(self, domains):
        number = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        none = {"type": "object", "properties": {}}
        return tuple(ToolSpec(name, name, number if name == "add" else none, "small")
                     for name in ("read", "add", "boom", "exit"))

    def make_env(self, task, hints=False):
        env = TwinEnv(task, self._world(task), self._gold, Scoring())
        return Marked(env) if hints else env


SUITE = SmallSuite(_crash)


def make() -> SmallSuite:
    """For workers."""
    return SmallSuite(_exit)


# ------------------------------------------------------------------------------ the format

END, GO, USER, ACT, BAD = range(5)
CALLS = (READ, *ADD, BOOM, EXIT)  # one id each, from 5 on
FIRST = 5 + len(CALLS)  # of the characters' ids
N_CHARS = 24


class SmallFormat:
    """One id a call, one a character. The id of padding is also one that ends a message, and
    what is inserted holds it too, as the ends of user messages do in ChatML. Each insertion
    begins with the number of messages so far, so that a dialogue which heard one too many, or
    those of another rollout, shows.

    `rewrites`: a new turn's row has the prompts and closing words of all turns, but neither
    calls nor results."""

    vocab_size = FIRST + N_CHARS
    stop_ids = (END, GO)
    pad_id = END

    def __init__(self, rewrites: bool = False):
        self.rewrites = rewrites

    def start(self, task: Task, tools: Sequence[ToolSpec]) -> SmallDialogue:
        return SmallDialogue(self)


def chars(text: str) -> list[int]:
    return [FIRST + ord(c) % N_CHARS for c in text]


class SmallDialogue:
    def __init__(self, form: SmallFormat, n_said: int = 0, history: Sequence[int] = ()):
        self.form, self.n_said, self.history = form, n_said, list(history)

    def clone(self):
        return SmallDialogue(self.form, self.n_said, self.history)

    def prompt(self, turn: UserTurn) -> list[int]:
        """As many ids as `turn.text` has characters, and 3 more; 1 where it has none."""
        self.history = [USER, *chars(turn.text), END, ACT] if turn.text else [ACT]
        return list(self.history)

    def user(self, turn: UserTurn) -> list[int]:
        new = [self._count(), USER, *chars(turn.text), END, ACT]
        self.history += new
        return list(self.history) if self.form.rewrites else new

    def results(self, calls, results) -> list[int]:
        """As many ids as the results have characters, and 3 more."""
        return [self._count(), *chars("".join(r.text for r in results)), END, ACT]

    def errors(self, errors) -> list[int]:
        return [self._count(), BAD, GO, ACT]

    def parse(self, ids) -> ParsedStep:
        self.n_said += 1
        calls = tuple(CALLS[i - 5] for i in ids if 5 <= i < FIRST)
        words = [i for i in ids if i >= FIRST]
        if ids[-1] == GO:
            return ParsedStep(calls, errors=() if calls else ("no call",))
        if calls:
            return ParsedStep(calls, errors=("calls in a closing message",))
        self.history += words
        return ParsedStep(text=" ".join(map(str, words)))

    def _count(self) -> int:
        return FIRST + self.n_said % N_CHARS
