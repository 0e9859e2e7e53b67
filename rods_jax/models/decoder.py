"""A Llama-shaped decoder whose chunks may attend to memories of earlier tokens.

One forward pass serves training (no memory, or the K/V of prompts that rows share), prefill and
extend (pages of K/V) and decode (pages, and the K/V of the tokens decoded since the wave began;
see models/memory.py). It writes no pages: it returns the chunk's own K/V, which the caller
stores.

Extra dim letters: H heads, KV key/value heads, Q = H / KV, HD head width, Lyr layers.

Parameters (float32), as `init_params` returns them; layers are stacked on axis 0:

    embed                  [V, D]
    layers/attn_norm       [Lyr, D]        layers/mlp_norm   [Lyr, D]
    layers/q               [Lyr, D, H, HD] layers/gate       [Lyr, D, F]
    layers/k, layers/v     [Lyr, D, KV, HD] layers/up        [Lyr, D, F]
    layers/o               [Lyr, H, HD, D] layers/down       [Lyr, F, D]
    layers/q_bias          [Lyr, H, HD]    (qkv_bias; k_bias and v_bias [Lyr, KV, HD])
    layers/q_norm, k_norm  [Lyr, HD]       (qk_norm)
    final_norm             [D]
    head                   [D, V]          (untied)

with config.lora the adapters of models/lora.py, and with config.int8_weights the scales of
models/int8.py. Frozen weights, and those of rollouts, may be of another dtype.
"""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from rods_jax.models import blockwise, int8, lora, memory, sharding
from rods_jax.models.attention import (
    Segments, Shared, attend, attend_segments, causal_mask, choose, segment_mask)
from rods_jax.models.config import PROJECTIONS, ModelConfig, Remat


def rope_tables(positions_BxC: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """cos, sin float32 [B, C, HD / 2] of position * theta^(-2i / HD) / divisor_i."""
    half = config.head_dim // 2
    freqs = config.rope_theta ** -(np.arange(half) / half)
    if config.rope_divisors:
        freqs = freqs / np.asarray(config.rope_divisors)
    angles = positions_BxC.astype(jnp.float32)[..., None] * freqs.astype(np.float32)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BxCxNxHD: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary positions, pairing component i with i + HD / 2 (the Hugging Face layout)."""
    a, b = jnp.split(x_BxCxNxHD.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BxCxNxHD.dtype)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale over the last axis, in float32, back in x's dtype."""
    wide = x.astype(jnp.float32)
    inv = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return (wide * inv * scale).astype(x.dtype)


def _fan_in(*axes: int, scale: float = 1.0):
    """Normal with variance scale / (product of the sizes of `axes`)."""
    def init(key, shape):
        fan = int(np.prod([shape[a] for a in axes]))
        return jax.random.normal(key, shape, jnp.float32) * (scale / fan) ** 0.5
    return init


def _project(x: jax.Array, kernel: jax.Array, n_in: int = 1, dtype=None) -> jax.Array:
    """Contracts x's last n_in axes with the kernel's first n_in, as one flat matmul: a
    two-dimensional product is what every backend runs fastest. In x's dtype, or in `dtype`."""
    lead, inner, outer = x.shape[:x.ndim - n_in], kernel.shape[:n_in], kernel.shape[n_in:]
    width = int(np.prod(inner))
    y = jnp.matmul(x.reshape(-1, width), kernel.reshape(width, -1).astype(x.dtype),
                   preferred_element_type=dtype)
    return y.reshape(*lead, *outer)


def _project_turned(x: jax.Array, kernel: jax.Array, n_in: int = 1, dtype=None) -> jax.Array:
    """The same with a kernel whose inputs are its last n_in axes."""
    lead, outer = x.shape[:x.ndim - n_in], kernel.shape[:kernel.ndim - n_in]
    flat = x.reshape(int(np.prod(lead)), -1)
    y = _matmul_turned(flat, kernel.reshape(-1, flat.shape[1]).astype(x.dtype), dtype)
    return y.reshape(*lead, *outer)


_FEW = 32  # rows


def _matmul_turned(x_NxI: jax.Array, kernel_OxI: jax.Array, dtype=None) -> jax.Array:
    """float [N, O]. Of a few rows a CPU makes the product from the left, (kernel x^T)^T, half
    as fast again: its library first copies the right factor into an order of its own, which
    takes longer than to multiply where that is the kernel. Without the barriers the compiler
    would turn everything back."""
    def from_right():
        return jnp.matmul(x_NxI, kernel_OxI.T, preferred_element_type=dtype)
    def from_left():
        keep = jax.lax.optimization_barrier
        return keep(jnp.matmul(kernel_OxI, keep(x_NxI.T), preferred_element_type=dtype)).T
    if x_NxI.shape[0] > _FEW:
        return from_right()
    return jax.lax.platform_dependent(cpu=from_left, default=from_right)


def _pin(x: jax.Array, sharding: jax.sharding.NamedSharding | None) -> jax.Array:
    return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)


