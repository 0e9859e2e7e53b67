"""Prefill, extend and waves against a plain reference that keeps no cache: for every token the
whole dialogue goes through the model again. Pages are given out here in no order."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
import rollout_reference as reference

from rods_jax.models.config import ModelConfig
from rods_jax.models.decoder import Decoder, init_params, unrolled, unstacked
from rods_jax.rollout import sampler
from rods_jax.rollout.sampler import Chunk, Sitting, Table, Wave, checksum
from rods_jax.rollout.shapes import SamplerConfig

STACKED = ModelConfig(vocab_size=23, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=6,
                      d_ff=32)
UNROLLED = dataclasses.replace(STACKED, scan_unroll=2)
SHAPE = SamplerConfig(slots=5, max_len=44, prompt_len=12, max_new=6, sharers=3, prompts=2,
                      prefill=((2, 4),), extend=((3, 4),), page=4, prompt_page=5, steps=5)
N_SHARED, N_OWN, R = 7, 40, 5
STOP = (1, 2)
KEY = jax.random.key(11)


@functools.cache
def policy():
    params = init_params(STACKED, jax.random.key(3))
    # A louder head than at initialization: greedy choices are then far from ties.
    return params | {"embed": params["embed"] * 20}


@functools.cache
def forward():
    return reference.Model(Decoder(STACKED), policy())


def program(function):
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def programs(model, shape):
    decoder = Decoder(model)
    return (unstacked(model, policy()), program(sampler.make_prefill(decoder, shape)),
            program(sampler.make_extend(decoder, shape)),
            program(sampler.make_wave(decoder, shape, STOP)))


@dataclasses.dataclass
class Prompt:
    ids: list[int]  # all but the last, which is fed by a wave
    pages: list[int]
    seats: int = 0


@dataclasses.dataclass
class Row:
    who: tuple[int, int]
    ids: list[int]
    prompt: Prompt | None
    seat: int = 0
    done: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)

    @property
    def shared(self):
        return 0 if self.prompt is None else len(self.prompt.ids)

    @property
    def cached(self):
        return self.shared + self.done


class World:
    """A cache and who is in it."""

    def __init__(self, model=STACKED, shape=SHAPE, seed=0):
        self.shape, self.rng = shape, np.random.default_rng(seed)
        self.params, self.prefill, self.extend, self.wave = programs(model, shape)
        self.cache = sampler.init_cache(Decoder(model), shape, N_SHARED, N_OWN)
        self._shared = list(self.rng.permutation(N_SHARED))
        self._own = list(self.rng.permutation(N_OWN))

    def words(self, n):
        return self.rng.integers(3, 23, n).tolist()

    def prompt(self, ids):
        pages = -(-(len(ids) - 1) // self.shape.prompt_page)
        return Prompt(ids[:-1], [self._shared.pop() for _ in range(pages)])

    def row(self, who, ids, prompt=None):
        row = Row(who, list(ids), prompt)
        if prompt is not None:
            row.seat, prompt.seats = prompt.seats, prompt.seats + 1
        return row

    def grow(self, row, tokens):
        while len(row.pages) * self.shape.page < row.done + tokens:
            row.pages.append(self._own.pop())

    # ---------------------------------------------------------------- plans

    def tables(self, n):
        made = [Table(np.full((n, width), pages, np.int32), np.zeros((n,), np.int32))
                for width, pages in ((self.shape.prompt_pages, N_SHARED),
                                     (self.shape.row_pages, N_OWN))]
        return made

    @staticmethod
    def enter(table, r, pages, length):
        table.page_RxW[r, :len(pages)] = pages
        table.length_R[r] = length

    def run_prompts(self, prompts):
        """In chunks; a short prompt ends before a long one."""
        (n, C), = self.shape.prefill
        for start in range(0, max(len(p.ids) for p in prompts), C):
            tokens, n_R = np.zeros((n, C), np.int32), np.zeros((n,), np.int32)
            shared, own = self.tables(n)
            for r, prompt in enumerate(prompts):
                part = prompt.ids[start:start + C]
                tokens[r, :len(part)], n_R[r] = part, len(part)
                self.enter(shared, r, prompt.pages, min(start, len(prompt.ids)))
            self.cache = self.cache.replace(shared=self.prefill(
                self.params, self.cache.shared, Chunk(tokens, n_R, shared, own)))

    def run_rows(self, rows):
        """All their ids but the last, a chunk of some rows at a time, in no order."""
        (n, C), = self.shape.extend
        while left := [row for row in rows if row.cached < len(row.ids) - 1]:
            chosen = [left[i] for i in self.rng.permutation(len(left))[:n]]
            tokens, n_R = np.zeros((n, C), np.int32), np.zeros((n,), np.int32)
            shared, own = self.tables(n)
            for r, row in enumerate(chosen):
                part = row.ids[row.cached:len(row.ids) - 1][:C]
                self.grow(row, len(part))
                tokens[r, :len(part)], n_R[r] = part, len(part)
                self.enter_row(shared, own, r, row)
            self.cache = self.extend(self.params, self.cache, Chunk(tokens, n_R, shared, own))
            for row, n_new in zip(chosen, n_R):
                row.done += int(n_new)

    def enter_row(self, shared, own, r, row):
        if row.prompt is not None:
            self.enter(shared, r, row.prompt.pages, len(row.prompt.ids))
        self.enter(own, r, row.pages, row.done)

    def plan(self, rows, budgets):
        """`rows` with None where nobody is."""
        token, budget_R = np.zeros((R,), np.int32), np.asarray(budgets, np.int32)
        who, (shared, own) = np.zeros((R, 2), np.uint32), self.tables(R)
        seats = [Sitting(np.zeros((n, g), np.int32), np.zeros((n,), np.int32),
                         np.full((R, table.page_RxW.shape[1]), n * g, np.int32))
                 for n, g, table in ((N_SHARED, self.shape.sharers, shared), (N_OWN, 1, own))]
        for r, row in enumerate(rows):
            if row is None:
                continue
            self.grow(row, min(budget_R[r], self.shape.wave))
            token[r], who[r] = row.ids[-1], row.who
            self.enter_row(shared, own, r, row)
            self.sit(seats[1], r, row.pages, 0, row.done, self.shape.page)
            if row.prompt is not None:
                self.sit(seats[0], r, row.prompt.pages, row.seat, row.shared,
                         self.shape.prompt_page)
        return Wave(token, budget_R, who, shared, own, *seats)

    @staticmethod
    def sit(seats, r, pages, seat, length, page):
        for i, n in enumerate(pages[:-(-length // page)]):
            seats.row_NxG[n, seat] = r
            seats.length_N[n] = min(page, length - i * page)
            seats.at_RxW[r, i] = n * seats.row_NxG.shape[1] + seat

    def sample(self, plan, temperature=1.0, most=None, leave=0):
        most = self.shape.wave if most is None else most
        self.cache, out = self.wave(self.params, self.cache, plan, KEY, np.float32(temperature),
                                    np.int32(most), np.full((1,), leave, np.int32))
        return jax.device_get(out)


def simulated(world, rows, budgets, temperature, most, leave):
    """What a wave samples, [(ids, logprobs)] a row, token by token and without a cache."""
    keep = world.shape.keep
    limits = reference.Limits(0, 0, keep.top_k, keep.top_p)
    found = [([], []) for _ in rows]
    alive = [row is not None and budget > 0 for row, budget in zip(rows, budgets)]
    for _ in range(most):
        if sum(alive) <= leave:
            break
        for r, row in enumerate(rows):
            if not alive[r]:
                continue
            ids, logprobs = found[r]
            logits = forward()(row.ids + ids)
            noise = reference.gumbel(KEY, *map(np.uint32, row.who),
                                     np.uint32(len(row.ids) + len(ids)), logits)
            token, logprob = reference.draw(logits, np.asarray(noise), temperature, limits)
            ids.append(token)
            logprobs.append(logprob)
            alive[r] = token not in STOP and len(ids) < budgets[r]
    return found


def start(model=STACKED, shape=SHAPE, seed=0):
    """Two prompts; three rows at the first, one at the second, one that shares none."""
    world = World(model, shape, seed)
    long, short = world.words(12), world.words(5)
    prompts = [world.prompt(long), world.prompt(short)]
    world.run_prompts(prompts)
    rows = [world.row((7, 0), long, prompts[0]), world.row((8, 0), short, prompts[1]),
            world.row((7, 1), long, prompts[0]), world.row((7, 2), long, prompts[0]),
            world.row((9, 5), world.words(9))]
    world.run_rows(rows)
    return world, rows


# ---------------------------------------------------------------- against the reference


@pytest.mark.parametrize("model, temperature, more", [
    (STACKED, 0.0, {}), (STACKED, 1.0, {}), (UNROLLED, 0.7, {}),
    (UNROLLED, 1.3, dict(top_k=9, top_p=0.8))],
    ids=["greedy", "stacked", "unrolled", "filtered"])
def test_dialogues_equal_the_cache_free_reference(model, temperature, more):
    world, rows = start(model, dataclasses.replace(SHAPE, **more))
    assert isinstance(world.cache.own.k, tuple) == unrolled(model)
    ends = {"stop": 0, "budget": 0, "most": 0, "leave": 0}
    for turn in range(8):
        room = [SHAPE.max_len - len(row.ids) for row in rows]
        here = [row if room[r] >= 2 and world.rng.random() < 0.8 else None
                for r, row in enumerate(rows)]
        if not any(here):
            continue
        budgets = [0 if row is None else min(int(world.rng.integers(1, 7)), room[r])
                   for r, row in enumerate(here)]
        most, leave = int(world.rng.integers(2, 6)), int(world.rng.choice([0, 0, 1, 2]))
        want = simulated(world, here, budgets, temperature, most, leave)
        out = world.sample(world.plan(here, budgets), temperature, most, leave)
        for r, (row, (ids, logprobs)) in enumerate(zip(here, want)):
            assert out.count_R[r] == len(ids)
            assert out.tokens_RxM[r, :len(ids)].tolist() == ids
            np.testing.assert_allclose(out.logprobs_RxM[r, :len(ids)], logprobs, atol=1e-4)
            assert out.stopped_R[r] == bool(ids and ids[-1] in STOP)
            if row is None:
                assert out.mark_R[r] == 0
                continue
            row.ids += ids
            row.done += len(ids)
            assert row.cached == len(row.ids) - 1
            assert out.mark_R[r] == checksum(row.ids[:row.cached])
            cause = ("stop" if out.stopped_R[r] else "budget" if len(ids) == budgets[r]
                     else "most" if len(ids) == most else "leave")
            ends[cause] += 1
            answer = int(world.rng.integers(0, 8))
            if len(row.ids) + answer < SHAPE.max_len - 2:
                row.ids += world.words(answer)
        world.run_rows(rows)
    # Each is seen except where the case cannot have it.
    assert all(ends[name] for name in ("budget", "most")) and sum(ends.values()) > 12
    assert temperature == 0 or (ends["stop"] and ends["leave"])


def test_a_token_at_a_time_gives_the_same_as_many():
    (slow, slow_rows), (fast, fast_rows) = start(), start()
    want = fast.sample(fast.plan(fast_rows, [5] * R))
    tokens = [[] for _ in range(R)]
    for _ in range(5):
        budgets = [int(not said or said[-1] not in STOP) for said in tokens]
        out = slow.sample(slow.plan(slow_rows, budgets))
        for row, said, token, n in zip(slow_rows, tokens, out.tokens_RxM[:, 0], out.count_R):
            new = [int(token)] * int(n)
            said += new
            row.ids += new
            row.done += len(new)
    assert [want.tokens_RxM[r, :n].tolist() for r, n in enumerate(want.count_R)] == tokens


def test_nothing_happens_where_nobody_is():
    world, _ = start()
    before = world.cache
    out = world.sample(world.plan([None] * R, [0] * R))
    assert not out.count_R.any() and not out.stopped_R.any() and not out.mark_R.any()
    jax.tree.map(np.testing.assert_array_equal, world.cache, before)


def test_a_wave_writes_into_its_own_pages_alone():
    world, rows = start()
    before = jax.device_get(world.cache)
    plan = world.plan([rows[0], None, None, None, rows[4]], [3, 0, 0, 0, 6])
    out = world.sample(plan)
    jax.tree.map(np.testing.assert_array_equal, world.cache.shared, before.shared)
    written = {(row.pages[i // SHAPE.page], i % SHAPE.page)
               for row, n in ((rows[0], out.count_R[0]), (rows[4], out.count_R[4]))
               for i in range(row.done, row.done + n)}
    changed = np.abs(np.asarray(world.cache.own.k) - before.own.k).max((0, 2, 3)) > 0
    assert {tuple(at) for at in np.argwhere(changed)} == written and len(written) >= 2


# ---------------------------------------------------------------- the checksum


def damaged(cache, region, page, index, token):
    part = getattr(cache, region)
    return cache.replace(**{region: part.replace(
        ids_NxE=part.ids_NxE.at[page, index].set(token))})


def test_any_other_id_in_the_cache_shows():
    world, rows = start()
    plan, good = world.plan(rows, [1] * R), world.cache
    clean = world.sample(plan).mark_R
    row = rows[0]
    places = [("shared", row.prompt.pages, i, SHAPE.prompt_page) for i in range(row.shared)]
    for row_own in (rows[4],):
        places += [("own", row_own.pages, i, SHAPE.page) for i in range(row_own.done)]
    assert len(places) == 11 + 8
    for region, pages, i, size in places:
        page, index = pages[i // size], i % size
        old = int(getattr(good, region).ids_NxE[page, index])
        world.cache = damaged(good, region, page, index, old ^ 1)
        mark = world.sample(plan).mark_R
        hit = [0, 2, 3] if region == "shared" else [4]
        assert [r for r in range(R) if mark[r] != clean[r]] == hit, (region, i)


def test_swapped_and_missing_ids_show():
    world, rows = start()
    plan, good = world.plan(rows, [1] * R), world.cache
    clean = world.sample(plan).mark_R
    page, ids = rows[4].pages[0], np.asarray(good.own.ids_NxE[rows[4].pages[0]])
    i, j = next((i, j) for i in range(4) for j in range(i) if ids[i] != ids[j])
    world.cache = damaged(damaged(good, "own", page, i, ids[j]), "own", page, j, ids[i])
    assert world.sample(plan).mark_R[4] != clean[4]
    world.cache = good
    plan.own.length_R[4] -= 1
    plan.shared.length_R[1] -= 1
    short = world.sample(plan).mark_R
    assert [r for r in range(R) if short[r] != clean[r]] == [1, 4]


IDS = st.lists(st.integers(0, 2**18), min_size=2, max_size=40)


@hypothesis.given(IDS, st.data())
def test_the_hosts_checksum_tells_ids_and_their_order(ids, data):
    whole = checksum(ids)
    assert 0 <= whole < 2**32
    cut = data.draw(st.integers(0, len(ids)))
    assert checksum(ids[cut:], cut, checksum(ids[:cut])) == whole
    i, j = (data.draw(st.integers(0, len(ids) - 1)) for _ in range(2))
    changed = list(ids)
    changed[i] += 1
    assert checksum(changed) != whole != checksum(ids[:-1])
    swapped = list(ids)
    swapped[i], swapped[j] = ids[j], ids[i]
    assert (checksum(swapped) == whole) == (swapped == ids)
    assert checksum([*ids, 0]) != whole  # the id 0 counts too


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize("fields, words", [
    (dict(max_len=16, prompt_len=12, max_new=8), "exceeds max_len 16"),
    (dict(straggler_share=1.0), "straggler_share must lie in"),
    (dict(slots=0), "sampler.slots is 0"), (dict(page=0), "sampler.page is 0"),
    (dict(steps_waiting=0), "sampler.steps_waiting is 0"),
    (dict(prefill=()), "sampler.prefill is"), (dict(extend=((4, 0),)), "sampler.extend is"),
    (dict(extend=((4,),)), "sampler.extend is"), (dict(wave_rows=(0,)), "sampler.wave_rows is"),
    (dict(cache_sizes=(1.5,)), "sampler.cache_sizes is"),
    (dict(cache_sizes=(0.0,)), "sampler.cache_sizes is"), (dict(top_k=-2), "top_k is -2"),
    (dict(top_p=0.0), "top_p is 0.0")])
def test_shapes_that_cannot_work_are_refused(fields, words):
    with pytest.raises(ValueError, match=words) as error:
        SamplerConfig(**fields)
    assert "\n" not in str(error.value)


def test_figures_that_follow_from_the_shape():
    shape = SamplerConfig(slots=9, max_len=50, prompt_len=20, max_new=7, page=8, prompt_page=16,
                          steps=30, wave_rows=(3, 9, 20), cache_sizes=(0.5, 0.1))
    assert (shape.wave, shape.row_pages, shape.prompt_pages) == (7, 7, 2)
    assert shape.row_buckets == (3, 9) and shape.own_sizes(63) == (7, 32, 63)
    assert dataclasses.replace(shape, steps=4).wave == 4
