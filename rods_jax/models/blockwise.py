"""Attention of packed rows to themselves and to a prompt that rows share, in blocks of queries
and keys: no array of all scores exists, forward or backward.

The softmax runs over the key blocks by its running maximum and sum, and the backward pass makes
the scores again from their log-sum-exp (https://arxiv.org/abs/2205.14135). Blocks of keys that
no query of a block may see are not visited: those after it, and those beyond a prompt's length.

A prompt's gradient is the sum over its readers. Where there is one prompt its K/V is read in
place; of several, one row after another on a CPU, elsewhere a copy for each row.

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

# Scores of a block: so few that they stay in a CPU's cache, so many that a product is worth its
# start. More queries than keys, for each block of keys costs the queries a turn of the softmax.
_QUERIES, _KEYS = 512, 256  # a query of each of a K/V head's heads is one
_READERS = 1024  # queries that read a prompt together


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
    c, s, p = (_block(n, most) for n, most in (
        (length, max(1, _QUERIES * kv // h)), (k.shape[2], _KEYS), (prompt_k.shape[2], _KEYS)))
    first = jnp.int32(first)
    ids_q = jax.lax.dynamic_slice_in_dim(rows.ids_BxC, first, length, axis=1)
    q = _filled(q_BxCxHxHD * hd ** -0.5, c, 1)
    blocks = q.shape[1] // c
    q = q.reshape(b, blocks, c, kv, h // kv, hd).transpose(0, 3, 1, 4, 2, 5)
    out = _attend(
        Blocks(c, s, p), q.reshape(b, kv, blocks, -1, hd), _filled(k, s, 2), _filled(v, s, 2),
        _filled(prompt_k, p, 2), _filled(prompt_v, p, 2),
        Marks(_filled(ids_q, c, 1), _filled(rows.ids_BxC, s, 1), first, rows.prompt_B,
              rows.length_K))
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


class Marks(NamedTuple):
    """Who sees what: the segments of queries and keys, the first query's place in its row, the
    rows' prompts and the prompts' lengths."""

    ids_q: jax.Array
    ids_k: jax.Array
    first: jax.Array
    prompt_B: jax.Array
    length_K: jax.Array


class Part(NamedTuple):
    """Of the softmax over some of the keys: float32, the largest score [..., 1], the sum of
    exp(score - peak) [..., 1] and the values so weighted [..., HD]."""

    peak: jax.Array
    total: jax.Array
    out: jax.Array


# ---------------------------------------------------------------- the whole


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(sizes: Blocks, q, k, v, prompt_k, prompt_v, marks: Marks):
    """q [B, KV, N, M, HD], scaled, in N blocks of M = Q * c queries, to the same."""
    return _forward(sizes, q, k, v, prompt_k, prompt_v, marks)[0]


def _forward(sizes: Blocks, q, k, v, prompt_k, prompt_v, marks: Marks):
    """The output and its log-sum-exp [B, KV, N, M, 1]."""
    part = Part(jnp.full((*q.shape[:-1], 1), MASKED), *_zeros((q[..., :1], q)))
    if prompt_k.shape[2]:
        merged, split = _readers(q, prompt_k.shape[0])
        lengths, prompts = _lengths(marks, prompt_k)
        part = jax.tree.map(split, _over(
            partial(_prompt_forward, sizes), (merged(q), jax.tree.map(merged, part)),
            (prompt_k, prompt_v), lengths, prompts))
    part = _over(partial(_own_forward, sizes), (q, part, k, v), (), _own_marks(marks))
    return (part.out / part.total).astype(q.dtype), part.peak + jnp.log(part.total)


def _saving(sizes: Blocks, *args):
    out, lse = (checkpoint_name(x, OUTPUT) for x in _forward(sizes, *args))
    return out, (*args, out, lse)


def _backward(sizes: Blocks, saved, d_out):
    q, k, v, prompt_k, prompt_v, marks, out, lse = saved
    delta = (out.astype(jnp.float32) * d_out).sum(-1, keepdims=True)
    queries = q, d_out, lse, delta
    d_q, d_k, d_v = _over(partial(_own_backward, sizes), (queries, k, v), (), _own_marks(marks))
    d_prompt = prompt_k, prompt_v  # empty, where there is none
    if prompt_k.shape[2]:
        merged, split = _readers(q, prompt_k.shape[0])
        lengths, prompts = _lengths(marks, prompt_k)
        more, *d_prompt = _over(
            partial(_prompt_backward, sizes), (jax.tree.map(merged, queries),),
            (prompt_k, prompt_v), lengths, prompts, totals=2)
        d_q += split(more)
    found = [d.astype(x.dtype) for d, x in zip((d_q, d_k, d_v, *d_prompt),
                                               (q, k, v, prompt_k, prompt_v))]
    return *found, None


_attend.defvjp(_saving, _backward)


def _readers(q, prompts: int):
    """Functions that put the queries of rows which read one prompt together, and apart again.
    Where there is one prompt its readers are one row, in larger blocks."""
    b, kv, n, m, _ = q.shape
    if prompts > 1:
        return (lambda x: x), (lambda x: x)
    at_once = max(i for i in range(1, b * n + 1)
                  if b * n % i == 0 and (i == 1 or i * m <= _READERS))

    def merged(x):
        return x.swapaxes(0, 1).reshape(1, kv, b * n // at_once, at_once * m, x.shape[-1])
    def split(x):
        return x.reshape(kv, b, n, m, x.shape[-1]).swapaxes(0, 1)
    return merged, split


def _lengths(marks: Marks, prompt_k):
    """Of each reader: its prompt's length, and its prompt."""
    if prompt_k.shape[0] == 1:
        return marks.length_K, jnp.zeros((1,), jnp.int32)
    return marks.length_K[marks.prompt_B], marks.prompt_B


