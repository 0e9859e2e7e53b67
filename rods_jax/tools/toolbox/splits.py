"""The suite's fixed splits and the library of structures that they share."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable

from rods_jax.tools.toolbox.augment import augment_task
from rods_jax.tools.toolbox.generator import (BANDS, LIBRARY_SIZE, MIX, SPLIT_SIZES, draw_profile,
                                              generate, is_sound, slots_of_shapes, task_of_plan)
from rods_jax.tools.toolbox.planner import make_plan
from rods_jax.tools.toolbox.structure import (CallShape, base_key, call_shapes, depth,
                                              structure_key)
from rods_jax.tools.toolbox.graph import TOOLS
from rods_jax.types import CATEGORIES, Category, Plan, Task

Shapes = tuple[CallShape, ...]


def split(name: str) -> tuple[Task, ...]:
    """The tasks of "train", "held_in", "new_structures" or "warm", always the same ones.

    train, held_in (a train seed's structure each, in a new world) and warm draw from one
    library of structures; new_structures uses none of it. No two tasks of any splits share
    a scenario or a content hash. Raises ValueError on another name.
    """
    if name not in SPLIT_SIZES:
        raise ValueError(f"unknown split {name!r}: use one of {', '.join(SPLIT_SIZES)}")
    return _SPLITS[name]()


@functools.cache
def _library() -> dict[str, tuple[Shapes, ...]]:
    """Distinct BASE structures by band."""
    rng = random.Random("toolbox-library")
    keys: set[str] = set()
    library: dict[str, tuple[Shapes, ...]] = {}
    for band, size in LIBRARY_SIZE.items():
        found: list[Shapes] = []
        while len(found) < size:
            task = _attempt(lambda: generate(draw_profile(BANDS[band], rng), rng))
            if task is None:
                continue
            shapes = call_shapes(task)
            if base_key(shapes) not in keys:
                keys.add(base_key(shapes))
                found.append(shapes)
        library[band] = tuple(found)
    return library


def _attempt(make: Callable[[], Task]) -> Task | None:
    try:
        return make()
    except ValueError:  # a profile its calls do not allow; the caller draws another
        return None


def variant(shapes: Shapes, category: Category, uid: str, rng: random.Random,
            empty: int | None = None) -> tuple[Task, Plan] | None:
    """A task of exactly these tools and flows in a new world and its plan, or None."""
    domains = {TOOLS[s.tool].domain for s in shapes}
    plan = make_plan(slots_of_shapes(shapes), tuple(domains), depth(shapes), rng,
                     attempts=20, keep_tools=True)
    if plan is None:
        return None
    base = task_of_plan(plan, rng, uid)
    task = augment_task(base, category, rng, empty) if base else None
    if task is None or not is_sound(task) or call_shapes(task, strict=True) != shapes:
        return None
    return task, plan


def reworded(task: Task, plan: Plan, count: int, rng: random.Random) -> tuple[Task, ...]:
    """Up to `count` tasks with this one's world, tools and gold calls and with other texts."""
    shapes, found = call_shapes(task), []
    for _ in range(4 * count):
        if len(found) == count:
            break
        base = task_of_plan(plan, rng)
        other = augment_task(base, task.category, rng, _empty_turn(task)) if base else None
        if other is None or any((a.gold, a.tools) != (b.gold, b.tools)
                                for a, b in zip(task.turns, other.turns, strict=True)):
            continue  # another tool was withheld
        again = dataclasses.replace(task, uid=f"{task.uid}-{len(found) + 1}", turns=other.turns)
        if is_sound(again) and call_shapes(again) == shapes:
            found.append(again)
    return tuple(found)


def _empty_turn(task: Task) -> int | None:
    return next((i for i, turn in enumerate(task.turns) if not turn.gold), None)


def _draw(name: str, mix: dict[str, int]) -> list[tuple[Task, Plan]]:
    """Categories in turn, bands as the mix says, structures from the library."""
    rng = random.Random(f"toolbox-{name}")
    bands, weights = list(mix), list(mix.values())
    drawn: list[tuple[Task, Plan]] = []
    while len(drawn) < SPLIT_SIZES[name]:
        category = CATEGORIES[len(drawn) % len(CATEGORIES)]
        shapes = rng.choice(_library()[rng.choices(bands, weights)[0]])
        if shapes[-1].turn > 4 and category in (Category.MISS_FUNC, Category.MISS_PARAM):
            continue  # the added turn would be the seventh
        found = variant(shapes, category, f"toolbox-{name}-{len(drawn):04d}", rng)
        if found is not None:
            drawn.append(found)
    return drawn


@functools.cache
def _train() -> tuple[Task, ...]:
    return tuple(task for task, _ in _draw("train", MIX["train"]))


@functools.cache
def _warm_plans() -> tuple[tuple[Task, Plan], ...]:
    return tuple(_draw("warm", MIX["warm"]))


@functools.cache
def _warm() -> tuple[Task, ...]:
    return tuple(task for task, _ in _warm_plans())


def wordings(task: Task, count: int) -> tuple[Task, ...]:
    """A task of split "warm" and rewordings of it, up to `count` in all, always the same
    ones; of another task just itself, since its plan is not kept."""
    plan = next((plan for known, plan in _warm_plans() if known.uid == task.uid), None)
    if plan is None:
        return (task,)
    return task, *reworded(task, plan, count - 1, random.Random(f"{task.uid}-words"))


@functools.cache
def _held_in() -> tuple[Task, ...]:
    rng = random.Random("toolbox-held_in")
    tasks = []
    for index, seed in enumerate(_train()):
        uid, found = f"toolbox-held_in-{index:04d}", None
        while found is None or structure_key(found[0]) != structure_key(seed):
            found = variant(call_shapes(seed), seed.category, uid, rng, _empty_turn(seed))
        tasks.append(found[0])
    return tuple(tasks)


@functools.cache
def _new_structures() -> tuple[Task, ...]:
    rng = random.Random("toolbox-new_structures")
    known = {base_key(shapes) for group in _library().values() for shapes in group}
    bands, weights = list(MIX["new_structures"]), list(MIX["new_structures"].values())
    tasks: list[Task] = []
    while len(tasks) < SPLIT_SIZES["new_structures"]:
        category = CATEGORIES[len(tasks) % len(CATEGORIES)]
        profile = draw_profile(BANDS[rng.choices(bands, weights)[0]], rng, category)
        uid = f"toolbox-new_structures-{len(tasks):04d}"
        task = _attempt(lambda: generate(profile, rng, uid))
        if task is not None and base_key(call_shapes(task)) not in known:
            tasks.append(task)
    return tuple(tasks)


_SPLITS: dict[str, Callable[[], tuple[Task, ...]]] = {
    "train": _train, "held_in": _held_in, "new_structures": _new_structures, "warm": _warm,
}
