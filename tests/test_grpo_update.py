"""The whole update against a plain one: every trajectory alone in its row, all logits at
once, the loss and its derivative by log-prob in float64 loops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_cases import small_batch, tiny_decoder
from grpo_reference import (
    KL, OPTIMIZER, PLAIN, SHAPE, assert_close, dense_scores, gradient, quick_jit, reference,
    rows_alone, update_of)
from rods_jax.grpo.advantage import AdvantageConfig, Baseline
from rods_jax.grpo.batch import BatchShape, pack
from rods_jax.grpo.loss import Aggregation, KlEstimator, LossConfig, RatioLevel
from rods_jax.grpo.supervised import make_supervised
from rods_jax.grpo.tally import merge
from rods_jax.grpo.update import UpdateConfig, init_state, make_update
from rods_jax.types import EndReason

CORRECTED = UpdateConfig(
    loss=LossConfig(aggregation=Aggregation.CONSTANT, constant_length=9.0, kl_coef=0.2,
                    kl_estimator=KlEstimator.K2, truncated_importance=1.1, mask_truncated=True),
    advantage=AdvantageConfig(scale_by_std=False, baseline=Baseline.LEAVE_ONE_OUT), logit_chunk=16)

SEQUENCE = UpdateConfig(
    loss=LossConfig(ratio=RatioLevel.SEQUENCE, clip_low=0.1, clip_high=0.1, dual_clip=1.5),
    logit_chunk=8)


def start(config):
    params = tiny_decoder()[1]
    state = init_state(params, OPTIMIZER, keep_reference=config.loss.kl_coef > 0)
    if state.ref_params is not None:
        other = jax.tree.map(lambda x: x * 0.9 + 0.02, params)
        state = state.replace(ref_params=other)
    return state


def with_truncated(groups):
    ended = dataclasses.replace(groups[1][2], end=EndReason.TOKEN_LIMIT)
    return [groups[0], [*groups[1][:2], ended, groups[1][3]], *groups[2:]]


def outcome(result):
    """What packing must not change: it may leave out tokens that carry no loss."""
    state, metrics = result
    return gradient(state), metrics.replace(tokens_A=0)


@pytest.mark.parametrize("config", [
    KL, CORRECTED, *(pytest.param(config, marks=pytest.mark.slow) for config in (PLAIN, SEQUENCE))],
    ids=["kl", "corrected", "plain", "sequence"])
def test_gradient_equals_the_plain_unpacked_one(config):
    groups, rewards = small_batch(1)
    groups = with_truncated(groups)
    state = start(config)
    batch = pack(groups, rewards, SHAPE, drop_dead=not config.dead_carry_loss)
    new, metrics = update_of(config)[0](state, batch)

    rows = rows_alone(groups, rewards, config)
    loss, grads = reference(state.params, state.ref_params, rows, config)
    assert metrics.loss == pytest.approx(loss, abs=1e-5)
    assert_close(gradient(new), grads)
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(grads)) > 1e-3

    r = rewards.astype(np.float64)
    np.testing.assert_allclose(metrics.mean_T, np.nanmean(r, 1), atol=1e-6)
    np.testing.assert_allclose(metrics.var_T, np.nanvar(r, 1), atol=1e-6)
    np.testing.assert_array_equal(metrics.live_T, [False, True, True])
    np.testing.assert_array_equal(metrics.n_valid_T, [4, 4, 3])
    assert metrics.dead_share == pytest.approx(1 / 3)
    assert metrics.n_sequences == len(rows[0]) and metrics.n_tokens == rows[1].sum()
    assert bool(metrics.applied) and new.step == 1


@pytest.mark.parametrize("config", [PLAIN, KL], ids=["plain", "kl"])
def test_result_does_not_depend_on_packing(config):
    """Dead groups in or out, other orders of the same rows, empty micro-batches."""
    groups, rewards = small_batch(1)
    update, traces = update_of(config)
    base_batch = pack(groups, rewards, SHAPE, drop_dead=False)
    base = outcome(update(start(config), base_batch))
    # The trajectories in another arrangement: micro-batches and rows reversed.
    n = int(base_batch.n_micro)
    order = np.r_[np.arange(n)[::-1], np.arange(n, SHAPE.micro)]
    arrays = {k: v[order][:, ::-1] for k, v in vars(base_batch).items() if k.endswith("MxRxL")}
    variants = [dataclasses.replace(base_batch, **arrays),
                dataclasses.replace(base_batch, n_micro=np.int32(SHAPE.micro))]
    if not config.dead_carry_loss:
        variants.append(pack(groups, rewards, SHAPE, drop_dead=True))
        assert variants[-1].n_micro < base_batch.n_micro
    for batch in variants:
        assert_close(outcome(update(start(config), batch)), base, atol=2e-6)
    assert len(traces) == 1


def test_result_does_not_depend_on_the_number_of_micro_batches():
    groups, rewards = small_batch(1)
    update = update_of(PLAIN)[0]
    other = quick_jit(make_update(tiny_decoder()[0], PLAIN, OPTIMIZER))
    small = outcome(update(start(PLAIN), pack(groups, rewards, SHAPE, True)))
    large = outcome(other(start(PLAIN), pack(groups, rewards, BatchShape(1, 5, 31, 3, 4), True)))
    assert_close(small, large, atol=2e-6)


def test_inserted_and_padded_positions_cannot_matter():
    groups, rewards = small_batch(2)
    update = update_of(KL)[0]
    batch = pack(groups, rewards, SHAPE, drop_dead=False)
    clean = update(start(KL), batch)
    for junk in (np.nan, np.inf, -1e30):
        spoilt = np.where(batch.sampled_MxRxL, batch.logprobs_MxRxL, np.float32(junk))
        dirty = update(start(KL), batch.replace(logprobs_MxRxL=spoilt))
        jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    rest = jax.tree.map(jnp.copy, batch)
    padded = batch.segments_MxRxL == 0
    rest = rest.replace(tokens_MxRxL=np.where(padded, 7, batch.tokens_MxRxL).astype(np.int32))
    assert_close(outcome(update(start(KL), rest)), outcome(clean), atol=1e-7)


def test_merged_minibatches_are_the_whole():
    """Scored by one policy, tasks 0 and 1 beside task 2 give what the three give at once."""
    groups, rewards = small_batch(1)
    update = update_of(KL)[0]

    def found(first, last):
        rows = np.concatenate([rewards[first:last], np.zeros((3 - last + first, 4))])
        batch = pack(groups[first:last], rows, SHAPE, drop_dead=False)
        return jax.device_get(update(start(KL), batch)[1])
    whole, parts = found(0, 3), [found(0, 2), found(2, 3)]
    both = merge(parts)
    for name in ("n_tokens", "n_sequences", "n_clip_low", "n_clip_high", "n_judged", "n_dead"):
        assert getattr(both, name) == getattr(whole, name), name
    for name in ("kl", "entropy", "logprob_gap", "clip_low_share", "dual_clip_share",
                 "dead_share"):
        assert getattr(both, name) == pytest.approx(getattr(whole, name), rel=1e-5), name
    means = [np.mean([getattr(part, name) for part in parts]) for name in ("kl", "dead_share")]
    assert abs(means[0] - whole.kl) > 1e-4 and means[1] != whole.dead_share  # parts differ in size
    assert both.loss == pytest.approx(np.mean([part.loss for part in parts]))
    np.testing.assert_array_equal(both.tokens_A, whole.tokens_A)
    authors = np.concatenate([np.asarray(r.author_L[:np.flatnonzero(r.author_L == 1)[-1] + 1])
                              for group in groups for r in group if r is not None])
    np.testing.assert_array_equal(whole.tokens_A, np.bincount(authors))


def test_no_gap_when_sampler_and_trainer_agree():
    groups, rewards = small_batch(3)
    batch = pack(groups, rewards, SHAPE, drop_dead=False)
    scored = np.array(batch.logprobs_MxRxL)
    for i, group in enumerate(groups):
        for g, r in enumerate(group):
            if r is not None:
                tokens = np.pad(r.tokens_L, (0, SHAPE.length - len(r.tokens_L)))[None]
                logp = dense_scores(tiny_decoder()[1], tokens, 0.7)[0][0]
                here = (batch.traj_MxRxL == i * 4 + g) & batch.sampled_MxRxL
                scored[here] = logp[batch.positions_MxRxL[here] - 1]
    _, metrics = update_of(KL)[0](start(KL), batch.replace(logprobs_MxRxL=scored))
    assert metrics.logprob_gap < 1e-5
    assert metrics.clip_low_share == metrics.clip_high_share == metrics.dual_clip_share == 0
    _, metrics = update_of(KL)[0](start(KL), batch)
    assert metrics.logprob_gap > 0.1 and metrics.clip_low_share > 0 and metrics.clip_high_share > 0


def test_dead_groups_keep_kl_only_when_asked():
    groups, rewards = small_batch(1)
    flat = np.where(np.isfinite(rewards), np.float32(0.5), rewards)
    batch = pack(groups, flat, SHAPE, drop_dead=False)
    new, metrics = update_of(KL)[0](start(KL), batch)
    assert bool(metrics.applied) and metrics.policy_loss == 0 and metrics.kl > 0
    assert any(np.any(g) for g in jax.tree.leaves(gradient(new)))

    without = CORRECTED  # has a KL term too
    assert KL.dead_carry_loss and not without.dead_carry_loss and not PLAIN.dead_carry_loss
    new, metrics = update_of(without)[0](start(without), batch)
    jax.tree.map(np.testing.assert_array_equal, new.params, start(without).params)
    assert not metrics.applied and metrics.loss == 0 and metrics.grad_norm == 0


def test_nothing_to_learn_from_leaves_the_weights_alone():
    """Momentum and decay would move them. Also when a NaN reaches the gradient."""
    update, traces = update_of(PLAIN)
    groups, rewards = small_batch(1)
    batch = pack(groups, rewards, SHAPE, drop_dead=True)
    state, metrics = update(start(PLAIN), batch)
    assert bool(metrics.applied)
    empty = pack(groups, np.full_like(rewards, 0.25), SHAPE, drop_dead=True)
    assert empty.n_micro == 0
    masked = pack(groups, np.full_like(rewards, 0.25), SHAPE, drop_dead=False)
    for nothing in (empty, masked):
        new, metrics = update(state, nothing)
        assert not metrics.applied and new.step == 2
        jax.tree.map(np.testing.assert_array_equal, (new.params, new.opt_state),
                     (state.params, state.opt_state))
        scalars = [v for k, v in vars(metrics).items() if not k.endswith(("_T", "_A"))]
        assert np.isfinite(np.asarray(scalars, np.float32)).all()
        assert metrics.loss == metrics.grad_norm == metrics.entropy == 0

    broken = state.replace(params=state.params | {"final_norm": jnp.full(8, np.nan, jnp.float32)})
    new, metrics = update(broken, batch)
    assert not metrics.applied
    jax.tree.map(np.testing.assert_array_equal, new.opt_state, broken.opt_state)
    assert len(traces) == 1


def test_one_trace_and_a_stable_state():
    update, traces = update_of(PLAIN)
    state = start(PLAIN)
    kinds = jax.tree.map(lambda x: (x.shape, x.dtype, jax.typeof(x).weak_type), state)
    for seed in range(3):
        groups, rewards = small_batch(seed, tasks=1 + seed)
        rewards = np.concatenate([rewards, np.zeros((3 - len(rewards), 4), np.float32)])
        state, _ = update(state, pack(groups, rewards, SHAPE, drop_dead=bool(seed % 2)))
    assert len(traces) == 1
    assert kinds == jax.tree.map(lambda x: (x.shape, x.dtype, jax.typeof(x).weak_type), state)
    assert state.step == 3


def test_supervised_step_is_cross_entropy_on_sampled_tokens():
    groups, rewards = small_batch(1)
    decoder, params = tiny_decoder()
    step = quick_jit(make_supervised(decoder, OPTIMIZER, logit_chunk=4))
    state = init_state(params, OPTIMIZER)
    new, metrics = step(state, pack(groups, np.nan_to_num(rewards), SHAPE, drop_dead=False))
    everything = dataclasses.replace(PLAIN, advantage=AdvantageConfig(dead_keep_kl=True))
    tokens, scored, *_ = rows_alone(groups, rewards, everything)

    d_logp = np.where(scored[:, 1:], -1 / scored.sum(), 0)
    logp, entropy, grads = dense_scores(params, tokens, 1.0, d_logp)
    assert metrics.loss == pytest.approx((logp * d_logp).sum(), abs=1e-5)
    assert metrics.entropy == pytest.approx(entropy[scored[:, 1:]].mean(), abs=1e-5)
    assert metrics.n_tokens == scored.sum()
    assert_close(gradient(new), grads)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="temperature is 0.0: training scores tokens"):
        UpdateConfig(temperature=0.0)
    with pytest.raises(ValueError, match="logit_chunk is 0"):
        UpdateConfig(logit_chunk=0)
    groups, rewards = small_batch(1)
    batch = pack(groups, rewards, SHAPE, True)
    with pytest.raises(ValueError, match="kl_coef > 0 needs ref_params"):
        update_of(KL)[0](start(PLAIN), batch)
