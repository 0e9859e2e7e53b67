"""BFCL V3 multi-turn as a Suite: 800 stateful tasks over eight tool classes.

Needs the optional package bfcl-eval (`pip install --no-deps bfcl-eval==2026.3.23 mpmath`);
without it this module still imports and BFCLSuite() says what to install. Data, tool classes
and result texts are the package's; parsing, dispatch, isolation and scoring are not, see
bfcl_env.py. Variants of a task (Plan, Execute, Rewrite, Augment) come from bfcl_plan.py,
bfcl_write.py and bfcl_augment.py, without a language model.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from rods_jax.tasks.profile import base_form
from rods_jax.tools import bfcl_augment, bfcl_data, bfcl_plan, bfcl_write
from rods_jax.tools.bfcl_data import SUSPECT
from rods_jax.tools.bfcl_env import BFCLEnv, Scoring
from rods_jax.types import Category, Plan, Source, Task, ToolSpec

__all__ = ["SUSPECT", "BFCLSuite", "Scoring"]

SPLITS = ("train", "held_in")


class BFCLSuite:
    """Implements rods_jax.tools.env.Suite. ValueError where bfcl-eval is not installed."""

    name = "bfcl"

    def __init__(self, scoring: Scoring = Scoring.NUMERIC):
        self.scoring = scoring
        self.tasks = bfcl_data.load_tasks()
        self._base = {t.scenario: t for t in self.tasks if t.category is Category.BASE}

    def tools(self, domains: Sequence[str]) -> tuple[ToolSpec, ...]:
        return tuple(spec for domain in domains for spec in bfcl_data.domain_specs(domain))

    def split(self, name: str, seed: int = 0, drop_suspect: bool = False) -> tuple[Task, ...]:
        """"train" or "held_in": 100 scenarios a side, so 400 tasks, 100 a category, and no
        task with a sibling on the other side. The paper splits each category on its own;
        that leaves most held-in tasks with a sibling in training, so scores on this split
        are not comparable with it task by task. `drop_suspect` leaves out the tasks whose
        gold cannot be derived, which would sit in the pool as hard ones for ever."""
        if name not in SPLITS:
            raise ValueError(f"unknown split {name!r}, use one of {', '.join(SPLITS)}")
        order = list(range(bfcl_data.N_SCENARIOS))
        random.Random(seed).shuffle(order)
        half = bfcl_data.N_SCENARIOS // 2
        side = order[:half] if name == "train" else order[half:]
        wanted = {f"bfcl-{i}" for i in side}
        return tuple(t for t in self.tasks
                     if t.scenario in wanted and not (drop_suspect and t.uid in SUSPECT))

    def make_env(self, task: Task) -> BFCLEnv:
        return BFCLEnv(task, self.scoring)

    def gold_reply(self, task: Task, turn: int) -> str:
        current = task.turns[turn]
        if current.gold:
            return "Done."
        following = task.turns[turn + 1] if turn + 1 < len(task.turns) else None
        if following is not None and set(following.tools) - set(current.tools):
            return "I cannot do this: no available function covers it."
        if task.category is Category.MISS_PARAM:
            return "A detail is missing. Which value should I use?"
        return "There is nothing more to run for this."

    # ------------------------------------------------------------ synthesis

    def _form(self, seed: Task) -> Task:
        """The BASE form that a plan follows: the seed's own sibling, a variant's joined."""
        sibling = self._base.get(seed.scenario) if seed.source is Source.SEED else None
        return sibling or base_form(seed)

    def plan(self, seed: Task, rng: random.Random) -> Plan:
        return bfcl_plan.plan(self._form(seed), seed.uid, rng)

    def repair(self, plan: Plan, call: int, error: str, rng: random.Random) -> Plan | None:
        return bfcl_plan.repair(plan, call, error)

    def write(self, plan: Plan, results: Sequence[Mapping], rng: random.Random,
              feedback: str = "") -> tuple[str, ...]:
        return bfcl_write.write(plan, results, rng, plain=bool(feedback))

    def augment(self, task: Task, category: str, rng: random.Random) -> Task | None:
        return bfcl_augment.augment(task, Category(category), rng)
