"""The engine against a plain reference: the same tokens, log-probs, endings and counts in every
situation a rollout can get into, however the work is spread."""

import collections
import dataclasses
import functools
import itertools
import random

import jax
import jax.numpy as jnp
import models_reference
import numpy as np
import pytest
import rollout_reference as reference
import rollout_world as world
from eight_devices import run_on_eight_devices
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_programs import kept_in
from rollout_world import SUITE, SmallFormat, make_task

from rods_jax.models.config import ModelConfig
from rods_jax.models.decoder import Decoder, init_params
from rods_jax.models.sharding import make_mesh, param_shardings
from rods_jax.rollout.engine import Engine, EngineConfig, make_prompt
from rods_jax.rollout.shapes import SamplerConfig
from rods_jax.text.compact import CompactFormat
from rods_jax.tools.host import HostConfig, make_host
from rods_jax.tools.suites import SuiteName, SuiteSpec
from rods_jax.types import Author, EndReason

KEY = jax.random.key(20)
APPEND, REWRITE = SmallFormat(), SmallFormat(rewrites=True)
STRICT = EngineConfig(max_steps=3)
PATIENT = EngineConfig(max_steps=3, stop_on_failed_turn=False)
LENIENT = EngineConfig(max_steps=2, malformed_ends_turn=True, score_cut_turn=True)


def shape(slots=8, max_len=160, prompt_len=128, max_new=8, **more) -> SamplerConfig:
    """The one place that knows what other sizes there are."""
    small = dict(sharers=8, prompts=2, prefill=((2, 32),), extend=((4, 16), (2, 64)), page=16,
                 prompt_page=32, steps=8, steps_waiting=4)
    return SamplerConfig(slots=slots, max_len=max_len, prompt_len=prompt_len, max_new=max_new,
                         **(small | more))


SHAPE = shape()
ONE_SLOT = shape(slots=1, sharers=1, prompts=1, extend=((1, 24),))
# Room for one prompt and one row of max_len, 256 bytes a token: younger rows start again.
TIGHT = shape(slots=16, sharers=2, prompts=1, extend=((3, 8),), page=4, prompt_page=64, steps=3,
              steps_waiting=1, straggler_share=0.5, kv_bytes=256 * (128 + 160))
# No size is a multiple of another.
ODD = shape(slots=3, max_len=45, prompt_len=23, max_new=7, sharers=2, prompts=3, page=7,
            prompt_page=5, prefill=((1, 9),), extend=((2, 11),), steps=5, cache_sizes=(0.5,))
LENGTHS = (1, 4, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128)


@pytest.fixture(scope="module", autouse=True)
def quick_programs(tmp_path_factory):
    """Engines that differ in what no program depends on are compiled once, and not for speed."""
    with kept_in(tmp_path_factory.mktemp("programs"), quick=True):
        yield


# ------------------------------------------------------------------------------ policies


def decoder_for(chat, unrolled=True):
    return Decoder(ModelConfig(chat.vocab_size, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2,
                               head_dim=8, d_ff=48, tie_embeddings=False,
                               scan_unroll=2 if unrolled else 1))


DECODER, STACKED = decoder_for(APPEND), decoder_for(APPEND, unrolled=False)


def weights(seed, likely, decoder=DECODER):
    """Random weights of a size at which every token matters to the next; every hidden state
    also points in a direction that the head reads as the `likely` tokens {id: logit}."""
    shapes = jax.eval_shape(lambda: init_params(decoder.config, jax.random.key(0)))
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name = path[-1].key
        if "norm" in name:
            return np.ones(leaf.shape, np.float32)
        deviation = {"embed": 1.0, "head": 0.4}.get(name, 0.25)
        x = rng.normal(0, deviation, leaf.shape).astype(np.float32)
        # Layers neither read nor write that direction.
        if name in ("q", "k", "v", "gate", "up"):
            x[:, 0] = 0.0
        elif name in ("o", "down"):
            x[..., 0] = 0.0
        return x
    params = jax.tree_util.tree_map_with_path(draw, shapes)
    params["embed"][:, 0] = 4.0
    params["head"][0] = 0.0
    for token, logit in likely.items():
        params["head"][0, token] = logit / 2.0
    return jax.tree.map(jnp.asarray, params)


TALKER = {world.END: 2.5, world.GO: 3.0, 5: 3.0, 6: 2.0, 7: 2.0, 8: 4.0, 9: 6.0}
READER = {world.END: -20.0, world.GO: 5.0, 5: 5.5}
ENDLESS = {world.END: -20.0, world.GO: -20.0}


