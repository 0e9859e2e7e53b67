"""K/V of earlier tokens that a chunk attends to, in the three forms that rollouts keep it in.

    Rows     one stretch of memory a row, which the chunk itself is written into: how a decode
             loop remembers what it does.
    Seats    pages read in place, all at once, each by the rows that sit at it: how a decode
             step reads. A page of a prompt is read once for all rollouts of its group.
    Tables   pages collected row by row, block by block: how a long chunk reads.

Every form gives its part of the softmax; the parts are joined by their maxima and sums
(the log-sum-exp rule of https://arxiv.org/abs/2205.14135), so no K/V is ever copied together.
No gradients: what training shares is attention.Shared, whose k and v both lie [.., S, HD] and
go with Segments to models/attention.py.

Dim letters: B rows, C queries a row, H heads, KV key/value heads, Q = H / KV, HD head width,
S keys, N pages, E keys a page, G seats a page, W pages a row.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from rods_jax.models.attention import MASKED, Shared


@flax.struct.dataclass
class Rows:
    """k [B, KV, HD, S], v [B, KV, S, HD]. The chunk becomes the entries at .. at + C of every
    row; its query c sees the entries 0 .. at + c."""

    at: jax.Array  # int32 scalar


@flax.struct.dataclass
class Seats:
    """k [N, KV, HD, E], v [N, KV, E, HD]; for chunks of one token (C = 1).

    Row b sees the first `length_N[n]` entries of page n where a seat of the page, (n, g) with
    row_NxG[n, g] = b, is among its own, at_BxW; of a seat nobody has, the row may be any."""

    row_NxG: jax.Array  # int32, whose query is at the seat
    length_N: jax.Array  # int32, valid entries of the page
    at_BxW: jax.Array  # int32, n * G + g; N * G or more: none


@flax.struct.dataclass
class Tables:
    """k [N, KV, HD, E], v [N, KV, E, HD].

    Row b sees the first length_B[b] tokens of its pages page_BxW[b, 0], page_BxW[b, 1], ...
    block: pages of a row collected at once; W must be a multiple of it."""

    page_BxW: jax.Array  # int32; beyond a row's tokens any page
    length_B: jax.Array  # int32
    block: int = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Whole:
    """Tables of all layers, k and v [layers * N, ...]: a scan over layers hands on where a
    layer's pages begin, and no slice of them, which the compiler would copy for a gather."""

    k: jax.Array
    v: jax.Array
    tables: Tables


@flax.struct.dataclass
class Memory:
    """Keys, after rope, and values in compute_dtype, with a leading axis of layers or as a
    tuple of arrays a layer; `where` says who sees what, and how k and v lie.
    Keys have their entries last and values have them in front of the width: so both products
    with a few queries read memory in the order it lies in. Entries nobody sees must be finite."""

    k: jax.Array | tuple[jax.Array, ...]
    v: jax.Array | tuple[jax.Array, ...]
    where: Rows | Seats | Tables | Shared


def each(function, x, *rest):
    """Applies `function` to one layer's arrays: over a tuple of layers, or a leading axis."""
    if isinstance(x, tuple):
        return tuple(function(*one) for one in zip(x, *rest))
    return jax.vmap(function)(x, *rest)


def scanned(memory: Memory):
    """Of a memory with a leading axis of layers what a scan takes layer by layer, and what it
    takes whole."""
    if not isinstance(memory.where, Tables):
        return (memory.k, memory.v), memory.where
    layers, n = memory.k.shape[:2]
    first = jnp.arange(layers, dtype=jnp.int32) * n
    flat = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
    return (first, first), Whole(flat(memory.k), flat(memory.v), memory.where)


