"""Accepted variants of both suites, made stage by stage, for tests that spoil them."""

from __future__ import annotations

import dataclasses
import functools
import random

from rods_jax.synthesis.critique import critique
from rods_jax.synthesis.execute import Executed, run_plan
from rods_jax.synthesis.pipeline import seed_profile_of
from rods_jax.tools.suites import SuiteName, SuiteSpec, make_suite
from rods_jax.types import Category, Source, Task, Turn

SUITES = ("toolbox", "bfcl")


@functools.cache
def suite_of(name):
    return make_suite(SuiteSpec(SuiteName(name)))


@functools.cache
def variants(name, category="base", count=16):
    """(variant, values that its seed leaves to inference), of the first seeds that have one."""
    suite, found = suite_of(name), []
    for i, seed in enumerate(suite.split("train")[::3]):
        rng = random.Random(f"{name}-{category}-{i}")
        run = run_plan(suite.plan(seed, rng), suite)
        if not isinstance(run, Executed):
            continue
        texts = suite.write(run.plan, run.result_objects(), rng)
        tools = tuple(spec.name for spec in suite.tools(run.plan.domains))
        base = Task(f"v{i}", run.plan.domains, Category.BASE, run.plan.initial_config,
                    tuple(Turn(t, c, tools) for t, c in zip(texts, run.calls, strict=True)),
                    f"v{i}", Source.GENERATED, seed.uid, 1)
        task = suite.augment(base, category, rng)
        inherited = seed_profile_of(seed, suite).unsourced
        if task is not None and critique(task, suite, inherited=inherited).accepted:
            found.append((task, inherited))
        if len(found) == count:
            break
    return tuple(found)


def score(suite, task, drop=None):
    """Share of turns that pass when an expert makes all gold calls but one; no function of the
    product's own replay is used."""
    env, passed, flat = suite.make_env(task), 0, 0
    while (turn := env.begin_turn()) is not None:
        for call in task.turns[turn.index].gold:
            if flat != drop:
                env.execute((call,))
            flat += 1
        passed += env.end_turn(suite.gold_reply(task, turn.index)).passed
    return passed / len(task.turns)


def with_turn(task, t, **changes):
    turns = list(task.turns)
    turns[t] = dataclasses.replace(turns[t], **changes)
    return dataclasses.replace(task, turns=tuple(turns))
