"""Where a policy learns: from group rewards to zones, and from zones to seeds.

GRPO gets a gradient only from a group whose rollouts disagree. For a reward in [0, 1] with
mean m, Popoviciu bounds the population variance by m (1 - m) <= 1/4, so a task matters most
near m = 1/2 (paper section 1). A fractional reward can sit at m = 1/2 with no variance at
all: such a group is in the paper's band and yet silent, so the test here is band AND
variance, and the share of `Zone.SILENT` is how often the two disagree.

Everything is pure and shape-constant; the caller jits. `config` and `rule` are static.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import statistics

import chex
import flax.struct
import jax
import jax.numpy as jnp

from rods_jax import ranking
from rods_jax.types import CATEGORIES

Array = jax.Array

N_CATEGORIES = len(CATEGORIES)  # category codes are indices into CATEGORIES

# Group means are sums of a few fractions in float32. A mean that equals a threshold on paper
# may miss it by a few ulp; distinct means lie much further apart than this.
EDGE = 1e-6

MOST_SEEDS = 2**16  # seeds a call: its result has so many rows
MOST_CONFIDENCE = 1 - 1e-9


class Zone(enum.IntEnum):
    """What a group of rollouts says about its task."""

    HARD = 0  # mean (or its whole interval) below alpha-
    BOUNDARY = 1  # mean in the band, and the rollouts disagree
    MASTERED = 2  # mean (or its whole interval) above alpha+
    SILENT = 3  # mean in the band, rollouts agree: no gradient
    UNSEEN = 4  # no usable reward: says nothing, and never counts as hard


class SeedRule(enum.Enum):
    """Which tasks become seeds, and in what order. All but PHI are there to be compared with."""

    PHI = "phi"  # boundary tasks by descending phi (the method)
    RANDOM = "random"  # any eligible task, uniformly (the control)
    VARIANCE = "variance"  # tasks whose rollouts disagree, by descending variance
    MIXED = "mixed"  # by the probability that a group has both outcomes, from the mean alone
    HARDEST = "hardest"  # observed tasks by ascending mean


class Interval(enum.Enum):
    """Of a mean reward, at the rollouts behind it."""

    WILSON = "wilson"  # rewards that are 0 or 1 (Wilson 1927)
    BERNSTEIN = "bernstein"  # any rewards in 0..1, by their variance (Maurer & Pontil 2009)


@dataclasses.dataclass(frozen=True)
class BoundaryConfig:
    """Paper section 1. Budget, quota and cooldown have no published value.

    With an `interval` a task is hard, or mastered, only where the whole interval of its mean
    lies beyond the band, so that the luck of one group moves no task out of it. None compares
    the mean itself, as the paper does.

    A task chosen in epoch e may be chosen again from epoch e + cooldown_epochs on: 0 lets it
    return at once, 1 means at most once an epoch."""

    alpha_minus: float = 0.20
    alpha_plus: float = 0.85
    var_floor: float = 1e-6  # variance up to here is rounding, not disagreement
    budget: int = 16  # seeds a call, all categories together
    quota: int = 4  # seeds a call and category
    cooldown_epochs: int = 1
    interval: Interval | None = None
    confidence: float = 0.9  # of the interval, two-sided

    def __post_init__(self):
        if not 0.0 <= self.alpha_minus <= self.alpha_plus <= 1.0:
            raise ValueError(
                f"band {self.alpha_minus}..{self.alpha_plus} is not ordered within 0..1: "
                "set 0 <= alpha_minus <= alpha_plus <= 1")
        if not (math.isfinite(self.var_floor) and self.var_floor >= 0.0):
            raise ValueError(f"var_floor is {self.var_floor}: set a finite value of 0 or more")
        if not 0.0 < self.confidence <= MOST_CONFIDENCE:
            raise ValueError(f"confidence is {self.confidence}: set it above 0, at most "
                             f"{MOST_CONFIDENCE}")
        for name, least, most in (("budget", 1, MOST_SEEDS), ("quota", 0, MOST_SEEDS),
                                  ("cooldown_epochs", 0, 2**31 - 1)):
            if not least <= getattr(self, name) <= most:
                raise ValueError(
                    f"{name} is {getattr(self, name)}: set it within {least}..{most:,}")


@flax.struct.dataclass
class GroupStats:
    """Statistics of each group's valid rewards.

    mean_T: float32, 0 where count is 0; var_T: float32, unbiased (ddof 1), 0 where count < 2
    (one rollout shows no disagreement); count_T: valid rollouts, int32, or float32 where older
    ones count for less."""

    mean_T: Array
    var_T: Array
    count_T: Array


def below(mean: Array, limit: float) -> Array:
    """mean < limit, where a rounding error is not a difference."""
    return mean < limit - EDGE


def above(mean: Array, limit: float) -> Array:
    """mean > limit, where a rounding error is not a difference."""
    return mean > limit + EDGE


def group_stats(rewards_TxG: Array, valid_TxG: Array) -> GroupStats:
    """Mean and unbiased variance over the valid rollouts of each task, in float32.

    What is not valid has no effect, NaN included. A NaN among the valid rewards makes the
    group's mean NaN: it is not repaired here, and the pool refuses and counts it."""
    chex.assert_rank([rewards_TxG, valid_TxG], 2)
    chex.assert_equal_shape([rewards_TxG, valid_TxG])
    valid_TxG = valid_TxG.astype(bool)
    rewards_TxG = jnp.where(valid_TxG, rewards_TxG.astype(jnp.float32), 0.0)
    count_T = valid_TxG.sum(axis=1, dtype=jnp.int32)
    mean_T = rewards_TxG.sum(axis=1) / jnp.maximum(count_T, 1)
    gap_TxG = jnp.where(valid_TxG, rewards_TxG - mean_T[:, None], 0.0)
    var_T = jnp.square(gap_TxG).sum(axis=1) / jnp.maximum(count_T - 1, 1)
    return GroupStats(mean_T=mean_T, var_T=var_T, count_T=count_T)


