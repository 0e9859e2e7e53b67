"""Prefill and waves against a plain reference that keeps no cache: after every token the
whole dialogue goes through the model again."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rods_jax.models.config import ModelConfig
from rods_jax.models.attention import causal_mask
from rods_jax.models.decoder import Decoder, init_params
from rods_jax.rollout.sampler import SamplerConfig, init_slots, make_prefill, make_wave

MODEL = ModelConfig(vocab_size=23, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=6,
                    d_ff=32)
SHAPE = SamplerConfig(slots=6, max_len=48, prompt_len=9, chunk=5, max_new=7, prefill_groups=2,
                      cache_buckets=(16,))
STOP = (1, 2)


@pytest.fixture(scope="module")
def model():
    params = init_params(MODEL, jax.random.key(3))
    # A louder head than at initialization: greedy choices are then far from ties.
    return Decoder(MODEL), jax.tree.map(lambda x: x, params) | {"embed": params["embed"] * 20}


@pytest.fixture(scope="module")
def forward(model):
    decoder, params = model
    length = SHAPE.max_len + SHAPE.max_new

    @jax.jit
    def choose(tokens_L, n, key, temperature):
        hidden, _ = decoder.apply({"params": params}, tokens_L[None], jnp.arange(length)[None],
                                  causal_mask(length))
        logits = decoder.apply({"params": params}, hidden[0, n - 1], method="logits")
        logits = logits / jnp.where(temperature > 0, temperature, 1.0)
        noise = jax.random.gumbel(jax.random.fold_in(key, n), logits.shape)
        token = jnp.argmax(jnp.where(temperature > 0, logits + noise, logits))
        return token, jax.nn.log_softmax(logits)[token]

    def next_token(tokens, key, temperature):
        padded = np.zeros((length,), np.int32)
        padded[:len(tokens)] = tokens
        token, logprob = choose(padded, len(tokens), key, temperature)
        return int(token), float(logprob)

    return next_token


def reference_message(forward, tokens, budget, key, temperature):
    tokens, out, logprobs = list(tokens), [], []
    while len(out) < budget:
        token, logprob = forward(tokens, key, temperature)
        tokens.append(token)
        out.append(token)
        logprobs.append(logprob)
        if token in STOP:
            break
    return out, logprobs


@pytest.fixture(scope="module", params=[0.0, 0.34])
def programs(model, request):
    decoder, _ = model
    shape = dataclasses.replace(SHAPE, straggler_share=request.param)
    prefill = jax.jit(make_prefill(decoder, shape))
    return shape, prefill, {b: jax.jit(make_wave(decoder, shape, STOP, b)) for b in shape.buckets}


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_dialogues_equal_the_cache_free_reference(model, forward, programs, temperature):
    decoder, params = model
    shape, prefill, waves = programs
    rng, key = np.random.default_rng(0), jax.random.key(11)

    prompts = [list(rng.integers(3, 23, n)) for n in (9, 4)]
    tokens_TxP = np.zeros((2, 9), np.int32)
    for t, prompt in enumerate(prompts):
        tokens_TxP[t, :len(prompt)] = prompt
    group_B = np.array([0, 1, 0, -1, 1, 1], np.int32)
    who_Bx2 = np.array([[7 + g, b] for b, g in enumerate(group_B)], np.uint32)
    slots = prefill(params, init_slots(decoder, shape), tokens_TxP,
                    np.array([9, 4], np.int32), group_B)

    used = [b for b in range(6) if group_B[b] >= 0]
    dialogue = {b: list(prompts[group_B[b]]) for b in used}
    pending = {b: [] for b in used}
    message = {b: [] for b in used}
    finished = 0
    for _ in range(12):
        chunk_BxC, n_B = np.zeros((6, 5), np.int32), np.zeros((6,), np.int32)
        sample_B, budget_B = np.zeros((6,), bool), np.zeros((6,), np.int32)
        for b in used:
            take, pending[b] = pending[b][:5], pending[b][5:]
            chunk_BxC[b, :len(take)], n_B[b] = take, len(take)
            sample_B[b] = not pending[b]
            budget_B[b] = 7 - len(message[b])
        longest = max(len(dialogue[b]) for b in used)
        if longest + 20 > shape.max_len:
            break
        bucket = next(b for b in shape.buckets if b >= longest)
        slots, out = waves[bucket](params, slots, chunk_BxC, n_B, sample_B, budget_B, key, who_Bx2,
                                   np.float32(temperature))
        out = jax.device_get(out)
        for b in used:
            n = int(out.count_B[b])
            if not sample_B[b]:
                assert n == 0
                continue
            rollout_key = jax.random.fold_in(jax.random.fold_in(key, who_Bx2[b, 0]), who_Bx2[b, 1])
            want, want_logprobs = reference_message(
                forward, dialogue[b], n, rollout_key, temperature)
            assert out.tokens_BxM[b, :n].tolist() == want
            np.testing.assert_allclose(out.logprobs_BxM[b, :n], want_logprobs, atol=1e-4)
            dialogue[b] += want
            message[b] += want
            assert out.stopped_B[b] == (want[-1] in STOP)
            assert out.length_B[b] == len(dialogue[b]) - 1
            pending[b] = [want[-1]]
            if out.stopped_B[b] or len(message[b]) == 7:
                finished += 1
                message[b] = []
                result = list(rng.integers(3, 23, rng.integers(1, 9)))
                dialogue[b] += result
                pending[b] += result
        for b in used:  # a slot that still waits for its chunk has not sampled
            assert len(dialogue[b]) - len(pending[b]) <= shape.max_len
    assert finished >= 8


def test_an_unused_slot_stays_untouched(model):
    decoder, params = model
    wave = jax.jit(make_wave(decoder, SHAPE, STOP, SHAPE.max_len))
    slots = init_slots(decoder, SHAPE)
    none = np.zeros((6,), np.int32)
    after, out = wave(params, slots, np.zeros((6, 5), np.int32), none, none.astype(bool), none,
                      jax.random.key(0), np.zeros((6, 2), np.uint32), np.float32(1))
    assert not out.count_B.any() and not out.stopped_B.any()
    np.testing.assert_array_equal(after.length_B, slots.length_B)


def test_shapes_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="max_len 16"):
        SamplerConfig(max_len=16, prompt_len=12, max_new=8)
    with pytest.raises(ValueError, match="straggler_share"):
        SamplerConfig(straggler_share=1.0)
