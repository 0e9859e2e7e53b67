"""Whole trajectories packed into rows of fixed length, ready for one update.

Packing runs on the host in numpy. What all rows of ids of a group begin with, its prompt, lies
in the batch once, less its last token; each row of ids goes on from there as a segment of a row
of the batch. A segment lies whole in one row, behind segments of its own group alone, with its
own number; positions go on from the prompt. Who wrote a token decides whether it carries loss,
never its id, so an end token equal to the padding id is still an end token.

A batch without prompts (BatchShape.prompts = 0) has trajectories whole in its rows, of any
groups side by side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import flax.struct
import jax
import numpy as np

from rods_jax.types import Author, Trajectory


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """M micro-batches of R rows of L tokens, for T tasks of G rollouts. The last of a row is only
    predicted, so what is computed has L - 1 columns.

    prompts: K, how many prompts are computed at a time, of up to `prompt` tokens each; every
        micro-batch reads those of one such set. 0: nothing is shared.
    parts: of a mesh that split K and R; a row's prompt lies in the row's part.
    alone: one segment a row, which the kernels of TPUs need behind a shared prompt.
    lengths: shorter lengths that a micro-batch may have, each compiled for itself: rows are
        sorted, so that short ones need not be computed at length L.
    """

    micro: int
    rows: int
    length: int
    tasks: int
    group: int
    prompts: int = 0
    prompt: int = 0
    parts: int = 1
    alone: bool = False
    lengths: tuple[int, ...] = ()

    def __post_init__(self):
        for name in ("micro", "rows", "length", "tasks", "group", "parts"):
            if getattr(self, name) < 1:
                raise ValueError(f"batch {name} is {getattr(self, name)}: give 1 or more")
        if self.length < 2:
            raise ValueError("batch length is 1: give 2 or more, one token predicts another")
        if (self.prompts > 0) != (self.prompt > 0) or self.prompts < 0:
            raise ValueError(f"batch prompts is {self.prompts} of {self.prompt} tokens: give both "
                             "1 or more, or both 0 to share nothing")
        for name in ("rows", "prompts"):
            if getattr(self, name) % self.parts:
                raise ValueError(f"{getattr(self, name)} {name} a micro-batch do not divide over "
                                 f"{self.parts} parts: make {name} a multiple of {self.parts}")
        if any(not 1 < n < self.length for n in self.lengths):
            raise ValueError(f"batch lengths are {self.lengths}: give lengths of 2 to below "
                             f"{self.length}")

    @property
    def buckets(self) -> tuple[int, ...]:
        """The lengths a micro-batch may have, ascending."""
        return (*sorted(set(self.lengths)), self.length)

    @property
    def sets(self) -> int:
        """U, how often prompts are computed at most."""
        return -(-self.tasks // self.prompts) if self.prompts else 0


@flax.struct.dataclass
class PackedBatch:
    """tokens, positions, segments, traj: int32 [M, R, L]; segments count from 1 in each row
    and are 0 where padded; traj is the flat index t * G + g, 0 where padded.
    author_MxRxL: int8, see types.Author; PROMPT where padded.
    logprobs_MxRxL: float32, the sampler's, 0 for tokens it did not sample.
    rewards_TxG: float32. valid_TxG: bool, False for samples dropped or absent.
    truncated_TxG: bool, the rollout hit a limit of tokens or steps.
    n_micro: int32 scalar, micro-batches that hold anything; they come first.
    bucket_M: int32, which of BatchShape.buckets the micro-batch has.

    prompts_UxKxP: int32, the shared prompts, U sets of K. prompt_length_UxK: int32.
    prompt_MxR: int32, the row's prompt: its number within the row's part of the set, K / parts
    of them. end_U: int32; micro-batches end_U[u - 1] .. end_U[u] - 1 read set u.
    n_sets: int32 scalar, sets that are read."""

    tokens_MxRxL: jax.Array | np.ndarray
    positions_MxRxL: jax.Array | np.ndarray
    segments_MxRxL: jax.Array | np.ndarray
    traj_MxRxL: jax.Array | np.ndarray
    author_MxRxL: jax.Array | np.ndarray
    logprobs_MxRxL: jax.Array | np.ndarray
    rewards_TxG: jax.Array | np.ndarray
    valid_TxG: jax.Array | np.ndarray
    truncated_TxG: jax.Array | np.ndarray
    n_micro: jax.Array | np.ndarray
    bucket_M: jax.Array | np.ndarray
    prompts_UxKxP: jax.Array | np.ndarray
    prompt_length_UxK: jax.Array | np.ndarray
    prompt_MxR: jax.Array | np.ndarray
    end_U: jax.Array | np.ndarray
    n_sets: jax.Array | np.ndarray

    @property
    def sampled_MxRxL(self):
        """bool, tokens the policy wrote."""
        return self.author_MxRxL == Author.SAMPLED


@dataclasses.dataclass(frozen=True)
class _Span:
    """A row of ids: tokens begin .. begin + length - 1 of a trajectory, up to the last sampled
    one; flat: the trajectory's index. first: where the first sampled token is in it."""

    trajectory: Trajectory
    flat: int
    begin: int
    length: int
    first: int

    def ids(self) -> np.ndarray:
        return self.trajectory.tokens_L[self.begin:self.begin + self.length]


