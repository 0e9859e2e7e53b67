"""RODS against the static baseline on one machine: `make quickstart`.

Warm-starts one small policy, trains it twice with the same number of rollouts, each arm in
a process of its own on a core of its own, and ends with a table, curves.png, report.html
and summary.json in --out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from rods_jax import report, startup
from rods_jax.config import UserError, check_out, load, run_main, write_json
from rods_jax.metrics import ZONES, duration, read
from rods_jax.run_config import RunConfig
from rods_jax.tools.host import Outage

CONFIG = "configs/quickstart.py"
ARMS = {"rods": (), "static": ("synthesis_on=False",)}


def main(argv: Sequence[str] | None = None) -> None:
    arguments = argparse.ArgumentParser(prog="python -m experiments.quickstart",
                                        description=__doc__)
    arguments.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/quickstart"))
    arguments.add_argument("--cache", type=pathlib.Path, default=pathlib.Path("runs/cache"))
    arguments.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    arguments.add_argument("--json", metavar="FILE", help="summary as JSON; - prints it last")
    args = arguments.parse_args(argv)
    began = time.monotonic()
    config = load(CONFIG, args.set, RunConfig)
    check_out(args.out, folder=True)
    if args.json and args.json != "-":
        check_out(args.json)
    for arm in ARMS:
        shutil.rmtree(args.out / arm, ignore_errors=True)
    args.out.mkdir(parents=True, exist_ok=True)
    _warm_start(config, args.cache)
    _run_arms(config, args)
    summary = summarize(args.out, config.seed) | {"wall_s": time.monotonic() - began}
    write_json(args.out / "summary.json", summary)
    runs = {arm: read(args.out / arm / "metrics.jsonl") for arm in ARMS}
    report.write_curves(runs, args.out / "curves.png")
    report.write_html(runs, args.out / "report.html", title="RODS and the static baseline")
    print(table(summary))
    print(f"{args.out}/summary.json, curves.png, report.html   "
          f"({duration(summary['wall_s'])} in all)")
    if args.json:
        write_json(args.json, summary)


def _warm_start(config: RunConfig, cache: pathlib.Path) -> None:
    """Makes the file that both arms read, before either of them starts."""
    print(json.dumps(startup.start(config.platform)), flush=True)
    from rods_jax.policy import build
    from rods_jax.train import report_warm_start
    from rods_jax.warm_start import warm_start
    warm_start(config, build(config), cache, report_warm_start)


def _run_arms(config: RunConfig, args: argparse.Namespace) -> None:
    children = {}
    for i, (arm, overrides) in enumerate(ARMS.items()):
        command = [sys.executable, "-m", "experiments.train", "--config", CONFIG,
                   "--out", str(args.out / arm), "--cache", str(args.cache)]
        for override in (*args.set, *overrides):
            command += ["--set", override]
        with open(args.out / f"{arm}.log", "w", encoding="utf-8") as log, _core(i):
            children[arm] = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _watch(children, config, args.out)
        failed = {arm: child for arm, child in children.items() if child.poll() not in (None, 0)}
    finally:
        for child in children.values():
            child.kill()
    for arm, child in failed.items():
        tail = (args.out / f"{arm}.log").read_text(encoding="utf-8").strip().splitlines()
        raise UserError(f"arm {arm} ended with code {child.returncode}: "
                        f"{tail[-1] if tail else 'no output'}; see {args.out / arm}.log")


@contextlib.contextmanager
def _core(i: int) -> Iterator[None]:
    """Inside, this thread has the i-th core alone, and so have the processes it starts: one
    process a core is faster than one process on two (no thread hand-over)."""
    if not hasattr(os, "sched_getaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[i % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _watch(children: dict, config: RunConfig, out: pathlib.Path) -> None:
    """The live line of both arms, until both have ended or one has failed."""
    began, terminal, shown = time.monotonic(), sys.stderr.isatty(), 0.0
    while any(child.poll() is None for child in children.values()):
        if any(child.poll() not in (None, 0) for child in children.values()):
            break
        time.sleep(0.5)
        if not terminal and time.monotonic() - shown < 15:
            continue
        shown = time.monotonic()
        rows = {arm: _last(out / arm / "metrics.jsonl") for arm in children}
        line = " | ".join(live_text(arm, row, config.steps) for arm, row in rows.items())
        done = min((row["step"] + 1 for row in rows.values() if row), default=0)
        if done:
            left = (shown - began) / done * (config.steps - done)
            line += f" | {duration(left)} left"
        print(f"\r{line}\033[K" if terminal else line, end="" if terminal else "\n",
              file=sys.stderr, flush=True)
    if terminal:
        print(file=sys.stderr)


def _last(path: pathlib.Path) -> dict | None:
    rows = read(path) if path.exists() else []
    return rows[-1] if rows else None


def live_text(arm: str, row: dict | None, steps: int) -> str:
    if row is None:
        return f"{arm} starts"
    zones = "/".join(f"{100 * (row[f'zone_{zone}'] or 0):.0f}" for zone in ZONES)
    return (f"{arm} {row['step'] + 1}/{steps} reward {row['reward_mean'] or 0:.2f} "
            f"h/b/m/s {zones} pool {row['pool_active']} {row['tokens_per_s']:.0f} tok/s")


def summarize(out: pathlib.Path, seed: int) -> dict:
    """The figures of both arms; deterministic for a seed but for the wall times."""
    summary: dict = {"seed": seed}
    for arm in ARMS:
        found = json.loads((out / arm / "summary.json").read_text(encoding="utf-8"))
        rows = read(out / arm / "metrics.jsonl")
        found.pop("wall_s")
        summary[arm] = found | {
            "zones_first_epoch": _zones([r for r in rows if r["epoch"] == 0]),
            "zones_last_epoch": _zones(_last_epoch(rows)),
            "dead_share_last_epoch": _mean(_last_epoch(rows), "dead_share"),
        }
    return summary


def _last_epoch(rows: list[dict]) -> list[dict]:
    """The rows of the last epoch, or of the one before if that has just begun."""
    last = [r for r in rows if r["epoch"] == rows[-1]["epoch"]]
    before = [r for r in rows if r["epoch"] == rows[-1]["epoch"] - 1]
    return before if len(last) < len(before) else last


def _mean(rows: list[dict], name: str) -> float:
    values = [r[name] for r in rows if r[name] is not None]
    return sum(values) / len(values) if values else 0.0


def _zones(rows: list[dict]) -> dict[str, float]:
    return {zone: _mean(rows, f"zone_{zone}") for zone in ZONES}


def table(summary: dict) -> str:
    """The figures for people: percent of the held-in tasks, and counts."""
    lines = [f"{'':34}" + "".join(f"{arm:>22}" for arm in ARMS)]

    def row(label, text):
        lines.append(f"{label:34}" + "".join(f"{text(summary[arm]):>22}" for arm in ARMS))

    lines.append("held-in, before -> after (%)")
    for metric, label in (("progress", "mean progress"), ("success", "full success")):
        for how in ("sampled", "greedy"):
            row(f"  {label}, {how}", lambda arm, m=metric, h=how: " -> ".join(
                f"{100 * arm['evaluations'][when][f'held_in_{h}'][m]:.1f}"
                for when in ("before", "after")))
    lines.append("zones of the tasks drawn, first -> last epoch (%)")
    for zone in ZONES:
        row(f"  {zone}", lambda arm, z=zone: f"{100 * arm['zones_first_epoch'][z]:.0f} -> "
                                             f"{100 * arm['zones_last_epoch'][z]:.0f}")
    row("tasks synthesized", lambda arm: str(arm["synthesized"]))
    row("tasks admitted", lambda arm: str(arm["admitted"]))
    row("tasks retired", lambda arm: str(arm["retired"]))
    row("rollouts", lambda arm: str(arm["rollouts"]))
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main, user_errors=(ValueError, Outage))
