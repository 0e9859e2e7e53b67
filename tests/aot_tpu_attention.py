"""Compiles the decoder's forward and backward pass for TPUs that are not there.

By hand, for it needs the TPU compiler and takes minutes:

    pip install libtpu==0.0.42.1  # for jax 0.10.2; `pip install jax[tpu]` names its own
    PYTHONPATH=. JAX_PLATFORMS=cpu python tests/aot_tpu_attention.py [--length 4096]

One JSON line for each model and kind of attention: which kernels the compiled text calls, and
bytes on a device by the real compiler's account: `temp` is what lives between arguments and
results, `all` everything at once. A kernel is called three times, forward and for the
gradients of queries and of keys and values, and once more where remat `layer` repeats it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re

# The compiler must not look for the machine it is on.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from rods_jax.models.attention import Segments
from rods_jax.models.config import Attention, ModelConfig, Remat
from rods_jax.models.decoder import Decoder, init_params
from rods_jax.models.sharding import ShardingRules, batch_sharding, make_mesh, param_shardings

# Two layers of real models. A small vocabulary, for the head is not the question.
LAYERS = {
    "qwen2.5-0.5b": ModelConfig(512, 896, 2, 14, 2, 64, 4864, qkv_bias=True),
    "llama3.2-1b": ModelConfig(512, 2048, 2, 32, 8, 64, 8192),
    "qwen3-4b": ModelConfig(512, 2560, 2, 32, 8, 128, 9728, qk_norm=True),
}


def compiled(config: ModelConfig, mesh, rows: int, length: int):
    """Gradient of a sum over the hidden states, for the mesh."""
    placed = batch_sharding(mesh)
    decoder = Decoder(config, placed)

    def loss(params, tokens, positions, segments):
        hidden, _ = decoder.apply({"params": params}, tokens, positions, Segments(segments))
        return jnp.square(hidden.astype(jnp.float32)).mean()

    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    params = param_shardings(shapes, mesh, ShardingRules(replicate_uneven=True))
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    return jax.jit(jax.value_and_grad(loss), in_shardings=(params, placed, placed, placed),
                   out_shardings=(None, params)).lower(shapes, ids, ids, ids).compile()


def account(name: str, config: ModelConfig, mesh, rows: int, length: int) -> dict:
    program = compiled(config, mesh, rows, length)
    memory = program.memory_analysis()
    kernels = re.findall(r"%(splash_[a-z_]+)\S* = .*custom-call\(", program.as_text())
    return {
        "model": name, "head_dim": config.head_dim, "attention": config.attention.value,
        "remat": config.remat.value, "mesh": dict(mesh.shape), "rows": rows, "length": length,
        "kernels": sorted(set(kernels)), "calls": len(kernels), "temp": memory.temp_size_in_bytes,
        "all": memory.temp_size_in_bytes + memory.argument_size_in_bytes
        + memory.output_size_in_bytes - memory.alias_size_in_bytes}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--mesh", type=int, nargs=3, default=(2, 2, 2),
                        metavar=("DATA", "FSDP", "TENSOR"))
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rows", type=int, help="default: one for each device of data x fsdp")
    parser.add_argument("--models", nargs="+", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument("--remat", nargs="+", default=["layer"], choices=[r.value for r in Remat])
    given = parser.parse_args()
    devices = topologies.get_topology_desc(given.topology, platform="tpu").devices
    mesh = make_mesh(*given.mesh, devices)
    rows = given.rows or given.mesh[0] * given.mesh[1]
    for name in given.models:
        for remat in map(Remat, given.remat):
            for kind in (Attention.SPLASH, Attention.XLA):
                config = dataclasses.replace(LAYERS[name], attention=kind, remat=remat,
                                             compute_dtype="bfloat16")
                print(json.dumps(account(name, config, mesh, rows, given.length)), flush=True)


if __name__ == "__main__":
    main()
