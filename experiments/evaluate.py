"""Evaluate a checkpoint: `python -m experiments.evaluate --config C --checkpoint DIR`.

DIR is a folder step_NNNNNNNNN, the checkpoints/ around it (the newest counts) or the run
folder. Every task of --split is played once sampled (temperature 1) and, unless eval.greedy
is False, once greedily, with the key that the run itself evaluates with. Only the weights are read.

--official scores as BFCL's own checker and plays by the benchmark's rules: at most 21 messages a
turn, a message that cannot be read ends its turn, a last turn that ran out of messages is
scored as it stands.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Sequence

from rods_jax import checkpoint, startup
from rods_jax.config import check_out, load, run_main, write_json
from rods_jax.rollout.engine import EngineConfig
from rods_jax.run_config import RunConfig
from rods_jax.tools.bfcl_env import MAX_STEPS
from rods_jax.tools.host import Outage, make_host
from rods_jax.tools.scoring import Mode, Scoring

SPLITS = ("held_in", "new_structures", "train")


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="python -m experiments.evaluate",
                                        description=__doc__)
    arguments.add_argument("--config", required=True, help="the config of the run")
    arguments.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    arguments.add_argument("--checkpoint", type=pathlib.Path, metavar="DIR",
                           help="default: the policy before training")
    arguments.add_argument("--split", choices=SPLITS, default="held_in")
    arguments.add_argument("--official", action="store_true", help="BFCL's checker and rules")
    arguments.add_argument("--json", metavar="FILE", help="result as JSON; - prints it last")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    config = load(args.config, args.set, RunConfig)
    if args.json and args.json != "-":
        check_out(args.json)
    if args.official:
        config = official(config)
    path = args.checkpoint
    step, host = checkpoint.read_host(path) if path else (0, None)
    print(json.dumps(startup.start(config.platform)), flush=True)
    found = evaluate_checkpoint(config, path, host, args.split)
    if args.json != "-":
        print(table(step, args.split, found))
    if args.json:
        write_json(args.json, {"step": step, "split": args.split,
                               "checkpoint": str(path) if path else None, **found})


def official(config: RunConfig) -> RunConfig:
    """The same run under the benchmark's scoring and turn limits."""
    return dataclasses.replace(
        config, tasks=dataclasses.replace(config.tasks, scoring=Scoring(Mode.OFFICIAL)),
        engine=EngineConfig(max_steps=MAX_STEPS, malformed_ends_turn=True, score_cut_turn=True))


def evaluate_checkpoint(config: RunConfig, path: pathlib.Path | None, host: dict | None,
                        split_name: str) -> dict[str, dict]:
    """{"sampled": ..., "greedy": ...}, each the fields of an EvalResult."""
    from rods_jax.evaluate import evaluate_ways  # after the platform is settled
    from rods_jax.policy import build, restored, split
    from rods_jax.rollout.engine import Engine
    from rods_jax.rollout.weights import make_weights
    from rods_jax.resume import FREE_OF_WEIGHTS, check_config
    if path:
        check_config(path, host, config, ("policy",), FREE_OF_WEIGHTS)
    parts = build(config)
    counts = {"train": config.tasks.seeds, "held_in": config.tasks.held_in,
              "new_structures": max(1, config.tasks.held_in // 2)}
    tasks = split(parts.suite, split_name, counts[split_name])
    params = restored(parts, config.policy, path) if path else parts.params
    decoder, weights = make_weights(parts.decoder, config.rollout_weights)
    params, _ = weights.publish(params)
    host = make_host(parts.suite, config.tasks.spec(), config.workers)
    engine = Engine(decoder, config.sampler, config.engine, parts.chat, parts.suite, host)
    try:
        found = evaluate_ways(engine, params, tasks, config.seed, config.eval.greedy)
    finally:
        host.close()
    return {way: dataclasses.asdict(result) for way, result in found.items()}


def table(step: int, split_name: str, found: dict[str, dict]) -> str:
    n_tasks = found["sampled"]["n_tasks"]
    lines = [f"step {step}, {n_tasks} tasks of {split_name} (%)",
             f"{'':10}{'mean progress':>20}{'full success':>16}"]
    for way, result in found.items():
        progress = f"{100 * result['progress']:.1f} +- {100 * result['progress_se']:.1f}"
        lines.append(f"{way:10}{progress:>20}{100 * result['success']:>16.1f}")
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main, user_errors=(ValueError, Outage))
