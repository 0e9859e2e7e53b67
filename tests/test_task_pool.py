"""The pool's corner cases one by one. Most run eagerly on one set of shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from rods_jax import task_pool as tp
from rods_jax.boundary import BoundaryConfig, GroupStats, Interval, SeedRule, Zone
from rods_jax.task_pool import Dropped, Origin, PoolConfig, Priority, Reason

N, P, A, T = 32, 3, 6, 5
SEED, GENERATED = Origin.SEED, Origin.GENERATED
BOUNDARY = BoundaryConfig(budget=3, quota=2)


def add(config, state, uids, sources, categories=None, step=0):
    """One call of `add` with one-token prompts: (state, slots of these tasks)."""
    n = len(uids)
    rows, keep = tp.make_rows(
        [[1]] * n, uids, [-1] * n, categories or [0] * n, sources, A, P)
    state, placed = tp.add(state, rows, keep, np.int32(step), config)
    return state, placed.tolist()[:n]


def pool_of(config, sources, categories=None, means=None):
    """A pool with uid i in slot i, observed once where `means` are given."""
    state, n = tp.init(config, P), len(sources)
    categories = categories or [0] * n
    for i in range(0, n, A):
        part = slice(i, i + A)
        state, _ = add(config, state, range(n)[part], sources[part], categories[part])
    if means is not None:
        state = report(config, state, range(n), range(n), means)
    return state


def report(config, state, indices, uids, means, step=1, count=16):
    """`update_stats` with these means, T tasks a call."""
    for i in range(0, len(means), T):
        part = slice(i, min(i + T, len(means)))
        fill = [0] * (T - len(means[part]))
        groups = GroupStats(np.array([*means[part], *fill], np.float32),
                            np.full(T, 0.1, np.float32), np.full(T, count, np.int32))
        state = tp.update_stats(
            state, np.array([*indices[part], *fill], np.int32),
            np.array([*uids[part], *[-1] * len(fill)], np.int32), groups, np.int32(step), config)
    return state


def draw(config, state, seed=0, start=0, **kw):
    return tp.sample(state, jax.random.key(seed), T, np.int32(start), config, **kw)


def test_capacity_counts_tasks():
    for capacity, asked in ((16, 16), (1, 16), (4, 5)):
        config = PoolConfig(capacity=capacity)

        @jax.jit
        def fill_and_draw(rows, keep):
            state, placed = tp.add(tp.init(config, 1), rows, keep, 0, config)
            return state, placed, tp.sample(state, jax.random.key(0), asked, 0, config)

        rows, keep = tp.make_rows([[1]] * asked, range(asked), [-1] * asked, [0] * asked,
                                  [SEED] * asked, asked, 1)
        state, placed, got = fill_and_draw(rows, keep)
        over = asked - capacity
        assert placed.tolist() == [*range(capacity)] + [-1] * over
        assert state.dropped.tolist() == [over, 0, 0, 0]
        assert sorted(got.uids_T.tolist()) == [-1] * over + list(range(capacity))
        assert got.filled_T.tolist() == [True] * capacity + [False] * over


def test_an_empty_pool_fills_nothing():
    config = PoolConfig(capacity=N)
    got = draw(config, tp.init(config, P))
    assert not got.filled_T.any() and got.indices_T.tolist() == [-1] * T
    assert float(tp.stats(tp.init(config, P), BOUNDARY).mean_reward) == 0.0


def test_a_thousand_updates_do_not_drift():
    """Draws follow the slots after 1000 updates: all filled, none twice, weights to 1e-5."""
    config = PoolConfig(capacity=N, priority=Priority.PHI, sweep=False)
    state = pool_of(config, [SEED] * 6)

    def body(state, key):
        drawn = tp.sample(state, key, T, 0, config)
        mean_T = jax.random.uniform(key, (T,))
        groups = GroupStats(mean_T, mean_T, jnp.full((T,), 16))
        return tp.update_stats(state, drawn.indices_T, drawn.uids_T, groups, 1, config), (
            drawn, mean_T)

    keys = jax.random.split(jax.random.key(0), 1000)
    state, (drawn, mean_SxT) = jax.jit(lambda s: jax.lax.scan(body, s, keys))(state)
    indices = np.asarray(drawn.indices_T)
    assert drawn.filled_T.all() and set(indices.ravel()) == set(range(6))  # the newest too
    assert all(len(set(row)) == T for row in indices.tolist())
    last = dict(zip(indices.ravel().tolist(), np.asarray(mean_SxT).ravel().tolist()))
    np.testing.assert_allclose(state.mean_N[:6], [last[i] for i in range(6)], rtol=1e-5)
    assert int(state.visits_N.sum()) == 1000 * T


@pytest.mark.parametrize("priority", list(Priority))
def test_draws_have_the_right_shares(priority):
    config = PoolConfig(capacity=N, priority=priority, sweep=False)
    means = [0.5, 0.25, 0.75, 0.0, 1.0, 0.5, 0.125]
    state = pool_of(config, [SEED] * 7, means=means)
    keys = jax.random.split(jax.random.key(7), 3000)
    drawn = jax.jit(jax.vmap(lambda k: tp.sample(state, k, 3, 0, config)))(keys)
    indices = np.asarray(drawn.indices_T)
    assert all(len(set(row)) == 3 for row in indices.tolist()) and drawn.filled_T.all()
    weight = np.ones(7)
    if priority is Priority.PHI:
        weight = np.maximum(4 * np.array(means) * (1 - np.array(means)), config.phi_floor)
    first = np.bincount(indices[:, 0], minlength=N)
    assert first[7:].sum() == 0
    assert scipy.stats.chisquare(first[:7], 3000 * weight / weight.sum()).pvalue > 0.001


def test_an_epoch_visits_each_task_once_and_ends_on_a_full_batch():
    config = PoolConfig(capacity=N)
    state, step, tries = pool_of(config, [SEED] * 12), 0, 0
    for _ in range(3):
        start, visited = step, []
        while int(tp.unseen(state, start)):
            got = draw(config, state, seed=step, start=start)
            assert got.filled_T.all()
            uids = got.uids_T.tolist()
            visited += uids
            tries += 0 in uids
            broken = 0 if 0 in uids else 16  # task 0 breaks every batch that it is in
            state = report(config, state, got.indices_T.tolist(), uids, [0.5] * T, step, broken)
            step += 1
        assert step - start == 3 and sorted(visited[:12]) == list(range(12))
    assert int(state.visits_N[0]) == 0 and int(state.failures_N[0]) == tries


def test_a_task_that_always_breaks_is_parked_as_failed_never_as_hard():
    config = PoolConfig(capacity=N)
    state = pool_of(config, [SEED, SEED, GENERATED, GENERATED], means=[0.5, 0.5])
    for step in range(3):
        state, reason = tp.retire(state, step, config)
        assert not reason.any()
        state = report(config, state, [0, 2], [0, 2], [0.0, 0.0], step, count=0)
    state, reason = tp.retire(state, 3, config)
    assert reason.tolist() == [Reason.FAILED, 0, Reason.FAILED] + [0] * (N - 3)
    assert state.mean_N.tolist()[:2] == [0.5, 0.5]


def test_a_task_that_always_breaks_is_parked_and_tried_once_an_epoch():
    config = PoolConfig(capacity=N, max_failures=3)
    state = pool_of(config, [SEED] * 3, means=[0.5, 0.5])
    for step in range(3):
        state = report(config, state, [0, 2], [0, 2], [0.0, 0.0], step, count=0)
    state, reason = tp.retire(state, 3, config)  # one of a category stays
    assert sorted(reason.tolist()[:3]) == [0, Reason.FAILED, Reason.FAILED]
    assert tp.is_live(state).tolist()[:3] == [False, True, False]
    assert set(draw(config, state).uids_T.tolist()) == {1, -1}
    kept, _ = add(config, state, range(10, 16), [GENERATED] * A)
    assert kept.uid_N.tolist()[:3] == [0, 1, 2]  # a parked seed keeps its slot
    state, back = tp.revive(state, config)
    assert back.tolist()[:3] == [True, False, True]
    state, reason = tp.retire(state, 4, config)
    assert not reason.any()  # it may show what it can, once
    state = report(config, state, [0], [0], [0.0], 4, count=0)  # broken still
    state = report(config, state, [2], [2], [0.0], 4)  # works, and is hard: seeds stay
    state, reason = tp.retire(state, 5, config)
    assert reason.tolist()[:3] == [Reason.FAILED, 0, 0]
    assert state.failures_N.tolist()[:3] == [3, 0, 0]


def test_a_parked_seed_that_works_again_comes_back_whatever_its_reward():
    config = PoolConfig(capacity=N, max_failures=1, probe_rate=0.5)
    state = pool_of(config, [SEED] * 2, means=[0.5, 0.5])
    state = report(config, state, [0], [0], [0.0], 2, count=0)
    state, _ = tp.retire(state, 2, config)
    state = report(config, state, [0], [0], [0.0], 3)  # a probe: too hard, but no outage
    state, back = tp.revive(state, config)
    assert back.tolist()[:2] == [True, False] and state.failures_N[0] == 0
    assert float(state.mean_N[0]) == 0.0


def test_a_report_for_another_slot_does_not_hide_that_of_the_task():
    config = PoolConfig(capacity=N)
    state = pool_of(config, [SEED] * 4, means=[0.5] * 4)
    visits = int(state.visits_N[0])
    state = report(config, state, [3, 0, 0], [0, 0, 0], [0.25, 0.75, 1.0], 2)
    assert int(state.mismatched) == 1 and int(state.visits_N[0]) == visits + 1
    assert float(state.mean_N[0]) == 0.75


@pytest.mark.parametrize("least", [
    {"priority": tp.Priority.PHI, "phi_floor": 1e-6}, {"stale_bonus": 1e6, "sweep": False}])
def test_extreme_weights_draw_every_task(least):
    config = PoolConfig(capacity=N, **least)
    state = pool_of(config, [SEED] * 4, means=[0.0, 1.0, 0.0, 1.0])
    drawn = {tuple(tp.sample(state, jax.random.key(k), 2, 2, config, step=10**6).indices_T.tolist())
             for k in range(12)}
    assert {slot for pair in drawn for slot in pair} == {0, 1, 2, 3}


def test_estimates_forget_by_rollouts():
    config = PoolConfig(capacity=N, ema_keep=0.5)
    state = pool_of(config, [SEED], means=[0.2])
    state = report(config, state, [0], [0], [0.8], 2, count=4)
    assert float(state.rollouts_N[0]) == 0.5 * 16 + 4
    assert float(state.mean_N[0]) == pytest.approx((8 * 0.2 + 4 * 0.8) / 12, abs=1e-6)
    state = report(config, state, [0], [0], [0.0], 3, count=0)  # an outage says nothing
    assert float(state.rollouts_N[0]) == 12


def test_with_an_interval_luck_alone_retires_nothing():
    config = PoolConfig(capacity=N, min_live=0, category_floor=0)
    band = BoundaryConfig(interval=Interval.WILSON)
    state = pool_of(config, [GENERATED] * 3, means=[1.0, 0.0, 0.125])
    state, reason = tp.retire(state, 1, config, band)
    # 16 of 16 may be 0.86, 0 of 16 at most 0.14. (The burn-in has no interval in `report`.)
    assert reason.tolist()[:3] == [0, 0, 0]
    assert state.reason_N.tolist()[:3] == [0, Reason.BURN_IN, Reason.BURN_IN]
    groups = GroupStats(np.float32([0.0, 0.125]), np.float32([0, 0.1]), np.int32([16, 16]))
    trial = pool_of(config, [GENERATED] * 2)
    trial = tp.update_stats(trial, np.int32([0, 1]), np.int32([0, 1]), groups, 1, config, band)
    assert trial.reason_N.tolist()[:2] == [Reason.BURN_IN, 0]


def test_stale_tasks_are_drawn_more_often():
    config = PoolConfig(capacity=N, sweep=False, stale_bonus=0.5)
    state = pool_of(config, [SEED] * 4)
    for i, step in enumerate((0, 2, 6, 10)):
        state = report(config, state, [i], [i], [0.5], step)
    keys = jax.random.split(jax.random.key(3), 3000)
    drawn = jax.jit(jax.vmap(lambda k: tp.sample(state, k, 2, 0, config, step=10)))(keys)
    first = np.bincount(np.asarray(drawn.indices_T)[:, 0], minlength=4)
    weight = 1 + 0.5 * np.array([10, 8, 4, 0])
    assert scipy.stats.chisquare(first, 3000 * weight / weight.sum()).pvalue > 0.001
    with pytest.raises(ValueError, match="pass step"):
        draw(config, state)


def test_stale_tasks_go_lowest_phi_first_and_unobserved_last():
    config = PoolConfig(capacity=N, stale_after=3, min_live=2)
    state = pool_of(config, [GENERATED] * 4, [1] * 4, means=[0.5, 0.25])
    state, reason = tp.retire(state, 3, config)
    assert not reason.any()  # added in step 0 or seen in step 1: three steps are allowed
    state, reason = tp.retire(state, 5, config)
    assert reason.tolist()[:4] == [Reason.STALE, Reason.STALE, 0, 0]
    tight = PoolConfig(capacity=N, stale_after=3, min_live=1, category_floor=2)
    state = pool_of(tight, [GENERATED] * 3, [1] * 3, means=[0.5, 0.25])
    state, reason = tp.retire(state, 5, tight)
    assert reason.tolist()[:3] == [0, Reason.STALE, 0]


def test_stale_and_nonfinite_reports_are_never_written():
    config = PoolConfig(capacity=N)
    state = pool_of(config, [SEED] * 3, means=[0.5, 0.5, 0.5])
    means = [0.1, np.nan, np.inf, 1, 1]
    state = report(config, state, [0, 1, 2, -1, 40], [7, 1, 2, -1, 2], means, 2)
    assert state.mean_N.tolist()[:4] == [0.5, 0.5, 0.5, 0.0]
    assert state.visits_N.tolist()[:4] == [1, 1, 1, 0]
    assert (int(state.mismatched), int(state.nonfinite)) == (2, 2)
    assert state.uid_N.tolist()[:4] == [0, 1, 2, -1]


def test_thresholds_belong_to_the_pool_and_seeds_stay():
    config = PoolConfig(capacity=N, min_live=0, category_floor=0, burn_in=0)
    means = [0.95, 0.2, 0.951, 0.199, 1.0, 0.0]
    state = pool_of(config, [GENERATED] * 4 + [SEED] * 2, means=means)
    state, reason = tp.retire(state, 1, config)
    assert reason.tolist()[:6] == [0, 0, Reason.MASTERED, Reason.HARD, 0, 0]
    assert state.status_N.tolist()[:7] == [2, 2, 3, 3, 2, 2, 0]


def test_an_outage_cannot_empty_the_pool_or_a_category():
    config = PoolConfig(capacity=N, min_live=6, category_floor=2)
    categories = [0] * 5 + [1] * 4 + [2] * 2
    state = pool_of(config, [GENERATED] * 11, categories, means=[0.0] * 11)  # at burn-in
    counts = tp.stats(state, BOUNDARY)
    assert counts.live_by_category.tolist() == [2, 2, 2, 0] and int(counts.live) == 6
    assert counts.live_by_zone[Zone.HARD] == 6 and counts.live_by_source.tolist() == [0, 6]
    for call in (lambda s: tp.retire(s, 2, config), lambda s: tp.prune(s, config)):
        state, changed = call(state)
        assert not changed.any()


def test_retired_slots_are_reused_last_and_oldest_first():
    config = PoolConfig(capacity=N, min_live=0, category_floor=0)
    state = pool_of(config, [GENERATED] * 2 + [SEED] * 28, means=[0, 0])
    assert state.status_N.tolist() == [3, 3] + [2] * 28 + [0, 0]
    state = state.replace(added_step_N=state.added_step_N.at[0].set(1))  # slot 1 is older
    state, placed = add(config, state, range(50, 55), [GENERATED] * 5, step=3)
    assert placed == [30, 31, 1, 0, -1]
    assert state.uid_N.tolist() == [53, 52, *range(2, 30), 50, 51]
    assert state.visits_N.tolist() == [0] * N
    assert state.dropped.tolist() == [1, 0, 0, 0]


def test_unobserved_tasks_are_not_pruned_but_close_the_door():
    config = PoolConfig(capacity=N, p_max=3)
    state = pool_of(config, [GENERATED] * 3)
    state, gone = tp.prune(state, config)
    assert not gone.any()
    state, placed = add(config, state, [20, 21], [GENERATED, SEED])
    assert placed == [-1, 3] and state.dropped[Dropped.P_MAX] == 1  # the seed enters
    state = report(config, state, [0, 1], [0, 1], [0.5, 0.9])
    state, placed = add(config, state, [30, 31], [GENERATED] * 2, step=2)
    assert placed == [4, 5]
    state, gone = tp.prune(state, config)
    assert np.flatnonzero(gone).tolist() == [0, 1]  # both observed tasks; 2, 30, 31 wait
    assert int(tp.stats(state, BOUNDARY).unobserved) == 4


def test_retired_tasks_are_probed_and_come_back():
    config = PoolConfig(capacity=N, probe_rate=0.4, p_max=4)
    state = pool_of(config, [SEED] * 4 + [GENERATED] * 2, means=[0.5] * 4 + [0, 0])
    got = draw(config, state, start=2)
    assert sorted(got.uids_T.tolist()[:2]) == [4, 5]  # two of a batch of five
    state = report(config, state, [4, 5], [4, 5], [0.5, 1.0], 2)
    state, back = tp.revive(state, config)
    assert np.flatnonzero(back).tolist() == [4] and int(state.revived) == 1
    state, back = tp.revive(state, config)
    assert not back.any()
    off = PoolConfig(capacity=N)
    assert set(draw(off, state).uids_T.tolist()) == {0, 1, 2, 3, 4}


def test_categories_in_a_batch():
    config = PoolConfig(capacity=N, batch_floor=1)
    state = pool_of(config, [SEED] * 14, [0] * 11 + [1, 2, 3])
    for seed in range(10):
        got = draw(config, state, seed=seed)
        assert set(state.category_N[got.indices_T].tolist()) == {0, 1, 2, 3}
        one = draw(config, state, seed=seed, allowed_C=np.arange(4) == 1)
        assert one.uids_T.tolist() == [11, -1, -1, -1, -1]
    assert int(tp.unseen(state, 9, np.arange(4) == 0)) == 11
    with pytest.raises(ValueError, match="batch_floor 1 in 4 categories does not fit a batch of 3"):
        tp.sample(state, jax.random.key(0), 3, 0, config)
    with pytest.raises(ValueError, match="n_tasks is 0"):
        tp.sample(state, jax.random.key(0), 0, 0, config)


def test_seeds_are_chosen_among_original_tasks_unless_told_otherwise():
    config = PoolConfig(capacity=N)
    state = pool_of(config, [SEED] * 2 + [GENERATED], means=[0.5, 1.0, 0.5])
    state, index, uid, valid = tp.choose(state, jax.random.key(0), 0, BOUNDARY)
    assert uid.tolist() == index.tolist() == [0, -1, -1] and valid.tolist() == [True, False, False]
    state, _, uid, _ = tp.choose(state, jax.random.key(0), 0, BOUNDARY)
    assert uid.tolist() == [-1] * 3  # cooling down
    state, _, uid, _ = tp.choose(state, jax.random.key(0), 1, BOUNDARY, SeedRule.RANDOM, True)
    assert len(set(uid.tolist()) & {0, 1, 2}) == 2  # quota 2, the band does not matter


@pytest.mark.parametrize("beta, live, expected", [
    (0.2, 400, 80), (0.2, 4, 0), (0.2, 35, 7), (0.29, 100, 29), (0.0, 50, 0), (1.0, 1024, 1024)])
def test_admissible(beta, live, expected):
    assert tp.admissible(live, PoolConfig(beta=beta)) == expected


def test_more_is_admissible_while_the_boundary_runs_dry():
    config = PoolConfig(beta=0.2, min_boundary=0.5)
    assert [tp.admissible(100, config, n) for n in (0, 49, 50, 100)] == [100, 100, 20, 20]
    assert tp.admissible(100, PoolConfig(beta=0.2), 0) == 20


@pytest.mark.parametrize("wrong, message", [
    ({"capacity": 0}, "capacity"), ({"p_max": -1}, "p_max"), ({"beta": 1.2}, "beta"),
    ({"ema_keep": 1.0}, "ema_keep"), ({"phi_floor": 0.0}, "phi_floor"),
    ({"retire_hard": 0.9}, "retire_hard <= revive_mastered"),
    ({"probe_rate": float("nan")}, "probe_rate"), ({"min_boundary": 2.0}, "min_boundary"),
    ({"stale_bonus": float("inf")}, "stale_bonus"), ({"stale_bonus": 1e38}, "stale_bonus"),
    ({"phi_floor": 1e-39}, "phi_floor"), ({"probe_rate": 1.0}, "probe_rate"),
    ({"capacity": 10**11}, "capacity"), ({"burn_in": 2**31}, "burn_in")])
def test_config_refuses(wrong, message):
    with pytest.raises(ValueError, match=message):
        PoolConfig(**wrong)


def test_bad_rows_and_prompts():
    with pytest.raises(ValueError, match="prompt of task 7 has 4 tokens"):
        tp.make_rows([[1] * 4], [7], [-1], [0], [0], 2, 3)
    with pytest.raises(ValueError, match="2 tasks for 1 rows"):
        tp.make_rows([[1], [1]], [7, 8], [-1, -1], [0, 0], [0, 0], 1, 3)
    with pytest.raises(ValueError, match="different lengths"):
        tp.make_rows([[1]], [7, 8], [-1], [0], [0], 2, 3)
    with pytest.raises(ValueError, match="max_prompt"):
        tp.init(PoolConfig(), 0)
    config = PoolConfig(capacity=N)
    rows, keep = tp.make_rows(
        [[1, 2]] * 5, [1, 1, 2, 3, 4], [-1] * 5, [0, 0, 0, 4, 0], [0, 0, 0, 0, 2], A, P)
    lengths = np.array([2, 2, 4, 2, 2, 0], np.int32)  # row 2 claims more than it can hold
    state, placed = tp.add(
        tp.init(config, P), rows.replace(prompt_len_A=lengths), keep, np.int32(0), config)
    assert placed.tolist() == [0, -1, -1, -1, -1, -1]
    assert state.dropped.tolist() == [0, 0, 1, 3]
    assert state.prompt_NxP[0].tolist() == [1, 2, 0]
