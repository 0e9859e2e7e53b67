"""What synthesis yields with the template writer: `python -m experiments.synthesis_study`.

Makes variants of each suite's training seeds through experiments.synthesize and counts: the
funnel, the structural distance to the seed, calls that could be left out (each accepted task
is played again here, once whole and once without each of its gold calls), functions used,
tasks that equal a held-in one in any form, and how much differs between a variant and its
seed. Prints Markdown tables; --out FILE puts them between the marks of that page. What was
made is kept in --dir: the same command goes on after an interruption.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import pathlib
import random
from collections.abc import Iterable, Mapping, Sequence

from experiments import synthesize
from experiments.docs_block import write_block
from rods_jax.config import UserError, run_main, write_json
from rods_jax.synthesis.execute import Executed, ExecuteFailure, run_plan
from rods_jax.synthesis.outcome import Candidate, Funnel, Outcome, Stage, outcome_from_json
from rods_jax.tasks.fingerprint import Fingerprint, fingerprint, masked_words
from rods_jax.tasks.leakage import root_scenario
from rods_jax.tasks.profile import base_form
from rods_jax.tasks.trace import scalars
from rods_jax.tools.env import Suite
from rods_jax.tools.suites import SuiteName, SuiteSpec, make_suite
from rods_jax.types import Category, Json, Task, Turn

FORMS = tuple(field.name for field in dataclasses.fields(Fingerprint))
# Gold arguments by the kind of thing that they name; what is in no row is "other".
KINDS: Mapping[str, tuple[str, ...]] = {
    "people": ("user", "username", "receiver_id", "user_name", "username_to_follow", "name",
               "mentioned_usernames", "first_name", "last_name", "contact"),
    "files": ("file", "folder", "file_name", "dir_name", "source", "destination", "copy",
              "file_name1", "file_name2", "path"),
    "symbols": ("symbol", "stock", "sector"),
    "cities": ("city", "location", "travel_from", "travel_to", "cityA", "cityB"),
    "amounts": ("amount", "price", "value", "budget_limit", "insurance_cost", "fuelAmount",
                "liter", "gallon", "distance", "numbers", "a", "b", "speed"),
    "dates": ("date", "travel_date", "date_of_birth"),
    "ids": ("booking_id", "order_id", "ticket_id", "tweet_id", "message", "booking", "bill",
            "payment", "trip", "hold", "card_id", "access_token", "pin", "passport_number",
            "password"),
}
WRITTEN = 32
PLANS = 100  # of each suite, that are written WRITTEN times
_KIND_OF = {argument: kind for kind, arguments in KINDS.items() for argument in arguments}


@dataclasses.dataclass(frozen=True)
class Study:
    """Shares in 0..1. `funnel` is of the attempts up to the `count`-th accepted variant."""

    suite: str
    funnel: Funnel
    accepted_per_s: float
    exact: float  # accepted variants at distance 0 from their seed
    gold_fails: int  # accepted variants that their own gold does not score 1.0
    idle_calls: int  # gold calls without which an accepted variant still scores 1.0
    calls: int  # gold calls of the accepted variants
    functions: Mapping[str, int]  # of gold traces: accepted variants that use each
    more_functions: Mapping[str, int]  # the same of functions that no gold trace uses
    held_in_only: tuple[str, ...]  # functions of gold that no training seed uses
    n_leaks: int  # variants looked at for leakage
    leaks: Mapping[str, int]  # equal to a held-in task, by form; "sibling" by its scenario
    other_functions: float  # variants whose function multiset differs from the seed's
    other_state: float  # variants whose initial state differs from the seed's
    other_values: Mapping[str, tuple[float, int]]  # by kind: share not in the seed, values
    booking_ids: tuple[int, int]  # distinct, all, of bookings that a variant makes
    wordings: float  # distinct masked texts per variant
    wordings_of_plan: Mapping[str, tuple[float, int, int]]  # of WRITTEN texts of one plan, by its
    # number of calls: distinct masked ones (mean, least), plans


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.synthesis_study",
                                     description=__doc__)
    parser.add_argument("--suites", nargs="+", choices=("toolbox", "bfcl"),
                        default=("toolbox", "bfcl"))
    parser.add_argument("--count", type=int, default=2000,
                        help="accepted variants of each suite; default %(default)s")
    parser.add_argument("--leakage", type=int, default=10_000, help="accepted variants that are "
                        "compared with held-in tasks, all suites together, those of --count "
                        "among them, the rest from the first suite; default %(default)s")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of all random draws")
    parser.add_argument("--dir", type=pathlib.Path, default=pathlib.Path("runs/synthesis_study"),
                        help="keeps the variants; another version of the program needs another "
                        "one; default %(default)s")
    parser.add_argument("--out", metavar="FILE", help="page that takes the tables")
    parser.add_argument("--json", metavar="FILE", help="figures as JSON; - prints them last")
    args = parser.parse_args(argv)
    for name in ("count", "workers"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} is {getattr(args, name)}: give at least 1")
    more = max(args.leakage - args.count * len(args.suites), 0)
    studies = [study(name, args.count, 0 if i else more, args.workers, args.seed, args.dir)
               for i, name in enumerate(args.suites)]
    page = tables(studies)
    print(page)
    if args.out:
        write_block(args.out, "synthesis_study", page)
    if args.json:
        write_json(args.json, {"suites": [as_json(s) for s in studies]})


def study(name: str, count: int, more: int, workers: int, seed: int,
          folder: pathlib.Path) -> Study:
    """Makes `count` + `more` variants and measures; only leakage looks at the last `more`."""
    suite = make_suite(SuiteSpec(SuiteName(name)))
    outcomes, per_s = _make(name, count, more, workers, seed, folder)
    funnel = Funnel()
    for outcome in _until(outcomes, count):
        funnel.add(outcome)
    every = [o for o in outcomes if isinstance(o, Candidate)]
    made = every[:count]
    seeds = {task.uid: task for task in suite.split("train")}
    gold_fails, idle_calls, calls = _played(suite, [c.task for c in made])
    used = collections.Counter(name for c in made for name in set(_names(c.task)))
    known, ids = _gold_functions(suite), _booking_ids(c.task for c in made)
    leaks = _leaks(suite, [c.task for c in every])
    return Study(
        suite=name, funnel=funnel, accepted_per_s=per_s,
        exact=_share(c.distance == 0 for c in made),
        gold_fails=gold_fails, idle_calls=idle_calls, calls=calls,
        functions={name: used[name] for name in known},
        more_functions={name: used[name] for name in sorted(set(used) - set(known))},
        held_in_only=_held_in_only(suite), n_leaks=len(every), leaks=leaks,
        other_functions=_share(_names(c.task) != _names(seeds[c.seed]) for c in made),
        other_state=_share(c.task.initial_config != seeds[c.seed].initial_config for c in made),
        other_values=_other_values(made, seeds), booking_ids=(len(set(ids)), len(ids)),
        wordings=len({fingerprint(c.task).masked for c in made}) / max(len(made), 1),
        wordings_of_plan=_wordings_of_plan(suite, seed))


def _make(name: str, count: int, more: int, workers: int, seed: int,
          folder: pathlib.Path) -> tuple[list[Outcome], float]:
    """All outcomes, and accepted variants a second of the first `count`. What a finished run
    left in the folder is used again."""
    folder.mkdir(parents=True, exist_ok=True)
    out, speed = folder / f"{name}.jsonl", folder / f"{name}.json"
    common = ["--suite", name, "--workers", str(workers), "--seed", str(seed), "--out", str(out)]
    if not speed.exists():
        synthesize.main([*common, "--count", str(count), "--json", str(speed)])
    if more:
        synthesize.main([*common, "--count", str(count + more)])
    journal = out.with_name(out.name + ".journal").read_text(encoding="utf-8")
    outcomes = [outcome_from_json(json.loads(line)) for line in journal.splitlines()[1:]]
    return outcomes, json.loads(speed.read_text(encoding="utf-8"))["accepted_per_s"]


def _until(outcomes: Iterable[Outcome], count: int) -> Iterable[Outcome]:
    for outcome in outcomes:
        yield outcome
        count -= isinstance(outcome, Candidate)
        if not count:
            return


def _share(hits: Iterable[bool]) -> float:
    row = list(hits)
    return sum(row) / max(len(row), 1)


# ---------------------------------------------------------------- is every call needed


def _played(suite: Suite, tasks: Sequence[Task]) -> tuple[int, int, int]:
    """Tasks that their gold does not pass, calls that are not needed, all calls. Played here
    on the environment itself; the critique's own replay has no part in it."""
    fails = idle = calls = 0
    for task in tasks:
        n = sum(len(turn.gold) for turn in task.turns)
        fails += _score(suite, task, None) < 1.0
        idle += sum(_score(suite, task, drop) == 1.0 for drop in range(n))
        calls += n
    return fails, idle, calls


