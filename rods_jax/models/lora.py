"""Low-rank adapters beside the decoder's weights, https://arxiv.org/abs/2106.09685.

An adapted projection computes y = x W + scale (x A) B. Of a weight `layers/q` [Lyr, *in, *out]
(in and out: the axes it takes from and gives, of o in is (H, HD) and out is (D,)) the
adapters are two parameters more, float32, r the rank:

    layers/q_lora_a  [Lyr, *in, r]
    layers/q_lora_b  [Lyr, r, *out]

Only these are trained. The product A B is never formed but by `merged`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rods_jax.models.config import PROJECTIONS, ModelConfig

A, B = "_lora_a", "_lora_b"  # end of the parameters' names

Params = Any  # nested dict of arrays


def input_axes(name: str) -> int:
    """How many leading axes of a layer's weight are its inputs."""
    return 2 if name == "o" else 1


def weight_shapes(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """(*in), (*out) of one layer's weights, by their names."""
    c = config
    heads, kv_heads = (c.n_heads, c.head_dim), (c.n_kv_heads, c.head_dim)
    return {"q": ((c.d_model,), heads), "k": ((c.d_model,), kv_heads),
            "v": ((c.d_model,), kv_heads), "o": (heads, (c.d_model,)),
            "gate": ((c.d_model,), (c.d_ff,)), "up": ((c.d_model,), (c.d_ff,)),
            "down": ((c.d_ff,), (c.d_model,))}


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of one layer's adapter parameters, by their names; empty without lora."""
    if config.lora is None:
        return {}
    rank, weights = config.lora.rank, weight_shapes(config)
    found = {}
    for name in config.lora.parameters:
        inputs, outputs = weights[name]
        found |= {name + A: (*inputs, rank), name + B: (rank, *outputs)}
    return found


def initializer(name: str):
    """init(key, shape) of one layer's adapter parameter: B is 0, so that a fresh adapter
    changes nothing; A is uniform within +- 1 / sqrt(inputs), what the authors' code draws."""
    def draw(key, shape):
        bound = float(np.prod(shape[:-1])) ** -0.5
        return jax.random.uniform(key, shape, jnp.float32, -bound, bound)
    return draw if name.endswith(A) else lambda key, shape: jnp.zeros(shape, jnp.float32)


@partial(jax.jit, static_argnums=0)
def init_adapters(config: ModelConfig, key: jax.Array) -> dict:
    """Fresh adapters as a tree of their own, to be joined to a model's weights."""
    _need_lora(config)
    layers = {}
    for i, (name, shape) in enumerate(shapes(config).items()):
        keys = jax.random.split(jax.random.fold_in(key, i), config.n_layers)
        layers[name] = jax.vmap(partial(initializer(name), shape=shape))(keys)
    return {"layers": layers}


def split(params: Params) -> tuple[dict, dict]:
    """(frozen, adapters): the tree without its adapters, and they alone. ValueError where
    there are none."""
    adapters = {name: x for name, x in params["layers"].items() if _is_adapter(name)}
    if not adapters:
        raise ValueError("the parameters hold no adapters: set lora in the model's config and "
                         "add them with init_adapters")
    rest = {name: x for name, x in params["layers"].items() if name not in adapters}
    return {**params, "layers": rest}, {"layers": adapters}


def join(frozen: Params, params: Params) -> dict:
    """Both trees as one; no array is copied. ValueError where both hold the same one."""
    return _join(frozen, params, "")


def _join(left, right, path: str) -> dict:
    joined = dict(left)
    for name, x in right.items():
        where = f"{path}{name}"
        if name not in left:
            joined[name] = x
        elif isinstance(x, Mapping) and isinstance(left[name], Mapping):
            joined[name] = _join(left[name], x, where + "/")
        else:
            raise ValueError(f"{where} is among the frozen and the trained parameters: "
                             "divide the tree with split")
    return joined


def check(params: Params, config: ModelConfig) -> None:
    """ValueError unless the tree holds just the adapters that `config` asks for."""
    wanted, layers = shapes(config), params["layers"]
    for name, shape in wanted.items():
        shape = (config.n_layers, *shape)
        if name not in layers:
            raise ValueError(f"adapter layers/{name} is missing, lora targets "
                             f"{config.lora.targets!r} ask for it: make it with init_adapters")
        if tuple(layers[name].shape) != shape:
            raise ValueError(f"adapter layers/{name} has the shape {tuple(layers[name].shape)}, "
                             f"the model's config (lora rank {config.lora.rank}) asks for {shape}")
    for name in layers:
        if _is_adapter(name) and name not in wanted:
            targets = repr(config.lora.targets) if config.lora else "none"
            raise ValueError(f"adapter layers/{name} has no place, lora targets are {targets}: "
                             "set lora in the model's config as it was when the adapter was made")


def merged(params: Params, config: ModelConfig) -> dict:
    """The same model without adapters: each adapted weight becomes W + scale A B, computed in
    float32 and kept in W's dtype. It belongs to `config` with lora None. ValueError where
    adapters and config do not fit."""
    check(params, config)
    if config.lora is None:
        return params
    layers = {name: x for name, x in params["layers"].items() if not _is_adapter(name)}
    for name in config.lora.parameters:
        layers[name] = _merge(layers[name], params["layers"][name + A],
                              params["layers"][name + B], config.lora.scale)
    return {**params, "layers": layers}


@partial(jax.jit, static_argnums=3)
def _merge(weights, a, b, scale: float):
    """Layer by layer, so that one float32 product is alive at a time."""
    def one(w_a_b):
        w, a, b = w_a_b
        product = jnp.tensordot(a.astype(jnp.float32), b.astype(jnp.float32), 1,
                                precision=jax.lax.Precision.HIGHEST)
        return (w.astype(jnp.float32) + scale * product).astype(w.dtype)
    return jax.lax.map(one, (weights, a, b))


def rounding_loss(params: Params, config: ModelConfig) -> float | None:
    """How much of what the adapters add is lost where `merged` rounds it to the weights'
    dtype: the norm of the error over the norm of scale A B, over all adapted weights. None
    where the adapters add nothing, as before training."""
    check(params, config)
    error = size = 0.0
    for name in config.lora.parameters:
        lost, whole = _rounding(params["layers"][name], params["layers"][name + A],
                                params["layers"][name + B], config.lora.scale)
        error, size = error + float(lost.sum()), size + float(whole.sum())
    return (error / size) ** 0.5 if size else None


@partial(jax.jit, static_argnums=3)
def _rounding(weights, a, b, scale: float):
    kind = jnp.finfo(weights.dtype)

    def one(w_a_b):
        w, a, b = (x.astype(jnp.float32) for x in w_a_b)
        product = scale * jnp.tensordot(a, b, 1, precision=jax.lax.Precision.HIGHEST)
        # A cast there and back would be taken out by the compiler.
        kept = jax.lax.reduce_precision(w + product, kind.nexp, kind.nmant) - w
        return jnp.square(kept - product).sum(), jnp.square(product).sum()
    return jax.lax.map(one, (weights, a, b))


def _is_adapter(name: str) -> bool:
    return name.endswith((A, B)) and name.removesuffix(A).removesuffix(B) in PROJECTIONS.values()


def _need_lora(config: ModelConfig) -> None:
    if config.lora is None:
        raise ValueError("the model's config has no lora: set it before making adapters")
