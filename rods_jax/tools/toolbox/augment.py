"""Turns a BASE task into one that withholds a tool, withholds a value or clutters the world."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from rods_jax.tools.toolbox import phrases
from rods_jax.tools.toolbox.entities import Maker
from rods_jax.tools.toolbox.graph import TOOLS
from rods_jax.tools.toolbox.structure import flatten, gold_results, words_of
from rods_jax.tools.toolbox.world import make_world, world_config
from rods_jax.types import Category, PlannedCall, Task, ToolCall, Turn

CLUTTER = (6, 12)  # extra entries a cluttered world lists in all
_CLUTTER_KIND = {"files": "file", "messaging": "message", "bookings": "trip",
                 "payments": "bill"}


def augment_task(task: Task, category: Category, rng: random.Random,
                 turn: int | None = None) -> Task | None:
    """The same story in another category; None where it does not lend itself. `turn`
    fixes where the empty turn goes. Raises ValueError if `task` is not BASE."""
    if task.category != Category.BASE:
        raise ValueError(f"augment needs a base task, {task.uid} is {task.category.value}")
    if category == Category.BASE:
        return task
    if category == Category.LONG_CONTEXT:
        return _clutter(task, rng)
    turns = [turn] if turn is not None else rng.sample(range(len(task.turns)), len(task.turns))
    make = _withhold_tool if category == Category.MISS_FUNC else _withhold_value
    for index in turns:
        if index < len(task.turns):
            changed = make(task, index, rng)
            if changed is not None:
                return dataclasses.replace(task, category=category, turns=changed)
    return None


def _withhold_tool(task: Task, index: int, rng: random.Random) -> tuple[Turn, ...] | None:
    """Turn `index` lacks a tool that it needs and no turn before does; then it appears."""
    before = {c.name for t in task.turns[:index] for c in t.gold}
    names = sorted({c.name for c in task.turns[index].gold} - before)
    if not names:
        return None
    name = rng.choice(names)

    def without(turn: Turn) -> tuple[str, ...]:
        return tuple(t for t in turn.tools if t != name)

    early = [dataclasses.replace(t, tools=without(t)) for t in task.turns[:index]]
    asked = task.turns[index]
    empty = dataclasses.replace(asked, gold=(), tools=without(asked))
    return (*early, empty, dataclasses.replace(asked, user=""), *task.turns[index + 1:])


def _withhold_value(task: Task, index: int, rng: random.Random) -> tuple[Turn, ...] | None:
    """Turn `index` leaves one value vague; the next turn gives it."""
    turn = task.turns[index]
    known = {w for t in task.turns[:index] for w in words_of(t.user)}
    known |= {w for t, result, _ in gold_results(task) if t < index for w in flatten(result)}
    words = words_of(turn.user)
    options = sorted({
        (str(value), param.kind)
        for call in turn.gold
        for param in TOOLS[call.name].params
        for value in [call.arguments[param.name]]
        if param.kind in phrases.VAGUE and words.count(str(value)) == 1
        and str(value) not in known
    })
    if not options:
        return None
    value, kind = rng.choice(options)
    vague = " ".join(_blur(w, value, phrases.VAGUE[kind]) for w in turn.user.split())
    vague = vague.replace(f"{kind} some {kind}", f"some {kind}")  # "booking some booking"
    supply = rng.choice(phrases.SUPPLIES).format(value)
    asked = dataclasses.replace(turn, user=vague, gold=())
    return (*task.turns[:index], asked, dataclasses.replace(turn, user=supply),
            *task.turns[index + 1:])


def _blur(word: str, value: str, vague: str) -> str:
    bare = word.rstrip(",.?")
    return vague + word[len(bare):] if bare == value else word


def can_be_cluttered(turns: Sequence[Sequence[ToolCall | PlannedCall]]) -> bool:
    """Whether any of these calls lists entries."""
    return any(TOOLS[call.name].lists for calls in turns for call in calls)


def _clutter(task: Task, rng: random.Random) -> Task | None:
    """Real but unneeded entries in every domain that lists some in this task."""
    listing = sorted({TOOLS[c.name].domain for t in task.turns for c in t.gold
                      if TOOLS[c.name].lists})
    if not listing:
        return None
    taken = set(flatten(dict(task.initial_config)))
    taken |= {w for t in task.turns for w in words_of(t.user)}
    maker = Maker(rng, taken)
    total = rng.randint(*CLUTTER)
    world = make_world(task.initial_config)
    for i, domain in enumerate(listing):
        count = total // len(listing) + (i < total % len(listing))
        world[domain].clutter_up(maker.several(_CLUTTER_KIND[domain], count))
    return dataclasses.replace(
        task, category=Category.LONG_CONTEXT, initial_config=world_config(world))