@dataclasses.dataclass(frozen=True)
class _Segment:
    """What of a span is written into a row: its tokens from number `skip` on."""

    span: _Span
    skip: int

    @property
    def length(self) -> int:
        return self.span.length - self.skip


@dataclasses.dataclass(frozen=True)
class _Prompt:
    """A group's shared ids and its rows, lists of segments, the longest row first."""

    ids: np.ndarray
    rows: list[list[_Segment]]


def pack(groups: Sequence[Sequence[Trajectory | None]], rewards_TxG: np.ndarray,
         shape: BatchShape, drop_dead: bool, var_floor: float = 1e-8,
         agree: Callable[[np.ndarray], np.ndarray] = lambda counts: counts) -> PackedBatch:
    """Packs the groups of one update; numpy leaves, the same for the same input.

    groups: up to T groups of up to G trajectories; None is a sample that was dropped. A
        sample is valid iff it is there, its end is usable (neither a broken environment nor
        tokens that drifted) and its reward is finite.
    rewards_TxG: [T, G]; entries without a trajectory are ignored.
    drop_dead: leave out groups whose reward variance is not above `var_floor`; right
        whenever they carry no loss (see `UpdateConfig.dead_carry_loss`). Their rewards stay
        in the batch for the statistics.
    agree: where several processes each pack a part of one batch, an array's largest entries
        over all of them; so many micro-batches, of such lengths, each of them then makes.

    Tokens after the last sampled one are cut: they are neither predicted nor attended to by
    a token that is. Raises ValueError for a row of ids longer than L, and when the rows do
    not suffice.
    """
    rewards_TxG = np.asarray(rewards_TxG, np.float32)
    valid_TxG, truncated_TxG = _flags(groups, rewards_TxG, shape)
    live_T = _live(rewards_TxG, valid_TxG, var_floor)
    spans = [[span for g, trajectory in enumerate(group) if valid_TxG[t, g]
              for span in _spans(trajectory, t * shape.group + g)]
             for t, group in enumerate(groups) if live_T[t] or not drop_dead]
    if shape.prompts:
        sets = _sets([_prompt(group, shape) for group in spans if group], shape)
    else:
        # One set without prompts, its rows dealt out to the parts.
        rows = _best_fit([_Segment(span, 0) for group in spans for span in group], shape)
        nobody = np.zeros(0, np.int32)
        sets = [[[_Prompt(nobody, rows[part::shape.parts])] for part in range(shape.parts)]]
    micro_U = agree(np.asarray([_micro_batches(some, shape) for some in sets]
                               + [0] * (max(shape.sets, 1) - len(sets)), np.int32))
    if micro_U.sum() > shape.micro:
        raise ValueError(
            f"the trajectories do not fit {shape.micro} micro-batches of {shape.rows} rows of "
            f"{shape.length} tokens, they take {micro_U.sum()}: raise micro or send fewer tasks")
    arrays = _Arrays(shape, micro_U)
    for u, some in enumerate(sets):
        arrays.write(u, some)
    return arrays.packed(np.where(valid_TxG, rewards_TxG, np.float32(0)), valid_TxG,
                         truncated_TxG, agree)


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


