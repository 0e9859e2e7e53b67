import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from rods_jax import boundary
from rods_jax.boundary import BoundaryConfig, GroupStats, Interval, SeedRule, Zone

N = 24
stats_of = jax.jit(boundary.group_stats)
zones_of = jax.jit(boundary.zones, static_argnames="config")
choose = jax.jit(boundary.choose_seeds, static_argnames=("config", "rule", "rollouts"))
closeness_of = jax.jit(boundary.popoviciu_closeness)


def groups(*rows):
    """Statistics of up to four groups of up to 21 rollouts, in one shape."""
    rewards, valid = np.zeros((4, 21), np.float32), np.zeros((4, 21), bool)
    for t, row in enumerate(rows):
        rewards[t, : len(row)], valid[t, : len(row)] = row, True
    return jax.tree.map(lambda x: x[: len(rows)], stats_of(rewards, valid))


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from([1, 3, 5]))
def test_group_stats_match_float64(seed, turns):
    rng = np.random.default_rng(seed)
    rewards = rng.integers(0, turns + 1, (6, 16)) / turns
    valid = rng.random((6, 16)) < rng.choice([0.1, 0.9])
    noisy = np.where(valid, rewards, rng.choice([np.nan, np.inf, 7.0])).astype(np.float32)
    stats = stats_of(noisy, valid)
    for t in range(6):
        kept = rewards[t][valid[t]]
        assert stats.count_T[t] == len(kept)
        assert stats.mean_T[t] == pytest.approx(kept.mean() if len(kept) else 0.0, abs=1e-6)
        assert stats.var_T[t] == pytest.approx(
            kept.var(ddof=1) if len(kept) > 1 else 0.0, abs=1e-6)
    closeness = np.asarray(closeness_of(stats))
    assert (closeness >= 0).all() and (closeness <= 1 + 1e-4).all()
    assert {str(x.dtype) for x in jax.tree.leaves(stats)} == {"float32", "int32"}


def test_statistics_are_of_the_group_not_of_the_batch():
    stats = groups([0, 0, 0, 1], [1, 1, 1, 1])
    np.testing.assert_allclose(stats.mean_T, [0.25, 1.0])
    np.testing.assert_allclose(stats.var_T, [0.25, 0.0])  # ddof 1
    single = groups([1.0], [0.5])
    np.testing.assert_array_equal(single.var_T, [0.0, 0.0])


def test_zone_of_dead_groups_is_told_group_by_group():
    # One live group beside a dead one: the batch as a whole has variance, group 0 has none.
    stats = groups([1, 1], [0, 1])
    zone = zones_of(stats, config=BoundaryConfig())
    assert [Zone(int(z)) for z in zone] == [Zone.MASTERED, Zone.BOUNDARY]


def test_fractional_group_in_the_band_without_variance_is_silent():
    stats = groups([0.5] * 16, [1 / 3] * 16, [0.0, 1.0] * 8)
    zone = zones_of(stats, config=BoundaryConfig())
    assert [Zone(int(z)) for z in zone] == [Zone.SILENT, Zone.SILENT, Zone.BOUNDARY]


def test_ends_of_the_band_belong_to_it_in_spite_of_rounding():
    low, high = np.zeros(5), np.full(20, 1.0)
    low[0], high[:3] = 1.0, 0.0
    for rewards, inside in ((low, True), (high, True), (np.append(low, 0), False),
                            (np.append(high, 1), False)):
        zone = zones_of(groups(rewards), config=BoundaryConfig())
        assert bool(zone[0] == Zone.BOUNDARY) is inside
    for g in range(2, 17):  # sums of 0.2 drift either way; the mean is still 0.2
        assert zones_of(groups([0.2] * g), config=BoundaryConfig())[0] == Zone.SILENT


def test_no_usable_reward_is_unseen_never_hard():
    rewards = np.array([[0, 0], [np.nan, 1], [np.inf, 0]], np.float32)
    valid = np.array([[False, False], [True, True], [True, True]])
    zone = zones_of(stats_of(rewards, valid), config=BoundaryConfig())
    assert [Zone(int(z)) for z in zone] == [Zone.UNSEEN] * 3
    assert zone.dtype == jnp.int8


def test_phi_and_closeness():
    np.testing.assert_allclose(boundary.phi(jnp.array([0.0, 0.25, 0.5, 1.0])), [0, 0.75, 1, 0])
    stats = groups([0, 0, 0, 1], [0.5] * 4, [0, 0, 0.5, 1.0], [1.0] * 4)
    m = 0.375
    expected = [1.0, 0.0, np.var([0, 0, 0.5, 1]) / (m * (1 - m)), 0.0]
    np.testing.assert_allclose(closeness_of(stats), expected, rtol=1e-5)


