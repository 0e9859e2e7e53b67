"""What is trained when: a run as a sequence of stages (paper section 4).

Pure functions of a frozen config and the step number; nothing to checkpoint but the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from rods_jax.rewards import RewardKind
from rods_jax.types import CATEGORIES, Category, Json


@dataclasses.dataclass(frozen=True)
class Stage:
    """`steps` update steps on tasks of `categories`, with `reward`. `steps` None: until the
    run ends; only the last stage may be open."""

    steps: int | None
    reward: RewardKind
    categories: tuple[Category, ...] = CATEGORIES
    synthesis: bool = False

    def __post_init__(self):
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"stage of {self.steps} steps: give it 1 or more, or leave it out")
        if not self.categories or len(set(self.categories)) != len(self.categories):
            raise ValueError(f"stage categories {self.categories}: name at least one, each once")


# The paper gives the order of its stages, not their length.
PAPER_STAGES = (
    Stage(steps=13, reward=RewardKind.FORMAT, categories=(Category.BASE,)),
    Stage(steps=52, reward=RewardKind.PROGRESS, categories=(Category.BASE,)),
    Stage(steps=None, reward=RewardKind.PROGRESS, categories=CATEGORIES, synthesis=True),
)


@dataclasses.dataclass(frozen=True)
class CurriculumConfig:
    stages: tuple[Stage, ...] = PAPER_STAGES

    def __post_init__(self):
        if not self.stages:
            raise ValueError("curriculum has no stage: give at least one")
        for i, stage in enumerate(self.stages[:-1]):
            if stage.steps is None:
                raise ValueError(f"stage {i} has no end, so stage {i + 1} never starts: set steps")


def stage_index(config: CurriculumConfig, step: int) -> int:
    """The stage that update step `step` (from 0) belongs to. The last stage goes on for as
    long as the run does, also past its own `steps`."""
    if step < 0:
        raise ValueError(f"step is {step}: steps count from 0")
    end = 0
    for i, stage in enumerate(config.stages[:-1]):
        end += stage.steps
        if step < end:
            return i
    return len(config.stages) - 1


def stage_at(config: CurriculumConfig, step: int) -> Stage:
    return config.stages[stage_index(config, step)]


def stage_start(config: CurriculumConfig, index: int) -> int:
    """The first step of stage `index`."""
    return sum(stage.steps for stage in config.stages[:index])


def starts_stage(config: CurriculumConfig, step: int) -> bool:
    """True on the first step of a stage, where its categories are to be admitted."""
    return step == stage_start(config, stage_index(config, step))


def total_steps(config: CurriculumConfig) -> int | None:
    """Steps of all stages together; None when the last is open."""
    last = config.stages[-1].steps
    return None if last is None else stage_start(config, len(config.stages) - 1) + last


def category_mask(stage: Stage) -> tuple[bool, ...]:
    """For each of CATEGORIES, whether the stage trains on it."""
    return tuple(category in stage.categories for category in CATEGORIES)


def trained(config: CurriculumConfig, rows: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    """Which rewards trained, in order, and what the first and the last step showed."""
    kinds = [stage_at(config, row["step"]).reward.value for row in rows]
    names = ("reward_mean", "format_mean", "progress_mean")
    return {"reward_trained": list(dict.fromkeys(kinds)),
            "first_step": {name: rows[0][name] for name in names},
            "last_step": {name: rows[-1][name] for name in names}}
