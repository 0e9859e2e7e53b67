"""The warm start: cross-entropy on the tokens an expert wrote, over the same packed batches.

    loss = - sum over scored tokens of log p(token | what precedes it) / number of them

Rewards are ignored. Pack with drop_dead=False.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import optax

from rods_jax.grpo.batch import PackedBatch
from rods_jax.grpo.logprobs import predicted_mask
from rods_jax.grpo.update import (
    TrainState, accumulate, apply_gradients, check_batch, micro_logprobs, policy_params)
from rods_jax.models.decoder import Decoder


@flax.struct.dataclass
class SupervisedMetrics:
    """float32 scalars. loss: nats a token. entropy: nats, of the policy at those tokens.
    grad_norm: before clipping. applied: bool, see `apply_gradients`."""

    loss: jax.Array
    entropy: jax.Array
    grad_norm: jax.Array
    applied: jax.Array
    n_tokens: jax.Array


def make_supervised(decoder: Decoder, optimizer: optax.GradientTransformation,
                    logit_chunk: int = 64,
                    ) -> Callable[[TrainState, PackedBatch], tuple[TrainState, SupervisedMetrics]]:
    """step(state, batch) -> (state, metrics), pure; the caller jits it and donates the state."""

    def step(state: TrainState, batch: PackedBatch):
        check_batch(batch)
        mask_MxRxL = (predicted_mask(batch.sampled_MxRxL, batch.segments_MxRxL)
                      & batch.valid_TxG.reshape(-1)[batch.traj_MxRxL])
        n_tokens = mask_MxRxL.sum(dtype=jnp.float32)
        scale = 1.0 / jnp.maximum(n_tokens, 1.0)

        def micro_loss(params, i):
            row = lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False)  # noqa: E731
            logp, entropy = micro_logprobs(
                decoder, policy_params(state, params), row(batch.tokens_MxRxL),
                row(batch.positions_MxRxL), row(batch.segments_MxRxL), row(mask_MxRxL),
                1.0, logit_chunk, False)
            loss = -logp.sum() * scale
            return loss, (loss, entropy.sum() * scale)

        grads, (loss, entropy) = accumulate(micro_loss, state.params, batch.n_micro)
        state, norm, applied = apply_gradients(state, grads, optimizer, n_tokens > 0)
        return state, SupervisedMetrics(loss=loss, entropy=entropy, grad_norm=norm,
                                        applied=applied, n_tokens=n_tokens)

    return step
