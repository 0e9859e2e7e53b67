"""Group-relative advantages and the group statistics that come with them.

For the valid rewards r_1 .. r_n of one task:

    mean = sum(r) / n                  var = sum((r - mean)^2) / n
    advantage_i = (r_i - baseline_i) / (std + eps)

`var_T` is always the population variance (ddof 0), so that Popoviciu's bounds var <= 1/4 and
var <= mean * (1 - mean) hold for it (paper, claim); `ddof` changes only the divisor std.
"""

from __future__ import annotations

import dataclasses
import enum
import math

import flax.struct
import jax
import jax.numpy as jnp


class Baseline(str, enum.Enum):
    GROUP_MEAN = "group_mean"
    LEAVE_ONE_OUT = "leave_one_out"  # mean of the other members: n / (n - 1) * (r - mean)


class Spread(str, enum.Enum):
    """Whose standard deviation divides the advantage. Never decides which group is dead."""

    GROUP = "group"
    BATCH = "batch"  # all valid rewards, around the mean of all


@dataclasses.dataclass(frozen=True)
class AdvantageConfig:
    """ddof: 0 or 1, of the divisor std. eps: added to std. clip: bound on |advantage| or
    None. var_floor: a group whose variance is not above it is dead (no advantage).
    dead_keep_kl: dead groups keep their KL and entropy terms instead of leaving the loss."""

    ddof: int = 0
    eps: float = 1e-6
    scale_by_std: bool = True
    spread: Spread = Spread.GROUP
    clip: float | None = None
    baseline: Baseline = Baseline.GROUP_MEAN
    var_floor: float = 1e-8
    dead_keep_kl: bool = False

    def __post_init__(self):
        if self.ddof not in (0, 1):
            raise ValueError(f"ddof is {self.ddof}: give 0 (population) or 1 (sample)")
        if not (math.isfinite(self.eps) and self.eps >= 0):
            raise ValueError(f"eps is {self.eps}: give a finite number, 0 or more")
        if not (math.isfinite(self.var_floor) and self.var_floor >= 0):
            raise ValueError(f"var_floor is {self.var_floor}: give a finite number, 0 or more")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip is {self.clip}: give a positive bound or None")


@flax.struct.dataclass
class GroupStats:
    """mean_T, var_T: float32 over valid members, 0 where a group has none.
    live_T: bool, two or more valid members and var_T > var_floor.
    advantage_TxG: float32, 0 for members that are not valid and for dead groups.
    valid_TxG: bool, the given mask less rewards that are not finite."""

    mean_T: jax.Array
    var_T: jax.Array
    live_T: jax.Array
    advantage_TxG: jax.Array
    valid_TxG: jax.Array


def group_advantage(rewards_TxG: jax.Array, valid_TxG: jax.Array,
                    config: AdvantageConfig) -> GroupStats:
    """Two passes, mean first. Members that are not valid, or not finite, take no part.

    rewards_TxG: any float; a row holds the rollouts of one task. valid_TxG: bool. ValueError
    for other shapes: from a flat array nobody can tell which rewards form a group.
    """
    if rewards_TxG.ndim != 2:
        raise ValueError(f"rewards have shape {rewards_TxG.shape}, wanted is (tasks, group): "
                         "reshape them so that a row holds the rollouts of one task")
    if valid_TxG.shape != rewards_TxG.shape or valid_TxG.dtype != bool:
        raise ValueError(f"valid is {valid_TxG.dtype} {valid_TxG.shape}, the rewards have shape "
                         f"{rewards_TxG.shape}: give one bool for each reward")
    valid_TxG = valid_TxG & jnp.isfinite(rewards_TxG)
    rewards_TxG = jnp.where(valid_TxG, rewards_TxG, 0.0).astype(jnp.float32)
    n_T = valid_TxG.sum(1).astype(jnp.float32)

    mean_T = rewards_TxG.sum(1) / jnp.maximum(n_T, 1)
    centred_TxG = jnp.where(valid_TxG, rewards_TxG - mean_T[:, None], 0.0)
    squares_T = jnp.square(centred_TxG).sum(1)
    var_T = squares_T / jnp.maximum(n_T, 1)
    live_T = (n_T >= 2) & (var_T > config.var_floor)

    advantage_TxG = centred_TxG
    if config.baseline is Baseline.LEAVE_ONE_OUT:
        advantage_TxG = centred_TxG * (n_T / jnp.maximum(n_T - 1, 1))[:, None]
    if config.scale_by_std:
        if config.spread is Spread.GROUP:
            spread_T = squares_T / jnp.maximum(n_T - config.ddof, 1)
        else:
            spread_T = _batch_variance(rewards_TxG, valid_TxG, config.ddof)
        # A dead group is divided by 1, not by its rounding error.
        std_T = jnp.sqrt(jnp.where(live_T, spread_T, 1.0)) + config.eps
        advantage_TxG = advantage_TxG / std_T[:, None]
    if config.clip is not None:
        advantage_TxG = jnp.clip(advantage_TxG, -config.clip, config.clip)
    advantage_TxG = jnp.where(live_T[:, None], advantage_TxG, 0.0)
    return GroupStats(mean_T=mean_T, var_T=var_T, live_T=live_T,
                      advantage_TxG=advantage_TxG, valid_TxG=valid_TxG)


def _batch_variance(rewards_TxG: jax.Array, valid_TxG: jax.Array, ddof: int) -> jax.Array:
    n = valid_TxG.sum().astype(jnp.float32)
    mean = rewards_TxG.sum() / jnp.maximum(n, 1)
    squares = jnp.square(jnp.where(valid_TxG, rewards_TxG - mean, 0.0)).sum()
    return squares / jnp.maximum(n - ddof, 1)