class Layer(nn.Module):
    """Pre-norm attention and SwiGLU block."""

    config: ModelConfig
    activations: jax.sharding.NamedSharding | None = None
    turned: bool = False  # weights lie [*out, *in], see `unstacked`

    def setup(self):
        c = self.config
        h, kv, hd = c.n_heads, c.n_kv_heads, c.head_dim
        ones, zeros = nn.initializers.ones, nn.initializers.zeros
        self.attn_norm = self.param("attn_norm", ones, (c.d_model,))
        self.mlp_norm = self.param("mlp_norm", ones, (c.d_model,))
        # What is added to the residual stream keeps its variance flat in depth.
        scales = dict.fromkeys(("o", "down"), 1.0 / (2 * c.n_layers))
        weights, shapes = {}, lora.weight_shapes(c)
        for name, (inputs, outputs) in shapes.items():
            shape = (*outputs, *inputs) if self.turned else (*inputs, *outputs)
            init = _fan_in(*range(len(inputs)), scale=scales.get(name, 1.0))
            weights[name] = self.param(name, init, shape)
        self.weights = weights
        if c.qkv_bias:
            self.q_bias = self.param("q_bias", zeros, (h, hd))
            self.k_bias = self.param("k_bias", zeros, (kv, hd))
            self.v_bias = self.param("v_bias", zeros, (kv, hd))
        if c.qk_norm:
            self.q_norm = self.param("q_norm", ones, (hd,))
            self.k_norm = self.param("k_norm", ones, (hd,))
        self.adapters = {name: self.param(name, lora.initializer(name), shape)
                         for name, shape in lora.shapes(c).items()}
        self.scales = {name: self.param(name + int8.SCALE, ones, shapes[name][1])
                       for name in int8.NAMES if c.int8_weights}

    def _weighted(self, name: str, x, n_in: int):
        """x times the weight `name`, which may be int8."""
        weights = self.weights[name]
        project = _project_turned if self.turned else _project
        if self.config.int8_weights != (weights.dtype == jnp.int8):
            raise ValueError(f"layers/{name} is {weights.dtype}, int8_weights is "
                             f"{self.config.int8_weights}: take decoder and weights of rollouts "
                             "both from rollout/weights.py")
        if not self.config.int8_weights:
            return project(x, weights, n_in)
        # Rounded to x's dtype once, after it was scaled.
        return int8.scaled(project(x, weights, n_in, jnp.float32),
                           self.scales[name]).astype(x.dtype)

    def _linear(self, name: str, x):
        """x times the weight `name`, and what its adapter adds."""
        n_in = lora.input_axes(name)
        y = self._weighted(name, x, n_in)
        if name + lora.A not in self.adapters:
            return y
        low = _project(x, self.adapters[name + lora.A], n_in) * self.config.lora.scale
        b = self.adapters[name + lora.B].astype(x.dtype)
        # A batch axis, of size 1, makes this no matmul that Remat.DOTS keeps: what it keeps of
        # an adapter is `low`, rank numbers a token, not as much as of the weight again.
        more = jnp.einsum("bnr,bro->bno", low.reshape(1, -1, low.shape[-1]),
                          b.reshape(1, b.shape[0], -1))
        return y + more.reshape(y.shape)

    def _qkv(self, x, cos, sin):
        q, k, v = (self._linear(name, x) for name in ("q", "k", "v"))
        if self.config.qkv_bias:
            q, k, v = (y + bias.astype(y.dtype) for y, bias in
                       ((q, self.q_bias), (k, self.k_bias), (v, self.v_bias)))
        if self.config.qk_norm:
            q = rms_norm(q, self.q_norm, self.config.norm_eps)
            k = rms_norm(k, self.k_norm, self.config.norm_eps)
        return rotate(q, cos, sin), rotate(k, cos, sin).swapaxes(1, 2), v.swapaxes(1, 2)

    def __call__(self, x_BxCxD, memory_kv, cos, sin, self_mask, where):
        """memory_kv: this layer's (k, v) of each memory, `where` who sees what of it.
        self_mask: bool, or Segments for a kernel. Returns x and the chunk's (k, v), or the
        last memory's with the chunk in it (memory.attend)."""
        eps = self.config.norm_eps
        q, k, v = self._qkv(rms_norm(x_BxCxD, self.attn_norm, eps), cos, sin)
        if isinstance(self_mask, Segments):
            prompts = next(((*kv, who) for kv, who in zip(memory_kv, where)), None)
            kind = choose(self.config, q.shape[1], self.activations,
                          prompts[0].shape[2] if prompts else 0, self_mask.alone)
            seen = attend_segments(q, k, v, self_mask, kind, self.activations, prompts)
        elif memory_kv:
            memories = [(mk, mv, who) for (mk, mv), who in zip(memory_kv, where)]
            seen, (k, v) = memory.attend(q, (k, v), self_mask, memories)
        else:
            seen = attend(q, k, v, self_mask)
        x = x_BxCxD + self._linear("o", seen)
        y = rms_norm(x, self.mlp_norm, eps)
        y = nn.silu(self._linear("gate", y)) * self._linear("up", y)
        return _pin(x + self._linear("down", y), self.activations), (
            self._in_parts(k), self._in_parts(v))

    def _in_parts(self, x_BxKVxCxHD):
        """K or V of a sequence whose tokens are split over devices, split as they are."""
        rows, sequence, *_ = (*(self.activations.spec if self.activations else ()), None, None)
        if sequence is None:
            return x_BxKVxCxHD
        spec = jax.sharding.PartitionSpec
        return _pin(x_BxKVxCxHD, jax.sharding.NamedSharding(
            self.activations.mesh, spec(rows, spec.UNCONSTRAINED, sequence)))


