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
    """A NamedSharding for every leaf of a PackedBatch. Raises ValueError where the rows of a
    micro-batch do not divide evenly."""
    axes = (rules.batch,) if isinstance(rules.batch, str) else rules.batch or ()
    parts = math.prod(mesh.shape[axis] for axis in axes)
    if shape.rows % parts:
        raise ValueError(f"{shape.rows} rows a micro-batch do not divide over {parts} devices of "
                         f"mesh axes {', '.join(axes)}: make rows a multiple of {parts}")
    rows, whole = batch_sharding(mesh, 1, rules), replicated(mesh)
    return PackedBatch(
        tokens_MxRxL=rows, positions_MxRxL=rows, segments_MxRxL=rows, traj_MxRxL=rows,
        sampled_MxRxL=rows, logprobs_MxRxL=rows, rewards_TxG=whole, valid_TxG=whole,
        truncated_TxG=whole, n_micro=whole)


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
