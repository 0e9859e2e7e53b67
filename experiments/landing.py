"""Where variants land: `python -m experiments.landing RUN [RUN ...]`.

Reads the tasks.jsonl of runs of `experiments.train` and sorts the variants that were observed
by the zone their parent was in when it was chosen. Of each sort: how many have a first mean
reward within the band (the paper, section 5, reports 0.25 to 0.75), how many below and above.

A run with `seed_rule=random` chooses parents whatever their zone, so that one run shows the
variants of boundary tasks beside those of random tasks:

    python -m experiments.train --config configs/quickstart.py --set seed_rule=random --out RUN
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from experiments.docs_block import check_outputs, write_block
from rods_jax import ledger, report
from rods_jax.boundary import BoundaryConfig, Zone, above, below
from rods_jax.config import UserError, run_main, write_json
from rods_jax.ledger import Event
from rods_jax.tasks.leakage import VARIANT_MARK
from rods_jax.types import Json

BAND = BoundaryConfig()
ANY = "any task"
OTHERS = "all but boundary tasks"


@dataclasses.dataclass(frozen=True)
class Landing:
    """A variant's first observation. zone: of its parent when that was chosen; UNSEEN where it
    had no usable reward yet."""

    variant: str
    zone: Zone
    mean: float


def landings(path: pathlib.Path) -> list[Landing]:
    """Of every variant in a run's tasks.jsonl that was observed."""
    lives, found = ledger.lives(path), []
    for uid, events in lives.items():
        parent, mark, name = uid.rpartition(VARIANT_MARK)
        first = next((e for e in events if e["event"] == Event.SCORED.value), None)
        if mark and first is not None:
            step = int(name.split(".")[0])
            found.append(Landing(uid, zone_when_chosen(lives[parent], step), first["mean"]))
    return found


def zone_when_chosen(events: Sequence[Mapping[str, Json]], step: int) -> Zone:
    """The zone of a task when it became a seed in that step, from the events of its life.
    Raises UserError where it did not."""
    zone = Zone.UNSEEN
    for event in events:
        if event["event"] == Event.ZONE.value:
            zone = Zone[event["to"].upper()]
        elif event["event"] == Event.CHOSEN.value and event["step"] == step:
            return zone
    raise UserError(f"no task was chosen as a seed in step {step}, though it has a variant of "
                    "that step: the file is not whole")


@dataclasses.dataclass(frozen=True)
class Share:
    """Of the variants of some parents: shares in 0..1 of first mean rewards, ends of the band
    within. error: standard error of `within`."""

    parents: str
    variants: int
    below: float
    within: float
    above: float
    error: float
    mean: float


def shares(found: Sequence[Landing]) -> list[Share]:
    """Of all variants, of those by the zone of their parents, and of all whose parent was at
    another place than the boundary; none for parents without any."""
    sorts = {ANY: found, OTHERS: [x for x in found if x.zone is not Zone.BOUNDARY]}
    for zone in Zone:
        sorts[f"{zone.name.lower()} tasks"] = [x for x in found if x.zone is zone]
    return [_share(name, np.array([x.mean for x in some])) for name, some in sorts.items() if some]


def _share(name: str, mean_V: np.ndarray) -> Share:
    low = float(np.mean(below(mean_V, BAND.alpha_minus)))
    high = float(np.mean(above(mean_V, BAND.alpha_plus)))
    within = 1.0 - low - high
    error = math.sqrt(max(within * (1.0 - within), 0.0) / len(mean_V))
    return Share(name, len(mean_V), low, within, high, error, float(mean_V.mean()))


def table(found: Mapping[str, Sequence[Share]]) -> str:
    """Markdown, by the name of a run."""
    lines = [f"| run | variants of | variants | < {BAND.alpha_minus:.2f} | "
             f"{BAND.alpha_minus:.2f} to {BAND.alpha_plus:.2f} | > {BAND.alpha_plus:.2f} | "
             "mean reward |", "|---|---|" + "---:|" * 5]
    for run, rows in found.items():
        lines += [f"| {run} | {s.parents} | {s.variants} | {s.below:.0%} | {s.within:.0%} "
                  f"(+- {100 * s.error:.0f}) | {s.above:.0%} | {s.mean:.2f} |" for s in rows]
    return "\n".join(lines)


def plot(found: Sequence[Landing]) -> Figure:
    """First mean rewards of the variants of boundary tasks, and of the others."""
    figure = Figure(figsize=(8.0, 4.0), dpi=120, facecolor="white", layout="constrained")
    axes = figure.subplots()
    edges = (np.arange(18) - 0.5) / 16  # a bar for each mean of 16 rewards of 0 or 1
    for colour, name, some in (
            (report.ARM_COLOURS[0], "boundary tasks",
             [x.mean for x in found if x.zone is Zone.BOUNDARY]),
            (report.ARM_COLOURS[1], OTHERS, [x.mean for x in found if x.zone is not Zone.BOUNDARY])):
        if some:
            axes.hist(some, edges, weights=np.full(len(some), 100 / len(some)), alpha=0.6,
                      color=colour, label=f"{name} ({len(some)})")
    axes.axvspan(BAND.alpha_minus, BAND.alpha_plus, color="#e5e7eb", zorder=0)
    axes.set_title("where the variants of these land, %", loc="left", fontsize=11,
                   fontweight="bold", color="#24292f")
    axes.set_xlabel("mean reward of the first group of rollouts", fontsize=9.5, color="#6b7280")
    axes.legend(frameon=False, fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.landing", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN", help="run folders")
    parser.add_argument("--out", metavar="FILE", help="page that takes the table")
    parser.add_argument("--plot", metavar="FILE", help="PNG of all runs' variants together")
    parser.add_argument("--json", metavar="FILE", help="figures as JSON; - prints them last")
    args = parser.parse_args(argv)
    check_outputs("landing", args.out, args.plot, args.json)
    found = {}
    for folder in args.runs:
        path = folder / ledger.FILE
        if not path.is_file():
            raise UserError(f"{path}: missing; name the folder of a run that experiments.train "
                            "wrote")
        found[folder.name] = landings(path)
        if not found[folder.name]:
            raise UserError(f"{folder}: no variant was observed in this run; it needs "
                            "synthesis_on and more steps")
    by_run = {run: shares(some) for run, some in found.items()}
    text = table(by_run)
    print(text)
    if args.out:
        write_block(args.out, "landing", text)
    if args.plot:
        plot([x for some in found.values() for x in some]).savefig(args.plot)
    if args.json:
        write_json(args.json, {run: [dataclasses.asdict(share) for share in rows]
                               for run, rows in by_run.items()})


if __name__ == "__main__":
    run_main(main)
