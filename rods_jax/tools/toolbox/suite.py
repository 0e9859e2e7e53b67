"""The embedded toolbox as a `Suite`: its tools, environments and what synthesis needs."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence

from rods_jax.tools.env import Environment, Name
from rods_jax.tools.hints import HintedEnv
from rods_jax.tools.scoring import Mode, Scoring
from rods_jax.tools.toolbox import phrases
from rods_jax.tools.toolbox.augment import augment_task, can_be_cluttered
from rods_jax.tools.toolbox.entities import is_entity
from rods_jax.tools.toolbox.env import SCORING, ToolboxEnv, ToolboxWorld
from rods_jax.tools.toolbox.generator import SPLIT_SIZES, slots_of_shapes
from rods_jax.tools.toolbox.graph import DOMAINS, SPECS, TOOLS, tool_names
from rods_jax.tools.toolbox.hints import toolbox_hint
from rods_jax.tools.toolbox.planner import Slot, make_plan
from rods_jax.tools.toolbox.repair import repair_plan
from rods_jax.tools.toolbox.splits import split, wordings
from rods_jax.tools.toolbox.structure import call_shapes, depth, pointed, words_of
from rods_jax.tools.toolbox.writer import write_turns
from rods_jax.tools.twin import GoldRuns
from rods_jax.types import Category, Plan, Task, ToolSpec

OTHER_DOMAINS_SHARE = 0.5  # of variants that first try other domains than the seed's


class ToolboxSuite:
    """Implements `Suite` over files, messaging, bookings and payments."""

    name = "toolbox"
    domains = tuple(DOMAINS)
    split_names = tuple(SPLIT_SIZES)
    held_out = ("held_in", "new_structures")
    plans = True
    siblings_cross = False

    def __init__(self, scoring: Scoring = SCORING):
        if scoring.mode is Mode.OFFICIAL:
            raise ValueError("the toolbox has no official checker: use scoring mode train")
        self.scoring, self._gold = scoring, GoldRuns(ToolboxWorld)

    def split(self, name: str) -> tuple[Task, ...]:
        """Tasks of "train", "held_in", "new_structures" or "warm"; see splits.py."""
        return split(name)

    def wordings(self, task: Task, count: int) -> tuple[Task, ...]:
        return wordings(task, count)

    def tools(self, domains: Sequence[str]) -> tuple[ToolSpec, ...]:
        return tuple(SPECS[name] for name in tool_names(domains))

    def make_env(self, task: Task, hints: bool = False) -> Environment:
        env = ToolboxEnv(task, self.scoring, self._gold)
        return HintedEnv(env, toolbox_hint) if hints else env

    def gold_reply(self, task: Task, turn: int) -> str:
        """One word: "done" after calls; where gold is empty, "unavailable" if the next turn
        brings a tool and "clarify" otherwise."""
        if task.turns[turn].gold:
            return phrases.DONE
        following = task.turns[turn + 1:turn + 2]
        brings = any(set(t.tools) - set(task.turns[turn].tools) for t in following)
        return phrases.UNAVAILABLE if brings else phrases.CLARIFY

    def plan(self, seed: Task, rng: random.Random) -> Plan:
        """A BASE-form plan with the seed's turns, calls a turn, flows of every argument and
        dependencies; other tools where the typed graph allows, a new world. Raises
        ValueError where the seed is not a task of this suite."""
        shapes = call_shapes(seed)
        slots = tuple(
            dataclasses.replace(slot, pointed=count, fed=len(TOOLS[shape.tool].params)
                                - shape.said - shape.again)
            for slot, shape, count in zip(slots_of_shapes(shapes), shapes, pointed(seed)))
        for _ in range(5):
            plan = _similar_plan(slots, depth(shapes), seed.domains, rng)
            if plan is None:
                break
            if seed.category != Category.LONG_CONTEXT or can_be_cluttered(plan.turns):
                return dataclasses.replace(plan, parent=seed.uid)
        plan = _similar_plan(slots, depth(shapes), seed.domains, rng, keep_tools=True)
        if plan is None:
            raise ValueError(f"no plan found with the structure of {seed.uid}")
        return dataclasses.replace(plan, parent=seed.uid)

    def repair(self, plan: Plan, call: int, error: str, rng: random.Random) -> Plan | None:
        return repair_plan(plan, call, error, rng)

    def write(self, plan: Plan, results: Sequence[Mapping], rng: random.Random,
              feedback: str = "") -> tuple[str, ...]:
        """After feedback the wording is plain: one clause a call, values said again."""
        del results  # references are by noun, so the values found are not said
        return write_turns(plan, rng, plain=bool(feedback), varied=True)

    def names_in(self, text: str) -> tuple[Name, ...]:
        """Every word that is spelled as an entity, amounts included."""
        return tuple(Name(word) for word in words_of(text) if is_entity(word))

    def augment(self, task: Task, category: str, rng: random.Random) -> Task | None:
        return augment_task(task, Category(category), rng)


def _similar_plan(slots: Sequence[Slot], most: int, domains: Sequence[str], rng: random.Random,
                  keep_tools: bool = False) -> Plan | None:
    if not keep_tools and rng.random() < OTHER_DOMAINS_SHARE:
        others = rng.sample(list(DOMAINS), len(domains))
        plan = make_plan(slots, others, most, rng, attempts=20)
        if plan is not None:
            return plan
    return make_plan(slots, domains, most, rng, attempts=200, keep_tools=keep_tools)
