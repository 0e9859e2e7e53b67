"""Group statistics and advantages against a float64 reference written with plain loops."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rods_jax.grpo.advantage import AdvantageConfig, Baseline, Spread, group_advantage


def reference(rewards, valid, config):
    tasks, group = rewards.shape
    mean, var, live = np.zeros(tasks), np.zeros(tasks), np.zeros(tasks, bool)
    advantage = np.zeros((tasks, group))
    members = [[g for g in range(group) if valid[t, g] and math.isfinite(rewards[t, g])]
               for t in range(tasks)]
    everyone = [float(rewards[t, g]) for t in range(tasks) for g in members[t]]
    for t in range(tasks):
        r = [float(rewards[t, g]) for g in members[t]]
        if not r:
            continue
        n = len(r)
        mean[t] = sum(r) / n
        squares = sum((x - mean[t]) ** 2 for x in r)
        var[t] = squares / n
        live[t] = n >= 2 and var[t] > config.var_floor
        if not live[t]:
            continue
        std = 1.0
        if config.scale_by_std:
            if config.spread is Spread.GROUP:
                std = math.sqrt(squares / (n - config.ddof)) + config.eps
            else:
                m = sum(everyone) / len(everyone)
                total = sum((x - m) ** 2 for x in everyone)
                std = math.sqrt(total / max(len(everyone) - config.ddof, 1)) + config.eps
        for g, x in zip(members[t], r):
            base = mean[t]
            if config.baseline is Baseline.LEAVE_ONE_OUT:
                base = (sum(r) - x) / (n - 1)
            a = (x - base) / std
            if config.clip is not None:
                a = min(max(a, -config.clip), config.clip)
            advantage[t, g] = a
    return mean, var, live, advantage


def run(rewards, valid=None, **options):
    rewards = jnp.asarray(rewards, jnp.float32)
    valid = jnp.ones(rewards.shape, bool) if valid is None else jnp.asarray(valid)
    return group_advantage(rewards, valid, AdvantageConfig(**options))


CONFIGS = [AdvantageConfig(ddof=d, scale_by_std=s, spread=p, clip=c, baseline=b)
           for d, s, p, c, b in itertools.product(
               (0, 1), (True, False), Spread, (None, 0.7), Baseline)]


@given(st.integers(0, 2 ** 31), st.sampled_from(CONFIGS))
@settings(max_examples=40, deadline=None)
def test_against_plain_loops(seed, config):
    rng = np.random.default_rng(seed)
    rewards = (rng.integers(0, 5, (3, 4)) / 4).astype(np.float32)
    rewards[rng.random(rewards.shape) < 0.1] = np.nan
    valid = rng.random(rewards.shape) < 0.8
    got = group_advantage(jnp.asarray(rewards), jnp.asarray(valid), config)
    mean, var, live, advantage = reference(rewards, valid, config)
    np.testing.assert_allclose(got.mean_T, mean, atol=1e-6)
    np.testing.assert_allclose(got.var_T, var, atol=1e-6)
    np.testing.assert_array_equal(got.live_T, live)
    np.testing.assert_allclose(got.advantage_TxG, advantage, atol=2e-5)
    assert np.all(np.asarray(got.var_T) <= np.asarray(got.mean_T) * (1 - got.mean_T) + 1e-6)


def test_ddof_by_hand():
    row = [[0.0, 0.0, 0.0, 1.0]]
    np.testing.assert_allclose(
        run(row, ddof=0, eps=0.0).advantage_TxG[0], [-0.57735] * 3 + [1.73205], atol=1e-4)
    np.testing.assert_allclose(
        run(row, ddof=1, eps=0.0).advantage_TxG[0], [-0.5] * 3 + [1.5], atol=1e-6)


@pytest.mark.parametrize("ddof", [0, 1])
def test_group_of_one_is_zero_and_finite(ddof):
    out = run([[0.7]], ddof=ddof, eps=0.0)
    np.testing.assert_array_equal(out.advantage_TxG, [[0.0]])
    assert not out.live_T[0] and out.var_T[0] == 0
    lone = run([[0.7, 0.1]], valid=[[True, False]], ddof=ddof, eps=0.0)
    np.testing.assert_array_equal(lone.advantage_TxG, [[0.0, 0.0]])


def test_each_group_sums_to_zero_around_its_own_mean():
    out = run([[0.0, 0.1, 0.2, 0.1], [0.9, 1.0, 0.8, 0.9]], eps=0.0)
    np.testing.assert_allclose(out.advantage_TxG.sum(1), [0, 0], atol=1e-5)
    np.testing.assert_allclose(np.abs(out.advantage_TxG).max(1), [2 ** 0.5] * 2, atol=1e-4)


@pytest.mark.parametrize("spread", list(Spread))
@pytest.mark.parametrize("scale", [True, False])
def test_dead_groups_are_told_by_their_own_variance(spread, scale):
    out = run([[1.0, 1.0], [0.0, 1.0]], spread=spread, scale_by_std=scale)
    np.testing.assert_array_equal(out.live_T, [False, True])
    np.testing.assert_array_equal(out.advantage_TxG[0], [0.0, 0.0])


def test_dead_group_of_values_without_exact_mean():
    # 16 x 0.1 in float32: the mean rounds, two passes keep the variance near 0.
    out = run([[0.1] * 16], eps=0.0)
    assert not out.live_T[0] and out.var_T[0] < 1e-12
    np.testing.assert_array_equal(out.advantage_TxG, np.zeros((1, 16)))


def test_nan_and_infinity_leave_the_statistics():
    out = run([[0.0, 1.0, np.nan, np.inf]], eps=0.0)
    np.testing.assert_allclose(out.advantage_TxG, [[-1.0, 1.0, 0.0, 0.0]], atol=1e-6)
    assert out.mean_T[0] == 0.5 and out.var_T[0] == 0.25
    np.testing.assert_array_equal(out.valid_TxG, [[True, True, False, False]])


def test_no_valid_member():
    out = run([[0.3, 0.4]], valid=[[False, False]])
    assert out.mean_T[0] == 0 and out.var_T[0] == 0 and not out.live_T[0]


def test_works_under_jit_and_grad():
    def total(r):
        stats = group_advantage(r, jnp.ones(r.shape, bool), AdvantageConfig(eps=0.0))
        return stats.advantage_TxG[0, 0]
    grad = jax.jit(jax.grad(total))(jnp.asarray([[0.0, 1.0], [1.0, 1.0]]))
    assert np.isfinite(np.asarray(grad)).all()


@pytest.mark.parametrize("bad", [{"ddof": 2}, {"eps": -1.0}, {"clip": 0.0}, {"var_floor": -1.0}])
def test_bad_config_is_named(bad):
    with pytest.raises(ValueError, match=f"^{next(iter(bad))} is .*give"):
        AdvantageConfig(**bad)
