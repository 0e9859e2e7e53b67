"""Where parameters and batches live on a mesh with axes data, fsdp, context and tensor.

One dataclass maps the decoder's logical axes to mesh axes. Everything else follows from the
names of the parameters: FSDP splits the model width and gathers a layer's weights when it is
used; tensor parallelism splits heads, the MLP's inner width and the vocabulary. Devices along
`context` share the tokens of one sequence; weights are split over them as over fsdp.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rods_jax.models import int8, lora
from rods_jax.models.config import PROJECTIONS

MESH_AXES = ("data", "fsdp", "context", "tensor")
CONTEXT = "context"

MeshAxes = str | tuple[str, ...] | None  # None: replicated


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis of the trainer's mesh; their product is how many there are."""

    data: int = 1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self):
        for axis in MESH_AXES:
            if getattr(self, axis) < 1:
                raise ValueError(f"mesh {axis} is {getattr(self, axis)}: give 1 or more devices")

    @property
    def size(self) -> int:
        return math.prod(getattr(self, axis) for axis in MESH_AXES)

    @property
    def parts(self) -> int:
        """How many parts a batch is split in, prompts with the rows that share them."""
        return self.data * self.fsdp


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """Logical axis -> mesh axis. `replicate_uneven` lets an axis whose size its mesh axes do
    not divide (2 K/V heads over tensor=4) be replicated; otherwise that is an error."""

    batch: MeshAxes = ("data", "fsdp")
    rows: MeshAxes = ("data", "fsdp", "context")  # what follows a prompt that rows share
    layers: MeshAxes = None
    vocab: MeshAxes = "tensor"
    embed: MeshAxes = ("fsdp", "context")  # the model width, in weights
    norm: MeshAxes = None  # the model width, in norm scales
    heads: MeshAxes = "tensor"
    kv_heads: MeshAxes = "tensor"
    head_dim: MeshAxes = None
    mlp: MeshAxes = "tensor"
    lora: MeshAxes = None  # the rank of adapters
    replicate_uneven: bool = False


_LAYER_AXES = {
    "attn_norm": ("norm",),
    "mlp_norm": ("norm",),
    "q": ("embed", "heads", "head_dim"),
    "k": ("embed", "kv_heads", "head_dim"),
    "v": ("embed", "kv_heads", "head_dim"),
    "o": ("heads", "head_dim", "embed"),
    "q_bias": ("heads", "head_dim"),
    "k_bias": ("kv_heads", "head_dim"),
    "v_bias": ("kv_heads", "head_dim"),
    "q_norm": ("head_dim",),
    "k_norm": ("head_dim",),
    "gate": ("embed", "mlp"),
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
}

# An adapter's A takes what its weight takes, its B gives what its weight gives.
_ADAPTER_AXES = {
    name + end: axes
    for name, n_in in ((name, lora.input_axes(name)) for name in PROJECTIONS.values())
    for end, axes in ((lora.A, (*_LAYER_AXES[name][:n_in], "lora")),
                      (lora.B, ("lora", *_LAYER_AXES[name][n_in:])))}

# The scales of int8 weights lie as what the weight gives.
_SCALE_AXES = {name + int8.SCALE: _LAYER_AXES[name][lora.input_axes(name):]
               for name in int8.NAMES}

LOGICAL_AXES: dict[str, tuple[str, ...]] = {
    "embed": ("vocab", "embed"),
    "final_norm": ("norm",),
    "head": ("embed", "vocab"),
    **{f"layers/{name}": ("layers", *axes)
       for name, axes in (_LAYER_AXES | _ADAPTER_AXES | _SCALE_AXES).items()},
}


