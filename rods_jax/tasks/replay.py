"""Run a task's own gold calls in a fresh environment, whole or with something left out."""

from __future__ import annotations

import dataclasses
import json

from rods_jax.tools.env import Suite
from rods_jax.types import Json, Task, ToolResult, TurnOutcome


@dataclasses.dataclass(frozen=True)
class Replay:
    """`results` by flat index of the calls that ran; `outcomes` of the turns reached."""

    results: tuple[ToolResult, ...]
    outcomes: tuple[TurnOutcome, ...]
    n_turns: int

    @property
    def progress(self) -> float:
        """Share of the expected turns that passed (paper: R_P)."""
        return sum(o.passed for o in self.outcomes) / self.n_turns


def replay(suite: Suite, task: Task, *, drop: int | None = None, silent: bool = False,
           stop_at_failure: bool = False) -> Replay:
    """The gold calls of every turn, then the expert's closing words.

    `drop` leaves out the call with that flat index; `silent` leaves out all calls;
    `stop_at_failure` ends at the first turn that did not pass.
    """
    env = suite.make_env(task)
    results, outcomes, flat = [], [], 0
    while (turn := env.begin_turn()) is not None:
        for call in task.turns[turn.index].gold:
            if not silent and flat != drop:
                results.extend(env.execute((call,)))
            flat += 1
        outcomes.append(env.end_turn(suite.gold_reply(task, turn.index)))
        if stop_at_failure and not outcomes[-1].passed:
            break
    return Replay(tuple(results), tuple(outcomes), len(task.turns))


def result_json(result: ToolResult) -> Json:
    """What a tool answered as JSON; an answer that is not JSON is a JSON string."""
    try:
        return json.loads(result.text)
    except ValueError:
        return result.text
