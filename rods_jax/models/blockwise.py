"""Attention of packed rows to themselves and to a prompt that rows share, in blocks of queries
and keys: no array of all scores exists, forward or backward.

The softmax runs over the key blocks by its running maximum and sum, and the backward pass makes
the scores again from their log-sum-exp (https://arxiv.org/abs/2205.14135). Blocks of keys that
no query of a block may see are not visited: those after it, and those beyond a prompt's length.

A prompt's K/V is there once, whoever reads it, and its gradient is the sum over its readers.

Dim letters: B rows, C tokens a row, H heads, KV key/value heads, Q = H / KV, HD head width,
K prompts, P tokens of a prompt. Inside of blocks: b rows and n KV heads at once, c queries,
s keys.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

MASKED = -1e30  # in place of a masked score; finite, so that no NaN can come of it

# Under this name remat policies find what the backward pass needs of the forward pass.
OUTPUT = "attention"

# A block's scores, Q x _QUERIES x _KEYS, stay in a CPU's cache.
_QUERIES, _KEYS = 128, 512


class Rows(NamedTuple):
    """What does not change from layer to layer. Token i of a row sees token j of it iff j <= i
    and both are of one segment; segment 0 is padding, which sees itself alone. Every token sees
    the first length_K[prompt_B[b]] tokens of its row's prompt."""

    ids_BxC: jax.Array  # int32, segments
    prompt_B: jax.Array  # int32, below K
    length_K: jax.Array  # int32


