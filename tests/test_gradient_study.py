"""The study's gradients against jax.grad of a plain loss, its figures against sums by hand, and
the command on a tiny run."""

import dataclasses
import itertools
import json
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_cases import shared_groups, tiny_decoder
from grpo_reference import quick_jit
from kept_programs import kept_in
from loop_cases import tiny_config, write_config

from experiments import gradient_study as study
from rods_jax import checkpoint
from rods_jax.boundary import BoundaryConfig, Zone
from rods_jax.config import UserError, to_json
from rods_jax.grpo.batch import BatchShape
from rods_jax.grpo.update import UpdateConfig
from rods_jax.models.attention import causal_mask
from rods_jax.policy import build
from rods_jax.rewards import RewardKind
from rods_jax.types import EndReason, TurnOutcome

POLICY = dict(d_model=8, n_layers=1, n_heads=1, n_kv_heads=1, d_ff=8, slots=8)
TURNS, LENGTH, TEMPERATURE = 4, 24, 0.7
SHAPE = BatchShape(micro=4, rows=2, length=16, tasks=1, group=4, prompts=1, prompt=8)
CONFIG = study.studied(UpdateConfig(temperature=TEMPERATURE, logit_chunk=4))


# ---------------------------------------------------------------- gradients


@cache
def plain():
    """(params, tokens_4xL, weight_4xL) -> log-probs of tokens 1 .. L - 1, and the gradient of
    the sum of weight x log-prob, all logits at once."""
    decoder = tiny_decoder()[0]

    def score(params, tokens, weight):
        positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
        hidden, _ = decoder.apply({"params": params}, tokens, positions, causal_mask(LENGTH))
        logits = decoder.apply({"params": params}, hidden, method="logits") / TEMPERATURE
        logp = jnp.take_along_axis(
            jax.nn.log_softmax(logits)[:, :-1], tokens[:, 1:, None], -1)[..., 0]
        return (weight[:, 1:] * logp).sum(), logp
    return quick_jit(lambda *args: jax.grad(score, has_aux=True)(*args))


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]).astype(np.float64)


def tokens_of(group):
    rows = [np.pad(one.tokens_L, (0, LENGTH - len(one.tokens_L))) for one in group]
    return np.stack([*rows, *[np.zeros(LENGTH, np.int32)] * (4 - len(rows))])


def plain_gradient(group, scores, divided=False):
    """Of -mean over usable rollouts of A x the mean log-prob of what they sampled."""
    usable = [g for g, one in enumerate(group) if one.end.usable]
    r = np.asarray(scores, np.float64)[usable]
    weight = np.zeros((4, LENGTH), np.float32)
    for g, advantage in zip(usable, (r - r.mean()) / (r.std() + 1e-6 if divided else 1.0)):
        sampled = np.flatnonzero(group[g].author_L == 1)
        weight[g, sampled] = -advantage / len(sampled) / len(usable)
    return flat(plain()(tiny_decoder()[1], tokens_of(group), weight)[0])


def on_policy(group, scores):
    """The rollouts with the policy's own log-probs and with as many passed turns as scored."""
    _, logp = plain()(tiny_decoder()[1], tokens_of(group), np.zeros((4, LENGTH), np.float32))
    passed = [TurnOutcome(True, True)] * TURNS
    return [dataclasses.replace(
        one, n_turns=TURNS, outcomes=tuple(passed[:round(score * TURNS)]),
        logprobs_L=np.where(one.author_L == 1, np.pad(logp[g], (1, 0))[:len(one.tokens_L)], 0)
        .astype(np.float32)) for g, (one, score) in enumerate(zip(group, scores))]


@cache
def cases():
    """Groups with their scores: one whose rollouts agree, two that differ, the last of them
    with a rollout whose environment broke."""
    groups, scores = shared_groups(3)
    spoilt = dataclasses.replace(groups[-1][0], end=EndReason.ENV_ERROR)
    groups[-1][-1], scores[-1, -1] = spoilt, 0.0
    return [on_policy(group, row) for group, row in zip(groups, scores)], scores


@cache
def gradients():
    """The study's gradient, and a list that grows by one with every trace."""
    traces = []

    def counted(f):
        def traced(*args):
            traces.append(1)
            return f(*args)
        return quick_jit(traced)
    return study.make_gradient(tiny_decoder()[0], CONFIG, SHAPE, counted), traces


def measured(kind):
    groups, _ = cases()
    return study.measure(gradients()[0], tiny_decoder()[1], None, groups, [None] * 3, kind,
                         BoundaryConfig())


