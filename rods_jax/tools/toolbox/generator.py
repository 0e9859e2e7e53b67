"""Profiles, the mix of difficulty, and the suite's fixed splits."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Sequence

from rods_jax.tools.toolbox.augment import augment_task
from rods_jax.tools.toolbox.entities import is_entity
from rods_jax.tools.toolbox.env import ToolboxEnv
from rods_jax.tools.toolbox.graph import DOMAINS, in_order, tool_names
from rods_jax.tools.toolbox.planner import Slot, make_plan, resolve, run_plan
from rods_jax.tools.toolbox.structure import (CallShape, call_shapes, depth, flatten,
                                              gold_results, words_of)
from rods_jax.tools.toolbox.writer import write_turns
from rods_jax.types import Category, Json, Plan, Task, ToolCall, Turn

MAX_TURNS, MAX_CALLS_A_TURN, MAX_DEPTH = 6, 4, 5
MAX_WORDS, MAX_ENTITIES = 230, 40


@dataclasses.dataclass(frozen=True)
class RequestedProfile:
    """What to generate. `calls`: gold calls of each turn of the BASE form (a category that
    withholds something adds one empty turn). `depth`: edges on the longest chain of calls
    in which each feeds the next."""

    domains: tuple[str, ...]
    calls: tuple[int, ...]
    depth: int
    category: Category = Category.BASE

    def __post_init__(self):
        in_order(self.domains)
        turns = len(self.calls) + (self.category in (Category.MISS_FUNC, Category.MISS_PARAM))
        if not self.domains or not self.calls or turns > MAX_TURNS:
            raise ValueError(f"a profile needs a domain and 1 to {MAX_TURNS} turns, got {self}")
        if min(self.calls) < 1 or max(self.calls) > MAX_CALLS_A_TURN or sum(self.calls) > 9:
            raise ValueError(f"a turn has 1 to {MAX_CALLS_A_TURN} calls, a task 9: {self}")
        if not 0 <= self.depth <= min(MAX_DEPTH, sum(self.calls) - 1):
            raise ValueError(f"depth must be 0 to {MAX_DEPTH} and below the calls: {self}")
        if len(self.domains) > sum(self.calls):
            raise ValueError(f"more domains than calls: {self}")


@dataclasses.dataclass(frozen=True)
class Band:
    """A range of profiles, ends included. `calls` counts the whole task."""

    turns: tuple[int, int]
    calls: tuple[int, int]
    depth: tuple[int, int]
    domains: tuple[int, int]


BANDS: dict[str, Band] = {
    "single": Band((1, 1), (1, 1), (0, 0), (1, 1)),
    "easy": Band((1, 2), (2, 3), (0, 2), (1, 2)),
    "middle": Band((2, 3), (3, 5), (1, 3), (1, 3)),
    "hard": Band((3, 5), (5, 7), (2, 4), (2, 4)),
    "extreme": Band((4, 6), (7, 9), (3, 5), (2, 4)),
}

# How often each band is drawn, by split. This table sets how hard the suite is.
MIX: dict[str, dict[str, int]] = {
    "train": {"single": 20, "easy": 40, "middle": 25, "hard": 11, "extreme": 4},
    "warm": {"single": 10, "easy": 30, "middle": 30, "hard": 20, "extreme": 10},
    "new_structures": {"single": 0, "easy": 60, "middle": 25, "hard": 10, "extreme": 5},
}
LIBRARY_SIZE: dict[str, int] = {
    "single": 24, "easy": 60, "middle": 80, "hard": 60, "extreme": 40,
}
SPLIT_SIZES: dict[str, int] = {"train": 400, "held_in": 400, "new_structures": 200, "warm": 150}


# ---------------------------------------------------------------- profiles


def draw_profile(band: Band, rng: random.Random, category: Category = Category.BASE,
                 ) -> RequestedProfile:
    """A profile within the band; categories that add a turn get one turn less."""
    added = category in (Category.MISS_FUNC, Category.MISS_PARAM)
    n_turns = min(rng.randint(*band.turns), MAX_TURNS - added)
    n_calls = min(max(rng.randint(*band.calls), n_turns), 9, n_turns * MAX_CALLS_A_TURN)
    calls = [1] * n_turns
    while sum(calls) < n_calls:
        i = rng.randrange(n_turns)
        calls[i] += calls[i] < MAX_CALLS_A_TURN
    asked_depth = min(rng.randint(*band.depth), n_calls - 1)
    # A chain spans two domains at most with ease; each call outside it may add one.
    most = n_calls - asked_depth + (asked_depth > 1)
    n_domains = min(rng.randint(*band.domains), most)
    domains = in_order(rng.sample(list(DOMAINS), n_domains))
    return RequestedProfile(domains, tuple(calls), asked_depth, category)


def slots_of_profile(profile: RequestedProfile, rng: random.Random) -> tuple[Slot, ...]:
    """Slots with one chain of the asked depth at random places, the rest free."""
    n = sum(profile.calls)
    chain = sorted(rng.sample(range(n), profile.depth + 1))
    before = {b: a for a, b in zip(chain, chain[1:])}
    adjacent = {a for a, b in zip(chain, chain[1:]) if b == a + 1}
    turns = [t for t, count in enumerate(profile.calls) for _ in range(count)]
    return tuple(
        Slot(turn=turns[i], feeds=frozenset({before[i]} if i in before else ()),
             follow=len(chain) - 1 - chain.index(i) if i in chain else 0,
             pause=i not in adjacent)
        for i in range(n)
    )


def slots_of_shapes(shapes: tuple[CallShape, ...]) -> list[Slot]:
    """Slots that ask for the same flows and remember the tools."""
    follow = [0] * len(shapes)
    for i in reversed(range(len(shapes))):
        for source in shapes[i].feeds:
            follow[source] = max(follow[source], follow[i] + 1)
    return [
        Slot(turn=s.turn, feeds=s.feeds, follow=follow[i], exact=True, said=s.said,
             again=s.again, tool=s.tool)
        for i, s in enumerate(shapes)
    ]


# ---------------------------------------------------------------- tasks


def task_of_plan(plan: Plan, rng: random.Random, uid: str = "toolbox-task") -> Task | None:
    """The BASE task of a plan, with texts; None where a call fails."""
    _, results = run_plan(plan)
    if any("error" in result for result in results):
        return None
    texts = write_turns(plan, rng)
    tools = tool_names(plan.domains)
    turns = tuple(
        Turn(text, tuple(ToolCall(c.name, resolve(c, results)) for c in calls), tools)
        for text, calls in zip(texts, plan.turns)
    )
    return Task(uid=uid, domains=plan.domains, category=Category.BASE,
                initial_config=plan.initial_config, turns=turns, scenario=scenario_of(plan))


def scenario_of(plan: Plan) -> str:
    """Names the world: two tasks share it only if they start from the same state."""
    text = json.dumps(plan.initial_config, sort_keys=True)
    return "world-" + hashlib.sha256(text.encode()).hexdigest()[:16]


def task_words(task: Task, results: Sequence[Json] | None = None) -> list[str]:
    """The words of the gold dialogue: texts, calls with their arguments, results (run here
    if not given)."""
    if results is None:
        results = [result for _, result, _ in gold_results(task)]
    words = [w for turn in task.turns for w in words_of(turn.user)]
    for turn in task.turns:
        for call in turn.gold:
            words += [call.name, *(w for v in call.arguments.values() for w in str(v).split())]
    return words + [w for result in results for w in flatten(result)]


def is_sound(task: Task) -> bool:
    """Gold replays to 1, all result texts differ (so that no gold call can be left out:
    fewer calls can never yield as many different texts), and the size limits hold."""
    env = ToolboxEnv(task)
    texts: list[str] = []
    while (turn := env.begin_turn()) is not None:
        for call in task.turns[turn.index].gold:
            texts += [r.text for r in env.execute((call,))]
        if not env.end_turn("done").passed:
            return False
    words = task_words(task, [json.loads(text) for text in texts])
    return (len(set(texts)) == len(texts) and len(words) <= MAX_WORDS
            and len({w for w in words if is_entity(w)}) <= MAX_ENTITIES)


def generate(profile: RequestedProfile, rng: random.Random, uid: str = "toolbox-task",
             tries: int = 200) -> Task:
    """A verified task of the profile. Raises ValueError where none was found: such a
    profile asks for a depth or a number of domains that its calls do not allow."""
    for _ in range(tries):
        slots = slots_of_profile(profile, rng)
        plan = make_plan(slots, profile.domains, profile.depth, rng, attempts=4)
        if plan is None:
            continue
        base = task_of_plan(plan, rng, uid)
        task = augment_task(base, profile.category, rng) if base else None
        if task is None or not is_sound(task):
            continue
        if depth(call_shapes(task, strict=True)) == profile.depth:
            return task
    raise ValueError(f"no task found for {profile}: ask for more calls or less depth")
