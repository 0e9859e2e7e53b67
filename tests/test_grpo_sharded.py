"""Eight devices give what one gives. In a process of its own: the device count is fixed
when jax starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rods_jax.grpo.batch import BatchShape
from rods_jax.grpo.sharded import batch_shardings
from rods_jax.models.sharding import make_mesh

PROGRAM = """
import json
import jax, jax.numpy as jnp, numpy as np
from grpo_cases import small_batch, tiny_decoder
from rods_jax.grpo.advantage import AdvantageConfig
from rods_jax.grpo.batch import BatchShape, pack
from rods_jax.grpo.loss import LossConfig
from rods_jax.grpo.optimizer import OptimizerConfig, OptimizerKind, make_optimizer
from rods_jax.grpo.sharded import batch_shardings, shard_update
from rods_jax.grpo.update import UpdateConfig, init_state, make_update
from rods_jax.models.sharding import make_mesh, param_shardings

shape = BatchShape(micro=4, rows=4, length=16, tasks=3, group=4)
decoder, params = tiny_decoder(vocab_size=14, n_kv_heads=2)  # even, to be split in two
optimizer = make_optimizer(OptimizerConfig(kind=OptimizerKind.SGD, lr=0.5))
options = UpdateConfig(loss=LossConfig(kl_coef=0.1), logit_chunk=4,
                       advantage=AdvantageConfig(dead_keep_kl=True))
state = init_state(params, optimizer, keep_reference=True)
state = state.replace(ref_params=jax.tree.map(lambda x: x * 0.9, params))
batch = pack(*small_batch(1), shape, drop_dead=False)
update = make_update(decoder, options, optimizer)
alone = jax.jit(update)
mesh = make_mesh(2, 2, 2)
# Copied first: placing may keep buffers, and the sharded update gives its own away.
placed = jax.device_put(jax.tree.map(jnp.copy, state), param_shardings(state, mesh))
spread = shard_update(update, mesh, state, shape)
many = jax.device_put(batch, batch_shardings(mesh, shape))
one, all8 = state, placed
for _ in range(2):
    one, m1 = alone(one, batch)
    all8, m8 = spread(all8, many)
gap = lambda a, b: float(max(np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)).max()
                             for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b))))
share = lambda a, b: max(gap(x, y) / max(1.0, float(np.abs(x).max()))  # of large sums
                         for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))
print(json.dumps({
    "devices": jax.device_count(), "params": gap(one.params, all8.params),
    "metrics": share(m1, m8), "moved": gap(params, one.params),
    "spread": str(all8.params["layers"]["q"].sharding.spec),
    "moments": all(a.sharding == b.sharding for a, b in zip(
        jax.tree.leaves(all8.params), jax.tree.leaves(all8.opt_state[1].trace))),
    "donated": placed.params["embed"].is_deleted(), "traces": spread._cache_size()}))
"""

ADAPTERS_ALONE = """
import json
import jax, jax.numpy as jnp, numpy as np
from grpo_cases import small_batch, tiny_decoder
from rods_jax.grpo.batch import BatchShape, pack
from rods_jax.grpo.loss import LossConfig, RatioLevel
from rods_jax.grpo.optimizer import OptimizerConfig, make_optimizer
from rods_jax.grpo.sharded import batch_shardings, shard_update
from rods_jax.grpo.update import UpdateConfig, init_state, make_update
from rods_jax.models import lora
from rods_jax.models.config import LoraConfig
from rods_jax.models.sharding import make_mesh, param_shardings

