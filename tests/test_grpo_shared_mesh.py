"""Shared prompts on eight devices, and on two processes: the steps of one device. Each in
processes of their own, for the number of devices is fixed when jax starts."""

import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eight_devices import run_on_eight_devices
from grpo_cases import shared_groups, tiny_decoder
from rods_jax.grpo.advantage import AdvantageConfig
from rods_jax.grpo.batch import BatchShape, pack
from rods_jax.grpo.loss import LossConfig
from rods_jax.grpo.sharded import own_part, pack_everywhere, shard_update
from rods_jax.grpo.optimizer import OptimizerConfig, OptimizerKind, make_optimizer
from rods_jax.grpo.update import UpdateConfig, init_state, make_update
from rods_jax.learner import on_mesh
from rods_jax.models.sharding import make_mesh, param_shardings

CONFIG = UpdateConfig(loss=LossConfig(kl_coef=0.1), logit_chunk=4,
                      advantage=AdvantageConfig(dead_keep_kl=True))
OPTIMIZER = make_optimizer(OptimizerConfig(kind=OptimizerKind.SGD, lr=0.5))
# Two sets of prompts where the mesh has no more than four parts; rows of two lengths.
SHAPE = BatchShape(micro=12, rows=8, length=17, tasks=8, group=4, prompts=4, prompt=8, alone=True,
                   lengths=(9,))
MESHES = {  # data, fsdp, context, tensor
    "data": (8, 1, 1, 1), "fsdp": (1, 8, 1, 1), "fsdp_tensor": (1, 4, 1, 2),
    "context": (1, 1, 8, 1), "fsdp_context": (2, 2, 2, 1), "context_tensor": (1, 2, 2, 2)}


def start():
    decoder, params = tiny_decoder(vocab_size=16, n_kv_heads=2)  # even, to be split
    # A copy, for placing may keep buffers that the update then takes.
    state = init_state(jax.tree.map(jnp.copy, params), OPTIMIZER, keep_reference=True)
    return decoder, state.replace(ref_params=jax.tree.map(lambda x: x * 0.9, params))


def work(step):
    """Eight tasks with rewards, of prompts of different lengths."""
    groups, rewards = shared_groups(step, (4, 1, 7, 3, 9, 5, 6, 2))
    return groups, np.nan_to_num(rewards)


def steps_of_one_device(n):
    """The parameters and metrics after n steps."""
    decoder, state = start()
    shape = dataclasses.replace(SHAPE, prompts=1, rows=2, micro=16, alone=False, lengths=())
    update = jax.jit(make_update(decoder, CONFIG, OPTIMIZER, shape))
    for step in range(n):
        state, metrics = update(state, pack(*work(step), shape, drop_dead=False))
    return state.params, metrics


def steps_on(mesh, n):
    """The same on a mesh, of which this process is a part."""
    decoder, state = start()
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    shape = dataclasses.replace(SHAPE, parts=parts, prompts=max(SHAPE.prompts, parts))
    state = jax.device_put(state, param_shardings(state, mesh))
    update = shard_update(make_update(on_mesh(decoder, mesh), CONFIG, OPTIMIZER, shape), mesh,
                          state, shape)
    own = own_part(shape, jax.process_count()).tasks
    mine = slice(jax.process_index() * own, (jax.process_index() + 1) * own)
    for step in range(n):
        groups, rewards = work(step)
        batch = pack_everywhere(groups[mine], rewards[mine], shape, mesh, drop_dead=False)
        state, metrics = update(state, batch)
    assert update._cache_size() == 1
    return state.params, metrics


def gap(a, b):
    """Largest difference, of large sums relative to them."""
    return max(float(np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)).max())
               / max(1.0, float(np.abs(np.asarray(x, np.float64)).max()))
               for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def compare_on_eight_devices():
    want = steps_of_one_device(2)
    moved = gap(start()[1].params, want[0])
    found = {name: gap(want, steps_on(make_mesh(data, fsdp, tensor, context=context), 2))
             for name, (data, fsdp, context, tensor) in MESHES.items()}
    print(json.dumps({"moved": moved, "gaps": found}))


@pytest.mark.slow
def test_every_layout_takes_the_steps_of_one_device():
    out = json.loads(run_on_eight_devices(__file__).stdout.splitlines()[-1])
    assert out["moved"] > 1e-3 and set(out["gaps"]) == set(MESHES)
    assert max(out["gaps"].values()) < 1e-5, out


# ---------------------------------------------------------------- two processes


def one_of_two_processes(port, number):
    jax.distributed.initialize(f"localhost:{port}", 2, number)
    assert jax.process_count() == 2 and jax.device_count() == 4
    params, metrics = steps_on(make_mesh(2, 2, 1), 3)
    everywhere = jax.jit(lambda x: x, out_shardings=jax.sharding.NamedSharding(
        jax.tree.leaves(params)[0].sharding.mesh, jax.sharding.PartitionSpec()))
    whole = jax.tree.map(np.asarray, everywhere((params, metrics)))
    print(json.dumps({"gap": gap(steps_of_one_device(3), whole),
                      "tokens": int(metrics.n_tokens), "applied": int(metrics.n_applied)}))


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    root = pathlib.Path(__file__).parents[1]
    env = os.environ | {
        "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu", "XLA_FLAGS":
        "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"}
    both = [subprocess.Popen([sys.executable, __file__, str(port), str(number)], cwd=root, env=env,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for number in range(2)]
    said = [process.communicate(timeout=600) for process in both]
    failed = said[0][1][-2000:] + said[1][1][-2000:]
    assert [process.returncode for process in both] == [0, 0], failed
    found = [json.loads(out.splitlines()[-1]) for out, _ in said]
    assert found[0] == found[1] and found[0]["gap"] < 1e-5 and found[0]["applied"] == 1
    assert found[0]["tokens"] > 50


def test_a_process_packs_whole_parts():
    assert own_part(dataclasses.replace(SHAPE, parts=4), 2) == dataclasses.replace(
        SHAPE, tasks=4, rows=4, prompts=2, parts=2)
    with pytest.raises(ValueError, match="a batch of 8 tasks does not divide over 3 processes"):
        own_part(SHAPE, 3)
    with pytest.raises(ValueError, match="a batch of 1 parts does not divide over 2 processes"):
        own_part(SHAPE, 2)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        one_of_two_processes(*map(int, sys.argv[1:]))
    else:
        compare_on_eight_devices()
