"""How well boundary tasks are told from a few rollouts: `python -m experiments.boundary_study`.

Draws tasks whose reward distribution is known, rolls each out K times and asks the product's
own functions which are at the boundary. Truth: the expected reward lies in the band and the
reward has variance. Prints a Markdown table; --out FILE puts it between the marks of that page.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments.docs_block import check_number, check_outputs, write_block
from experiments.simulated_policy import at_boundary, binary_tasks, fractional_tasks
from rods_jax import boundary, task_pool
from rods_jax.boundary import BoundaryConfig, GroupStats, Interval, Zone
from rods_jax.config import UserError, run_main, write_json
from rods_jax.task_pool import Origin, PoolConfig, PoolRows
from rods_jax.types import Json

POOL = 256  # tasks of one pool, of which seeds are chosen
VISITS = 3
EMA_KEEP = 0.9
ROLLOUTS = (4, 8, 16)
BAND = BoundaryConfig()


class Reward(enum.Enum):
    BINARY = "binary"
    FRACTIONAL = "fractional"


class Rule(enum.Enum):
    """What calls a task one of the boundary."""

    BAND = "mean in the band"
    ZONES = "band and variance"
    INTERVAL = "the same, interval"
    POOLED = "band and variance, 3 visits"
    POOLED_INTERVAL = "the same, interval, 3 visits"


SORTS = {Reward.BINARY: (binary_tasks, Interval.WILSON),
         Reward.FRACTIONAL: (fractional_tasks, Interval.BERNSTEIN)}


@dataclasses.dataclass(frozen=True)
class Found:
    """Shares in 0..1, each with its standard error."""

    reward: Reward
    rollouts: int
    rule: Rule
    recall: float
    recall_error: float
    precision: float
    precision_error: float
    seeds: float  # of those chosen by descending phi, how many are at the boundary
    seeds_error: float


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.boundary_study",
                                     description=__doc__)
    parser.add_argument("--tasks", type=int, default=160 * POOL,
                        help=f"of each reward and K, a multiple of {POOL}; default %(default)s")
    parser.add_argument("--rollouts", type=int, nargs="+", default=ROLLOUTS, metavar="K")
    parser.add_argument("--seed", type=int, default=0, help="of all random draws")
    parser.add_argument("--out", metavar="FILE", help="page that takes the table")
    parser.add_argument("--json", metavar="FILE", help="figures as JSON; - prints them last")
    args = parser.parse_args(argv)
    check_outputs("boundary_study", args.out, json=args.json)
    check_number("--seed", args.seed, 0)
    if args.tasks < POOL or args.tasks % POOL:
        raise UserError(f"--tasks is {args.tasks}: give a multiple of {POOL}")
    if min(args.rollouts) < 2:
        raise UserError(f"--rollouts {min(args.rollouts)}: disagreement takes at least 2")
    found = [row for reward in Reward for rollouts in args.rollouts
             for row in study(reward, rollouts, args.tasks, args.seed)]
    print(table(found))
    if args.out:
        write_block(args.out, "boundary_study", table(found))
    if args.json:
        write_json(args.json, as_json(found))


def study(reward: Reward, rollouts: int, n_tasks: int, seed: int) -> list[Found]:
    """Every rule on the same tasks and rollouts."""
    make, interval = SORTS[reward]
    rng = np.random.default_rng([seed, list(Reward).index(reward), rollouts])
    tasks = make(rng, n_tasks)
    rewards_VxMxK = np.stack([tasks.draw(rng, rollouts) for _ in range(VISITS)])
    shape = (VISITS, n_tasks // POOL, POOL, rollouts)
    found = jax.device_get(_judge(np.moveaxis(rewards_VxMxK.reshape(shape), 1, 0), interval))
    true_M = at_boundary(tasks, BAND)
    true_BxN = true_M.reshape(-1, POOL)
    rows = []
    for rule, (member_BxN, index_BxM, valid_BxM) in zip(Rule, found, strict=True):
        chosen_BxM = np.take_along_axis(true_BxN, np.maximum(index_BxM, 0), axis=1)
        rows.append(Found(reward, rollouts, rule, *_share(member_BxN[true_BxN]),
                          *_share(true_BxN[member_BxN]), *_share(chosen_BxM[valid_BxM])))
    return rows


@functools.partial(jax.jit, static_argnames="interval")
def _judge(rewards_BxVxNxK: jax.Array, interval: Interval) -> list[tuple[jax.Array, ...]]:
    """By rule: who is at the boundary [B, N], index and validity of the seeds [B, 16]."""
    return jax.vmap(functools.partial(_judge_pool, interval=interval))(rewards_BxVxNxK)


def _judge_pool(rewards_VxNxK: jax.Array, interval: Interval) -> list[tuple[jax.Array, ...]]:
    last = boundary.group_stats(rewards_VxNxK[-1], jnp.ones_like(rewards_VxNxK[-1], bool))
    unheeded = last.replace(var_T=jnp.ones_like(last.var_T))  # any variance will do
    pooled = _pooled(rewards_VxNxK)
    guarded = dataclasses.replace(BAND, interval=interval)
    return [_decide(*case) for case in (
        (unheeded, BAND), (last, BAND), (last, guarded), (pooled, BAND), (pooled, guarded))]


def _decide(stats: GroupStats, band: BoundaryConfig) -> tuple[jax.Array, ...]:
    n = stats.mean_T.shape[0]
    band_of_seeds = dataclasses.replace(band, quota=band.budget)  # all are of one category
    index, valid = boundary.choose_seeds(
        jnp.arange(n), stats.mean_T, stats.var_T, stats.count_T, jnp.zeros(n, jnp.int8),
        jnp.ones(n, bool), jnp.full(n, -1), 0, band_of_seeds)
    return boundary.zones(stats, band) == int(Zone.BOUNDARY), index, valid


def _pooled(rewards_VxNxK: jax.Array) -> GroupStats:
    """What the pool holds of each task after all visits."""
    n = rewards_VxNxK.shape[1]
    config = PoolConfig(capacity=n, ema_keep=EMA_KEEP)
    uid_N, one_N = jnp.arange(n, dtype=jnp.int32), jnp.ones(n, jnp.int32)
    rows = PoolRows(prompt_AxP=one_N[:, None], prompt_len_A=one_N, uid_A=uid_N, parent_A=-one_N,
                    category_A=jnp.zeros(n, jnp.int8),
                    source_A=jnp.full(n, int(Origin.SEED), jnp.int8))
    pool, slot_N = task_pool.add(task_pool.init(config, 1), rows, one_N > 0, 0, config)
    for step, rewards_NxK in enumerate(rewards_VxNxK):
        groups = boundary.group_stats(rewards_NxK, jnp.ones_like(rewards_NxK, bool))
        pool = task_pool.update_stats(pool, slot_N, uid_N, groups, step, config)
    return GroupStats(mean_T=pool.mean_N[slot_N], var_T=pool.var_N[slot_N],
                      count_T=pool.rollouts_N[slot_N])


def _share(hits: np.ndarray) -> tuple[float, float]:
    """Share of hits and its standard error."""
    share = float(hits.mean()) if hits.size else math.nan
    return share, math.sqrt(share * (1.0 - share) / max(hits.size, 1))


def table(found: Sequence[Found]) -> str:
    """Markdown, per cent."""
    lines = ["| reward | K | called a boundary task | recall | precision | seeds at the boundary |",
             "|---|---|---|---|---|---|"]
    lines += [f"| {f.reward.value} | {f.rollouts} | {f.rule.value} | {100 * f.recall:.1f} | "
              f"{100 * f.precision:.1f} | {100 * f.seeds:.1f} |" for f in found]
    most = max(max(f.recall_error, f.precision_error) for f in found)
    seeds = max(f.seeds_error for f in found)
    return "\n".join(lines) + (f"\n\nPer cent; standard errors at most {100 * most:.2f} points "
                               f"(seeds: {100 * seeds:.2f}).")


def as_json(found: Sequence[Found]) -> Json:
    return {"rows": [dataclasses.asdict(f) | {"reward": f.reward.value, "rule": f.rule.value}
                     for f in found]}


if __name__ == "__main__":
    run_main(main)