def _score(suite: Suite, task: Task, drop: int | None) -> float:
    """Share of turns that pass when all gold calls but one are made; what comes after a turn
    that failed is not played."""
    env, flat = suite.make_env(task), 0
    while (turn := env.begin_turn()) is not None:
        for call in task.turns[turn.index].gold:
            if flat != drop:
                env.execute((call,))
            flat += 1
        if not env.end_turn(suite.gold_reply(task, turn.index)).passed:
            return turn.index / len(task.turns)
    return 1.0


# ---------------------------------------------------------------- functions


def _names(task: Task) -> collections.Counter[str]:
    return collections.Counter(call.name for turn in task.turns for call in turn.gold)


def _all_gold(suite: Suite) -> dict[str, list[Task]]:
    return {name: list(suite.split(name)) for name in suite.split_names}


def _gold_functions(suite: Suite) -> list[str]:
    return sorted({name for split in _all_gold(suite).values() for task in split
                   for name in _names(task)})


def _held_in_only(suite: Suite) -> tuple[str, ...]:
    splits = _all_gold(suite)
    train = {name for task in splits["train"] for name in _names(task)}
    return tuple(sorted({name for split in splits.values() for task in split
                         for name in _names(task)} - train))


# ---------------------------------------------------------------- leakage


def _leaks(suite: Suite, tasks: Sequence[Task]) -> dict[str, int]:
    held_in = [task for name in suite.held_out for task in suite.split(name)]
    prints = [fingerprint(task) for task in held_in]
    held = {form: {getattr(p, form) for p in prints} - {None} for form in FORMS}
    scenarios = {root_scenario(task.scenario) for task in held_in}
    found = dict.fromkeys((*FORMS, "sibling"), 0)
    for task in tasks:
        own = fingerprint(task)
        for form in FORMS:
            found[form] += getattr(own, form) in held[form]
        found["sibling"] += root_scenario(task.scenario) in scenarios
    return found


