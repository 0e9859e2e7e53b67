"""What a run takes of a device's memory, by the compiler's account of its real programs.

All programs of a step are compiled for the topology from shapes, and nothing is run. Beside
what a program takes itself counts what else lies on the device meanwhile:

    state      parameters, optimizer, frozen weights, the reference policy: always
    pages      the rollouts' K/V at its full size: always
    pool       the task pool: always
    published  the weights that rollouts are played with, where they are not the trainer's own
               memory: during rollouts; those of frozen weights always
    code       of all the programs

A run fits where every program leaves SPARE of the device's memory free.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh
from jax.stages import Lowered

from rods_jax import task_pool
from rods_jax.config import UserError
from rods_jax.grpo.batch import pack
from rods_jax.grpo.update import TrainState
from rods_jax.learner import RULES, compiled_update, first_state, on_mesh, trained, trainer_mesh
from rods_jax.models import lora
from rods_jax.models.attention import choose
from rods_jax.models.decoder import Decoder, init_params, unrolled, unstacked
from rods_jax.models.flops import UpdateFlops, shared_work, update_flops
from rods_jax.models.sharding import param_shardings
from rods_jax.policy import model_of
from rods_jax.rollout.engine import rolled_out
from rods_jax.rollout.slots import Slots
from rods_jax.rollout.weights import local_mesh, make_weights
from rods_jax.run_config import RunConfig, batch_shape
from rods_jax.topology import Topology, exhausted

# The compiler's account leaves out memory in pieces, transfers under way and what the runtime
# makes for itself.
SPARE = 0.1


@dataclasses.dataclass(frozen=True)
class Program:
    """One to be compiled. beside: bytes on each device that are none of its arguments."""

    name: str
    lowered: Lowered
    beside: int


@dataclasses.dataclass(frozen=True)
class Account:
    """Bytes of a program on each device. outputs: those that take the place of no argument.
    beside: what lies there without being its own, code of other programs left out. refused:
    the compiler's words where it did not make the program, which has no figures then but
    `asked`, all that it would take."""

    arguments: int = 0
    temporaries: int = 0
    outputs: int = 0
    code: int = 0
    beside: int = 0
    asked: int = 0
    refused: str = ""
    compile_s: float = 0.0

    @property
    def peak(self) -> int:
        return self.beside + (self.asked or self.arguments + self.temporaries + self.outputs)


@dataclasses.dataclass(frozen=True)
class Plan:
    """accounts: by the program's name. peak_bytes: of the worst program, with the code of all."""

    topology: Topology
    accounts: dict[str, Account]
    flops: UpdateFlops

    @property
    def code(self) -> int:
        return sum(account.code for account in self.accounts.values())

    @property
    def peak_bytes(self) -> int:
        return max(account.peak for account in self.accounts.values()) + self.code

    @property
    def free_fraction(self) -> float:
        return 1 - self.peak_bytes / self.topology.memory_bytes

    @property
    def fits(self) -> bool:
        return self.free_fraction >= SPARE and not any(
            account.refused for account in self.accounts.values())


def make_plan(config: RunConfig, topology: Topology,
              report: Callable[[str, Account], None] = lambda name, account: None) -> Plan:
    """Compiles all there is. report: told of each program once it is compiled. UserError where
    the config does not suit the topology."""
    decoder, dtype = trainers(config, topology)
    accounts = {}
    for program in programs(config, decoder, dtype):
        account = accounts[program.name] = compiled(program)
        report(program.name, account)
    return Plan(topology, accounts, flops(config, decoder))


def trainers(config: RunConfig, topology: Topology) -> tuple[Decoder, str]:
    """The decoder that is trained, its activations on the mesh, and the dtype of its weights
    where they are frozen."""
    config.check_training()
    mesh = _mesh(config, topology)
    model, dtype = model_of(config)
    return on_mesh(Decoder(model), mesh), dtype


def flops(config: RunConfig, decoder: Decoder) -> UpdateFlops:
    """Of the updates of one step where all rollouts are as long as they may be. Attention is
    counted as that of the rows; prompts that are split over devices take XLA's."""
    shape, sampler = batch_shape(config), config.sampler
    own = sampler.max_len - sampler.prompt_len
    if sampler.max_own is not None:
        own = min(own, sampler.max_own)
    groups, each = config.tasks_per_step, config.group_size
    if not shape.prompts:  # each rollout is a group of its own
        groups, each = groups * each, 1
    work = shared_work(groups, each, sampler.prompt_len, own)
    kind = choose(decoder.config, shape.length - 1, decoder.activations, shape.prompt, shape.alone)
    return update_flops(decoder.config, work, kind, config.update.loss.kl_coef > 0)


