"""Adapters trained alone: the update against the plain one of merged weights, by the chain
rule, and what happens to the weights that are frozen."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_cases import small_batch, tiny_decoder
from grpo_reference import (
    KL, OPTIMIZER, PLAIN, SHAPE, assert_close, dense_scores, gradient, quick_jit, reference,
    rows_alone, update_of)
from rods_jax.grpo.advantage import AdvantageConfig
from rods_jax.grpo.batch import pack
from rods_jax.grpo.optimizer import decayed
from rods_jax.grpo.supervised import make_supervised
from rods_jax.grpo.update import init_state, make_update, policy_params
from rods_jax.models import lora
from rods_jax.models.config import LoraConfig, ModelConfig, Remat
from rods_jax.models.decoder import Decoder, count_params, init_params

ADAPTED = LoraConfig("q_proj|o_proj|down_proj", rank=2, alpha=3.0)


def adapted_start(config, dtype="float32"):
    """Adapters with B not 0, over frozen weights; a reference of other adapters."""
    frozen, adapters = lora.split(tiny_decoder(adapted=ADAPTED)[1])
    frozen = jax.tree.map(lambda x: jnp.array(x, dtype), frozen)
    state = init_state(adapters, OPTIMIZER, config.loss.kl_coef > 0, frozen)
    if state.ref_params is not None:
        state = state.replace(ref_params=jax.tree.map(lambda x: x * 0.5 + 0.1, adapters))
    return state


def merged(state, params):
    """What the plain decoder computes the same from."""
    config = tiny_decoder(adapted=ADAPTED)[0].config
    return lora.merged(lora.join(state.frozen, params), config)


def by_adapters(adapters, grads):
    """The chain rule: dL/dA = s dL/dW B^T, dL/dB = s A^T dL/dW."""
    layers, rank, scale = {}, ADAPTED.rank, ADAPTED.scale
    for name in ADAPTED.parameters:
        a, b = (np.asarray(adapters["layers"][f"{name}_lora_{end}"][0], np.float64)
                for end in "ab")
        flat = np.asarray(grads["layers"][name], np.float64).reshape(a.size // rank, -1)
        layers[f"{name}_lora_a"] = scale * (flat @ b.reshape(rank, -1).T).reshape(1, *a.shape)
        layers[f"{name}_lora_b"] = scale * (a.reshape(-1, rank).T @ flat).reshape(1, *b.shape)
    return {"layers": layers}


@pytest.mark.parametrize("config", [PLAIN, KL], ids=["plain", "kl"])
def test_adapter_gradient_equals_the_plain_one_by_the_chain_rule(config):
    groups, rewards = small_batch(1)
    state = adapted_start(config)
    batch = pack(groups, rewards, SHAPE, drop_dead=not config.dead_carry_loss)
    new, metrics = update_of(config, ADAPTED)[0](state, batch)

    ref = state.ref_params and merged(state, state.ref_params)
    rows = rows_alone(groups, rewards, config)
    loss, grads = reference(merged(state, state.params), ref, rows, config)
    assert metrics.loss == pytest.approx(loss, abs=1e-5)
    want = by_adapters(state.params, grads)
    assert_close(gradient(new), want)
    assert all(np.abs(x).max() > 1e-3 for x in jax.tree.leaves(want))
    assert bool(metrics.applied)


def test_only_adapters_have_optimizer_state_and_move():
    state = adapted_start(KL)
    shapes = [x.shape for x in jax.tree.leaves(state.params)]
    assert len(shapes) == 6
    assert [x.shape for x in jax.tree.leaves(state.ref_params)] == shapes
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.shape]
    assert sorted(x.shape for x in moments) == sorted(shapes * 3)  # gradient, two of Adam
    assert all(jax.tree.leaves(decayed(state.params)))

    update, traces = update_of(KL, ADAPTED)
    before, seen = jax.device_get(state), len(traces)
    kinds = jax.tree.map(lambda x: (x.shape, x.dtype, jax.typeof(x).weak_type), state)
    for seed in range(3):
        groups, rewards = small_batch(seed)
        state, metrics = update(state, pack(groups, rewards, SHAPE, drop_dead=False))
        assert bool(metrics.applied)
    assert len(traces) - seen <= 1
    assert kinds == jax.tree.map(lambda x: (x.shape, x.dtype, jax.typeof(x).weak_type), state)
    jax.tree.map(np.testing.assert_array_equal, (state.frozen, state.ref_params),
                 (before.frozen, before.ref_params))
    for old, new in zip(jax.tree.leaves(before.params), jax.tree.leaves(state.params)):
        assert np.abs(old - new).max() > 1e-4
    whole = policy_params(state)
    assert whole["embed"] is state.frozen["embed"]
    assert whole["layers"]["q_lora_a"] is state.params["layers"]["q_lora_a"]


def test_the_reference_is_the_adapters_at_the_start():
    frozen, adapters = lora.split(tiny_decoder(adapted=ADAPTED)[1])
    state = init_state(adapters, OPTIMIZER, keep_reference=True, frozen=frozen)
    assert state.frozen is frozen
    jax.tree.map(np.testing.assert_array_equal, state.ref_params, adapters)
    batch = pack(*small_batch(1), SHAPE, drop_dead=False)
    update = update_of(KL, ADAPTED)[0]
    state, first = update(state, batch)
    _, second = update(state, batch)
    assert first.kl == 0 and second.kl > 1e-6


@pytest.mark.slow
def test_frozen_weights_are_given_on_and_never_copied():
    update = quick_jit(make_update(tiny_decoder(adapted=ADAPTED)[0], KL, OPTIMIZER),
                       donate_argnums=0)
    batch = pack(*small_batch(1), SHAPE, drop_dead=False)
    state = jax.tree.map(jnp.copy, adapted_start(KL))  # its buffers are given away
    at = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.frozen)]
    new, _ = update(state, batch)
    assert at == [x.unsafe_buffer_pointer() for x in jax.tree.leaves(new.frozen)]
    assert all(x.is_deleted() for x in jax.tree.leaves(state.frozen))

    # Weights that outweigh all else: what the program needs besides its arguments is less.
    config = ModelConfig(13, d_model=256, n_layers=12, n_heads=4, n_kv_heads=4, head_dim=64,
                         d_ff=256, lora=ADAPTED, remat=Remat.LAYER)
    frozen, params = lora.split(jax.eval_shape(lambda: init_params(config, jax.random.key(0))))
    state = jax.eval_shape(lambda *x: init_state(x[1], OPTIMIZER, True, x[0]), frozen, params)
    wide = quick_jit(make_update(Decoder(config), KL, OPTIMIZER), donate_argnums=0)
    memory = wide.lower(state, batch).compile().memory_analysis()
    size = 4 * count_params(frozen)
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 3, memory.temp_size_in_bytes / size


@pytest.mark.slow
def test_frozen_weights_may_be_bfloat16():
    batch = pack(*small_batch(1), SHAPE, drop_dead=False)
    update = update_of(KL, ADAPTED)[0]
    half = adapted_start(KL, "bfloat16")
    same = half.replace(frozen=jax.tree.map(lambda x: x.astype(jnp.float32), half.frozen))
    new, metrics = update(half, batch)
    want, want_metrics = update(same, batch)
    assert {x.dtype for x in jax.tree.leaves(new.frozen)} == {jnp.bfloat16.dtype}
    assert {x.dtype for x in jax.tree.leaves(new.params)} == {np.dtype(np.float32)}
    assert_close((gradient(new), metrics), (gradient(want), want_metrics), atol=1e-6)


@pytest.mark.slow
def test_supervised_step_trains_adapters():
    groups, rewards = small_batch(1)
    state = adapted_start(PLAIN)
    step = quick_jit(make_supervised(tiny_decoder(adapted=ADAPTED)[0], OPTIMIZER, logit_chunk=4))
    new, metrics = step(state, pack(groups, np.nan_to_num(rewards), SHAPE, drop_dead=False))
    everything = dataclasses.replace(PLAIN, advantage=AdvantageConfig(dead_keep_kl=True))
    tokens, scored, *_ = rows_alone(groups, rewards, everything)
    d_logp = np.where(scored[:, 1:], -1 / scored.sum(), 0)
    logp, _, grads = dense_scores(merged(state, state.params), tokens, 1.0, d_logp)
    assert metrics.loss == pytest.approx((logp * d_logp).sum(), abs=1e-5)
    assert_close(gradient(new), by_adapters(state.params, grads))
    jax.tree.map(np.testing.assert_array_equal, new.frozen, state.frozen)


def test_a_state_that_does_not_fit_the_decoder_is_named():
    batch, state = pack(*small_batch(1), SHAPE, True), adapted_start(PLAIN)

    def updated(state, adapted=None):
        update = make_update(tiny_decoder(adapted=adapted)[0], PLAIN, OPTIMIZER)
        return jax.eval_shape(update, state, batch)
    with pytest.raises(ValueError, match="has no place, lora targets are none"):
        updated(state)
    with pytest.raises(ValueError, match="layers/q_lora_a is missing"):
        updated(init_state(tiny_decoder()[1], OPTIMIZER), ADAPTED)
    doubled = state.replace(frozen=policy_params(state))
    with pytest.raises(ValueError, match="among the frozen and the trained parameters"):
        updated(doubled, ADAPTED)


def test_full_training_has_no_frozen_leaves():
    state = init_state(tiny_decoder()[1], OPTIMIZER)
    assert state.frozen is None and policy_params(state) is state.params
    assert not [path for path, _ in jax.tree_util.tree_leaves_with_path(state)
                if "frozen" in jax.tree_util.keystr(path)]