# ---------------------------------------------------------------- variety


def _other_values(made: Sequence[Candidate], seeds: Mapping[str, Task]
                  ) -> dict[str, tuple[float, int]]:
    """By kind: the share of gold argument values that the seed's gold does not hold."""
    new, all_ = collections.Counter(), collections.Counter()
    for candidate in made:
        old = {str(v) for turn in base_form(seeds[candidate.seed]).turns for call in turn.gold
               for v in scalars(dict(call.arguments))}
        for turn in candidate.task.turns:
            for call in turn.gold:
                for argument, whole in call.arguments.items():
                    kind = _KIND_OF.get(argument, "other")
                    for value in scalars(whole):
                        all_[kind] += 1
                        new[kind] += str(value) not in old
    return {kind: (new[kind] / all_[kind], all_[kind]) for kind in (*KINDS, "other")
            if all_[kind]}


def _booking_ids(tasks: Iterable[Task]) -> list[str]:
    """Of bookings that the variant makes itself, one for each variant: its first."""
    found = []
    for task in tasks:
        state = json.dumps(dict(task.initial_config))
        made = [str(call.arguments["booking_id"]) for turn in task.turns for call in turn.gold
                if "booking_id" in call.arguments]
        found += [booking for booking in made if booking not in state][:1]
    return found


