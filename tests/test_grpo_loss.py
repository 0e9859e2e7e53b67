"""Loss terms and weights against float64 loops; the numeric corners that once went wrong."""

import itertools
import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rods_jax.grpo.loss import (
    Aggregation, KlEstimator, LossConfig, bounded_ratio, token_terms, token_weights)


def reference_token(logp, sampler, advantage, entropy, ref, c):
    """(loss, policy, kl) of one token, in Python floats."""
    old = logp if c.truncated_importance is not None else sampler
    ratio = math.exp(logp - old)
    clipped = min(max(ratio, 1 - c.clip_low), 1 + c.clip_high)
    policy = -min(advantage * ratio, advantage * clipped)
    if c.dual_clip is not None and advantage < 0:
        policy = min(policy, -advantage * c.dual_clip)
    if c.truncated_importance is not None:
        policy *= min(math.exp(logp - sampler), c.truncated_importance)
    kl = 0.0
    if c.kl_coef:
        d = ref - logp
        kl = {KlEstimator.K1: -d, KlEstimator.K2: d * d / 2,
              KlEstimator.K3: math.exp(d) - 1 - d}[c.kl_estimator]
        kl = min(max(kl, -c.kl_cap), c.kl_cap)
    return policy + c.kl_coef * kl - c.entropy_coef * entropy, policy, kl


CONFIGS = [LossConfig(dual_clip=d, kl_coef=k, kl_estimator=e, kl_cap=0.8, entropy_coef=h,
                      truncated_importance=t, clip_low=0.1, clip_high=0.3)
           for d, k, e, h, t in itertools.product(
               (None, 1.5), (0.0, 0.3), KlEstimator, (0.0, 0.2), (None, 1.2))]


@given(st.integers(0, 2 ** 31), st.sampled_from(CONFIGS))
@settings(max_examples=40, deadline=None)
def test_terms_against_plain_loops(seed, c):
    rng = np.random.default_rng(seed)
    logp, sampler, ref = -1 - rng.random((3, 8)) * 2
    advantage, entropy = rng.standard_normal(8), rng.random(8)
    mask = rng.random(8) < 0.7
    f32 = [jnp.asarray(x, jnp.float32) for x in (logp, sampler, advantage)]
    terms = token_terms(*f32, jnp.asarray(mask), jnp.asarray(entropy, jnp.float32),
                        jnp.asarray(ref, jnp.float32) if c.kl_coef else None, c)
    for i in range(8):
        loss, policy, kl = reference_token(
            logp[i], sampler[i], advantage[i], entropy[i], ref[i], c) if mask[i] else (0, 0, 0)
        assert terms.loss[i] == pytest.approx(loss, abs=1e-5)
        assert terms.policy[i] == pytest.approx(policy, abs=1e-5)
        assert terms.kl[i] == pytest.approx(kl, abs=1e-5)
        assert terms.gap[i] == pytest.approx(abs(logp[i] - sampler[i]) if mask[i] else 0, abs=1e-5)
    assert not np.any(np.stack([terms.low, terms.high, terms.dual, terms.cut]) & ~mask)


@cache
def _one(c):
    def f(x, sampler, advantage, mask):
        return token_terms(x, sampler, advantage, mask, jnp.float32(0), None, c).loss
    return jax.jit(jax.value_and_grad(f))


def one(logp, sampler, advantage, mask=True, **options):
    """Loss of one token and its derivative by logp."""
    return _one(LossConfig(**options))(
        jnp.float32(logp), jnp.float32(sampler), jnp.float32(advantage), jnp.asarray(mask))


def test_ppo_gradient_by_side_of_the_band():
    on = one(-1.0, -1.0, 2.0)
    assert on[0] == -2.0 and on[1] == -2.0  # ratio 1: -A * ratio, derivative -A
    assert one(math.log(1.5), 0.0, 1.0) == (pytest.approx(-1.28), 0.0)  # above, A > 0: clipped
    assert one(math.log(0.5), 0.0, -1.0) == (pytest.approx(0.8), 0.0)  # below, A < 0: clipped
    assert one(math.log(1.5), 0.0, -1.0)[1] == pytest.approx(1.5)  # back into the band: not
    assert one(math.log(0.5), 0.0, 1.0)[1] == pytest.approx(-0.5)
    assert one(math.log(30.0), 0.0, -1.0) == (pytest.approx(10.0), 0.0)  # dual clip
    assert one(math.log(30.0), 0.0, -1.0, dual_clip=None)[0] == pytest.approx(30.0, rel=1e-5)


def test_truncated_importance_moves_like_weighted_policy_gradient():
    loss, grad = one(math.log(1.5), 0.0, 1.0, truncated_importance=2.0)
    assert loss == pytest.approx(-1.5) and grad == pytest.approx(-1.5)
    loss, grad = one(math.log(3.0), 0.0, 1.0, truncated_importance=2.0)
    assert loss == pytest.approx(-2.0) and grad == pytest.approx(-2.0)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("dual", [None, 10.0])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_huge_log_ratio_is_finite_and_masked_adds_nothing(advantage, dual, cap):
    for logp, sampler in ((-2.0, -91.0), (-91.0, -2.0)):
        live = one(logp, sampler, advantage, dual_clip=dual, truncated_importance=cap)
        masked = one(logp, sampler, advantage, False, dual_clip=dual, truncated_importance=cap)
        assert np.isfinite(live).all()
        assert masked == (0.0, 0.0)


