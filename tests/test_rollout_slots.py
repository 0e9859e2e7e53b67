"""The host's half of the sampler: pages, seats and plans against programs on paper, which keep
ids and no K/V; then with the real ones memory, eviction, and what is compiled."""

import dataclasses
import re

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from loop_cases import CHAT, FORGETFUL, SUITE, babbler

from rods_jax.metrics import CompileCounter
from rods_jax.models.config import ModelConfig
from rods_jax.models.decoder import Decoder
from rods_jax.rollout.engine import Engine, EngineConfig, make_prompt
from rods_jax.rollout.pages import FreePages, pages_for
from rods_jax.rollout.sampler import WaveOutput, checksum
from rods_jax.rollout.shapes import SamplerConfig, plan_memory
from rods_jax.rollout.slots import Slots

MODEL = ModelConfig(vocab_size=23, d_model=8, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=4,
                    d_ff=8)
TOKEN = 2 * 2 * 1 * 4 * 4  # bytes: k and v, layers, heads, width, float32
SHAPE = SamplerConfig(slots=6, max_len=40, prompt_len=14, max_new=6, sharers=3, prompts=3,
                      prefill=((2, 4), (1, 8)), extend=((2, 4), (1, 9)), wave_rows=(2,),
                      cache_sizes=(0.3, 0.6), page=3, prompt_page=4, steps=5)
PROMPT_BYTES = 3 * 4 * 4 * TOKEN
TIGHT = dataclasses.replace(SHAPE, kv_bytes=PROMPT_BYTES + 20 * 3 * TOKEN)
STOP = (1, 2)


# ---------------------------------------------------------------- free pages


@hypothesis.given(st.lists(st.integers(0, 5), max_size=30), st.integers(0, 12))
def test_pages_are_given_out_once_and_the_lowest_first(counts, n):
    pages, held = FreePages(n), []
    for i, count in enumerate(counts):
        free = sorted(set(range(n)) - {page for group in held for page in group})
        assert len(pages) == len(free)
        got = pages.take(count)
        assert got == (free[:count] if count <= len(free) else None)
        if got is not None:
            held.append(got)
        if i % 3 == 2 and held:
            pages.give(held.pop(0))
    for group in held:
        pages.give(group)
    assert pages.take(n) == list(range(n)) and len(pages) == 0


