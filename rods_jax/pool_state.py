"""What the task pool is made of: its codes, settings, arrays, and the rows offered to it.

`task_pool` holds the functions and passes these names on; import them from there.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


MOST = 2**31 - 1  # steps and counts are int32
MOST_TASKS = 2**24
MOST_BONUS, LEAST_WEIGHT = 1e6, 1e-6


class Status(enum.IntEnum):
    EMPTY = 0
    TRIAL = 1  # live, waiting for its burn-in observations
    ACTIVE = 2  # live
    RETIRED = 3  # taken out; a generated one is kept for probes until its slot is needed


class Origin(enum.IntEnum):
    SEED = 0
    GENERATED = 1


class Reason(enum.IntEnum):
    """Why a task was retired."""

    NONE = 0
    MASTERED = 1
    HARD = 2
    BURN_IN = 3  # too hard on its first observations
    STALE = 4
    FAILED = 5  # parked: drawn again and again without a usable reward; tried once an epoch
    PRUNED = 6  # lowest phi while over p_max
    SILENT = 7  # in the band, and its rollouts agree: no gradient


class Dropped(enum.IntEnum):
    """Why an offered row was not placed."""

    OVERFLOW = 0  # no empty and no retired slot
    P_MAX = 1  # p_max generated tasks still wait for an observation
    DUPLICATE = 2  # the uid is in the pool or earlier among the rows
    INVALID = 3  # negative uid, length outside 1..P, unknown category or source


class Priority(enum.Enum):
    UNIFORM = "uniform"
    PHI = "phi"  # weight max(phi, phi_floor); never tried tasks go first


@dataclasses.dataclass(frozen=True)
class PoolConfig:
    """Paper section 3. The estimate of a task is its last observation; with `ema_keep` > 0 each
    observation leaves that share of the weight of those before it. Not in the paper, and off by
    default, are the fields from `retire_silent` on that say so, and `max_failures`."""

    capacity: int = 1024  # tasks
    p_max: int = 400  # generated tasks alive at most
    beta: float = 0.20  # admission an epoch as a share of the live tasks; four decimals count
    retire_mastered: float = 0.95
    retire_hard: float = 0.20
    revive_mastered: float = 0.85  # a probed task revives in retire_hard..revive_mastered
    burn_in: int = 1  # observations before a generated task is ACTIVE
    stale_after: int = 0  # steps without being drawn; 0: off
    max_failures: int = 3  # draws in a row without a usable reward, then parked; 0: off
    retire_silent: bool = False  # not in the paper: retire what boundary.Zone calls SILENT
    min_boundary: float = 0.0  # not in the paper: see task_pool.runs_dry
    ema_keep: float = 0.0
    min_live: int = 1
    category_floor: int = 1  # live tasks a category
    batch_floor: int = 0  # tasks a category in every batch, while it has that many
    probe_rate: float = 0.0  # share of a batch drawn from RETIRED
    priority: Priority = Priority.UNIFORM
    phi_floor: float = 0.05
    stale_bonus: float = 0.0  # not in the paper: by how much a step without a draw adds to a weight
    sweep: bool = True  # every live task once an epoch, before any comes twice

    def __post_init__(self):
        if not 1 <= self.capacity <= MOST_TASKS:
            raise ValueError(f"capacity is {self.capacity}: set it within 1..{MOST_TASKS:,}")
        for name in ("p_max", "burn_in", "stale_after", "max_failures", "min_live",
                     "category_floor", "batch_floor"):
            if not 0 <= getattr(self, name) <= MOST:
                raise ValueError(f"{name} is {getattr(self, name)}: set it within 0..{MOST:,}")
        for name in ("beta", "retire_mastered", "retire_hard", "revive_mastered", "min_boundary"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}: set it within 0..1")
        # With nothing but probes an epoch would never end.
        for name in ("ema_keep", "probe_rate"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}: set it to 0 or more, "
                                 "less than 1")
        # Weights go through logarithms in float32, where tiny and huge ones are infinite.
        if not 0.0 <= self.stale_bonus <= MOST_BONUS:
            raise ValueError(f"stale_bonus is {self.stale_bonus}: set it within "
                             f"0..{MOST_BONUS:g}")
        if not LEAST_WEIGHT <= self.phi_floor <= 1.0:
            raise ValueError(f"phi_floor is {self.phi_floor}: set it within {LEAST_WEIGHT:g}..1")
        if not self.retire_hard <= self.revive_mastered <= self.retire_mastered:
            raise ValueError("thresholds are out of order: set "
                             "retire_hard <= revive_mastered <= retire_mastered")


@flax.struct.dataclass
class PoolState:
    """Arrays of length N = capacity; counters are int32 and only grow."""

    prompt_NxP: Array  # int32, zeros past prompt_len
    prompt_len_N: Array  # int32
    uid_N: Array  # int32 serial number given by the host, -1: empty slot
    parent_N: Array  # int32 uid, -1: none
    category_N: Array  # int8 index into CATEGORIES, -1: empty slot
    source_N: Array  # int8 Origin
    status_N: Array  # int8 Status
    reason_N: Array  # int8 Reason, NONE unless RETIRED
    mean_N: Array  # float32 reward estimate, 0 without an observation
    var_N: Array  # float32 its variance within groups, unbiased
    rollouts_N: Array  # float32 rollouts behind both; older ones count for less (ema_keep)
    visits_N: Array  # int32 observations
    failures_N: Array  # int32 draws in a row that gave no usable reward
    probed_N: Array  # bool, observed since it was retired
    added_step_N: Array  # int32
    last_seen_N: Array  # int32 step of the last draw that was reported, usable or not
    last_chosen_epoch_N: Array  # int32 epoch in which it last served as a seed
    dropped: Array  # [4] rows not placed, by Dropped
    retired: Array  # [8] retirements, by Reason
    revived: Array  # []
    mismatched: Array  # [] reports for a task that had left its slot
    nonfinite: Array  # [] reports refused because mean or variance was not finite


@flax.struct.dataclass
class PoolRows:
    """A rows offered to the pool, A constant for the run."""

    prompt_AxP: Array  # int32
    prompt_len_A: Array  # int32
    uid_A: Array  # int32
    parent_A: Array  # int32, -1: none
    category_A: Array  # int8
    source_A: Array  # int8 Origin


@flax.struct.dataclass
class Draw:
    indices_T: Array  # int32, -1 where not filled
    uids_T: Array  # int32, -1 where not filled
    filled_T: Array  # bool


@flax.struct.dataclass
class PoolStats:
    """Counts int32. `mean_reward` float32 over live observed tasks, 0 without any."""

    by_status: Array  # [4]
    live_by_source: Array  # [2]
    live_by_zone: Array  # [5] boundary.Zone
    live_by_category: Array  # [n categories]
    live: Array  # []
    unobserved: Array  # [] live tasks without an observation
    mean_reward: Array  # []


def init(config: PoolConfig, max_prompt: int) -> PoolState:
    """An empty pool for prompts of at most `max_prompt` tokens."""
    if max_prompt < 1:
        raise ValueError(f"max_prompt is {max_prompt}: prompts need room for 1 token or more")
    n = config.capacity

    def filled(value: int, dtype=jnp.int32) -> Array:  # own buffer each, so all can be donated
        return jnp.full((n,), value, dtype)

    return PoolState(
        prompt_NxP=jnp.zeros((n, max_prompt), jnp.int32), prompt_len_N=filled(0),
        uid_N=filled(-1), parent_N=filled(-1), category_N=filled(-1, jnp.int8),
        source_N=filled(0, jnp.int8), status_N=filled(0, jnp.int8), reason_N=filled(0, jnp.int8),
        mean_N=filled(0, jnp.float32), var_N=filled(0, jnp.float32),
        rollouts_N=filled(0, jnp.float32), visits_N=filled(0),
        failures_N=filled(0), probed_N=filled(False, bool), added_step_N=filled(-1),
        last_seen_N=filled(-1), last_chosen_epoch_N=filled(-1),
        dropped=jnp.zeros((len(Dropped),), jnp.int32),
        retired=jnp.zeros((len(Reason),), jnp.int32), revived=jnp.zeros((), jnp.int32),
        mismatched=jnp.zeros((), jnp.int32), nonfinite=jnp.zeros((), jnp.int32),
    )


def make_rows(
    prompts: Sequence[Sequence[int]], uids: Sequence[int], parents: Sequence[int],
    categories: Sequence[int], sources: Sequence[int], n_rows: int, max_prompt: int,
) -> tuple[PoolRows, np.ndarray]:
    """Host side: packs up to `n_rows` tasks into constant shapes, with their keep mask [A]."""
    if not len(prompts) == len(uids) == len(parents) == len(categories) == len(sources):
        raise ValueError("make_rows got lists of different lengths: give one entry a task in each")
    if len(prompts) > n_rows:
        raise ValueError(f"{len(prompts)} tasks for {n_rows} rows: offer them in several calls")
    prompt_AxP = np.zeros((n_rows, max_prompt), np.int32)
    for i, prompt in enumerate(prompts):
        if not 1 <= len(prompt) <= max_prompt:
            raise ValueError(f"prompt of task {uids[i]} has {len(prompt)} tokens: "
                             f"the pool takes 1 to {max_prompt}; raise max_prompt or drop the task")
        prompt_AxP[i, : len(prompt)] = prompt

    def padded(values: Sequence[int], fill: int, dtype=np.int32) -> np.ndarray:
        return np.asarray([*values, *[fill] * (n_rows - len(values))], dtype)

    rows = PoolRows(
        prompt_AxP=prompt_AxP, prompt_len_A=padded([len(p) for p in prompts], 0),
        uid_A=padded(uids, -1), parent_A=padded(parents, -1),
        category_A=padded(categories, -1, np.int8), source_A=padded(sources, 0, np.int8))
    return rows, np.arange(n_rows) < len(prompts)


def is_live(state: PoolState) -> Array:
    """bool [N]: TRIAL or ACTIVE."""
    return (state.status_N == int(Status.TRIAL)) | (state.status_N == int(Status.ACTIVE))
