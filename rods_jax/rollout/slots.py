"""The host's half of the sampler: rows of ids in slots, their pages, and the plans.

A `Row` is what the device knows of a rollout: its ids, and how many of them have K/V. The
engine appends ids; `prepare` brings the cache up to all but the last of them, `sample` plays
a wave. Pages are taken as rows grow. Where none is left, the youngest rows give theirs back
and are run again later from their ids: the oldest always gets on, so everything ends.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.stages import Lowered

from rods_jax.models.decoder import Decoder
from rods_jax.rollout.pages import FreePages, pages_for
from rods_jax.rollout.programs import Programs
from rods_jax.rollout.sampler import Chunk, Sitting, Table, Wave, WaveOutput, checksum
from rods_jax.rollout.shapes import SamplerConfig, plan_memory

_CALL = 16  # what calling a program costs, in tokens: keeps small chunks from being many


@dataclasses.dataclass(eq=False)
class SharedPrompt:
    """All but the last id of a prompt, in shared pages of one device."""

    device: int
    ids: tuple[int, ...]
    pages: list[int]
    rows: list[Row | None]  # by seat
    done: int = 0  # ids that have K/V
    kept: bool = True  # though nobody sits there, more rows will come


@dataclasses.dataclass(eq=False)
class Row:
    """ids: of the whole row, the prompt's too. done: how many have K/V in the row's own pages,
    behind those of `prompt`."""

    slot: int
    device: int
    born: int
    ids: list[int]
    prompt: SharedPrompt | None = None
    who: tuple[int, int] = (0, 0)  # of its random key, see draw.row_keys
    seat: int = 0
    done: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    mark: int = 0  # checksum of the first `marked` ids
    marked: int = 0

    @property
    def shared(self) -> int:
        return 0 if self.prompt is None else len(self.prompt.ids)

    @property
    def cached(self) -> int:
        return self.shared + self.done


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Of one row in a wave. `intact`: the cache holds the row's ids and nothing else."""

    ids: list[int]
    logprobs: list[float]
    stopped: bool
    intact: bool


