"""The task pool: a replay buffer of tasks as one pytree of fixed capacity (paper section 3).

Free functions over a frozen state; the caller jits (static: config, n_tasks) and may donate
the state. Shapes never depend on data, so each function is traced once for the life of a
run. Capacity counts tasks, one a slot. Priorities are computed from the slots at each call:
no running total that could drift.

Life of a slot:

    EMPTY --add--> ACTIVE                       an original seed; stays for ever
    EMPTY --add--> TRIAL --update_stats--> ACTIVE or RETIRED (too hard on its burn-in)
                   TRIAL, ACTIVE --retire, prune--> RETIRED --revive--> live again
                                                    RETIRED --add--> the slot is reused
    ACTIVE, TRIAL --retire--> RETIRED as FAILED (seeds too: parked) --revive--> live again

TRIAL and ACTIVE are live, that is, sampled. Guards: no function here takes the live tasks
below `min_live`, nor those of a category below `category_floor`; where that conflicts with
`p_max`, the guards win. A task without an observation has no phi, and none is made up.

One epoch: sample -> roll out -> update_stats, until `unseen` is 0; then retire, revive, add
at most `admissible` new tasks, prune. `step` is the number of the update step; -1 in a slot
means never. An index of -1 means none: mask before indexing, -1 is the last slot in JAX.
"""

from __future__ import annotations

import math

import chex
import jax
import jax.numpy as jnp

from rods_jax import boundary, ranking
from rods_jax.boundary import N_CATEGORIES, BoundaryConfig, GroupStats, SeedRule, Zone
from rods_jax.pool_state import (
    Draw,
    Dropped,
    Origin,
    PoolConfig,
    PoolRows,
    PoolState,
    PoolStats,
    Priority,
    Reason,
    Status,
    init,
    is_live,
    make_rows,
)

__all__ = [
    "Draw", "Dropped", "Origin", "PoolConfig", "PoolRows", "PoolState", "PoolStats", "Priority",
    "Reason", "Status", "add", "admissible", "choose", "init", "is_live", "make_rows", "prune",
    "retire", "revive", "runs_dry", "sample", "stats", "unseen", "update_stats",
]

Array = jax.Array


def _is_generated(state: PoolState) -> Array:
    return state.source_N == int(Origin.GENERATED)


def runs_dry(n_live: int, n_boundary: int, config: PoolConfig) -> bool:
    """Whether fewer than `min_boundary` of the live tasks are at the boundary (see stats). Then
    variants become seeds as well as original tasks, and more are admissible."""
    return n_boundary < config.min_boundary * n_live


def admissible(n_live: int, config: PoolConfig, n_boundary: int | None = None) -> int:
    """How many new tasks an epoch boundary may admit: floor(beta * live tasks), in integer
    arithmetic, so 0.29 of 100 is 29; as many as live where the boundary `runs_dry`, which is
    asked where n_boundary is given."""
    if n_boundary is not None and runs_dry(n_live, n_boundary, config):
        return n_live
    return n_live * round(config.beta * 10_000) // 10_000


