"""The GRPO update: `update(state, batch) -> (state, metrics)`, pure and traced once a run.

Rewards go in; group mean, variance, advantage and loss are computed on the device. The
loss weight of every token is fixed over the whole batch first, then gradients are summed
over the micro-batches that hold anything (a dynamic trip count), so the result depends on
neither the number of micro-batches nor the packing.

    policy gradient with group-relative advantage   rods_jax/grpo/advantage.py
    loss terms, token weights                       rods_jax/grpo/loss.py
    log-probs in chunks                             rods_jax/grpo/logprobs.py
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp
import optax

from rods_jax.grpo.advantage import AdvantageConfig, group_advantage
from rods_jax.grpo.batch import PackedBatch
from rods_jax.grpo.logprobs import predicted_mask, token_logprobs
from rods_jax.grpo.loss import LossConfig, token_terms, token_weights
from rods_jax.grpo.optimizer import OptimizerConfig, OptimizerKind, make_optimizer
from rods_jax.models import int8, lora
from rods_jax.models.attention import Segments
from rods_jax.models.decoder import Decoder

__all__ = [
    "OptimizerConfig", "OptimizerKind", "TrainState", "UpdateConfig", "UpdateMetrics",
    "accumulate", "apply_gradients", "init_state", "make_optimizer", "make_update",
    "micro_logprobs", "policy_params",
]

Params = Any  # tree of arrays; those that are trained are float32


@flax.struct.dataclass
class TrainState:
    """params: what is trained, a tree of float32: all weights, or with `frozen` the adapters
    alone. opt_state: optax's, over params. step: int32 scalar, updates seen. ref_params: the
    reference policy in the form of params, None where there is no KL term. frozen: weights
    that stay as they are, of any dtype, None where all are trained; see `policy_params`."""

    params: Params
    opt_state: optax.OptState
    step: jax.Array
    ref_params: Params | None = None
    frozen: Params | None = None


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    """temperature: the sampler's, under which the trainer scores too. logit_chunk: columns
    of a row batch whose logits are alive at a time."""

    loss: LossConfig = LossConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    temperature: float = 1.0
    logit_chunk: int = 64

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"temperature is {self.temperature}: training scores tokens under the "
                             "sampling temperature, which must be positive")
        if self.logit_chunk < 1:
            raise ValueError(f"logit_chunk is {self.logit_chunk}: give 1 or more columns")

    @property
    def dead_carry_loss(self) -> bool:
        """Whether groups without variance carry loss; if not, they need not be packed."""
        return self.advantage.dead_keep_kl and (self.loss.kl_coef > 0 or self.loss.entropy_coef > 0)


@flax.struct.dataclass
class UpdateMetrics:
    """float32 scalars unless a shape is given; means are over tokens that carry loss, 0
    where there are none.

    loss: the minimized number. policy_loss: its policy part, weighted alike. kl: to the
    reference. entropy: nats. clip_low_share, clip_high_share, dual_clip_share,
    importance_cut_share: tokens whose gradient that bound took away or cut. logprob_gap:
    mean |trainer - sampler| log-prob. dead_share: groups without variance among groups
    with two or more valid members. grad_norm: before clipping. applied: bool, False when no
    token carried loss or the gradient was not finite; parameters and optimizer then stay.
    mean_T, var_T: float32 [T]. live_T: bool [T]. n_valid_T: int32 [T], valid members."""

    loss: jax.Array
    policy_loss: jax.Array
    kl: jax.Array
    entropy: jax.Array
    clip_low_share: jax.Array
    clip_high_share: jax.Array
    dual_clip_share: jax.Array
    importance_cut_share: jax.Array
    logprob_gap: jax.Array
    dead_share: jax.Array
    grad_norm: jax.Array
    applied: jax.Array
    n_tokens: jax.Array
    n_sequences: jax.Array
    mean_T: jax.Array
    var_T: jax.Array
    live_T: jax.Array
    n_valid_T: jax.Array


def init_state(params: Params, optimizer: optax.GradientTransformation,
               keep_reference: bool = False, frozen: Params | None = None) -> TrainState:
    """State before the first update. keep_reference: these params, copied, are the reference
    policy (a copy, so that the state can be donated); over `frozen` weights that is a copy of
    the adapters. frozen: not copied, so a donated state takes the caller's buffers along.
    To train adapters alone: `frozen, params = lora.split(...)`."""
    reference = jax.tree.map(jnp.copy, params) if keep_reference else None
    return TrainState(params=params, opt_state=optimizer.init(params),
                      step=jnp.zeros((), jnp.int32), ref_params=reference, frozen=frozen)


def policy_params(state: TrainState, params: Params | None = None) -> Params:
    """All weights of the policy, for a decoder: `params` (those being trained, or the
    reference's; default state.params) joined to the frozen ones. No array is copied."""
    params = state.params if params is None else params
    return params if state.frozen is None else lora.join(state.frozen, params)


def micro_logprobs(decoder: Decoder, params: Params, tokens_RxL, positions_RxL, segments_RxL,
                   mask_RxL, temperature: float, chunk: int, entropy_gradient: bool):
    """Log-probs and entropies float32 [R, L] of one micro-batch, 0 where mask is False.
    params: all weights. ValueError where their adapters are not what decoder.config says."""
    lora.check(params, decoder.config)
    variables = {"params": params}
    hidden_RxLxD, _ = decoder.apply(
        variables, tokens_RxL, positions_RxL, Segments(segments_RxL))
    head = partial(decoder.apply, variables, method="logits")
    return token_logprobs(head, hidden_RxLxD, tokens_RxL, mask_RxL, temperature, chunk,
                          entropy_gradient)


def accumulate(micro_loss: Callable, params: Params, n_micro: jax.Array):
    """Sums of gradients and of auxiliary sums over micro-batches 0 .. n_micro - 1.

    micro_loss(params, i) -> (loss, tree of sums). The trip count is a traced number: one
    trace serves batches of any fill.
    """
    gradient = jax.grad(micro_loss, has_aux=True)

    def body(i, total):
        return jax.tree.map(jnp.add, total, gradient(params, i))

    like = jax.eval_shape(gradient, params, jax.ShapeDtypeStruct((), jnp.int32))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
    return jax.lax.fori_loop(jnp.int32(0), n_micro, body, zeros)


def apply_gradients(state: TrainState, grads: Params, optimizer: optax.GradientTransformation,
                    any_loss: jax.Array) -> tuple[TrainState, jax.Array, jax.Array]:
    """The next state, the gradient's norm, and whether the step was applied.

    Without any loss, or with a gradient that is not finite, parameters and optimizer stay as
    they are: momentum and weight decay must not move weights on a batch that says nothing.
    """
    norm = jnp.sqrt(sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(grads)))
    applied = any_loss & jnp.isfinite(norm)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(applied, new, old),
        (params, opt_state), (state.params, state.opt_state))
    return state.replace(params=params, opt_state=opt_state, step=state.step + 1), norm, applied