def _remat(config: ModelConfig):
    """Layer, computed again in the backward pass as far as config.remat says."""
    if config.remat is Remat.NONE:
        return Layer
    policies = jax.checkpoint_policies
    # An attention kernel is no matmul, but to run it again costs as much as several.
    dots = policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable,
                                            policies.save_only_these_names(blockwise.OUTPUT))
    # Between the loops of the two passes nothing can be merged. Outside of loops, where
    # unrolling puts layers, the compiler would find the second computation equal to the
    # first, and keep that one's results.
    return nn.remat(Layer, prevent_cse=config.scan_unroll > 1,
                    policy=dots if config.remat is Remat.DOTS else None)


class Decoder(nn.Module):
    """Call with `Decoder(config).apply({"params": params}, ...)`.

    activations: where hidden states live on a mesh (`sharding.batch_sharding(mesh)`). Without
    it the compiler decides, and may split the model width instead of the batch.
    """

    config: ModelConfig
    activations: jax.sharding.NamedSharding | None = None

    def setup(self):
        c = self.config
        self.embed = self.param("embed", nn.initializers.normal(0.02), (c.vocab_size, c.d_model))
        self.final_norm = self.param("final_norm", nn.initializers.ones, (c.d_model,))
        if not c.tie_embeddings:
            self.head = self.param("head", _fan_in(0), (c.d_model, c.vocab_size))
        layer = _remat(c)
        self.layers = nn.scan(
            layer, variable_axes={"params": 0}, split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast, nn.broadcast),
            length=c.n_layers, unroll=min(c.scan_unroll, c.n_layers))(
                c, self.activations)

    def __call__(self, tokens_BxC, positions_BxC, self_mask, memories=(), layers=None):
        """Hidden states after the final norm, and the chunk's K/V.

        tokens_BxC, positions_BxC: int32. self_mask: which keys of the chunk its queries see,
        as Segments or as bool [B, C, C] (or [1, C, C]). memories: tuple of Memory. In training
        they are none or one Memory of Shared prompts, and the mask is Segments: those two go
        to kernels, by config.attention, and all else to XLA.
        layers: the parameters of each layer, in place of the stacked ones (`unstacked`);
        memories are then tuples of layers, and so are the k and v that are returned.
        Returns hidden_BxCxD in compute_dtype and (k, v), each [Lyr, B, KV, C, HD] in
        compute_dtype, k after rope; where the last memory is Rows, its k and v with the
        chunk's in it.
        """
        x = self._lookup(tokens_BxC)
        where = tuple(m.where for m in memories)
        if isinstance(self_mask, Segments) and where \
                and not isinstance(where[0], Shared):
            self_mask = segment_mask(self_mask.ids_BxC)
        cos, sin = rope_tables(positions_BxC, self.config)
        if layers is None:
            parts = tuple(memory.scanned(m) for m in memories)
            x, kv = self.layers(x, tuple(kv for kv, _ in parts), cos, sin, self_mask,
                                tuple(where for _, where in parts))
        else:
            one = Layer(self.config, self.activations, turned=True, parent=None)
            kv = []
            for i, params in enumerate(layers):
                x, new = one.apply({"params": params}, x, [(m.k[i], m.v[i]) for m in memories],
                                   cos, sin, self_mask, where)
                kv.append(new)
            kv = tuple(zip(*kv))
        return rms_norm(x, self.final_norm, self.config.norm_eps), kv

    def _lookup(self, tokens):
        """Rows of the embedding, in compute_dtype. The table stays float32: its gradient
        sums over all uses of a token. On a mesh each device looks all tokens up in its part of
        the width, and the parts change places: neither table nor gradient is ever whole."""
        if self.activations is None:
            return self.embed[tokens].astype(self.config.compute_dtype)
        mesh, (rows, *_) = self.activations.mesh, (*self.activations.spec, None)
        rows = (rows,) if isinstance(rows, str) else rows or ()
        width = sharding.width_axes(mesh, self.config.d_model)
        apart = tuple(axis for axis in rows if axis not in width) or None
        on = lambda *axes: jax.sharding.NamedSharding(  # noqa: E731
            mesh, jax.sharding.PartitionSpec(*axes))
        found = self.embed[_pin(tokens, on(apart))].astype(self.config.compute_dtype)
        return _pin(_pin(found, on(apart, None, width or None)), self.activations)

    def logits(self, hidden) -> jax.Array:
        """float32 [..., V] of hidden states [..., D]: `apply(..., method="logits")`."""
        return logits_by(self.config, self.embed if self.config.tie_embeddings else self.head,
                         hidden)