def add(
    state: PoolState, rows: PoolRows, keep_A: Array, step: Array | int, config: PoolConfig,
) -> tuple[PoolState, Array]:
    """Places the kept rows in order; returns the state and placed_A, int32 slot or -1.

    Empty slots go first, then those of retired tasks, oldest first. A row is dropped and
    counted for one reason (see Dropped), checked in the order INVALID, DUPLICATE, P_MAX,
    OVERFLOW. A generated row is refused (P_MAX) while p_max live generated tasks have no
    observation, since `prune` could not choose among them. A generated row starts as TRIAL,
    or ACTIVE when burn_in is 0; a seed starts as ACTIVE."""
    chex.assert_rank([rows.prompt_AxP, rows.uid_A, keep_A], [2, 1, 1])
    chex.assert_equal(rows.prompt_AxP.shape[1], state.prompt_NxP.shape[1])
    a, n, p = keep_A.shape[0], state.uid_N.shape[0], state.prompt_NxP.shape[1]
    chex.assert_shape([rows.prompt_len_A, rows.uid_A, rows.parent_A, rows.category_A,
                       rows.source_A], (a,))
    keep_A = jnp.asarray(keep_A, bool)
    uid_A, source_A = jnp.asarray(rows.uid_A), jnp.asarray(rows.source_A)
    length_A, category_A = jnp.asarray(rows.prompt_len_A), jnp.asarray(rows.category_A)
    generated_A = source_A == int(Origin.GENERATED)

    valid_A = ((uid_A >= 0) & (length_A >= 1) & (length_A <= p) & (category_A >= 0)
               & (category_A < N_CATEGORIES) & (generated_A | (source_A == int(Origin.SEED))))
    valid_A &= keep_A
    same_AxA = (uid_A[:, None] == uid_A) & valid_A & jnp.tri(a, k=-1, dtype=bool)
    known_A = (uid_A[:, None] == state.uid_N).any(axis=1)
    duplicate_A = valid_A & (known_A | same_AxA.any(axis=1))
    fresh_A = valid_A & ~duplicate_A
    unobserved = (is_live(state) & _is_generated(state) & (state.visits_N == 0)).sum()
    nth_A = jnp.cumsum(fresh_A & generated_A)
    refused_A = fresh_A & generated_A & (nth_A + unobserved > config.p_max)
    wanted_A = fresh_A & ~refused_A

    reusable_N = (state.status_N == int(Status.RETIRED)) & _is_generated(state)
    rank_N = jnp.where(state.status_N == int(Status.EMPTY), 0, jnp.where(reusable_N, 1, 2))
    # Steps are exact in float32 up to 2^24.
    free_M = ranking.best_of_each(-state.added_step_N.astype(jnp.float32), rank_N, 2, a)
    free_M = free_M[jnp.argsort(free_M < 0, stable=True)]
    nth_A = jnp.cumsum(wanted_A)
    placed_A = wanted_A & (nth_A <= (rank_N < 2).sum())
    slot_A = free_M[jnp.clip(nth_A - 1, 0, free_M.shape[0] - 1)]
    target_A = jnp.where(placed_A, slot_A, n)

    def put(old: Array, new) -> Array:
        return old.at[target_A].set(jnp.asarray(new).astype(old.dtype), mode="drop")

    inside_AxP = jnp.arange(p) < length_A[:, None]
    start_A = jnp.where(generated_A & (config.burn_in > 0), int(Status.TRIAL), int(Status.ACTIVE))
    dropped = jnp.stack([x.sum(dtype=jnp.int32) for x in (
        wanted_A & ~placed_A, refused_A, duplicate_A, keep_A & ~valid_A)])
    state = state.replace(
        prompt_NxP=put(state.prompt_NxP, jnp.where(inside_AxP, rows.prompt_AxP, 0)),
        prompt_len_N=put(state.prompt_len_N, length_A), uid_N=put(state.uid_N, uid_A),
        parent_N=put(state.parent_N, rows.parent_A),
        category_N=put(state.category_N, category_A), source_N=put(state.source_N, source_A),
        status_N=put(state.status_N, start_A), reason_N=put(state.reason_N, int(Reason.NONE)),
        mean_N=put(state.mean_N, 0), var_N=put(state.var_N, 0),
        rollouts_N=put(state.rollouts_N, 0), visits_N=put(state.visits_N, 0),
        failures_N=put(state.failures_N, 0), probed_N=put(state.probed_N, False),
        added_step_N=put(state.added_step_N, step), last_seen_N=put(state.last_seen_N, -1),
        last_chosen_epoch_N=put(state.last_chosen_epoch_N, -1),
        dropped=state.dropped + dropped,
    )
    return state, jnp.where(placed_A, slot_A, -1)


def unseen(state: PoolState, epoch_start_step: Array | int,
           allowed_C: Array | None = None) -> Array:
    """int32 []: live tasks that this epoch has not visited; 0 ends the epoch."""
    waiting_N = is_live(state) & (state.last_seen_N < epoch_start_step)
    return (waiting_N & _allowed(state, allowed_C)).sum(dtype=jnp.int32)


def _allowed(state: PoolState, allowed_C: Array | None) -> Array:
    if allowed_C is None:
        return jnp.ones(state.uid_N.shape, bool)
    return jnp.asarray(allowed_C, bool)[jnp.clip(state.category_N, 0, N_CATEGORIES - 1)]