class Slots:
    """Owns the device's programs and their cache; the weights come with every call.

    mesh: devices along its axis "data" each play rows of their own; over its axis "tensor" K/V
    heads are split, as weights may be. None is one device. shapes_only: see Programs and `lower`.
    """

    def __init__(self, decoder: Decoder, config: SamplerConfig, stop_ids: Sequence[int],
                 mesh: Mesh | None = None, shapes_only: bool = False):
        self.config, self.plan = config, plan_memory(config, decoder.config)
        self.programs = Programs(decoder, config, self.plan, stop_ids, mesh, shapes_only)
        self.devices = self.programs.devices
        self.rows: list[Row] = []  # oldest first
        self.evicted = 0  # times that a row gave its pages back to an older one
        self.ran = 0  # tokens that prefill and extend have run
        self._born = itertools.count()
        self._shared = [FreePages(self.plan.shared) for _ in range(self.devices)]
        self._own = [FreePages(self.plan.own) for _ in range(self.devices)]
        self._free = [list(reversed(range(config.slots))) for _ in range(self.devices)]

    @property
    def most_bytes(self) -> int:
        """Of K/V, on each device or group of them that shares a copy."""
        return self.config.kv_taken(self.plan, self.plan.own)

    def warm_up(self, params, key: jax.Array) -> int:
        """Runs every program once on nothing, so that none is compiled later. Returns how many
        there are."""
        programs = self.programs
        # First of all the cache must lie where the weights do.
        programs.extend(params, self._chunk(self.config.extend_shapes[0], []))
        for shape in self.config.prefill:
            programs.prefill(params, self._chunk(shape, []))
        programs.warm_up_sizes()
        programs.fit(0)
        for size in programs.sizes:
            programs.fit(size)
            for shape in self.config.extend_shapes:
                programs.extend(params, self._chunk(shape, []))
            for rows in self.config.row_buckets:
                programs.wave(params, self._wave(rows, []), key, *self._no_wave())
        programs.fit(0)
        programs.wait()
        return len(programs)

    def lower(self, params, key: jax.Array) -> dict[str, tuple[Lowered, Any]]:
        """By its name every program that plays, lowered from shapes, params' too, for a cache of
        full size; and what of the cache is among its arguments."""
        programs, found = self.programs, {}
        for shape in self.config.prefill:
            found["prefill_{}x{}".format(*shape)] = programs.lower_prefill(
                params, self._chunk(shape, []))
        for shape in self.config.extend_shapes:
            found["extend_{}x{}".format(*shape)] = programs.lower_extend(
                params, self._chunk(shape, []))
        for rows in self.config.row_buckets:
            found[f"wave_{rows}"] = programs.lower_wave(params, self._wave(rows, []), key,
                                                        *self._no_wave())
        return found

    def _no_wave(self):
        """Temperature, most tokens and `leaves` of a wave that samples nothing."""
        return np.float32(0), np.int32(0), np.zeros((self.devices,), np.int32)

    # ------------------------------------------------------------------ rows come and go

    def free(self, device: int) -> int:
        return len(self._free[device])

    def room(self, device: int, tokens: int) -> bool:
        """Whether there are pages for so many tokens of one more row, beside those that the
        rows will want which have none: new ones, and those that had to give theirs back."""
        wanted = sum(pages_for(len(row.ids) - row.shared + self.config.wave, self.config.page)
                     for row in self.rows if row.device == device and not row.pages)
        return pages_for(tokens, self.config.page) + wanted <= len(self._own[device])

    def share(self, ids: Sequence[int], device: int) -> SharedPrompt | None:
        """Pages for the K/V of a prompt, all but its last id; None where there is no room. It
        is run when a row of it is prepared. After `let_go` its pages are free with its last
        row."""
        pages = self._shared[device].take(pages_for(len(ids) - 1, self.config.prompt_page))
        if pages is None:
            return None
        return SharedPrompt(device, tuple(ids[:-1]), pages, [None] * self.config.sharers)

    def let_go(self, prompt: SharedPrompt) -> None:
        """No more rows of it will come."""
        prompt.kept = False
        self._close(prompt)

    def take(self, device: int, ids: Sequence[int], prompt: SharedPrompt | None = None) -> Row:
        """A row in a free slot, at a free seat of `prompt` if there is one. Its pages come
        when it is prepared."""
        row = Row(self._free[device].pop(), device, next(self._born), list(ids), prompt)
        if prompt is not None:
            row.seat = prompt.rows.index(None)
            prompt.rows[row.seat] = row
        self.rows.append(row)
        return row

    def release(self, row: Row) -> None:
        self.rows.remove(row)
        self._free[row.device].append(row.slot)
        self._unload(row)
        self._leave(row)

    def restart(self, row: Row, ids: Sequence[int], who: tuple[int, int]) -> None:
        """The row begins anew with other ids, which it shares with nobody."""
        self._unload(row)
        self._leave(row)
        row.ids, row.who, row.mark, row.marked = list(ids), who, 0, 0

    def _unload(self, row: Row) -> None:
        self._own[row.device].give(row.pages)
        row.pages, row.done = [], 0

    def _leave(self, row: Row) -> None:
        prompt, row.prompt = row.prompt, None
        if prompt is None:
            return
        prompt.rows[row.seat] = None
        self._close(prompt)

    def _close(self, prompt: SharedPrompt) -> None:
        if not prompt.kept and not any(prompt.rows):
            self._shared[prompt.device].give(prompt.pages)
            prompt.pages = []

    # ------------------------------------------------------------------ prefill and extend

    def prepare(self, params, rows: Sequence[Row], budgets: Sequence[int]) -> list[Row]:
        """Runs all ids of these rows but the last, and takes pages for as many more as a wave
        may sample. Returns the rows for which there was room, oldest first; the others wait
        for pages."""
        ready: list[Row] = []
        for row, budget in sorted(zip(rows, budgets), key=lambda pair: pair[0].born):
            tokens = len(row.ids) - 1 - row.shared + min(budget, self.config.wave)
            if self._make_room(row, tokens):
                ready.append(row)
        self.programs.fit(1 + max((max(row.pages) for row in self.rows if row.pages), default=-1),
                          kept=any(row.done for row in self.rows))
        prompts = {id(row.prompt): row.prompt for row in ready if row.prompt is not None}
        self._run(params, self.programs.prefill, self.config.prefill, prompts.values(),
                  self._prompt_part)
        self._run(params, self.programs.extend, self.config.extend_shapes, ready, self._row_part)
        return ready

    def _make_room(self, row: Row, tokens: int) -> bool:
        """Whether the row has pages for so many tokens of its own, now. If that is enough,
        younger rows give theirs back, the youngest first."""
        free = self._own[row.device]
        more = max(0, pages_for(tokens, self.config.page) - len(row.pages))
        if more > len(free):
            younger = [other for other in self.rows if other.device == row.device
                       and other.pages and other.born > row.born]
            if more > len(free) + sum(len(other.pages) for other in younger):
                return False
            while len(free) < more:
                self._unload(younger.pop())
                self.evicted += 1
        row.pages += free.take(more)
        return True

    def _run(self, params, program, shapes, items, part) -> None:
        """Runs chunks of these shapes until nothing is left; `part(item)` is how many ids an
        item still has to run."""
        while True:
            left = [[] for _ in range(self.devices)]
            for item in items:
                if n := part(item):
                    left[item.device].append((n, item))
            if not any(left):
                return
            for here in left:
                here.sort(key=lambda pair: -pair[0])
            shape = max(shapes, key=lambda shape: _worth(shape, left))
            rows, tokens = shape
            chosen = [[(item, min(n, tokens)) for n, item in here[:rows]] for here in left]
            program(params, self._chunk(shape, chosen))
            for here in chosen:
                for item, n in here:
                    item.done += n
                    self.ran += n

    @staticmethod
    def _prompt_part(prompt: SharedPrompt) -> int:
        return len(prompt.ids) - prompt.done

    @staticmethod
    def _row_part(row: Row) -> int:
        return len(row.ids) - 1 - row.cached

    def _chunk(self, shape: tuple[int, int], chosen) -> Chunk:
        """chosen: by device, pairs of a Row or SharedPrompt and how many of its ids to run."""
        rows, length = shape
        tokens_RxC = np.zeros((self.devices * rows, length), np.int32)
        n_R = np.zeros((self.devices * rows,), np.int32)
        shared, own = self._tables(rows)
        for device, here in enumerate(chosen):
            for r, (item, n) in enumerate(here, start=device * rows):
                first = item.done if isinstance(item, SharedPrompt) else item.cached
                tokens_RxC[r, :n] = item.ids[first:first + n]
                n_R[r] = n
                if isinstance(item, SharedPrompt):
                    _enter(shared, r, item.pages, item.done)
                else:
                    self._enter_row(shared, own, r, item)
        return Chunk(tokens_RxC, n_R, shared, own)

    # ------------------------------------------------------------------ tables

    def _tables(self, rows: int) -> tuple[Table, Table]:
        """Without pages, for so many rows a device."""
        rows *= self.devices
        table = lambda width, n: Table(  # noqa: E731
            np.full((rows, width), n, np.int32), np.zeros((rows,), np.int32))
        return (table(self.config.prompt_pages, self.plan.shared),
                table(self.config.row_pages, self.plan.own))

    @staticmethod
    def _enter_row(shared: Table, own: Table, r: int, row: Row) -> None:
        if row.prompt is not None:
            _enter(shared, r, row.prompt.pages, len(row.prompt.ids))
        _enter(own, r, row.pages, row.done)

    # ------------------------------------------------------------------ waves

    def sample(self, params, rows: Sequence[Row], budgets: Sequence[int], key: jax.Array,
               temperature: float, most: int, leave: float) -> list[tuple[Row, Sampled]]:
        """Plays a wave over rows that are prepared; what it sampled is then at the end of
        their ids. budgets, most: tokens, of a row and of every row; leave: the share of a
        device's rows at which the wave leaves them."""
        by_device = [[] for _ in range(self.devices)]
        for row, budget in zip(rows, budgets):
            by_device[row.device].append((row, budget))
        longest = max(map(len, by_device))
        bucket = next(n for n in self.config.row_buckets if n >= longest)
        leaves = np.asarray([int(leave * len(here)) for here in by_device], np.int32)
        out = jax.device_get(self.programs.wave(
            params, self._wave(bucket, by_device), key, np.float32(temperature), np.int32(most),
            leaves))
        return [(row, self._sampled(row, out, device * bucket + r))
                for device, here in enumerate(by_device) for r, (row, _) in enumerate(here)]

    def _sampled(self, row: Row, out: WaveOutput, at: int) -> Sampled:
        n = int(out.count_R[at])
        ids = out.tokens_RxM[at, :n].tolist()
        row.ids += ids
        row.done += n
        row.mark = checksum(row.ids[row.marked:row.cached], row.marked, row.mark)
        row.marked = row.cached
        return Sampled(ids, out.logprobs_RxM[at, :n].tolist(), bool(out.stopped_R[at]),
                       row.mark == int(out.mark_R[at]))

    def _wave(self, bucket: int, by_device) -> Wave:
        total, seats = self.devices * bucket, self.config.sharers
        n_shared, n_own = self.plan.shared, self.programs.size
        token_R, budget_R = np.zeros((total,), np.int32), np.zeros((total,), np.int32)
        who_Rx2 = np.zeros((total, 2), np.uint32)
        shared, own = self._tables(bucket)
        shared_seats, own_seats = (
            Sitting(np.zeros((self.devices * n, g), np.int32),
                    np.zeros((self.devices * n,), np.int32),
                    np.full((total, table.page_RxW.shape[1]), n * g, np.int32))
            for n, g, table in ((n_shared, seats, shared), (n_own, 1, own)))
        for device, here in enumerate(by_device):
            for r, (row, budget) in enumerate(here):
                at = device * bucket + r
                token_R[at], budget_R[at], who_Rx2[at] = row.ids[-1], budget, row.who
                self._enter_row(shared, own, at, row)
                _sit(own_seats, device * n_own, r, at,
                     row.pages[:pages_for(row.done, self.config.page)], 0, row.done,
                     self.config.page)
                if row.prompt is not None:
                    _sit(shared_seats, device * n_shared, r, at, row.prompt.pages, row.seat,
                         len(row.prompt.ids), self.config.prompt_page)
        return Wave(token_R, budget_R, who_Rx2, shared, own, shared_seats, own_seats)


def _worth(shape: tuple[int, int], left) -> tuple[float, int]:
    """How well a shape is filled by what is left to run, by device; the larger of equals."""
    rows, tokens = shape
    real = sum(min(n, tokens) for here in left for n, _ in here[:rows])
    return real / (len(left) * (rows * tokens + _CALL)), rows * tokens


def _enter(table: Table, r: int, pages: Sequence[int], length: int) -> None:
    table.page_RxW[r, :len(pages)] = pages
    table.length_R[r] = length


def _sit(seats: Sitting, first: int, r: int, at: int, pages: Sequence[int], seat: int,
         length: int, page: int) -> None:
    """Row r of a device, row `at` of the plan, sits at this seat of these pages, which begin
    at `first` in the plan."""
    n, width = len(pages), seats.row_NxG.shape[1]
    pages = np.asarray(pages, np.int64)
    seats.row_NxG[first + pages, seat] = r
    seats.length_N[first + pages] = np.clip(length - page * np.arange(n), 0, page)
    seats.at_RxW[at, :n] = pages * width + seat
