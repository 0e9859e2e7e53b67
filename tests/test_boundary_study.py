"""Simulated policies: what tells boundary tasks, and whether the pool follows them. Small
versions of what docs/boundary.md reports."""

import dataclasses

import numpy as np
import pytest
import scipy.stats

from experiments import boundary_study, docs_block
from experiments.boundary_study import BAND, POOL, Reward, Rule, study
from experiments.pool_simulation import simulate
from experiments.pool_study import Arm, base_of, recovery, scenarios, summary
from experiments.simulated_policy import Tasks, at_boundary, binary_tasks, fractional_tasks
from rods_jax.config import UserError

K = 8
SMALL = base_of(seeds=64, epochs=50, tasks_per_step=32)


@pytest.fixture(scope="module")
def found():
    return {(f.reward, f.rule): f for reward in Reward for f in study(reward, K, 32 * POOL, 3)}


def test_task_distributions_are_what_they_say():
    rng = np.random.default_rng(0)
    for tasks in (binary_tasks(rng, 400), fractional_tasks(rng, 400)):
        np.testing.assert_allclose(tasks.probability_MxU.sum(axis=1), 1.0)
        rewards_MxK = tasks.draw(rng, 4000)
        assert set(np.unique(rewards_MxK)) <= set(tasks.values_U.tolist())
        error_M = np.sqrt(tasks.var_M / 4000)
        assert (abs(rewards_MxK.mean(axis=1) - tasks.mean_M) <= 5 * error_M + 1e-6).all()
        np.testing.assert_allclose(rewards_MxK.var(axis=1), tasks.var_M, atol=0.02)


def test_the_true_boundary_needs_the_band_and_variance():
    always_half, coin, rare = [0, 1, 0], [0.5, 0, 0.5], [0.9, 0, 0.1]
    tasks = Tasks(np.array([always_half, coin, rare], float))
    assert at_boundary(tasks, BAND).tolist() == [False, True, False]


def test_recall_and_precision_are_those_of_the_binomial(found):
    """Success with probability uniform in 0..1 (three fifths of the tasks), else never or always:
    what a mean of K rewards in the band says, by integration."""
    p = (np.arange(20_000) + 0.5) / 20_000
    means = np.arange(K + 1) / K
    inside = (means >= 0.20) & (means <= 0.85)
    called = scipy.stats.binom.pmf(np.arange(K + 1)[:, None], K, p)[inside].sum(axis=0)
    true = (p >= 0.20) & (p <= 0.85)
    for rule in (Rule.BAND, Rule.ZONES):
        got = found[Reward.BINARY, rule]
        assert got.recall == pytest.approx(called[true].mean(), abs=4 * got.recall_error)
        expected = called[true].sum() / called.sum()
        assert got.precision == pytest.approx(expected, abs=4 * got.precision_error)


def test_variance_matters_for_fractions_alone(found):
    """Where rewards are 0 or 1 a mean in the band has variance; with fractions, tasks that always
    get the same one pass the band, and those at a half get the highest phi."""
    binary, fractional = ({rule: found[reward, rule] for rule in Rule} for reward in Reward)
    assert binary[Rule.BAND].precision == binary[Rule.ZONES].precision
    assert fractional[Rule.ZONES].precision > fractional[Rule.BAND].precision + 0.15
    assert fractional[Rule.ZONES].recall > fractional[Rule.BAND].recall - 0.10
    assert fractional[Rule.BAND].seeds < 0.5 < 0.9 < fractional[Rule.ZONES].seeds


def test_visits_add_and_intervals_trade_precision_for_recall(found):
    for reward in Reward:
        one, interval, pooled = (found[reward, rule] for rule in (
            Rule.ZONES, Rule.INTERVAL, Rule.POOLED))
        assert interval.recall > one.recall + 0.02 and interval.precision < one.precision
        assert pooled.recall > one.recall + 0.02 and pooled.precision > one.precision + 0.02


def test_the_table_has_every_row_and_replaces_the_old_one(tmp_path, capsys):
    page = tmp_path / "page.md"
    begin, end = docs_block.marks("boundary_study")
    page.write_text(f"Above\n{begin}\nold\n{end}\nBelow\n")
    boundary_study.main(["--tasks", str(32 * POOL), "--rollouts", str(K), "--out", str(page)])
    text = page.read_text()
    assert text.startswith("Above\n<!--") and text.endswith("-->\nBelow\n") and "old" not in text
    assert text.count("| binary |") == text.count("| fractional |") == len(Rule)
    assert capsys.readouterr().out.strip() in text
    with pytest.raises(UserError, match="multiple of 256"):
        boundary_study.main(["--tasks", "100"])
    page.write_text("no marks")
    with pytest.raises(UserError, match="page.md: no marks <!-- begin x -->"):
        docs_block.write_block(page, "x", "table")


@pytest.fixture(scope="module")
def cases():
    return scenarios(SMALL)


@pytest.fixture(scope="module")
def runs(cases):
    """Simulated when first asked for."""
    class Runs(dict):
        def __missing__(self, arm):
            self[arm] = simulate(cases[arm])
            return self[arm]

    return Runs()


def test_a_static_pool_runs_dry(cases):
    rows = simulate(dataclasses.replace(cases[Arm.STATIC], epochs=160))
    got = summary(rows)
    assert rows[0].true_share > 0.4 and got.asked == got.admitted == 0
    assert got.true_last < 0.2 and got.drawn_last < 0.2


def test_synthesis_from_seeds_alone_ends_with_the_seeds(cases):
    """The paper's rules: when every original seed is mastered there is no parent."""
    rows = simulate(dataclasses.replace(cases[Arm.PAPER], epochs=160))
    assert summary(rows).true_last < 0.2
    assert rows[len(rows) // 4].asked > 0 and rows[-1].asked == rows[-10].asked


def test_variants_as_seeds_hold_the_boundary(runs):
    got = summary(runs[Arm.WIDE])
    assert got.true_least > 0.5 and got.drawn_least > 0.5 and got.seen_last > 0.5
    assert got.lost == 0


def test_an_outage_loses_nothing_and_passes(cases, runs):
    rows, outage = runs[Arm.OUTAGE], cases[Arm.OUTAGE].outage
    assert all(row.lost == 0 for row in rows)
    assert rows[outage.last].refused["outage"] > 0
    assert rows[outage.last + 1].admitted == rows[outage.last].admitted < rows[-1].admitted
    assert rows[-1].true_share > 0.5


@pytest.mark.slow
def test_a_forgotten_category_comes_back_by_probes():
    """200 epochs: variants have left the seeds behind, so that without probes of retired tasks
    nothing of the category is left to train on."""
    cases = scenarios(base_of(seeds=100, epochs=200))
    probes, blind = (recovery(simulate(cases[arm]), cases[arm].forgetting)
                     for arm in (Arm.FORGET_PROBES, Arm.FORGET_BLIND))
    assert probes.epochs is not None and probes.epochs < 50 and probes.revived > 0
    assert probes.last > probes.before / 2
    assert blind.epochs is None and blind.last < blind.before / 10