def test_signal_is_the_share_of_what_variance_could_be():
    stats = groups([0, 0, 1, 1], [0.5] * 4, [0, 0, 0.5, 1.0], [1.0])
    got = boundary.signal(stats)  # a single rollout is not judged
    third = np.var([0, 0, 0.5, 1])
    assert float(got.of_quarter) == pytest.approx((1 + 0 + 4 * third) / 3, rel=1e-5)
    assert float(got.of_bound) == pytest.approx(
        (1 + 0 + third / (0.375 * 0.625)) / 3, rel=1e-5)
    none = boundary.signal(groups([1.0], [0.0]))
    assert float(none.of_quarter) == float(none.of_bound) == 0


# ---------------------------------------------------------------- intervals


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(st.integers(1, 21), st.integers(0, 21), st.sampled_from([0.5, 0.9, 0.99]))
def test_wilson_is_scipys(n, wins, confidence):
    wins = min(wins, n)
    config = BoundaryConfig(interval=Interval.WILSON, confidence=confidence)
    low, high = boundary.mean_interval(groups([1.0] * wins + [0.0] * (n - wins)), config)
    want = scipy.stats.binomtest(wins, n).proportion_ci(confidence, method="wilson")
    np.testing.assert_allclose([low[0], high[0]], want, atol=2e-6)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(st.integers(0, 2**32 - 1), st.integers(2, 21), st.sampled_from([0.5, 0.9]))
def test_bernstein_is_its_formula(seed, n, confidence):
    rewards = np.random.default_rng(seed).integers(0, 4, n) / 3
    config = BoundaryConfig(interval=Interval.BERNSTEIN, confidence=confidence)
    low, high = boundary.mean_interval(groups(rewards), config)
    log = np.log(2 / (1 - confidence))
    half = np.sqrt(2 * rewards.var(ddof=1) * log / n) + 7 * log / (3 * (n - 1))
    np.testing.assert_allclose(
        [low[0], high[0]], np.clip([rewards.mean() - half, rewards.mean() + half], 0, 1),
        atol=3e-6)


@pytest.mark.parametrize("interval", Interval)
def test_an_interval_holds_the_mean_and_knows_nothing_without_rollouts(interval):
    config = BoundaryConfig(interval=interval)
    low, high = boundary.mean_interval(groups([], [0.5, 1.0], [1.0] * 21), config)
    assert (low[0], high[0]) == (0, 1)
    assert low[1] <= 0.75 <= high[1] and low[2] <= 1 <= high[2]


def test_intervals_cover_the_expected_reward_as_often_as_they_say():
    rng, covered = np.random.default_rng(0), {interval: [] for interval in Interval}
    for p in np.linspace(0.05, 0.95, 19):
        stats = stats_of((rng.random((2000, 16)) < p).astype(np.float32), np.ones((2000, 16), bool))
        for interval, shares in covered.items():
            low, high = boundary.mean_interval(stats, BoundaryConfig(interval=interval))
            shares.append(float(((low <= p) & (p <= high)).mean()))
    # Wilson's coverage swings with p around what it says; Bernstein's is at least that.
    assert np.mean(covered[Interval.WILSON]) == pytest.approx(0.9, abs=0.015)
    assert min(covered[Interval.WILSON]) > 0.82 and min(covered[Interval.BERNSTEIN]) > 0.9


def test_with_an_interval_luck_alone_moves_no_task_out_of_the_band():
    rows = [0.0] * 16, [0.0] * 14 + [1.0] * 2, [1.0] * 16, [1.0] * 15 + [0.0]
    plain = zones_of(groups(*rows), config=BoundaryConfig())
    assert plain.tolist() == [Zone.HARD, Zone.HARD, Zone.MASTERED, Zone.MASTERED]
    careful = BoundaryConfig(interval=Interval.WILSON)
    assert zones_of(groups(*rows), config=careful).tolist() == [
        Zone.HARD, Zone.BOUNDARY, Zone.MASTERED, Zone.BOUNDARY]


def test_more_rollouts_make_a_verdict():
    config = BoundaryConfig(interval=Interval.WILSON)
    few, many = (GroupStats(np.float32([0.95]), np.float32([0.05]), np.float32([n]))
                 for n in (16, 160))
    assert zones_of(few, config=config)[0] == Zone.BOUNDARY
    assert zones_of(many, config=config)[0] == Zone.MASTERED


# ---------------------------------------------------------------- seeds


MIXED_K = 5
RULES = {  # the rule: (which tasks fit, their priority), of one task
    SeedRule.PHI: (lambda s, c: c.alpha_minus <= s["mean"] <= c.alpha_plus
                   and s["var"] > c.var_floor, lambda s: 4 * s["mean"] * (1 - s["mean"])),
    SeedRule.VARIANCE: (lambda s, c: s["var"] > c.var_floor, lambda s: s["var"]),
    SeedRule.MIXED: (lambda s, c: 0 < s["mean"] < 1,
                     lambda s: 1 - s["mean"] ** MIXED_K - (1 - s["mean"]) ** MIXED_K),
    SeedRule.HARDEST: (lambda s, c: True, lambda s: -s["mean"]),
}