def _wordings_of_plan(suite: Suite, seed: int) -> dict[str, tuple[float, int, int]]:
    seeds = suite.split("train")
    distinct = collections.defaultdict(list)
    for task in seeds[::max(len(seeds) // PLANS, 1)]:
        rng = random.Random(f"{seed}-{task.uid}")
        run = run_plan(suite.plan(task, rng), suite)
        if isinstance(run, ExecuteFailure):
            continue
        texts = {tuple(masked_words(_told(run, suite.write(run.plan, run.result_objects(), rng))))
                 for _ in range(WRITTEN)}
        n = sum(map(len, run.calls))
        distinct[str(n) if n < 5 else "5 and more"].append(len(texts))
    return {n: (sum(row) / len(row), min(row), len(row)) for n, row in sorted(distinct.items())}


def _told(run: Executed, texts: Sequence[str]) -> Task:
    turns = tuple(Turn(text, calls, ()) for text, calls in zip(texts, run.calls, strict=True))
    return Task("told", run.plan.domains, Category.BASE, run.plan.initial_config, turns, "told")


# ---------------------------------------------------------------- output


def tables(studies: Sequence[Study]) -> str:
    parts = []
    for s in studies:
        parts += [f"### {s.suite}", _summary(s), _funnel(s), _variety(s), _coverage(s)]
    total = sum(s.n_leaks for s in studies)
    rows = [f"| {form} | {sum(s.leaks[form] for s in studies)} |" for form in (*FORMS, "sibling")]
    parts += ["### Held-in leakage", "\n".join([
        f"{total} accepted variants (" + ", ".join(f"{s.suite} {s.n_leaks}" for s in studies)
        + ") against all held-in tasks:", "", "| equal in | variants |", "|---|---|", *rows])]
    return "\n\n".join(parts)


def _summary(s: Study) -> str:
    return (f"{s.funnel.accepted} accepted of {s.funnel.attempts} attempts "
            f"({100 * s.funnel.accepted_share:.1f} %); {100 * s.exact:.1f} % of the accepted at "
            f"profile distance 0. Played again: {s.gold_fails} tasks do not score 1.0 for their "
            f"own gold; of {s.calls} gold calls {s.idle_calls} could be left out.")


def _funnel(s: Study) -> str:
    left, lines = s.funnel.attempts, ["| stage | left | lost, by reason |", "|---|---|---|",
                                      f"| attempts | {s.funnel.attempts} | |"]
    for stage in Stage:
        lost = {r: n for (at, r), n in sorted(s.funnel.rejected.items()) if at is stage}
        left -= sum(lost.values())
        lines.append(f"| {stage.value} | {left} | "
                     + ", ".join(f"{reason} {n}" for reason, n in lost.items()) + " |")
    return "\n".join(lines)


def _variety(s: Study) -> str:
    lines = ["| what differs from the seed | |", "|---|---|",
             f"| other functions | {100 * s.other_functions:.1f} % of variants |",
             f"| other initial state | {100 * s.other_state:.1f} % of variants |"]
    lines += [f"| {kind} in gold arguments | {100 * share:.1f} % of {n} values |"
              for kind, (share, n) in s.other_values.items()]
    if s.booking_ids[1]:
        lines.append("| first booking made | {} ids in {} variants |".format(*s.booking_ids))
    lines.append(f"| wordings, entities masked | {s.wordings:.3f} distinct a variant |")
    lines += ["", f"| calls of a plan | plans | distinct among {WRITTEN} wordings of it, entities "
              "masked: mean | least |", "|---|---|---|---|"]
    lines += [f"| {n} | {plans} | {mean:.1f} | {least} |"
              for n, (mean, least, plans) in s.wordings_of_plan.items()]
    return "\n".join(lines)


def _coverage(s: Study) -> str:
    used = sum(n > 0 for n in s.functions.values())
    row = ", ".join(f"{name} {n}" for name, n in s.functions.items())
    without = [name for name, n in s.functions.items() if not n]
    text = (f"Functions: {used} of the {len(s.functions)} that gold traces use have an accepted "
            f"variant (variants a function): {row}.")
    if s.more_functions:
        text += (f" Besides, {len(s.more_functions)} that no gold trace uses: "
                 + ", ".join(f"{name} {n}" for name, n in s.more_functions.items()) + ".")
    if without:
        text += (f" Without one: {', '.join(without)}"
                 + ("; no training seed uses them." if set(without) <= set(s.held_in_only)
                    else f"; of these no training seed uses "
                         f"{', '.join(sorted(set(without) & set(s.held_in_only))) or 'any'}."))
    return text


def as_json(s: Study) -> dict[str, Json]:
    fields = {f.name: getattr(s, f.name) for f in dataclasses.fields(s)}
    return fields | {"funnel": s.funnel.to_json(), "accepted_share": s.funnel.accepted_share}


if __name__ == "__main__":
    run_main(main, user_errors=(ValueError,))
