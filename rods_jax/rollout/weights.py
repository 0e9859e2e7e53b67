"""The weights that rollouts are played with: the trainer's, laid out on this host's devices
and, if asked, rounded.

    TRAINED  as the trainer has them
    BF16     the matrices (projections, embedding, head) in bfloat16: half the bytes. To a
             decoder that computes in bfloat16 these are the same numbers, for it rounds
             float32 weights so itself, at every use.
    INT8     the projections in int8 (models/int8.py), a quarter of their bytes; embedding and
             head in bfloat16: a token's row is one of many, read alone, so it gains nothing,
             and an error of the head is an error of every log-prob.

Norm scales and biases stay as they are: a thousandth of the bytes, and each is a factor or a
term of all that passes. So do adapters of LoRA, which stay apart from the weights: merged,
updates smaller than the weights' last digit would be lost (`lora.rounding_loss`), and all
weights would have to be rounded and moved after every step, not the adapters alone.

Rounded weights sample from another policy than the trained one. The trainer corrects for it
by the truncated importance ratio of grpo/loss.py and logs the gap.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.stages import Lowered

from rods_jax.models import int8, lora
from rods_jax.models.decoder import Decoder
from rods_jax.models.sharding import MESH_AXES, ShardingRules, param_shardings, replicated

Params = Any  # nested dict of arrays
Flat = dict[str, jax.Array]  # the same by path, "layers/q"

_TENSOR = "tensor"
# Rollouts gather no weights: what a device computes with, it holds. An axis that does not
# divide over the tensor axis is held whole.
_RULES = ShardingRules(embed=None, replicate_uneven=True)
_PROJECTIONS = frozenset(f"layers/{name}" for name in int8.NAMES)
_MATRICES = _PROJECTIONS | {"embed", "head"}


class Precision(str, enum.Enum):
    TRAINED = "trained"
    BF16 = "bf16"
    INT8 = "int8"


def local_mesh(mesh: Mesh, tensor: int = 1) -> Mesh:
    """This host's devices of the trainer's mesh as a mesh for rollouts, `tensor` of them to
    one copy of the weights. ValueError where such a copy would lie on two hosts."""
    groups = _groups(mesh, tensor)
    hosts = [{device.process_index for device in group} for group in groups]
    if max(map(len, hosts)) > 1:
        raise ValueError(f"tensor={tensor} devices next to each other in the trainer's mesh are "
                         "of two hosts: choose a smaller tensor")
    return _mesh(groups[[host == {jax.process_index()} for host in hosts]])


def make_weights(decoder: Decoder, precision: Precision, mesh: Mesh | None = None,
                 ) -> tuple[Decoder, Weights]:
    """The decoder that rollouts are played with and the weights for it, see `Weights`.

    mesh: this host's, as `local_mesh` makes it: weights are whole on each of its devices, or
    split over its axis `tensor` where it has one. None: they stay where the trainer has them.
    """
    if precision is Precision.INT8:
        decoder = decoder.clone(config=dataclasses.replace(decoder.config, int8_weights=True))
    if mesh is not None:  # the trainer's rows lie on its own mesh
        decoder = decoder.clone(activations=None)
    return decoder, Weights(precision, mesh)


class Weights:
    """Publishes the trainer's weights to the rollouts, step after step.

    One jitted program rounds and moves, each device its part of a weight first, so that what
    travels is already small. Weights that are right as they are pass through it untouched and
    uncopied: they are the trainer's own memory, and are gone once it donates them.
    """

    def __init__(self, precision: Precision, mesh: Mesh | None = None):
        self.precision, self.mesh = precision, mesh
        self._program: Callable[[Flat], Flat] | None = None
        self._frozen: Flat | None = None  # of the frozen weights those that were converted

    def publish(self, params: Params, frozen: Params | None = None) -> tuple[Params, float]:
        """(weights for the rollouts' decoder, seconds it took; 0 where nothing was to do).

        params: what changes from step to step, all of it converted at every call. frozen: of
        a TrainState that has them; they never change, so their conversion of the first call
        is kept. Nothing is donated. ValueError where the mesh is not the trainer's.
        """
        began = time.perf_counter()
        right, stale = self._divide(params)
        right_frozen, stale_frozen = self._divide({} if frozen is None else frozen)
        made: Flat = {}
        if stale_frozen and self._frozen is None:
            self._frozen = made = self._compiled(stale_frozen)(stale_frozen)
        if stale:
            self._program = self._program or self._compiled(stale)
            right |= (new := self._program(stale))
            made = made | new
        jax.block_until_ready(made)
        took = time.perf_counter() - began if made else 0.0
        whole = unflatten_dict(right, sep="/")
        if frozen is not None:
            whole = lora.join(unflatten_dict(right_frozen | (self._frozen or {}), sep="/"), whole)
        return whole, took

    def lower(self, params: Params, frozen: Params | None = None,
              ) -> tuple[Params, dict[str, tuple[Lowered, Flat, Flat]]]:
        """What `publish` would return, on a mesh, and the programs that it would run, lowered,
        each with the weights that it takes and those that it makes; all from shapes with
        shardings, for devices that need not be there."""
        whole, found = {}, {}
        for name, tree in (("publish_frozen", frozen), ("publish", params)):
            right, stale = self._divide({} if tree is None else tree)
            whole |= right
            if stale:
                program = self._jitted(stale)
                made = {key: _shape(x, NamedSharding(self.mesh, x.sharding.spec))
                        for key, x in program.eval_shape(stale).items()}
                found[name] = program.lower(stale), stale, made
                whole |= made
        return unflatten_dict(whole, sep="/"), found

    def _divide(self, params: Params) -> tuple[Flat, Flat]:
        """Those that are right as they are, and the others."""
        flat = flatten_dict(params, sep="/")
        placed = {} if self.mesh is None else _placed(flat, self.mesh)
        stale = {name: x for name, x in flat.items()
                 if _dtype(self.precision, name, x) != x.dtype or name in placed
                 and not x.sharding.is_equivalent_to(placed[name], x.ndim)}
        # Told of the rollouts' mesh, where it was the trainer's; that copies nothing.
        told = lambda x, to: (  # noqa: E731
            _shape(x, to) if isinstance(x, jax.ShapeDtypeStruct) else jax.device_put(x, to))
        right = {name: told(x, placed[name]) if name in placed else x
                 for name, x in flat.items() if name not in stale}
        return right, stale

    def _compiled(self, stale: Flat) -> Callable[[Flat], Flat]:
        program = self._jitted(stale)
        if self.mesh is None:
            return program
        # Each host keeps of every result what lies on its own devices.
        return lambda stale: {name: _here(x, self.mesh) for name, x in program(stale).items()}

    def _jitted(self, stale: Flat):
        convert = partial(_convert, self.precision, {
            name: x.sharding for name, x in stale.items()
            if isinstance(getattr(x, "sharding", None), NamedSharding)})
        if self.mesh is None:
            return jax.jit(convert)
        # The program runs wherever the trainer's weights are, so all hosts take part in it.
        everywhere = _everywhere(next(iter(stale.values())).sharding, self.mesh)
        placed = _placed(jax.eval_shape(convert, stale), self.mesh)
        return jax.jit(convert, out_shardings={
            name: NamedSharding(everywhere, own.spec) for name, own in placed.items()})


def _shape(x, sharding: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _dtype(precision: Precision, name: str, x: jax.Array) -> jnp.dtype:
    if precision is Precision.INT8 and name in _PROJECTIONS:
        return jnp.dtype(jnp.int8)
    rounded = precision is not Precision.TRAINED and name in _MATRICES
    return jnp.dtype(jnp.bfloat16) if rounded and x.dtype == jnp.float32 else x.dtype


def _convert(precision: Precision, trained: dict[str, Sharding], stale: Flat) -> Flat:
    """trained: where the trainer has a weight. The rounded one is pinned there before it goes
    elsewhere, or the wide one would be what travels."""
    made = {}
    for name, x in stale.items():
        dtype = _dtype(precision, name, x)
        if dtype == jnp.int8:
            x, made[name + int8.SCALE] = int8.quantize(name.removeprefix("layers/"), x)
        made[name] = x.astype(dtype)
        if name in trained:
            made[name] = jax.lax.with_sharding_constraint(made[name], trained[name])
    return made


# ---------------------------------------------------------------- meshes


def _groups(mesh: Mesh, tensor: int) -> np.ndarray:
    """The mesh's devices in its order, [copies of the weights, tensor]."""
    if tensor < 1 or mesh.size % tensor:
        raise ValueError(f"tensor={tensor} does not divide the trainer's {mesh.size} devices: "
                         "choose a divisor")
    return mesh.devices.reshape(-1, tensor)


def _mesh(groups: np.ndarray) -> Mesh:
    return Mesh(groups[:, None, None, :], MESH_AXES)


def _everywhere(trained: Sharding, mesh: Mesh) -> Mesh:
    """The trainer's devices as a mesh for rollouts, of which `mesh` is this host's part."""
    tensor = mesh.shape.get(_TENSOR, 1)
    own = mesh.devices
    if _TENSOR in mesh.shape:
        own = np.moveaxis(own, mesh.axis_names.index(_TENSOR), -1)
    everywhere = trained.mesh if isinstance(trained, NamedSharding) else Mesh(
        np.array(sorted(trained.device_set, key=lambda device: device.id)), ("data",))
    groups = _groups(everywhere, tensor)
    here = {tuple(group) for group in groups.tolist()
            if any(device.process_index == jax.process_index() for device in group)}
    if here != {tuple(group) for group in own.reshape(-1, tensor).tolist()}:
        raise ValueError("the mesh of the rollouts is not this host's part of the trainer's: "
                         "make it with local_mesh(the trainer's mesh)")
    return _mesh(groups)


def _placed(flat, mesh: Mesh) -> dict[str, NamedSharding]:
    if _TENSOR not in mesh.shape:
        return {name: replicated(mesh) for name in flat}
    return param_shardings(flat, mesh, _RULES)


def _here(x: jax.Array, mesh: Mesh) -> jax.Array:
    """What this host's devices hold of x, as an array of its own; nothing is copied."""
    return jax.make_array_from_single_device_arrays(
        x.shape, NamedSharding(mesh, x.sharding.spec), [s.data for s in x.addressable_shards])
