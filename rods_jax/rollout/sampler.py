"""The jitted half of the rollout: K/V slots, prompt prefill, and the wave.

A slot holds the K/V of one dialogue for its whole life; nothing is ever prefilled twice.
The host drives two pure programs:

* `prefill` runs each group's prompt once and copies its K/V into the slots of the group.
* `wave` appends up to C tokens a slot (tool results, user turns), then lets every slot that
  is ready sample until its stop token, its budget, or until so few slots are left that
  waiting for them would waste the rest.

The last sampled token of a message is never run through the model within the wave: the
host puts it at the head of the next chunk, so a dialogue that ends costs nothing more.
Every draw uses a key made of the rollout's own key and the token's position, so tokens do
not depend on slot, batch or order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import chex
import flax.struct
import jax
import jax.numpy as jnp

from rods_jax.models.attention import Segments, causal_mask
from rods_jax.models.decoder import Decoder, Memory, append, by_layer


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """Shapes. All sizes in tokens but `slots` and `prefill_groups`."""

    slots: int = 128
    max_len: int = 256  # longest dialogue
    prompt_len: int = 96  # longest prompt (system, tools, first user turn)
    chunk: int = 16  # most tokens appended to a slot in one wave
    max_new: int = 24  # longest assistant message
    prefill_groups: int = 8  # prompts prefilled at once
    cache_buckets: tuple[int, ...] = ()  # cache lengths attended to; max_len is always one
    straggler_share: float = 0.0  # a wave ends once at most this share of slots samples on

    def __post_init__(self):
        if self.prompt_len + self.max_new > self.max_len:
            raise ValueError(
                f"sampler.prompt_len {self.prompt_len} + max_new {self.max_new} exceeds "
                f"max_len {self.max_len}: raise max_len or shorten the others")
        if not 0 <= self.straggler_share < 1:
            raise ValueError("sampler.straggler_share must lie in [0, 1)")
        for name in ("slots", "chunk", "max_new", "prefill_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"sampler.{name} is {getattr(self, name)}, must be at least 1")

    @property
    def buckets(self) -> tuple[int, ...]:
        return tuple(sorted({b for b in self.cache_buckets if b < self.max_len} | {self.max_len}))


@flax.struct.dataclass
class Slots:
    """K/V of B dialogues. Entries at or beyond a slot's length are garbage."""

    k: chex.Array  # [n_layers, B, n_kv_heads, S, head_dim]
    v: chex.Array  # [n_layers, B, n_kv_heads, S, head_dim]
    length_B: chex.Array  # int32, tokens in the cache
    hidden_BxD: chex.Array  # final hidden state of the last token in the cache


@flax.struct.dataclass
class WaveOutput:
    tokens_BxM: chex.Array  # int32, the sampled tokens
    logprobs_BxM: chex.Array  # float32, under the distribution sampled from
    count_B: chex.Array  # int32, sampled tokens
    stopped_B: chex.Array  # bool, the last of them is a stop token
    length_B: chex.Array  # int32, tokens in the cache after the wave


def init_slots(decoder: Decoder, config: SamplerConfig) -> Slots:
    model = decoder.config
    # A chunk and a message may overhang max_len by their padding, never by real tokens.
    length = config.max_len + config.chunk + config.max_new
    shape = (model.n_layers, config.slots, model.n_kv_heads, length, model.head_dim)
    dtype = jnp.dtype(model.compute_dtype)
    return Slots(
        k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype),
        length_B=jnp.zeros((config.slots,), jnp.int32),
        hidden_BxD=jnp.zeros((config.slots, model.d_model), dtype),
    )


def forget(slots: Slots, fresh_B: jax.Array) -> Slots:
    """Empties the slots where `fresh_B` (bool) says so; the next chunk begins at position 0."""
    return slots.replace(length_B=jnp.where(fresh_B, 0, slots.length_B))


