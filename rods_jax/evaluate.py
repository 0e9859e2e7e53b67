"""Held-in evaluation: one rollout a task through the same engine that trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from rods_jax import rewards
from rods_jax.rollout.engine import Engine, Prompt, make_prompt
from rods_jax.types import Task


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """Means over tasks, in [0, 1]. progress: R_P. success: all turns passed."""

    progress: float
    success: float
    n_tasks: int
    progress_se: float  # standard error of the mean over tasks


def evaluate_ways(engine: Engine, params: Any, tasks: Sequence[Task], seed: int,
                  greedy: bool = True) -> dict[str, EvalResult]:
    """"sampled" (temperature 1) and, if asked, "greedy", as a run with that seed does it.
    All evaluations of a run use one key, so their differences are paired."""
    prompts = [make_prompt(task, engine.suite, engine.chat) for task in tasks]
    ways = {"sampled": 1.0} | ({"greedy": 0.0} if greedy else {})
    return {name: evaluate(engine, params, prompts, jax.random.key(seed + 1), temperature)
            for name, temperature in ways.items()}


def evaluate(engine: Engine, params: Any, prompts: Sequence[Prompt], key: jax.Array,
             temperature: float, samples: int = 1) -> EvalResult:
    """`samples` rollouts a task, averaged before the mean over tasks is taken. A rollout
    whose environment broke counts 0: a score may not rise by losing tasks."""
    groups, _ = engine.run(params, prompts, samples, key, temperature)
    score = lambda one: np.asarray(  # noqa: E731
        [np.mean([one(t) if t.end.usable else 0.0 for t in group]) for group in groups])
    progress, success = score(rewards.progress), score(rewards.binary)
    spread = progress.std(ddof=1) / np.sqrt(len(progress)) if len(progress) > 1 else 0.0
    return EvalResult(float(progress.mean()), float(success.mean()), len(groups), float(spread))
