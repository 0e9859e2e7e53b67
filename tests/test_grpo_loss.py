"""Loss terms by hand, weights against float64 loops, and the numeric corners that once went
wrong. All options at random: test_grpo_loss_random.py."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rods_jax.grpo.loss import (
    Aggregation, LossConfig, RatioLevel, bounded_ratio, segment_numbers, token_terms,
    token_weights)


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
def test_a_ratio_on_its_bound_keeps_the_whole_gradient(advantage):
    """Corrected ratios are all 1, and here the band is that one point."""
    loss, grad = one(math.log(1.5), 0.0, advantage, truncated_importance=2.0, clip_low=0.0,
                     clip_high=0.0)
    assert loss == pytest.approx(-1.5 * advantage) and grad == pytest.approx(-1.5 * advantage)


def by_sequence(gaps, advantage, mask, sequence, **options):
    """Losses of tokens whose log-prob lies so far above the sampler's, and the gradient of
    their sum by logp."""
    c = LossConfig(ratio=RatioLevel.SEQUENCE, **options)

    def f(logp):
        loss = token_terms(logp, jnp.full(len(gaps), -2.0), jnp.float32(advantage),
                           jnp.asarray(mask), jnp.zeros(len(gaps)), None, c,
                           jnp.asarray(sequence)).loss
        return loss.sum(), loss
    (_, loss), grad = jax.value_and_grad(f, has_aux=True)(jnp.float32(gaps) - 2)
    return loss, grad


def test_a_sequence_has_one_ratio():
    """Two tokens of sequence 3 between those of sequence 0; one is masked, whatever it holds."""
    mask, sequence = [True, True, False, True, True], [0, 3, 1, 3, 0]
    args = [0.3, 0.1, np.nan, -0.3, 0.5], [1.0, -1.0, 5.0, -1.0, 1.0], mask, sequence
    loss, grad = by_sequence(*args, clip_high=1.0)
    up, down = math.exp(0.4), math.exp(-0.1)
    np.testing.assert_allclose(loss, [-up, down, 0, down, -up], rtol=1e-6)
    # d/dlogp of 2 tokens x (A * ratio), the mean giving half to each.
    np.testing.assert_allclose(grad, [-up, down, 0, down, -up], rtol=1e-6)
    # exp(0.4) = 1.49 is beyond the band, and so is no token of sequence 3.
    loss, grad = by_sequence(*args)
    np.testing.assert_allclose(loss, [-1.28, down, 0, down, -1.28], rtol=1e-6)
    np.testing.assert_allclose(grad, [0, down, 0, down, 0], rtol=1e-6)
    loss, grad = by_sequence([1.0, 2.0], [-1.0, -1.0], [True] * 2, [1, 1], dual_clip=2.0)
    assert loss.tolist() == [2.0, 2.0] and not grad.any()


def test_a_corrected_sequence_shares_its_weights():
    loss, grad = by_sequence([math.log(1.5), math.log(8.0)], [1.0, 1.0], [True] * 2, [0, 0],
                             truncated_importance=2.0)
    np.testing.assert_allclose(loss, [-1.5, -2.0], rtol=1e-6)
    np.testing.assert_allclose(grad, [-1.75, -1.75], rtol=1e-6)


def test_far_sequences_are_finite():
    for gap in (89.0, -89.0, 3e38, np.inf):
        for advantage in (1.0, -1.0):
            out = by_sequence([gap, 0.1], [advantage] * 2, [True] * 2, [0, 0], dual_clip=None)
            assert np.isfinite(out).all(), (gap, advantage)


def test_segments_of_packed_rows_get_numbers_of_their_own():
    segments = np.array([[1, 2, 3, 4], [1, 1, 2, 0], [0, 0, 0, 0]], np.int32)
    numbers = np.asarray(segment_numbers(jnp.asarray(segments)))
    assert numbers.dtype == np.int32 and numbers.min() >= 0 and numbers.max() < segments.size
    names = {(row, segment): set() for row in range(2) for segment in segments[row] if segment}
    for row, column in np.argwhere(segments > 0):
        names[row, segments[row, column]].add(numbers[row, column])
    assert all(len(found) == 1 for found in names.values())
    assert len(set.union(*names.values())) == len(names) == 6


def test_a_ratio_of_sequences_needs_to_know_them():
    x = jnp.zeros(1)
    with pytest.raises(ValueError, match="ratio is that of a sequence: name each token's in"):
        token_terms(x, x, x, x == 0, x, None, LossConfig(ratio=RatioLevel.SEQUENCE))


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
