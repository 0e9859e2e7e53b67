"""Rewards of a finished rollout, all in [0, 1]. Host only: nothing here imports jax.

    PROGRESS  R_P = (1/N) * sum over the N expected user turns of state_ok * exec_ok
    BINARY    1 iff every expected turn passed
    FORMAT    stage 1 of training: messages that parse, calls that run

The denominator of R_P is the number of EXPECTED turns: a turn never reached, a truncated
rollout and an early stop are zeros.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

from rods_jax.types import EndReason, Task, Trajectory


class RewardKind(str, enum.Enum):
    PROGRESS = "progress"
    BINARY = "binary"
    FORMAT = "format"


def progress(trajectory: Trajectory) -> float:
    """Passed turns / expected turns (paper: R_P)."""
    return _passed(trajectory) / trajectory.n_turns


def binary(trajectory: Trajectory) -> float:
    """1.0 iff all expected turns passed, else 0.0."""
    return float(_passed(trajectory) == trajectory.n_turns)


def format_reward(trajectory: Trajectory, task: Task) -> float:
    """Share of messages that parse x mean over turns of the share of calls that ran.

    Messages: 1 - n_malformed / n_steps, 0 when nothing was said. A turn in which calls were
    made counts 1 - n_errors / n_calls; one without calls counts 0 where the gold has some
    and 1 where it has none, so silence never pays. The mean is over the expected turns;
    where the run itself ended the rollout at a failed turn (FAILED_TURN) it is over the
    turns reached, because correctness is not what this reward measures.
    """
    _passed(trajectory)  # the same checks
    if len(task.turns) != trajectory.n_turns:
        raise ValueError(f"trajectory of {trajectory.task_uid} expects {trajectory.n_turns} turns, "
                         f"task {task.uid} has {len(task.turns)}: pass the task it came from")
    if not trajectory.n_steps or not trajectory.outcomes:
        return 0.0
    parsed = 1.0 - trajectory.n_malformed / trajectory.n_steps
    ran = 0.0
    for turn, outcome in zip(task.turns, trajectory.outcomes):
        if outcome.n_calls:
            ran += 1.0 - outcome.n_errors / outcome.n_calls
        else:
            ran += 0.0 if turn.gold else 1.0
    stopped = trajectory.end is EndReason.FAILED_TURN
    return parsed * ran / (len(trajectory.outcomes) if stopped else trajectory.n_turns)


def reward(kind: RewardKind, trajectory: Trajectory, task: Task) -> float:
    """The reward of that kind. NaN where the end is not usable (a broken environment, tokens
    that drifted): such a sample says nothing about the policy and leaves the group."""
    if not trajectory.end.usable:
        return math.nan
    if kind is RewardKind.PROGRESS:
        return progress(trajectory)
    if kind is RewardKind.BINARY:
        return binary(trajectory)
    return format_reward(trajectory, task)


def _passed(trajectory: Trajectory) -> int:
    if trajectory.n_turns < 1:
        raise ValueError(f"trajectory of {trajectory.task_uid} expects {trajectory.n_turns} turns: "
                         "a task has at least one")
    if len(trajectory.outcomes) > trajectory.n_turns:
        raise ValueError(f"trajectory of {trajectory.task_uid} has {len(trajectory.outcomes)} turn "
                         f"outcomes for {trajectory.n_turns} expected turns: count each turn once")
    return sum(outcome.passed for outcome in trajectory.outcomes)


def call_error_share(trajectories: Sequence[Trajectory]) -> float | None:
    """Of the calls in turns that were ended, how many were answered with an error."""
    outcomes = [outcome for t in trajectories for outcome in t.outcomes]
    calls = sum(outcome.n_calls for outcome in outcomes)
    return sum(outcome.n_errors for outcome in outcomes) / calls if calls else None
