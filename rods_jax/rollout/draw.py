"""The distribution that tokens are sampled from, and a draw of it that can be repeated."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Filter:
    """What is left of the distribution: the top_k likeliest tokens (0: all), and of these the
    fewest likeliest whose probability, before any are left out, reaches top_p (1: all). Of
    equally likely tokens the lower id comes first.

    Training scores tokens under the whole distribution, so it takes no filter: log-probs
    would differ by -log(top_p) and more from those of the sampler."""

    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}: give 0, which keeps all tokens, or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: give a number above 0, up to 1")

    @property
    def on(self) -> bool:
        return self.top_k > 0 or self.top_p < 1


def filtered(logits_BxV: jax.Array, keep: Filter) -> jax.Array:
    """The logits, -inf for tokens that are left out."""
    if not keep.on:
        return logits_BxV
    order_BxV = jnp.argsort(-logits_BxV, axis=-1, stable=True)
    probs_BxV = jnp.take_along_axis(jax.nn.softmax(logits_BxV, axis=-1), order_BxV, axis=-1)
    before_BxV = jnp.cumsum(probs_BxV, axis=-1) - probs_BxV
    rank = jnp.arange(logits_BxV.shape[-1])
    kept_BxV = (rank == 0) | ((before_BxV < keep.top_p)
                              & ((keep.top_k == 0) | (rank < keep.top_k)))
    kept_BxV = jnp.take_along_axis(kept_BxV, jnp.argsort(order_BxV, axis=-1), axis=-1)
    return jnp.where(kept_BxV, logits_BxV, -jnp.inf)


def row_keys(key: jax.Array, who_Bx2: jax.Array) -> jax.Array:
    """A key a row of `who` (uint32: a hash of the task, and the sample with its row)."""
    return jax.vmap(
        lambda who: jax.random.fold_in(jax.random.fold_in(key, who[0]), who[1]))(who_Bx2)


def draw(logits_BxV: jax.Array, keys_B: jax.Array, position_B: jax.Array, temperature: jax.Array,
         keep: Filter) -> tuple[jax.Array, jax.Array]:
    """A token of each row, int32 [B], and its float32 log-prob under what it was drawn from:
    softmax(logits / temperature) filtered. The draw is a function of the row's key and the
    token's position alone. Temperature 0 takes the likeliest token and scores it under
    softmax(logits)."""
    logits_BxV = logits_BxV.astype(jnp.float32)
    hot = temperature > 0
    logits_BxV = logits_BxV / jnp.where(hot, temperature, 1.0)
    if keep.on:
        logits_BxV = jnp.where(hot, filtered(logits_BxV, keep), logits_BxV)
    noise_BxV = jax.vmap(
        lambda key, position: jax.random.gumbel(
            jax.random.fold_in(key, position), logits_BxV.shape[1:]))(keys_B, position_B)
    token_B = _argmax(jnp.where(hot, logits_BxV + noise_BxV, logits_BxV))
    chosen_B = jnp.take_along_axis(logits_BxV, token_B[:, None], axis=-1)[:, 0]
    return token_B, chosen_B - jax.scipy.special.logsumexp(logits_BxV, axis=-1)


def _argmax(scores_BxV: jax.Array) -> jax.Array:
    """int32 [B]: the first of the largest. As two plain reductions, which vectorize; argmax
    carries value and index along, at several times the cost on a CPU."""
    n = scores_BxV.shape[-1]
    largest_BxV = scores_BxV == scores_BxV.max(-1, keepdims=True)
    return jnp.where(largest_BxV, jnp.arange(n, dtype=jnp.int32), n - 1).min(-1)
