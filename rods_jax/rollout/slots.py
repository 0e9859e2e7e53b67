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

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rods_jax.models.decoder import Decoder, unrolled
from rods_jax.rollout import sampler
from rods_jax.rollout.pages import FreePages, pages_for
from rods_jax.rollout.sampler import Cache, Chunk, Sitting, Table, Wave, WaveOutput, checksum
from rods_jax.rollout.shapes import SamplerConfig, plan_memory

AXIS = "data"  # of the mesh: each device along it has slots, pages and rows of its own
TENSOR = "tensor"  # of the mesh: weights and K/V heads are split over it
_CALL = 16  # what calling a program costs, in tokens: keeps small chunks from being many


@dataclasses.dataclass(eq=False)
class Prompt:
    """All but the last id of a prompt, in shared pages of one device."""

    device: int
    ids: tuple[int, ...]
    pages: list[int]
    rows: list[Row | None]  # by seat
    done: int = 0  # ids that have K/V
    kept: bool = True  # though nobody sits there, more rows will come

    @property
    def free_seats(self) -> int:
        return self.rows.count(None)


@dataclasses.dataclass(eq=False)
class Row:
    """ids: of the whole row, the prompt's too. done: how many have K/V in the row's own pages,
    behind those of `prompt`."""

    slot: int
    device: int
    born: int
    ids: list[int]
    prompt: Prompt | None = None
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
    """Owns the cache and the compiled programs; the weights come with every call.

    mesh: devices along its axis "data" each play rows of their own; over its axis "tensor" K/V
    heads are split, as weights may be. None is one device.
    """

    def __init__(self, decoder: Decoder, config: SamplerConfig, stop_ids: Sequence[int],
                 mesh: Mesh | None = None):
        self.config, self.devices = config, 1 if mesh is None else mesh.shape[AXIS]
        self.memory = plan_memory(config, decoder.config)
        self.rows: list[Row] = []  # oldest first
        self.evicted = 0  # times that a row gave its pages back to an older one
        self.ran = 0  # tokens that prefill and extend have run
        self._mesh, self._born = mesh, itertools.count()
        n_shared, n_own = self.memory.shared, self.memory.own
        self._shared = [FreePages(n_shared) for _ in range(self.devices)]
        self._own = [FreePages(n_own) for _ in range(self.devices)]
        self._free = [list(reversed(range(config.slots))) for _ in range(self.devices)]
        self._stacked = () if unrolled(decoder.config) else (None,)  # an axis of layers
        self._cache = self._empty(decoder)
        self._prefill = {shape: self._program(f"prefill_{shape[0]}x{shape[1]}",
                                              sampler.make_prefill(decoder, config))
                         for shape in config.prefill}
        self._extend = {shape: self._program(f"extend_{shape[0]}x{shape[1]}",
                                             sampler.make_extend(decoder, config))
                        for shape in config.extend_shapes}
        self._waves = {
            (rows, shared, own): self._program(
                f"wave_{rows}_{shared}_{own}",
                sampler.make_wave(decoder, config, stop_ids, shared, own), samples=True)
            for rows in config.row_buckets for shared in (0, n_shared)
            for own in config.page_buckets(n_own)}

    def _specs(self, *heads: str | None) -> Cache:
        """How the cache is split: pages over devices and, if named, K/V heads."""
        pages = PartitionSpec(*self._stacked, AXIS, *heads)
        region = sampler.Region(pages, pages, PartitionSpec(AXIS))
        return Cache(region, region)

    def _empty(self, decoder: Decoder) -> Cache:
        def make():
            return sampler.init_cache(decoder, self.config, self.memory.shared * self.devices,
                                      self.memory.own * self.devices)
        if self._mesh is None:
            return jax.jit(make)()  # piece by piece it would take its memory twice
        parts = self._mesh.shape.get(TENSOR, 1)
        split = parts > 1 and decoder.config.n_kv_heads % parts == 0
        self._placed = jax.tree.map(
            lambda spec: NamedSharding(self._mesh, spec), self._specs(TENSOR if split else None),
            is_leaf=lambda x: isinstance(x, PartitionSpec))
        return jax.jit(make, out_shardings=self._placed)()

    def _program(self, name: str, function, samples: bool = False):
        """`function` compiled under this name, the cache donated, on every device of the mesh
        with the rows and pages that are there."""
        placed = None
        if self._mesh is not None:
            every, here = PartitionSpec(), PartitionSpec(AXIS)
            function = jax.shard_map(
                function, mesh=self._mesh, axis_names={AXIS}, check_vma=False,
                in_specs=(every, self._specs(), here, *(every, every, every, here) * samples),
                out_specs=(self._specs(), here) if samples else self._specs())
            placed = (self._placed, NamedSharding(self._mesh, here)) if samples else self._placed

        def program(*args):
            return function(*args)
        program.__name__ = program.__qualname__ = name
        return jax.jit(program, donate_argnums=1, out_shardings=placed)

    def warm_up(self, params, key: jax.Array) -> int:
        """Runs every program once on nothing, so that none is compiled later. Returns how many
        there are."""
        for shapes, programs in ((self.config.prefill, self._prefill),
                                 (self.config.extend_shapes, self._extend)):
            for shape in shapes:
                self._cache = programs[shape](params, self._cache, self._chunk(shape, []))
        for (rows, shared, own), program in self._waves.items():
            self._cache, out = program(params, self._cache, self._wave(rows, shared, own, []), key,
                                       np.float32(0), np.int32(0),
                                       np.zeros((self.devices,), np.int32))
        jax.block_until_ready(out)
        return len(self._prefill) + len(self._extend) + len(self._waves)

    # ------------------------------------------------------------------ rows come and go

    def free(self, device: int) -> int:
        return len(self._free[device])

    def room(self, device: int, tokens: int) -> bool:
        """Whether there are pages for so many tokens of one more row, beside those that the
        rows will want which have none: new ones, and those that had to give theirs back."""
        wanted = sum(pages_for(len(row.ids) - row.shared + self.config.wave, self.config.page)
                     for row in self.rows if row.device == device and not row.pages)
        return pages_for(tokens, self.config.page) + wanted <= len(self._own[device])

    def share(self, ids: Sequence[int], device: int) -> Prompt | None:
        """Pages for the K/V of a prompt, all but its last id; None where there is no room. It
        is run when a row of it is prepared. After `let_go` its pages are free with its last
        row."""
        pages = self._shared[device].take(pages_for(len(ids) - 1, self.config.prompt_page))
        if pages is None:
            return None
        return Prompt(device, tuple(ids[:-1]), pages, [None] * self.config.sharers)

    def let_go(self, prompt: Prompt) -> None:
        """No more rows of it will come."""
        prompt.kept = False
        self._close(prompt)

    def take(self, device: int, ids: Sequence[int], prompt: Prompt | None = None) -> Row:
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

    def _close(self, prompt: Prompt) -> None:
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
        self._run(params, self._prefill, {id(row.prompt): row.prompt for row in ready
                                          if row.prompt is not None}.values(), self._prompt_part)
        self._run(params, self._extend, ready, self._row_part)
        return ready

    def _make_room(self, row: Row, tokens: int) -> bool:
        """Whether the row has pages for so many tokens of its own, now. If that is enough,
        younger rows give theirs back, the youngest first."""
        free = self._own[row.device]
        more = max(0, pages_for(tokens, self.config.page) - len(row.pages))
        younger = [other for other in self.rows if other.device == row.device
                   and other.pages and other.born > row.born]
        if more > len(free) + sum(len(other.pages) for other in younger):
            return False
        while len(free) < more:
            self._unload(younger.pop())
            self.evicted += 1
        row.pages += free.take(more)
        return True

    def _run(self, params, programs, items, part) -> None:
        """Runs chunks until nothing is left; `part(item)` is what an item still has to run,
        and how to say that some of it was."""
        while True:
            left = [[] for _ in range(self.devices)]
            for item in items:
                if n := part(item):
                    left[item.device].append((n, item))
            if not any(left):
                return
            for here in left:
                here.sort(key=lambda pair: -pair[0])
            shape = max(programs, key=lambda shape: _worth(shape, left))
            rows, tokens = shape
            chosen = [[(item, min(n, tokens)) for n, item in here[:rows]] for here in left]
            self._cache = programs[shape](params, self._cache, self._chunk(shape, chosen))
            for here in chosen:
                for item, n in here:
                    item.done += n
                    self.ran += n

    @staticmethod
    def _prompt_part(prompt: Prompt) -> int:
        return len(prompt.ids) - prompt.done

    @staticmethod
    def _row_part(row: Row) -> int:
        return len(row.ids) - 1 - row.cached

    def _chunk(self, shape: tuple[int, int], chosen) -> Chunk:
        """chosen: by device, pairs of a Row or Prompt and how many of its ids to run."""
        rows, length = shape
        tokens_RxC = np.zeros((self.devices * rows, length), np.int32)
        n_R = np.zeros((self.devices * rows,), np.int32)
        shared, own = self._tables(rows)
        for device, here in enumerate(chosen):
            for r, (item, n) in enumerate(here, start=device * rows):
                first = item.done if isinstance(item, Prompt) else item.cached
                tokens_RxC[r, :n] = item.ids[first:first + n]
                n_R[r] = n
                if isinstance(item, Prompt):
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
        return (table(self.config.prompt_pages, self.memory.shared),
                table(self.config.row_pages, self.memory.own))

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
        used = max(max(self._with_tokens(row), default=-1) for row in rows) + 1
        shared = self.memory.shared if any(row.shared for row in rows) else 0
        own = next(n for n in self.config.page_buckets(self.memory.own) if n >= used)
        self._cache, out = self._waves[bucket, shared, own](
            params, self._cache, self._wave(bucket, shared, own, by_device), key,
            np.float32(temperature), np.int32(most),
            np.asarray([int(leave * len(here)) for here in by_device], np.int32))
        out = jax.device_get(out)
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

    def _wave(self, bucket: int, n_shared: int, n_own: int, by_device) -> Wave:
        total, seats = self.devices * bucket, self.config.sharers
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
                _sit(own_seats, device * n_own, r, at, self._with_tokens(row), 0, row.done,
                     self.config.page)
                if row.prompt is not None:
                    _sit(shared_seats, device * n_shared, r, at, row.prompt.pages, row.seat,
                         len(row.prompt.ids), self.config.prompt_page)
        return Wave(token_R, budget_R, who_Rx2, shared, own, shared_seats, own_seats)

    def _with_tokens(self, row: Row) -> list[int]:
        return row.pages[:pages_for(row.done, self.config.page)]


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
