"""What the task pool costs at growing capacities, beside the update that it serves.

The pool is full: two fifths are seeds, and of the generated tasks a quarter is retired and
somewhat more live than p_max allows, so every operation has work to do. The pool's functions
are compiled, and take the old pool's memory, as in a run; each call is timed until its result
is there. A step makes its calls one after the other on one copy of the pool, as `train.py` does
where variants are asked for in every step; the copy came last through the caches, with the
prompts, as a run's update does. What is done once an epoch gets a copy each, and is spread over
the steps that an epoch of that pool has.

The update is the smallest that is trained with here, that of configs/quickstart.py: one
minibatch of its shapes, of random rollouts, where half of the groups disagree (the others are
left out, as in a run). A pass times one update and every operation at every capacity.
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import machine
from experiments.bench.rollout_table import busy_lines
from rods_jax import task_pool
from rods_jax.boundary import N_CATEGORIES
from rods_jax.config import load
from rods_jax.grpo.batch import BatchShape, pack
from rods_jax.learner import compiled_update, first_state
from rods_jax.models.decoder import Decoder, count_params, init_params
from rods_jax.policy import model_of
from rods_jax.pool_programs import pool_programs
from rods_jax.run_config import RunConfig, batch_shape
from rods_jax.startup import installed_versions
from rods_jax.task_pool import Origin, PoolConfig, PoolState, Status
from rods_jax.train import ADMIT_ROWS
from rods_jax.types import Author, EndReason, Json, Trajectory

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "quickstart.py"
SIZES = (1024, 4096, 16384, 65536)
CALLS = 5  # of an operation in a pass
SHARE, MOST_MS = 0.01, 5.0  # targets, all of them to stay below

STEP = ("unseen", "sample", "group_stats", "update_stats", "signal", "zones", "stats", "choose")
EPOCH = ("retire", "revive", "add", "prune")
BEGAN, NOW = 60, 90  # first step of the epoch, and the step that is timed


def quickstart() -> RunConfig:
    return load(CONFIG, (), RunConfig)


@dataclasses.dataclass(frozen=True)
class PoolPlan:
    """sizes: capacities. config: of the update and of what a step draws."""

    config: RunConfig = dataclasses.field(default_factory=quickstart)
    sizes: tuple[int, ...] = SIZES
    repeats: int = 5


def bench_pool(plan: PoolPlan) -> dict[str, Json]:
    update = Update(plan.config)
    pools = {size: FullPool(plan.config, size) for size in plan.sizes}
    update.run()
    for pool in pools.values():
        pool.run()
    others = machine.Others([])
    update_s: list[float] = []
    seconds = {size: {name: [] for name in (*STEP, *EPOCH)} for size in plan.sizes}
    for number in range(1, plan.repeats + 1):
        update_s.append(update.run())
        for size, pool in pools.items():
            for _ in range(CALLS):
                for name, found in pool.run().items():
                    seconds[size][name].append(found)
        print(f"pass {number} of {plan.repeats}: update {update_s[-1]:.3f} s",
              file=sys.stderr, flush=True)
    busy = others.cores_busy()
    return {
        **pool_figures(update_s, seconds, {size: pool.epoch for size, pool in pools.items()}),
        "update": {"seconds": update_s, "median_s": statistics.median(update_s),
                   "rollouts": update.rollouts, "tokens": update.tokens,
                   "parameters": update.parameters},
        "prompt_len": plan.config.sampler.prompt_len,
        "tasks_per_step": plan.config.tasks_per_step, "repeats": plan.repeats,
        "machine": {"cores": machine.cores(), "others_cores_busy": busy},
        "versions": installed_versions(),
    }


# ---------------------------------------------------------------- the update


class Update:
    """rollouts, tokens: that are packed. The first `run` compiles."""

    def __init__(self, config: RunConfig):
        model, _ = model_of(config)
        decoder, shape = Decoder(model), batch_shape(config)
        params = init_params(model, jax.random.key(0))
        self.parameters = count_params(params)
        self._state = first_state(config, decoder, params)
        self._step = compiled_update(config, decoder, shape, None, self._state)
        batch = random_batch(config, shape, model.vocab_size)
        self.rollouts = len(np.unique(batch.traj_MxRxL[batch.segments_MxRxL > 0]))
        self.tokens = int((batch.segments_MxRxL > 0).sum() + batch.prompt_length_UxK.sum())
        self._batch = jax.device_put(batch)

    def run(self) -> float:
        """Seconds of one."""
        start = time.perf_counter()
        self._state, _ = jax.block_until_ready(self._step(self._state, self._batch))
        return time.perf_counter() - start


def random_batch(config: RunConfig, shape: BatchShape, vocab_size: int):
    """Rollouts of messages and tool results of 8 tokens, 1 to 8 of each behind a prompt; every
    other group agrees."""
    rng = np.random.default_rng(0)
    turns = (config.sampler.max_len - config.sampler.prompt_len) // 16

    def rollout(prompt_P: np.ndarray, sample: int) -> Trajectory:
        author_S = np.tile(np.repeat([Author.SAMPLED, Author.INSERTED], 8),
                           rng.integers(1, turns + 1))
        author_L = np.concatenate([np.full(len(prompt_P), Author.PROMPT), author_S])
        tokens_L = np.concatenate([prompt_P, rng.integers(vocab_size, size=len(author_S))])
        logprobs_L = np.where(author_L == Author.SAMPLED, -np.log(vocab_size), 0)
        return Trajectory("bench", sample, tokens_L.astype(np.int32), author_L.astype(np.int8),
                          logprobs_L.astype(np.float32), (), 1, EndReason.DONE)

    groups = []
    for _ in range(shape.tasks):
        prompt_P = rng.integers(vocab_size, size=config.sampler.prompt_len)
        groups.append([rollout(prompt_P, sample) for sample in range(shape.group)])
    rewards_TxG = rng.integers(5, size=(shape.tasks, shape.group)).astype(np.float32) / 4
    rewards_TxG[:, :2] = 0, 1
    rewards_TxG[1::2] = 0.5
    options = config.update
    return pack(groups, rewards_TxG, shape, not options.dead_carry_loss,
                options.advantage.var_floor)


# ---------------------------------------------------------------- the pool


@dataclasses.dataclass(frozen=True)
class Epoch:
    """Of a pool: the steps until each live task was drawn, and the calls of `add` that then
    take in as many new ones as may be admitted."""

    steps: float
    adds: int

    @classmethod
    def of(cls, live: int, config: RunConfig) -> Epoch:
        return cls(live / config.tasks_per_step,
                   -(-task_pool.admissible(live, config.pool) // ADMIT_ROWS))


def full_pool(config: PoolConfig, prompt_len: int) -> PoolState:
    """`config.capacity` tasks of random statistics, uids 0, 1, 2, ..., last drawn up to NOW."""
    n, rng = config.capacity, np.random.default_rng(0)
    generated_N = np.arange(n) % 5 > 1
    retired_N = generated_N & (rng.random(n) < 0.25)
    trial_N = generated_N & ~retired_N & (rng.random(n) < 0.1)
    mean_N = np.where(trial_N, 0, rng.integers(17, size=n) / 16).astype(np.float32)
    ints = lambda values: jnp.asarray(values, jnp.int32)  # noqa: E731
    small = lambda values: jnp.asarray(values, jnp.int8)  # noqa: E731
    return task_pool.init(config, prompt_len).replace(
        prompt_NxP=ints(rng.integers(1, 100, (n, prompt_len))),
        prompt_len_N=ints(np.full(n, prompt_len)), uid_N=ints(np.arange(n)),
        category_N=small(rng.integers(N_CATEGORIES, size=n)),
        source_N=small(np.where(generated_N, Origin.GENERATED, Origin.SEED)),
        status_N=small(np.where(retired_N, Status.RETIRED,
                                np.where(trial_N, Status.TRIAL, Status.ACTIVE))),
        mean_N=jnp.asarray(mean_N), var_N=jnp.asarray(mean_N * (1 - mean_N)),
        rollouts_N=jnp.asarray(np.where(trial_N, 0, 16), jnp.float32),
        visits_N=ints(~trial_N), probed_N=jnp.asarray(retired_N & (rng.random(n) < 0.5)),
        added_step_N=ints(rng.integers(BEGAN, size=n)),
        last_seen_N=ints(np.where(trial_N, -1, rng.integers(NOW, size=n))))


class FullPool:
    """A full pool of `size` tasks and the calls that are timed on it."""

    def __init__(self, config: RunConfig, size: int):
        pool = dataclasses.replace(config.pool, capacity=size, p_max=2 * size // 5)
        config = dataclasses.replace(config, pool=pool)
        self._state = full_pool(pool, config.sampler.prompt_len)
        self._calls = _calls(config, self._state)
        self.epoch = Epoch.of(int(task_pool.is_live(self._state).sum()), config)

    def run(self) -> dict[str, float]:
        """Seconds of one call of each operation."""
        found, state = {}, self._copy()
        for name in STEP:
            found[name], state = self._timed(name, state)
        for name in EPOCH:
            found[name], _ = self._timed(name, self._copy())
        return found

    def _copy(self) -> PoolState:
        return jax.block_until_ready(jax.tree.map(jnp.copy, self._state))

    def _timed(self, name: str, state: PoolState) -> tuple[float, PoolState]:
        start = time.perf_counter()
        result = jax.block_until_ready(self._calls[name](state))
        seconds = time.perf_counter() - start
        after = result[0] if isinstance(result, tuple) else result
        return seconds, after if isinstance(after, PoolState) else state


def _calls(config: RunConfig, state: PoolState) -> dict[str, Callable[[PoolState], Any]]:
    """Each operation with what a run gives it. Some of the drawn tasks are on their first
    observation, and one of these turns out too hard."""
    programs, rng = pool_programs(config), np.random.default_rng(1)
    allowed_C, key, tasks = np.ones(N_CATEGORIES, bool), jax.random.key(0), config.tasks_per_step

    def sample(state: PoolState) -> task_pool.Draw:
        return programs.sample(state, key, n_tasks=tasks, epoch_start_step=BEGAN,
                               allowed_C=allowed_C, step=NOW)

    draw = jax.device_get(sample(state))
    rewards_TxG = (rng.integers(5, size=(tasks, config.group_size)) / 4).astype(np.float32)
    trial_T = np.asarray(state.status_N)[draw.indices_T] == int(Status.TRIAL)
    rewards_TxG[np.flatnonzero(trial_T)[:1]] = 0
    valid_TxG = np.ones(rewards_TxG.shape, bool)
    groups = programs.group_stats(rewards_TxG, valid_TxG)
    length, size = config.sampler.prompt_len, config.pool.capacity
    rows, keep_A = task_pool.make_rows(
        [[1] * length] * ADMIT_ROWS, range(size, size + ADMIT_ROWS), range(ADMIT_ROWS),
        [0] * ADMIT_ROWS, [Origin.GENERATED] * ADMIT_ROWS, ADMIT_ROWS, length)
    return {
        "unseen": lambda state: programs.unseen(state, BEGAN, allowed_C),
        "sample": sample,
        "group_stats": lambda _: programs.group_stats(rewards_TxG, valid_TxG),
        "update_stats": lambda state: programs.update_stats(
            state, draw.indices_T, draw.uids_T, groups, NOW),
        "signal": lambda _: programs.signal(groups),
        "zones": lambda _: programs.zones(groups),
        "stats": programs.stats,
        "choose": lambda state: programs.choose(state, key, 3, from_generated=False),
        "retire": lambda state: programs.retire(state, NOW),
        "revive": programs.revive,
        "add": lambda state: programs.add(state, rows, keep_A, NOW),
        "prune": programs.prune,
    }


# ---------------------------------------------------------------- figures


def pool_figures(update_s: Sequence[float], seconds: Mapping[int, Mapping[str, Sequence[float]]],
                 epochs: Mapping[int, Epoch]) -> dict[str, Json]:
    """From the seconds of all updates, and of all calls by capacity and operation; of each the
    median counts. LEAST, MOST: the capacities.

    share_of_update_at_LEAST: what the pool takes of a step, its part of the epoch's work
    included, by the update. share_if_each_step_ends_an_epoch: the same if the epoch's work came
    in every step. ms_at_MOST: one step's operations. slowest_ms_at_MOST: the slowest operation
    of all, alone. growth: of one step's operations, by that at LEAST."""
    sizes: dict[int, dict[str, Json]] = {}
    for size, found in sorted(seconds.items()):
        ms = {name: 1e3 * statistics.median(each) for name, each in found.items()}
        calls = dict.fromkeys(EPOCH, 1) | {"add": epochs[size].adds}
        sizes[size] = {"step_ms": sum(ms[name] for name in STEP),
                       "epoch_ms": sum(count * ms[name] for name, count in calls.items()),
                       "epoch_steps": epochs[size].steps, "adds": epochs[size].adds,
                       "operations_ms": ms}
    least, most, update_ms = min(sizes), max(sizes), 1e3 * statistics.median(update_s)
    first, last = sizes[least], sizes[most]
    targets = {f"share_of_update_at_{least}": SHARE, f"ms_at_{most}": MOST_MS,
               f"slowest_ms_at_{most}": MOST_MS}
    measured = dict(zip(targets, (
        (first["step_ms"] + first["epoch_ms"] / first["epoch_steps"]) / update_ms,
        last["step_ms"], max(last["operations_ms"].values()))))
    return {
        **measured, "targets": targets,
        "all_met": all(measured[key] < most_ for key, most_ in targets.items()),
        "share_if_each_step_ends_an_epoch":
            (first["step_ms"] + first["epoch_ms"]) / update_ms,
        "growth": {str(size): row["step_ms"] / first["step_ms"] for size, row in sizes.items()},
        "sizes": {str(size): row for size, row in sizes.items()},
    }