def attend(q_BxCxHxHD, k, v, prompt_k, prompt_v, rows: Rows, first=0) -> jax.Array:
    """[B, C, H, HD]. k, v: [B, KV, S, HD]; prompt_k, prompt_v: [K, KV, P, HD], P may be 0.
    The queries are tokens first .. first + C - 1 of the S that a row has, by default all."""
    b, length, h, hd = q_BxCxHxHD.shape
    kv = k.shape[1]
    c, s, p = (_block(n, most) for n, most in ((length, _QUERIES), (k.shape[2], _KEYS),
                                               (prompt_k.shape[2], _KEYS)))
    first = jnp.int32(first)
    ids_q = jax.lax.dynamic_slice_in_dim(rows.ids_BxC, first, length, axis=1)
    q = _filled(q_BxCxHxHD * hd ** -0.5, c, 1)
    blocks = q.shape[1] // c
    q = q.reshape(b, blocks, c, kv, h // kv, hd).transpose(0, 3, 1, 4, 2, 5)
    out = _attend(
        Blocks(c, s, p), q.reshape(b, kv, blocks, -1, hd), _filled(k, s, 2), _filled(v, s, 2),
        _filled(prompt_k, p, 2), _filled(prompt_v, p, 2), _filled(ids_q, c, 1),
        _filled(rows.ids_BxC, s, 1), rows.prompt_B, rows.length_K, first)
    out = out.reshape(b, kv, blocks, h // kv, c, hd).transpose(0, 2, 4, 1, 3, 5)
    return out.reshape(b, blocks * c, h, hd)[:, :length]


class Blocks(NamedTuple):
    """Tokens a block: of queries, of the row's keys, of the prompt's keys."""

    c: int
    s: int
    p: int


def _block(length: int, most: int) -> int:
    """The size of equal blocks of at most about `most`, a multiple of 8."""
    n = max(1, -(-length // most))
    return max(8, -(-length // (8 * n)) * 8)


def _filled(x, block: int, axis: int):
    """Padded with zeros to whole blocks."""
    more = -x.shape[axis] % block
    return jnp.pad(x, [(0, more if a == axis else 0) for a in range(x.ndim)]) if more else x


# ---------------------------------------------------------------- all rows


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(sizes: Blocks, q, k, v, prompt_k, prompt_v, ids_q, ids_k, prompt_B, length_K,
            first):
    """q [B, KV, N, M, HD], scaled, in N blocks of M = Q * c queries, to the same."""
    return _forward(sizes, q, k, v, prompt_k, prompt_v, ids_q, ids_k, prompt_B, length_K,
                    first)[0]


def _forward(sizes: Blocks, q, k, v, prompt_k, prompt_v, ids_q, ids_k, prompt_B, length_K,
             first):
    """The output and its log-sum-exp [B, KV, N, M, 1]."""
    def together():
        return _few_forward(sizes, (q, k, v, prompt_k[prompt_B], prompt_v[prompt_B]),
                            (ids_q, ids_k, length_K[prompt_B], first))

    def in_turn():
        def row(x):
            *qkv, ids_q, ids_k, at = x
            marks = ids_q[None], ids_k[None], length_K[at][None], first
            def head(x):
                return _only(_few_forward(sizes, _one(x), marks))
            return jax.lax.map(head, (*qkv, prompt_k[at], prompt_v[at]))
        return jax.lax.map(row, (q, k, v, ids_q, ids_k, prompt_B))

    if not _worth_a_loop(q, k, prompt_k):
        return together()
    return jax.lax.platform_dependent(cpu=in_turn, default=together)


def _worth_a_loop(q, k, prompt_k) -> bool:
    """Whether a CPU takes a row and KV head at a time: products with a batch axis run on one of
    its cores, but small ones are over before another core has begun."""
    return q.shape[2] * q.shape[3] * (k.shape[2] + prompt_k.shape[2]) >= 2 ** 15


def _one(tree):
    return jax.tree.map(lambda x: x[None, None], tree)


def _only(tree):
    return jax.tree.map(lambda x: x[0, 0], tree)


def _saving(sizes: Blocks, *args):
    out, lse = (checkpoint_name(x, OUTPUT) for x in _forward(sizes, *args))
    return out, (*args, out, lse)


def _backward(sizes: Blocks, saved, d_out):
    q, k, v, prompt_k, prompt_v, ids_q, ids_k, prompt_B, length_K, first, out, lse = saved
    delta = (out.astype(jnp.float32) * d_out).sum(-1, keepdims=True)
    of_rows = q, k, v, d_out, lse, delta

    def together():
        prompts = prompt_k[prompt_B], prompt_v[prompt_B]
        *own, d_k, d_v = _few_backward(sizes, (*of_rows, *prompts), _zeros(prompts),
                                       (ids_q, ids_k, length_K[prompt_B], first))
        reads_KxB = (prompt_B == jnp.arange(prompt_k.shape[0])[:, None]).astype(jnp.float32)
        return *own, *(jnp.einsum("kb,bnph->knph", reads_KxB, d) for d in (d_k, d_v))

    def in_turn():
        def row(totals, x):
            *given, ids_q, ids_k, at = x
            marks = ids_q[None], ids_k[None], length_K[at][None], first
            def head(x):
                return _only(_few_backward(sizes, *_one(x), marks))
            *own, d_k, d_v = jax.lax.map(head, (
                (*given, prompt_k[at], prompt_v[at]), tuple(x[at] for x in totals)))
            return tuple(x.at[at].set(d) for x, d in zip(totals, (d_k, d_v))), own

        totals, own = jax.lax.scan(row, _zeros((prompt_k, prompt_v)),
                                   (*of_rows, ids_q, ids_k, prompt_B))
        return *own, *totals

    if _worth_a_loop(q, k, prompt_k):
        found = jax.lax.platform_dependent(cpu=in_turn, default=together)
    else:
        found = together()
    found = [d.astype(x.dtype) for d, x in zip(found, (q, k, v, prompt_k, prompt_v))]
    return *found, None, None, None, None, None


_attend.defvjp(_saving, _backward)


def _zeros(arrays):
    return tuple(jnp.zeros(x.shape, jnp.float32) for x in arrays)


# ---------------------------------------------------------------- a few rows and KV heads at once


def _few_forward(sizes: Blocks, arrays, marks):
    """arrays: q [b, n, N, M, HD]; k, v and the rows' prompts' k, v [b, n, S, HD]. marks: ids of
    queries and keys, lengths of the prompts [b], the first query's place. Returns what _forward does."""
    q, k, v, prompt_k, prompt_v = arrays

    def block(x):
        i, q = x
        def prompt(j, part):
            k, v = (_cut(x, j, sizes.p, 2) for x in (prompt_k, prompt_v))
            return _more(part, q, k, v, _sees_prompt(sizes, j, marks))
        def own(j, part):
            return _more(part, q, _cut(k, j, sizes.s, 2), _cut(v, j, sizes.s, 2),
                         _sees_own(sizes, q, i, j, marks))

        nothing = jnp.full((*q.shape[:-1], 1), MASKED), *_zeros((q[..., :1], q))
        part = _over_prompt(sizes, prompt_k, marks, prompt, nothing)
        peak, total, out = jax.lax.fori_loop(0, _own_blocks(sizes, k, i, marks), own, part)
        return (out / total).astype(q.dtype), peak + jnp.log(total)

    found = jax.lax.map(block, (jnp.arange(q.shape[2]), jnp.moveaxis(q, 2, 0)))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2), found)


def _more(part, q, k, v, seen):
    """The softmax so far (its peak, its sum, the values so weighted) with a block of keys more."""
    peak, total, out = part
    scores = jnp.where(seen, _product("bnmh,bnsh->bnms", q, k), MASKED)
    top = jnp.maximum(peak, scores.max(-1, keepdims=True))
    weights, before = jnp.exp(scores - top), jnp.exp(peak - top)
    return (top, total * before + weights.sum(-1, keepdims=True),
            out * before + _product("bnms,bnsh->bnmh", weights.astype(v.dtype), v))


def _few_backward(sizes: Blocks, arrays, totals, marks):
    """arrays: q, k, v, d_out, log-sum-exp, delta, and the prompts' k, v. totals: the gradients
    of the prompts' k, v so far. Returns those of q, k, v and the new totals, float32."""
    q, k, v, d_out, lse, delta, prompt_k, prompt_v = arrays

    def block(carry, x):
        i, *queries = x
        def prompt(j, d):
            d_q, d_k, d_v = d
            k, v = (_cut(x, j, sizes.p, 2) for x in (prompt_k, prompt_v))
            more = _gradients(*queries, k, v, _sees_prompt(sizes, j, marks))
            return d_q + more[0], _add(d_k, more[1], j), _add(d_v, more[2], j)
        def own(j, d):
            d_q, d_k, d_v = d
            more = _gradients(*queries, _cut(k, j, sizes.s, 2), _cut(v, j, sizes.s, 2),
                              _sees_own(sizes, queries[0], i, j, marks))
            return d_q + more[0], _add(d_k, more[1], j), _add(d_v, more[2], j)

        d_k, d_v, *totals = carry
        d_q, = _zeros(queries[:1])
        d_q, *totals = _over_prompt(sizes, prompt_k, marks, prompt, (d_q, *totals))
        d_q, d_k, d_v = jax.lax.fori_loop(0, _own_blocks(sizes, k, i, marks), own, (d_q, d_k, d_v))
        return (d_k, d_v, *totals), d_q

    queries = (jnp.moveaxis(x, 2, 0) for x in (q, d_out, lse, delta))
    carry, d_q = jax.lax.scan(block, (*_zeros((k, v)), *totals),
                              (jnp.arange(q.shape[2]), *queries))
    return jnp.moveaxis(d_q, 0, 2), *carry


def _gradients(q, d_out, lse, delta, k, v, seen):
    """What a block of queries and one of keys give to the gradients of q, k and v."""
    scores = jnp.where(seen, _product("bnmh,bnsh->bnms", q, k) - lse, MASKED)
    weights = jnp.exp(scores)
    d_scores = (weights * (_product("bnmh,bnsh->bnms", d_out, v) - delta)).astype(q.dtype)
    return (_product("bnms,bnsh->bnmh", d_scores, k), _product("bnms,bnmh->bnsh", d_scores, q),
            _product("bnms,bnmh->bnsh", weights.astype(q.dtype), d_out))


_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def _sees_prompt(sizes: Blocks, j, marks):
    """bool [b, 1, 1, p]: which keys of block j are of the prompt."""
    _, _, length_b, _ = marks
    return (j * sizes.p + jnp.arange(sizes.p) < length_b[:, None])[:, None, None]


def _over_prompt(sizes: Blocks, prompt_k, marks, step, start):
    """A loop over the blocks of the longest prompt."""
    if not prompt_k.shape[2]:
        return start
    _, _, length_b, _ = marks
    return jax.lax.fori_loop(0, -(-length_b.max() // sizes.p), step, start)


def _sees_own(sizes: Blocks, q, i, j, marks):
    """bool [b, 1, M, s]: which keys of block j the queries of block i see."""
    ids_q, ids_k, _, first = marks
    ids_q = _cut(ids_q, i, sizes.c, 1)[:, :, None]
    ids_k = _cut(ids_k, j, sizes.s, 1)[:, None, :]
    at_q = (first + i * sizes.c + jnp.arange(sizes.c))[:, None]
    at_k = j * sizes.s + jnp.arange(sizes.s)
    seen = ((ids_q == ids_k) & (ids_q != 0) & (at_k <= at_q)) | (at_k == at_q)
    return jnp.tile(seen, (1, q.shape[2] // sizes.c, 1))[:, None]


def _own_blocks(sizes: Blocks, k, i, marks):
    """Blocks of keys up to the last query of block i; its padding may reach beyond them all."""
    *_, first = marks
    return jnp.minimum(-(-(first + (i + 1) * sizes.c) // sizes.s), k.shape[2] // sizes.s)


def _cut(x, i, size: int, axis: int):
    return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis)


def _add(total, part, j):
    """The total with a part added to its block j."""
    size = part.shape[2]
    return jax.lax.dynamic_update_slice_in_dim(total, _cut(total, j, size, 2) + part, j * size, 2)