def sample(
    state: PoolState, key: Array, n_tasks: int, epoch_start_step: Array | int,
    config: PoolConfig, allowed_C: Array | None = None, step: Array | int | None = None,
) -> Draw:
    """Draws up to `n_tasks` live tasks without replacement (Gumbel top-k over priorities).

    With `sweep`, tasks last seen before `epoch_start_step` go first, so an epoch visits each
    once; the batch that ends it is filled up with tasks of a second visit. Before all others
    go `batch_floor` tasks a category, then probes of retired tasks (on average probe_rate *
    n_tasks). `allowed_C` (bool, by category) restricts the draw to a curriculum stage.
    `step`, of this draw, is asked for by `stale_bonus`: each step since a task's last draw, or
    since it was added, adds that to its weight of 1.
    Fewer tasks than asked for leave `filled_T` False at the end."""
    if n_tasks < 1:
        raise ValueError(f"n_tasks is {n_tasks}: draw 1 task or more")
    if config.batch_floor * N_CATEGORIES > n_tasks:
        raise ValueError(f"batch_floor {config.batch_floor} in {N_CATEGORIES} categories does not "
                         f"fit a batch of {n_tasks}: lower batch_floor")
    if config.stale_bonus and step is None:
        raise ValueError("stale_bonus counts steps since the last draw: pass step")
    n = state.uid_N.shape[0]
    key_order, key_probe = jax.random.split(key)
    allowed_N = _allowed(state, allowed_C)
    live_N = is_live(state) & allowed_N
    retired_N = (state.status_N == int(Status.RETIRED)) & allowed_N

    score_N = jax.random.gumbel(key_order, (n,))
    turn_N, turns = jnp.zeros((n,), jnp.int32), 1
    if config.priority is Priority.PHI:
        weight_N = jnp.maximum(boundary.phi(state.mean_N), config.phi_floor)
        score_N += jnp.log(weight_N)
        turn_N, turns = turn_N + (state.last_seen_N >= 0), 2
    if config.stale_bonus:
        age_N = step - jnp.maximum(state.last_seen_N, state.added_step_N)
        score_N += jnp.log1p(config.stale_bonus * jnp.maximum(age_N, 0))
    if config.sweep:
        turn_N, turns = turn_N + turns * (state.last_seen_N >= epoch_start_step), 2 * turns

    # Whoever is drawn is among the first n_tasks of its kind: of its turn, live or retired,
    # and of its category where each has a floor. Only these are put into an order.
    live_kinds = N_CATEGORIES if config.batch_floor else 1
    kinds = live_kinds + (config.probe_rate > 0)
    kind_N = jnp.where(live_N, state.category_N if config.batch_floor else 0,
                       jnp.where(retired_N, live_kinds, kinds))
    kind_N = jnp.where(kind_N < kinds, turn_N * kinds + kind_N, -1)
    slot_M = ranking.best_of_each(score_N, kind_N, turns * kinds, n_tasks)
    score_M, turn_M, category_M = score_N[slot_M], turn_N[slot_M], state.category_N[slot_M]
    live_M, retired_M = live_N[slot_M] & (slot_M >= 0), retired_N[slot_M] & (slot_M >= 0)
    order_M = jnp.lexsort((slot_M, -score_M, turn_M))

    wanted_probes = jnp.floor(config.probe_rate * n_tasks + jax.random.uniform(key_probe))
    none_M = jnp.zeros_like(turn_M)
    probe_M = retired_M & (ranking.rank_within(order_M, none_M, retired_M, 1) < wanted_probes)
    floor_M = live_M & (ranking.rank_within(order_M, category_M, live_M, N_CATEGORIES)
                        < config.batch_floor)
    group_M = jnp.where(floor_M, 0, jnp.where(probe_M, 1, jnp.where(live_M, 2, 3)))
    order_M = jnp.lexsort((slot_M, -score_M, turn_M, group_M))
    drawn_M = jnp.where(group_M < 3, slot_M, -1)[order_M]
    indices_T = jnp.pad(drawn_M, (0, n_tasks), constant_values=-1)[:n_tasks]
    filled_T = indices_T >= 0
    return Draw(indices_T=indices_T, uids_T=jnp.where(filled_T, state.uid_N[indices_T], -1),
                filled_T=filled_T)


