"""Will it fit? `python -m experiments.memory_plan --config C --topology v5e:2x4 [--set a.b=v ...]`.

Compiles the programs of the config's run, the update and those of the rollouts, for the
devices of --topology and prints what each takes of a device's memory, and the FLOPs of a
step's updates. No TPU is needed, nor weights and tokenizer: of a policy in Hugging Face form
a folder with its config.json will do. Takes minutes for a model of billions.

--topology: a TPU's, for which libtpu must be installed; `cpu`, this machine; `gpu`, the one
that is here. Exit code 1, with the figures, where a program leaves less than a tenth of the
memory free (see rods_jax/plan.py for what counts).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rods_jax import topology
from rods_jax.config import check_out, load, run_main, write_json
from rods_jax.run_config import RunConfig
from rods_jax.types import Json

if TYPE_CHECKING:
    from rods_jax.plan import Account, Plan

COLUMNS = ("arguments", "temporaries", "outputs", "beside", "peak")


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="python -m experiments.memory_plan",
                                        description=__doc__)
    arguments.add_argument("--config", required=True, help="a file below configs/")
    arguments.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    arguments.add_argument("--topology", required=True, metavar="NAME",
                           help="v5e:2x4, v6e:2x4, v5p:2x2x2, ..., cpu or gpu")
    arguments.add_argument("--json", metavar="FILE", help="result as JSON; - prints it last")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    config = load(args.config, args.set, RunConfig)
    if args.json not in (None, "-"):
        check_out(args.json)
    found = topology.find(args.topology)
    from rods_jax.plan import make_plan  # after the platform is settled
    print(head(found), flush=True)
    plan = make_plan(config, found, lambda name, account: print(row(name, account), flush=True))
    print("\n".join(verdict(plan)))
    if args.json:
        write_json(args.json, as_json(plan))
    return 0 if plan.fits else 1


def head(found: topology.Topology) -> str:
    columns = "".join(f"{name:>13}" for name in COLUMNS)
    return (f"{found.name}: {len(found.devices)} x {found.kind}, {found.memory_bytes / 1e9:.2f} "
            f"GB for programs each. GB on a device:\n{'program':<18}{columns}")


def row(name: str, account: Account) -> str:
    if account.refused:
        return f"{name:<18} refused: {account.refused}"
    cells = "".join(f"{getattr(account, column) / 1e9:13.3f}" for column in COLUMNS)
    return f"{name:<18}{cells}   compiled in {account.compile_s:.0f} s"


def verdict(plan: Plan) -> list[str]:
    from rods_jax.plan import SPARE
    flops, total = plan.flops, plan.topology.memory_bytes
    refused = [name for name, account in plan.accounts.items() if account.refused]
    said = "fits" if plan.fits else "does not fit"
    tera = lambda n: f"{n / 1e12:,.2f}"  # noqa: E731
    return [
        f"peak {plan.peak_bytes / 1e9:.2f} GB of {total / 1e9:.2f} GB (programs' code, "
        f"{plan.code / 1e9:.2f} GB, in it), {plan.free_fraction:.1%} free: {said}; a run fits "
        f"where {SPARE:.0%} stay free" + (f" and no program is refused, as {', '.join(refused)} "
                                          "was" if refused else ""),
        f"updates of a step, 10^12 FLOPs: {tera(flops.needed)} needed (forward "
        f"{tera(flops.forward)}, backward {tera(flops.backward)}, reference "
        f"{tera(flops.reference)}); computed again: layers {tera(flops.layers_again)}, attention "
        f"{tera(flops.attention_again)}, head {tera(flops.head_again)}"]


def as_json(plan: Plan) -> Json:
    flops = plan.flops
    return {
        "topology": plan.topology.name, "kind": plan.topology.kind,
        "devices": len(plan.topology.devices), "memory_bytes": plan.topology.memory_bytes,
        "peak_bytes": plan.peak_bytes, "free_fraction": plan.free_fraction, "fits": plan.fits,
        "code_bytes": plan.code,
        "programs": {name: dataclasses.asdict(account) | {"peak": account.peak}
                     for name, account in plan.accounts.items()},
        "flops": dataclasses.asdict(flops) | {"needed": flops.needed, "computed": flops.computed},
    }


if __name__ == "__main__":
    run_main(main, user_errors=(ValueError,))
