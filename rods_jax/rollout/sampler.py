"""The jitted half of the rollout: K/V in pages, prefill, extend and the wave.

The prompt of a group lies once in shared pages; what a rollout adds lies in pages of its own.
Three pure programs, which the host (rollout/slots.py) plans and calls:

    prefill   runs a chunk of some prompts, into shared pages
    extend    runs a chunk of some rollouts (tool results, user turns), into their own pages
    wave      samples, many tokens in one call, until few enough rows sample on

The last token of a row is never in the cache: a wave feeds it first and so predicts the next.
So prefill and extend make K/V and nothing else, and a rollout that ends costs nothing more.

Dim letters: R rows of a program, C tokens of a chunk, M tokens of a wave, W pages of a row,
N pages, E tokens a page, G seats at a shared page.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from rods_jax.models.attention import causal_mask
from rods_jax.models.decoder import Decoder, forward, unrolled
from rods_jax.models.memory import Memory, Rows, Seats, Tables, store
from rods_jax.rollout.draw import draw, row_keys
from rods_jax.rollout.shapes import SamplerConfig

@flax.struct.dataclass
class Region:
    """Pages of one kind; the arrays may be stacked by layer or a tuple of layers. What is not
    yet written is zero, and what is no longer needed stays until it is written over or the
    page is cut off."""

    k: chex.Array  # [n_layers, N, n_kv_heads, head_dim, E]
    v: chex.Array  # [n_layers, N, n_kv_heads, E, head_dim]
    ids_NxE: chex.Array  # int32, the tokens whose K/V these are


@flax.struct.dataclass
class Cache:
    shared: Region
    own: Region


@flax.struct.dataclass
class Table:
    """Which pages a row has, and how many tokens are in them. Unused places hold N."""

    page_RxW: chex.Array  # int32
    length_R: chex.Array  # int32


@flax.struct.dataclass
class Chunk:
    """Tokens to run; a row's positions begin where its tables end."""

    tokens_RxC: chex.Array  # int32
    n_R: chex.Array  # int32, real tokens; they come first
    shared: Table
    own: Table  # of prefill: without pages


@flax.struct.dataclass
class Sitting:
    """Who reads the pages of a region in a wave, see models/memory.py Seats."""

    row_NxG: chex.Array  # int32
    length_N: chex.Array  # int32
    at_RxW: chex.Array  # int32


@flax.struct.dataclass
class Wave:
    token_R: chex.Array  # int32, the last token of each row
    budget_R: chex.Array  # int32, most tokens it may sample; 0: nobody is in the row
    who_Rx2: chex.Array  # uint32, see draw.row_keys
    shared: Table
    own: Table  # its pages hold budget_R tokens more, or as many as a wave samples
    shared_seats: Sitting
    own_seats: Sitting


@flax.struct.dataclass
class WaveOutput:
    tokens_RxM: chex.Array  # int32, the sampled tokens
    logprobs_RxM: chex.Array  # float32, under the distribution sampled from
    count_R: chex.Array  # int32, sampled tokens
    stopped_R: chex.Array  # bool, the last of them is a stop token
    mark_R: chex.Array  # uint32, a checksum of the ids in the row's cache, see `checksum`


def init_cache(decoder: Decoder, config: SamplerConfig, n_shared: int, n_own: int) -> Cache:
    def region(pages: int, page: int) -> Region:
        return Region(*_zeros(decoder, pages, page), jnp.zeros((pages, page), jnp.int32))

    return Cache(region(n_shared, config.prompt_page), region(n_own, config.page))


def resized(x: jax.Array, pages: int) -> jax.Array:
    """An array of a Region with so many pages: the first ones, or all and empty ones behind."""
    axis = max(0, x.ndim - 4)  # behind that of stacked layers
    if pages <= x.shape[axis]:
        return jax.lax.slice_in_dim(x, 0, pages, axis=axis)
    return jnp.pad(x, [(0, (pages - n) * (a == axis)) for a, n in enumerate(x.shape)])


