"""The figures of the rollout bench for people."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.bench.rollout import RATIOS
from rods_jax.types import Json

BUSY = 0.1  # cores; more of it spoils the figures
_ROW = "{:10}{:20}{:>9}  {:16}{:>9}{:>9}{:>8}".format
_PHASE = "{:10}{:>9}{:>9}{:>9}   {}".format


def rollout_table(found: Mapping[str, Json]) -> str:
    machine = found["machine"]
    lines = [f"rollouts of a model of {found['parameters'] / 1e6:.1f} million parameters in "
             f"float32 on {machine['cores']} cores, medians of {found['repeats']}",
             _ROW("case", "side", "seconds", "from .. to", "tokens/s", "x ours", "target")]
    keys = {(ratio.case, ratio.side.value): key for key, ratio in RATIOS.items()}
    for name, case in found["cases"].items():
        for place, (side, row) in enumerate(case["sides"].items()):
            key = keys.get((name, side), "")
            ratio, target = found.get(key), found["targets"].get(key)
            lines.append(_ROW(
                "" if place else name, side, f"{row['median_s']:.2f}",
                f"{min(row['seconds']):.2f} .. {max(row['seconds']):.2f}",
                f"{row['tokens_per_s']:.0f}", f"{ratio:.2f}" if ratio else "",
                f"{target:g}" if target else "").rstrip())
    lines += ["", _PHASE("ours", "prefill", "extend", "decode", "share of the machine's "
                         "matmul peak in prefill, extend, decode")]
    for name, case in found["cases"].items():
        row = case["sides"]["ours"]
        lines.append(_PHASE(name, *(f"{row[f'{phase}_s']:.2f}"
                                    for phase in ("prefill", "extend", "decode")), _shares(row)))
    lines.append(f"peaks: matmul {machine['matmul_gflops']:.0f} Gflop/s, memory "
                 f"{machine['bandwidth_gbs']:.1f} GB/s")
    lines += busy_lines(machine)
    lines += [f"{name}: tunix's sampler asks for {need['bytes'] / 1e9:.1f} GB, this machine has "
              f"{need['memory_bytes'] / 1e9:.1f} GB" for name, need in found["tunix_need"].items()]
    lines.append(_targets(found))
    return "\n".join(lines)


def busy_lines(machine: Mapping[str, Json]) -> list[str]:
    """A warning where other programs were busy while the figures were taken."""
    busy = machine["others_cores_busy"]
    if busy is None or busy <= BUSY:
        return []
    return [f"other programs kept {busy:.1f} cores busy meanwhile: run it again alone"]


def _targets(found: Mapping[str, Json]) -> str:
    """How many of the targets were measured, and of these met; that of slow tools included."""
    met = [found[key] >= least for key, least in found["targets"].items() if found[key] is not None]
    met += [found["slow_tools"]["met"]] if found.get("slow_tools") else []
    return f"{len(met)} of {len(found['targets']) + 1} targets measured, {sum(met)} met"


def _shares(row: Mapping[str, Json]) -> str:
    def percent(key: str) -> str:
        return "-" if row[key] is None else f"{100 * row[key]:.0f} %"

    return ", ".join((percent("prefill_fraction_of_matmul_peak"),
                      percent("extend_fraction_of_matmul_peak"),
                      percent("decode_fraction_of_matmul_peak")
                      + f" (weights {percent('decode_fraction_of_bandwidth')} and with K/V "
                      f"{percent('decode_fraction_of_bandwidth_with_kv')} of the bandwidth)"))
