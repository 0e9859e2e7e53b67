"""Log-probs and entropies of given tokens, without ever holding all logits.

Position i predicts the token at i + 1 of the same segment. The rows' predicting positions
are brought to the front, then the head runs over chunks of columns under remat: a chunk in
which no row predicts anything is not computed, and [R, L, V] never exists, neither forward
nor backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp


def predicted_mask(sampled: jax.Array, segments: jax.Array) -> jax.Array:
    """bool [..., L]: tokens the policy wrote that follow a token of the same segment. Only
    these have a prediction to score."""
    before = jnp.roll(segments, 1, axis=-1).at[..., 0].set(0)
    return sampled & (segments != 0) & (segments == before)


def token_logprobs(
    head: Callable[[jax.Array], jax.Array], hidden_RxLxD: jax.Array, tokens_RxL: jax.Array,
    mask_RxL: jax.Array, temperature: float, chunk: int, entropy_gradient: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """float32 [R, L] each: log-prob of each masked-in token under softmax(logits /
    temperature), and the entropy of that distribution in nats; 0 elsewhere.

    head: hidden [..., D] -> float32 logits [..., V]. mask_RxL: which tokens to score (see
    `predicted_mask`); column 0 cannot be, nothing precedes it. chunk: columns a step, so
    R * chunk * V logits are alive at a time. entropy_gradient: False where the entropy is
    only looked at, which saves its part of the backward pass.
    """
    # Shift: column i now holds what position i predicts.
    target_RxL = jnp.roll(tokens_RxL, -1, axis=1)
    wanted_RxL = jnp.roll(mask_RxL, -1, axis=1).at[:, -1].set(False)
    rows, length = target_RxL.shape
    chunk = min(chunk, length)
    n_chunks = -(-length // chunk)

    order_RxL = jnp.argsort(~wanted_RxL, axis=1, stable=True)
    inverse_RxL = jnp.argsort(order_RxL, axis=1)

    def chunked(x):  # [R, L, ...] -> [n_chunks, R, chunk, ...]
        x = jnp.pad(x, ((0, 0), (0, n_chunks * chunk - length)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(rows, n_chunks, chunk, *x.shape[2:]), 1, 0)

    take = partial(jnp.take_along_axis, axis=1)
    xs = (chunked(permute_columns(hidden_RxLxD, order_RxL, inverse_RxL)),
          chunked(take(target_RxL, order_RxL)), chunked(take(wanted_RxL, order_RxL)))

    @jax.checkpoint
    def score(hidden, target, wanted):
        hidden = jnp.where(wanted[..., None], hidden, 0)  # what padding holds stays out
        logits = head(hidden) / temperature
        log_z = jax.nn.logsumexp(logits, axis=-1)
        logp = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0] - log_z
        if not entropy_gradient:
            logits, log_z = jax.lax.stop_gradient((logits, log_z))
        entropy = log_z - (jnp.exp(logits - log_z[..., None]) * logits).sum(-1)
        return jnp.where(wanted, logp, 0.0), jnp.where(wanted, entropy, 0.0)

    def nothing(hidden, target, wanted):
        zeros = jnp.zeros(wanted.shape, jnp.float32)
        return zeros, zeros

    def step(carry, x):
        return carry, jax.lax.cond(x[2].any(), score, nothing, *x)

    _, scores = jax.lax.scan(step, None, xs)

    def restored(y):  # [n_chunks, R, chunk] -> [R, L], column i scores token i again
        y = take(jnp.moveaxis(y, 0, 1).reshape(rows, -1)[:, :length], inverse_RxL)
        return jnp.roll(y, 1, axis=1)

    return restored(scores[0]), restored(scores[1])


@jax.custom_vjp
def permute_columns(x_RxLxD: jax.Array, order_RxL: jax.Array, inverse_RxL: jax.Array) -> jax.Array:
    """Each row's columns in the given order. The gradient of a permutation is the inverse
    permutation: a gather, where the generic rule would scatter."""
    del inverse_RxL
    return jax.vmap(lambda x, order: x[order])(x_RxLxD, order_RxL)


def _permute_forward(x_RxLxD, order_RxL, inverse_RxL):
    return permute_columns(x_RxLxD, order_RxL, inverse_RxL), (order_RxL, inverse_RxL)


def _permute_backward(saved, grad_RxLxD):
    order_RxL, inverse_RxL = saved
    return permute_columns(grad_RxLxD, inverse_RxL, order_RxL), None, None


permute_columns.defvjp(_permute_forward, _permute_backward)