def update_stats(
    state: PoolState, indices_T: Array, uids_T: Array, groups: GroupStats, step: Array | int,
    config: PoolConfig, band: BoundaryConfig = BoundaryConfig(),
) -> PoolState:
    """Writes what the rollouts of a draw showed.

    Only where the slot still holds that uid (else `mismatched` counts it) and once a slot.
    Without a valid rollout, or with a mean or variance that is not finite (`nonfinite`), the
    estimate stays and a failure is noted, but the draw counts as this epoch's visit: a task
    that always breaks cannot hold an epoch open. A TRIAL task with its burn-in complete
    becomes ACTIVE, or is retired when its mean (with `band.interval`: the upper end of its
    interval) is below retire_hard and the guards allow."""
    chex.assert_equal_shape([indices_T, uids_T, groups.mean_T, groups.var_T, groups.count_T])
    chex.assert_rank(indices_T, 1)
    n = state.uid_N.shape[0]
    asked_T = uids_T >= 0
    inside_T = (indices_T >= 0) & (indices_T < n)
    slot_T = jnp.clip(indices_T, 0, n - 1)
    held_T = asked_T & inside_T & (state.uid_N[slot_T] == uids_T)
    before_TxT = jnp.tri(uids_T.shape[0], k=-1, dtype=bool) & held_T
    first_T = ~((uids_T[:, None] == uids_T) & before_TxT).any(axis=1)
    tried_T = held_T & first_T
    finite_T = jnp.isfinite(groups.mean_T) & jnp.isfinite(groups.var_T)
    nonfinite_T = tried_T & (groups.count_T > 0) & ~finite_T
    write_T = tried_T & (groups.count_T > 0) & finite_T

    kept_T = config.ema_keep * state.rollouts_N[slot_T]
    rollouts_T = kept_T + groups.count_T.astype(jnp.float32)
    share_T = groups.count_T / jnp.maximum(rollouts_T, 1.0)  # exactly 1 where nothing is kept

    def estimate(old_T: Array, new_T: Array) -> Array:
        # Compiled, product and sum may be rounded at once: with ema_keep the last bit is open.
        return (1.0 - share_T) * old_T + share_T * new_T

    def put(old_N: Array, new_T: Array | int, mask_T: Array = write_T) -> Array:
        """Only the slots drawn are touched: a pass over all of a large pool costs more."""
        new_T = jnp.asarray(new_T).astype(old_N.dtype)
        return old_N.at[jnp.where(mask_T, indices_T, n)].set(new_T, mode="drop")

    visits_T = state.visits_N[slot_T] + 1
    mean_T = estimate(state.mean_N[slot_T], groups.mean_T)
    var_T = estimate(state.var_N[slot_T], groups.var_T)
    ripe_T = write_T & (state.status_N[slot_T] == int(Status.TRIAL)) & (visits_T >= config.burn_in)
    estimates = GroupStats(mean_T=mean_T, var_T=var_T, count_T=rollouts_T)
    _, high_T = boundary.mean_interval(estimates, band)
    hard_T = ripe_T & boundary.below(high_T, config.retire_hard)
    order_T = jnp.argsort(indices_T)  # of equal phi the lower slot goes first
    evicted_T = jnp.zeros_like(hard_T).at[order_T].set(_permitted(
        boundary.phi(mean_T)[order_T], state.category_N[slot_T][order_T], hard_T[order_T],
        _by_category(state, is_live(state)), config))
    retired_T = state.status_N[slot_T] == int(Status.RETIRED)
    failures_T = jnp.where(write_T, 0, state.failures_N[slot_T] + 1)
    last_seen_T = jnp.maximum(state.last_seen_N[slot_T], step)
    status_N = put(state.status_N, int(Status.ACTIVE), ripe_T)
    return state.replace(
        mean_N=put(state.mean_N, mean_T), var_N=put(state.var_N, var_T),
        rollouts_N=put(state.rollouts_N, rollouts_T), visits_N=put(state.visits_N, visits_T),
        failures_N=put(state.failures_N, failures_T, tried_T),
        probed_N=put(state.probed_N, True, write_T & retired_T),
        last_seen_N=put(state.last_seen_N, last_seen_T, tried_T),
        status_N=put(status_N, int(Status.RETIRED), evicted_T),
        reason_N=put(state.reason_N, int(Reason.BURN_IN), evicted_T),
        retired=state.retired.at[int(Reason.BURN_IN)].add(evicted_T.sum(dtype=jnp.int32)),
        mismatched=state.mismatched + (asked_T & ~held_T).sum(dtype=jnp.int32),
        nonfinite=state.nonfinite + nonfinite_T.sum(dtype=jnp.int32),
    )


def _estimates(state: PoolState) -> GroupStats:
    return GroupStats(mean_T=state.mean_N, var_T=state.var_N, count_T=state.rollouts_N)