# ------------------------------------------------------------------------------ comparing


@functools.cache
def engine(chat=APPEND, config=STRICT, sampler=SHAPE, decoder=DECODER):
    return Engine(decoder, sampler, config, chat, SUITE)


def prompts_of(tasks, chat=APPEND):
    return [make_prompt(task, SUITE, chat) for task in tasks]


def wanted(prompts, params, group, temperature, chat=APPEND, config=STRICT, sampler=SHAPE,
           decoder=DECODER, hints=False):
    """What the reference makes of them, [T][G]."""
    limits = reference.Limits(sampler.max_len, sampler.max_new, sampler.top_k, sampler.top_p)
    model = reference.Model(decoder, params)
    return [[reference.play(model, chat, lambda task: SUITE.make_env(task, hints), config, limits,
                            prompt, sample, KEY, temperature) for sample in range(group)]
            for prompt in prompts]


def flat(groups):
    return list(itertools.chain(*groups))


def assert_same(got, want):
    assert [len(group) for group in got] == [len(group) for group in want]
    for mine, other in zip(flat(got), flat(want)):
        who = f"sample {other.sample} of {other.task_uid}"
        assert mine.tokens_L.tolist() == other.tokens_L.tolist(), who
        assert mine.author_L.tolist() == other.author_L.tolist(), who
        np.testing.assert_allclose(mine.logprobs_L, other.logprobs_L, atol=1e-4, err_msg=who)
        for name in ("task_uid", "sample", "outcomes", "end", "n_turns", "n_steps",
                     "n_malformed", "rows"):
            assert getattr(mine, name) == getattr(other, name), (who, name)
        for name in ("tokens_L", "author_L", "logprobs_L"):
            assert getattr(mine, name).dtype == getattr(other, name).dtype, (who, name)


def both(tasks, params, group, temperature, chat=APPEND, config=STRICT, sampler=SHAPE,
         decoder=DECODER, hints=False):
    """Plays in both and compares; the trajectories in one list."""
    prompts = prompts_of(tasks, chat)
    got, stats = engine(chat, config, sampler, decoder).run(
        params, prompts, group, KEY, temperature, hints)
    want = wanted(prompts, params, group, temperature, chat, config, sampler, decoder, hints)
    assert_same(got, want)
    assert (stats.rollouts, stats.sampled_tokens) == (
        len(flat(want)), sum(int((t.author_L == Author.SAMPLED).sum()) for t in flat(want)))
    return flat(want)


def messages(t):
    """The sampled ids, message by message."""
    found = [[]]
    for token, author in zip(t.tokens_L.tolist(), t.author_L.tolist()):
        if author == Author.SAMPLED:
            found[-1].append(token)
        if (token in (world.END, world.GO) or author != Author.SAMPLED) and found[-1]:
            found.append([])
    return [message for message in found if message]


# ------------------------------------------------------------------------------ dialogues


MIXED = [make_task(f"mixed {i}", "hello there"[:i], 1 + i % 4, ("yes", "word " * (i + 1)),
                   (*world.SAFE, "boom")[:2 + (i % 3 == 0)], gold=world.ADD[:i % 2])
         for i in range(12)]
TALK = weights(0, TALKER)


@functools.cache
def mixed():
    """The reference's MIXED, 8 rollouts each."""
    return wanted(prompts_of(MIXED), TALK, 8, 1.0)


@pytest.mark.parametrize("chat, config, group, temperature, ends", [
    (APPEND, STRICT, 1, 0.0, ""),
    (APPEND, STRICT, 3, 1.4, "FAILED_TURN TOKEN_LIMIT"),
    (APPEND, PATIENT, 3, 0.3, "DONE STEP_LIMIT"),
    (APPEND, LENIENT, 3, 1.0, "DONE FAILED_TURN"),
    (REWRITE, PATIENT, 8, 1.0, "DONE STEP_LIMIT TOKEN_LIMIT ENV_ERROR"),
    (REWRITE, PATIENT, 3, 0.0, ""),
    (REWRITE, PATIENT, 1, 1.4, "")])
