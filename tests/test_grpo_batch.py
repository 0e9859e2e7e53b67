"""Packing: nothing lost, nothing doubled, rows in order, one line when it does not fit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cases import random_trajectory, small_batch, trajectory
from rods_jax.grpo.batch import BatchShape, pack
from rods_jax.grpo.logprobs import predicted_mask
from rods_jax.types import EndReason

SHAPE = BatchShape(micro=4, rows=2, length=16, tasks=3, group=4)


def unpack(batch):
    """{flat index: (tokens, positions, sampled, logprobs)} read back from the rows."""
    found = {}
    m, r, length = batch.tokens_MxRxL.shape
    for i in range(m):
        for j in range(r):
            segments = batch.segments_MxRxL[i, j]
            for segment in range(1, segments.max() + 1):
                at = np.flatnonzero(segments == segment)
                assert np.array_equal(at, np.arange(at[0], at[-1] + 1)), "a trajectory is whole"
                owner = set(batch.traj_MxRxL[i, j, at].tolist())
                assert len(owner) == 1
                index = owner.pop()
                assert index not in found
                found[index] = (batch.tokens_MxRxL[i, j, at], batch.positions_MxRxL[i, j, at],
                                batch.sampled_MxRxL[i, j, at], batch.logprobs_MxRxL[i, j, at])
    return found


@given(st.integers(0, 2 ** 31), st.booleans())
@settings(max_examples=25, deadline=None)
def test_every_trajectory_comes_back(seed, drop_dead):
    groups, rewards = small_batch(seed)
    batch = pack(groups, rewards, SHAPE, drop_dead)
    found = unpack(batch)
    expected = {t * 4 + g for t in range(3) for g in range(4)} - {11}
    assert set(found) == expected - (set(range(4)) if drop_dead else set())
    for index, (tokens, positions, sampled, logprobs) in found.items():
        source = groups[index // 4][index % 4]
        n = np.flatnonzero(source.author_L == 1)[-1] + 1
        np.testing.assert_array_equal(tokens, source.tokens_L[:n])
        np.testing.assert_array_equal(positions, np.arange(n))
        np.testing.assert_array_equal(sampled, source.author_L[:n] == 1)
        np.testing.assert_array_equal(logprobs, source.logprobs_L[:n])
    empty = batch.segments_MxRxL == 0
    for field in (batch.tokens_MxRxL, batch.traj_MxRxL, batch.sampled_MxRxL, batch.logprobs_MxRxL):
        assert not field[empty].any()
    # Micro-batches that hold anything come first, and n_micro counts them.
    used = (batch.segments_MxRxL > 0).any((1, 2))
    np.testing.assert_array_equal(used, np.arange(4) < batch.n_micro)
    assert batch.n_micro.dtype == np.int32


def test_same_input_same_bytes():
    groups, rewards = small_batch(5)
    one, two = pack(groups, rewards, SHAPE, True), pack(groups, rewards, SHAPE, True)
    for a, b in zip(vars(one).values(), vars(two).values()):
        assert np.array_equal(a, b)


def test_best_fit_fills_the_row_that_leaves_least():
    lengths = [9, 7, 6, 3, 4]  # 9+7 fill a row of 16; 6+4+3 the next
    group = [trajectory(np.ones(n), [0] + [1] * (n - 1), uid="a", sample=i)
             for i, n in enumerate(lengths)]
    shape = BatchShape(micro=1, rows=2, length=16, tasks=1, group=5)
    batch = pack([group], np.array([[0, 1, 0, 1, 0]]), shape, True)
    owners = [sorted(set(row[segments > 0]))
              for row, segments in zip(batch.traj_MxRxL[0], batch.segments_MxRxL[0])]
    assert owners == [[0, 1], [2, 3, 4]]


def test_flags_of_samples():
    rng = np.random.default_rng(0)
    ends = [EndReason.DONE, EndReason.TOKEN_LIMIT, EndReason.ENV_ERROR, EndReason.STEP_LIMIT]
    group = [random_trajectory(rng, end=end, sample=i) for i, end in enumerate(ends)]
    batch = pack([group], np.array([[0.0, 1, 0, 1]] + [[0.0] * 4] * 2), SHAPE, True)
    np.testing.assert_array_equal(batch.valid_TxG, [[True, True, False, True]] + [[False] * 4] * 2)
    np.testing.assert_array_equal(batch.truncated_TxG[0], [False, True, False, True])
    assert set(unpack(batch)) == {0, 1, 3}
    # Rewards of what is not valid do not travel: NaN is refused nowhere and poisons nothing.
    groups, rewards = small_batch()
    assert np.isfinite(pack(groups, rewards, SHAPE, False).rewards_TxG).all()


def test_a_group_left_with_one_valid_sample_is_dead():
    rng = np.random.default_rng(1)
    group = [random_trajectory(rng, sample=i) for i in range(2)]
    shape = BatchShape(1, 2, 16, 1, 2)
    assert pack([group], np.array([[1.0, np.nan]]), shape, True).n_micro == 0
    assert pack([group], np.array([[1.0, np.nan]]), shape, False).n_micro == 1


def test_loss_goes_by_authorship_not_by_id():
    """End token id = padding id = 0: the first end is trained on, filler is not."""
    long = trajectory([5, 6, 0], [0, 1, 1])
    short = trajectory([5, 0], [0, 1], sample=1)
    batch = pack([[long, short]], np.array([[0.0, 1.0]]), BatchShape(1, 2, 5, 1, 2), True)
    np.testing.assert_array_equal(predicted_mask(batch.sampled_MxRxL, batch.segments_MxRxL)[0, 0],
                                  [False, True, True, False, True])
    assert (batch.segments_MxRxL[0, 0] > 0).tolist() == [True] * 5
    alone = pack([[long, short]], np.array([[0.0, 1.0]]), BatchShape(1, 2, 4, 1, 2), True)
    np.testing.assert_array_equal(alone.sampled_MxRxL[0], [[0, 1, 1, 0], [0, 1, 0, 0]])


def test_tool_output_inside_the_response_carries_no_loss():
    t = trajectory(range(1, 10), [0, 1, 1, 1, 2, 2, 2, 1, 1])
    batch = pack([[t, None]], np.array([[1.0, 0.0]]), BatchShape(1, 1, 16, 1, 2), False)
    np.testing.assert_array_equal(batch.sampled_MxRxL[0, 0, :9], [0, 1, 1, 1, 0, 0, 0, 1, 1])


def test_what_follows_the_last_sampled_token_is_cut():
    t = trajectory([1, 2, 3, 4, 5], [0, 1, 2, 2, 2])
    none = trajectory([1, 2], [0, 2], sample=1)
    batch = pack([[t, none]], np.array([[1.0, 0.0]]), BatchShape(1, 1, 4, 1, 2), True)
    np.testing.assert_array_equal(batch.segments_MxRxL[0, 0], [1, 1, 0, 0])
    assert batch.valid_TxG.all()  # no sampled token, still a member of its group


def test_errors_name_figures_and_remedy():
    groups, rewards = small_batch()
    with pytest.raises(ValueError, match="trajectories do not fit 1 micro-batches of 1 rows of 16 tokens"):
        pack(groups, rewards, BatchShape(1, 1, 16, 3, 4), False)
    long = trajectory(np.ones(20), [0] + [1] * 19, uid="big")
    with pytest.raises(ValueError, match="trajectory 0 of big has 20 tokens, a row holds 16"):
        pack([[long, long]], np.array([[0.0, 1]]), BatchShape(1, 2, 16, 1, 2), False)
    with pytest.raises(ValueError, match=r"rewards have shape \(3, 4\)"):
        pack(groups, rewards, BatchShape(4, 2, 16, 4, 4), False)
    with pytest.raises(ValueError, match="3 groups of up to 4 trajectories do not fit 2 tasks x 4"):
        pack(groups, rewards[:2], BatchShape(4, 2, 16, 2, 4), False)
    bad = trajectory([1, 2], [0, 1], [0, np.nan], uid="bad")
    with pytest.raises(ValueError, match="of bad has a sampler log-prob that is not finite"):
        pack([[bad, bad]], np.array([[0.0, 1]]), BatchShape(1, 2, 16, 1, 2), False)
    with pytest.raises(ValueError, match="batch rows is 0"):
        BatchShape(1, 0, 16, 1, 2)
