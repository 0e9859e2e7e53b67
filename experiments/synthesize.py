"""Synthesize variants of seed tasks: `python -m experiments.synthesize --count 1000 --out FILE`.

Seeds are the suite's training split, or the tasks of --seeds FILE. Writes the accepted tasks
to --out, one JSON object a line, and keeps FILE.journal beside it: the same command after an
interruption goes on where it was, and a larger --count adds to what is there.

With --writer llm or --judge a language model behind an endpoint writes the texts or judges
them, such as that of `vllm serve Qwen/Qwen3-32B`: give --base-url http://localhost:8000/v1
--model Qwen/Qwen3-32B.
"""

from __future__ import annotations

import signal

SIGNALS = (signal.SIGINT, signal.SIGTERM)
if __name__ == "__main__":  # what comes while modules load waits for `_run`
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

import argparse
import hashlib
import pathlib
import sys
import time
from collections.abc import Sequence

from rods_jax.config import (UserError, check_out, parse_override, run_main, to_json, typed,
                             write_json)
from rods_jax.synthesis.journal import Journal
from rods_jax.synthesis.novelty import Known
from rods_jax.synthesis.offline import synthesize_many
from rods_jax.synthesis.outcome import Candidate, Funnel
from rods_jax.synthesis.pipeline import OnOutage, OutageError, SynthesisConfig, make_maker
from rods_jax.synthesis.writers import WriterKind
from rods_jax.tasks.jsonl import read_tasks, write_tasks
from rods_jax.tasks.leakage import HeldOutGuard
from rods_jax.tools.env import Suite
from rods_jax.tools.suites import SuiteName, SuiteSpec, make_suite
from rods_jax.types import Json, Task


def parser() -> argparse.ArgumentParser:
    defaults = SynthesisConfig()
    arguments = argparse.ArgumentParser(prog="python -m experiments.synthesize",
                                        description=__doc__)
    arguments.add_argument("--suite", choices=("toolbox", "bfcl"), default="toolbox")
    arguments.add_argument("--seeds", metavar="FILE", help="seed tasks (JSON lines); default: "
                           "the suite's training split")
    arguments.add_argument("--held-in", metavar="FILE", help="tasks that no variant may equal; "
                           "default: the suite's held-in splits")
    arguments.add_argument("--count", type=int, default=1000, help="accepted tasks wanted")
    arguments.add_argument("--max-attempts", type=int, help="give up after so many; "
                           "default 20 x count")
    arguments.add_argument("--out", type=pathlib.Path, required=True, metavar="FILE")
    arguments.add_argument("--seed", type=int, default=0, help="of all random draws")
    arguments.add_argument("--workers", type=int, default=1, help="processes; changes no result")
    arguments.add_argument("--k-max", type=int, default=defaults.k_max)
    arguments.add_argument("--max-rewrites", type=int, default=defaults.max_rewrites)
    arguments.add_argument("--max-distance", type=float, default=defaults.max_profile_distance,
                           help="largest structural distance to the seed, 0 to 1")
    model = arguments.add_argument_group("a language model behind an OpenAI-compatible endpoint")
    model.add_argument("--writer", choices=[kind.value for kind in WriterKind],
                       default=defaults.writer.value, help="of the user texts")
    model.add_argument("--judge", action="store_true",
                       help="the model also judges what passed the rules")
    model.add_argument("--base-url", default="", metavar="URL",
                       help="for instance http://localhost:8000/v1")
    model.add_argument("--model", default="", metavar="NAME", help="for instance Qwen/Qwen3-32B")
    model.add_argument("--api-key-env", default="", metavar="NAME",
                       help="the environment variable that holds the key")
    model.add_argument("--on-outage", choices=[what.value for what in OnOutage],
                       default=defaults.on_outage.value, help="when the endpoint fails")
    model.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE",
                       help="any other field of the endpoint, as in --set timeout_s=300")
    arguments.add_argument("--json", metavar="FILE", help="result as JSON; - prints it last")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 1 where no task was accepted."""
    args = parser().parse_args(argv)
    if args.writer == WriterKind.POLICY.value:
        raise UserError("--writer policy is the model that a training run trains, and there is "
                        "none here: export a checkpoint (experiments.export), serve it, for "
                        "instance with vLLM, and give --writer llm --base-url URL --model NAME")
    for name in ("count", "workers", "max_attempts"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}: give at least 1")
    if str(args.out) == "-":
        raise UserError("--out is -: the tasks go to a file with a journal beside it, give its name")
    for path in (args.out, args.json):
        if path and path != "-":
            check_out(path)
    suite = make_suite(SuiteSpec(SuiteName(args.suite)))
    seeds = _read(args.seeds, suite) if args.seeds else list(suite.split("train"))
    held_in = (_read(args.held_in, suite) if args.held_in else
               [task for name in suite.held_out for task in suite.split(name)])
    config = _config(args)
    header = {"suite": args.suite, "seed": args.seed, "seeds": _digest(seeds),
              "held_in": _digest(held_in), "config": _decisive(config)}
    maker = make_maker(suite, config, HeldOutGuard(held_in), args.seed)
    with Journal(args.out.with_name(args.out.name + ".journal"), header) as journal:
        run = _Run(journal.outcomes, args.count)
        for outcome in synthesize_many(
                seeds, args.count, maker, Known((*seeds, *held_in)), done=journal.outcomes,
                workers=args.workers, max_attempts=args.max_attempts):
            journal.append(outcome)
            run.add(outcome)
    run.end()
    tasks = run.tasks[:args.count]
    if tasks:
        write_tasks(args.out, tasks)
    if args.json:
        write_json(args.json, run.result() | {"out": str(args.out) if tasks else None})
    if args.json != "-":
        print(f"{run.funnel}\n{len(tasks)} tasks in {args.out if tasks else 'all'}")
    if len(tasks) < args.count:
        print(f"only {len(tasks)} of {args.count} tasks were found in {run.funnel.attempts} "
              f"attempts{run.mostly()}: give other or more seeds or a larger --max-attempts",
              file=sys.stderr)
    return int(not tasks)


def _read(path: str, suite: Suite) -> list[Task]:
    """The tasks of a file, which are to be the suite's."""
    if pathlib.Path(path).is_dir():
        raise UserError(f"{path}: is a folder; give a file of tasks (JSON lines)")
    tasks = read_tasks(path)
    if not tasks:
        raise UserError(f"{path}: holds no task; give at least one, or leave the option out")
    for task in tasks:
        if other := sorted(set(task.domains) - set(suite.domains)):
            raise UserError(f"{path}: task {task.uid} is of {other[0]}, which suite {suite.name} "
                            "has not; give tasks of that suite, or another --suite")
    return tasks