def head_name(config: ModelConfig) -> str:
    """The parameter that makes logits."""
    return "embed" if config.tie_embeddings else "head"


def logits_by(config: ModelConfig, weights: jax.Array, hidden: jax.Array) -> jax.Array:
    """float32 [..., V] of hidden states [..., D], by the parameter `head_name`."""
    project = _project_turned if config.tie_embeddings else _project
    return project(hidden, weights, dtype=jnp.float32)


def unrolled(config: ModelConfig) -> bool:
    """Whether rollouts run the layers one by one, from arrays of their own, and not in a scan
    over stacked ones."""
    return config.scan_unroll >= config.n_layers


def unstacked(config: ModelConfig, params) -> dict:
    """The parameters as rollouts read them: where the layers are unrolled a tuple of layers in
    place of the stacked ones, which a decode loop would take apart again in every step, and
    their weights [*out, *in] (see _matmul_turned). All else is not copied."""
    if not unrolled(config):
        return params
    return params | {"layers": _unstack(config.n_layers, params["layers"])}


@functools.partial(jax.jit, static_argnums=0)
def _unstack(n_layers: int, layers):
    def turned(name: str, x: jax.Array) -> jax.Array:
        if name not in PROJECTIONS.values():
            return x
        n_in = lora.input_axes(name)
        return jnp.moveaxis(x, range(n_in), range(-n_in, 0))
    return tuple({name: turned(name, x[i]) for name, x in layers.items()}
                 for i in range(n_layers))


def forward(decoder: Decoder, params, *args):
    """`decoder` called with parameters, stacked or `unstacked`."""
    if not isinstance(params["layers"], tuple):
        return decoder.apply({"params": params}, *args)
    rest = {name: x for name, x in params.items() if name != "layers"}
    return decoder.apply({"params": rest}, *args, layers=params["layers"])


@functools.partial(jax.jit, static_argnums=0)
def init_params(config: ModelConfig, key: jax.Array) -> dict:
    """Fresh float32 parameters (the tree above); the weights are the same with and without
    adapters. To make a large model in place on a mesh, jit a call of this with out_shardings."""
    one = jnp.zeros((1, 1), jnp.int32)
    plain = Decoder(dataclasses.replace(config, lora=None))
    params = plain.init(key, one, one, causal_mask(1))["params"]
    if config.lora is None:
        return params
    return lora.join(params, lora.init_adapters(config, jax.random.fold_in(key, 1)))


def count_params(params) -> int:
    """Numbers in the tree; a tied head counts once."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))
