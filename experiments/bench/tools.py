"""BFCL tasks replayed and scored, here and in bfcl-eval.

The gold calls of all 800 BFCL multi-turn tasks are replayed and scored here (official scoring)
and with the checker of the package bfcl-eval, task by task in turn, in one process and one
run, which ends with an error if any verdict is not "valid". Here the rollouts of a task
share one run of its gold calls, so they are played as training does, in groups of 16: "group"
is the mean over a group, "first" its first rollout alone.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import decimal
import gc
import importlib
import importlib.util
import json
import pathlib
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from rods_jax.config import UserError
from rods_jax.tasks.replay import Replay, Transcript, gold_transcript, play
from rods_jax.tools import bfcl_data
from rods_jax.tools.bfcl import BFCLSuite
from rods_jax.tools.env import Suite
from rods_jax.tools.host import HostConfig
from rods_jax.tools.scoring import Mode, Scoring
from rods_jax.tools.suites import SuiteName, SuiteSpec
from rods_jax.tools.workers import WorkerPool
from rods_jax.types import CATEGORIES, Json, Task, ToolResult, TurnOutcome

WORKERS = 2
GROUP = 16  # rollouts a task (paper: K)
ALL = "all"


# ------------------------------------------------------------------------- the two sides


OFFICIAL = Scoring(Mode.OFFICIAL)


def official_suite() -> BFCLSuite:
    return BFCLSuite(OFFICIAL)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A task as the package's files have it. `gold`: turns of call texts."""

    row: dict[str, Json]
    gold: list[list[str]]


class Package:
    """bfcl-eval itself. What its calls leave behind in the process goes away with `clean`,
    so that every task meets it as on the first day. Raises ValueError where it is absent."""

    def __init__(self):
        if importlib.util.find_spec(bfcl_data.PACKAGE) is None:
            raise ValueError(f"this needs the bfcl-eval package: {bfcl_data.INSTALL}")
        source = bfcl_data.PACKAGE + ".eval_checker.multi_turn_eval."
        self.utils = importlib.import_module(source + "multi_turn_utils")
        self._checker = importlib.import_module(source + "multi_turn_checker")
        constants = vars(importlib.import_module(source + "func_source_code.long_context"))
        self._shared = [(value, copy.deepcopy(value)) for name, value in constants.items()
                        if not name.startswith("_") and isinstance(value, (dict, list))]
        self._post_tweet = bfcl_data.tool_class("TwitterAPI").post_tweet
        self._mp = bfcl_data.tool_module("MathAPI").mpmath.mp
        self._precision = (self._mp.dps, decimal.getcontext().prec)

    def check(self, entry: Entry, transcript: Sequence[Sequence[Sequence[str]]]) -> bool:
        """The package's verdict on turns of steps of call texts, steps without calls left out
        (its decoder does that). It may raise where a state has become cyclic."""
        category = entry.row["id"].rsplit("_", 1)[0]
        found = self._checker.multi_turn_checker(
            transcript, entry.gold, entry.row, category, "bench")
        return found["valid"]

    def clean(self) -> None:
        """Drops every instance and puts back what the tool classes share and change."""
        leaks = vars(self.utils)
        for name in [name for name in leaks if name.endswith("_instance")]:
            del leaks[name]
        for value, saved in self._shared:
            if value == saved:
                continue
            value.clear()
            fresh = copy.deepcopy(saved)
            value.update(fresh) if isinstance(value, dict) else value.extend(fresh)
        self._post_tweet.__defaults__ = ([], [])
        self._mp.dps, decimal.getcontext().prec = self._precision


def entries() -> dict[str, Entry]:
    """All 800 rows of the package's files by task id."""
    spec = importlib.util.find_spec(bfcl_data.PACKAGE)
    data = pathlib.Path(spec.submodule_search_locations[0]) / "data"
    found = {}
    for category in CATEGORIES:
        name = f"BFCL_v4_multi_turn_{category.value}.json"
        rows, answers = ([json.loads(line) for line in path.read_text().splitlines()]
                         for path in (data / name, data / "possible_answer" / name))
        gold = {answer["id"]: answer["ground_truth"] for answer in answers}
        found |= {row["id"]: Entry(row, gold[row["id"]]) for row in rows}
    return found


def one_step_a_turn(task: Task) -> Transcript:
    """The gold calls of a turn as one step: the cheapest way through the package."""
    return [[turn.gold] for turn in task.turns]


# ------------------------------------------------------------------------- tools


