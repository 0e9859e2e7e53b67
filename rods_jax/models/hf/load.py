"""A Hugging Face folder into the decoder's parameters, laid out over a mesh as it is read.

A tensor goes piece by piece from the file to the devices that keep the piece, one layer at a
time, and is turned into the parameter's axes there. So no device ever holds more of a
parameter than its own part (and one layer's of the file), and the host no more than two
layers of one parameter, or one tensor that is not of a layer.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rods_jax.models.config import ModelConfig
from rods_jax.models.hf.config import HfConfig, read_config
from rods_jax.models.hf.files import DTYPES, Weights, open_weights
from rods_jax.models.hf.match import check_tensors
from rods_jax.models.hf.names import Slot, slots
from rods_jax.models.sharding import ShardingRules, param_shardings, replicated


def load(folder: str | os.PathLike, dtype: str | None = None, mesh: Mesh | None = None,
         rules: ShardingRules = ShardingRules()) -> tuple[HfConfig, dict[str, Any]]:
    """(config, params): jax arrays in the tree of `decoder.init_params`.

    dtype: "float32", "bfloat16" or "float16" casts every parameter, on the device; None keeps
        each parameter's own from the file, or where its layers differ one that holds all.
    mesh: where the parameters go, by `rules`; None leaves them on the default device. On
        several processes all call this with a folder that all can read; each reads no more
        than the pieces of its own devices (and, where a tied model repeats its head, both).
    ValueError in one line for a folder that is not whole, and for any tensor that is missing,
    unknown, there twice, of the wrong shape or of a type that is not read.
    """
    if dtype is not None and dtype not in DTYPES.values():
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES.values())}")
    with open_weights(folder) as weights:
        config = read_config(folder)
        model = config.model
        check_tensors(weights, model)
        dtypes = {s.parameter: dtype or _own_dtype(weights, s, model) for s in slots(model)}
        shardings = _shardings(model, dtypes, mesh, rules)
        layers = [on_devices(i, mesh) for i in range(model.n_layers)]
        params: dict[str, Any] = {"layers": {}}
        for slot in slots(model):
            to, sharding = dtypes[slot.parameter], shardings[slot.parameter]
            if slot.stacked:
                name = slot.parameter.removeprefix("layers/")
                params["layers"][name] = _stacked(weights, slot, to, sharding, layers)
            else:
                params[slot.parameter] = _whole(weights, slot, to, sharding)
        jax.block_until_ready(params)  # the files may go away
    return config, params


def _own_dtype(weights: Weights, slot: Slot, model: ModelConfig) -> str:
    """The file's dtype of a parameter; where its layers differ, one that holds all of them."""
    names = [slot.name(layer) for layer in range(model.n_layers if slot.stacked else 1)]
    found = [jnp.dtype(DTYPES[weights.tensors[name].dtype]) for name in names]
    return functools.reduce(jnp.promote_types, found).name


def _shardings(model: ModelConfig, dtypes, mesh: Mesh | None,
               rules: ShardingRules) -> dict[str, NamedSharding | None]:
    """By parameter path; None on a single device."""
    if mesh is None:
        return dict.fromkeys(dtypes)
    tree: dict[str, Any] = {"layers": {}}
    for slot in slots(model):
        shape = (model.n_layers,) * slot.stacked + slot.parameter_shape
        group = tree["layers"] if slot.stacked else tree
        group[slot.parameter.removeprefix("layers/")] = jax.ShapeDtypeStruct(
            shape, dtypes[slot.parameter])
    found = param_shardings(tree, mesh, rules)
    return {**found, **{f"layers/{name}": s for name, s in found["layers"].items()}}


def file_sharding(slot: Slot, sharding: NamedSharding | None) -> NamedSharding | None:
    """How one tensor in the file's axes (`Slot.split`) lies on the devices that keep the
    parameter by `sharding`, so that turning the axes moves nothing between them."""
    if sharding is None:
        return None
    spec = sharding.spec[1:] if slot.stacked else sharding.spec
    axes: list[Any] = [None] * len(slot.order)
    for target, axis in zip(spec, slot.order):
        axes[axis] = target
    return NamedSharding(sharding.mesh, PartitionSpec(*axes))


