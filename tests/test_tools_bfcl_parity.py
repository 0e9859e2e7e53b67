"""The BFCL adapter against the package bfcl-eval: result texts and verdicts, all 800 tasks."""

from __future__ import annotations

import collections
import functools
import importlib.util
import json
import pathlib
import random
import sys
from collections.abc import Callable, Sequence

import pytest
from bfcl_package import Reference, call_text, reference

from experiments.bench.tools import OFFICIAL, official_suite
from rods_jax.tasks.replay import Replay, Transcript, play, replay
from rods_jax.tools import bfcl_data
from rods_jax.tools.host import HostConfig
from rods_jax.tools.suites import SuiteName, SuiteSpec
from rods_jax.tools.workers import WorkerPool
from rods_jax.types import Category, Json, Task, ToolCall

SUITE = official_suite()
TASKS = SUITE.tasks
Turns = list[list[ToolCall]]
# Plays transcripts, each of its task and in this order; None is the task's gold.
Runner = Callable[[Sequence[tuple[Task, "Transcript | None"]]], Sequence[Replay]]


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Reference:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BFCL_PROJECT_ROOT", str(tmp_path_factory.mktemp("bfcl")))
        yield reference()


def in_process(items: Sequence[tuple[Task, Transcript | None]]) -> list[Replay]:
    return [replay(SUITE, task) if transcript is None else play(SUITE, task, transcript)
            for task, transcript in items]


def one_call_a_step(turns: Turns) -> Transcript:
    return [[(call,) for call in calls] for calls in turns]


def played(task: Task, turns: Turns) -> Replay:
    return play(SUITE, task, one_call_a_step(turns))


@functools.cache
def pool() -> WorkerPool:
    """One for both orders, so that each worker has played most tasks before."""
    return WorkerPool(SuiteSpec(SuiteName.BFCL, scoring=OFFICIAL), HostConfig(count=2))


def in_workers(items: Sequence[tuple[Task, Transcript | None]]) -> list[Replay]:
    return pool().play_many(items)


RUNNERS: dict[str, Runner] = {"in_process": in_process, "in_workers": in_workers}


def test_the_reference_writes_nothing(package):
    folder = pathlib.Path(importlib.util.find_spec("bfcl_eval").submodule_search_locations[0])
    assert not {"result", "score", ".file_locks"} & {p.name for p in folder.iterdir()}
    assert "bfcl_eval.utils" not in sys.modules


# ------------------------------------------------------------------------- result texts


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("run", RUNNERS.values(), ids=RUNNERS)
def test_texts_of_all_gold_calls_equal_the_packages(run, seed, package):
    """Twice, in another order each time: nothing may stay from one task to the next."""
    order = list(TASKS)
    random.Random(seed).shuffle(order)
    n_calls = 0
    for task, ours in zip(order, run([(task, None) for task in order]), strict=True):
        assert [r.text for r in ours.results] == package.gold_texts(task), task.uid
        assert ours.valid, task.uid
        n_calls += len(ours.results)
    assert n_calls == 4625


# ------------------------------------------------------------------------- damage
# Each kind takes a generator, the task and its gold calls by turn (lists of its own, to change)
# and returns the damaged transcripts; none where the task does not lend itself.


def _places(turns: Turns, fits: Callable[[ToolCall], bool] = lambda call: True):
    return [(t, c) for t, calls in enumerate(turns) for c, call in enumerate(calls) if fits(call)]


def every_call_dropped(rng: random.Random, task: Task, turns: Turns) -> list[Turns]:
    """One transcript a call."""
    return [[calls[:c] + calls[c + 1:] if at == t else calls for at, calls in enumerate(turns)]
            for t, c in _places(turns)]


def duplicated(rng: random.Random, task: Task, turns: Turns) -> list[Turns]:
    t, c = rng.choice(_places(turns))
    turns[t].insert(c, turns[t][c])
    return [turns]


def reordered(rng: random.Random, task: Task, turns: Turns) -> list[Turns]:
    long = [calls for calls in turns if any(call != calls[0] for call in calls)]
    if not long:
        return []
    calls = rng.choice(long)
    before = list(calls)
    while calls == before:
        rng.shuffle(calls)
    return [turns]