# ---------------------------------------------------------------- prefill and extend


def make_prefill(decoder: Decoder, config: SamplerConfig):
    """`prefill(params, shared, chunk) -> shared`, a Region."""
    def prefill(params, shared: Region, chunk: Chunk) -> Region:
        kv = _run(decoder, params, chunk, [_collected(shared, chunk.shared, config)])
        return _stored(shared, kv, chunk.tokens_RxC, chunk.shared, chunk.n_R)
    return prefill


def make_extend(decoder: Decoder, config: SamplerConfig):
    """`extend(params, cache, chunk) -> cache`."""
    def extend(params, cache: Cache, chunk: Chunk) -> Cache:
        kv = _run(decoder, params, chunk, [_collected(cache.shared, chunk.shared, config),
                                           _collected(cache.own, chunk.own, config)])
        return cache.replace(own=_stored(cache.own, kv, chunk.tokens_RxC, chunk.own, chunk.n_R))
    return extend


def _run(decoder: Decoder, params, chunk: Chunk, memories):
    C = chunk.tokens_RxC.shape[1]
    start_R = chunk.shared.length_R + chunk.own.length_R
    # Tokens that are not real come last: no real one sees them.
    _, kv = forward(decoder, params, chunk.tokens_RxC, start_R[:, None] + jnp.arange(C),
                    causal_mask(C), tuple(memories))
    return kv