shape = BatchShape(micro=3, rows=8, length=16, tasks=3, group=4)
# Each axis that a weight has, on the side of A and on that of B.
adapted = LoraConfig("q_proj|o_proj|up_proj|down_proj", rank=3, alpha=2.0)
decoder, params = tiny_decoder(vocab_size=14, n_kv_heads=2, adapted=adapted)
frozen, adapters = lora.split(params)
optimizer = make_optimizer(OptimizerConfig(lr=0.02, weight_decay=0.1))
state = init_state(adapters, optimizer, True, frozen)
batch = pack(*small_batch(1), shape, drop_dead=False)
loss = LossConfig(kl_coef=0.1, ratio=RatioLevel.SEQUENCE)
update = make_update(decoder, UpdateConfig(loss=loss, logit_chunk=8), optimizer)
alone, one = jax.jit(update), state
for _ in range(2):
    one, m1 = alone(one, batch)
gap = lambda a, b: float(max(np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)).max()
                             for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b))))
share = lambda a, b: max(gap(x, y) / max(1.0, float(np.abs(x).max()))  # of large sums
                         for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))
results = {"moved": gap(adapters, one.params), "leaves": len(jax.tree.leaves(adapters))}
for name, sizes in {"fsdp": (1, 8, 1), "tensor": (4, 1, 2), "both": (2, 2, 2)}.items():
    mesh = make_mesh(*sizes)
    all8 = jax.device_put(jax.tree.map(jnp.copy, state), param_shardings(state, mesh))
    parts = [[s.data.unsafe_buffer_pointer() for s in x.addressable_shards]
             for x in jax.tree.leaves(all8.frozen)]
    spread = shard_update(update, mesh, state, shape)
    for _ in range(2):
        all8, m8 = spread(all8, jax.device_put(batch, batch_shardings(mesh, shape)))
    results[name] = {
        "params": gap(one.params, all8.params), "metrics": share(m1, m8),
        "frozen": gap(frozen, all8.frozen),
        "kept": parts == [[s.data.unsafe_buffer_pointer() for s in x.addressable_shards]
                          for x in jax.tree.leaves(all8.frozen)],
        "a": str(all8.params["layers"]["q_lora_a"].sharding.spec),
        "b": str(all8.opt_state[1].mu["layers"]["q_lora_b"].sharding.spec)}
merged = lora.merged(lora.join(all8.frozen, all8.params), decoder.config)
results["merged"] = gap(lora.merged(lora.join(one.frozen, one.params), decoder.config), merged)
results["laid"] = all(x.sharding.is_equivalent_to(to, x.ndim) for x, to in zip(
    jax.tree.leaves(merged), jax.tree.leaves(param_shardings(merged, mesh))))
print(json.dumps(results))
"""


def on_eight_devices(program):
    """What the program prints last."""
    root = Path(__file__).resolve().parents[1]
    env = os.environ | {
        "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8 "
                                            "--xla_backend_optimization_level=0",
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")])}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_eight_devices_train_adapters_as_one_does():
    out = on_eight_devices(ADAPTERS_ALONE)
    assert out["moved"] > 1e-3 and out["leaves"] == 8
    assert out["merged"] < 1e-5 and out["laid"]
    for name in ("fsdp", "tensor", "both"):
        got = out[name]
        assert got["params"] < 1e-5 and got["metrics"] < 1e-5, (name, got)
        assert got["frozen"] == 0 and got["kept"], (name, got)
        assert "fsdp" in got["a"] and "tensor" in got["b"], (name, got)


@pytest.mark.slow
def test_eight_devices_equal_one():
    out = on_eight_devices(PROGRAM)
    assert out["devices"] == 8 and out["moved"] > 1e-3
    assert out["params"] < 1e-5 and out["metrics"] < 1e-5
    assert "fsdp" in out["spread"] and "tensor" in out["spread"] and out["moments"]
    assert out["donated"] and out["traces"] == 1


def test_rows_must_divide():
    mesh = make_mesh(1, 1, 1)
    assert batch_shardings(mesh, BatchShape(1, 3, 8, 1, 2)).tokens_MxRxL.mesh == mesh

    class Wide:
        shape = {"data": 2, "fsdp": 4, "context": 1}
    with pytest.raises(ValueError, match="6 rows a micro-batch do not divide over 8 devices"):
        batch_shardings(Wide(), BatchShape(1, 6, 8, 1, 2))
