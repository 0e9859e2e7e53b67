"""Selections among slots against plain sorts of them."""

import jax
import numpy as np
import pytest

from rods_jax import ranking

N, K = 40, 3
best = jax.jit(ranking.best_of_each, static_argnums=(2, 3))


def slots(seed):
    """Scores with many ties, both zeros among them, and groups -1 (none) to K-1."""
    rng = np.random.default_rng(seed)
    score_N = rng.choice(np.array([-2, -0.5, -0.0, 0.0, 1e-30, 0.25, 3], np.float32), N)
    return score_N, rng.integers(-1, K, N).astype(np.int8)


def by_hand(score_N, group_N, k, sign):
    """Slots of group k, lowest sign * score first, equal ones by index."""
    return sorted(np.flatnonzero(group_N == k), key=lambda i: (sign * score_N[i], i))


@pytest.mark.parametrize("most", [0, 1, 5, 40, 50])
def test_best_of_each_group_in_order(most):
    for seed in range(20):
        score_N, group_N = slots(seed)
        got = np.asarray(best(score_N, group_N, K, most)).reshape(K, min(most, N))
        for k in range(K):
            want = by_hand(score_N, group_N, k, -1)[:most]
            assert got[k].tolist() == want + [-1] * (min(most, N) - len(want))


def test_lowest_of_each_group_whatever_the_room():
    for seed in range(40):
        score_N, group_N = slots(seed)
        score_N[seed % N] = np.inf
        room_K = np.random.default_rng(seed).integers(-2, 16, K).astype(np.int32)
        got = np.asarray(ranking.lowest_of_each(score_N, group_N, room_K))
        want = [i for k in range(K)
                for i in by_hand(score_N, group_N, k, 1)[:max(0, room_K[k])]]
        assert np.flatnonzero(got).tolist() == sorted(want)


def test_lowest_of_floats_of_every_size():
    rng = np.random.default_rng(0)
    key_N = rng.integers(0, 2**32, N, dtype=np.uint32).view(np.float32)
    key_N = np.where(np.isnan(key_N), np.float32(-np.inf), key_N)
    for room in range(N + 1):
        got = ranking.lowest_of_each(key_N, np.zeros(N, np.int8), np.array([room], np.int32))
        assert np.flatnonzero(got).tolist() == sorted(np.argsort(key_N, stable=True)[:room])


def test_a_large_pool_with_ties_as_a_full_sort():
    rng, n = np.random.default_rng(2), 65536
    score_N = (rng.integers(0, 17, n) / 16).astype(np.float32)
    group_N = rng.integers(-1, K, n).astype(np.int8)
    best_KxM = np.asarray(best(score_N, group_N, K, 32)).reshape(K, 32)
    room_K = np.array([0, n // 8, n], np.int32)
    lowest_N = np.asarray(ranking.lowest_of_each(score_N, group_N, room_K))
    for k in range(K):
        member_M = np.flatnonzero(group_N == k)
        assert best_KxM[k].tolist() == \
            member_M[np.argsort(-score_N[member_M], stable=True)][:32].tolist()
        first_M = member_M[np.argsort(score_N[member_M], stable=True)][:room_K[k]]
        assert np.flatnonzero(lowest_N & (group_N == k)).tolist() == sorted(first_M)


def test_rank_within_its_group():
    rng = np.random.default_rng(1)
    order_N, member_N = rng.permutation(N), rng.random(N) < 0.7
    group_N = rng.integers(0, K, N).astype(np.int8)
    got = np.asarray(ranking.rank_within(order_N, group_N, member_N, K))
    seen = [0] * K
    for slot in order_N:
        if member_N[slot]:
            assert got[slot] == seen[group_N[slot]]
            seen[group_N[slot]] += 1
