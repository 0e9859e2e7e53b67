"""BFCL V3 multi-turn as a Suite: 800 stateful tasks over eight tool classes.

Needs the optional package bfcl-eval (`pip install --no-deps bfcl-eval==2026.3.23 mpmath`);
without it this module still imports and BFCLSuite() says what to install. Data, tool classes
and result texts are the package's; parsing, dispatch, isolation and scoring are not, see
bfcl_env.py. Variants of a task (Plan, Execute, Rewrite, Augment) come from bfcl_plan.py,
bfcl_write.py and bfcl_augment.py, without a language model.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

from rods_jax.tasks.profile import base_form
from rods_jax.tools import bfcl_augment, bfcl_data, bfcl_names, bfcl_plan, bfcl_write
from rods_jax.tools.bfcl_data import SUSPECT
from rods_jax.tools.bfcl_env import BFCLEnv, gold_runs
from rods_jax.tools.bfcl_hints import bfcl_hint
from rods_jax.tools.env import Environment, Name
from rods_jax.tools.hints import HintedEnv
from rods_jax.tools.scoring import Scoring
from rods_jax.tools.suites import SplitRule
from rods_jax.types import CATEGORIES, Category, Plan, Source, Task, ToolSpec

__all__ = ["SUSPECT", "BFCLSuite"]

class BFCLSuite:
    """Implements rods_jax.tools.env.Suite. ValueError where bfcl-eval is not installed."""

    name = "bfcl"
    split_names = ("train", "held_in")
    held_out = ("held_in",)
    plans = True

    def __init__(self, scoring: Scoring = Scoring(), domains: Sequence[str] = (),
                 split_rule: SplitRule = SplitRule.GROUPED, split_seed: int = 0,
                 keep_suspect: bool = False):
        """`domains`: the splits hold only tasks that need no other; () leaves all.
        `split_rule`, `split_seed`: who is held in. `keep_suspect`: training too keeps the
        tasks whose gold cannot be derived, which would sit in the pool as hard ones for
        ever; held-in tasks always keep them."""
        for domain in domains:
            bfcl_data.domain_specs(domain)  # raises on an unknown one
        self.scoring, self._gold = scoring, gold_runs(scoring)
        self.siblings_cross = split_rule is SplitRule.PAPER
        self._rule, self._seed, self._keep_suspect = split_rule, split_seed, keep_suspect
        self.domains = tuple(domains) or bfcl_data.DOMAINS
        self.tasks = bfcl_data.load_tasks()
        self._base = {t.scenario: t for t in self.tasks if t.category is Category.BASE}

    def tools(self, domains: Sequence[str]) -> tuple[ToolSpec, ...]:
        return tuple(spec for domain in domains for spec in bfcl_data.domain_specs(domain))

    def split(self, name: str) -> tuple[Task, ...]:
        """"train" or "held_in": 100 tasks a category each. GROUPED draws 100 scenarios a
        side, so that no task has a sibling on the other; PAPER draws each category on its
        own, which leaves most held-in tasks with a sibling in training (tasks.leakage.crossing),
        so scores on the two are not comparable task by task. Categories take turns, and siblings
        lie far apart: the first tasks tell different stories."""
        if name not in self.split_names:
            raise ValueError(f"unknown split {name!r}, use one of {', '.join(self.split_names)}")
        by_place = {(t.category, t.scenario): t for t in self.tasks}
        drop = name == "train" and not self._keep_suspect
        columns = []
        for c, category in enumerate(CATEGORIES):
            side = self._side(name, category)
            start = 0 if self.siblings_cross else c * len(side) // len(CATEGORIES)
            tasks = [by_place[category, f"bfcl-{i}"] for i in side[start:] + side[:start]]
            columns.append([t for t in tasks if set(t.domains) <= set(self.domains)
                            and not (drop and t.uid in SUSPECT)])
        rows = itertools.zip_longest(*columns)
        return tuple(t for row in rows for t in row if t is not None)

    def _side(self, name: str, category: Category) -> list[int]:
        """The scenario numbers of one side, shuffled; one order for all categories where
        siblings must stay together."""
        own = f"{self._seed}-{category.value}" if self.siblings_cross else self._seed
        order = list(range(bfcl_data.N_SCENARIOS))
        random.Random(own).shuffle(order)
        half = bfcl_data.N_SCENARIOS // 2
        return order[:half] if name == "train" else order[half:]

    def wordings(self, task: Task, count: int) -> tuple[Task, ...]:
        return (task,)

    def make_env(self, task: Task, hints: bool = False) -> Environment:
        env = BFCLEnv(task, self.scoring, self._gold)
        return HintedEnv(env, bfcl_hint) if hints else env

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
        """The BASE form that a plan follows: the seed's own sibling, whose text is in one piece,
        where it has the same gold; else, as for a variant, the seed's turns joined."""
        sibling = self._base.get(seed.scenario) if seed.source is Source.SEED else None
        joined = base_form(seed)
        if sibling is None or [t.gold for t in sibling.turns] != [t.gold for t in joined.turns]:
            return joined
        return sibling

    def plan(self, seed: Task, rng: random.Random) -> Plan:
        return bfcl_plan.plan(self._form(seed), seed.uid, rng)

    def repair(self, plan: Plan, call: int, error: str, rng: random.Random) -> Plan | None:
        return bfcl_plan.repair(plan, call, error)

    def write(self, plan: Plan, results: Sequence[Mapping], rng: random.Random,
              feedback: str = "") -> tuple[str, ...]:
        return bfcl_write.write(plan, results, rng, plain=bool(feedback))

    def names_in(self, text: str) -> tuple[Name, ...]:
        return bfcl_names.names_in(text)

    def augment(self, task: Task, category: str, rng: random.Random) -> Task | None:
        return bfcl_augment.augment(task, Category(category), rng)