def test_fill_value_of_masked_tokens_does_not_matter():
    c = LossConfig(kl_coef=0.1, entropy_coef=0.1)
    mask = jnp.asarray([True, False])

    @jax.jit
    def f(fill):
        def loss(logp, sampler, ref):
            return token_terms(logp, sampler, jnp.float32([1.0, 1.0]), mask,
                               jnp.stack([jnp.float32(0.5), fill]), ref, c).loss.sum()
        args = [jnp.stack([jnp.float32(x), fill]) for x in (-1.0, -1.2, -0.9)]
        return jax.value_and_grad(loss, argnums=(0, 1, 2))(*args)

    plain = f(jnp.float32(-1.0))
    assert np.isfinite(plain[0]) and all(g[0] != 0 and g[1] == 0 for g in plain[1])
    for fill in (1.0, 0.0, -np.inf, np.inf, np.nan, 1e30):
        jax.tree.map(np.testing.assert_array_equal, f(jnp.float32(fill)), plain)


@pytest.mark.parametrize("estimator", list(KlEstimator))
def test_kl_far_from_the_reference_is_capped_and_finite(estimator):
    c = LossConfig(kl_coef=1.0, kl_estimator=estimator, kl_cap=10.0)

    def f(x, mask):
        return token_terms(x, x, jnp.float32(0), mask, jnp.float32(0), jnp.float32(-2.0), c).kl
    for logp in (-91.0, -2.0):
        value, grad = jax.value_and_grad(f)(jnp.float32(logp), jnp.asarray(True))
        assert np.isfinite(value) and np.isfinite(grad) and abs(value) <= 10
        assert f(jnp.float32(logp), jnp.asarray(False)) == 0
    assert f(jnp.float32(-2.0), jnp.asarray(True)) == 0


@pytest.mark.parametrize("aggregation", list(Aggregation))
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_weights_against_plain_loops(aggregation, seed):
    rng = np.random.default_rng(seed)
    traj = np.sort(rng.integers(0, 5, 20)).astype(np.int32)
    mask = (rng.random(20) < 0.6) & (traj != 2)  # sequence 2 carries nothing
    c = LossConfig(aggregation=aggregation, constant_length=7.0)
    weights, n = token_weights(jnp.asarray(mask), jnp.asarray(traj), 6, c)
    by = {s: [i for i in range(20) if mask[i] and traj[i] == s] for s in range(6)}
    live = [s for s in by if by[s]]
    x = rng.standard_normal(20)
    if aggregation is Aggregation.TOKEN_MEAN:
        expected = x[mask].mean()
    elif aggregation is Aggregation.SEQUENCE_MEAN:
        expected = np.mean([np.mean(x[by[s]]) for s in live])
    else:
        expected = np.mean([np.sum(x[by[s]]) / 7.0 for s in live])
    assert n == len(live)
    assert float(jnp.sum(weights * x)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_nothing_to_learn_from_is_zero_not_nan(aggregation):
    c = LossConfig(aggregation=aggregation)
    weights, n = token_weights(jnp.zeros(4, bool), jnp.zeros(4, jnp.int32), 2, c)
    np.testing.assert_array_equal(weights, np.zeros(4))
    assert n == 0
    # One of two sequences masked: the loss of the live one.
    traj = jnp.asarray([0, 0, 1, 1])
    both, _ = token_weights(jnp.asarray([True, True, False, False]), traj, 2, c)
    alone, _ = token_weights(jnp.ones(2, bool), traj[:2], 1, c)
    np.testing.assert_array_equal(both[:2], alone)


def test_ratio_bound():
    x = bounded_ratio(jnp.float32([0, 1000, -1000]), jnp.float32(0), jnp.ones(3, bool))
    np.testing.assert_allclose(x, [1.0, math.exp(20), math.exp(-20)], rtol=1e-5)


@pytest.mark.parametrize("bad", [
    {"clip_low": 1.5}, {"clip_high": -0.1}, {"kl_coef": float("nan")}, {"entropy_coef": -1.0},
    {"dual_clip": 1.0}, {"constant_length": 0.0}, {"kl_cap": 0.0}, {"truncated_importance": 0.0}])
def test_bad_config_is_named(bad):
    with pytest.raises(ValueError, match=f"^{next(iter(bad))} is .*give"):
        LossConfig(**bad)


def test_reference_goes_with_its_coefficient():
    x = jnp.zeros(1)
    with pytest.raises(ValueError, match="kl_coef is 0.1 and the reference log-probs are missing"):
        token_terms(x, x, x, x == 0, x, None, LossConfig(kl_coef=0.1))