def test_pages_for_tokens():
    assert [pages_for(n, 4) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


# ---------------------------------------------------------------- programs on paper


class Paper:
    """Stands for the slots' Programs, and plays them over ids alone. Everything it is told is
    checked: that pages which are written belong to nobody else, and that a row reads all its
    tokens in order, at seats that are its own."""

    def __init__(self, slots, seed):
        self.slots, self.rng = slots, np.random.default_rng(seed)
        self.shared = np.full((slots.plan.shared, slots.config.prompt_page), -1)
        self.own = np.full((0, slots.config.page), -1)
        self.calls = []
        slots.programs = self

    @property
    def size(self):
        return len(self.own)

    def fit(self, pages, kept):
        """Not one page more than is asked for, and what is beyond is lost."""
        self.own = self.own[:pages if kept else 0]
        empty = np.full((max(0, pages - self.size), self.own.shape[1]), -1)
        self.own = np.concatenate([self.own, empty])

    @staticmethod
    def _places(pages, table, r, first, n):
        """Of tokens first .. first + n - 1 of a table's row: page and index."""
        size = pages.shape[1]
        at = [(int(table.page_RxW[r, i // size]), i % size) for i in range(first, first + n)]
        assert all(page < len(pages) for page, _ in at), "no page"
        return at

    def _read(self, shared, own, r):
        return [int(pages[at]) for pages, table in ((self.shared, shared), (self.own, own))
                for at in self._places(pages, table, r, 0, int(table.length_R[r]))]

    def _chunk(self, shapes, chunk, pages, table):
        assert chunk.tokens_RxC.shape in shapes and chunk.n_R.any()
        self.calls.append(int(chunk.n_R.sum()))
        written = []
        for r, n in enumerate(chunk.n_R):
            at = self._places(pages, table, r, int(table.length_R[r]), int(n))
            written += at
            for place, token in zip(at, chunk.tokens_RxC[r]):
                pages[place] = token
        assert len(set(written)) == len(written)

    def prefill(self, params, chunk):
        assert not chunk.own.length_R.any()
        self._chunk(self.slots.config.prefill, chunk, self.shared, chunk.shared)

    def extend(self, params, chunk):
        self._chunk(self.slots.config.extend_shapes, chunk, self.own, chunk.own)

    def _seated(self, pages, seats, table, r):
        """The row's seats are at its pages with tokens, and nowhere else."""
        n_seats = seats.row_NxG.shape[1]
        assert len(seats.row_NxG) == len(pages)
        at = [int(x) for x in seats.at_RxW[r] if x < len(pages) * n_seats]
        used = -(-int(table.length_R[r]) // pages.shape[1])
        assert [x // n_seats for x in at] == table.page_RxW[r, :used].tolist()
        left = int(table.length_R[r])
        for x in at:
            assert seats.row_NxG[divmod(x, n_seats)] == r
            assert seats.length_N[x // n_seats] == min(left, pages.shape[1])
            left -= pages.shape[1]
        return at

    def wave(self, params, plan, key, temperature, most, leave):
        rows, M = len(plan.token_R), self.slots.config.wave
        assert rows in self.slots.config.row_buckets and (plan.budget_R > 0).any()
        out = WaveOutput(np.zeros((rows, M), np.int32), np.zeros((rows, M), np.float32),
                         np.zeros((rows,), np.int32), np.zeros((rows,), bool),
                         np.zeros((rows,), np.uint32))
        taken = []
        for r in np.flatnonzero(plan.budget_R):
            taken += [("shared", x) for x in self._seated(
                self.shared, plan.shared_seats, plan.shared, r)]
            taken += [("own", x) for x in self._seated(self.own, plan.own_seats, plan.own, r)]
            n = int(self.rng.integers(1, min(int(plan.budget_R[r]), int(most)) + 1))
            said = self.rng.integers(3, 23, n)
            out.stopped_R[r] = self.rng.random() < 0.3
            if out.stopped_R[r]:
                said[-1] = 1
            fed = [plan.token_R[r], *said[:-1]]
            for at, token in zip(self._places(self.own, plan.own, r,
                                              int(plan.own.length_R[r]), n), fed):
                self.own[at] = token
            ids = [*self._read(plan.shared, plan.own, r), *map(int, fed)]
            out.tokens_RxM[r, :n], out.count_R[r] = said, n
            out.mark_R[r] = checksum(ids)
        assert len(set(taken)) == len(taken), "two rows at one seat"
        return out


def check_pages(slots, prompts):
    """Each page is free or has one owner."""
    own = [page for row in slots.rows for page in row.pages]
    assert sorted(own + slots._own[0]._free) == list(range(slots.plan.own))
    shared = [page for prompt in prompts for page in prompt.pages]
    assert sorted(shared + slots._shared[0]._free) == list(range(slots.plan.shared))
    seats = [row.slot for row in slots.rows]
    assert sorted(seats + slots._free[0]) == list(range(slots.config.slots))
    for row in slots.rows:
        assert row.cached < len(row.ids) and row.done <= len(row.pages) * slots.config.page
        assert row.prompt is None or row.prompt.rows[row.seat] is row


def budget_of(slots, row):
    return min(slots.config.max_new, slots.config.max_len - len(row.ids))


class Game:
    """Random doings of an engine."""

    def __init__(self, config, seed):
        self.slots = Slots(Decoder(MODEL), config, STOP)
        self.paper = Paper(self.slots, seed)
        self.rng, self.prompts, self.open, self.n = np.random.default_rng(seed), [], [], 0

    def words(self, n):
        return self.rng.integers(3, 23, n).tolist()

    def some(self, rows):
        return [row for row in rows if self.rng.random() < 0.7]

    def share(self):
        ids = self.words(int(self.rng.integers(1, self.slots.config.prompt_len + 1)))
        prompt = self.slots.share(ids, 0)
        if prompt is not None:
            self.prompts.append(prompt)
            self.open.append((prompt, ids))

    def take(self):
        if not self.slots.free(0):
            return
        self.n += 1
        seats = [(prompt, ids) for prompt, ids in self.open if None in prompt.rows]
        if seats and self.rng.random() < 0.7:
            prompt, ids = seats[self.rng.integers(len(seats))]
        else:
            prompt, ids = None, self.words(int(self.rng.integers(1, 15)))
        self.slots.take(0, ids, prompt).who = (self.n, 0)

    def let_go(self):
        if self.open:
            self.slots.let_go(self.open.pop(self.rng.integers(len(self.open)))[0])

    def release(self):
        if self.slots.rows:
            self.slots.release(self.slots.rows[self.rng.integers(len(self.slots.rows))])

    def restart(self):
        if self.slots.rows:
            row = self.slots.rows[self.rng.integers(len(self.slots.rows))]
            self.slots.restart(row, self.words(int(self.rng.integers(1, 20))), (self.n, 1))

    def answer(self):
        for row in self.some(self.slots.rows):
            room = self.slots.config.max_len - len(row.ids) - 1
            row.ids += self.words(min(max(0, room), int(self.rng.integers(0, 9))))

    def wave(self):
        slots, wave = self.slots, self.slots.config.wave
        for row in [row for row in slots.rows if not budget_of(slots, row)]:
            slots.release(row)
        rows = self.some(slots.rows)
        if not rows:
            return
        rows = [rows[i] for i in self.rng.permutation(len(rows))]
        oldest, before = slots.rows[0], list(slots.rows[0].pages)
        ready = slots.prepare(None, rows, [budget_of(slots, row) for row in rows])
        assert oldest.pages[:len(before)] == before, "the oldest was evicted"
        born = [row.born for row in ready]
        assert born == sorted(born) and set(map(id, ready)) <= set(map(id, rows))
        assert oldest not in rows or oldest in ready, "the oldest must get on"
        for row in ready:
            assert row.cached == len(row.ids) - 1
            tokens = row.done + min(budget_of(slots, row), wave)
            assert len(row.pages) >= pages_for(tokens, slots.config.page)
        if not ready:
            return
        ids = {id(row): list(row.ids) for row in ready}
        found = slots.sample(None, ready, [budget_of(slots, row) for row in ready], None, 1.0,
                             int(self.rng.integers(1, wave + 1)), 0.0)
        assert [row for row, _ in found] == ready
        for row, sampled in found:
            assert sampled.intact and len(sampled.ids) == len(sampled.logprobs) >= 1
            assert row.ids == ids[id(row)] + sampled.ids and row.cached == len(row.ids) - 1
            assert sampled.stopped == (sampled.ids[-1] in STOP)

    def play(self, moves):
        doings = [self.share, self.take, self.take, self.let_go, self.release, self.restart,
                  self.answer, self.wave, self.wave, self.wave, self.wave]
        for _ in range(moves):
            doings[self.rng.integers(len(doings))]()
            check_pages(self.slots, self.prompts)


@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from([SHAPE, TIGHT]))
def test_whatever_happens_no_page_is_lost_or_owned_twice(seed, config):
    game = Game(config, seed)
    game.play(60)
    while game.slots.rows:
        game.release()
    while game.open:
        game.let_go()
    check_pages(game.slots, game.prompts)
    assert game.slots.free(0) == config.slots
    assert len(game.slots._own[0]) == game.slots.plan.own
    assert len(game.slots._shared[0]) == game.slots.plan.shared
    assert game.slots.ran == sum(game.paper.calls)


def test_the_random_games_get_to_evictions():
    evicted = []
    for seed in range(4):
        game = Game(TIGHT, seed)
        for _ in range(6):
            game.take()
        game.play(40)
        evicted.append(game.slots.evicted)
    assert sum(evicted) > 4


def test_the_youngest_give_way_to_the_oldest_and_never_the_other_way():
    game = Game(TIGHT, 0)  # 20 pages of 3 tokens
    slots, wave = game.slots, TIGHT.wave
    old, middle, young = rows = [slots.take(0, game.words(14)) for _ in range(3)]
    assert slots.prepare(None, rows, [wave] * 3) == rows
    assert [len(row.pages) for row in rows] == [6, 6, 6] and slots.ran == 3 * 13
    young.ids += game.words(12)
    assert slots.prepare(None, [young], [wave]) == [] and slots.evicted == 0
    assert [len(row.pages) for row in (old, middle)] == [6, 6]
    middle.ids += game.words(40)  # more than all that the younger could give: they keep it
    assert slots.prepare(None, [middle], [wave]) == [] and slots.evicted == 0
    assert [len(row.pages) for row in rows] == [6, 6, 6]
    del middle.ids[14:]
    old.ids += game.words(9)
    assert slots.prepare(None, [young, old], [wave] * 2) == [old] and slots.evicted == 1
    assert not slots.room(0, 1)  # pages are free, but the youngest needs more to go on
    assert [len(row.pages) for row in rows] == [9, 6, 0] and young.done == 0
    middle.ids += game.words(20)  # all that is left is too little while the oldest is here
    assert slots.prepare(None, [middle], [wave]) == []
    slots.release(old)
    assert slots.prepare(None, [young, middle], [wave] * 2) == [middle]
    assert middle.cached == len(middle.ids) - 1
    slots.release(middle)
    assert slots.prepare(None, [young], [wave]) == [young] and young.cached == 25


@pytest.mark.parametrize("damage", ["own", "shared"])
def test_another_id_in_the_cache_is_told_of_the_rows_that_read_it(damage):
    game = Game(SHAPE, 0)
    ids = game.words(10)
    prompt = game.slots.share(ids, 0)
    rows = [game.slots.take(0, ids, prompt), game.slots.take(0, ids, prompt),
            game.slots.take(0, game.words(9))]
    game.slots.prepare(None, rows, [5] * 3)
    page = prompt.pages[1] if damage == "shared" else rows[2].pages[0]
    getattr(game.paper, damage)[page, 2] += 1
    found = game.slots.sample(None, rows, [5] * 3, None, 1.0, 5, 0.0)
    intact = [sampled.intact for _, sampled in found]
    assert intact == ([False, False, True] if damage == "shared" else [True, True, False])


# ---------------------------------------------------------------- memory


def test_pages_in_use_follow_the_tokens():
    slots, config = Slots(Decoder(MODEL), SHAPE, STOP), SHAPE
    Paper(slots, 0)
    ids = list(range(3, 14))
    prompt = slots.share(ids, 0)
    assert slots.plan.shared - len(slots._shared[0]) == pages_for(10, config.prompt_page) == 3
    rows = [slots.take(0, ids, prompt) for _ in range(3)] + [slots.take(0, ids)]
    slots.let_go(prompt)
    held = [0] * 4
    for turn in range(4):
        budgets = [budget_of(slots, row) for row in rows]
        need = [len(row.ids) - 1 - row.shared + min(n, config.wave)
                for row, n in zip(rows, budgets)]
        # What an earlier wave took and did not fill stays with its row.
        held = [max(old, pages_for(n, config.page)) for old, n in zip(held, need)]
        assert slots.prepare(None, rows, budgets) == rows
        # The prompt is run once for three rows, and once for the row that does not share it.
        assert slots.ran == 20 + 3 * turn
        slots.sample(None, rows, budgets, None, 1.0, config.wave, 0.0)
        assert [len(row.pages) for row in rows] == held
        assert slots.plan.own - len(slots._own[0]) == sum(held)
        rows[0].ids += [5] * 3
    for row in rows[1:]:
        slots.release(row)
    assert len(slots._shared[0]) == slots.plan.shared - 3
    slots.release(rows[0])
    assert len(slots._shared[0]) == slots.plan.shared


@pytest.mark.parametrize("dtype, itemsize", [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("kv_bytes", [None, PROMPT_BYTES + 17 * 3 * TOKEN + 5])
def test_the_plan_is_what_the_arrays_take(dtype, itemsize, kv_bytes):
    model = dataclasses.replace(MODEL, compute_dtype=dtype)
    config = dataclasses.replace(SHAPE, kv_bytes=kv_bytes)
    memory, programs = plan_memory(config, model), Slots(Decoder(model), config, STOP).programs
    programs.fit(memory.own)
    cache = programs._cache
    assert memory.token_bytes == TOKEN * itemsize // 4 and memory.shared == 3 * 4
    own, shared = (sum(x.nbytes for x in jax.tree.leaves((region.k, region.v)))
                   for region in (cache.own, cache.shared))
    assert shared == memory.shared * SHAPE.prompt_page * memory.token_bytes
    assert own == memory.own * SHAPE.page * memory.token_bytes
    if kv_bytes is None:
        assert memory.own == SHAPE.slots * 14
    elif itemsize == 4:
        assert memory.own == 17 and 0 <= kv_bytes - own - shared < SHAPE.page * TOKEN
    assert kv_bytes is None or own + shared <= kv_bytes


def test_too_little_memory_is_refused_with_the_figures():
    row = 14 * 3 * TOKEN
    least = PROMPT_BYTES + row
    with pytest.raises(ValueError) as error:
        plan_memory(dataclasses.replace(SHAPE, kv_bytes=least - 1), MODEL)
    text = str(error.value)
    assert "\n" not in text and "sampler.kv_bytes" in text and "max_len" in text
    figures = {int(n.replace(",", "")) for n in re.findall(r"[\d,]*\d", text)}
    assert {least - 1, PROMPT_BYTES, row, least, TOKEN, 3, 14, 40} <= figures
    assert plan_memory(dataclasses.replace(SHAPE, kv_bytes=least), MODEL).own == 14
    huge = dataclasses.replace(SHAPE, kv_bytes=10**9)
    assert plan_memory(huge, MODEL) == plan_memory(SHAPE, MODEL)


# ---------------------------------------------------------------- the real programs


PLAY = SamplerConfig(slots=8, max_len=96, prompt_len=40, max_new=12, sharers=4, prompts=2,
                     prefill=((2, 16),), extend=((4, 8),), page=8, prompt_page=8)
TASKS = [task for task in SUITE.split("train")[:30] if len(task.turns) > 1
         and len(make_prompt(task, SUITE, CHAT).ids) <= PLAY.prompt_len][:4]
PROMPTS = [make_prompt(task, SUITE, CHAT) for task in TASKS]
RULES = EngineConfig(max_steps=3, stop_on_failed_turn=False)
KEY, OTHER_KEY = jax.random.key(5), jax.random.key(6)


@pytest.fixture(scope="module")
def played():
    """What an engine with ample memory plays, by group size and format."""
    decoder, params = babbler()
    engine, found = Engine(decoder, PLAY, RULES, CHAT, SUITE), {}
    for name, chat in (("append", CHAT), ("rewrite", FORGETFUL)):
        engine.chat = chat
        prompts = [make_prompt(task, SUITE, chat) for task in TASKS]
        found[name], stats = engine.run(params, prompts, 4, KEY, 0.8)
        assert stats.evicted == 0
    return found


def same(groups, others):
    for mine, other in zip(sum(groups, []), sum(others, []), strict=True):
        assert mine.tokens_L.tolist() == other.tokens_L.tolist()
        assert mine.end is other.end and mine.rows == other.rows
        np.testing.assert_allclose(mine.logprobs_L, other.logprobs_L, atol=1e-4)


@pytest.mark.slow
def test_little_memory_gives_the_same_and_nothing_is_compiled_after_the_warm_up(played):
    """Room for the prompts and 15 pages, where 8 rows can take 12 each."""
    decoder, params = babbler()
    token = plan_memory(PLAY, decoder.config).token_bytes
    tight = dataclasses.replace(PLAY, kv_bytes=(2 * 5 + 15) * 8 * token, cache_sizes=(0.4,),
                                extend=((4, 8), (1, 32)))
    engine = Engine(decoder, tight, RULES, CHAT, SUITE)
    assert (engine.slots.plan.shared, engine.slots.plan.own) == (10, 15)
    declared = dict.fromkeys(["prefill_2x16", *(
        f"{name}_{own}" for name in ("extend_4x8", "extend_1x32", "wave_8") for own in (6, 15))], 1)
    declared |= {"resize_6_15": 2, "resize_15_6": 2}  # of K and V, here of one shape, and of ids
    with CompileCounter() as compiles:
        assert engine.warm_up(params) == len(declared)
        ready = compiles.counts()
        ours = {name: n for name, n in ready.items()
                if name.startswith(("prefill", "extend", "wave", "resize"))}
        assert ours == declared
        groups, stats = engine.run(params, PROMPTS, 4, KEY, 0.8)
        engine.chat = FORGETFUL
        again, more = engine.run(params, [make_prompt(task, SUITE, FORGETFUL) for task in TASKS],
                                 4, KEY, 0.8)
        engine.chat = CHAT
        engine.run(params, PROMPTS, 1, OTHER_KEY, 0.0)
        engine.run(params, PROMPTS[:1], 1, OTHER_KEY, 1.0)
        engine.run(params, PROMPTS[:3], 9, OTHER_KEY, 1.0)
        engine.run(params, [], 2, OTHER_KEY, 1.0)
        assert not compiles.since(ready)
    same(groups, played["append"])
    same(again, played["rewrite"])
    assert stats.evicted + more.evicted > 0
    assert sum(len(t.rows) for group in again for t in group) > 4 * len(TASKS)
    slots = engine.slots
    assert not slots.rows and slots.free(0) == PLAY.slots
    assert (len(slots._shared[0]), len(slots._own[0])) == (10, 15)


@pytest.mark.slow
def test_weights_bound_to_a_device_compile_nothing_later_either():
    """They bind the cache, whose programs would be others before and after."""
    decoder, params = babbler()
    params = jax.device_put(params, jax.devices()[0])
    engine = Engine(decoder, dataclasses.replace(PLAY, cache_sizes=(0.2,)), RULES, CHAT, SUITE)
    with CompileCounter() as compiles:
        engine.warm_up(params)
        ready = compiles.counts()
        for _ in range(2):
            engine.run(params, PROMPTS[:2], 2, KEY, 0.8)
        assert not compiles.since(ready)

