"""Train a policy: `python -m experiments.train --config configs/FILE.py [--set a.b=value ...]`.

Writes into --out (default runs/<name of the config>): config.json, metrics.jsonl,
checkpoints/, summary.json. `--resume` takes up the newest checkpoint there.
"""

from __future__ import annotations

import argparse
import json
import pathlib

from rods_jax import checkpoint, startup
from rods_jax.config import UserError, load, run_main, write_text
from rods_jax.run_config import RunConfig


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


def main() -> None:
    args = parser().parse_args()
    config = load(args.config, args.set, RunConfig)
    folder = args.out or pathlib.Path("runs") / pathlib.Path(args.config).stem
    resume = checkpoint.latest(folder / "checkpoints") if args.resume else None
    if args.resume and resume is None:
        raise UserError(f"{folder / 'checkpoints'}: no checkpoint to resume from; "
                        "check --out or leave --resume out")
    if not args.resume and checkpoint.latest(folder / "checkpoints") is not None:
        raise UserError(f"{folder}: holds a run already; add --resume, or choose another --out")
    print(json.dumps(startup.start(config.platform)), flush=True)
    from rods_jax.train import train  # after the platform is settled
    summary = train(config, folder, args.cache, resume)
    text = json.dumps(summary)
    if args.json == "-":
        print(text)
    elif args.json:
        write_text(args.json, text + "\n")
    else:
        print(f"held-in mean progress, sampled: {summary['before']:.3f} before, "
              f"{summary['after']:.3f} after; {folder}/summary.json")


if __name__ == "__main__":
    run_main(main)