@dataclasses.dataclass(frozen=True)
class Pass:
    """Seconds a rollout of each task, summed by category."""

    group: dict[str, float]
    first: dict[str, float]
    package: dict[str, float]


def bench_tools(repeats: int) -> dict[str, Json]:
    suite, package, rows = official_suite(), Package(), entries()
    tasks = list(suite.tasks)
    rng = random.Random(0)
    passes, alone, spread = [], [], []
    with ours_in_workers(tasks, WORKERS) as run:
        for counted in range(-1, repeats):  # the first pass fills caches
            rng.shuffle(tasks)
            timed = interleaved(package, rows, tasks)
            gc.collect()  # what the other sides left behind is not ours to pay
            # Twice each: idle workers have lost their place in the caches, this process has not.
            solo, both = ([side() for _ in range(2)][1]
                          for side in (lambda: ours_alone(suite, tasks), run))
            if counted >= 0:
                passes.append(timed)
                alone.append(solo)
                spread.append(both)
    return {**figures(passes, alone, spread),
            "repeats": repeats, "shares": shares(suite, tasks),
            "parse_seconds": parse_seconds(rows.values())}


def interleaved(package: Package, rows: dict[str, Entry], tasks: Sequence[Task]) -> Pass:
    """Every task on both sides, a group here and once there, who goes first in turn. Cleaning
    the package is not counted, and neither is the reading of gold texts, which `tasks` hold
    already parsed."""
    group, first, theirs = ({c.value: 0.0 for c in CATEGORIES} for _ in range(3))
    suite = official_suite()  # which has scored no task yet

    def here(task: Task) -> None:
        for rollout in range(GROUP):
            start = time.perf_counter()
            valid = play(suite, task, one_step_a_turn(task)).valid
            seconds = time.perf_counter() - start
            group[task.category.value] += seconds / GROUP
            if rollout == 0:
                first[task.category.value] += seconds
            _expect(valid, task, "here")

    def there(task: Task) -> None:
        entry = rows[task.uid]
        transcript = [[calls] if calls else [] for calls in entry.gold]
        start = time.perf_counter()
        valid = package.check(entry, transcript)
        theirs[task.category.value] += time.perf_counter() - start
        package.clean()
        _expect(valid, task, "in bfcl-eval")

    for i, task in enumerate(tasks):
        for side in (here, there) if i % 2 else (there, here):
            side(task)
    return Pass(group, first, theirs)


def _expect(valid: bool, task: Task, where: str) -> None:
    if not valid:
        raise UserError(f"the gold calls of {task.uid} are not valid {where}: the figures would "
                        f"not compare; install the known version: {bfcl_data.INSTALL}")


def ours_alone(suite: Suite, tasks: Sequence[Task]) -> float:
    """Seconds for all tasks in this process, nothing in between; the work of a worker."""
    start = time.perf_counter()
    for task in tasks:
        play(suite, task, gold_transcript(task))
    return time.perf_counter() - start


# ---------------------------------------------------------------- tools: worker processes


@contextlib.contextmanager
def ours_in_workers(tasks: Sequence[Task], workers: int) -> Iterator[Callable[[], float]]:
    """A function that replays and scores all tasks in worker processes and says how many
    seconds that took. Before it is counted they are up and have the tasks."""
    pool = WorkerPool(SuiteSpec(SuiteName.BFCL, scoring=OFFICIAL), HostConfig(count=workers))

    def run() -> float:
        start = time.perf_counter()
        found = pool.play_many([(task, None) for task in tasks], texts=False)
        seconds = time.perf_counter() - start
        for task, one in zip(tasks, found, strict=True):
            _expect(isinstance(one, Replay) and one.valid, task, "in a worker")
        return seconds

    try:
        for _ in range(2):  # any task may go to any worker
            run()
        yield run
    finally:
        pool.close()


# ---------------------------------------------------------------- tools: what bounds it


class _Clocked:
    """An environment that adds the seconds of its methods to `clock`."""

    def __init__(self, make: Callable[[], object], clock: dict[str, float]):
        self._clock = clock
        self._env = self._timed("set_up", make)

    def _timed(self, name: str, run: Callable, *args):
        start = time.perf_counter()
        try:
            return run(*args)
        finally:
            self._clock[name] += time.perf_counter() - start

    def begin_turn(self):
        return self._env.begin_turn()

    def execute(self, calls) -> tuple[ToolResult, ...]:
        return self._timed("agent_calls", self._env.execute, calls)

    def end_turn(self, said: str) -> TurnOutcome:
        return self._timed("gold_calls_and_comparison", self._env.end_turn, said)


