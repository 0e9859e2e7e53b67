"""Metrics of updates as sums: they merge exactly, and their means are what their names say."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rods_jax.grpo.tally import UpdateMetrics, logged, merge
from rods_jax.types import Author

COUNTS = ("n_updates", "n_applied", "n_judged", "n_dead")
MEANS = {
    "loss": ("loss_sum", "n_updates"), "policy_loss": ("policy_sum", "n_updates"),
    "grad_norm": ("norm_sum", "n_updates"), "kl": ("kl_sum", "n_tokens"),
    "entropy": ("entropy_sum", "n_tokens"), "logprob_gap": ("gap_sum", "n_tokens"),
    "clip_low_share": ("n_clip_low", "n_tokens"), "clip_high_share": ("n_clip_high", "n_tokens"),
    "dual_clip_share": ("n_dual_clip", "n_tokens"),
    "importance_cut_share": ("n_cut", "n_tokens"), "dead_share": ("n_dead", "n_judged")}


def drawn(rng, tasks=2):
    """Of one update, the counts as large as those of a real one."""
    values = {field.name: np.float32(rng.integers(0, 2 ** 20))
              for field in dataclasses.fields(UpdateMetrics)}
    values |= {name: np.int32(rng.integers(0, 9)) for name in COUNTS}
    values["n_dead"] = np.minimum(values["n_dead"], values["n_judged"])
    values |= {name: rng.random(tasks).astype(np.float32) for name in ("mean_T", "var_T")}
    return UpdateMetrics(**values | {
        "n_updates": np.int32(1), "tokens_A": rng.integers(0, 2 ** 20, 3).astype(np.int32),
        "live_T": np.ones(tasks, bool), "n_valid_T": np.full(tasks, 4, np.int32)})


@given(st.integers(0, 2 ** 31), st.integers(1, 5), st.integers(0, 5))
def test_merging_is_adding_in_any_order(seed, n_parts, cut):
    rng = np.random.default_rng(seed)
    parts = [drawn(rng, tasks=1 + i) for i in range(n_parts)]
    whole = merge(parts)
    for field in dataclasses.fields(UpdateMetrics):
        values = [getattr(part, field.name).tolist() for part in parts]
        if field.name.endswith("_T"):
            want = [x for value in values for x in value]
        elif field.name == "tokens_A":
            want = [sum(column) for column in zip(*values)]
        else:
            want = sum(values)
        assert getattr(whole, field.name).tolist() == want, field.name
    for name, (total, count) in MEANS.items():
        n = float(getattr(whole, count))
        assert float(getattr(whole, name)) == (float(getattr(whole, total)) / n if n else 0), name
    some = [merge(p) for p in (parts[:cut], parts[cut:]) if p]
    for name, value in vars(merge(some)).items():
        np.testing.assert_array_equal(value, getattr(whole, name))


def test_shares_weigh_tokens_and_losses_weigh_steps():
    rng = np.random.default_rng(0)
    small, large = (drawn(rng).replace(
        n_tokens=np.float32(n), n_clip_low=np.float32(low), loss_sum=np.float32(loss),
        n_judged=np.int32(judged), n_dead=np.int32(dead), n_applied=np.int32(applied))
        for n, low, loss, judged, dead, applied in ((10, 5, 1.0, 1, 1, 0), (90, 0, 2.0, 3, 0, 1)))
    both = merge([small, large])
    assert both.clip_low_share == 0.05 and both.dead_share == 0.25 and both.loss == 1.5
    assert not small.applied and large.applied and not both.applied and both.n_applied == 1


def test_what_a_run_writes():
    rng = np.random.default_rng(1)
    parts = [drawn(rng), drawn(rng)]
    row, whole = logged(parts), merge(parts)
    assert row["logprob_gap"] == parts[0].logprob_gap != whole.logprob_gap
    for author in Author:
        assert row[f"tokens_{author.name.lower()}"] == whole.tokens_A[author]
    names = set(MEANS) - {"policy_loss", "dual_clip_share"}
    assert set(row) == names | {"tokens_prompt", "tokens_sampled", "tokens_inserted"}
    for name in names - {"logprob_gap"}:
        assert row[name] == pytest.approx(float(getattr(whole, name))), name
    assert {type(value) for value in row.values()} == {float, int}
