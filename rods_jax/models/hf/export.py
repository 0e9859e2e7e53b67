"""The decoder's parameters as a Hugging Face folder: the way back of load.py.

A folder is written beside its place and renamed into it, so that whoever finds it finds all
of it. Tensors are gathered and cast one at a time on the device; the host holds one shard.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from rods_jax.models.config import ModelConfig
from rods_jax.models.hf.config import Family, read_config, to_json
from rods_jax.models.hf.files import (DTYPES, INDEX, WEIGHTS, Weights, open_weights, write_index,
                                      write_weights)
from rods_jax.models.hf.load import file_sharding, on_devices
from rods_jax.models.hf.match import check_same_model, check_tensors
from rods_jax.models.hf.names import EMBED, HEAD, Slot, places, slots
from rods_jax.models.hf.publish import free_target, published
from rods_jax.models.sharding import replicated

# What goes from the source folder into the export as it is.
CARRIED = ("config.json", "generation_config.json", "tokenizer*.json", "tokenizer.model",
           "vocab.json", "vocab.txt", "merges.txt", "special_tokens_map.json",
           "added_tokens.json", "chat_template.*", "additional_chat_templates/*", "LICENSE*",
           "NOTICE*", "USE_POLICY*")
MAX_SHARD_BYTES = 5 * 10 ** 9


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """One to be written; read: the array itself, in the file's shape and dtype. weight: it
    comes from a parameter."""

    name: str
    nbytes: int
    read: Callable[[], np.ndarray]
    weight: bool = True


def export(folder: str | os.PathLike, params: Mapping[str, Any], model: ModelConfig, *,
           source: str | os.PathLike | None = None, family: Family | None = None,
           dtype: str | None = None, max_shard_bytes: int = MAX_SHARD_BYTES,
           max_length: int | None = None,
           beside: Callable[[pathlib.Path], None] | None = None) -> None:
    """Writes `params` to `folder`, which must be empty or not there yet.

    source: the Hugging Face folder that the weights came from. The export has its tensor
        names, its dtype for each and its other files (`CARRIED`), byte for byte.
    dtype: what all weights are cast to; None: the source's, bfloat16 without one.
    family, max_length: without a source, what config.json says. family None: told from the
        model. max_length: tokens that the model was made for.
    beside: called with the folder before it appears under its name, to add files to it.
    max_shard_bytes: a file holds no more, except where one tensor is larger.
    On several processes all call this; the first one writes.

    ValueError in one line for parameters that are not those of `model` (adapters among them)
    and a source that is another model; OSError where the disk is full or refuses. Then
    nothing is left behind, also when it is interrupted; only a killed process leaves a hidden
    folder, .NAME.*, beside the place.
    """
    target = free_target(folder)
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}: give a positive number")
    if dtype is not None and dtype not in DTYPES.values():
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES.values())}")
    leaves = _leaves(params, model)
    with contextlib.ExitStack() as stack:
        if source is None:
            dtype = dtype or "bfloat16"
            files = _new_config(model, family, dtype, max_length)
            tensors = _new_tensors(leaves, model, dtype)
        else:
            weights = stack.enter_context(open_weights(source))
            files = _carried(pathlib.Path(source), weights, model, family)
            tensors = _tensors_of_source(leaves, model, weights, dtype)
        _multiprocess_barrier("hf_export_begin")
        draft = stack.enter_context(published(target)) if jax.process_index() == 0 else None
        _write_shards(draft, _shards(tensors, max_shard_bytes))
        if draft is not None:
            for name, content in files.items():
                _write_file(draft / name, content)
            if beside is not None:
                beside(draft)
    _multiprocess_barrier("hf_export_end")


def _leaves(params: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Parameters by path, which are exactly those of `model`."""
    leaves = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf
              for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    adapters = [name for name in leaves if "_lora_" in name]
    if adapters:
        raise ValueError(f"the parameters hold adapters ({adapters[0]}): merge them first "
                         "(models/lora.py merged)")
    shapes = {slot.parameter: (model.n_layers,) * slot.stacked + slot.parameter_shape
              for slot in slots(model)}
    for name in sorted(shapes.keys() ^ leaves.keys()):
        raise ValueError(f"the parameters lack {name}: export all of them" if name in shapes else
                         f"parameter {name} is not one of the model's: export with its own config")
    for name, shape in shapes.items():
        if tuple(leaves[name].shape) != shape:
            raise ValueError(f"parameter {name} has the shape {tuple(leaves[name].shape)}, the "
                             f"model's is {shape}: export with its own config")
    return leaves


def _new_config(model: ModelConfig, family: Family | None, dtype: str,
                max_length: int | None) -> dict[str, bytes]:
    if family is None:  # what tells the three apart
        family = (Family.QWEN3 if model.qk_norm else
                  Family.QWEN2 if model.qkv_bias else Family.LLAMA)
    # The older spelling of the key, which newer readers know as well.
    config = {**to_json(model, Family(family), max_length), "torch_dtype": dtype}
    return {"config.json": (json.dumps(config, indent=2) + "\n").encode()}