def mean_interval(stats: GroupStats, config: BoundaryConfig) -> tuple[Array, Array]:
    """(low_T, high_T), float32 within 0..1, where the expected reward of each task lies with
    `config.confidence`; the mean twice where `config.interval` is None, 0 and 1 without a
    rollout (Bernstein: fewer than 2).

    With n rollouts of mean m, z the normal quantile and d = 1 - confidence:
    Wilson (m + z^2 / 2n +- z sqrt(m (1 - m) / n + z^2 / 4n^2)) / (1 + z^2 / n);
    Bernstein m +- (sqrt(2 v ln(2/d) / n) + 7 ln(2/d) / (3 (n - 1))), v the unbiased variance."""
    mean_T, n_T = stats.mean_T, stats.count_T.astype(jnp.float32)
    if config.interval is None:
        return mean_T, mean_T
    if config.interval is Interval.WILSON:
        z = statistics.NormalDist().inv_cdf((1.0 + config.confidence) / 2.0)
        known_T, n_T = n_T > 0, jnp.maximum(n_T, EDGE)
        middle_T = mean_T + z * z / (2.0 * n_T)
        half_T = z * jnp.sqrt(jnp.maximum(mean_T * (1.0 - mean_T), 0.0) / n_T
                              + jnp.square(z / (2.0 * n_T)))
        low_T, high_T = ((middle_T + sign * half_T) / (1.0 + z * z / n_T) for sign in (-1, 1))
    else:
        log = math.log(2.0 / (1.0 - config.confidence))
        known_T, n_T = n_T > 1, jnp.maximum(n_T, 1.0 + EDGE)
        half_T = jnp.sqrt(2.0 * stats.var_T * log / n_T) + 7.0 * log / (3.0 * (n_T - 1.0))
        low_T, high_T = mean_T - half_T, mean_T + half_T
    return (jnp.where(known_T, jnp.clip(low_T, 0.0, 1.0), 0.0),
            jnp.where(known_T, jnp.clip(high_T, 0.0, 1.0), 1.0))


def zones(stats: GroupStats, config: BoundaryConfig) -> Array:
    """int8 [T], a Zone each. Both ends of the band belong to it. A group without a valid
    rollout, or whose mean or variance is not finite, is UNSEEN."""
    mean_T, var_T = stats.mean_T, stats.var_T
    low_T, high_T = mean_interval(stats, config)
    zone_T = jnp.where(var_T > config.var_floor, int(Zone.BOUNDARY), int(Zone.SILENT))
    zone_T = jnp.where(below(high_T, config.alpha_minus), int(Zone.HARD), zone_T)
    zone_T = jnp.where(above(low_T, config.alpha_plus), int(Zone.MASTERED), zone_T)
    usable_T = (stats.count_T > 0) & jnp.isfinite(mean_T) & jnp.isfinite(var_T)
    return jnp.where(usable_T, zone_T, int(Zone.UNSEEN)).astype(jnp.int8)


def phi(mean: Array) -> Array:
    """Priority of a boundary task, 4 m (1 - m): 1 at m = 1/2, 0 at m = 0 and 1."""
    return 4.0 * mean * (1.0 - mean)


def code_counts(code_N: Array, n_codes: int, mask_N: Array | None = None) -> Array:
    """int32 [n_codes], how many entries have each of the codes 0, 1, ... (of those in the
    mask)."""
    # Summed along the rows: across them takes a CPU twice as long.
    member_KxN = code_N == jnp.arange(n_codes, dtype=code_N.dtype)[:, None]
    if mask_N is not None:
        member_KxN &= mask_N
    return member_KxN.sum(axis=1, dtype=jnp.int32)