def _retire(state: PoolState, reason_N: Array, config: PoolConfig,
            limit: Array | int | None = None) -> tuple[PoolState, Array]:
    """Retires up to `limit` slots of those with a reason, as far as the guards allow: lowest
    phi first, unobserved last. Returns the state and which slots were retired, bool [N]."""
    live_N = is_live(state)
    wanted_N = live_N & (reason_N != int(Reason.NONE))
    key_N = jnp.where(state.visits_N == 0, jnp.inf, boundary.phi(state.mean_N))
    done_N = _permitted(key_N, state.category_N, wanted_N, _by_category(state, live_N), config,
                        limit)
    return state.replace(
        status_N=jnp.where(done_N, jnp.int8(Status.RETIRED), state.status_N),
        reason_N=jnp.where(done_N, reason_N, state.reason_N).astype(jnp.int8),
        retired=state.retired + boundary.code_counts(reason_N, len(Reason), done_N),
    ), done_N


def _permitted(key_N: Array, category_N: Array, wanted_N: Array, live_C: Array,
               config: PoolConfig, limit: Array | int | None = None) -> Array:
    """bool [N]: which of the wanted may be retired: those of lowest key, as far as `limit` and
    the guards allow where live_C tasks of each category are live."""
    spare_C = live_C - config.category_floor
    done_N = ranking.lowest_of_each(key_N, jnp.where(wanted_N, category_N, -1), spare_C)
    spare = live_C.sum() - config.min_live
    if limit is not None:
        spare = jnp.minimum(spare, limit)
    return ranking.lowest_of_each(key_N, jnp.where(done_N, 0, -1), spare[None])


def _by_category(state: PoolState, mask_N: Array) -> Array:
    return boundary.code_counts(state.category_N, N_CATEGORIES, mask_N)


def retire(state: PoolState, step: Array | int, config: PoolConfig,
           band: BoundaryConfig = BoundaryConfig()) -> tuple[PoolState, Array]:
    """Retires generated tasks, as far as the guards allow; original seeds are only parked, as
    FAILED. Returns the state and int8 [N], the Reason of each task retired by this call (NONE
    elsewhere).

    ACTIVE and mean (with `band.interval`: all of its interval) > retire_mastered or
    < retire_hard, or with `retire_silent` a variance up to `band.var_floor`, which is no
    disagreement; live and drawn max_failures times in a row for nothing; live and not drawn for
    more than stale_after steps."""
    active_N = state.status_N == int(Status.ACTIVE)
    judged_N = active_N & (state.visits_N > 0)
    reason_N = jnp.zeros_like(state.reason_N)

    def where(mask_N: Array, reason: Reason, other_N: Array) -> Array:
        return jnp.where(mask_N, jnp.int8(reason), other_N)

    if config.stale_after:
        since_N = jnp.maximum(state.last_seen_N, state.added_step_N)
        reason_N = where(step - since_N > config.stale_after, Reason.STALE, reason_N)
    failed_N = jnp.zeros_like(active_N)
    if config.max_failures:
        failed_N = state.failures_N >= config.max_failures
        reason_N = where(failed_N, Reason.FAILED, reason_N)
    if config.retire_silent:
        silent_N = judged_N & (state.var_N <= band.var_floor)
        reason_N = where(silent_N, Reason.SILENT, reason_N)
    low_N, high_N = boundary.mean_interval(_estimates(state), band)
    hard_N = judged_N & boundary.below(high_N, config.retire_hard)
    reason_N = where(hard_N, Reason.HARD, reason_N)
    mastered_N = judged_N & boundary.above(low_N, config.retire_mastered)
    reason_N = where(mastered_N, Reason.MASTERED, reason_N)
    seeds_N = jnp.where(failed_N, jnp.int8(Reason.FAILED), jnp.int8(Reason.NONE))
    reason_N = jnp.where(_is_generated(state), reason_N, seeds_N)
    state, done_N = _retire(state, reason_N, config)
    return state, jnp.where(done_N, reason_N, jnp.int8(Reason.NONE))


