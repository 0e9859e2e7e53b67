"""Look at task sets: `python -m experiments.tasks --suite bfcl COMMAND`, see COMMAND --help.

    list             splits, categories, suspect tasks, how much held-in tasks share with training
    show UID         one task: texts, gold calls, their results, its structural profile
    graph [DOMAIN]   which tool's results feed which tool's arguments, found by running the gold
    check            whether the gold of every task scores 1 and fits the declared tools
    export           a split as JSON lines and as a TensorFlow Datasets data set
    life RUN [UID]   what became of the tasks of a run's pool: counts by event, or one task's life

`--suite custom --factory module:function` looks at tools of your own, see docs/new_domain.md.
`check` exits with 1 where a task is not sound.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rods_jax.config import UserError, check_out, run_main, write_json
from rods_jax.tasks.api_graph import api_graph
from rods_jax.tasks.check import faults, verdict
from rods_jax.tasks.jsonl import read_tasks, read_tools, write_tasks, write_tools
from rods_jax.tasks.leakage import crossing
from rods_jax.tasks.profile import profile
from rods_jax.tasks.replay import replay
from rods_jax.tools.bulk import Played
from rods_jax.tools.env import Suite
from rods_jax.tools.host import HostConfig, Outage
from rods_jax.tools.suites import SplitRule, SuiteName, SuiteSpec, make_suite
from rods_jax.tools.workers import WorkerPool
from rods_jax.types import CATEGORIES, Json, Task, ToolCall

LONGEST = 300  # characters of a result that `show` prints
MOST = 20  # lines of one kind that `check` prints


def _common() -> argparse.ArgumentParser:
    """Options that may stand before or after the command."""
    options = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    options.add_argument("--suite", choices=[name.value for name in SuiteName],
                         help="default: toolbox")
    options.add_argument("--factory", metavar="MODULE:FUNCTION", help="of suite custom")
    options.add_argument("--split-rule", choices=[rule.value for rule in SplitRule],
                         help="of suite bfcl; default: grouped")
    options.add_argument("--split-seed", type=int, metavar="N", help="of suite bfcl; default: 0")
    options.add_argument("--json", metavar="FILE", help="result as JSON; - prints it last")
    return options


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m experiments.tasks", description=__doc__,
                                  formatter_class=argparse.RawDescriptionHelpFormatter,
                                  parents=[_common()], allow_abbrev=False)
    top.set_defaults(suite=SuiteName.TOOLBOX.value, factory="", json=None, split_seed=0,
                     split_rule=SplitRule.GROUPED.value)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run, **options) -> argparse.ArgumentParser:
        command = commands.add_parser(name, parents=[_common()], allow_abbrev=False, **options)
        command.set_defaults(run=run)
        return command

    add("list", list_splits, help="splits, categories, suspects, crossing")
    one = add("show", show, help="one task with results and profile")
    one.add_argument("uid")
    one.add_argument("--tasks", metavar="FILE", help="look in this file, not in the suite's splits")
    found = add("graph", graph, help="which results feed which arguments")
    found.add_argument("domain", nargs="?", help="default: all")
    found.add_argument("--split", default="train", metavar="NAME")
    found.add_argument("--tasks", metavar="FILE", help="these tasks in place of a split")
    found.add_argument("--gates", action="store_true", help="also which call must come first")
    checked = add("check", check, help="does every gold score 1")
    checked.add_argument("--tasks", metavar="FILE", help="these tasks in place of all splits")
    checked.add_argument("--call-s", type=float, default=HostConfig.call_s, metavar="SECONDS",
                         help="a call may take; a whole task six times that (default 10)")
    checked.add_argument("--tools", metavar="FILE", help="declared tools in place of the suite's")
    out = add("export", export, help="write a split to files")
    out.add_argument("--split", action="append", required=True, metavar="NAME",
                     help="give it again for several")
    out.add_argument("--out", type=pathlib.Path, metavar="FILE.jsonl", help="tasks, one a line")
    out.add_argument("--tfds", type=pathlib.Path, metavar="DIR", help="array_record data set")
    out.add_argument("--tools", type=pathlib.Path, metavar="FILE.jsonl", help="the suite's tools")
    lived = add("life", life, help="what became of a run's tasks")
    lived.add_argument("folder", type=pathlib.Path, metavar="RUN")
    lived.add_argument("uid", nargs="?", help="default: how many events of each kind")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.json and args.json != "-":
        check_out(args.json)
    suite = make_suite(suite_spec(args))
    text, found, code = args.run(suite, args)
    if args.json != "-":
        print(text)
    if args.json:
        write_json(args.json, found)
    return code


def suite_spec(args: argparse.Namespace) -> SuiteSpec:
    return SuiteSpec(SuiteName(args.suite), args.factory, split=SplitRule(args.split_rule),
                     split_seed=args.split_seed)


def every_task(suite: Suite) -> dict[str, Task]:
    """uid -> task: those of all splits, and of a benchmark those in none."""
    tasks = [task for name in suite.split_names for task in suite.split(name)]
    return {task.uid: task for task in (*getattr(suite, "tasks", ()), *tasks)}


def _read(path: str) -> list[Task]:
    tasks = read_tasks(path)
    if not tasks:
        raise UserError(f"{path}: holds no task; give at least one")
    return tasks


# ------------------------------------------------------------------- commands


def list_splits(suite: Suite, args: argparse.Namespace) -> tuple[str, Json, int]:
    rows = {}
    for name in suite.split_names:
        tasks = suite.split(name)
        counts = Counter(task.category for task in tasks)
        rows[name] = {"tasks": len(tasks), "suspects": len(_suspects(suite, tasks)),
                      "categories": {c.value: counts[c] for c in CATEGORIES}}
    heads = ("split", "tasks", *(c.value for c in CATEGORIES), "suspect")
    lines = [f"{heads[0]:16}" + "".join(f"{head:>14}" for head in heads[1:])]
    for name, row in rows.items():
        cells = (row["tasks"], *row["categories"].values(), row["suspects"])
        lines.append(f"{name:16}" + "".join(f"{cell:>14}" for cell in cells))
    shares = _crossings(suite, args)
    lines += [f"{share:.1%} of {split} have a sibling in train"
              + (f" where the split rule is {rule}" if len(shares) > 1 else "")
              for rule, of_split in shares.items() for split, share in of_split.items()]
    return "\n".join(lines), {"suite": suite.name, "splits": rows, "crossing": shares}, 0


def _suspects(suite: Suite, tasks: Sequence[Task]) -> list[str]:
    """uids of tasks whose gold may not be derivable: of BFCL the ones known by hand, of other
    suites those whose gold holds a text that nobody said or returned."""
    if suite.name == SuiteName.BFCL.value:
        from rods_jax.tools.bfcl import SUSPECT
        return [task.uid for task in tasks if task.uid in SUSPECT]
    return [task.uid for task in tasks if verdict(task, suite).unsaid]


def _crossings(suite: Suite, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """By split rule (of BFCL both) and held-out split."""
    suites = {"own": suite}
    if suite.name == SuiteName.BFCL.value:
        suites = {rule.value: make_suite(SuiteSpec(SuiteName.BFCL, split=rule,
                                                   split_seed=args.split_seed))
                  for rule in SplitRule}
    return {rule: {name: crossing(made.split("train"), made.split(name))
                   for name in made.held_out} for rule, made in suites.items()}


def show(suite: Suite, args: argparse.Namespace) -> tuple[str, Json, int]:
    known = {t.uid: t for t in _read(args.tasks)} if args.tasks else every_task(suite)
    task = _known(known, args.uid)
    played, measured = replay(suite, task), profile(task, suite)
    found = verdict(task, suite, played)
    results = iter(played.results)
    lines = [f"{task.uid}: {task.category.value}, domains {', '.join(task.domains)}, scenario "
             f"{task.scenario}, {task.source.value}"]
    before: set[str] = set()
    for t, (turn, outcome) in enumerate(zip(task.turns, played.outcomes, strict=True)):
        new = [name for name in turn.tools if name not in before]
        brings = f", new: {', '.join(new)}" if t and new else ""
        before = set(turn.tools)
        lines += [f"turn {t}, {len(turn.tools)} tools{brings}",
                  f"  user: {turn.user or '(says nothing)'}"]
        for call in turn.gold:
            lines += [f"  {call_text(call)}", f"    {_cut(next(results).text)}"]
        lines.append(f"  {'passed' if outcome.passed else 'NOT passed'}")
    lines += [str(measured), f"left to look up or infer: {', '.join(found.unsourced) or 'nothing'}"]
    return "\n".join(lines), {
        "task": task.to_json(), "results": [r.text for r in played.results],
        "progress": played.progress, "profile": measured.to_json(),
        "unsourced": list(found.unsourced), "unsaid": list(found.unsaid)}, 0


def graph(suite: Suite, args: argparse.Namespace) -> tuple[str, Json, int]:
    tasks = _read(args.tasks) if args.tasks else suite.split(args.split)
    found = api_graph(tasks, suite, gates=args.gates)
    found = found.of_domain(args.domain) if args.domain else found
    return str(found), found.to_json(), 0


def check(suite: Suite, args: argparse.Namespace) -> tuple[str, Json, int]:
    tasks = _read(args.tasks) if args.tasks else list(every_task(suite).values())
    tools = read_tools(args.tools) if args.tools else suite.tools(suite.domains)
    verdicts = {task.uid: verdict(task, suite, played)
                for task, played in zip(tasks, _played(suite, tasks, args), strict=True)}
    unsound = [v for v in verdicts.values() if not v.sound]
    errors = [f"task {v.uid}: {error}" for v in verdicts.values() for error in v.errors]
    unsaid = [f"task {v.uid}: {text}" for v in verdicts.values() for text in v.unsaid]
    wrong = faults(tasks, tools)
    # A document that the tools themselves do not go by is a remark, not a broken task.
    remarks = [str(f) for f in wrong if f.accepted_by_tools(verdicts[f.uid])]
    broken = [str(f) for f in wrong if not f.accepted_by_tools(verdicts[f.uid])]
    n_open = sum(bool(v.unsourced) for v in verdicts.values())
    lines = [f"{len(tasks)} tasks, {len(tools)} tools: the gold of {len(verdicts) - len(unsound)} "
             "scores 1"]
    lines += _some("gold does not score 1", [
        f"task {v.uid}: {v.progress:.2f}, {v.reason}" for v in unsound])
    lines += _some("tasks and tools do not fit", broken)
    lines += _some("gold that its tools accept and their documents do not", remarks)
    lines += _some("gold calls answered with an error", errors)
    lines += _some("texts of four words or more that nobody said or returned", unsaid)
    if suite.name == SuiteName.BFCL.value:
        lines.append(f"{n_open} tasks leave some argument to be looked up or inferred (see show)")
    else:
        lines += _some("arguments that nobody said and no call returned, to be looked up or inferred",
                       [f"task {v.uid}: {', '.join(v.unsourced)}" for v in verdicts.values()
                        if v.unsourced])
    return "\n".join(lines), {
        "tasks": len(tasks), "tools": len(tools), "sound": len(verdicts) - len(unsound),
        "unsound": {v.uid: {"progress": v.progress, "reason": v.reason} for v in unsound},
        "faults": broken, "remarks": remarks, "errors": errors,
        "suspects": {v.uid: list(v.unsaid) for v in verdicts.values() if v.unsaid},
        "unsourced": {v.uid: list(v.unsourced) for v in verdicts.values() if v.unsourced},
    }, int(bool(unsound or broken or errors))


def _played(suite: Suite, tasks: Sequence[Task], args: argparse.Namespace) -> list[Played]:
    """The gold of every task, in a worker process: a tool nobody has tried yet may hang."""
    pool = WorkerPool(suite_spec(args), HostConfig(count=1, call_s=args.call_s))
    try:
        return pool.play_many([(task, None) for task in tasks])
    finally:
        pool.close()


def export(suite: Suite, args: argparse.Namespace) -> tuple[str, Json, int]:
    if not (args.out or args.tfds or args.tools):
        raise UserError("nothing to write: give --out FILE.jsonl, --tfds DIR or --tools FILE.jsonl")
    if args.out and len(args.split) > 1:
        raise UserError(f"--out takes one split, given are {', '.join(args.split)}: export each "
                        "to its own file")
    if args.out and args.out == args.tools:
        raise UserError(f"{args.out} is given for tasks and for tools: give each its own file")
    for path in (args.out, args.tools):
        if path:
            check_out(path)
    splits = {name: suite.split(name) for name in args.split}
    found: dict[str, Json] = {"splits": {name: len(tasks) for name, tasks in splits.items()}}
    lines = []
    for path, write, rows, noun in ((args.out, write_tasks, splits[args.split[0]], "tasks"),
                                    (args.tools, write_tools, suite.tools(suite.domains), "tools")):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, rows)
            lines.append(f"{len(rows)} {noun} in {path}")
    if args.tfds:
        from rods_jax.tasks.tfds_builder import prepare_tasks
        check_out(args.tfds, folder=True)
        prepare_tasks(args.tfds, suite.name, splits)
        lines.append(f"data set {suite.name} in {args.tfds}, splits {', '.join(splits)}: read it "
                     f"with rods_jax.tasks.tfds_builder.load_tasks")
    for name in ("out", "tfds", "tools"):
        found[name] = str(getattr(args, name)) if getattr(args, name) else None
    return "\n".join(lines), found, 0


def life(suite: Suite, args: argparse.Namespace) -> tuple[str, Json, int]:
    from rods_jax import ledger  # brings jax in, which no other command needs
    path = args.folder / ledger.FILE
    if not path.is_file():
        raise UserError(f"{path}: missing; name the folder of a run that experiments.train wrote")
    lives = ledger.lives(path)
    if args.uid is None:
        counts = ledger.tally(event for events in lives.values() for event in events)
        lines = [f"{kind:28}{n:>8}" for kind, n in sorted(counts.items())]
        return "\n".join([f"{len(lives)} tasks", *lines]), {"tasks": len(lives),
                                                            "events": dict(counts)}, 0
    events = _known(lives, args.uid)
    lines = [f"{args.uid}: {len(events)} events"]
    for event in events:
        details = (f"{name} {value}" for name, value in event.items()
                   if name not in ("step", "epoch", "event"))
        lines.append(f"step {event['step']:>6}  epoch {event['epoch']:>4}  {event['event']:10}"
                     f"{', '.join(details)}".rstrip())
    return "\n".join(lines), {"task": args.uid, "events": events}, 0


def _known(found: Mapping[str, Any], uid: str) -> Any:
    """What is found under a uid; where there is nothing, UserError with some that are there."""
    if uid not in found:
        near = [name for name in found if uid in name][:5] or list(found)[:5]
        raise UserError(f"no task {uid!r}: {len(found)} are known, such as {', '.join(near)}")
    return found[uid]


# ------------------------------------------------------------------- words


def call_text(call: ToolCall) -> str:
    arguments = (f"{key}={json.dumps(value, ensure_ascii=False)}"
                 for key, value in call.arguments.items())
    return f"{call.name}({', '.join(arguments)})"


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ... ({len(text)} characters)"


def _some(title: str, rows: Sequence[str]) -> list[str]:
    """A heading with the first rows, nothing where there are none."""
    more = [f"  and {len(rows) - MOST} more, all with --json"] if len(rows) > MOST else []
    return [f"{title}: {len(rows)}", *(f"  {row}" for row in rows[:MOST]), *more] if rows else []


if __name__ == "__main__":
    run_main(main, user_errors=(ValueError, Outage))