def _whole(weights: Weights, slot: Slot, dtype: str, sharding: NamedSharding | None):
    parts = _parts(weights, slot, slot.tensor, file_sharding(slot, sharding))
    return _turner(slot.order, dtype, sharding)(parts)


def _stacked(weights: Weights, slot: Slot, dtype: str, sharding: NamedSharding | None, layers):
    """Writes layer after layer into an array that is on its devices from the start."""
    write, layout = _writer(slot.order, sharding), file_sharding(slot, sharding)
    stack = _zeros((len(layers), *slot.parameter_shape), dtype, sharding)()
    for layer, number in enumerate(layers):
        parts = _parts(weights, slot, slot.name(layer), layout)
        stack.block_until_ready()  # the layer before: its pieces may now leave the host
        stack = write(stack, parts, number)
    return stack


def _parts(weights: Weights, slot: Slot, name: str, sharding: NamedSharding | None) -> jax.Array:
    """A tensor of the shape `Slot.split`; each device's part is read once."""
    if sharding is None:
        return jax.device_put(_read(weights, slot, name, [(0, n) for n in slot.split]))
    read: dict[tuple, np.ndarray] = {}

    def part(index) -> np.ndarray:
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, slot.split))
        if bounds not in read:
            read[bounds] = _read(weights, slot, name, bounds)
        return read[bounds]

    return _placed(slot.split, sharding, part, DTYPES[weights.tensors[name].dtype])


def _placed(shape: tuple[int, ...], sharding: NamedSharding, part, dtype: str) -> jax.Array:
    """part: index of a device -> numpy array. As jax.make_array_from_callback, whose transfers
    a transfer guard takes for implicit ones."""
    indices = sharding.addressable_devices_indices_map(shape)
    arrays = [jax.device_put(part(index), device) for device, index in indices.items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=jnp.dtype(dtype))


def _read(weights: Weights, slot: Slot, name: str, bounds) -> np.ndarray:
    """bounds: (start, stop) on each axis of `Slot.split`."""
    axis = slot.head_axis
    if axis is None:
        return weights.read(name, tuple(slice(*b) for b in bounds))
    (first, last), (low, high) = bounds[axis:axis + 2]
    width = slot.split[axis + 1]
    rows = [*bounds[:axis], (first * width, last * width), *bounds[axis + 2:]]
    x = weights.read(name, tuple(slice(*b) for b in rows))
    x = x.reshape(*x.shape[:axis], last - first, width, *x.shape[axis + 1:])
    return x[(slice(None),) * (axis + 1) + (slice(low, high),)]


def on_devices(value: int, mesh: Mesh | None) -> jax.Array:
    """A number that jitted functions of arrays on `mesh` take without a transfer."""
    if mesh is None:
        return jax.device_put(np.int32(value))
    return _placed((), replicated(mesh), lambda _: np.int32(value), "int32")


@functools.lru_cache(maxsize=64)
def _writer(order: tuple[int, ...], sharding: NamedSharding | None):
    """write(stack, parts, layer) -> stack, in place; compiled once for each shape."""
    def write(stack, parts, layer):
        piece = parts.transpose(order).astype(stack.dtype)
        return jax.lax.dynamic_update_index_in_dim(stack, piece, layer, 0)
    return jax.jit(write, donate_argnums=0, out_shardings=sharding)


@functools.lru_cache(maxsize=64)
def _turner(order: tuple[int, ...], dtype: str, sharding: NamedSharding | None):
    return jax.jit(lambda parts: parts.transpose(order).astype(dtype), out_shardings=sharding)


@functools.lru_cache(maxsize=64)
def _zeros(shape: tuple[int, ...], dtype: str, sharding: NamedSharding | None):
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)