def mixed_probability(mean: Array, rollouts: int) -> Array:
    """That not all of a task's next 0/1 rewards are alike: 1 - m^K - (1 - m)^K."""
    return 1.0 - mean ** rollouts - (1.0 - mean) ** rollouts


def population_variance(stats: GroupStats) -> Array:
    """float32 [T], ddof 0: the one that Popoviciu's bounds, m (1 - m) and 1/4, hold for."""
    count_T = stats.count_T.astype(jnp.float32)
    return stats.var_T * jnp.maximum(count_T - 1.0, 0.0) / jnp.maximum(count_T, 1.0)


def popoviciu_closeness(stats: GroupStats) -> Array:
    """float32 [T]: population variance over its bound m (1 - m), 1 for a 0/1 reward, less for
    a fractional one, 0 where the bound is 0."""
    population_T = population_variance(stats)
    bound_T = stats.mean_T * (1.0 - stats.mean_T)
    return jnp.where(bound_T > EDGE, population_T / jnp.where(bound_T > EDGE, bound_T, 1.0), 0.0)


@flax.struct.dataclass
class Signal:
    """How much of what variance could be there is: means over the groups of at least two valid
    rollouts, float32, 0 without any. of_quarter: population variance by 1/4, the bound for any
    mean. of_bound: by m (1 - m), the bound for the group's own."""

    of_quarter: Array
    of_bound: Array


def signal(stats: GroupStats) -> Signal:
    judged_T = (stats.count_T > 1) & jnp.isfinite(stats.mean_T) & jnp.isfinite(stats.var_T)

    def mean(x_T: Array) -> Array:
        return jnp.where(judged_T, x_T, 0.0).sum() / jnp.maximum(judged_T.sum(), 1)

    return Signal(of_quarter=mean(4.0 * population_variance(stats)),
                  of_bound=mean(popoviciu_closeness(stats)))


def choose_seeds(
    uid_N: Array,
    mean_N: Array,
    var_N: Array,
    count_N: Array,
    category_N: Array,
    eligible_N: Array,
    last_chosen_epoch_N: Array,
    epoch: Array | int,
    config: BoundaryConfig,
    rule: SeedRule = SeedRule.PHI,
    key: Array | None = None,
    rollouts: int = 16,
) -> tuple[Array, Array]:
    """The tasks to synthesize from: (index [budget] int32, valid [budget] bool).

    Candidates are eligible, hold a task (uid >= 0) and are past their cooldown
    (last_chosen_epoch < 0 means never chosen); `rule` says which of them, and in what order:
    see SeedRule. RANDOM needs `key`; MIXED is about groups of `rollouts`. At most `quota` a
    category and `budget` in all; equal priority goes to the lower index. Index is -1 where not
    valid."""
    chex.assert_rank([uid_N, mean_N, var_N, count_N, category_N, eligible_N], 1)
    chex.assert_equal_shape(
        [uid_N, mean_N, var_N, count_N, category_N, eligible_N, last_chosen_epoch_N])
    rested_N = (last_chosen_epoch_N < 0) | (epoch - last_chosen_epoch_N >= config.cooldown_epochs)
    known_N = (category_N >= 0) & (category_N < N_CATEGORIES)
    candidate_N = eligible_N & (uid_N >= 0) & rested_N & known_N
    if rule is SeedRule.RANDOM:
        if key is None:
            raise ValueError("SeedRule.RANDOM draws lots: pass key=jax.random.key(...)")
        fits_N, priority_N = True, jax.random.uniform(key, uid_N.shape)
    elif rule is SeedRule.PHI:
        zone_N = zones(GroupStats(mean_T=mean_N, var_T=var_N, count_T=count_N), config)
        fits_N, priority_N = zone_N == int(Zone.BOUNDARY), phi(mean_N)
    elif rule is SeedRule.VARIANCE:
        fits_N, priority_N = var_N > config.var_floor, var_N
    elif rule is SeedRule.MIXED:
        priority_N = mixed_probability(mean_N, rollouts)
        fits_N = priority_N > EDGE
    else:
        fits_N, priority_N = True, -mean_N
    if rule is not SeedRule.RANDOM:
        fits_N &= count_N > 0
    candidate_N &= fits_N
    index_M = ranking.best_of_each(
        priority_N, jnp.where(candidate_N, category_N, -1), N_CATEGORIES,
        min(config.quota, config.budget))
    order_M = jnp.lexsort((index_M, -priority_N[index_M], index_M < 0))
    index = jnp.pad(index_M[order_M], (0, config.budget), constant_values=-1)[:config.budget]
    return index, index >= 0
