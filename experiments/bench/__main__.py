"""Speed side by side: `python -m experiments.bench COMMAND [--json FILE]`.

tools      replays and scores the gold calls of all BFCL multi-turn tasks, here and with the
           checker of the package bfcl-eval.
rollout    samples the same tokens from the same weights here, with Hugging Face transformers'
           generate and with google-tunix's sampler. `make bench-peers` installs those two.
update     takes the same GRPO update of the same weights here, with torch the way TRL's trainer
           does and with google-tunix's log-probs; the same two.
pool       times the operations of the task pool at growing capacities, beside an update.
synthesis  times steps of the quickstart with and without variants being made on another core.
"""

from __future__ import annotations

import argparse
import os
import pathlib
from collections.abc import Sequence

from experiments.bench import tools
from experiments.bench.cases import CASES
from experiments.bench.peers import FOLDER, PeerName, python_of
from experiments.bench.update_cases import UPDATE_CASES
from rods_jax.config import UserError, check_out, run_main, write_json
from rods_jax.host_memory import keep_freed_memory
from rods_jax.tools.host import Outage
from rods_jax.types import Json

SLOW = "slow_tools"  # the case whose tools take 50 ms a call


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="python -m experiments.bench", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = arguments.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help_, repeats, run, table in (
            ("tools", "BFCL tasks, here and in bfcl-eval", 5,
             lambda args: tools.bench_tools(args.repeats), lambda: tools.tools_table),
            ("rollout", "sampling, here, in transformers and in tunix", 5,
             _rollout, _rollout_table),
            ("update", "a GRPO update, here, as TRL does it and in tunix", 3,
             _update, _update_table),
            ("pool", "the task pool, beside the smallest update", 5, _pool, _pool_table),
            ("synthesis", "training steps with and without it", 24, _synthesis,
             _synthesis_table)):
        command = commands.add_parser(name, help=help_)
        command.add_argument("--repeats", type=int, default=repeats,
                             help="counted passes, after one for warm-up (default %(default)s)")
        command.add_argument("--json", metavar="FILE", help="figures as JSON; - prints them last")
        command.set_defaults(run=run, table=table)
    _peer_options(commands.choices["rollout"], [*(case.name for case in CASES), SLOW])
    _peer_options(commands.choices["update"], [case.name for case in UPDATE_CASES])
    return arguments


def _peer_options(command: argparse.ArgumentParser, cases: Sequence[str]) -> None:
    names = [name.value for name in PeerName]
    command.add_argument("--peers", type=pathlib.Path, default=FOLDER, metavar="FOLDER",
                         help=f"what `make bench-peers` made (default {FOLDER})")
    for name in names:
        command.add_argument(f"--{name}-python", type=pathlib.Path, metavar="PYTHON",
                             help=f"the Python that has {name}, in place of the folder's")
    command.add_argument("--without", choices=names, action="append", default=[],
                         help="leaves a peer out; its ratios are then null")
    command.add_argument("--cases", nargs="+", choices=cases, default=cases,
                         help="the other cases' figures are then null (default: all)")


def _on_cpu() -> None:
    """Set up as it is for a run. Call it before anything imports jax."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    keep_freed_memory()


def _pythons(args: argparse.Namespace) -> dict[PeerName, pathlib.Path]:
    """Of the peers that take part, with which we are compared on the CPU."""
    _on_cpu()
    return {name: python_of(name, args.peers, getattr(args, f"{name.value}_python"))
            for name in PeerName if name.value not in args.without}


def _rollout(args: argparse.Namespace) -> dict[str, Json]:
    pythons = _pythons(args)
    from experiments.bench import rollout, slow_tools
    from rods_jax.models.decoder import Decoder
    found = rollout.bench_rollout(rollout.Plan(
        cases=tuple(case for case in CASES if case.name in args.cases),
        commands={name: rollout.command(name, python) for name, python in pythons.items()},
        repeats=args.repeats))
    model, slow = rollout.MODEL, None
    if SLOW in args.cases:
        slow = slow_tools.slow_tools(Decoder(model), rollout.make_params(model), args.repeats,
                                     workers=(16,))
    return found | {"slow_tools": slow, "slow_tools_loss": slow and slow["slow_tools_loss"],
                    "all_met": found["all_met"] and bool(slow and slow["met"])}


def _rollout_table():
    from experiments.bench.rollout_table import rollout_table
    from experiments.bench.slow_tools import lines
    return lambda found: "\n".join(
        [*(lines(found["slow_tools"]) if found["slow_tools"] else ()), rollout_table(found)])


def _update(args: argparse.Namespace) -> dict[str, Json]:
    pythons = _pythons(args)
    from experiments.bench import update
    return update.bench_update(update.UpdatePlan(
        cases=tuple(case for case in UPDATE_CASES if case.name in args.cases),
        commands={name: update.update_command(name, python) for name, python in pythons.items()},
        repeats=args.repeats))


def _update_table():
    from experiments.bench.update_table import update_table
    return update_table


def _pool(args: argparse.Namespace) -> dict[str, Json]:
    _on_cpu()
    from experiments.bench import pool
    return pool.bench_pool(pool.PoolPlan(repeats=args.repeats))


def _pool_table():
    from experiments.bench.pool import pool_table
    return pool_table


def _synthesis(args: argparse.Namespace) -> dict[str, Json]:
    _on_cpu()
    from experiments.bench import synthesis
    return synthesis.bench_synthesis(synthesis.SynthesisPlan(repeats=args.repeats))


def _synthesis_table():
    from experiments.bench.synthesis import synthesis_table
    return synthesis_table


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if getattr(args, "cases", None) == [SLOW]:
        raise UserError(f"--cases {SLOW} alone compares nobody: name a case beside it, such as a")
    if args.repeats < 1:
        raise UserError(f"--repeats is {args.repeats}: give at least 1")
    if args.json and args.json != "-":
        check_out(args.json)
    found = args.run(args)
    if args.json != "-":
        print(args.table()(found))
    if args.json:
        write_json(args.json, found)


if __name__ == "__main__":
    run_main(main, user_errors=(ValueError, Outage))
