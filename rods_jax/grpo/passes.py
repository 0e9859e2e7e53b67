"""The passes of a packed batch through the policy: scoring a micro-batch, and the sum of gradients
over all of them, in which a prompt is run once for the rows that share it.

Of a set of prompts the forward pass comes first and gives their K/V. Then micro-batch after
micro-batch reads it and adds to the gradient by it, and last the backward pass of the prompts
takes that gradient to the parameters. So a group of any size takes the memory of one
micro-batch, and its prompt costs what one rollout's costs. By the chain rule the sum is the
gradient of rows that each hold the prompt anew.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rods_jax.grpo.batch import BatchShape, PackedBatch
from rods_jax.grpo.logprobs import token_logprobs
from rods_jax.models import lora
from rods_jax.models.attention import Segments, Shared
from rods_jax.models.decoder import Decoder, head_name, logits_by
from rods_jax.models.memory import Memory
from rods_jax.models.sharding import prompt_sharding

Params = Any
KV = tuple[jax.Array, jax.Array]  # [layers, K, KV heads, P, head width] each


@flax.struct.dataclass
class Rows:
    """The rows of a micro-batch, int32. The last column is there to be predicted, and not run.
    alone: one segment a row. prompt_R: see PackedBatch."""

    tokens_RxL: jax.Array
    positions_RxL: jax.Array
    segments_RxL: jax.Array
    prompt_R: jax.Array
    alone: bool = flax.struct.field(pytree_node=False, default=False)


def at(x: jax.Array, i: jax.Array) -> jax.Array:
    """x[i], for a traced i."""
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def rows_at(batch: PackedBatch, i: jax.Array, length: int, shape: BatchShape | None) -> Rows:
    """Micro-batch i, whose rows are of `length`. shape: of the batch, where that is known."""
    cut = lambda x: at(x, i)[:, :length]  # noqa: E731
    return Rows(cut(batch.tokens_MxRxL), cut(batch.positions_MxRxL), cut(batch.segments_MxRxL),
                at(batch.prompt_MxR, i), alone=shape is not None and shape.alone)


def buckets_of(batch: PackedBatch, shape: BatchShape | None) -> tuple[int, ...]:
    """Lengths that rows of a micro-batch may have, by PackedBatch.bucket_M."""
    return batch.tokens_MxRxL.shape[2:] if shape is None else shape.buckets


def for_prompts(decoder: Decoder) -> Decoder:
    """The decoder as prompts are run with it: on a mesh they lie otherwise than rows."""
    return decoder.clone(activations=decoder.activations and prompt_sharding(decoder.activations))


def prompt_kv(decoder: Decoder, params: Params, batch: PackedBatch, u: jax.Array) -> KV:
    """K/V of the prompts of set u. decoder: see for_prompts. params: all weights."""
    tokens_KxP, length_K = at(batch.prompts_UxKxP, u), at(batch.prompt_length_UxK, u)
    positions_KxP = jnp.broadcast_to(jnp.arange(tokens_KxP.shape[1]), tokens_KxP.shape)
    real_KxP = positions_KxP < length_K[:, None]
    return decoder.apply({"params": params}, tokens_KxP, positions_KxP,
                         Segments(real_KxP.astype(jnp.int32), alone=True))[1]


def shared_prompts(kv: KV | None, batch: PackedBatch, u: jax.Array, rows: Rows,
                   ) -> tuple[Memory, ...]:
    """What rows that read set u remember, for micro_logprobs."""
    if kv is None:
        return ()
    return (Memory(*kv, where=Shared(rows.prompt_R, at(batch.prompt_length_UxK, u))),)


def micro_logprobs(decoder: Decoder, params: Params, rows: Rows, memories: tuple[Memory, ...],
                   mask_RxL: jax.Array, temperature: float, chunk: int, entropy_gradient: bool,
                   ) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies float32 [R, L] of one micro-batch, 0 where mask is False.
    params: all weights. memories: see shared_prompts. ValueError where the weights' adapters
    are not what decoder.config says."""
    lora.check(params, decoder.config)
    hidden_RxLxD, _ = decoder.apply(
        {"params": params}, rows.tokens_RxL[:, :-1], rows.positions_RxL[:, :-1],
        Segments(rows.segments_RxL[:, :-1], rows.alone), memories)
    return _scored(decoder, params, hidden_RxLxD, rows.tokens_RxL, mask_RxL, temperature, chunk,
                   entropy_gradient)


