"""Rollouts with rounded weights: the trainer measures the gap and corrects for it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kept_programs import kept_in

from grpo_cases import small_batch, tiny_decoder
from loop_cases import tiny_config
from rods_jax import metrics
from rods_jax.config import ConfigError, typed
from rods_jax.grpo.advantage import AdvantageConfig
from rods_jax.grpo.batch import BatchShape, pack
from rods_jax.grpo.loss import Aggregation, LossConfig
from rods_jax.grpo.optimizer import OptimizerConfig, OptimizerKind, make_optimizer
from rods_jax.grpo.update import UpdateConfig, init_state, make_update
from rods_jax.rollout.weights import Precision
from rods_jax.run_config import RunConfig
from rods_jax.train import train
from rods_jax.types import Author
from weights_cases import ROUNDED, logits, published


@pytest.mark.slow
def test_the_gap_is_measured_and_its_ratio_enters_the_loss():
    trainer, params = tiny_decoder()
    sampler, rounded = published(Precision.INT8, params, trainer.config)

    def scores(decoder, params, r):
        length = len(r.tokens_L)
        ids = np.pad(r.tokens_L, (0, 16 - length))[None]
        at = logits(decoder, params, ids)[0, :length - 1].astype(np.float64)
        log_p = at - np.log(np.exp(at).sum(-1, keepdims=True))
        return np.append(0.0, log_p[np.arange(length - 1), r.tokens_L[1:]])

    groups, rewards = small_batch(2)
    groups = [[r and dataclasses.replace(r, logprobs_L=np.where(
        r.author_L == Author.SAMPLED, scores(sampler, rounded, r), 0).astype(np.float32))
        for r in group] for group in groups]
    ratios, gaps, terms = [], [], []
    for group, reward in zip(groups, rewards.astype(np.float64)):
        there = np.isfinite(reward)
        spread = reward[there].std()
        for r, value in zip(group, reward):
            if r is None or spread == 0:
                continue
            own = r.author_L == Author.SAMPLED
            gap = (scores(trainer, params, r) - r.logprobs_L)[own]
            gaps.append(np.abs(gap))
            ratios.append(np.exp(gap))
            terms.append(np.full(gap.shape, value - reward[there].mean()))
    cap = float(np.median(np.concatenate(ratios)))
    want = -np.mean(np.concatenate(terms) * np.minimum(np.concatenate(ratios), cap))
    plain = -np.mean(np.concatenate(terms))

    config = UpdateConfig(advantage=AdvantageConfig(scale_by_std=False),
                          loss=LossConfig(truncated_importance=cap, dual_clip=None,
                                          aggregation=Aggregation.TOKEN_MEAN))
    optimizer = make_optimizer(OptimizerConfig(kind=OptimizerKind.SGD, lr=0.1))
    batch = pack(groups, rewards, BatchShape(micro=3, rows=3, length=16, tasks=3, group=4),
                 drop_dead=False)
    state = init_state(jax.tree.map(jnp.copy, params), optimizer)
    _, found = jax.jit(make_update(trainer, config, optimizer))(state, batch)
    assert found.logprob_gap == pytest.approx(np.concatenate(gaps).mean(), rel=1e-3)
    assert found.logprob_gap > 1e-3 and 0.2 < found.importance_cut_share < 0.8
    assert found.policy_loss == pytest.approx(want, abs=2e-7)
    assert abs(want - plain) > 1e-5


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    with kept_in(tmp_path_factory.mktemp("programs")):
        yield


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("precision", [
    Precision.INT8, pytest.param(Precision.BF16, marks=pytest.mark.slow)])
def test_a_run_rolls_out_with_rounded_weights(tmp_path, precision):
    # With entropy every token carries loss, also where all rewards are alike.
    config = tiny_config(steps=3, warm_start=None, synthesis_on=False, rollout_weights=precision,
                         update=dict(loss=dict(truncated_importance=2.0, entropy_coef=0.01),
                                     advantage=dict(dead_keep_kl=True)),
                         eval=dict(greedy=False))
    summary = train(config, tmp_path / "run", tmp_path / "cache")
    rows = metrics.read(tmp_path / "run" / metrics.FILE)
    assert summary["steps"] == 3 and summary["drifts"] == 0
    for row in rows:
        assert row["publish_s"] > 0 and 1e-6 < row["logprob_gap"] < 0.1
    assert rows[1]["compiles"] == rows[2]["compiles"]


@pytest.mark.parametrize("precision", ROUNDED)
def test_rounded_weights_need_the_correction(precision):
    fields = dict(seed=0, steps=1, rollout_weights=precision.value)
    with pytest.raises(ConfigError, match=f"rollout_weights is {precision.value}, .* "
                                          "set update.loss.truncated_importance") as error:
        typed(RunConfig, fields, "test")
    assert "\n" not in str(error.value)
    ok = typed(RunConfig, fields | {"update": {"loss": {"truncated_importance": 2.0}}}, "test")
    assert ok.rollout_weights is precision
    assert typed(RunConfig, fields | {"rollout_weights": "trained"}, "test").steps == 1
