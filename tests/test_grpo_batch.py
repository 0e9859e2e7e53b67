"""Packing: nothing lost, nothing doubled, rows in order, one line when it does not fit."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cases import random_trajectory, shared_groups, small_batch, trajectory
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
    with pytest.raises(ValueError, match="do not fit 1 micro-batches of 1 rows of 16 tokens"):
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


# ---------------------------------------------------------------- shared prompts


def shared_shape(rng):
    """A shape with parts, several prompts at a time, rows for one or for several."""
    parts = int(rng.integers(1, 3))
    return BatchShape(
        micro=24, rows=parts * int(rng.integers(1, 4)), length=15, tasks=3, group=4,
        prompts=parts * int(rng.integers(1, 3)), prompt=int(rng.integers(1, 9)), parts=parts,
        alone=bool(rng.integers(2)), lengths=((), (6, 9))[rng.integers(2)])


def read_back(batch, shape):
    """{flat index: (tokens, author, logprobs)} of the rows with their prompts in front."""
    found, begin = {}, 0
    for u, end in enumerate(batch.end_U):
        for i, j in itertools.product(range(begin, end), range(shape.rows)):
            part = j // (shape.rows // shape.parts)
            k = part * (shape.prompts // shape.parts) + batch.prompt_MxR[i, j]
            n = batch.prompt_length_UxK[u, k]
            segments = batch.segments_MxRxL[i, j]
            assert shape.buckets[batch.bucket_M[i]] >= np.count_nonzero(segments)
            assert segments.max() <= 1 or not shape.alone
            for segment in range(1, segments.max() + 1):
                at = segments == segment
                index, = set(batch.traj_MxRxL[i, j, at].tolist())
                assert index not in found
                assert batch.positions_MxRxL[i, j, at].tolist() == list(range(n, n + at.sum()))
                whole = lambda shared, own: np.concatenate([shared, own[i, j, at]])  # noqa: E731
                found[index] = (whole(batch.prompts_UxKxP[u, k, :n], batch.tokens_MxRxL),
                                whole(np.zeros(n), batch.author_MxRxL),
                                whole(np.zeros(n), batch.logprobs_MxRxL))
        begin = end
    assert begin == batch.n_micro
    return found


@given(st.integers(0, 2 ** 31))
@settings(max_examples=60, deadline=None)
def test_every_trajectory_comes_back_behind_its_groups_prompt(seed):
    rng = np.random.default_rng(seed)
    shape, (groups, rewards) = shared_shape(rng), shared_groups(seed)
    batch = pack(groups, rewards, shape, drop_dead=False)
    found = read_back(batch, shape)
    assert set(found) == set(range(12)) - {11}
    for index, (tokens, author, logprobs) in found.items():
        source = groups[index // 4][index % 4]
        n = np.flatnonzero(source.author_L == 1)[-1] + 1
        np.testing.assert_array_equal(tokens, source.tokens_L[:n])
        np.testing.assert_array_equal(author, source.author_L[:n])
        np.testing.assert_array_equal(logprobs, source.logprobs_L[:n])
    # A row's own part begins before its first sampled token, which it must predict.
    assert not batch.sampled_MxRxL[..., 0].any()
    assert batch.n_sets == (np.diff(batch.end_U, prepend=0) > 0).sum()


def test_a_groups_prompt_ends_where_its_rows_differ():
    a, b = (trajectory([1, 2, 3, last, 5, 6], [0, 0, 0, 0, 1, 1]) for last in (4, 7))
    shape = BatchShape(1, 2, 8, 1, 2, prompts=1, prompt=6)
    batch = pack([[a, b]], np.array([[0.0, 1]]), shape, True)
    assert batch.prompts_UxKxP[0, 0, :3].tolist() == [1, 2, 3]
    assert batch.prompt_length_UxK.tolist() == [[3]]
    assert batch.tokens_MxRxL[0, 0, :6].tolist() == [4, 5, 6, 7, 5, 6]
    same = pack([[a, a]], np.array([[0.0, 1]]), shape, True)
    assert same.prompt_length_UxK.tolist() == [[3]], "the last one is needed to predict the next"


def test_processes_agree_on_the_micro_batches_of_the_fullest():
    groups, rewards = shared_groups(1)
    shape = BatchShape(12, 2, 15, 3, 4, prompts=1, prompt=8)
    alone = pack(groups, rewards, shape, False)
    agreed = pack(groups, rewards, shape, False, agree=lambda counts: counts + 1)
    np.testing.assert_array_equal(np.diff(agreed.end_U, prepend=0),
                                  np.diff(alone.end_U, prepend=0) + 1)
    assert read_back(agreed, shape).keys() == read_back(alone, shape).keys()


def test_errors_of_shared_batches_name_figures_and_remedy():
    groups, rewards = shared_groups(1)
    with pytest.raises(ValueError, match="do not fit 1 micro-batches of 1 rows of 15 tokens, they "
                                         r"take \d+: raise micro"):
        pack(groups, rewards, BatchShape(1, 1, 15, 3, 4, prompts=1, prompt=8), False)
    with pytest.raises(ValueError, match=r"has \d+ tokens behind 3 that its group shares, a row "
                                         "holds 4: raise length"):
        pack(groups, rewards, BatchShape(12, 2, 4, 3, 4, prompts=1, prompt=8), False)
    with pytest.raises(ValueError, match="prompts is 1 of 0 tokens: give both"):
        BatchShape(1, 1, 4, 1, 1, prompts=1)
    with pytest.raises(ValueError, match="3 rows a micro-batch do not divide over 2 parts"):
        BatchShape(1, 3, 4, 1, 1, parts=2)
    with pytest.raises(ValueError, match=r"batch lengths are \(4,\): give lengths of 2 to below"):
        BatchShape(1, 1, 4, 1, 1, lengths=(4,))