def store(k, v, kv, page_BxW: jax.Array, at_B: jax.Array, n_B: jax.Array):
    """Pages k, v with a chunk's K/V, as the decoder returns it: the first n_B[b] tokens of
    row b become the entries from at_B[b] on of its pages page_BxW[b, 0], page_BxW[b, 1], ...
    What has no page (N or more) is dropped.

    In place, where k and v are donated: for a scatter of tokens TPUs would turn all pages
    round, entries first, and back, at the cost of the whole cache in time and memory."""
    return jax.lax.platform_dependent(k, v, kv, page_BxW, at_B, n_B,
                                      tpu=store_by_page, default=store_by_token)


def store_by_token(k, v, kv, page_BxW, at_B, n_B):
    """One scatter, which CPUs and GPUs do fastest."""
    n_pages, _, entries, _ = jax.tree.leaves(v)[0].shape[-4:]
    offset_C = jnp.arange(jax.tree.leaves(kv)[0].shape[-2])
    index_BxC = at_B[:, None] + offset_C
    page_BxC = jnp.take_along_axis(page_BxW, index_BxC // entries, axis=1, mode="fill",
                                   fill_value=n_pages)
    page_BxC = jnp.where(offset_C < n_B[:, None], page_BxC, n_pages)
    at_BxC = index_BxC % entries

    def put_k(old, new):  # [N, KV, HD, E], [B, KV, C, HD]
        return old.at[page_BxC, :, :, at_BxC].set(new.swapaxes(1, 2), mode="drop")
    def put_v(old, new):  # [N, KV, E, HD], [B, KV, C, HD]
        return old.at[page_BxC, :, at_BxC].set(new.swapaxes(1, 2), mode="drop")
    return each(put_k, k, kv[0]), each(put_v, v, kv[1])


def store_by_page(k, v, kv, page_BxW, at_B, n_B):
    """A loop over the pages that get tokens: each is read, mixed with them and written."""
    n_pages, _, entries, _ = jax.tree.leaves(v)[0].shape[-4:]
    chunk = jax.tree.leaves(kv)[0].shape[-2]
    spans = (chunk + entries - 2) // entries + 1  # pages that a row's tokens may lie in
    around = (entries, spans * entries - chunk)  # so that any page's part can be cut out
    new_k = jax.tree.map(lambda x: x.swapaxes(-1, -2), kv[0])
    page_B, offset_B = at_B // entries, at_B % entries
    gets_BxP = (jnp.arange(spans) * entries < (offset_B + n_B)[:, None]) & (n_B > 0)[:, None]
    part_P = jnp.argsort(~gets_BxP.reshape(-1))  # those that get tokens first

    def put(i, pages):
        b, span = part_P[i] // spans, part_P[i] % spans
        first = span * entries - offset_B[b]  # the token that is the page's first entry
        token_E = first + jnp.arange(entries)
        page = page_BxW[b].at[page_B[b] + span].get(mode="fill", fill_value=n_pages)
        real_E = (token_E >= 0) & (token_E < n_B[b]) & (page < n_pages)

        def mix(old, new, axis, real):  # [.., N, KV, HD, E] or [.., N, KV, E, HD], the same of B
            new = _padded(_cut(new, b, 1, -4), axis, around)
            new = _cut(new, first + entries, entries, axis)
            return jax.lax.dynamic_update_slice_in_dim(
                old, jnp.where(real, new, _cut(old, page, 1, -4)), page, axis=old.ndim - 4)

        return (jax.tree.map(lambda old, new: mix(old, new, -1, real_E), pages[0], new_k),
                jax.tree.map(lambda old, new: mix(old, new, -2, real_E[:, None]), pages[1], kv[1]))

    return jax.lax.fori_loop(0, gets_BxP.sum(), put, (k, v))


def _padded(x, axis: int, around: tuple[int, int]):
    return jnp.pad(x, [around if a == x.ndim + axis else (0, 0) for a in range(x.ndim)])


def _cut(x, first, size: int, axis: int):
    return jax.lax.dynamic_slice_in_dim(x, first, size, axis=x.ndim + axis)


# ---------------------------------------------------------------- parts of a softmax


