"""From rewards to the gradient: every option of advantage and loss, drawn at random, against
float64 loops with derivatives by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_reference import group_statistics, loss_of

from rods_jax.grpo.advantage import AdvantageConfig, Baseline, Spread, group_advantage
from rods_jax.grpo.loss import (
    Aggregation, KlEstimator, LossConfig, RatioLevel, segment_numbers, token_terms, token_weights)

TASKS, GROUP, ROWS, LENGTH = 3, 4, 4, 9

LOSSES = st.builds(
    LossConfig, ratio=st.sampled_from(RatioLevel), clip_low=st.sampled_from([0.0, 0.1, 0.2, 1.0]),
    clip_high=st.sampled_from([0.0, 0.15, 0.28, 4.0]),
    dual_clip=st.sampled_from([None, 1.05, 3.0]), aggregation=st.sampled_from(Aggregation),
    constant_length=st.sampled_from([7.0, 100.0]), kl_coef=st.sampled_from([0.0, 0.3]),
    kl_estimator=st.sampled_from(KlEstimator), kl_cap=st.sampled_from([0.05, 0.8, 10.0]),
    entropy_coef=st.sampled_from([0.0, 0.2]),
    truncated_importance=st.sampled_from([None, 1.1, 2.0]))
ADVANTAGES = st.builds(
    AdvantageConfig, ddof=st.sampled_from([0, 1]), eps=st.sampled_from([0.0, 1e-6, 0.1]),
    scale_by_std=st.booleans(), spread=st.sampled_from(Spread),
    clip=st.sampled_from([None, 0.7]), baseline=st.sampled_from(Baseline))


def rewards_of(rng):
    """Some equal, some far from 0 beside their spread, some not numbers."""
    rewards = rng.integers(0, 5, (TASKS, GROUP)) / 4 + rng.choice([0.0, 8.0])
    rewards[rng.random(rewards.shape) < 0.1] = rng.choice([np.nan, np.inf])
    rewards[rng.random(TASKS) < 0.2] = 0.3
    return rewards.astype(np.float32), rng.random(rewards.shape) < 0.85


def rows_of(rng):
    """Rows of segments, padded; a rollout may have several segments, in several rows."""
    segments, traj = (np.zeros((ROWS, LENGTH), np.int32) for _ in range(2))
    for row in range(ROWS):
        ends = np.cumsum(rng.integers(1, 5, 4))
        for segment, (begin, end) in enumerate(zip([0, *ends], ends), 1):
            segments[row, begin:end] = segment
            traj[row, begin:end] = rng.integers(TASKS * GROUP)
    return segments, np.where(segments > 0, traj, 0)


def logps_of(rng):
    """logp, sampler, ref: equal, close, or further apart than any bound."""
    logp = -0.05 - 3 * rng.random((ROWS, LENGTH))
    apart = rng.choice([0.0, 0.05, 0.5, 2.0], size=2)
    sampler, ref = (logp + s * rng.standard_normal(logp.shape) for s in apart)
    far = rng.random(logp.shape) < 0.05
    sampler[far] -= rng.choice([-89.0, 89.0])
    ref[rng.random(logp.shape) < 0.05] -= rng.choice([-89.0, 89.0])
    return [x.astype(np.float32) for x in (logp, sampler, ref)]


@given(st.integers(0, 2 ** 31), ADVANTAGES)
@settings(max_examples=60)
def test_advantages(seed, config):
    rewards, valid = rewards_of(np.random.default_rng(seed))
    got = group_advantage(jnp.asarray(rewards), jnp.asarray(valid), config)
    mean, var, live, advantage = group_statistics(rewards, valid, config)
    np.testing.assert_array_equal(got.live_T, live)
    for found, want in ((got.mean_T, mean), (got.var_T, var), (got.advantage_TxG, advantage)):
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


@given(st.integers(0, 2 ** 31), LOSSES, ADVANTAGES)
@settings(max_examples=120)
def test_loss_and_gradient(seed, c, config):
    rng = np.random.default_rng(seed)
    rewards, valid = rewards_of(rng)
    segments, traj = rows_of(rng)
    logp, sampler, ref = logps_of(rng)
    entropy = rng.random(logp.shape).astype(np.float32)
    mask = (segments > 0) & (rng.random(logp.shape) < 0.7)
    spoilt = [np.where(mask, x, rng.choice([np.nan, np.inf, -1e30, 1.0])).astype(np.float32)
              for x in (logp, sampler, ref, entropy)]
    advantage = group_advantage(jnp.asarray(rewards), jnp.asarray(valid), config).advantage_TxG

    def total(logp, entropy):
        terms = token_terms(logp, spoilt[1], advantage.reshape(-1)[traj], jnp.asarray(mask),
                            entropy, spoilt[2] if c.kl_coef else None, c,
                            segment_numbers(jnp.asarray(segments)))
        weights, _ = token_weights(jnp.asarray(mask), jnp.asarray(traj), TASKS * GROUP, c)
        return (weights * terms.loss).sum(), terms

    (loss, terms), grads = jax.value_and_grad(total, (0, 1), has_aux=True)(
        jnp.asarray(spoilt[0]), jnp.asarray(spoilt[3]))
    want_A = group_statistics(rewards, valid, config)[3].reshape(-1)[traj]
    sequence = [(row, segments[row, i]) for row in range(ROWS) for i in range(LENGTH)]
    flat = lambda x: np.asarray(x, np.float64).reshape(-1)  # noqa: E731
    want_terms, want_loss, *want_grads = loss_of(
        flat(logp), flat(sampler), flat(want_A), mask.reshape(-1), flat(entropy), flat(ref),
        traj.reshape(-1), sequence, c)
    for name, want in want_terms.items():
        close(flat(getattr(terms, name)), want, name)
    close(loss, want_loss, "total")
    for found, want in zip(grads, want_grads):
        close(flat(found), want, "gradient")


def close(found, want, name):
    """To 1e-5 of the largest number, or of 1: sums of large terms leave that much."""
    scale = max(1.0, float(np.abs(want).max()))
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5 * scale, err_msg=name)


def test_every_bound_is_met_at_random():
    """The draws above reach what they are to test."""
    met = dict.fromkeys(("low", "high", "dual", "cut"), 0)
    bounds = dict(clip_low=0.1, clip_high=0.15, dual_clip=3.0)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        segments, traj = rows_of(rng)
        logp, sampler, ref = (x.reshape(-1).astype(np.float64) for x in logps_of(rng))
        sign = rng.choice([-1.0, 1.0], logp.shape)
        for cap in (None, 1.1):
            terms, *_ = loss_of(logp, sampler, sign, segments.reshape(-1) > 0, 0 * logp, ref,
                                traj.reshape(-1), segments.reshape(-1),
                                LossConfig(truncated_importance=cap, **bounds))
            met = {name: n + terms[name].sum() for name, n in met.items()}
    assert min(met.values()) > 10, met


@pytest.mark.parametrize("estimator", list(KlEstimator))
@pytest.mark.parametrize("cap", [0.5, 1e9, float("inf")])
def test_no_kl_cap_makes_a_gradient_that_is_not_finite(estimator, cap):
    c = LossConfig(kl_coef=1.0, kl_estimator=estimator, kl_cap=cap)

    def kl(logp, ref):
        x = jnp.stack([logp, logp])
        return token_terms(x, x, x, jnp.asarray([True, False]), x, jnp.stack([ref, ref]), c
                           ).kl.sum()
    for logp, ref in ((-91.0, -2.0), (-2.0, -91.0), (-np.inf, -2.0), (-2.0, -np.inf)):
        value, grads = jax.value_and_grad(kl, (0, 1))(jnp.float32(logp), jnp.float32(ref))
        assert np.isfinite([value, *grads]).all(), (logp, ref)
        assert 0 < abs(value) <= cap
    assert kl(jnp.float32(-2.0), jnp.float32(-2.0)) == 0
