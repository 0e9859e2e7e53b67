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
from rods_jax.grpo.passes import (
    accumulate, at, buckets_of, for_prompts, micro_logprobs, prompt_kv, rows_at, shared_prompts)
from rods_jax.grpo.update import TrainState, apply_gradients, check_batch, policy_params
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

        def prompts(params, u):
            return prompt_kv(for_prompts(decoder), policy_params(state, params), batch, u), None

        def micro_loss(params, kv, _, u, i, length):
            rows = rows_at(batch, i, length, None)
            logp, entropy = micro_logprobs(
                decoder, policy_params(state, params), rows, shared_prompts(kv, batch, u, rows),
                at(mask_MxRxL, i), 1.0, logit_chunk, False)
            loss = -logp.sum() * scale
            return loss, (loss, entropy.sum() * scale)

        grads, (loss, entropy) = accumulate(prompts, micro_loss, state.params, batch,
                                            buckets_of(batch, None))
        state, norm, applied = apply_gradients(state, grads, optimizer, n_tokens > 0)
        return state, SupervisedMetrics(loss=loss, entropy=entropy, grad_norm=norm,
                                        applied=applied, n_tokens=n_tokens)

    return step
