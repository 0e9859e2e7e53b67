"""The GRPO update: `update(state, batch) -> (state, metrics)`, pure and traced once a run.

Rewards go in; group mean, variance, advantage and loss are computed on the device. The
loss weight of every token is fixed over the whole batch first, then gradients are summed
over the micro-batches that hold anything (a dynamic trip count), so the result depends on
neither the number of micro-batches nor the packing, nor on whether prompts are shared.

    policy gradient with group-relative advantage   rods_jax/grpo/advantage.py
    loss terms, token weights                       rods_jax/grpo/loss.py
    log-probs in chunks                             rods_jax/grpo/logprobs.py
    passes through the policy, prompts once         rods_jax/grpo/passes.py
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
from rods_jax.grpo.batch import BatchShape, PackedBatch
from rods_jax.grpo.logprobs import predicted_mask
from rods_jax.grpo.loss import LossConfig, segment_numbers, token_terms, token_weights
from rods_jax.grpo.optimizer import OptimizerConfig, OptimizerKind, make_optimizer
from rods_jax.grpo.passes import (
    accumulate, at, buckets_of, for_prompts, micro_logprobs, prompt_kv, rows_at, shared_prompts)
from rods_jax.grpo.tally import UpdateMetrics
from rods_jax.models import int8, lora
from rods_jax.models.decoder import Decoder
from rods_jax.types import Author

__all__ = [
    "OptimizerConfig", "OptimizerKind", "TrainState", "UpdateConfig", "UpdateMetrics",
    "apply_gradients", "init_state", "make_optimizer", "make_update", "policy_params",
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
                shape: BatchShape | None = None,
                ) -> Callable[[TrainState, PackedBatch], tuple[TrainState, UpdateMetrics]]:
    """The update as a pure function; the caller jits it and donates the state.

    shape: of the batches, needed where it states `alone` or `lengths`.
    With kl_coef > 0 the state needs ref_params (`init_state(..., keep_reference=True)`).
    ValueError for a decoder of rollouts whose weights are int8.
    """
    if decoder.config.int8_weights:
        raise ValueError(int8.NO_GRADIENT)
    use_kl = config.loss.kl_coef > 0
    score = partial(micro_logprobs, decoder, temperature=config.temperature,
                    chunk=config.logit_chunk)
    on_prompts = for_prompts(decoder)

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
        reference = policy_params(state, state.ref_params) if use_kl else None

        def prompts(params, u):
            known = prompt_kv(on_prompts, reference, batch, u) if use_kl else None
            return prompt_kv(on_prompts, policy_params(state, params), batch, u), known

        def micro_loss(params, kv, ref_kv, u, i, length):
            row = lambda x: at(x, i)[:, :length]  # noqa: E731
            rows, mask = rows_at(batch, i, length, shape), row(mask_MxRxL)
            logp, entropy = score(
                policy_params(state, params), rows, shared_prompts(kv, batch, u, rows), mask,
                entropy_gradient=config.loss.entropy_coef > 0)
            ref_logp = None
            if use_kl:
                ref_logp = jax.lax.stop_gradient(score(
                    reference, rows, shared_prompts(ref_kv, batch, u, rows), mask,
                    entropy_gradient=False)[0])
            terms = token_terms(logp, row(batch.logprobs_MxRxL), row(advantage_MxRxL), mask,
                                entropy, ref_logp, config.loss,
                                segment_numbers(row(batch.segments_MxRxL)))
            weight = row(weight_MxRxL)
            loss = (weight * terms.loss).sum()
            sums = {name: getattr(terms, name).sum(dtype=jnp.float32)
                    for name in ("kl", "entropy", "low", "high", "dual", "cut", "gap")}
            return loss, sums | {"loss": loss, "policy": (weight * terms.policy).sum()}

        grads, sums = accumulate(prompts, micro_loss, state.params, batch,
                                 buckets_of(batch, shape))
        n_tokens = mask_MxRxL.sum(dtype=jnp.float32)
        state, norm, applied = apply_gradients(state, grads, optimizer, n_tokens > 0)
        n_valid_T = stats.valid_TxG.sum(1, dtype=jnp.int32)
        judged_T = n_valid_T >= 2
        return state, UpdateMetrics(
            n_updates=jnp.int32(1), n_applied=applied.astype(jnp.int32), loss_sum=sums["loss"],
            policy_sum=sums["policy"], norm_sum=norm, n_tokens=n_tokens,
            n_sequences=n_sequences, kl_sum=sums["kl"], entropy_sum=sums["entropy"],
            n_clip_low=sums["low"], n_clip_high=sums["high"], n_dual_clip=sums["dual"],
            n_cut=sums["cut"], gap_sum=sums["gap"], n_judged=judged_T.sum(dtype=jnp.int32),
            n_dead=(judged_T & ~stats.live_T).sum(dtype=jnp.int32), tokens_A=author_counts(batch),
            mean_T=stats.mean_T, var_T=stats.var_T, live_T=stats.live_T, n_valid_T=n_valid_T)

    return update


def author_counts(batch: PackedBatch) -> jax.Array:
    """int32 [Author]: tokens in the batch by who wrote them; a shared prompt counts once."""
    real_MxRxL = batch.segments_MxRxL != 0
    counts_A = jnp.stack([(real_MxRxL & (batch.author_MxRxL == author)).sum(dtype=jnp.int32)
                          for author in Author])
    return counts_A.at[Author.PROMPT].add(batch.prompt_length_UxK.sum(dtype=jnp.int32))


def check_batch(batch: PackedBatch) -> None:
    """Shapes and dtypes of a PackedBatch, at trace time."""
    ints = (batch.tokens_MxRxL, batch.positions_MxRxL, batch.segments_MxRxL, batch.traj_MxRxL)
    chex.assert_rank(ints, 3)
    chex.assert_equal_shape([*ints, batch.author_MxRxL, batch.logprobs_MxRxL])
    chex.assert_type([*ints, batch.n_micro, batch.n_sets, batch.bucket_M, batch.end_U], jnp.int32)
    chex.assert_type(batch.author_MxRxL, jnp.int8)
    sets, prompts, _ = batch.prompts_UxKxP.shape
    chex.assert_shape(batch.prompt_length_UxK, (sets, prompts))
    chex.assert_shape(batch.end_U, (sets,))
    chex.assert_shape(batch.prompt_MxR, batch.tokens_MxRxL.shape[:2])
    chex.assert_type([batch.prompts_UxKxP, batch.prompt_length_UxK, batch.prompt_MxR], jnp.int32)
    chex.assert_type([batch.valid_TxG, batch.truncated_TxG], bool)
    chex.assert_type([batch.logprobs_MxRxL, batch.rewards_TxG], jnp.float32)
    chex.assert_rank([batch.rewards_TxG, batch.valid_TxG, batch.truncated_TxG], 2)
    chex.assert_equal_shape([batch.rewards_TxG, batch.valid_TxG, batch.truncated_TxG])
    chex.assert_rank([batch.n_micro, batch.n_sets], 0)
