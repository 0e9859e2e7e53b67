"""The update over a device mesh: parameters as `models/sharding.py` lays them, prompts and the
rows that share them over the data axes, statistics of groups everywhere.

The micro-batch axis is a loop and is never split; the compiler derives the rest. Each process
packs the rollouts it played itself, and only counts and rewards travel between hosts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from rods_jax.grpo.batch import BatchShape, PackedBatch, pack
from rods_jax.grpo.update import TrainState
from rods_jax.models.sharding import ShardingRules, batch_sharding, param_shardings, replicated
from rods_jax.types import Trajectory


def batch_shardings(mesh: Mesh, shape: BatchShape,
                    rules: ShardingRules = ShardingRules()) -> PackedBatch:
    """A NamedSharding for every leaf of a PackedBatch. Raises ValueError where rows or prompts
    do not divide evenly, or a row could need another part's prompt."""
    for name, axes in (("rows", rules.rows), ("prompts", rules.batch)):
        axes = (axes,) if isinstance(axes, str) else axes or ()
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if getattr(shape, name) % parts:
            raise ValueError(f"{getattr(shape, name)} {name} a micro-batch do not divide over "
                             f"{parts} devices of mesh axes {', '.join(axes)}: make {name} a "
                             f"multiple of {parts}")
        if shape.prompts and name == "prompts" and shape.parts != parts:
            raise ValueError(f"the batch is in {shape.parts} parts, the mesh splits prompts in "
                             f"{parts}: set parts to {parts}")
    rows, prompts = (batch_sharding(mesh, 1, over) for over in (rules.rows, rules.batch))
    whole = replicated(mesh)
    return PackedBatch(
        tokens_MxRxL=rows, positions_MxRxL=rows, segments_MxRxL=rows, traj_MxRxL=rows,
        author_MxRxL=rows, logprobs_MxRxL=rows, rewards_TxG=whole, valid_TxG=whole,
        truncated_TxG=whole, n_micro=whole, bucket_M=whole, prompts_UxKxP=prompts,
        prompt_length_UxK=prompts, prompt_MxR=rows, end_U=whole, n_sets=whole)


def own_part(shape: BatchShape, processes: int) -> BatchShape:
    """The shape of what one of so many processes packs. ValueError where it is no whole part."""
    if processes == 1:
        return shape
    for name in ("tasks", "rows", "parts", *(("prompts",) if shape.prompts else ())):
        if getattr(shape, name) % processes:
            raise ValueError(f"a batch of {getattr(shape, name)} {name} does not divide over "
                             f"{processes} processes: make {name} a multiple of {processes}")
    return dataclasses.replace(
        shape, tasks=shape.tasks // processes, rows=shape.rows // processes,
        parts=shape.parts // processes, prompts=shape.prompts // processes)


def pack_everywhere(groups: Sequence[Sequence[Trajectory | None]], rewards_TxG: np.ndarray,
                    shape: BatchShape, mesh: Mesh, drop_dead: bool, var_floor: float = 1e-8,
                    ) -> PackedBatch:
    """The batch of all processes, laid over the mesh, from what each has itself.

    groups, rewards_TxG: of this process, T / processes tasks; its tasks follow those of the
    processes before it. shape: of the whole batch. Every process must call it. See `pack`.
    """
    n, me = jax.process_count(), jax.process_index()
    shardings = batch_shardings(mesh, shape)
    own = own_part(shape, n)
    largest = lambda x: np.asarray(_from_all(x)).max(0).astype(x.dtype)  # noqa: E731
    batch = pack(groups, rewards_TxG, own, drop_dead, var_floor, agree=largest)
    together = {name: np.concatenate(_from_all(getattr(batch, name)))
                for name in ("rewards_TxG", "valid_TxG", "truncated_TxG")}
    first = me * own.tasks * own.group
    batch = batch.replace(**together, traj_MxRxL=np.where(
        batch.segments_MxRxL > 0, batch.traj_MxRxL + first, 0).astype(np.int32))
    return jax.tree.map(lambda x, at: jax.make_array_from_process_local_data(at, np.asarray(x)),
                        batch, shardings)


def _from_all(x: np.ndarray) -> np.ndarray:
    """[processes, ...]: each process's x."""
    if jax.process_count() == 1:
        return np.asarray(x)[None]
    return np.asarray(multihost_utils.process_allgather(x, tiled=False))


def shard_update(update: Callable, mesh: Mesh, state: TrainState, shape: BatchShape,
                 rules: ShardingRules = ShardingRules(), donate: bool = True) -> Callable:
    """jax.jit of an update, or of a supervised step, with explicit shardings.

    state: the state or its shapes (`jax.eval_shape`); only its structure is used. Moments,
    the reference policy and frozen weights lie as the parameters do, counters and metrics are
    replicated.
    Place the first state with `jax.device_put(state, param_shardings(state, mesh, rules))`.
    donate: the old state's buffers are reused.
    """
    placed = param_shardings(state, mesh, rules)
    return jax.jit(update, in_shardings=(placed, batch_shardings(mesh, shape, rules)),
                   out_shardings=(placed, replicated(mesh)),
                   donate_argnums=(0,) if donate else ())