def _scored(decoder: Decoder, params: Params, hidden_RxLxD, tokens_RxL, mask_RxL, *how):
    """token_logprobs. On a mesh each device scores its own rows: it gets the head's weights
    once, not in every chunk, and adds its part of their gradient up before all is summed."""
    weights = params[head_name(decoder.config)].astype(decoder.config.compute_dtype)

    def score(weights, hidden_RxLxD, tokens_RxL, mask_RxL):
        head = partial(logits_by, decoder.config, weights)
        return token_logprobs(head, hidden_RxLxD, tokens_RxL, mask_RxL, *how)

    if decoder.activations is not None:
        mesh, rows = decoder.activations.mesh, decoder.activations.spec[0]
        spec = PartitionSpec(rows)
        # What splits a row's vocabulary is left to the compiler.
        score = jax.shard_map(
            score, mesh=mesh, axis_names={rows} if isinstance(rows, str) else set(rows),
            in_specs=(PartitionSpec(), spec, spec, spec), out_specs=spec, check_vma=False)
    return score(weights, hidden_RxLxD, tokens_RxL, mask_RxL)


def accumulate(prompts: Callable, micro_loss: Callable, params: Params, batch: PackedBatch,
               buckets: tuple[int, ...]):
    """Sums of gradients and of auxiliary sums over all that a batch holds.

    prompts(params, u) -> (K/V of set u that gradients flow through, and what else the loss wants
    to know of the set). micro_loss(params, kv, known, u, i, length) -> (loss, tree of sums) of
    micro-batch i, whose rows are of `length`. Without prompts in the batch kv and known are None.

    A set's prompts are run once, forward and backward: between the two, its micro-batches add up
    the gradient by the K/V they read. Trip counts are traced numbers: one trace serves batches
    of any fill.
    """
    gradient = jax.grad(micro_loss, argnums=(0, 1), has_aux=True)

    def micro(kv, known, u):
        def one(i, total):
            branches = [partial(gradient, length=n) for n in buckets]
            found = jax.lax.switch(batch.bucket_M[i], branches, params, kv, known, u, i)
            return jax.tree.map(lambda sum_, new: sum_ + new.astype(sum_.dtype), total, found)
        return one

    def of_set(u, total):
        (d_params, _), sums = total
        kv, pull, known = jax.vjp(lambda params: prompts(params, u), params, has_aux=True)
        d_kv = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), kv)
        begin = jnp.where(u > 0, batch.end_U[u - 1], 0)
        (d_params, d_kv), sums = jax.lax.fori_loop(
            begin, batch.end_U[u], micro(kv, known, u), ((d_params, d_kv), sums))
        more, = pull(jax.tree.map(lambda d, x: d.astype(x.dtype), d_kv, kv))
        return (jax.tree.map(jnp.add, d_params, more), None), sums

    index = jax.ShapeDtypeStruct((), jnp.int32)
    shared = batch.prompts_UxKxP.shape[0] > 0
    kv, known = jax.eval_shape(prompts, params, index) if shared else (None, None)
    (d_params, _), sums = jax.eval_shape(
        partial(gradient, length=buckets[-1]), params, kv, known, index, index)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), ((d_params, None), sums))
    if shared:
        (grads, _), sums = jax.lax.fori_loop(jnp.int32(0), batch.n_sets, of_set, zeros)
    else:
        (grads, _), sums = jax.lax.fori_loop(
            jnp.int32(0), batch.n_micro, micro(None, None, jnp.int32(0)), zeros)
    return grads, sums
