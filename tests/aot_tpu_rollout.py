"""What the rollouts' programs copy on TPUs that are not there.

By hand, for it needs the TPU compiler and takes minutes:

    pip install libtpu==0.0.42.1  # for jax 0.10.2; `pip install jax[tpu]` names its own
    PYTHONPATH=. python tests/aot_tpu_rollout.py --config configs/qwen3_4b_lora.py

One JSON object for each program: what makes arrays of at least `--large` MiB outside of fused
loops, and where it comes from. Pages updated in place are among them; copies of pages must not
be. How much memory they take says `python -m experiments.memory_plan`.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import re

from rods_jax import plan, topology
from rods_jax.config import load
from rods_jax.run_config import RunConfig

_WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "s32": 4, "u32": 4, "f32": 4}
_FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "constant"}


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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--programs", nargs="+", default=["prefill", "extend", "wave"])
    parser.add_argument("--large", type=float, default=64, help="MiB")
    given = parser.parse_args()
    config, found = load(given.config, given.set, RunConfig), topology.find(given.topology)
    for program in plan.programs(config, *plan.trainers(config, found)):
        if program.name.startswith(tuple(given.programs)):
            text = program.lowered.compile().as_text()
            print(json.dumps({"program": program.name,
                              "large": large(text, int(given.large * 2**20))}, indent=1), flush=True)


if __name__ == "__main__":
    main()