def _new_tensors(leaves, model: ModelConfig, dtype: str) -> list[_Tensor]:
    return [_from_leaf(name, leaves, slot, layer, dtype)
            for name, (slot, layer) in places(model).items()]


def _carried(source: pathlib.Path, weights: Weights, model: ModelConfig,
             family: Family | None) -> dict[str, bytes | pathlib.Path]:
    """The files to copy, or their content, by their name in the export."""
    config = read_config(source)
    if family is not None and config.family is not family:
        raise ValueError(f"{source} is of the family {config.family.value}, not "
                         f"{Family(family).value}: leave the family out")
    check_same_model(model, config.model, str(source))
    check_tensors(weights, config.model)
    found = (path for pattern in CARRIED for path in source.glob(pattern) if path.is_file())
    files = {str(path.relative_to(source)): path for path in sorted(found)}
    # As it was when it was checked, whatever becomes of the file until the weights are written.
    content = (source / "config.json").read_bytes()
    if json.loads(content) != config.raw:
        raise ValueError(f"{source / 'config.json'} changed while it was read: try again")
    return files | {"config.json": content}


def _tensors_of_source(leaves, model: ModelConfig, weights: Weights,
                       dtype: str | None) -> list[_Tensor]:
    placed = places(model)
    tensors = []
    for name in [*placed, *sorted(weights.tensors.keys() - placed.keys())]:
        stored = weights.tensors[name]
        if name == HEAD and model.tie_embeddings:  # a copy of the embedding, as in the source
            slot, layer = placed[EMBED]
        elif name in placed:
            slot, layer = placed[name]
        else:  # a table that no parameter is made from
            nbytes = weights.read(name).nbytes
            tensors.append(_Tensor(name, nbytes, functools.partial(weights.read, name), False))
            continue
        tensors.append(_from_leaf(name, leaves, slot, layer, dtype or DTYPES[stored.dtype]))
    return tensors


def _from_leaf(name: str, leaves, slot: Slot, layer: int, dtype: str) -> _Tensor:
    nbytes = int(np.prod(slot.shape)) * jnp.dtype(dtype).itemsize
    return _Tensor(name, nbytes, functools.partial(
        _gather, leaves[slot.parameter], slot, layer, dtype))


def _gather(leaf, slot: Slot, layer: int, dtype: str) -> np.ndarray:
    """One tensor of a parameter on the host. Devices only turn and cast their own parts,
    unless some of them belong to other processes."""
    if not isinstance(leaf, jax.Array):
        piece = np.asarray(leaf[layer] if slot.stacked else leaf).astype(jnp.dtype(dtype))
        return np.ascontiguousarray(piece.transpose(slot.inverse).reshape(slot.shape))
    sharding = leaf.sharding if isinstance(leaf.sharding, NamedSharding) else None
    mesh = sharding and sharding.mesh
    out = file_sharding(slot, sharding) if leaf.is_fully_addressable else replicated(mesh)
    take = _taker(slot.inverse, slot.stacked, dtype, out)
    piece = jax.device_get(take(leaf, on_devices(layer, mesh)))
    return np.ascontiguousarray(piece).reshape(slot.shape)


@functools.lru_cache(maxsize=64)
def _taker(inverse: tuple[int, ...], stacked: bool, dtype: str, out: NamedSharding | None):
    """take(leaf, layer): one tensor in the axes of `Slot.split`."""
    def take(leaf, layer):
        piece = jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False) if stacked else leaf
        return piece.transpose(inverse).astype(dtype)
    return jax.jit(take, out_shardings=out)


def _shards(tensors: list[_Tensor], max_bytes: int) -> list[list[_Tensor]]:
    shards: list[list[_Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _write_shards(draft: pathlib.Path | None, shards: list[list[_Tensor]]) -> None:
    """draft: None in a process that only takes part in the gathering."""
    home = {}
    for number, shard in enumerate(shards, 1):
        file = (WEIGHTS if len(shards) == 1
                else f"model-{number:05d}-of-{len(shards):05d}.safetensors")
        home |= {tensor.name: file for tensor in shard}
        arrays = {}
        for tensor in shard:
            array = tensor.read()
            if draft is None:
                continue
            if tensor.weight:
                check_finite(tensor.name, array)
            arrays[tensor.name] = array
        if draft is not None:
            write_weights(draft / file, arrays)
        del arrays, array
    if draft is not None and len(shards) > 1:
        total = sum(tensor.nbytes for shard in shards for tensor in shard)
        write_index(draft / INDEX, home, total)


def check_finite(name: str, array: np.ndarray) -> None:
    """ValueError for a weight that no program could use."""
    if not np.isfinite(array).all():
        raise ValueError(f"tensor {name} holds values that are not finite in {array.dtype}: "
                         + ("name bfloat16 or float32 as dtype" if array.dtype == np.float16
                            else "the training that made it diverged"))


def _write_file(path: pathlib.Path, content: bytes | pathlib.Path) -> None:
    path.parent.mkdir(exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        shutil.copyfile(content, path)


def _multiprocess_barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
