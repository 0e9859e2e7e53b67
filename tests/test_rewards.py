"""Rewards against the definitions, counted by hand and by a plain loop."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rods_jax.rewards import RewardKind, binary, format_reward, progress, reward
from rods_jax.types import Category, EndReason, Task, ToolCall, Trajectory, Turn, TurnOutcome


def trajectory(outcomes, n_turns, end=EndReason.DONE, n_steps=4, n_malformed=0):
    return Trajectory("t", 0, np.zeros(3, np.int32), np.zeros(3, np.int8),
                      np.zeros(3, np.float32), tuple(outcomes), n_turns, end, n_steps, n_malformed)


def task(gold_flags):
    call = ToolCall("f", {})
    turns = tuple(Turn("do", (call,) if g else (), ("f",)) for g in gold_flags)
    return Task("t", ("d",), Category.BASE, {}, turns, "s")


PASS, STATE, EXEC = TurnOutcome(True, True), TurnOutcome(True, False), TurnOutcome(False, True)


def test_progress_counts_expected_turns():
    assert progress(trajectory([PASS, PASS, STATE, EXEC], 4)) == 0.5
    assert progress(trajectory([PASS], 4, EndReason.FAILED_TURN)) == 0.25
    assert progress(trajectory([], 3, EndReason.TOKEN_LIMIT)) == 0.0


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=6), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_progress_and_binary_by_a_plain_loop(flags, unreached):
    n = len(flags) + unreached
    if n == 0:
        return
    r = trajectory([TurnOutcome(a, b) for a, b in flags], n)
    expected = 0
    for a, b in flags:
        expected += 1 if a and b else 0
    assert progress(r) == expected / n
    assert binary(r) == (1.0 if expected == n else 0.0)
    assert 0.0 <= progress(r) <= 1.0


def test_format_is_parsed_messages_times_calls_that_ran():
    outcomes = [TurnOutcome(False, False, n_calls=4, n_errors=1), TurnOutcome(True, True)]
    r = trajectory(outcomes, 2, n_steps=5, n_malformed=1)
    # turn 0: 3 of 4 ran; turn 1 has no gold and no call: 1
    assert format_reward(r, task([True, False])) == pytest.approx(0.8 * (0.75 + 1.0) / 2)
    # the same silence where gold has calls: 0
    assert format_reward(r, task([True, True])) == pytest.approx(0.8 * 0.75 / 2)


def test_format_silence_never_pays():
    silent = trajectory([TurnOutcome(False, False)] * 3, 3)
    assert format_reward(silent, task([True] * 3)) == 0.0
    assert format_reward(trajectory([], 3, EndReason.TOKEN_LIMIT, n_steps=0), task([True] * 3)) == 0


def test_format_denominator_depends_on_who_stopped():
    good = TurnOutcome(False, False, n_calls=2)
    gold = task([True] * 4)
    # The run stopped the rollout: turns reached. The rollout ran out: turns expected.
    assert format_reward(trajectory([good], 4, EndReason.FAILED_TURN), gold) == 1.0
    assert format_reward(trajectory([good], 4, EndReason.TOKEN_LIMIT), gold) == 0.25


def test_dispatch_and_unusable_ends():
    r, gold = trajectory([PASS, STATE], 2), task([False, False])
    assert reward(RewardKind.PROGRESS, r, gold) == 0.5
    assert reward(RewardKind.BINARY, r, gold) == 0.0
    assert reward(RewardKind.FORMAT, r, gold) == 1.0
    for end in (EndReason.ENV_ERROR, EndReason.DRIFT):
        broken = dataclasses.replace(r, end=end)
        assert all(math.isnan(reward(kind, broken, gold)) for kind in RewardKind)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="3 turn outcomes for 2 expected"):
        progress(trajectory([PASS] * 3, 2))
    with pytest.raises(ValueError, match="expects 0 turns"):
        binary(trajectory([], 0))
    with pytest.raises(ValueError, match="pass the task it came from"):
        format_reward(trajectory([PASS], 2), task([True]))
