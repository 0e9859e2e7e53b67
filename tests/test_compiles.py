"""A run compiles at its beginning and never again."""

import pytest
from loop_cases import tiny_config

from rods_jax import metrics
from rods_jax.train import train


@pytest.mark.slow
def test_nothing_is_compiled_after_the_first_step_of_fifty(tmp_path):
    config = tiny_config(steps=50, eval=dict(every=10, greedy=True), checkpoint_every=20)
    train(config, tmp_path / "run", tmp_path / "cache")
    rows = metrics.read(tmp_path / "run" / metrics.FILE)
    assert len(rows) == 50
    first, *later = [row["compiled"] for row in rows]
    assert "update" in first  # so that the list is known to have names
    assert not any(later), {name for names in later for name in names}
    # What a run goes through has happened: groups end, variants come, the pool turns over.
    assert rows[-1]["epoch"] > 3 and rows[-1]["admitted"] > 0
    assert len({end for row in rows for end in row["ends"]}) >= 3