def _other(rng: random.Random, value: Json) -> Json:
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + rng.choice((1, -1, 0.5))
    if isinstance(value, str):
        return rng.choice((value + "x", value[:-1], value.upper(), value + " "))
    if isinstance(value, list):
        return rng.choice((value[:-1], value + value[:1], value[::-1]))
    return {}


def argument_changed(rng: random.Random, task: Task, turns: Turns) -> list[Turns]:
    places = _places(turns, lambda call: bool(call.arguments))
    if not places:
        return []
    t, c = rng.choice(places)
    call = turns[t][c]
    name = rng.choice(list(call.arguments))
    turns[t][c] = ToolCall(
        call.name, {**call.arguments, name: _other(rng, call.arguments[name])})
    return [turns]


def _is_int(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def int_as_float(rng: random.Random, task: Task, turns: Turns) -> list[Turns]:
    places = _places(turns, lambda call: any(map(_is_int, call.arguments.values())))
    if not places:
        return []
    t, c = rng.choice(places)
    call = turns[t][c]
    turns[t][c] = ToolCall(call.name, {
        k: float(v) if _is_int(v) else v for k, v in call.arguments.items()})
    return [turns]


def ended_early(rng: random.Random, task: Task, turns: Turns) -> list[Turns]:
    return [turns[:rng.randrange(len(turns))]]


def extra_turn(rng: random.Random, task: Task, turns: Turns) -> list[Turns]:
    return [[*turns, rng.choice(([], list(turns[-1])))]]


def moved_on(rng: random.Random, task: Task, turns: Turns) -> list[Turns]:
    """A call is made at the start of the turn after its own."""
    places = [(t, c) for t, c in _places(turns) if t + 1 < len(turns)]
    if not places:
        return []
    t, c = rng.choice(places)
    turns[t + 1].insert(0, turns[t].pop(c))
    return [turns]


def moved_ahead(rng: random.Random, task: Task, turns: Turns) -> list[Turns]:
    """A call is made at the end of the turn before its own."""
    places = [(t, c) for t, c in _places(turns) if t > 0]
    if not places:
        return []
    t, c = rng.choice(places)
    turns[t - 1].append(turns[t].pop(c))
    return [turns]


def call_where_none_is_wanted(rng: random.Random, task: Task, turns: Turns) -> list[Turns]:
    """In a turn without gold calls: one of another turn, or of a tool that needs nothing."""
    empty = [t for t, calls in enumerate(turns) if not calls]
    if not empty:
        return []
    t = rng.choice(empty)
    visible = set(task.turns[t].tools)
    free = [ToolCall(spec.name, {}) for spec in SUITE.tools(task.domains)
            if spec.name in visible and not spec.parameters.get("required")]
    gold = [call for calls in turns for call in calls if call.name in visible]
    turns[t].append(rng.choice(rng.choice([pool for pool in (free, gold) if pool])))
    return [turns]


def silent_turn(rng: random.Random, task: Task, turns: Turns) -> list[Turns]:
    rng.choice([calls for calls in turns if calls]).clear()
    return [turns]


def failing_call_added(rng: random.Random, task: Task, turns: Turns) -> list[Turns]:
    t, c = rng.choice(_places(turns))
    call = turns[t][c]
    turns[t].insert(c, rng.choice((
        ToolCall("no_such_tool", {}),
        ToolCall(call.name, {**call.arguments, "no_such_argument": 1}),
        ToolCall(call.name, dict.fromkeys(call.arguments)))))
    return [turns]


def several(rng: random.Random, task: Task, turns: Turns) -> list[Turns]:
    """Two or three kinds on top of each other."""
    kinds = (duplicated, reordered, argument_changed, int_as_float, moved_on, moved_ahead,
             call_where_none_is_wanted, failing_call_added)
    for kind in rng.sample(kinds, rng.choice((2, 3))):
        for damaged in kind(rng, task, [list(calls) for calls in turns]):
            turns = damaged
    return [turns]


BOTH, INVALID = {True, False}, {False}
# Kind -> how many transcripts the 800 tasks give, and the verdicts that occur.
DAMAGE = {
    every_call_dropped: (4625, BOTH), duplicated: (800, BOTH), reordered: (651, BOTH),
    argument_changed: (800, BOTH), int_as_float: (396, BOTH), ended_early: (800, INVALID),
    extra_turn: (800, INVALID), moved_on: (788, INVALID), moved_ahead: (794, BOTH),
    call_where_none_is_wanted: (404, BOTH), silent_turn: (800, INVALID),
    failing_call_added: (800, BOTH), several: (800, BOTH),
}


def _damaged(kind) -> list[tuple[Task, Turns]]:
    return [(task, turns) for task in TASKS for turns in kind(
        random.Random(f"{kind.__name__} {task.uid}"), task, [list(t.gold) for t in task.turns])]


def _before_its_release(task: Task, turns: Turns) -> bool:
    """Whether a call uses a tool whose document its turn does not show yet."""
    return any(call.name not in turn.tools and call.name in task.turns[-1].tools
               for turn, calls in zip(task.turns, turns, strict=False) for call in calls)


@pytest.mark.parametrize("kind", [pytest.param(
    kind, marks=[pytest.mark.slow] if kind is every_call_dropped else []) for kind in DAMAGE],
    ids=lambda kind: kind.__name__)
def test_verdicts_and_texts_of_damaged_transcripts_equal_the_packages(kind, package):
    jobs = _damaged(kind)
    found: collections.Counter[bool] = collections.Counter()
    for task, turns in jobs:
        ours = played(task, turns)
        verdict = package.valid(task, turns)
        found[verdict] += 1
        assert ours.valid is verdict, (task.uid, turns)
        texts = package.texts(task, [[call_text(call) for call in calls]
                                     for calls in turns[:len(task.turns)]])
        assert [r.text for r in ours.results] == texts, (task.uid, turns)
    early = sum(_before_its_release(*job) for job in jobs)
    print(f"{kind.__name__}: {len(jobs)} transcripts, {found[True]} valid, {found[False]} "
          f"invalid, {early} with a call before its tool's release")
    total, verdicts = DAMAGE[kind]
    assert len(jobs) == total and set(found) == verdicts
    # The checker withholds a tool's document and not the tool, so these are worth a look too.
    assert (early > 0) is (kind in (moved_ahead, several))


# ------------------------------------------------------------------------- where they differ


def _with(task: Task, after: str, *calls: ToolCall) -> Turns:
    """The gold calls, and `calls` behind the first call of the tool `after`."""
    turns = [list(turn.gold) for turn in task.turns]
    t, c = next((t, c) for t, c in _places(turns) if turns[t][c].name == after)
    turns[t][c + 1:c + 1] = calls
    return turns


def _by_uid(uid: str) -> Task:
    return next(task for task in TASKS if task.uid == uid)


@pytest.mark.parametrize("name", ["cp", "mv"])
def test_a_directory_into_itself_is_refused_where_the_package_loses_it(name, package):
    task = _by_uid("multi_turn_base_7")
    made = next(call for turn in task.turns for call in turn.gold if call.name == "mkdir")
    folder = made.arguments["dir_name"]
    turns = _with(task, "mkdir", ToolCall(name, {"source": folder, "destination": folder}))
    assert played(task, turns).valid and not package.valid(task, turns)


def test_a_shared_record_is_private_where_the_package_lets_gold_see_it(package):
    """Long-context cards: in the package the agent's payment also lowers the gold balance."""
    task = _by_uid("multi_turn_long_context_151")
    assert task.category is Category.LONG_CONTEXT
    flat = [call for turn in task.turns for call in turn.gold]
    booked = next(i for i, call in enumerate(flat) if call.name == "book_flight")
    booking = json.loads(replay(SUITE, task).results[booked].text)["booking_id"]
    card = next(iter(bfcl_data.tool_module("TravelAPI").CREDIT_CARD_EXTENSION))
    turns = _with(task, "book_flight", ToolCall("purchase_insurance", {
        "access_token": flat[booked].arguments["access_token"], "insurance_type": "x",
        "booking_id": booking, "insurance_cost": 10.0, "card_id": card}))
    assert package.valid(task, turns) and not played(task, turns).valid
