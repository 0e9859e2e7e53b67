"""The trainer's half of a run on its devices: the state, where it lies, and the jitted update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rods_jax.grpo.batch import BatchShape, pack
from rods_jax.grpo.optimizer import make_optimizer
from rods_jax.grpo.sharded import pack_everywhere, shard_update
from rods_jax.grpo.tally import UpdateMetrics
from rods_jax.grpo.update import TrainState, init_state, make_update
from rods_jax.models import lora
from rods_jax.models.decoder import Decoder
from rods_jax.models.sharding import (
    MeshConfig, ShardingRules, batch_sharding, make_mesh, param_shardings)
from rods_jax.run_config import RunConfig
from rods_jax.types import Trajectory

# A vocabulary or heads that do not divide over the tensor axis are whole on each device.
RULES = ShardingRules(replicate_uneven=True)


def trainer_mesh(config: MeshConfig, devices: Sequence | None = None) -> Mesh | None:
    """The mesh a config asks for; None for one device, which needs none."""
    if config.size == 1 and devices is None:
        return None
    return make_mesh(config.data, config.fsdp, config.tensor, devices, config.context)


def on_mesh(decoder: Decoder, mesh: Mesh | None) -> Decoder:
    """The decoder that trains: rows lie over the mesh."""
    rows = mesh and batch_sharding(mesh, over=RULES.rows)
    return decoder.clone(activations=rows)


def trained(decoder: Decoder, params: Any) -> tuple[Any, Any]:
    """(frozen, trained) parts of the tree of weights: with LoRA the adapters are trained,
    else all, and frozen is None."""
    return lora.split(params) if decoder.config.lora else (None, params)


def first_state(config: RunConfig, decoder: Decoder, params: Any) -> TrainState:
    """The state before the first update. It takes the weights' memory along."""
    frozen, own = trained(decoder, params)
    return init_state(own, make_optimizer(config.optimizer), config.update.loss.kl_coef > 0,
                      frozen)


def compiled_update(config: RunConfig, decoder: Decoder, shape: BatchShape, mesh: Mesh | None,
                    state: TrainState) -> Callable:
    """The jitted update, which takes the old state's memory. decoder: see on_mesh. state: or
    its shapes."""
    update = make_update(decoder, config.update, make_optimizer(config.optimizer), shape)
    if mesh is None:
        return jax.jit(update, donate_argnums=0)
    return shard_update(update, mesh, state, shape, RULES)


def _made(config: RunConfig, decoder: Decoder, params: Any, mesh: Mesh | None) -> TrainState:
    """The first state. On a mesh each device makes its own part: no device could hold all."""
    if mesh is None:
        return first_state(config, decoder, jax.tree.map(jnp.asarray, params))
    params = jax.device_put(params, param_shardings(params, mesh, RULES))
    make = partial(first_state, config, decoder)
    places = param_shardings(jax.eval_shape(make, params), mesh, RULES)
    return jax.jit(make, out_shardings=places, donate_argnums=0)(params)


class Learner:
    """Holds the state between updates; `state` may be replaced by one of the same shapes, which
    is laid where it belongs. decoder: without a mesh. params: taken over, not copied."""

    def __init__(self, config: RunConfig, decoder: Decoder, params: Any, shape: BatchShape):
        self.mesh = trainer_mesh(config.mesh)
        self._config, self._shape = config, shape
        decoder = on_mesh(decoder, self.mesh)
        self._state = _made(config, decoder, params, self.mesh)
        self.update = compiled_update(config, decoder, shape, self.mesh, self._state)

    @property
    def state(self) -> TrainState:
        return self._state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._state = self._placed(state)

    def _placed(self, state: TrainState) -> TrainState:
        return state if self.mesh is None else jax.device_put(
            state, param_shardings(state, self.mesh, RULES))

    def step(self, groups: Sequence[Sequence[Trajectory | None]], rewards_TxG: np.ndarray,
             ) -> list[UpdateMetrics]:
        """As many updates as the config makes minibatches of a step; their metrics, on the
        host. groups, rewards: of all of the step's tasks, see batch.pack."""
        size, found = self._shape.tasks, []
        options = self._config.update
        for start in range(0, self._config.tasks_per_step, size):
            some = groups[start:start + size], rewards_TxG[start:start + size]
            how = not options.dead_carry_loss, options.advantage.var_floor
            batch = pack(*some, self._shape, *how) if self.mesh is None else pack_everywhere(
                *some, self._shape, self.mesh, *how)
            self._state, metrics = self.update(self._state, batch)
            found.append(metrics)
        return jax.device_get(found)
