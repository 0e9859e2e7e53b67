"""The update over a device mesh: parameters as `models/sharding.py` lays them, packed rows
over the data axes, statistics of groups everywhere.

The micro-batch axis is a loop and is never split; the compiler derives the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from rods_jax.grpo.batch import BatchShape, PackedBatch
from rods_jax.grpo.update import TrainState
from rods_jax.models.sharding import ShardingRules, batch_sharding, param_shardings, replicated


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
