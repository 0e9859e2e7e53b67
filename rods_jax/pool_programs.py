"""The task pool's functions as a run calls them: jitted once each, for the life of it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable

import jax

from rods_jax import boundary, task_pool
from rods_jax.run_config import RunConfig


def pool_programs(config: RunConfig) -> types.SimpleNamespace:
    """By the functions' names. Those that change the pool take the old one's memory: else a few
    new rows would have all prompts copied."""
    def jit(function: Callable, *static: str, changes: bool = False, **fixed) -> Callable:
        return jax.jit(functools.partial(function, **fixed), static_argnames=static,
                       donate_argnums=(0,) if changes else ())

    pool, band = config.pool, config.boundary
    return types.SimpleNamespace(
        add=jit(task_pool.add, changes=True, config=pool),
        sample=jit(task_pool.sample, "n_tasks", config=pool),
        update_stats=jit(task_pool.update_stats, changes=True, config=pool, band=band),
        retire=jit(task_pool.retire, changes=True, config=pool, band=band),
        revive=jit(task_pool.revive, changes=True, config=pool),
        prune=jit(task_pool.prune, changes=True, config=pool),
        choose=jit(task_pool.choose, changes=True, config=band, rule=config.seed_rule,
                   rollouts=config.group_size),
        stats=jit(task_pool.stats, config=band),
        unseen=jit(task_pool.unseen), group_stats=jit(boundary.group_stats),
        zones=jit(boundary.zones, config=band), signal=jit(boundary.signal))