def _collected(region: Region, table: Table, config: SamplerConfig) -> Memory:
    width, page = table.page_RxW.shape[1], region.ids_NxE.shape[1]
    block = min(width, -(-config.read // page))
    pages = jnp.pad(table.page_RxW, ((0, 0), (0, -width % block)))
    return Memory(region.k, region.v, Tables(pages, table.length_R, block))


def _stored(region: Region, kv, tokens_RxC, table: Table, n_R) -> Region:
    n_pages, page = region.ids_NxE.shape
    offset_C = jnp.arange(tokens_RxC.shape[1])
    index_RxC = table.length_R[:, None] + offset_C
    page_RxC = jnp.take_along_axis(table.page_RxW, index_RxC // page, axis=1, mode="clip")
    page_RxC = jnp.where(offset_C < n_R[:, None], page_RxC, n_pages)
    k, v = store(region.k, region.v, kv, table.page_RxW, table.length_R, n_R)
    ids = region.ids_NxE.at[page_RxC, index_RxC % page].set(tokens_RxC, mode="drop")
    return Region(k, v, ids)


# ---------------------------------------------------------------- the wave


def make_wave(decoder: Decoder, config: SamplerConfig, stop_ids: Sequence[int]):
    """`wave(params, cache, plan, key, temperature, most, leave) -> (cache, WaveOutput)`.

    key: with `plan.who` and a token's position it makes the key of a draw. temperature:
    float32 scalar, see draw.draw. most: int32, most tokens a row samples in this wave, at
    most config.wave. leave: int32 [1], the wave ends once so few rows sample on.
    """
    stop, M = jnp.asarray(tuple(stop_ids), jnp.int32), config.wave

    def wave(params, cache: Cache, plan: Wave, key, temperature, most, leave):
        R = plan.token_R.shape[0]
        memories = [Memory(region.k, region.v, Seats(seats.row_NxG, seats.length_N, seats.at_RxW))
                    for region, seats in ((cache.shared, plan.shared_seats),
                                          (cache.own, plan.own_seats))]
        top = {name: x for name, x in params.items() if name != "layers"}
        start_R = plan.shared.length_R + plan.own.length_R
        keys_R = row_keys(key, plan.who_Rx2)

        def step(carry):
            i, alive_R, token_R, near, out = carry
            # A row that has stopped goes on writing behind its end; nothing ever reads that.
            hidden_Rx1xD, near = forward(
                decoder, params, token_R[:, None], (start_R + i)[:, None], None,
                (*memories, Memory(*near, Rows(i))))
            logits_RxV = decoder.apply({"params": top}, hidden_Rx1xD[:, 0], method="logits")
            token_R, logprob_R = draw(logits_RxV, keys_R, start_R + i + 1, temperature,
                                      config.keep)
            put = lambda x_RxM, x_R: jax.lax.dynamic_update_slice_in_dim(  # noqa: E731
                x_RxM, x_R[:, None], i, axis=1)
            count_R = out.count_R + alive_R
            stopped_R = out.stopped_R | (alive_R & jnp.isin(token_R, stop))
            out = out.replace(tokens_RxM=put(out.tokens_RxM, token_R),
                              logprobs_RxM=put(out.logprobs_RxM, logprob_R),
                              count_R=count_R, stopped_R=stopped_R)
            return i + 1, alive_R & ~stopped_R & (count_R < plan.budget_R), token_R, near, out

        def more(carry):
            return (carry[0] < most) & (jnp.sum(carry[1]) > leave[0])

        out = WaveOutput(jnp.zeros((R, M), jnp.int32), jnp.zeros((R, M), jnp.float32),
                         jnp.zeros((R,), jnp.int32), jnp.zeros((R,), bool),
                         jnp.zeros((R,), jnp.uint32))
        _, _, _, near, out = jax.lax.while_loop(
            more, step, (jnp.int32(0), plan.budget_R > 0, plan.token_R,
                         _zeros(decoder, R, M), out))
        fed_RxM = jnp.concatenate([plan.token_R[:, None], out.tokens_RxM[:, :-1]], axis=1)
        kv = jax.tree.map(lambda k: k.swapaxes(-1, -2), near[0]), near[1]
        own = _stored(cache.own, kv, fed_RxM, plan.own, out.count_R)
        mark_R = (_marks(cache.shared.ids_NxE, plan.shared, jnp.zeros_like(start_R))
                  + _marks(own.ids_NxE, plan.own.replace(
                      length_R=plan.own.length_R + out.count_R), plan.shared.length_R))
        return cache.replace(own=own), out.replace(mark_R=mark_R)

    return wave


def _zeros(decoder: Decoder, rows: int, length: int):
    """k and v of so many rows or pages, as the decoder's Memory takes them."""
    model = decoder.config
    dtype = jnp.dtype(model.compute_dtype)
    k = jnp.zeros((model.n_layers, rows, model.n_kv_heads, model.head_dim, length), dtype)
    v = jnp.zeros((model.n_layers, rows, model.n_kv_heads, length, model.head_dim), dtype)
    return (tuple(k), tuple(v)) if unrolled(model) else (k, v)


# ---------------------------------------------------------------- what the cache holds


_ODD = 2654435761  # a large odd number; multiples of it are spread over 32 bits


def _marks(ids_NxE, table: Table, first_R) -> jax.Array:
    """uint32 [R]: the part of `checksum` that a table's tokens make, the first of which has
    the position first_R."""
    page = ids_NxE.shape[1]
    index = jnp.arange(table.page_RxW.shape[1] * page)
    ids_RxS = ids_NxE.at[table.page_RxW].get(mode="clip").reshape(table.page_RxW.shape[0], -1)
    weight_RxS = (first_R[:, None] + index).astype(jnp.uint32) * 2 + 1
    terms = (ids_RxS.astype(jnp.uint32) + 1) * weight_RxS * jnp.uint32(_ODD)
    return jnp.where(index < table.length_R[:, None], terms, 0).sum(1, dtype=jnp.uint32)


def checksum(ids: Sequence[int], first: int = 0, before: int = 0) -> int:
    """32 bits of ids and their order: the sum of (id + 1) (2 position + 1) times a constant.
    These ids have the positions first, first + 1, ...; `before`: what those in front made."""
    ids = np.asarray(ids, np.uint32)
    weight = (np.arange(len(ids), dtype=np.uint32) + np.uint32(first)) * np.uint32(2) + np.uint32(1)
    here = ((ids + np.uint32(1)) * weight * np.uint32(_ODD)).sum(dtype=np.uint32)
    return (int(here) + before) % 2**32
