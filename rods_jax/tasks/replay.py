"""Play calls that are already written down: any transcript, or a task's own gold calls."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence

from rods_jax.tools.env import Suite
from rods_jax.types import Json, Task, ToolCall, ToolResult, TurnOutcome

Transcript = Sequence[Sequence[Sequence[ToolCall]]]  # turns of steps of calls


@dataclasses.dataclass(frozen=True)
class Replay:
    """`results` by flat index of the calls that ran; `outcomes` of the turns played;
    `n_turns` turns of the task, `n_given` of the transcript."""

    results: tuple[ToolResult, ...]
    outcomes: tuple[TurnOutcome, ...]
    n_turns: int
    n_given: int

    @property
    def progress(self) -> float:
        """Share of the expected turns that passed (paper: R_P)."""
        return sum(o.passed for o in self.outcomes) / self.n_turns

    @property
    def valid(self) -> bool:
        """The verdict on the whole: as many turns as the task has, and every one passed.
        A transcript that was cut off, or goes on after the last turn, is not valid."""
        return (self.n_given == self.n_turns == len(self.outcomes)
                and all(o.passed for o in self.outcomes))


def play(suite: Suite, task: Task, transcript: Transcript, *,
         stop_at_failure: bool = False) -> Replay:
    """Plays the transcript in a fresh environment, each turn closed with the expert's words.

    A shorter transcript ends early and a longer one is cut; `Replay.valid` is false for
    both. `stop_at_failure` ends at the first turn that did not pass.
    """
    env = suite.make_env(task)
    results: list[ToolResult] = []
    outcomes: list[TurnOutcome] = []
    for steps in itertools.islice(transcript, len(task.turns)):
        turn = env.begin_turn()
        for calls in steps:
            results.extend(env.execute(calls))
        outcomes.append(env.end_turn(suite.gold_reply(task, turn.index)))
        if stop_at_failure and not outcomes[-1].passed:
            break
    return Replay(tuple(results), tuple(outcomes), len(task.turns), len(transcript))


def gold_transcript(task: Task) -> tuple[tuple[tuple[ToolCall, ...], ...], ...]:
    """The gold calls as a transcript, one call a step."""
    return tuple(tuple((call,) for call in turn.gold) for turn in task.turns)


def replay(suite: Suite, task: Task, *, drop: int | None = None, silent: bool = False,
           stop_at_failure: bool = False) -> Replay:
    """The gold calls of every turn, then the expert's closing words.

    `drop` leaves out the call with that flat index; `silent` leaves out all calls;
    `stop_at_failure` ends at the first turn that did not pass.
    """
    flat = itertools.count()
    left = [[step for step in steps if next(flat) != drop and not silent]
            for steps in gold_transcript(task)]
    return play(suite, task, left, stop_at_failure=stop_at_failure)


def result_json(result: ToolResult) -> Json:
    """What a tool answered as JSON; an answer that is not JSON is a JSON string."""
    try:
        return json.loads(result.text)
    except ValueError:
        return result.text