def make_prefill(decoder: Decoder, config: SamplerConfig):
    """`prefill(params, slots, tokens_TxP, length_T, group_B) -> slots`.

    Runs T = prefill_groups prompts and copies prompt `group_B[b]` into slot b; a negative
    group leaves the slot as it is.
    """
    P = config.prompt_len

    def prefill(params, slots: Slots, tokens_TxP, length_T, group_B) -> Slots:
        T = config.prefill_groups
        chex.assert_shape(tokens_TxP, (T, P))
        chex.assert_shape(group_B, (config.slots,))
        positions_TxP = jnp.broadcast_to(jnp.arange(P), (T, P))
        prompt_TxP = Segments((positions_TxP < length_T[:, None]).astype(jnp.int32))
        hidden_TxPxD, (k, v) = decoder.apply(
            {"params": params}, tokens_TxP, positions_TxP, prompt_TxP)
        last_TxD = hidden_TxPxD[jnp.arange(T), length_T - 1]

        take_B = jnp.maximum(group_B, 0)
        fresh_B = group_B >= 0
        def copy(cache, prompt):
            old = cache[:, :, :, :P]
            new = jnp.where(fresh_B[None, :, None, None, None], prompt[:, take_B], old)
            return jax.lax.dynamic_update_slice_in_dim(cache, new, 0, axis=3)

        return Slots(
            k=copy(slots.k, k), v=copy(slots.v, v),
            length_B=jnp.where(fresh_B, length_T[take_B], slots.length_B),
            hidden_BxD=jnp.where(fresh_B[:, None], last_TxD[take_B], slots.hidden_BxD),
        )

    return prefill


def make_wave(decoder: Decoder, config: SamplerConfig, stop_ids: Sequence[int], bucket: int):
    """`wave(params, slots, chunk_BxC, n_B, sample_B, budget_B, key, who_Bx2, temperature) ->
    (slots, WaveOutput)` for slots whose length is at most `bucket` when the wave begins.

    n_B: tokens of the chunk that are real. sample_B: whether the slot then samples.
    budget_B: most tokens it may sample. who_Bx2: uint32, a hash of the task and the index in
    the group (rows after the first in its upper half); with `key` and the token's position they make the key of a draw.
    temperature: float32 scalar; 0 takes the likeliest token and scores it at temperature 1.
    """
    B, C = config.slots, config.chunk

    def wave(params, slots: Slots, chunk_BxC, n_B, sample_B, budget_B, key, who_Bx2,
             temperature):
        chex.assert_shape(chunk_BxC, (B, C))
        chex.assert_shape(who_Bx2, (B, 2))
        prefix = by_layer(Memory(
            k=slots.k[:, :, :, :bucket], v=slots.v[:, :, :, :bucket],
            valid_BxS=jnp.arange(bucket) < slots.length_B[:, None]), decoder.config)
        hidden_BxD, chunk_kv, valid_BxC = _extend(decoder, params, slots, prefix, chunk_BxC, n_B)
        start_B = slots.length_B + n_B
        keys_B = jax.vmap(
            lambda who: jax.random.fold_in(jax.random.fold_in(key, who[0]), who[1]))(who_Bx2)
        draw = functools.partial(_draw, decoder, params, keys_B=keys_B, temperature=temperature)
        hidden_BxD, near, out = _sample(
            decoder, params, config, jnp.asarray(tuple(stop_ids), jnp.int32), draw, prefix,
            chunk_kv, valid_BxC, hidden_BxD, start_B, sample_B, budget_B)
        # All sampled tokens but the last are in the cache; the host sends that one again.
        length_B = start_B + jnp.maximum(out.count_B - 1, 0)
        merge = lambda cache, new: _write(  # noqa: E731
            _write(cache, new[:, :, :, :C], slots.length_B), new[:, :, :, C:], start_B)
        slots = Slots(k=merge(slots.k, jnp.stack(near.k)), v=merge(slots.v, jnp.stack(near.v)),
                      length_B=length_B, hidden_BxD=hidden_BxD)
        return slots, out.replace(length_B=length_B)

    return wave


def _extend(decoder, params, slots: Slots, prefix: Memory, chunk_BxC, n_B):
    """Runs the chunks; returns the hidden state that predicts each slot's next token, the
    chunk's K/V and which of its entries are real."""
    B, C = chunk_BxC.shape
    offset_C = jnp.arange(C)
    valid_BxC = offset_C < n_B[:, None]
    hidden_BxCxD, kv = decoder.apply(
        {"params": params}, chunk_BxC, slots.length_B[:, None] + offset_C,
        causal_mask(C) & valid_BxC[:, None, :], (prefix,))
    last_BxD = hidden_BxCxD[jnp.arange(B), jnp.maximum(n_B - 1, 0)]
    return jnp.where((n_B > 0)[:, None], last_BxD, slots.hidden_BxD), kv, valid_BxC


