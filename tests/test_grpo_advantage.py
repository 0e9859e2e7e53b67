"""Group statistics and advantages by hand. All options at random: test_grpo_loss_random.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rods_jax.grpo.advantage import AdvantageConfig, Baseline, Spread, group_advantage


def run(rewards, valid=None, **options):
    rewards = jnp.asarray(rewards, jnp.float32)
    valid = jnp.ones(rewards.shape, bool) if valid is None else jnp.asarray(valid)
    return group_advantage(rewards, valid, AdvantageConfig(**options))


@given(st.integers(0, 2 ** 31))
def test_variances_keep_to_their_bound(seed):
    """Popoviciu's, of rewards from 0 to 1, whoever takes part."""
    rng = np.random.default_rng(seed)
    rewards = rng.choice([0.0, 0.3, 0.7, 1.0], (3, 4))
    got = run(rewards, valid=rng.random(rewards.shape) < 0.8, ddof=1)
    mean, var = np.asarray(got.mean_T, np.float64), np.asarray(got.var_T)
    assert np.all(var <= mean * (1 - mean) + 1e-6) and np.all(var <= 0.25 + 1e-6)


def test_leave_one_out_by_hand():
    out = run([[0.0, 0.0, 1.0, 0.25]], valid=[[True, True, True, False]], scale_by_std=False,
              baseline=Baseline.LEAVE_ONE_OUT)
    np.testing.assert_allclose(out.advantage_TxG, [[-0.5, -0.5, 1.0, 0.0]], atol=1e-6)


def test_rewards_far_from_zero_keep_their_spread():
    """One pass over squares would lose it: 1000^2 has no room for 0.25 in float32."""
    out = run([[1000.0, 1000.5, 1001.0, 1000.5]], eps=0.0)
    assert out.var_T[0] == pytest.approx(0.125, abs=1e-6)
    np.testing.assert_allclose(out.advantage_TxG[0], [-2 ** 0.5, 0, 2 ** 0.5, 0], atol=1e-5)


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


@pytest.mark.parametrize("rewards, valid, words", [
    (np.zeros(8), np.ones(8, bool), r"rewards have shape \(8,\), wanted is \(tasks, group\): resh"),
    (np.zeros((2, 2, 2)), np.ones((2, 2, 2), bool), r"rewards have shape \(2, 2, 2\), wanted"),
    (np.zeros((2, 4)), np.ones((4, 2), bool), r"valid is bool \(4, 2\), the rewards have shape"),
    (np.zeros((2, 4)), np.ones((2, 4)), r"valid is float32 \(2, 4\).*give one bool for each")])
@pytest.mark.parametrize("jitted", [False, True])
def test_other_shapes_are_refused_in_one_line(rewards, valid, words, jitted):
    f = lambda r, v: group_advantage(r, v, AdvantageConfig())  # noqa: E731
    with pytest.raises(ValueError, match=f"^{words}") as error:
        (jax.jit(f) if jitted else f)(jnp.asarray(rewards), jnp.asarray(valid))
    assert "\n" not in str(error.value)