def _own_marks(marks: Marks):
    """Of each row."""
    return marks.ids_q, marks.ids_k, jnp.broadcast_to(marks.first, marks.ids_q.shape[:1])


def _over(function, arrays, prompts, marks, prompt_B=None, totals: int = 0):
    """function(arrays, prompts, marks) for all rows and KV heads: arrays [B, KV, ...], marks
    [B, ...]; prompts [K, KV, ...], of which row b gets number prompt_B[b]. The last `totals` of
    its results are of prompts, and added up over their readers.

    A CPU takes a row and head at a time where they are large: products with a batch axis run on
    one of its cores, but small ones are over before another core has begun."""
    def together():
        found = function(arrays, tuple(x[prompt_B] for x in prompts), marks)
        if not totals:
            return found
        reads_KxB = (prompt_B == jnp.arange(prompts[0].shape[0])[:, None]).astype(jnp.float32)
        sums = [jnp.einsum("kb,bnph->knph", reads_KxB, d) for d in found[-totals:]]
        return *found[:-totals], *sums

    def in_turn():
        def row(sums, x):
            arrays, marks, at = x
            one = lambda y: jax.tree.map(lambda z: z[None], y)  # noqa: E731
            def head(y):
                out = function(*(jax.tree.map(lambda z: z[None, None], part) for part in y),
                               one(marks))
                return jax.tree.map(lambda z: z[0, 0], out)
            found = jax.lax.map(head, (arrays, tuple(x[at] for x in prompts)))
            if not totals:
                return sums, found
            return tuple(total.at[at].add(d) for total, d in zip(sums, found[-totals:])), \
                found[:-totals]

        at_B = jnp.zeros(jax.tree.leaves(arrays)[0].shape[0], jnp.int32) \
            if prompt_B is None else prompt_B
        sums, found = jax.lax.scan(row, _zeros(prompts[:totals]), (arrays, marks, at_B))
        return (*found, *sums) if totals else found

    blocks = jax.tree.leaves(arrays)[0].shape[2:4]
    if blocks[0] * blocks[1] < _WORTH_A_LOOP:
        return together()
    return jax.lax.platform_dependent(cpu=in_turn, default=together)


_WORTH_A_LOOP = 128  # queries of a row and KV head


def _zeros(arrays):
    return tuple(jnp.zeros(x.shape, jnp.float32) for x in arrays)


# ---------------------------------------------------------------- some rows and KV heads
#
# q, d_out, log-sum-exp, delta, part: [b, n, N, M, ...]; k, v: [b, n, S, HD].


def _prompt_forward(sizes: Blocks, arrays, prompts, length_b) -> Part:
    """The part of the softmax so far with the prompts' keys in it."""
    def block(x):
        q, part = x
        def step(j, part):
            k, v = (_cut(x, j, sizes.p, 2) for x in prompts)
            return _more(part, q, k, v, _sees_prompt(sizes, j, length_b))
        return jax.lax.fori_loop(0, _prompt_blocks(sizes, length_b), step, part)
    return _by_blocks(block, arrays)


def _own_forward(sizes: Blocks, arrays, _, marks) -> Part:
    q, part, k, v = arrays

    def block(x):
        i, q, part = x
        def step(j, part):
            return _more(part, q, _cut(k, j, sizes.s, 2), _cut(v, j, sizes.s, 2),
                         _sees_own(sizes, i, j, marks))
        return jax.lax.fori_loop(0, _own_blocks(sizes, k, i, marks), step, part)
    return _by_blocks(block, (q, part), numbered=True)


def _by_blocks(block, arrays, numbered: bool = False):
    """block([number,] arrays of a block of queries) for all blocks."""
    first = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), arrays)
    n = jnp.arange(jax.tree.leaves(first)[0].shape[0])
    found = jax.lax.map(block, (n, *first) if numbered else first)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2), found)