def test_dialogues(chat, config, group, temperature, ends):
    found = both(MIXED, TALK, group, temperature, chat, config)
    assert {EndReason[name] for name in ends.split()} <= {t.end for t in found}
    if config is PATIENT and group > 1 and temperature:
        assert {len(t.outcomes) for t in found} == {0, 1, 2, 3, 4}
        assert {len(t.rows) for t in found} == ({1, 2, 3, 4} if chat.rewrites else {1})


def test_dialogues_reach_every_ending_and_limit():
    got, stats = engine().run(TALK, prompts_of(MIXED), 8, KEY, 1.0)
    assert_same(got, mixed())
    found = flat(mixed())
    assert {t.end for t in found} == {
        EndReason.DONE, EndReason.FAILED_TURN, EndReason.STEP_LIMIT, EndReason.TOKEN_LIMIT,
        EndReason.ENV_ERROR}
    assert stats.ends == collections.Counter(t.end.value for t in found)
    full = [m for t in found for m in messages(t) if len(m) == SHAPE.max_new]
    assert {m[-1] in APPEND.stop_ids for m in full} == {True, False}
    assert any(t.n_malformed for t in found)
    # Stop tokens of other authors end nothing.
    assert any(np.isin(t.tokens_L[t.author_L == Author.INSERTED], APPEND.stop_ids).any()
               and t.n_steps > 1 for t in found)


def test_other_weights_and_hints_leave_nothing_behind():
    """Prompts that were played before, under other weights, between two plays of the first."""
    both(MIXED[:4], weights(1, TALKER), 3, 1.0)
    hinted = both(MIXED[:4], TALK, 3, 1.0, hints=True)
    plain = both(MIXED[:4], TALK, 3, 1.0)
    assert [t.tokens_L.tolist() for t in hinted] != [t.tokens_L.tolist() for t in plain]


def test_prompts_of_every_length():
    tasks = [make_task(f"long {n}", ("abcdefghijk" * 12)[n % 5:][:max(0, n - 3)]) for n in LENGTHS]
    found = both(tasks, TALK, 2, 1.0)
    assert [int((t.author_L == Author.PROMPT).sum()) for t in found[::2]] == list(LENGTHS)


def test_results_of_every_length():
    """Also longer than any chunk, and into the end of the row: what leaves room for no token
    is not inserted, what leaves room for one is."""
    sizes = (*(n - 3 for n in LENGTHS if 3 < n < 100), *range(140, 156))
    tasks = {f"reads {n}": make_task(f"reads {n}", "a", texts=(("lorem ipsum " * 14)[n % 5:][:n],))
             for n in sizes}
    found = both(tasks.values(), weights(3, READER), 3, 1.0)
    inserted, refused = set(), set()
    for t in found:
        inserted |= {len(list(run)) for author, run in itertools.groupby(t.author_L)
                     if author == Author.INSERTED}
        message = messages(t)[-1]
        if message[-1] == world.GO and t.end is EndReason.TOKEN_LIMIT:
            (text,) = tasks[t.task_uid].initial_config["texts"]
            refused.add(len(t.tokens_L) + len(text) * message.count(5) + 3)
    assert {4, 15, 16, 17, 63, 64, 65, 97} <= inserted and max(inserted) > 140
    assert SHAPE.max_len in refused
    assert any(len(t.tokens_L) == SHAPE.max_len and t.author_L[-2] == Author.INSERTED
               for t in found)


def test_text_of_stop_tokens_ends_nothing():
    """In a format of the product, in what users and tools say."""
    chat = CompactFormat(SUITE.tools(()), ("please", "1", "2", "ok"), n_slots=6)
    stops = [chat.vocabulary[i] for i in chat.stop_ids]
    tasks = [make_task(f"stops {i}", f"please {stops[i % 2]}", 2 + i % 2,
                       (" ".join(stops), "ok " + stops[0])) for i in range(4)]
    (go, end), read = chat.stop_ids, chat.vocabulary.index("read")
    likely = {go: 5.0, end: 3.5, read: 6.0}
    decoder, sampler = decoder_for(chat, unrolled=False), shape(top_k=9, extend=((4, 16),))
    found = both(tasks, weights(2, likely, decoder), 4, 1.0, chat, PATIENT, sampler, decoder)
    heard = 0  # results, behind which another message came
    for t in found:
        assert not np.isin(t.tokens_L[t.author_L != Author.SAMPLED], chat.stop_ids).any()
        sampled = t.author_L == Author.SAMPLED
        calls = np.flatnonzero(sampled[1:] & (t.tokens_L[:-1] == read) & (t.tokens_L[1:] == go))
        heard += any(sampled[at + 2:].any() for at in calls)
    assert heard >= 4