def test_a_tasks_gradient_is_that_of_a_plain_loss():
    groups, scores = cases()
    for group, row in zip(groups, scores):
        found = gradients()[0](tiny_decoder()[1], None, group, row)
        np.testing.assert_allclose(found, plain_gradient(group, row), atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", study.KINDS)
def test_measured_are_norms_and_variances_of_each_task(kind):
    groups, scores = cases()
    if kind is RewardKind.BINARY:
        scores = np.floor(scores)
    found = measured(kind)
    wanted = [plain_gradient(*case) for case in zip(groups, scores)]
    np.testing.assert_allclose(found.norm_N, np.linalg.norm(wanted, axis=1), rtol=1e-4)
    np.testing.assert_allclose(found.total, np.linalg.norm(sum(wanted)), rtol=1e-4)
    usable = [row[:3] if t == 2 else row for t, row in enumerate(scores.astype(np.float64))]
    np.testing.assert_allclose(found.mean_N, [r.mean() for r in usable], atol=1e-6)
    np.testing.assert_allclose(found.var_N, [r.var() for r in usable], atol=1e-6)
    # A half: samples 0 and 1 against 2 and 3; of the last task 3 is not there.
    halves = [plain_gradient(group[part], row[part]) for group, row in list(zip(groups, scores))[:2]
              for part in (slice(2), slice(2, None))]
    wanted = halves[2] @ halves[3] * (3 / 4) ** 2 / (1 / 2) ** 2
    np.testing.assert_allclose(found.repeat_N, [0.0, wanted, 0.0], rtol=1e-4, atol=1e-9)
    assert len(gradients()[1]) == 1


def test_no_variance_no_gradient():
    found = measured(RewardKind.PROGRESS)
    assert found.norm_N[0] == found.divided_N[0] == found.repeat_N[0] == 0
    assert found.zone_N.tolist() == [Zone.SILENT, Zone.BOUNDARY, Zone.BOUNDARY]
    assert (found.norm_N[1:] > 1e-3).all() and found.live_N.tolist() == [False, True, True]


def test_divided_norms_are_those_of_divided_advantages():
    groups, scores = cases()
    wanted = [np.linalg.norm(plain_gradient(group, row, divided=True))
              for group, row in zip(groups[1:], scores[1:])]
    np.testing.assert_allclose(measured(RewardKind.PROGRESS).divided_N[1:], wanted, rtol=1e-4)


def test_halves_show_the_squared_norm_of_the_expected_gradient():
    """Over all ways that 3 + 2 rollouts with three outcomes can come."""
    reward, chance = np.array([0.0, 0.25, 1.0]), np.array([0.2, 0.5, 0.3])
    score = np.random.default_rng(0).standard_normal((3, 4))

    def gradient(who):
        return (reward[who] - reward[who].mean()) @ score[who] / len(who)
    expected, product = np.zeros(4), 0.0
    for who in itertools.product(range(3), repeat=5):
        who = np.array(who)
        p = chance[who].prod()
        expected += p * gradient(who)
        product += p * study.repeated(gradient(who[:3]), gradient(who[3:]), (3, 2))
    assert product == pytest.approx(expected @ expected, rel=1e-9)
    assert study.repeated(np.ones(4), np.ones(4), (4, 1)) == 0.0


# ---------------------------------------------------------------- figures


def by_hand():
    """Hard with and without variance, three at the boundary, one mastered, one silent."""
    return study.Measured(
        mean_N=np.array([0.1, 0.0, 0.5, 0.5, 0.25, 1.0, 0.5]),
        var_N=np.array([0.04, 0.0, 0.25, 0.16, 0.09, 0.0, 0.0]),
        zone_N=np.array([0, 0, 1, 1, 1, 2, 3]),
        norm_N=np.array([2.0, 0.0, 3.0, 2.0, 1.0, 0.0, 0.0]),
        repeat_N=np.array([1.0, 0.0, 2.0, -1.0, 0.4, 0.0, 0.0]), total=6.0)


def test_figures_by_hand():
    rows = study.by_zone(by_hand())
    assert list(rows) == ["hard", "boundary", "mastered", "silent", "all"]
    hard = {  # squares 4, 9, 4, 1; divided by the variance 100, 36, 25, 100 / 9
        "tasks": 2, "live": 1, "variance": 0.02, "bound": 0.045, "norm": 1.0, "norm_divided": 5.0,
        "variance_live": 0.04, "norm_live": 2.0, "norm_divided_live": 10.0,
        "share_of_tasks": 2 / 7, "share_of_squares": 4 / 18,
        "share_of_squares_divided": 900 / 1549, "repeats": 1 / 4}
    assert rows["hard"] == pytest.approx(hard, rel=1e-4)
    boundary = {
        "tasks": 3, "live": 3, "variance": 0.5 / 3, "bound": 0.6875 / 3, "norm": 2.0,
        "norm_divided": (6 + 5 + 10 / 3) / 3, "variance_live": 0.5 / 3, "norm_live": 2.0,
        "norm_divided_live": (6 + 5 + 10 / 3) / 3, "share_of_tasks": 3 / 7,
        "share_of_squares": 14 / 18, "share_of_squares_divided": 649 / 1549, "repeats": 1.4 / 14}
    assert rows["boundary"] == pytest.approx(boundary, rel=1e-4)
    nothing = {"norm": 0.0, "norm_live": None, "share_of_squares": 0.0, "repeats": None}
    assert {key: rows["silent"][key] for key in nothing} == nothing
    assert rows["all"]["tasks"] == 7 and rows["all"]["share_of_squares"] == 1
    assert study.variance_ratios(rows) == pytest.approx({
        "variance_to_hard": 0.5 / 3 / 0.02, "variance_to_mastered": None,
        "variance_live_to_hard": 0.5 / 3 / 0.04, "variance_live_to_mastered": None})
    found = study.as_json(by_hand())
    assert found["sum_to_squares"] == 36 / 18
    assert json.loads(json.dumps(found)) == found


def test_rank_correlation_by_hand():
    assert study.spearman(np.array([1, 2, 2, 3]), np.array([1, 30, 2, 400])) == pytest.approx(
        4.5 / np.sqrt(4.5 * 5))  # ranks 1, 2.5, 2.5, 4 and 1, 3, 2, 4
    assert study.spearman(np.array([1.0, 1.0]), np.array([1.0, 2.0])) is None
    assert study.spearman(np.array([1.0]), np.array([1.0])) is None
    found = study.correlations(by_hand())
    assert found["norm_std_live"] == pytest.approx(3.0 / np.sqrt(4.5 * 5))
    assert found["divided_std_live"] == pytest.approx(-0.2)


def test_table_holds_the_figures():
    lines = study.table(by_hand()).splitlines()
    assert lines[2] == ("| hard | 2 | 1 | 0.020 | 0.045 | 1.000 | 5.000 | 2.000 | 10.000 | 29 | 22 "
                        "| 58 | 25 |")
    assert lines[5].startswith("| silent | 1 | 0 |") and lines[5].endswith("| 0 | 0 | - |")
    assert "norm_std_live 0.63" in lines[8]
    assert lines[10] == "|sum|^2 by sum of squares: all 2.00"


# ---------------------------------------------------------------- the command


@pytest.fixture
def call(tmp_path):
    write_config(tmp_path / "tiny.py", warm_start=None, policy=POLICY)
    return ["--config", str(tmp_path / "tiny.py"), "--tasks", "3", "--out", str(tmp_path / "out")]


def test_what_cannot_be_studied(call):
    with pytest.raises(UserError, match="--tasks is 0: give 1 or more"):
        study.main([*call, "--tasks", "0"])
    with pytest.raises(UserError, match="group_size is 3: .* give 4 or more"):
        study.main([*call, "--set", "group_size=3"])


@pytest.mark.slow
def test_the_command_on_a_tiny_run(tmp_path, call, capsys):
    config = tiny_config(warm_start=None, policy=POLICY)
    params = build(config).params
    checkpoint.save(tmp_path / "run" / "checkpoints", 7, {"train": {"params": params}},
                    {"config": to_json(config)})
    with kept_in(tmp_path / "programs", quick=True):
        study.main([*call, "--checkpoint", str(tmp_path / "run"), "--json", "-"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    before, after = (found["policies"][name] for name in (
        "before training", f"{tmp_path / 'run'}, step 7"))
    assert before == after and set(before) == {"progress", "binary"}
    assert (found["tasks"], found["rollouts"], found["temperature"]) == (3, 4, 1.0)
    for figures in before.values():
        assert figures["zones"]["all"]["tasks"] == 3
        tasks = figures["per_task"]
        assert all((norm > 0) == (var > 1e-8) for norm, var in zip(tasks["norm"], tasks["var"]))
    assert (tmp_path / "out" / study.FIGURE).read_bytes().startswith(b"\x89PNG")