def _more(part: Part, q, k, v, seen) -> Part:
    """The part with a block of keys more."""
    scores = _masked(_product("bnmh,bnsh->bnms", q, k), seen)
    top = jnp.maximum(part.peak, scores.max(-1, keepdims=True))
    weights, before = jnp.exp(scores - top), jnp.exp(part.peak - top)
    return Part(top, part.total * before + weights.sum(-1, keepdims=True),
                part.out * before + _product("bnms,bnsh->bnmh", weights.astype(v.dtype), v))


def _prompt_backward(sizes: Blocks, arrays, prompts, length_b):
    """The gradients of q, and of the prompts' k and v; float32."""
    queries, = arrays

    def block(totals, queries):
        def step(j, x):
            d_q, *totals = x
            k, v = (_cut(x, j, sizes.p, 2) for x in prompts)
            more = _gradients(*queries, k, v, _sees_prompt(sizes, j, length_b))
            return d_q + more[0], *(_add(x, d, j) for x, d in zip(totals, more[1:]))
        d_q, *totals = jax.lax.fori_loop(0, _prompt_blocks(sizes, length_b), step,
                                         (*_zeros(queries[:1]), *totals))
        return tuple(totals), d_q

    totals, d_q = jax.lax.scan(block, _zeros(prompts),
                               tuple(jnp.moveaxis(x, 2, 0) for x in queries))
    return jnp.moveaxis(d_q, 0, 2), *totals


def _own_backward(sizes: Blocks, arrays, _, marks):
    """The gradients of q, k and v; float32."""
    queries, k, v = arrays

    def block(totals, x):
        i, *queries = x
        def step(j, x):
            d_q, *totals = x
            more = _gradients(*queries, _cut(k, j, sizes.s, 2), _cut(v, j, sizes.s, 2),
                              _sees_own(sizes, i, j, marks))
            return d_q + more[0], *(_add(x, d, j) for x, d in zip(totals, more[1:]))
        d_q, *totals = jax.lax.fori_loop(0, _own_blocks(sizes, k, i, marks), step,
                                         (*_zeros(queries[:1]), *totals))
        return tuple(totals), d_q

    totals, d_q = jax.lax.scan(block, _zeros((k, v)), (
        jnp.arange(queries[0].shape[2]), *(jnp.moveaxis(x, 2, 0) for x in queries)))
    return jnp.moveaxis(d_q, 0, 2), *totals


def _gradients(q, d_out, lse, delta, k, v, seen):
    """What a block of queries and one of keys give to the gradients of q, k and v."""
    scores = _masked(_product("bnmh,bnsh->bnms", q, k) - lse, seen)
    weights = jnp.exp(scores)
    d_scores = (weights * (_product("bnmh,bnsh->bnms", d_out, v) - delta)).astype(q.dtype)
    return (_product("bnms,bnsh->bnmh", d_scores, k), _product("bnms,bnmh->bnsh", d_scores, q),
            _product("bnms,bnmh->bnsh", weights.astype(q.dtype), d_out))


def _masked(scores, seen):
    """Scores [b, n, Q * c, s] where `seen` [b, c or 1, s], which is the same for all heads."""
    heads = scores.reshape(*scores.shape[:2], -1, scores.shape[2] if seen.shape[1] == 1
                           else seen.shape[1], scores.shape[3])
    return jnp.where(seen[:, None, None], heads, MASKED).reshape(scores.shape)


_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def _sees_prompt(sizes: Blocks, j, length_b):
    """bool [b, 1, p]: which keys of block j are of the prompt."""
    return (j * sizes.p + jnp.arange(sizes.p) < length_b[:, None])[:, None]


def _prompt_blocks(sizes: Blocks, length_b):
    """Blocks of keys of the longest prompt."""
    return -(-length_b.max() // sizes.p)


def _sees_own(sizes: Blocks, i, j, marks):
    """bool [b, c, s]: which keys of block j the queries of block i see."""
    ids_q, ids_k, first_b = marks
    ids_q = _cut(ids_q, i, sizes.c, 1)[:, :, None]
    ids_k = _cut(ids_k, j, sizes.s, 1)[:, None, :]
    at_q = (first_b[0] + i * sizes.c + jnp.arange(sizes.c))[:, None]
    at_k = j * sizes.s + jnp.arange(sizes.s)
    return ((ids_q == ids_k) & (ids_q != 0) & (at_k <= at_q)) | (at_k == at_q)


def _own_blocks(sizes: Blocks, k, i, marks):
    """Blocks of keys up to the last query of block i; its padding may reach beyond them all."""
    *_, first_b = marks
    return jnp.minimum(-(-(first_b[0] + (i + 1) * sizes.c) // sizes.s), k.shape[2] // sizes.s)


def _cut(x, i, size: int, axis: int):
    return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis)


def _add(total, part, j):
    """The total with a part added to its block j."""
    size = part.shape[2]
    return jax.lax.dynamic_update_slice_in_dim(total, _cut(total, j, size, 2) + part, j * size, 2)