# ------------------------------------------------------------------------------ distributions


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 1.4])
def test_log_probs_equal_the_formulas_in_float64(temperature):
    params = weights(5, {})
    flat_weights = models_reference.from_params(params)
    for t in both(MIXED[:3], params, 2, temperature):
        logits = models_reference.logits(flat_weights, DECODER.config, t.tokens_L)
        logits = logits[:-1] / (temperature or 1.0)
        scores = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        at = np.flatnonzero(t.author_L == Author.SAMPLED)
        np.testing.assert_allclose(t.logprobs_L[at], scores[at - 1, t.tokens_L[at]], atol=1e-4)


@pytest.mark.parametrize("filters", [
    pytest.param({"top_p": 0.6, "wave_rows": (5,)}, marks=pytest.mark.slow),
    {"top_k": 5, "top_p": 0.8}])
def test_filtered_distributions(filters):
    sampler, once = dataclasses.replace(SHAPE, **filters), EngineConfig(max_steps=1)
    params = weights(5, {})
    for temperature in (0.0, 0.3, 1.0, 1.4):
        found = both(MIXED[:4], params, 3, temperature, config=once, sampler=sampler)
        plain = wanted(prompts_of(MIXED[:4]), params, 3, temperature, config=once)
        same = [a.tokens_L.tolist() == b.tokens_L.tolist() for a, b in zip(found, flat(plain))]
        assert all(same) == (temperature == 0)


def test_the_reference_filters_as_it_should():
    logits = np.log([0.1, 0.3, 0.05, 0.3, 0.25])
    assert np.flatnonzero(reference.kept(logits, 2, 1.0)).tolist() == [1, 3]
    assert np.flatnonzero(reference.kept(logits, 1, 1.0)).tolist() == [1]
    assert np.flatnonzero(reference.kept(logits, 0, 0.7)).tolist() == [1, 3, 4]
    assert np.flatnonzero(reference.kept(logits, 0, 0.5)).tolist() == [1, 3]
    assert np.flatnonzero(reference.kept(logits, 0, 0.01)).tolist() == [1]
    # Of 3 tokens the third crosses p, of what there was before any was left out.
    assert np.flatnonzero(reference.kept(logits, 3, 0.84)).tolist() == [1, 3, 4]
    assert reference.kept(logits, 0, 1.0).all()
    limits = reference.Limits(9, 9, top_p=0.85)
    token, logprob = reference.draw(np.log([0.6, 0.3, 0.1]), np.zeros(3), 1.0, limits)
    assert (token, round(logprob, 5)) == (0, -0.40547)


# ------------------------------------------------------------------------------ spread anyhow


@pytest.mark.parametrize("sampler", [ONE_SLOT, TIGHT], ids=["one slot", "tight"])
def test_tokens_do_not_depend_on_slots_pages_or_order(sampler):
    """Groups of 8 in one slot, and in pages for a few; the prompts in another order, one of them twice."""
    order = [*np.random.default_rng(0).permutation(len(MIXED)), 3]
    prompts = prompts_of(MIXED)
    got, stats = engine(sampler=sampler).run(TALK, [prompts[i] for i in order], 8, KEY, 1.0)
    assert_same(got, [mixed()[i] for i in order])
    assert (stats.evicted > 0) == (sampler is TIGHT)


EXITS = [make_task(f"exits {i}", "out", 3, tools=(*world.SAFE, "exit")) for i in range(3)]


@functools.cache
def with_exits():
    return wanted(prompts_of([*MIXED[:5], *EXITS]), TALK, 4, 1.0, config=PATIENT)


@pytest.mark.parametrize("count", [1, 4])
def test_tokens_do_not_depend_on_workers_even_if_they_crash(count):
    host = make_host(SUITE, SuiteSpec(SuiteName.CUSTOM, "rollout_world:make"),
                     HostConfig(count=count, call_s=60.0))
    try:
        got, stats = Engine(DECODER, SHAPE, PATIENT, APPEND, SUITE, host).run(
            TALK, prompts_of([*MIXED[:5], *EXITS]), 4, KEY, 1.0)
    finally:
        host.close()
    assert_same(got, with_exits())
    crashes = sum(t.end is EndReason.TOOL_CRASH for t in flat(got))
    assert 1 < crashes < 8 and stats.crashes == {"died": crashes}
    assert {EndReason.DONE, EndReason.STEP_LIMIT} < {t.end for t in flat(got)}