def make_update(decoder: Decoder, config: UpdateConfig, optimizer: optax.GradientTransformation,
                ) -> Callable[[TrainState, PackedBatch], tuple[TrainState, UpdateMetrics]]:
    """The update as a pure function; the caller jits it and donates the state.

    With kl_coef > 0 the state needs ref_params (`init_state(..., keep_reference=True)`).
    ValueError for a decoder of rollouts whose weights are int8.
    """
    if decoder.config.int8_weights:
        raise ValueError(int8.NO_GRADIENT)
    use_kl = config.loss.kl_coef > 0

    def update(state: TrainState, batch: PackedBatch):
        check_batch(batch)
        if use_kl and state.ref_params is None:
            raise ValueError("kl_coef > 0 needs ref_params in the state: make it with "
                             "init_state(..., keep_reference=True)")
        stats = group_advantage(batch.rewards_TxG, batch.valid_TxG, config.advantage)
        carries_TxG = stats.valid_TxG & (stats.live_T[:, None] | config.dead_carry_loss)
        if config.loss.mask_truncated:
            carries_TxG &= ~batch.truncated_TxG
        mask_MxRxL = (predicted_mask(batch.sampled_MxRxL, batch.segments_MxRxL)
                      & carries_TxG.reshape(-1)[batch.traj_MxRxL])
        weight_MxRxL, n_sequences = token_weights(
            mask_MxRxL, batch.traj_MxRxL, carries_TxG.size, config.loss)
        advantage_MxRxL = stats.advantage_TxG.reshape(-1)[batch.traj_MxRxL]

        def micro_loss(params, i):
            row = lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False)  # noqa: E731
            mask = row(mask_MxRxL)
            score = partial(
                micro_logprobs, decoder, tokens_RxL=row(batch.tokens_MxRxL),
                positions_RxL=row(batch.positions_MxRxL), segments_RxL=row(batch.segments_MxRxL),
                mask_RxL=mask, temperature=config.temperature, chunk=config.logit_chunk)
            logp, entropy = score(policy_params(state, params),
                                  entropy_gradient=config.loss.entropy_coef > 0)
            ref_logp = None
            if use_kl:
                reference = policy_params(state, state.ref_params)
                ref_logp = jax.lax.stop_gradient(score(reference, entropy_gradient=False)[0])
            terms = token_terms(logp, row(batch.logprobs_MxRxL), row(advantage_MxRxL), mask,
                                entropy, ref_logp, config.loss)
            weight = row(weight_MxRxL)
            loss = (weight * terms.loss).sum()
            sums = {name: getattr(terms, name).sum(dtype=jnp.float32)
                    for name in ("kl", "entropy", "low", "high", "dual", "cut", "gap")}
            return loss, sums | {"loss": loss, "policy": (weight * terms.policy).sum()}

        grads, sums = accumulate(micro_loss, state.params, batch.n_micro)
        n_tokens = mask_MxRxL.sum(dtype=jnp.float32)
        state, norm, applied = apply_gradients(state, grads, optimizer, n_tokens > 0)
        n_valid_T = stats.valid_TxG.sum(1, dtype=jnp.int32)
        judged_T = n_valid_T >= 2
        mean = {name: total / jnp.maximum(n_tokens, 1.0) for name, total in sums.items()}
        return state, UpdateMetrics(
            loss=sums["loss"], policy_loss=sums["policy"], kl=mean["kl"], entropy=mean["entropy"],
            clip_low_share=mean["low"], clip_high_share=mean["high"], dual_clip_share=mean["dual"],
            importance_cut_share=mean["cut"], logprob_gap=mean["gap"],
            dead_share=(judged_T & ~stats.live_T).sum() / jnp.maximum(judged_T.sum(), 1),
            grad_norm=norm, applied=applied, n_tokens=n_tokens, n_sequences=n_sequences,
            mean_T=stats.mean_T, var_T=stats.var_T, live_T=stats.live_T, n_valid_T=n_valid_T)

    return update


def check_batch(batch: PackedBatch) -> None:
    """Shapes and dtypes of a PackedBatch, at trace time."""
    ints = (batch.tokens_MxRxL, batch.positions_MxRxL, batch.segments_MxRxL, batch.traj_MxRxL)
    chex.assert_rank(ints, 3)
    chex.assert_equal_shape([*ints, batch.sampled_MxRxL, batch.logprobs_MxRxL])
    chex.assert_type([*ints, batch.n_micro], jnp.int32)
    chex.assert_type([batch.sampled_MxRxL, batch.valid_TxG, batch.truncated_TxG], bool)
    chex.assert_type([batch.logprobs_MxRxL, batch.rewards_TxG], jnp.float32)
    chex.assert_rank([batch.rewards_TxG, batch.valid_TxG, batch.truncated_TxG], 2)
    chex.assert_equal_shape([batch.rewards_TxG, batch.valid_TxG, batch.truncated_TxG])
    chex.assert_rank(batch.n_micro, 0)