def revive(state: PoolState, config: PoolConfig) -> tuple[PoolState, Array]:
    """Takes tasks back, highest phi first, generated ones as far as p_max has room: retired
    tasks whose probe, made after they were retired, lies in retire_hard..revive_mastered, and
    those parked as FAILED, which, where no probe gave a usable reward, are parked again after
    one draw without any. They become ACTIVE, or TRIAL while burn-in observations are missing. Returns the
    state and which slots came back, bool [N]."""
    retired_N = state.status_N == int(Status.RETIRED)
    parked_N = retired_N & (state.reason_N == int(Reason.FAILED))
    back_N = parked_N | (retired_N & state.probed_N
                         & ~boundary.below(state.mean_N, config.retire_hard)
                         & ~boundary.above(state.mean_N, config.revive_mastered))
    generated_N = _is_generated(state)
    alive = (is_live(state) & generated_N).sum(dtype=jnp.int32)
    first_N = ranking.lowest_of_each(
        -boundary.phi(state.mean_N), jnp.where(back_N & generated_N, 0, -1),
        (config.p_max - alive)[None])
    back_N &= ~generated_N | first_N
    young_N = generated_N & (state.visits_N < config.burn_in)
    again_N = jnp.where(young_N, int(Status.TRIAL), int(Status.ACTIVE))
    last_try_N = back_N & parked_N & ~state.probed_N
    return state.replace(
        status_N=jnp.where(back_N, again_N, state.status_N).astype(jnp.int8),
        reason_N=jnp.where(back_N, jnp.int8(Reason.NONE), state.reason_N),
        failures_N=jnp.where(last_try_N, max(config.max_failures - 1, 0), state.failures_N),
        probed_N=state.probed_N & ~back_N,
        revived=state.revived + back_N.sum(dtype=jnp.int32),
    ), back_N


def prune(state: PoolState, config: PoolConfig) -> tuple[PoolState, Array]:
    """While more than p_max generated tasks live, retires those with the lowest phi. Tasks
    without an observation are never pruned, so the pool may stay over p_max until they have
    one; `add` refuses to let that grow. Returns the state and the pruned slots, bool [N]."""
    alive_N = is_live(state) & _is_generated(state)
    known_N = alive_N & (state.visits_N > 0)
    excess = alive_N.sum(dtype=jnp.int32) - config.p_max
    wanted_N = known_N & (excess > 0)
    return _retire(state, jnp.where(wanted_N, int(Reason.PRUNED), 0), config, limit=excess)


def choose(
    state: PoolState, key: Array, epoch: Array | int, config: BoundaryConfig,
    rule: SeedRule = SeedRule.PHI, from_generated: Array | bool = False, rollouts: int = 16,
) -> tuple[PoolState, Array, Array, Array]:
    """Chooses ACTIVE tasks to synthesize from (`boundary.choose_seeds`) and starts their
    cooldown. Original seeds only, unless `from_generated`. rollouts: of a group, for
    SeedRule.MIXED. Returns the state, index [M] (-1: none), uid [M] (-1: none) and valid [M],
    M = config.budget."""
    eligible_N = state.status_N == int(Status.ACTIVE)
    eligible_N &= ~_is_generated(state) | jnp.asarray(from_generated, bool)
    index_M, valid_M = boundary.choose_seeds(
        state.uid_N, state.mean_N, state.var_N, state.rollouts_N, state.category_N, eligible_N,
        state.last_chosen_epoch_N, epoch, config, rule, key, rollouts)
    target_M = jnp.where(valid_M, index_M, state.uid_N.shape[0])
    chosen_N = state.last_chosen_epoch_N.at[target_M].set(
        jnp.asarray(epoch, jnp.int32), mode="drop")
    uid_M = jnp.where(valid_M, state.uid_N[index_M], -1)
    return state.replace(last_chosen_epoch_N=chosen_N), index_M, uid_M, valid_M


def stats(state: PoolState, config: BoundaryConfig) -> PoolStats:
    """What is in the pool, for the log."""
    live_N = is_live(state)
    known_N = live_N & (state.visits_N > 0)
    # One histogram over all codes at once: each count is one of its margins.
    codes = (state.status_N, state.source_N, boundary.zones(_estimates(state), config),
             jnp.clip(state.category_N, 0))
    sizes = (len(Status), len(Origin), len(Zone), N_CATEGORIES)
    cell_N = jnp.ravel_multi_index([code_N.astype(jnp.int32) for code_N in codes], sizes, "clip")
    cells = jnp.zeros((math.prod(sizes),), jnp.int32).at[cell_N].add(1).reshape(sizes)
    live = cells[int(Status.TRIAL)] + cells[int(Status.ACTIVE)]
    total = jnp.where(known_N, state.mean_N, 0.0).sum()
    known = known_N.sum(dtype=jnp.int32)
    return PoolStats(
        by_status=cells.sum((1, 2, 3)), live_by_source=live.sum((1, 2)),
        live_by_zone=live.sum((0, 2)), live_by_category=live.sum((0, 1)), live=live.sum(),
        unobserved=live.sum() - known, mean_reward=total / jnp.maximum(known, 1))
