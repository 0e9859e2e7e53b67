"""The figures of the update bench for people."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.bench.rollout_table import busy_lines
from experiments.bench.update import UPDATE_RATIOS
from rods_jax.types import Json

_ROW = "{:8}{:8}{:>9}  {:18}{:>9}{:>10}{:>8}{:>8}{:>9}".format


def update_table(found: Mapping[str, Json]) -> str:
    machine = found["machine"]
    lines = [f"one GRPO update of a model of {found['parameters'] / 1e6:.1f} million parameters "
             f"in float32 on {machine['cores']} cores, medians of {found['repeats']}",
             _ROW("case", "side", "seconds", "from .. to", "Gflop", "of peak", "x ours", "target",
                  "x flops")]
    keys = {(ratio.case, ratio.side.value): key for key, ratio in UPDATE_RATIOS.items()}
    for name, case in found["cases"].items():
        for place, (side, row) in enumerate(case["sides"].items()):
            key = keys.get((name, side), "")
            ratio, target = found.get(key), found["targets"].get(key)
            lines.append(_ROW(
                "" if place else name, side, f"{row['median_s']:.2f}",
                f"{min(row['seconds']):.2f} .. {max(row['seconds']):.2f}",
                f"{1e-9 * row['flops']:.0f}", f"{100 * row['fraction_of_matmul_peak']:.0f} %",
                f"{ratio:.2f}" if ratio else "", f"{target:g}" if target else "",
                f"{row['flops_limit']:.2f}" if "flops_limit" in row else "").rstrip())
    lines += [f"peak: matmul {machine['matmul_gflops']:.0f} Gflop/s", *busy_lines(machine)]
    met = [found[key] >= least for key, least in found["targets"].items() if found[key] is not None]
    lines.append(f"{len(met)} of {len(found['targets'])} targets measured, {sum(met)} met")
    return "\n".join(lines)