def _config(args: argparse.Namespace) -> SynthesisConfig:
    endpoint = {"base_url": args.base_url, "model": args.model, "api_key_env": args.api_key_env}
    for text in args.set:
        name, value = parse_override(text)
        if endpoint.get(name, value) not in ("", value):
            raise UserError(f"--set {text} contradicts {endpoint[name]!r}, given before: give "
                            f"{name} once")
        endpoint[name] = value
    return typed(SynthesisConfig, {
        "k_max": args.k_max, "max_rewrites": args.max_rewrites,
        "max_profile_distance": args.max_distance, "writer": args.writer, "judge": args.judge,
        "endpoint": endpoint, "on_outage": args.on_outage}, "synthesize")


def _decisive(config: SynthesisConfig) -> dict[str, Json]:
    """What the outcomes depend on; settings of the language model only where one is asked, so
    that journals written before there was one can be gone on with."""
    values = to_json(config)
    endpoint = values.pop("endpoint")
    asked = {name: values.pop(name) for name in ("writer", "judge", "on_outage")}
    if config.asks:
        values |= asked | {name: endpoint[name] for name in (
            "model", "temperature", "max_tokens", "thinking", "use_reasoning")}
    return values


def _digest(tasks: list[Task]) -> str:
    names = "\n".join(f"{task.uid} {task.content_hash}" for task in tasks)
    return hashlib.sha256(names.encode()).hexdigest()[:24]


class _Run:
    """Counts and the progress line, over what the journal held and what is added."""

    def __init__(self, done, count: int):
        self.funnel, self.tasks, self._count = Funnel(), [], count
        self._began, self._shown, self._new = time.monotonic(), time.monotonic(), 0
        for outcome in done:
            self._take(outcome)

    def _take(self, outcome) -> None:
        self.funnel.add(outcome)
        if isinstance(outcome, Candidate):
            self.tasks.append(outcome.task)

    def add(self, outcome) -> None:
        self._take(outcome)
        self._new += isinstance(outcome, Candidate)
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if now - self._shown > (0.2 if terminal else 10.0):
            self._shown = now
            print(self._line(), end="" if terminal else "\n", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._new:
            print(self._line(), file=sys.stderr, flush=True)

    def mostly(self) -> str:
        """Why most of the attempts failed that did, if any did."""
        if not self.funnel.rejected:
            return ""
        ((stage, reason), n), = self.funnel.rejected.most_common(1)
        return f", {n} of them lost at stage {stage.value} ({reason})"

    @property
    def per_s(self) -> float:
        return self._new / max(time.monotonic() - self._began, 1e-9)

    def _line(self) -> str:
        done = len(self.tasks)
        filled = 24 * done // self._count
        left = (self._count - done) / self.per_s if self._new else float("inf")
        minutes, seconds = divmod(round(min(left, 359999)), 60)
        return (f"{chr(13) if sys.stderr.isatty() else ''}[{'#' * filled:<24}] {done}/{self._count}"
                f" tasks, {self.funnel.accepted_share:.0%} of attempts, {self.per_s:.0f} a second,"
                f" {minutes}:{seconds:02d} left ")

    def result(self) -> dict[str, Json]:
        return {"accepted": self.funnel.accepted, "accepted_share": self.funnel.accepted_share,
                "accepted_per_s": self.per_s, "funnel": self.funnel.to_json()}


def _run() -> int:
    signal.signal(signal.SIGTERM, _terminate)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    return main()


def _terminate(number: int, frame) -> None:
    print("terminated: the same command goes on with what is in the journal", file=sys.stderr)
    sys.exit(128 + number)


if __name__ == "__main__":
    run_main(_run, user_errors=(ValueError, OutageError))
