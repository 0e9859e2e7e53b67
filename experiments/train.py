"""Train a policy: `python -m experiments.train --config configs/FILE.py [--set a.b=value ...]`.

Writes into --out (default runs/<name of the config>): config.json, metrics.jsonl, tasks.jsonl,
checkpoints/, summary.json. `--resume` takes up the newest checkpoint there.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rods_jax import checkpoint, startup
from rods_jax.config import UserError, check_out, load, run_main, write_json
from rods_jax.run_config import RunConfig
from rods_jax.tasks.lock import lock_of, locked
from rods_jax.tools.host import Outage


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="python -m experiments.train", description=__doc__)
    arguments.add_argument("--config", required=True, help="a file below configs/")
    arguments.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    arguments.add_argument("--out", type=pathlib.Path, help="folder of the run")
    arguments.add_argument("--cache", type=pathlib.Path, default=pathlib.Path("runs/cache"),
                           help="warm starts shared between runs")
    arguments.add_argument("--resume", action="store_true",
                           help="go on from the newest checkpoint in --out")
    arguments.add_argument("--json", metavar="FILE", help="summary as JSON; - prints it last")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    config = load(args.config, args.set, RunConfig)
    folder = args.out or pathlib.Path("runs") / pathlib.Path(args.config).stem
    check_out(folder, folder=True)
    if args.json and args.json != "-":
        check_out(args.json)
    print(json.dumps(startup.start(config.platform)), flush=True)
    with locked(lock_of(folder), f"{folder}: another process trains there; give another --out"):
        resume = find_checkpoint(folder / "checkpoints", args.resume)
        from rods_jax.train import train  # after the platform is settled
        summary = train(config, folder, args.cache, resume)
    if args.json != "-":
        print(f"held-in mean progress, sampled: {summary['before']:.3f} before, "
              f"{summary['after']:.3f} after; {folder}/summary.json")
        print(trained_line(summary))
    if args.json:
        write_json(args.json, summary)


def trained_line(summary: Mapping[str, Any]) -> str:
    """What was trained by which reward, and what rollouts scored under it and beside it."""
    first, last = summary["first_step"], summary["last_step"]
    shown = ", ".join(f"{name} {_shown(first[f'{name}_mean'])} -> {_shown(last[f'{name}_mean'])}"
                      for name in ("format", "progress"))
    return (f"trained by the reward {' then '.join(summary['reward_trained'])}; rollouts of the "
            f"first -> the last step: {shown}")


def _shown(mean: float | None) -> str:
    return "none" if mean is None else f"{mean:.3f}"


def find_checkpoint(root: pathlib.Path, resume: bool) -> pathlib.Path | None:
    """The checkpoint to go on from, None for a new run. Raises UserError where `root` holds
    none although one is wanted, or one although a new run is."""
    if resume:
        checkpoint.clean(root)  # a kill may have left the newest one under a hidden name
    found = checkpoint.latest(root)
    if resume and found is None:
        raise UserError(f"{root}: no checkpoint to resume from; check --out or leave --resume out")
    if not resume and found is not None:
        raise UserError(f"{root}: holds a run already; add --resume, or choose another --out")
    return found


if __name__ == "__main__":
    run_main(main, user_errors=(ValueError, Outage))