_ROW = "{:22}{:>8}".format


def pool_table(found: Mapping[str, Json]) -> str:
    sizes, update = found["sizes"], found["update"]

    def row(name: str, calls: object, shown: Callable[[Mapping[str, Json]], str]) -> str:
        return _ROW(name, calls) + "".join(f"{shown(size):>10}" for size in sizes.values())

    def operation(name: str, calls: object) -> str:
        return row(name, calls, lambda size: f"{size['operations_ms'][name]:.3f}")

    growth = (f"{ratio:.1f}" for ratio in found["growth"].values())
    share, ms, slowest = (found[key] for key in found["targets"])
    least, most = next(iter(sizes)), list(sizes)[-1]
    shown = [f"task pool on {found['machine']['cores']} cores, prompts of {found['prompt_len']} "
             f"tokens, draws of {found['tasks_per_step']}, ms a call, medians of "
             f"{CALLS * found['repeats']}",
             _ROW("capacity", "each") + "".join(f"{int(size):>10,}" for size in sizes),
             *(operation(name, "step") for name in STEP),
             row("one step", "", lambda size: f"{size['step_ms']:.3f}"),
             _ROW("growth", "") + "".join(f"{ratio:>10}" for ratio in growth),
             *(operation(name, "epoch") for name in EPOCH),
             f"update of configs/quickstart.py, the smallest trained with: {update['rollouts']} "
             f"rollouts, {update['tokens']} tokens, {update['parameters'] / 1e6:.1f} million "
             f"parameters: {1e3 * update['median_s']:.0f} ms",
             f"at {int(least):,} the pool takes {100 * share:.2f} % of it (target below "
             f"{100 * SHARE:g} %), {100 * found['share_if_each_step_ends_an_epoch']:.2f} % if "
             "each step ended an epoch",
             f"at {int(most):,} a step takes {ms:.2f} ms, the slowest operation {slowest:.2f} ms "
             f"(targets below {MOST_MS:g} ms)", *busy_lines(found["machine"])]
    met = sum(found[key] < target for key, target in found["targets"].items())
    return "\n".join([*shown, f"{met} of {len(found['targets'])} targets met"])
