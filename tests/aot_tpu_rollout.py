"""Compiles the programs of a rollout for TPUs that are not there.

By hand, for it needs the TPU compiler and takes minutes:

    pip install libtpu==0.0.42.1  # for jax 0.10.2; `pip install jax[tpu]` names its own
    PYTHONPATH=. JAX_PLATFORMS=cpu python tests/aot_tpu_rollout.py [--layers 4]

One JSON object for each program, bytes on a device by the real compiler's account:

    pages      K/V and ids of the cache, as the shapes have it
    weights    as the shapes have them
    arguments  the same and the plan, as they lie on a TPU: more, where an array is padded
    temp       what lives between arguments and results
    alias      results that take the place of arguments: all pages, where donation is honoured
    all        everything at once
    large      what makes arrays of at least `--large` MiB outside of fused loops, and where it
               comes from. Pages updated in place are among them; copies of pages must not be.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import math
import os
import re
import time
from unittest import mock

# The compiler must not look for the machine it is on.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental import topologies

from rods_jax.models import int8
from rods_jax.models.config import ModelConfig
from rods_jax.models.decoder import Decoder, init_params
from rods_jax.models.sharding import ShardingRules, make_mesh, param_shardings
from rods_jax.rollout import slots as rollout_slots
from rods_jax.rollout.programs import Programs
from rods_jax.rollout.shapes import SamplerConfig

MODELS = {
    "qwen3-0.6b": ModelConfig(151936, 1024, 28, 16, 8, 128, 3072, qk_norm=True),
    "qwen3-4b": ModelConfig(151936, 2560, 36, 32, 8, 128, 9728, qk_norm=True),
}

_WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "s32": 4, "u32": 4, "f32": 4}
_FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "constant"}


class ShapesOnly(Programs):
    """Programs whose cache is only shapes."""

    def _empty(self, *args):
        return jax.tree.map(
            lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
            jax.eval_shape(functools.partial(super()._empty, *args)), self._placed(self._specs))


def weights(config: ModelConfig, mesh):
    """Shapes of the weights as rollouts read them: matrices in bfloat16, split over `tensor`."""
    flat = flatten_dict(jax.eval_shape(lambda: init_params(config, jax.random.key(0))), sep="/")
    matrices = {f"layers/{name}" for name in int8.NAMES} | {"embed", "head"}
    rules = ShardingRules(embed=None, replicate_uneven=True)
    return unflatten_dict({
        name: jax.ShapeDtypeStruct(flat[name].shape,
                                   jnp.bfloat16 if name in matrices else flat[name].dtype,
                                   sharding=at)
        for name, at in param_shardings(flat, mesh, rules).items()}, sep="/")


def on_device(tree) -> int:
    """Bytes of one device's part of these shapes."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
               for x in jax.tree.leaves(tree))


def large(text: str, least: int) -> list[str]:
    """What the compiled program makes outside of fusions, arrays of at least `least` bytes:
    the operation, shape and layout, and the line of the source."""
    found = collections.Counter()
    for body in re.split(r"\n\n", text):
        if "fused_computation" in body.lstrip().split(" ", 1)[0]:
            continue
        for line in body.splitlines():
            match = re.match(r"\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\(", line)
            if match is None or match[3] in _FREE:
                continue
            sizes = [_WIDTHS.get(kind, 0) * math.prod(int(n) for n in dims.split(",") if n)
                     for kind, dims in re.findall(r"([a-z0-9]+)\[([0-9,]*)\]", match[2])]
            if max(sizes, default=0) >= least:
                where = re.search(r'op_name="([^"]*)"', line)
                found[f"{match[3]} {match[1]} {match[2]} {where[1] if where else ''}"] += 1
    return [f"{n} x {what}" for what, n in found.items()]


def account(name: str, program, params, cache, *rest, least: int, keep: str | None) -> dict:
    began = time.perf_counter()
    done = program.lower(params, cache, *rest).compile()
    took = time.perf_counter() - began
    memory, text = done.memory_analysis(), done.as_text()
    if keep:
        with open(os.path.join(keep, name + ".txt"), "w", encoding="utf-8") as file:
            file.write(text)
    return {
        "program": name, "seconds": round(took), "pages": on_device(cache),
        "weights": on_device(params), "arguments": memory.argument_size_in_bytes,
        "output": memory.output_size_in_bytes, "temp": memory.temp_size_in_bytes,
        "alias": memory.alias_size_in_bytes,
        "all": memory.temp_size_in_bytes + memory.argument_size_in_bytes
        + memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "large": large(text, least)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--mesh", type=int, nargs=2, default=(2, 4), metavar=("DATA", "TENSOR"))
    parser.add_argument("--model", default="qwen3-4b", choices=list(MODELS))
    parser.add_argument("--layers", type=int, help="default: all of the model")
    parser.add_argument("--unroll", type=int, default=1)
    parser.add_argument("--page", type=int, default=128)
    parser.add_argument("--prompt-page", type=int, default=256)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--kv-bytes", type=int, help="of the devices that split K/V heads")
    parser.add_argument("--programs", nargs="+", default=["prefill", "extend", "wave"])
    parser.add_argument("--large", type=float, default=64, help="MiB")
    parser.add_argument("--keep", help="folder for the compiled programs' text")
    given = parser.parse_args()
    model = MODELS[given.model]
    model = dataclasses.replace(model, compute_dtype="bfloat16", scan_unroll=given.unroll,
                                n_layers=given.layers or model.n_layers)
    config = SamplerConfig(
        slots=given.slots, max_len=12288, prompt_len=8192, max_new=1024, sharers=16, prompts=2,
        prefill=((1, 512),), extend=((8, 256),), page=given.page, prompt_page=given.prompt_page,
        steps=64, kv_bytes=given.kv_bytes)
    devices = topologies.get_topology_desc(given.topology, platform="tpu").devices
    data, tensor = given.mesh
    mesh = make_mesh(data, 1, tensor, devices)
    with mock.patch.object(rollout_slots, "Programs", ShapesOnly):
        slots = rollout_slots.Slots(Decoder(model), config, [0], mesh)
    made, params = slots.programs, weights(model, mesh)
    cache = made._cache
    programs = {
        "prefill": (*made._prefill.values(), cache.shared, slots._chunk(config.prefill[0], [])),
        "extend": (*made._extend.values(), cache, slots._chunk(config.extend[0], [])),
        "wave": (*made._waves.values(), cache, slots._wave(config.slots, []), jax.random.key(0),
                 np.float32(0), np.int32(0), np.zeros((slots.devices,), np.int32))}
    for name in given.programs:
        program, kept, *rest = programs[name]
        print(json.dumps(account(name, program, params, kept, *rest, keep=given.keep,
                                 least=int(given.large * 2**20)), indent=1), flush=True)


if __name__ == "__main__":
    main()
