"""Speed side by side: `python -m experiments.bench tools|rollout [--json FILE]`.

tools    replays and scores the gold calls of all BFCL multi-turn tasks, here and with the
         checker of the package bfcl-eval.
rollout  samples the same tokens from the same weights here, with Hugging Face transformers'
         generate and with google-tunix's sampler. `make bench-peers` installs those two.
"""

from __future__ import annotations

import argparse
import os
import pathlib
from collections.abc import Sequence

from experiments.bench import tools
from experiments.bench.cases import CASES
from experiments.bench.peers import FOLDER, PeerName, python_of
from rods_jax.config import UserError, check_out, run_main, write_json
from rods_jax.tools.host import Outage
from rods_jax.types import Json

SLOW = "slow_tools"  # the case whose tools take 50 ms a call


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="python -m experiments.bench", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = arguments.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help_, run, table in (
            ("tools", "BFCL tasks, here and in bfcl-eval",
             lambda args: tools.bench_tools(args.repeats), lambda: tools.tools_table),
            ("rollout", "sampling, here, in transformers and in tunix", _rollout, _rollout_table)):
        command = commands.add_parser(name, help=help_)
        command.add_argument("--repeats", type=int, default=5,
                             help="counted passes, after one for warm-up (default 5)")
        command.add_argument("--json", metavar="FILE", help="figures as JSON; - prints them last")
        command.set_defaults(run=run, table=table)
    _peer_options(commands.choices["rollout"])
    return arguments


def _peer_options(rollout: argparse.ArgumentParser) -> None:
    names = [name.value for name in PeerName]
    rollout.add_argument("--peers", type=pathlib.Path, default=FOLDER, metavar="FOLDER",
                         help=f"what `make bench-peers` made (default {FOLDER})")
    for name in names:
        rollout.add_argument(f"--{name}-python", type=pathlib.Path, metavar="PYTHON",
                             help=f"the Python that has {name}, in place of the folder's")
    rollout.add_argument("--without", choices=names, action="append", default=[],
                         help="leaves a peer out; its ratios are then null")
    cases = [*(case.name for case in CASES), SLOW]
    rollout.add_argument("--cases", nargs="+", choices=cases, default=cases,
                         help="the other cases' figures are then null (default: all)")


def _rollout(args: argparse.Namespace) -> dict[str, Json]:
    pythons = {name: python_of(name, args.peers, getattr(args, f"{name.value}_python"))
               for name in PeerName if name.value not in args.without}
    # Before anything imports jax: the peers are compared with on the CPU.
    os.environ["JAX_PLATFORMS"] = "cpu"
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
