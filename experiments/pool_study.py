"""Does the pool stay at a moving boundary? `python -m experiments.pool_study`.

A simulated policy that learns drives the real task pool for 200 epochs, under several settings
(see `Arm`). Prints a Markdown table; --out FILE puts it between the marks of that page, --plot
FILE draws the curves. Takes minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from experiments.docs_block import check_number, check_outputs, write_block
from experiments.pool_simulation import EpochRow, Forgetting, Outage, Scenario, simulate
from rods_jax import report
from rods_jax.config import UserError, run_main, write_json
from rods_jax.task_pool import PoolConfig, Priority
from rods_jax.types import Json

Rows = Sequence[EpochRow]
MOST_SEEDS = 1_000_000
BESIDE = 10  # epochs before and after one that forgets, which `recovery` compares


class Arm(enum.Enum):
    """follow: min_boundary 0.8, retire_mastered 0.85, twice as many variants as seeds."""

    STATIC = "no synthesis"
    PAPER = "the paper's rules"
    DRY = "min_boundary 0.5"
    WIDE = "follow"
    OUTAGE = "follow, outage"
    PHI = "follow, drawn by phi"
    FORGET_PAPER = "forgetting: the paper's rules"
    FORGET_BLIND = "forgetting: follow"
    FORGET_PROBES = "forgetting: follow, probe_rate 0.05"


# In half of them an arm forgets or has an outage, of a tenth of them.
LEAST_EPOCHS = {Arm.OUTAGE: 10} | dict.fromkeys(
    (Arm.FORGET_PAPER, Arm.FORGET_BLIND, Arm.FORGET_PROBES), 2 * BESIDE + 1)


def base_of(seeds: int, epochs: int, random_seed: int = 0, tasks_per_step: int = 32) -> Scenario:
    """The paper's rules at any size: as many variants as seeds; 400 is the paper's. An epoch
    teaches as much whatever its size."""
    return Scenario(pool=PoolConfig(capacity=2 * seeds + seeds // 2, p_max=seeds), seeds=seeds,
                    epochs=epochs, tasks_per_step=tasks_per_step, rate=0.4 / seeds,
                    random_seed=random_seed)


def scenarios(base: Scenario) -> dict[Arm, Scenario]:
    """Every arm at the size of `base`, which is the paper's rules."""
    def with_pool(scenario: Scenario, **fields) -> Scenario:
        return dataclasses.replace(scenario, pool=dataclasses.replace(scenario.pool, **fields))

    p_max = 2 * base.pool.p_max
    spare = base.pool.capacity - base.seeds - base.pool.p_max
    dry = with_pool(base, min_boundary=0.5)
    wide = with_pool(base, min_boundary=0.8, retire_mastered=base.pool.revive_mastered,
                     p_max=p_max, capacity=base.seeds + p_max + spare)
    half = base.epochs // 2
    forgetting = Forgetting(half)
    outage = Outage(half, half + base.epochs // 10 - 1)
    steps = 2 * base.seeds // base.tasks_per_step  # of an epoch of the paper's full pool
    phi = dataclasses.replace(
        with_pool(wide, priority=Priority.PHI, sweep=False), admit_every=steps,
        band=dataclasses.replace(base.band, cooldown_epochs=0))
    return {
        Arm.STATIC: dataclasses.replace(base, synthesis=False),
        Arm.PAPER: base,
        Arm.DRY: dry,
        Arm.WIDE: wide,
        Arm.OUTAGE: dataclasses.replace(wide, outage=outage),
        Arm.PHI: phi,
        Arm.FORGET_PAPER: dataclasses.replace(base, forgetting=forgetting),
        Arm.FORGET_BLIND: dataclasses.replace(wide, forgetting=forgetting),
        Arm.FORGET_PROBES: dataclasses.replace(
            with_pool(wide, probe_rate=0.05), forgetting=forgetting),
    }


@dataclasses.dataclass(frozen=True)
class Summary:
    """Shares in 0..1: the least of an epoch after the first tenth, the mean of the last quarter."""

    true_least: float
    true_last: float
    seen_last: float
    drawn_least: float
    drawn_last: float
    live: int  # at the end
    steps: int
    skill: float  # at the end, mean of the categories, logits
    asked: int
    admitted: int
    revived: int
    lost: int  # most of any epoch


def summary(rows: Rows) -> Summary:
    settled, last = rows[len(rows) // 10:], rows[-(len(rows) // 4):]

    def mean(name: str) -> float:
        return float(np.mean([getattr(row, name) for row in last]))

    return Summary(
        true_least=min(row.true_share for row in settled), true_last=mean("true_share"),
        seen_last=mean("seen_share"), drawn_least=min(row.drawn_share for row in settled),
        drawn_last=mean("drawn_share"), live=rows[-1].live, steps=sum(row.steps for row in rows),
        skill=float(np.mean(rows[-1].skill_C)), asked=rows[-1].asked, admitted=rows[-1].admitted,
        revived=rows[-1].revived, lost=max(abs(row.lost) for row in rows))


@dataclasses.dataclass(frozen=True)
class Recovery:
    """Of a category that was forgotten: groups an epoch that lay in the band, as means."""

    before: float  # of the ten epochs before
    after: float  # of the ten epochs after
    last: float  # of the last ten epochs
    epochs: int | None  # until the skill was back, None: never
    revived: int  # tasks, all categories, since then


def recovery(rows: Rows, event: Forgetting) -> Recovery:
    def groups(part: Rows) -> float:
        return float(np.mean([row.true_C[event.category] for row in part]))

    skills = [row.skill_C[event.category] for row in rows]
    at = event.epoch + 1
    back = [i for i in range(at, len(rows)) if skills[i] >= skills[event.epoch]]
    return Recovery(
        before=groups(rows[at - BESIDE:at]), after=groups(rows[at:at + BESIDE]),
        last=groups(rows[-BESIDE:]),
        epochs=back[0] - event.epoch if back else None,
        revived=rows[-1].revived - rows[event.epoch].revived)


def check(args: argparse.Namespace) -> None:
    """Raises UserError, naming the argument, before the first arm runs."""
    check_outputs("pool_study", args.out, args.plot, args.json)
    if args.arms and (args.out or args.plot):
        raise UserError("--out and --plot show all arms: leave --arms out")
    check_number("--seeds", args.seeds, 1, MOST_SEEDS)
    check_number("--seed", args.seed, 0)
    wanted = [Arm[name.upper()] for name in args.arms] if args.arms else list(Arm)
    check_number("--epochs", args.epochs, max(LEAST_EPOCHS.get(arm, 1) for arm in wanted))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.pool_study", description=__doc__)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=400, help="original")
    parser.add_argument("--seed", type=int, default=0, help="of all random draws")
    parser.add_argument("--arms", nargs="+", metavar="ARM", choices=[a.name.lower() for a in Arm],
                        help="only these; no --out or --plot then")
    parser.add_argument("--out", metavar="FILE", help="page that takes the tables")
    parser.add_argument("--plot", metavar="FILE", help="PNG of the curves")
    parser.add_argument("--json", metavar="FILE", help="figures as JSON; - prints them last")
    args = parser.parse_args(argv)
    check(args)
    base = base_of(args.seeds, args.epochs, args.seed)
    cases, runs = scenarios(base), {}
    if args.arms:
        cases = {arm: cases[arm] for arm in cases if arm.name.lower() in args.arms}
    for arm, scenario in cases.items():
        runs[arm] = simulate(scenario)
        print(f"{arm.value}: {summary(runs[arm])}", flush=True)
    text = tables(cases, runs)
    print(text)
    if args.out:
        write_block(args.out, "pool_study", text)
    if args.plot:
        plot(cases, runs).savefig(args.plot)
    if args.json:
        write_json(args.json, as_json(cases, runs))


def tables(cases: Mapping[Arm, Scenario], runs: Mapping[Arm, Rows]) -> str:
    """Markdown: every arm, then what became of the forgotten category."""
    lines = ["| setting | live: least | live: last | as the pool sees it | drawn: least | "
             "drawn: last | live tasks | steps | skill | asked | admitted | lost |",
             "|" + "---|" * 12]
    for arm, rows in runs.items():
        s = summary(rows)
        shares = (s.true_least, s.true_last, s.seen_last, s.drawn_least, s.drawn_last)
        lines.append(f"| {arm.value} | " + " | ".join(f"{100 * x:.0f}" for x in shares) + " | "
                     f"{s.live:,} | {s.steps:,} | {s.skill:.1f} | {s.asked:,} | {s.admitted:,} | "
                     f"{s.lost} |")
    lines += ["", "| setting | ten epochs before | ten after | last ten | skill back after | "
              "revived |", "|" + "---|" * 6]
    for arm, rows in runs.items():
        if (event := cases[arm].forgetting) is not None:
            r = recovery(rows, event)
            back = "never" if r.epochs is None else f"{r.epochs} epochs"
            lines.append(f"| {arm.value} | {r.before:.0f} | {r.after:.0f} | {r.last:.0f} | "
                         f"{back} | {r.revived:,} |")
    return "\n".join(lines)


def as_json(cases: Mapping[Arm, Scenario], runs: Mapping[Arm, Rows]) -> Json:
    return {arm.name.lower(): {
        "summary": dataclasses.asdict(summary(rows)),
        "recovery": (dataclasses.asdict(recovery(rows, event))
                     if (event := cases[arm].forgetting) else None),
        "rows": [row.to_json() for row in rows]} for arm, rows in runs.items()}


SHOWN = (Arm.STATIC, Arm.PAPER, Arm.DRY, Arm.WIDE, Arm.OUTAGE, Arm.PHI)


def plot(cases: Mapping[Arm, Scenario], runs: Mapping[Arm, Rows]) -> Figure:
    """Four panels: share among live and among drawn tasks, live tasks, a forgotten category."""
    figure = Figure(figsize=(12.0, 8.0), dpi=120, facecolor="white", layout="constrained")
    live, drawn, size, forgotten = figure.subplots(2, 2).flat
    colours = dict(zip(Arm, report.ARM_COLOURS + report.ARM_COLOURS))
    for axes, title, value in (
            (live, "boundary tasks, % of live tasks", lambda row: 100 * row.true_share),
            (drawn, "boundary tasks, % of drawn tasks", lambda row: 100 * row.drawn_share),
            (size, "live tasks", lambda row: row.live)):
        for arm in SHOWN:
            axes.plot([value(row) for row in runs[arm]], color=colours[arm], linewidth=1.6,
                      label=arm.value)
        _dress(axes, title)
    for axes in (live, drawn):
        axes.set_ylim(0, 100)
        axes.axhline(50, color="#6b7280", linewidth=0.8, linestyle="--")
    for arm, scenario in cases.items():
        if scenario.outage is not None:
            for axes in (live, drawn, size):
                axes.axvspan(scenario.outage.first, scenario.outage.last + 1, color="#e5e7eb")
        if (event := scenario.forgetting) is not None:
            forgotten.plot([row.true_C[event.category] for row in runs[arm]], color=colours[arm],
                           linewidth=1.6, label=arm.value)
    forgotten.axvline(cases[Arm.FORGET_PAPER].forgetting.epoch, color="#6b7280", linewidth=0.8,
                      linestyle="--")
    _dress(forgotten, "forgotten category: its boundary tasks drawn an epoch")
    live.legend(frameon=False, fontsize=9)
    forgotten.legend(frameon=False, fontsize=9)
    return figure


def _dress(axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color="#24292f")
    axes.set_xlabel("epoch", fontsize=9.5, color="#6b7280")
    axes.grid(True, color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_ylim(bottom=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


if __name__ == "__main__":
    run_main(main)