def seeds_by_hand(pool, epoch, config, rule=SeedRule.PHI):
    """The greedy rule, one task at a time."""
    taken, left = [], [config.quota] * boundary.N_CATEGORIES
    fits, priority = RULES[rule]
    tasks = [{name: values[i].astype(np.float64) for name, values in pool.items()}
             for i in range(N)]
    # Priorities that are equal on paper are equal here.
    order = sorted(range(N), key=lambda i: (-round(priority(tasks[i]), 6), i))
    for i in order:
        last = pool["last"][i]
        if (pool["eligible"][i] and pool["uid"][i] >= 0 and pool["count"][i] > 0
                and fits(tasks[i], config) and (last < 0 or epoch >= last + config.cooldown_epochs)
                and left[pool["category"][i]] > 0 and len(taken) < config.budget):
            left[pool["category"][i]] -= 1
            taken.append(i)
    return taken


def random_pool(rng):
    return {
        "uid": np.where(rng.random(N) < 0.1, -1, np.arange(N)).astype(np.int32),
        "mean": (rng.integers(0, 17, N) / 16).astype(np.float32),
        "var": (rng.integers(0, 5, N) / 16).astype(np.float32),
        "count": rng.integers(0, 3, N).astype(np.int32),
        "category": rng.integers(0, boundary.N_CATEGORIES, N).astype(np.int8),
        "eligible": rng.random(N) < 0.8,
        "last": rng.integers(-1, 4, N).astype(np.int32),
    }


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from([
    BoundaryConfig(), BoundaryConfig(budget=5, quota=2, cooldown_epochs=0),
    BoundaryConfig(budget=40, quota=9, cooldown_epochs=2)]), st.integers(0, 5),
    st.sampled_from(list(RULES)))
def test_seed_choice_equals_the_greedy_rule(seed, config, epoch, rule):
    pool = random_pool(np.random.default_rng(seed))
    index, valid = choose(*pool.values(), epoch, config=config, rule=rule, rollouts=MIXED_K)
    assert index.shape == valid.shape == (config.budget,)
    expected = seeds_by_hand(pool, epoch, config, rule)
    np.testing.assert_array_equal(index, expected + [-1] * (config.budget - len(expected)))
    np.testing.assert_array_equal(valid, np.arange(config.budget) < len(expected))


def test_random_seeds_ignore_the_band_but_keep_quota_budget_and_cooldown():
    config = BoundaryConfig(budget=6, quota=2)
    pool = random_pool(np.random.default_rng(3))
    pool |= {"mean": np.zeros(N, np.float32), "count": np.zeros(N, np.int32)}
    index, valid = choose(*pool.values(), 3, config=config)
    assert not valid.any()
    draw = functools.partial(choose, *pool.values(), 3, config=config, rule=SeedRule.RANDOM)
    open_slots = np.flatnonzero(
        pool["eligible"] & (pool["uid"] >= 0) & ((pool["last"] < 0) | (3 - pool["last"] >= 1)))
    seen = set()
    for k in range(60):
        index, valid = draw(key=jax.random.key(k))
        chosen = np.asarray(index)[np.asarray(valid)]
        assert len(set(chosen)) == len(chosen) <= 6
        assert np.bincount(pool["category"][chosen]).max() <= 2
        seen |= set(chosen.tolist())
    assert seen == set(open_slots.tolist())
    again = [np.asarray(draw(key=jax.random.key(5))[0]).tolist() for _ in range(2)]
    assert again[0] == again[1]
    with pytest.raises(ValueError, match="pass key"):
        boundary.choose_seeds(*pool.values(), 3, config, SeedRule.RANDOM)


@pytest.mark.parametrize("wrong, message", [
    ({"alpha_minus": 0.9}, "alpha_minus <= alpha_plus"), ({"alpha_plus": 1.5}, "alpha_plus"),
    ({"var_floor": float("nan")}, "var_floor"), ({"budget": 0}, "budget"),
    ({"quota": -1}, "quota"), ({"confidence": 1.0}, "confidence"),
    ({"cooldown_epochs": -1}, "cooldown_epochs"),
    ({"budget": 10**11}, "budget"), ({"confidence": 1 - 2**-53}, "confidence")])
def test_config_refuses(wrong, message):
    with pytest.raises(ValueError, match=message):
        BoundaryConfig(**wrong)


def test_group_stats_refuses_other_shapes():
    with pytest.raises(AssertionError):
        boundary.group_stats(jnp.zeros((2, 3)), jnp.ones((2, 4), bool))