class _ClockedSuite:
    def __init__(self, suite: Suite, clock: dict[str, float]):
        self.gold_reply = suite.gold_reply
        self.make_env = lambda task: _Clocked(lambda: suite.make_env(task), clock)


def shares(suite: Suite, tasks: Sequence[Task]) -> dict[str, float]:
    """Where our time goes, in a pass of its own: shares of 1."""
    clock: dict[str, float] = collections.defaultdict(float)
    clocked = _ClockedSuite(suite, clock)
    start = time.perf_counter()
    for task in tasks:
        play(clocked, task, one_step_a_turn(task))
    total = time.perf_counter() - start
    clock["rest"] = total - sum(clock.values())
    return {name: seconds / total for name, seconds in clock.items()}


def parse_seconds(rows: Iterable[Entry]) -> float:
    """Seconds to parse all gold texts to calls, which the package does while it runs them."""
    start = time.perf_counter()
    for entry in rows:
        for calls in entry.gold:
            for text in calls:
                bfcl_data.parse_gold(text)
    return time.perf_counter() - start


# ---------------------------------------------------------------- tools: figures


def figures(passes: Sequence[Pass], alone: Sequence[float], spread: Sequence[float],
            ) -> dict[str, Json]:
    """Medians over the passes. `seconds` are of one rollout of every task (`group`, `first`,
    `package`: interleaved in one process; `alone`, `two_workers`: uninterrupted).
    ratio_one_process: package / group; ratio_first: package / first; ratio_two_workers:
    alone / two_workers."""
    names = [c.value for c in CATEGORIES]
    count = bfcl_data.N_SCENARIOS
    per_category = {}
    for name in (*names, ALL):
        parts = names if name == ALL else [name]
        sums = {side: [sum(getattr(p, side)[part] for part in parts) for p in passes]
                for side in ("group", "first", "package")}
        group, first, package = (statistics.median(s) for s in sums.values())
        tasks = count * len(parts)
        per_category[name] = {
            "tasks": tasks, "seconds": {"group": group, "first": first, "package": package},
            "tasks_per_s": tasks / group, "first_tasks_per_s": tasks / first,
            "package_tasks_per_s": tasks / package,
            "ratio": package / group, "ratio_first": package / first,
            "ratio_range": _range(sums["package"], sums["group"]),
            "ratio_first_range": _range(sums["package"], sums["first"]),
        }
    total = per_category.pop(ALL)
    seconds = total["seconds"] | {"alone": statistics.median(alone),
                                  "two_workers": statistics.median(spread)}
    return {
        "ratio_one_process": total.pop("ratio"), **total,
        "ratio_two_workers": seconds["alone"] / seconds["two_workers"],
        "ratio_two_workers_range": _range(alone, spread),
        "per_category": per_category, "seconds": seconds,
    }


def _range(slow: Sequence[float], fast: Sequence[float]) -> list[float]:
    ratios = [a / b for a, b in zip(slow, fast, strict=True)]
    return [min(ratios), max(ratios)]


def tools_table(found: dict[str, Json]) -> str:
    line = "{:14}{:>8}{:>8}{:>12}{:>15}{:>8}   {}".format
    span = "{:.2f} to {:.2f}".format
    lines = [f"gold calls of {found['tasks']} BFCL multi-turn tasks replayed and scored, medians "
             f"of {found['repeats']}",
             line("rollouts/s", "group", "first", "bfcl-eval", "ratio: first", "group", "range")]
    for name, row in (*found["per_category"].items(), (ALL, found)):
        ratio = row.get("ratio", found["ratio_one_process"])
        rates = (f"{row[f'{side}tasks_per_s']:.0f}" for side in ("", "first_", "package_"))
        lines.append(line(name, *rates, f"{row['ratio_first']:.2f}", f"{ratio:.2f}",
                          span(*row["ratio_range"])))
    rate = found["tasks"] / found["seconds"]["two_workers"]
    lines.append(f"two workers    {rate:.0f} rollouts/s, {found['ratio_two_workers']:.2f} times "
                 f"one process ({span(*found['ratio_two_workers_range'])})")
    spent = sorted(found["shares"].items(), key=lambda item: -item[1])
    lines.append("time here goes to " + ", ".join(
        f"{name.replace('_', ' ')} {100 * share:.0f} %" for name, share in spent))
    lines.append(f"not counted: parsing of all gold texts here, {found['parse_seconds']:.2f} s "
                 "(the package parses while it runs)")
    return "\n".join(lines)