def _spans(trajectory: Trajectory, flat: int) -> list[_Span]:
    """Each row of ids in which a token was sampled, up to its last one."""
    sampled_L = trajectory.author_L == Author.SAMPLED
    if not np.isfinite(trajectory.logprobs_L[sampled_L]).all():
        raise ValueError(f"{_name(trajectory)} has a sampler log-prob that is not finite: drop "
                         "the sample")
    found = []
    for begin, end in trajectory.spans:
        at = np.flatnonzero(sampled_L[begin:end])
        if at.size:
            found.append(_Span(trajectory, flat, begin, int(at[-1]) + 1, int(at[0])))
    return found


def _name(trajectory: Trajectory) -> str:
    return f"trajectory {trajectory.sample} of {trajectory.task_uid}"


# ---------------------------------------------------------------- who lies where


def _prompt(group: Sequence[_Span], shape: BatchShape) -> _Prompt:
    """A group's prompt: what all its rows of ids begin with, but for the token that the first
    sampled one is predicted from, which begins each row's own part."""
    common = min([shape.prompt, *(max(span.first - 1, 0) for span in group)])
    first, *others = (span.ids()[:common] for span in group)
    for ids in others:
        differs = np.flatnonzero(ids[:common] != first[:common])
        common = int(differs[0]) if differs.size else common
    segments = [_Segment(span, common) for span in group]
    return _Prompt(first[:common], _best_fit(segments, shape))


def _best_fit(segments: Sequence[_Segment], shape: BatchShape) -> list[list[_Segment]]:
    """Rows of segments. Best-fit decreasing: the longest first, each into the fullest row that
    still takes it, ties to the earlier row. ValueError for a segment longer than a row."""
    rows: list[list[_Segment]] = []
    free: list[int] = []
    for segment in sorted(segments, key=lambda segment: -segment.length):
        if segment.length > shape.length:
            behind = f" behind {segment.skip} that its group shares" if segment.skip else ""
            raise ValueError(
                f"{_name(segment.span.trajectory)} has {segment.length} tokens{behind}, a row "
                f"holds {shape.length}: raise length or lower the rollout's token limit")
        fits = [] if shape.alone else [n for n, room in enumerate(free)
                                       if room >= segment.length]
        if fits:
            row = min(fits, key=lambda n: free[n])
        else:
            row = len(rows)
            rows.append([])
            free.append(shape.length)
        rows[row].append(segment)
        free[row] -= segment.length
    return rows


def _sets(prompts: Sequence[_Prompt], shape: BatchShape) -> list[list[list[_Prompt]]]:
    """Sets of prompts, each divided into parts. Those with most rows come together, and within
    a set the parts get about as many rows."""
    parts, each = shape.parts, shape.prompts // shape.parts
    waiting = sorted(prompts, key=lambda prompt: -len(prompt.rows))
    found = []
    while waiting:
        some, waiting = waiting[:shape.prompts], waiting[shape.prompts:]
        divided: list[list[_Prompt]] = [[] for _ in range(parts)]
        for prompt in some:
            open_ = [part for part in divided if len(part) < each]
            min(open_, key=lambda part: sum(len(p.rows) for p in part)).append(prompt)
        found.append(divided)
    return found


