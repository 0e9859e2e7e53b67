"""Figures over seeds: `python -m experiments.compare runs/seed0 runs/seed1 ...`.

Each argument is a folder of `experiments.quickstart` (one seed, all arms). Prints mean,
standard deviation over seeds and range of the held-in scores, and the paired difference of
the arms' gains.
"""

from __future__ import annotations

import argparse
import math
import pathlib
from collections.abc import Sequence

from experiments.quickstart import ARMS
from rods_jax.config import UserError, read_json, run_main, write_json

SCORES = tuple((metric, how) for metric in ("progress", "success") for how in ("sampled", "greedy"))


def main(argv: Sequence[str] | None = None) -> None:
    arguments = argparse.ArgumentParser(prog="python -m experiments.compare", description=__doc__)
    arguments.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN_DIR")
    arguments.add_argument("--json", metavar="FILE", help="figures as JSON; - prints them last")
    args = arguments.parse_args(argv)
    if len({run.resolve() for run in args.runs}) < len(args.runs):
        raise UserError("one folder is given twice; give every run once")
    found = compare([_read(run) for run in args.runs])
    if args.json != "-":
        print(table(found))
    if args.json:
        write_json(args.json, found)


def _read(run: pathlib.Path) -> dict:
    path = run / "summary.json"
    if not path.exists():
        raise UserError(f"{path}: is not there; give folders made by experiments.quickstart")
    summary = read_json(path, "give folders made by experiments.quickstart")
    try:
        compare([summary])
    except (KeyError, TypeError) as e:
        raise UserError(f"{path}: is not the summary of a quickstart (no {e}); give folders made "
                        "by experiments.quickstart") from e
    return summary


def spread(values: Sequence[float]) -> dict[str, float]:
    """mean, sd (ddof 1, 0 for one value), min and max."""
    mean = sum(values) / len(values)
    sd = math.sqrt(sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1))
    return {"mean": mean, "sd": sd, "min": min(values), "max": max(values)}


def compare(summaries: Sequence[dict]) -> dict:
    """{"seeds", arm: {"progress_sampled": {"before", "after", "gain"}, ...}, "advantage"}."""
    def score(summary, arm, when, metric, how):
        return summary[arm]["evaluations"][when][f"held_in_{how}"][metric]

    found: dict = {"seeds": [s["seed"] for s in summaries]}
    gains: dict = {}
    for arm in ARMS:
        found[arm] = {}
        for metric, how in SCORES:
            pairs = [tuple(score(s, arm, when, metric, how) for when in ("before", "after"))
                     for s in summaries]
            gains[arm, metric, how] = [after - before for before, after in pairs]
            found[arm][f"{metric}_{how}"] = {
                "before": spread([before for before, _ in pairs]),
                "after": spread([after for _, after in pairs]),
                "gain": spread(gains[arm, metric, how])}
    found["advantage"] = {
        f"{metric}_{how}": spread([a - b for a, b in zip(gains["rods", metric, how],
                                                         gains["static", metric, how])])
        for metric, how in SCORES}
    return found


def table(found: dict) -> str:
    """For people: percent, sd over seeds in brackets."""
    lines = [f"{len(found['seeds'])} seeds, held-in tasks (%)",
             f"{'':18}" + "".join(f"{arm:>36}" for arm in ARMS) + f"{'rods - static':>18}"]
    percent = lambda s: f"{100 * s['mean']:.1f} ({100 * s['sd']:.1f})"  # noqa: E731
    for metric, how in SCORES:
        name = f"{metric}_{how}"
        cells = [f"{percent(found[arm][name]['before'])} -> {percent(found[arm][name]['after'])}, "
                 f"{100 * found[arm][name]['gain']['mean']:+.1f}" for arm in ARMS]
        lines.append(f"{metric + ', ' + how:18}" + "".join(f"{cell:>36}" for cell in cells)
                     + f"{percent(found['advantage'][name]):>18}")
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main)