class Part(NamedTuple):
    """Of the softmax over some of the keys: float32 [B, KV, Q, C, 1], the largest score and
    the sum of exp(score - peak), and [B, KV, Q, C, HD], the values so weighted."""

    peak: jax.Array
    total: jax.Array
    out: jax.Array


def attend(q_BxCxHxHD, self_kv, self_mask, memories):
    """Softmax attention of a chunk to itself and its memories. Returns [B, C, H, HD] and the
    chunk's K/V, or where the last memory is Rows that memory's k and v with the chunk in it.

    self_kv: the chunk's (k, v), each [B, KV, C, HD]; self_mask: bool, broadcastable to
    [B, C, C], not read with Rows. memories: tuples (k, v, where) of one layer."""
    b, c, h, hd = q_BxCxHxHD.shape
    k, v = self_kv
    kv = k.shape[1]
    q = (q_BxCxHxHD * hd ** -0.5).reshape(b, c, kv, h // kv, hd).transpose(0, 2, 3, 1, 4)
    memories = [_of_layer(*memory) for memory in memories]
    *earlier, (near_k, near_v, where) = memories
    if isinstance(where, Rows):
        # Written before it is read, so that a loop can do it in place.
        k = jax.lax.dynamic_update_slice_in_dim(near_k, k.swapaxes(2, 3), where.at, axis=3)
        v = jax.lax.dynamic_update_slice_in_dim(near_v, v, where.at, axis=2)
        seen = jnp.arange(v.shape[2]) <= where.at + jnp.arange(c)[:, None]
        joined = _join(_part(q, k, v, seen[None]), *(_read(q, *memory) for memory in earlier))
    else:
        joined = _chunk(q, k, v, self_mask, memories)
    out = (joined.out / joined.total).astype(q.dtype)
    return out.transpose(0, 3, 1, 2, 4).reshape(b, c, h, hd), (k, v)


def _of_layer(k, v, where):
    """A memory without Whole: Tables of all layers whose pages are this layer's."""
    if not isinstance(where, Whole):
        return k, v, where
    tables = where.tables
    return where.k, where.v, tables.replace(page_BxW=tables.page_BxW + k)


def _chunk(q, k, v, mask, memories) -> Part:
    """Of a chunk's attention to itself and its memories."""
    pages = [memory[:2] for memory in memories]
    wheres = [memory[2] for memory in memories]
    b, _, _, c, _ = q.shape

    def together(q, k, v, mask, wheres):
        parts = [_read(q, *kv, where) for kv, where in zip(pages, wheres, strict=True)]
        return _join(_part(q, k.swapaxes(2, 3), v, mask), *parts)

    def in_turn(*rows):
        split = lambda x: x.reshape(b // at_once, at_once, *x.shape[1:])  # noqa: E731
        parts = jax.lax.map(lambda some: together(*some), jax.tree.map(split, rows))
        return jax.tree.map(lambda x: x.reshape(b, *x.shape[2:]), parts)

    rows = q, k, v, jnp.broadcast_to(mask, (b, *mask.shape[1:])), wheres
    if not all(isinstance(where, Tables) for where in wheres):
        return together(*rows)
    keys = max([c, *(where.block * k.shape[3] for (k, _), where in zip(pages, wheres))])
    at_once = _rows_at_once(b, q[0, ..., 0].size * keys)
    if at_once == b:
        return together(*rows)
    return jax.lax.platform_dependent(*rows, cpu=in_turn, default=together)


_CACHED = 2 ** 20  # scores


def _rows_at_once(rows: int, scores: int) -> int:
    """The largest divisor of `rows` of whose scores, so many a row, a CPU's cache holds all:
    others would go to memory and back at every step of the softmax."""
    return max(n for n in range(1, rows + 1) if rows % n == 0 and (n == 1 or n * scores <= _CACHED))


def _read(q, k, v, where) -> Part:
    return (_seats if isinstance(where, Seats) else _tables)(q, k, v, where)


def _join(*parts: Part) -> Part:
    peak = functools.reduce(jnp.maximum, [part.peak for part in parts])
    weights = [jnp.exp(part.peak - peak) for part in parts]
    return Part(peak, sum(part.total * w for part, w in zip(parts, weights)),
                sum(part.out * w for part, w in zip(parts, weights)))


def _part(q, k, v, mask_BxCxS) -> Part:
    """q [B, KV, Q, C, HD], k [B, KV, HD, S], v [B, KV, S, HD]. A query that sees no key gets
    a peak so low that the part weighs nothing beside any other."""
    b, kv, groups, c, hd = q.shape
    flat = q.reshape(b, kv, groups * c, hd)
    scores = jnp.einsum("bnmh,bnhs->bnms", flat, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask_BxCxS[:, None, None], scores.reshape(b, kv, groups, c, -1), MASKED)
    peak = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - peak)
    out = jnp.einsum("bnms,bnsh->bnmh", weights.reshape(b, kv, groups * c, -1).astype(v.dtype), v,
                     preferred_element_type=jnp.float32)
    return Part(peak, weights.sum(-1, keepdims=True), out.reshape(b, kv, groups, c, hd))


def _seats(q, k, v, where: Seats) -> Part:
    """Nothing is read where nobody has written yet: of own pages in the first message."""
    nothing = _nothing(q.shape)
    return jax.lax.cond(where.length_N.any(), _sitting, lambda *_: nothing, q, k, v, where)


def _nothing(shape) -> Part:
    """What no key gives to queries of this shape."""
    return Part(jnp.full((*shape[:-1], 1), MASKED), jnp.zeros((*shape[:-1], 1)),
                jnp.zeros(shape))


def _sitting(q, k, v, where: Seats) -> Part:
    n, kv, hd, entries = k.shape
    groups, seats = q.shape[2], where.row_NxG.shape[1]
    # The seats of a page are its queries: [N, G, KV, Q, 1, HD] -> [N, KV, Q, G, HD].
    sitting = q[where.row_NxG][..., 0, :].transpose(0, 2, 3, 1, 4)
    seen = jnp.arange(entries) < where.length_N[:, None]
    part = _part(sitting, k, v, seen[:, None, :])
    # Back to the rows: each collects what its seats have found, W of them.
    flat = jax.tree.map(
        lambda x: x.transpose(0, 3, 1, 2, 4).reshape(n * seats, kv, groups, 1, -1), part)
    taken = where.at_BxW < n * seats
    at = jnp.where(taken, where.at_BxW, 0)
    peak = jnp.where(taken[..., None, None, None, None], flat.peak[at], MASKED)
    top = peak.max(1)
    weight = jnp.exp(peak - top[:, None])
    # As a product: a CPU's compiler would make the sum part of the next product, and slow.
    out = jnp.einsum("bwnqch,bwnqcx->bnqch", flat.out[at], weight)
    return Part(top, (flat.total[at] * weight).sum(1), out)


def _tables(q, k, v, where: Tables) -> Part:
    b, kv, groups, c, hd = q.shape
    entries, block = k.shape[3], where.block
    size = block * entries
    n_blocks = -(-where.length_B.max() // size)

    def collect(pages_Bxw, x, axis):  # [B, w, KV, ...] -> [B, KV, ...] with the entries joined
        x = jnp.moveaxis(x.at[pages_Bxw].get(mode="clip"), 1, axis)
        return x.reshape(*x.shape[:axis], size, *x.shape[axis + 2:])

    def step(i, part):
        pages_Bxw = jax.lax.dynamic_slice_in_dim(where.page_BxW, i * block, block, axis=1)
        seen = i * size + jnp.arange(size) < where.length_B[:, None]
        more = _part(q, collect(pages_Bxw, k, 3), collect(pages_Bxw, v, 2), seen[:, None, :])
        return more if part is None else _join(part, more)

    if where.page_BxW.shape[1] == block:
        return step(0, None)
    return jax.lax.fori_loop(0, n_blocks, step, _nothing(q.shape))
