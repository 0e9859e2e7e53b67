"""Whole trajectories packed into rows of fixed length, ready for one update.

Packing runs on the host in numpy. A trajectory's ids (each of its rows, where it has several)
lie whole in one row of the batch, several share a row, each with its own segment number and
its own positions from 0. Who wrote a token
decides whether it carries loss, never its id, so an end token equal to the padding id is
still an end token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import flax.struct
import jax
import numpy as np

from rods_jax.types import Author, Trajectory


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """M micro-batches of R rows of length L, for T tasks of G rollouts."""

    micro: int
    rows: int
    length: int
    tasks: int
    group: int

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(
                    f"batch {field.name} is {getattr(self, field.name)}: give 1 or more")


@flax.struct.dataclass
class PackedBatch:
    """tokens, positions, segments, traj: int32 [M, R, L]; segments count from 1 in each row
    and are 0 where padded; traj is the flat index t * G + g, 0 where padded.
    sampled_MxRxL: bool, tokens the policy wrote. logprobs_MxRxL: float32, the sampler's.
    rewards_TxG: float32. valid_TxG: bool, False for samples dropped or absent.
    truncated_TxG: bool, the rollout hit a limit of tokens or steps.
    n_micro: int32 scalar, micro-batches that hold anything; they come first."""

    tokens_MxRxL: jax.Array | np.ndarray
    positions_MxRxL: jax.Array | np.ndarray
    segments_MxRxL: jax.Array | np.ndarray
    traj_MxRxL: jax.Array | np.ndarray
    sampled_MxRxL: jax.Array | np.ndarray
    logprobs_MxRxL: jax.Array | np.ndarray
    rewards_TxG: jax.Array | np.ndarray
    valid_TxG: jax.Array | np.ndarray
    truncated_TxG: jax.Array | np.ndarray
    n_micro: jax.Array | np.ndarray


def pack(groups: Sequence[Sequence[Trajectory | None]], rewards_TxG: np.ndarray,
         shape: BatchShape, drop_dead: bool, var_floor: float = 1e-8) -> PackedBatch:
    """Packs the groups of one update; numpy leaves, the same for the same input.

    groups: up to T groups of up to G trajectories; None is a sample that was dropped. A
        sample is valid iff it is there, its end is usable (neither a broken environment nor
        tokens that drifted) and its reward is finite.
    rewards_TxG: [T, G]; entries without a trajectory are ignored.
    drop_dead: leave out groups whose reward variance is not above `var_floor`; right
        whenever they carry no loss (see `UpdateConfig.dead_carry_loss`). Their rewards stay
        in the batch for the statistics.

    Tokens after the last sampled one are cut: they are neither predicted nor attended to by
    a token that is. Raises ValueError for a row of ids longer than L, and when the rows do
    not suffice.
    """
    rewards_TxG = np.asarray(rewards_TxG, np.float32)
    valid_TxG, truncated_TxG = _flags(groups, rewards_TxG, shape)
    live_T = _live(rewards_TxG, valid_TxG, var_floor)
    items = []  # (flat index, trajectory, begin, length up to the last sampled token)
    for t, group in enumerate(groups):
        if drop_dead and not live_T[t]:
            continue
        for g, trajectory in enumerate(group):
            if valid_TxG[t, g]:
                items += [(t * shape.group + g, trajectory, begin, length)
                          for begin, length in _loss_spans(trajectory, shape.length)]

    rows = _best_fit([length for *_, length in items], shape)
    ints = {name: np.zeros((shape.micro * shape.rows, shape.length), np.int32)
            for name in ("tokens", "positions", "segments", "traj")}
    sampled = np.zeros((shape.micro * shape.rows, shape.length), bool)
    logprobs = np.zeros(sampled.shape, np.float32)
    for row, members in enumerate(rows):
        start = 0
        for segment, item in enumerate(members, 1):
            index, trajectory, begin, n = items[item]
            at, source = np.s_[row, start:start + n], np.s_[begin:begin + n]
            ints["tokens"][at] = trajectory.tokens_L[source]
            ints["positions"][at] = np.arange(n)
            ints["segments"][at] = segment
            ints["traj"][at] = index
            sampled[at] = trajectory.author_L[source] == Author.SAMPLED
            logprobs[at] = np.where(sampled[at], trajectory.logprobs_L[source], 0.0)
            start += n

    folded = (shape.micro, shape.rows, shape.length)
    return PackedBatch(
        **{f"{name}_MxRxL": array.reshape(folded) for name, array in ints.items()},
        sampled_MxRxL=sampled.reshape(folded), logprobs_MxRxL=logprobs.reshape(folded),
        rewards_TxG=np.where(valid_TxG, rewards_TxG, np.float32(0)), valid_TxG=valid_TxG,
        truncated_TxG=truncated_TxG, n_micro=np.asarray(-(-len(rows) // shape.rows), np.int32))


def _flags(groups, rewards_TxG: np.ndarray, shape: BatchShape) -> tuple[np.ndarray, np.ndarray]:
    """valid_TxG and truncated_TxG; checks that the groups fit the shape."""
    if rewards_TxG.shape != (shape.tasks, shape.group):
        raise ValueError(f"rewards have shape {rewards_TxG.shape}, the batch holds "
                         f"{(shape.tasks, shape.group)} (tasks, group): pad them with zeros")
    if len(groups) > shape.tasks or any(len(group) > shape.group for group in groups):
        largest = max(map(len, groups), default=0)
        raise ValueError(f"{len(groups)} groups of up to {largest} trajectories do not fit "
                         f"{shape.tasks} tasks x {shape.group}: raise tasks or group")
    valid_TxG = np.zeros((shape.tasks, shape.group), bool)
    truncated_TxG = np.zeros((shape.tasks, shape.group), bool)
    for t, group in enumerate(groups):
        for g, trajectory in enumerate(group):
            if trajectory is not None:
                valid_TxG[t, g] = trajectory.end.usable
                truncated_TxG[t, g] = trajectory.end.truncated
    return valid_TxG & np.isfinite(rewards_TxG), truncated_TxG


def _live(rewards_TxG: np.ndarray, valid_TxG: np.ndarray, var_floor: float) -> np.ndarray:
    """bool [T]: the groups `group_advantage` calls live."""
    n_T = np.maximum(valid_TxG.sum(1), 1)
    kept = np.where(valid_TxG, rewards_TxG, 0).astype(np.float64)
    centred = np.where(valid_TxG, kept - (kept.sum(1) / n_T)[:, None], 0)
    return (valid_TxG.sum(1) >= 2) & ((centred ** 2).sum(1) / n_T > var_floor)


def _loss_spans(trajectory: Trajectory, limit: int) -> list[tuple[int, int]]:
    """(begin, length) of each row of ids in which a token was sampled, up to its last one."""
    sampled_L = trajectory.author_L == Author.SAMPLED
    name = f"trajectory {trajectory.sample} of {trajectory.task_uid}"
    if not np.isfinite(trajectory.logprobs_L[sampled_L]).all():
        raise ValueError(f"{name} has a sampler log-prob that is not finite: drop the sample")
    found = []
    for begin, end in trajectory.spans:
        at = np.flatnonzero(sampled_L[begin:end])
        if not at.size:
            continue
        length = int(at[-1]) + 1
        if length > limit:
            raise ValueError(f"{name} has {length} tokens, a row holds {limit}: raise length or "
                             "lower the rollout's token limit")
        found.append((begin, length))
    return found


def _best_fit(lengths: Sequence[int], shape: BatchShape) -> list[list[int]]:
    """Best-fit decreasing: the longest first, each into the fullest row that still takes it,
    ties to the earlier row. Lists of item indices, one a row in use."""
    n_rows = shape.micro * shape.rows
    free = np.full(n_rows, shape.length)
    rows: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        room = free[:len(rows)] - lengths[item]
        if (room >= 0).any():
            row = int(np.where(room >= 0, room, shape.length + 1).argmin())
        elif len(rows) < n_rows:
            row = len(rows)
            rows.append([])
        else:
            raise ValueError(
                f"{len(lengths)} trajectories of {sum(lengths)} tokens do not fit {shape.micro} x "
                f"{shape.rows} rows of {shape.length} ({n_rows * shape.length} tokens): "
                "raise micro or send fewer tasks")
        rows[row].append(item)
        free[row] -= lengths[item]
    return rows
