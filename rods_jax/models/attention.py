"""Attention: who sees whom, and the softmax over several sources of keys and values.

Dim letters: B rows, C queries of the chunk, S keys, H heads, KV key/value heads, Q = H / KV,
HD head width.
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp

# Stands in for a masked score. Finite, so that a query with nothing to attend to gets the
# plain mean of the values and finite gradients instead of NaN.
_MASKED = -1e30


@flax.struct.dataclass
class Segments:
    """Self-attention of packed rows, stated so that a kernel can read it: token i sees token
    j iff j <= i and both are of one segment. Segment 0 is padding.

    ids_BxC: int32.
    """

    ids_BxC: jax.Array


def causal_mask(length: int) -> jax.Array:
    """bool [1, C, C]: query i sees key j iff j <= i. Broadcasts over B."""
    return jnp.tril(jnp.ones((1, length, length), bool))


def segment_mask(segments_BxL: jax.Array) -> jax.Array:
    """bool [B, L, L] for packed rows: causal within a segment; segment 0 is padding, which
    sees itself alone so that its softmax stays defined."""
    length = segments_BxL.shape[-1]
    same = segments_BxL[:, :, None] == segments_BxL[:, None, :]
    real = segments_BxL[:, :, None] != 0
    return (causal_mask(length) & same & real) | jnp.eye(length, dtype=bool)


def attend(q_BxCxHxHD, sources) -> jax.Array:
    """Softmax attention over several key/value sources as if they were one; [B, C, H, HD].

    sources: tuples (k [B, KV, S, HD], v [B, KV, S, HD], mask bool, broadcastable to
    [B, C, S]). Scores are masked by replacement before the exponential and the softmax is
    taken in float32; the division by its sum comes last, where the array is smallest.
    """
    b, c, h, hd = q_BxCxHxHD.shape
    kv = sources[0][0].shape[1]
    q = (q_BxCxHxHD * hd ** -0.5).reshape(b, c, kv, h // kv, hd).transpose(0, 2, 3, 1, 4)
    scores = [jnp.where(mask[:, None, None], _scores(q, k), _MASKED) for k, _, mask in sources]
    peak = functools.reduce(jnp.maximum, [s.max(-1, keepdims=True) for s in scores])
    peak = jax.lax.stop_gradient(peak)  # cancels between numerator and sum
    weights = [jnp.exp(s - peak) for s in scores]
    total = sum(w.sum(-1, keepdims=True) for w in weights)
    out = sum(jnp.einsum("bnqcs,bnsh->bnqch", w.astype(v.dtype), v,
                         preferred_element_type=jnp.float32)
              for w, (_, v, _) in zip(weights, sources))
    out = (out / total).astype(q.dtype)
    return out.transpose(0, 3, 1, 2, 4).reshape(b, c, h, hd)


def _scores(q, k):
    """float32 [B, KV, Q, C, S] of q [B, KV, Q, C, HD] and k [B, KV, S, HD]."""
    if q.shape[3] > 1:
        return jnp.einsum("bnqch,bnsh->bnqcs", q, k, preferred_element_type=jnp.float32)
    # One query: with the keys as the left matrix a CPU runs this three times as fast.
    s = jnp.einsum("bnsh,bnqch->bnsqc", k, q, preferred_element_type=jnp.float32)
    return jnp.moveaxis(s, 2, -1)