def _draw(decoder, params, hidden_BxD, position_B, *, keys_B, temperature):
    """The next token of each slot and its log-prob."""
    logits_BxV = decoder.apply({"params": params}, hidden_BxD, method="logits")
    logits_BxV = logits_BxV / jnp.where(temperature > 0, temperature, 1.0)
    noise_BxV = jax.vmap(
        lambda key, position: jax.random.gumbel(
            jax.random.fold_in(key, position), logits_BxV.shape[1:]))(keys_B, position_B)
    scores_BxV = jnp.where(temperature > 0, logits_BxV + noise_BxV, logits_BxV)
    token_B = jnp.argmax(scores_BxV, axis=-1).astype(jnp.int32)
    logprobs_BxV = jax.nn.log_softmax(logits_BxV, axis=-1)
    return token_B, jnp.take_along_axis(logprobs_BxV, token_B[:, None], axis=-1)[:, 0]


def _sample(decoder, params, config: SamplerConfig, stop, draw, prefix: Memory, chunk_kv,
            valid_BxC, hidden_BxD, start_B, sample_B, budget_B):
    """Samples until each slot stops, is out of budget, or too few are left to wait for.
    Returns the hidden states, the K/V of chunk and message, and the WaveOutput."""
    B, C, M = config.slots, config.chunk, config.max_new
    patience = int(config.straggler_share * B)
    room = ((0, 0), (0, 0), (0, 0), (0, M), (0, 0))  # for the message, behind the chunk
    near = by_layer(Memory(k=jnp.pad(chunk_kv[0], room), v=jnp.pad(chunk_kv[1], room),
                           valid_BxS=jnp.pad(valid_BxC, ((0, 0), (0, M)))), decoder.config)
    token_B, logprob_B = draw(hidden_BxD, start_B)
    out = WaveOutput(
        tokens_BxM=jnp.zeros((B, M), jnp.int32).at[:, 0].set(token_B),
        logprobs_BxM=jnp.zeros((B, M), jnp.float32).at[:, 0].set(logprob_B),
        count_B=jnp.where(sample_B, 1, 0).astype(jnp.int32),
        stopped_B=sample_B & jnp.isin(token_B, stop), length_B=start_B)
    alive_B = sample_B & ~out.stopped_B & (budget_B > 1)

    def more(carry):
        return jnp.sum(carry[1]) > patience

    def step(carry):
        i, alive_B, hidden_BxD, near, out = carry
        token_B = jax.lax.dynamic_index_in_dim(out.tokens_BxM, i, axis=1, keepdims=False)
        hidden_Bx1xD, kv = decoder.apply(
            {"params": params}, token_B[:, None], (start_B + i)[:, None],
            jnp.ones((B, 1, 1), bool), (prefix, near))
        # A slot that has stopped goes on writing behind its end; nothing ever reads that.
        near = append(near, kv, C + i)
        near = near.replace(valid_BxS=near.valid_BxS.at[:, C + i].set(True))
        hidden_BxD = jnp.where(alive_B[:, None], hidden_Bx1xD[:, 0], hidden_BxD)
        token_B, logprob_B = draw(hidden_BxD, start_B + i + 1)
        put = lambda x_BxM, x_B: jax.lax.dynamic_update_slice_in_dim(  # noqa: E731
            x_BxM, x_B[:, None], i + 1, axis=1)
        count_B = out.count_B + alive_B
        stopped_B = out.stopped_B | (alive_B & jnp.isin(token_B, stop))
        out = WaveOutput(put(out.tokens_BxM, token_B), put(out.logprobs_BxM, logprob_B),
                         count_B, stopped_B, out.length_B)
        return i + 1, alive_B & ~stopped_B & (count_B < budget_B), hidden_BxD, near, out

    _, _, hidden_BxD, near, out = jax.lax.while_loop(
        more, step, (jnp.int32(0), alive_B, hidden_BxD, near, out))
    return hidden_BxD, near, out


def _write(cache, chunk, at_B):
    """Writes chunk [layers, B, KV, C, HD] into cache [layers, B, KV, S, HD] at positions at_B."""
    def one(cache_KVxSxHD, chunk_KVxCxHD, at):
        return jax.lax.dynamic_update_slice_in_dim(cache_KVxSxHD, chunk_KVxCxHD, at, axis=1)
    return jax.vmap(jax.vmap(one), in_axes=(0, 0, None))(cache, chunk, at_B)