def make_mesh(data: int, fsdp: int, tensor: int, devices: Sequence | None = None,
              context: int = 1) -> Mesh:
    """A mesh over all of `devices` (default: every device). ValueError if the sizes do not
    multiply to their number."""
    devices = jax.devices() if devices is None else list(devices)
    sizes = (data, fsdp, context, tensor)
    if min(sizes) < 1 or math.prod(sizes) != len(devices):
        raise ValueError(f"mesh data={data} fsdp={fsdp} context={context} tensor={tensor} needs "
                         f"{math.prod(sizes)} devices, there are {len(devices)}: "
                         "choose sizes whose product is that number")
    return jax.make_mesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * len(sizes),
                         devices=devices)


def param_shardings(params, mesh: Mesh, rules: ShardingRules = ShardingRules()):
    """A pytree of NamedSharding shaped like `params` (arrays or ShapeDtypeStructs).

    Leaves are recognised by the end of their path, so a tree that holds copies of the
    parameter tree (an optimizer state) works as well; leaves without axes (step counters)
    are replicated. ValueError names the first leaf that is unknown or does not divide.
    """
    def one(path, leaf):
        name = _name(path)
        shape = tuple(np.shape(leaf) if not hasattr(leaf, "shape") else leaf.shape)
        if not shape:
            return NamedSharding(mesh, PartitionSpec())
        axes = LOGICAL_AXES.get(name)
        if axes is None or len(axes) != len(shape):
            raise ValueError(f"parameter {jax.tree_util.keystr(path)} of shape {shape} is not "
                             "one of the decoder's: give it axes in models/sharding.py")
        return NamedSharding(mesh, _spec(name, axes, shape, mesh, rules))
    return jax.tree_util.tree_map_with_path(one, params)


def batch_sharding(mesh: Mesh, axis: int = 0,
                   over: MeshAxes = ShardingRules().batch) -> NamedSharding:
    """Arrays whose axis number `axis` counts sequences or rows, split over these mesh axes."""
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, over))


def prompt_sharding(rows: NamedSharding) -> NamedSharding:
    """Where hidden states [K, P, D] of prompts live, given that of the rows [R, L, D] that share
    them: devices along `context` have a prompt's rows divided between them, and its tokens."""
    axes = rows.spec[0] if isinstance(rows.spec[0], tuple) else (rows.spec[0],)
    if CONTEXT not in axes:
        return rows
    return NamedSharding(rows.mesh, PartitionSpec(
        tuple(axis for axis in axes if axis != CONTEXT), CONTEXT))


def width_axes(mesh: Mesh, d_model: int, rules: ShardingRules = ShardingRules()) -> tuple[str, ...]:
    """Mesh axes that split the model width in weights; none where it does not divide."""
    axes = (rules.embed,) if isinstance(rules.embed, str) else rules.embed or ()
    axes = tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1)
    return axes if d_model % math.prod(mesh.shape[axis] for axis in axes) == 0 else ()


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def _name(path) -> str:
    keys = [str(entry.key) for entry in path if isinstance(entry, jax.tree_util.DictKey)]
    return "/".join(keys[-2:] if keys[-2:-1] == ["layers"] else keys[-1:])


def _spec(name, axes, shape, mesh: Mesh, rules: ShardingRules) -> PartitionSpec:
    entries = []
    for axis, size in zip(axes, shape):
        target = getattr(rules, axis)
        used = (target,) if isinstance(target, str) else tuple(target or ())
        unknown = [a for a in used if a not in mesh.shape]
        if unknown:
            raise ValueError(f"rule {axis} names mesh axis {unknown[0]!r}, the mesh has "
                             + ", ".join(mesh.shape))
        parts = math.prod(mesh.shape[a] for a in used)
        if size % parts:
            if not rules.replicate_uneven:
                raise ValueError(f"{name}: axis {axis} of size {size} does not divide over "
                                 f"{'x'.join(used)}={parts}: choose another mesh or set "
                                 "replicate_uneven")
            target = None
        entries.append(target)
    flat = [a for t in entries for a in ((t,) if isinstance(t, str) else t or ())]
    if len(flat) != len(set(flat)):
        raise ValueError(f"{name}: two of its axes {axes} map to the same mesh axis: "
                         "change one of the rules")
    return PartitionSpec(*entries)
