import hypothesis
import hypothesis.strategies as st
import pytest

from rods_jax import curriculum
from rods_jax.curriculum import CurriculumConfig, Stage
from rods_jax.rewards import RewardKind
from rods_jax.types import CATEGORIES, Category


def test_the_papers_three_stages():
    config = CurriculumConfig()
    first, second, third = config.stages
    assert (first.reward, first.categories) == (RewardKind.FORMAT, (Category.BASE,))
    assert (second.reward, second.categories) == (RewardKind.PROGRESS, (Category.BASE,))
    assert (third.reward, third.categories) == (RewardKind.PROGRESS, CATEGORIES)
    assert [s.synthesis for s in config.stages] == [False, False, True]
    assert curriculum.stage_at(config, 0) is first
    assert curriculum.stage_at(config, 12) is first
    assert curriculum.stage_at(config, 13) is second
    assert curriculum.stage_at(config, 10**6) is third
    assert curriculum.total_steps(config) is None
    assert curriculum.category_mask(first) == (True, False, False, False)


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.booleans())
def test_steps_are_laid_out_one_after_another(lengths, is_open):
    steps = [*lengths[:-1], None if is_open else lengths[-1]]
    config = CurriculumConfig(tuple(Stage(n, RewardKind.PROGRESS) for n in steps))
    layout = [i for i, n in enumerate(lengths) for _ in range(n)] + [len(lengths) - 1] * 3
    assert [curriculum.stage_index(config, s) for s in range(len(layout))] == layout
    begins = [s for s in range(len(layout)) if curriculum.starts_stage(config, s)]
    assert begins == [layout.index(i) for i in range(len(lengths))]
    assert begins == [curriculum.stage_start(config, i) for i in range(len(lengths))]
    assert curriculum.total_steps(config) == (None if is_open else sum(lengths))


def test_refusals():
    progress = RewardKind.PROGRESS
    with pytest.raises(ValueError, match="1 or more"):
        Stage(0, progress)
    with pytest.raises(ValueError, match="at least one, each once"):
        Stage(1, progress, categories=())
    with pytest.raises(ValueError, match="at least one, each once"):
        Stage(1, progress, categories=(Category.BASE, Category.BASE))
    with pytest.raises(ValueError, match="no stage"):
        CurriculumConfig(())
    with pytest.raises(ValueError, match="stage 0 has no end"):
        CurriculumConfig((Stage(None, progress), Stage(1, progress)))
    with pytest.raises(ValueError, match="count from 0"):
        curriculum.stage_at(CurriculumConfig(), -1)