@pytest.mark.slow
def test_tokens_do_not_depend_on_devices():
    """In a process of its own, with eight devices: the device count is fixed when jax starts."""
    assert run_on_eight_devices(__file__).stdout.split() == list(MESHES)


# Sizes of the mesh, and slots a device: more than there are rollouts, and so few that they are
# filled again and again.
MESHES = {"rows": ((8, 1, 1), 16), "rows-and-weights": ((4, 1, 2), 2)}


def play_on_eight_devices():
    prompts = prompts_of(MIXED[:6])
    want = wanted(prompts, TALK, 4, 1.0)
    for name, (sizes, slots) in MESHES.items():
        mesh = make_mesh(*sizes)
        sampler = shape(slots=slots, sharers=3, extend=((2, 64),), straggler_share=0.4)
        playing = Engine(DECODER, sampler, STRICT, APPEND, SUITE, mesh=mesh)
        used, take = collections.Counter(), playing.slots.take
        playing.slots.take = lambda device, *args: used.update([device]) or take(device, *args)
        params = jax.device_put(TALK, param_shardings(TALK, mesh))
        got, _ = playing.run(params, prompts, 4, KEY, 1.0)
        assert_same(got, want)
        # No device is idle while others have the work.
        assert len(used) == mesh.shape["data"] and sum(used.values()) == 24
        assert slots == 2 or max(used.values()) - min(used.values()) <= 2, used
        print(name, flush=True)


# ------------------------------------------------------------------------------ keys


def test_every_rollout_has_a_key_of_its_own():
    """48 equal prompts under a policy without ends: 768 keys, 768 messages."""
    tasks = [make_task(f"same {i}", "the same") for i in range(48)]
    keys = {tuple(np.asarray(jax.random.key_data(functools.reduce(
        jax.random.fold_in, reference.rollout_numbers(task.uid, sample, row), KEY))).tolist())
        for task in tasks for sample in range(16) for row in range(2)}
    assert len(keys) == 2 * 768
    params = weights(0, ENDLESS)
    groups, _ = engine().run(params, prompts_of(tasks), 16, KEY, 1.4)
    assert {t.end for t in flat(groups)} == {EndReason.TOKEN_LIMIT}
    assert len({tuple(t.tokens_L.tolist()) for t in flat(groups)}) == 768
    some = prompts_of(tasks[47:])
    assert_same(groups[47:], wanted(some, params, 16, 1.4))
    again, _ = engine().run(params, some, 16, jax.random.key(21), 1.4)
    assert not ({tuple(t.tokens_L.tolist()) for t in flat(again)}
                & {tuple(t.tokens_L.tolist()) for t in flat(groups)})


def test_no_key_is_used_twice():
    with jax.debug_key_reuse(True):
        fresh = Engine(DECODER, ONE_SLOT, STRICT, APPEND, SUITE)
        got, _ = fresh.run(TALK, prompts_of(MIXED[:2]), 2, KEY, 1.0)
    assert_same(got, [group[:2] for group in mixed()[:2]])


# ------------------------------------------------------------------------------ at random


@given(seed=st.integers(0, 2 ** 31), group=st.integers(1, 4), hints=st.booleans(),
       temperature=st.sampled_from([0.0, 0.3, 1.0, 1.4]),
       how=st.sampled_from([(APPEND, STRICT, ODD, STACKED), (REWRITE, PATIENT, ODD, STACKED),
                            (REWRITE, PATIENT, TIGHT, DECODER)]))
@settings(max_examples=8)
def test_anything(seed, group, hints, temperature, how):
    rng, (chat, config, sampler, decoder) = random.Random(seed), how
    likely = {token: logit + rng.gauss(0, 1) for token, logit in TALKER.items()}
    tasks = []
    for i in range(3):
        texts = tuple("x" * rng.choice((1, 8, 40)) for _ in range(2))
        prompt = "by heart " * 20
        tasks.append(make_task(
            f"{seed} {i}", prompt[:rng.randint(0, sampler.prompt_len - 3)], rng.randint(1, 4),
            texts, rng.choice((world.SAFE, (*world.SAFE, "boom"))), world.ADD[:rng.randint(0, 2)]))
    both(tasks, weights(seed, likely), group, temperature, chat, config, sampler, decoder, hints)


if __name__ == "__main__":
    play_on_eight_devices()
