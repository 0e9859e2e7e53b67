"""Free text from the engine's slots against one row, one token at a time, without a cache."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from kept_programs import kept_in
from policy_cases import small_model, small_tokenizer
from rollout_reference import Limits, Model, Transcript, say

from rods_jax.metrics import CompileCounter
from rods_jax.models.decoder import Decoder, init_params
from rods_jax.rollout.engine import Engine, EngineConfig
from rods_jax.rollout.shapes import SamplerConfig, plan_memory
from rods_jax.rollout.writing import Writing, WritingConfig
from rods_jax.text.free import Asked, Refused, TooLong
from rods_jax.text.hermes import HermesFormat, Schemas
from rods_jax.tools.toolbox import ToolboxSuite

CHAT = HermesFormat(small_tokenizer(["write what is asked"], pieces=270), Schemas.SIGNATURES)
MODEL = small_model(CHAT.tokenizer, d_model=16, n_layers=2, n_heads=2, head_dim=8, d_ff=16)
MAX_NEW = 20
SHAPE = SamplerConfig(slots=3, max_len=128, prompt_len=32, max_new=8, sharers=2, prompts=1,
                      prefill=((1, 16),), extend=((2, 16),), steps=6)
PLAN = plan_memory(SHAPE, MODEL)
# K/V for one row of max_len, so that texts wait for each other.
SHAPE = dataclasses.replace(SHAPE, kv_bytes=PLAN.token_bytes * (
    PLAN.shared * SHAPE.prompt_page + SHAPE.row_pages * SHAPE.page))
ASKED = [Asked(({"role": "system", "content": "Write."}, {"role": "user", "content": "x" * n}))
         for n in (1, 30, 7, 7, 60, 45, 12)]
KEY = jax.random.key(3)


def of(text):
    return Asked(({"role": "user", "content": text},))


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory):
    with kept_in(tmp_path_factory.mktemp("programs"), quick=True):
        yield


@pytest.fixture(scope="module")
def params():
    """That now and then end a message, which takes them a while."""
    params = init_params(MODEL, jax.random.key(1))
    head_DxV = 0.5 * jax.random.normal(jax.random.key(2), params["head"].shape)
    return params | {"head": head_DxV.at[:, CHAT.stop_ids[0]].multiply(2.0),
                     "embed": jnp.asarray(params["embed"]) * 3}


def writing(temperature=0.0, **shape):
    engine = Engine(Decoder(MODEL), dataclasses.replace(SHAPE, **shape), EngineConfig(), CHAT,
                    ToolboxSuite())
    return Writing(engine, CHAT, WritingConfig(MAX_NEW, temperature))


LOOPS = {}  # the same for all tests


def plain(params, asked, temperature, nth=0):
    """Ids of the answer, one forward pass over the whole row for each."""
    which = str(asked), temperature, nth if temperature else 0
    if which not in LOOPS:
        LOOPS[which] = looped(params, asked, temperature, nth)
    return LOOPS[which]


def looped(params, asked, temperature, nth):
    script = Transcript(CHAT.plain(asked))
    return say(Model(Decoder(MODEL), params), script, Limits(SHAPE.max_len, MAX_NEW),
               CHAT.stop_ids, str(asked), nth, KEY, temperature)


def assert_written(texts, params, temperature, nths):
    stopped = []
    for text, asked, nth in zip(texts, ASKED, nths, strict=True):
        ids = plain(params, asked, temperature, nth)
        stopped.append(ids[-1] in CHAT.stop_ids)
        assert text.text == CHAT.tokenizer.decode(ids[:-1] if stopped[-1] else ids)
        assert text.whole is stopped[-1] and text.tokens == len(ids)
        assert text.prompt_tokens == len(CHAT.plain(asked))
    assert any(stopped) and not all(stopped)


def assert_nothing_left(writer):
    slots = writer.engine.slots
    assert slots.rows == [] and slots.free(0) == SHAPE.slots
    assert len(slots._own[0]) == slots.plan.own


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_those_of_a_plain_loop(params, temperature):
    writer = writing(temperature)
    texts = writer.write(params, ASKED, KEY)
    # The fourth is asked for a second time: at a temperature it is another draw.
    assert_written(texts, params, temperature, [0, 0, 0, 1, 0, 0, 0])
    assert (texts[2] == texts[3]) is (temperature == 0)
    assert temperature or writer.engine.slots.evicted
    assert_nothing_left(writer)
    assert writer.write(params, ASKED[:1], KEY)[0].text == CHAT.tokenizer.decode(
        i for i in plain(params, ASKED[0], temperature, 1) if i not in CHAT.stop_ids)


def test_it_takes_no_program_that_the_rollouts_do_not_have(params):
    writer = writing()
    writer.engine.warm_up(params)
    with CompileCounter() as compiles:
        assert all(text.tokens for text in writer.write(params, ASKED, KEY))
        assert compiles.total == 0


def test_what_has_no_room_or_no_place_is_refused_and_the_rest_is_written(params):
    writer = writing()
    room = SHAPE.max_len - MAX_NEW
    most = room - len(CHAT.plain(of("")))  # each y is a token
    fits, long = of("y" * most), of("y" * 500)
    whole, one_more, written = writer.write(params, [fits, of("y" * (most + 1)), ASKED[0]], KEY)
    assert whole.prompt_tokens == room and one_more == TooLong(room + 1, room)
    assert written.text
    assert writer.write(params, [long], KEY) == [TooLong(len(CHAT.plain(long)), room)]

    class Strict:
        tokenizer, vocab_size, stop_ids = CHAT.tokenizer, CHAT.vocab_size, CHAT.stop_ids

        def plain(self, asked):
            if asked.messages[0]["role"] == "system":
                raise ValueError("chat_template line 3: no system messages")
            return CHAT.plain(asked)

    writer.chat = Strict()
    refused, text = writer.write(params, [ASKED[0], fits], KEY)
    assert refused == Refused("chat_template line 3: no system messages") and text.text
    assert_nothing_left(writer)


def test_an_error_leaves_no_slot_taken(params, monkeypatch):
    writer = writing()
    monkeypatch.setattr(writer.engine.slots, "sample", lambda *args: json.loads("no"))
    with pytest.raises(ValueError, match="Expecting"):
        writer.write(params, ASKED, KEY)
    assert_nothing_left(writer)


def test_a_text_whose_cache_drifted_says_nothing(params, monkeypatch):
    writer = writing()
    sample = writer.engine.slots.sample
    monkeypatch.setattr(writer.engine.slots, "sample", lambda *args: [
        (row, dataclasses.replace(sampled, intact=False)) for row, sampled in sample(*args)])
    assert [text.text for text in writer.write(params, ASKED[:2], KEY)] == ["", ""]


@pytest.mark.parametrize("change, words", [
    ({"max_new": 0}, "max_new is 0: give 1"), ({"at_once": 0}, "at_once is 0: give 1"),
    ({"temperature": 3.0}, "temperature is 3.0: give 0 to 2")])
def test_wrong_settings_are_named(change, words):
    with pytest.raises(ValueError, match=words):
        WritingConfig(**change)


def test_rows_that_hold_no_text_are_named_at_once():
    with pytest.raises(ValueError, match="max_new 20 leaves nothing of sampler.max_len 20 .*raise"):
        writing(max_len=20, prompt_len=8)