def compiled(program: Program) -> Account:
    """The account of a program, compiled, or of why it was not for want of memory."""
    began = time.perf_counter()
    try:
        memory = program.lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        asked, _ = exhausted(error) or (0, 0)
        return Account(asked=asked, beside=program.beside, compile_s=time.perf_counter() - began,
                       refused=str(error).splitlines()[0])
    return Account(
        arguments=memory.argument_size_in_bytes, temporaries=memory.temp_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        code=memory.generated_code_size_in_bytes, beside=program.beside,
        compile_s=time.perf_counter() - began)


# ---------------------------------------------------------------- programs of a step


def programs(config: RunConfig, decoder: Decoder, dtype: str) -> Iterator[Program]:
    """Those of a run that are large, in the order of a step; arguments: see `trainers`."""
    mesh = decoder.activations.mesh
    state = state_shapes(config, decoder, dtype, mesh)
    played, weights = make_weights(decoder, config.rollout_weights,
                                   local_mesh(mesh, config.rollout_tensor))
    params, publishing = weights.lower(state.params, state.frozen)
    played = rolled_out(played, config.sampler)
    slots = Slots(played, config.sampler, [0], weights.mesh, shapes_only=True)
    pool = jax.eval_shape(lambda: task_pool.init(config.pool, config.sampler.prompt_len))
    kept = publishing["publish_frozen"][2] if "publish_frozen" in publishing else {}
    always = sum(map(on_device, (state, slots.programs.cache, pool)))
    for name, (lowered, stale, _) in publishing.items():
        before = on_device(kept) if name != "publish_frozen" else 0
        yield Program(name, lowered, always + before - on_device(stale))
    resident = always + sum(on_device(made) for *_, made in publishing.values())
    if unrolled(played.config):  # each run of the engine takes the weights apart
        apart = jax.jit(lambda layers: unstacked(played.config, {"layers": layers})["layers"]
                        ).lower(params["layers"])
        yield Program("unstack", apart, resident - on_device(params["layers"]))
        params = params | {"layers": _placed_as_compiled(apart)}
        resident += on_device(params["layers"])
    for name, (lowered, cache) in slots.lower(params, jax.random.key(0)).items():
        yield Program(name, lowered, resident - on_device((params, cache)))
    yield Program("update", _update(config, decoder, mesh, state),
                  always + on_device(kept) - on_device(state))


def state_shapes(config: RunConfig, decoder: Decoder, dtype: str, mesh: Mesh) -> TrainState:
    """The trainer's state in shapes, placed on the mesh."""
    params = jax.eval_shape(lambda: init_params(decoder.config, jax.random.key(0)))
    frozen, own = trained(decoder, params)
    if frozen is not None:
        frozen = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), frozen)
        params = lora.join(frozen, own)
    state = jax.eval_shape(lambda params: first_state(config, decoder, params), params)
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
                        state, param_shardings(state, mesh, RULES))


def on_device(tree) -> int:
    """Bytes of one device's part of these shapes; of what has no place, all."""
    def one(x) -> int:
        at = getattr(x, "sharding", None)
        shape = x.shape if at is None else at.shard_shape(x.shape)
        return math.prod(shape) * x.dtype.itemsize
    return sum(map(one, jax.tree.leaves(tree)))


def _update(config: RunConfig, decoder: Decoder, mesh: Mesh, state: TrainState) -> Lowered:
    shape = batch_shape(config)
    batch = jax.eval_shape(lambda: pack([], np.zeros((shape.tasks, shape.group)), shape,
                                        drop_dead=not config.update.dead_carry_loss))
    return compiled_update(config, decoder, shape, mesh, state).lower(state, batch)


def _placed_as_compiled(lowered: Lowered):
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
                        lowered.out_info, lowered.compile().output_shardings)


def _mesh(config: RunConfig, topology: Topology) -> Mesh:
    sizes = config.mesh
    if sizes.size != len(topology.devices):
        raise UserError(
            f"topology {topology.name} has {len(topology.devices)} devices, the mesh data="
            f"{sizes.data} fsdp={sizes.fsdp} context={sizes.context} tensor={sizes.tensor} needs "
            f"{sizes.size}: set mesh to sizes whose product is {len(topology.devices)}")
    return trainer_mesh(sizes, topology.devices)