def _micro_batches(parts: Sequence[Sequence[_Prompt]], shape: BatchShape) -> int:
    """That the rows of a set take: as many as those of its fullest part."""
    rows = max(sum(len(prompt.rows) for prompt in prompts) for prompts in parts)
    return -(-rows // (shape.rows // shape.parts))


# ---------------------------------------------------------------- writing


class _Arrays:
    """The batch while it is filled. micro_U: micro-batches of each set."""

    def __init__(self, shape: BatchShape, micro_U: np.ndarray):
        self._shape, self._end_U = shape, np.cumsum(micro_U, dtype=np.int32)
        self._n_sets = np.count_nonzero(micro_U)
        rows = (shape.micro, shape.rows, shape.length)
        self._ints = {name: np.zeros(rows, np.int32)
                      for name in ("tokens", "positions", "segments", "traj")}
        self._author = np.full(rows, Author.PROMPT, np.int8)
        self._logprobs = np.zeros(rows, np.float32)
        self._length_M = np.zeros(shape.micro, np.int32)
        self._prompt_MxR = np.zeros(rows[:2], np.int32)
        self._prompts = np.zeros((shape.sets, shape.prompts, shape.prompt), np.int32)
        self._length_UxK = np.zeros((shape.sets, shape.prompts), np.int32)

    def write(self, u: int, parts: Sequence[Sequence[_Prompt]]) -> None:
        """Set u: its prompts, and its rows into micro-batches, of every part the longest first."""
        shape, begin = self._shape, self._end_U[u - 1] if u else 0
        prompts_each, rows_each = (n // shape.parts for n in (shape.prompts, shape.rows))
        for part, prompts in enumerate(parts):
            for i, prompt in enumerate(prompts):
                if n := len(prompt.ids):
                    self._prompts[u, part * prompts_each + i, :n] = prompt.ids
                    self._length_UxK[u, part * prompts_each + i] = n
            rows = [(i, row) for i, prompt in enumerate(prompts) for row in prompt.rows]
            for n, (i, row) in enumerate(sorted(rows, key=lambda x: -_tokens(x[1]))):
                at = begin + n // rows_each, part * rows_each + n % rows_each
                self._length_M[at[0]] = max(self._length_M[at[0]], _tokens(row))
                self._write_row(at, i, row)

    def _write_row(self, row: tuple[int, int], prompt: int, segments: Sequence[_Segment]) -> None:
        self._prompt_MxR[row], start = prompt, 0
        for number, segment in enumerate(segments, 1):
            span, n = segment.span, segment.length
            at, source = (*row, slice(start, start + n)), slice(
                span.begin + segment.skip, span.begin + span.length)
            author = span.trajectory.author_L[source]
            self._ints["tokens"][at] = span.trajectory.tokens_L[source]
            self._ints["positions"][at] = np.arange(segment.skip, span.length)
            self._ints["segments"][at] = number
            self._ints["traj"][at] = span.flat
            self._author[at] = author
            self._logprobs[at] = np.where(author == Author.SAMPLED,
                                          span.trajectory.logprobs_L[source], 0.0)
            start += n

    def packed(self, rewards_TxG, valid_TxG, truncated_TxG, agree) -> PackedBatch:
        sets = self._shape.sets
        return PackedBatch(
            **{f"{name}_MxRxL": array for name, array in self._ints.items()},
            author_MxRxL=self._author, logprobs_MxRxL=self._logprobs, rewards_TxG=rewards_TxG,
            valid_TxG=valid_TxG, truncated_TxG=truncated_TxG, n_micro=self._end_U[-1],
            bucket_M=np.searchsorted(self._shape.buckets, agree(self._length_M)).astype(np.int32),
            prompts_UxKxP=self._prompts, prompt_length_UxK=self._length_UxK,
            prompt_MxR=self._prompt_MxR, end_U=self._end_U[:sets],
            n_sets=np.asarray(self._n_sets if sets else 0, np.int32))


def _tokens(row: Sequence[_Segment]) -> int:
    return sum(segment.length for segment in row)
