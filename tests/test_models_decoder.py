import collections
import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import models_reference as reference
import numpy as np
import pytest
from memory_cases import empty_pages, page_a_row, remember, written_to

from rods_jax.models import decoder as decoder_module
from rods_jax.models.attention import attend, causal_mask, segment_mask
from rods_jax.models.config import ModelConfig, Remat, llama3_rope_divisors
from rods_jax.models.decoder import (
    Decoder, count_params, forward, init_params, rope_tables, rotate, unrolled, unstacked)

# head_dim is set apart from d_model / n_heads (8).
TOY = ModelConfig(vocab_size=40, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=12,
                  d_ff=24)


def noisy_params(config, seed=0):
    """No parameter at 0 or 1, so that each one shows. Drawn by numpy: no compilation."""
    rng = np.random.default_rng(seed)

    def leaf(path, x):
        noise = 0.3 * rng.normal(size=x.shape).astype(np.float32)
        return noise + 1 if path[-1].key.endswith("norm") else noise

    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return jax.tree_util.tree_map_with_path(leaf, shapes)


def tokens(shape, seed=2, vocab=TOY.vocab_size):
    return np.random.default_rng(seed).integers(0, vocab, shape).astype(np.int32)


@functools.partial(jax.jit, static_argnums=0)
def full_pass(config, params, tokens_BxL, mask=None, positions=None):
    decoder, length = Decoder(config), tokens_BxL.shape[1]
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(length), tokens_BxL.shape)
    hidden, kv = decoder.apply({"params": params}, tokens_BxL, positions,
                               causal_mask(length) if mask is None else mask)
    return decoder.apply({"params": params}, hidden, method="logits"), kv


@functools.partial(jax.jit, static_argnums=0)
def gradient(config, params, ids, segments):
    """Of the mean log-probability of token 0 over the real tokens of packed rows."""
    TRACES[config] += 1

    def loss(params):
        logits, _ = full_pass(config, params, ids, segment_mask(segments))
        return (jax.nn.log_softmax(logits)[..., 0] * (segments > 0)).mean()
    return jax.grad(loss)(params)


TRACES = collections.Counter()
IDS = tokens((2, 5))
SEGMENTS = np.array([[1, 1, 2, 0, 0], [0] * 5])


# ---------------------------------------------------------------- against the reference


@pytest.mark.parametrize("change", [
    {},
    {"qkv_bias": True, "tie_embeddings": False, "n_kv_heads": 1, "rope_theta": 500.0},
    {"qk_norm": True, "n_kv_heads": 4, "norm_eps": 1e-2, "scan_unroll": 2},
    {"qkv_bias": True, "qk_norm": True, "tie_embeddings": False, "remat": Remat.LAYER,
     "rope_divisors": llama3_rope_divisors(12, 1e4, 8.0, 1.0, 4.0, 64)},
], ids=["plain", "bias_untied_mqa", "qk_norm_mha_unrolled", "all_remat_llama3"])
def test_logits_equal_the_float64_reference(change):
    config = dataclasses.replace(TOY, **change)
    params = noisy_params(config)
    ids = tokens((2, 9))
    got, _ = full_pass(config, params, ids)
    assert got.dtype == jnp.float32 and got.shape == (2, 9, config.vocab_size)
    for row, want in zip(np.asarray(got), ids):
        want = reference.logits(reference.from_params(params), config, want)
        np.testing.assert_allclose(row, want, atol=2e-5 * np.abs(want).max())


def test_long_positions_turn_by_the_right_angle():
    config = dataclasses.replace(TOY, head_dim=64, rope_theta=1e5)
    x = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    at = np.array([0, 777, 8191])
    got = rotate(x[None, :, None], *rope_tables(at[None], config))[0, :, 0]
    np.testing.assert_allclose(
        got, reference.turned(x.astype(np.float64), at, 1e5, 1.0, False), atol=3e-3)


# ---------------------------------------------------------------- memories


@functools.partial(jax.jit, static_argnums=0)
def in_pieces(config, params, ids_BxL):
    """Prefill of 4 tokens, an extend of 4, then single tokens; logits, and the K/V of all
    but the first 4 tokens. With unrolled layers each has arrays of its own."""
    decoder, (rows, length) = Decoder(config), ids_BxL.shape
    layered = unstacked(config, params)

    def run(start, stop, *memories):
        positions = jnp.broadcast_to(jnp.arange(start, stop), (rows, stop - start))
        return forward(decoder, layered, ids_BxL[:, start:stop], positions,
                       causal_mask(stop - start), memories)

    first, kv = run(0, 4)
    cache = page_a_row(remember(empty_pages(config, rows, 6), kv, [0] * rows), [4] * rows)
    second, kv = run(4, 8, cache)
    near = remember(empty_pages(config, rows, length - 4), kv, [0] * rows)
    hidden = [first, second]
    for i in range(8, length):
        one, near = run(i, i + 1, cache, written_to(near, i - 4))
        hidden.append(one)
    hidden = jnp.concatenate(hidden, 1)
    return decoder.apply({"params": params}, hidden, method="logits"), near


@pytest.mark.parametrize("unroll", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_prefill_extend_and_decode_equal_one_pass(unroll):
    config = dataclasses.replace(TOY, qkv_bias=True, qk_norm=True, scan_unroll=unroll)
    params, ids = noisy_params(config), tokens((3, 10))
    want, (want_k, want_v) = full_pass(config, params, ids)
    got, (k, v) = in_pieces(config, params, ids)
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())
    assert isinstance(k, tuple) == isinstance(v, tuple) == (unroll == config.n_layers)
    np.testing.assert_allclose(np.stack(k).swapaxes(-1, -2), want_k[:, :, :, 4:], atol=2e-5)
    np.testing.assert_allclose(np.stack(v), want_v[:, :, :, 4:], atol=2e-5)


def test_a_chunk_is_written_into_its_rows():
    """Several tokens at once in Rows: each sees what is before it and is kept."""
    params, decoder, ids = noisy_params(TOY), Decoder(TOY), tokens((2, 9))
    want, (want_k, want_v) = full_pass(TOY, params, ids)

    @jax.jit
    def run():
        near, hidden = empty_pages(TOY, 2, 9), []
        for start, stop in ((0, 4), (4, 9)):
            positions = jnp.broadcast_to(jnp.arange(start, stop), (2, stop - start))
            one, near = decoder.apply({"params": params}, ids[:, start:stop], positions, None,
                                      (written_to(near, start),))
            hidden.append(one)
        return decoder.apply({"params": params}, jnp.concatenate(hidden, 1), method="logits"), near

    got, (k, v) = run()
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())
    np.testing.assert_allclose(k.swapaxes(-1, -2), want_k, atol=2e-5)
    np.testing.assert_allclose(v, want_v, atol=2e-5)


@pytest.mark.parametrize("rows", [1, decoder_module._FEW, decoder_module._FEW + 1])
@pytest.mark.parametrize("n_in", [1, 2])
def test_turned_weights_give_the_same_product(rows, n_in):
    """From the left for a few rows, from the right for many: values and gradients."""
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, 1, *(6, 5)[:n_in])).astype(np.float32)
    kernel = rng.normal(size=(*(6, 5)[:n_in], 3, 4)).astype(np.float32)
    turned = np.moveaxis(kernel, range(n_in), range(-n_in, 0))

    def plain(x, kernel):
        return jnp.tensordot(x, kernel, n_in)

    def ours(x, turned):
        return decoder_module._project_turned(x, turned, n_in)
    want, got = plain(x, kernel), jax.jit(ours)(x, turned)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    weights = rng.normal(size=want.shape).astype(np.float32)
    want_x, want_k = jax.grad(lambda *a: (weights * plain(*a)).sum(), (0, 1))(x, kernel)
    got_x, got_k = jax.jit(jax.grad(lambda *a: (weights * ours(*a)).sum(), (0, 1)))(x, turned)
    np.testing.assert_allclose(got_x, want_x, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.moveaxis(got_k, range(-n_in, 0), range(n_in)), want_k,
                               rtol=1e-5, atol=1e-5)


def test_unstacked_layers_are_those_of_the_stack():
    params = noisy_params(TOY)
    assert not unrolled(TOY)
    jax.tree.map(np.testing.assert_array_equal, unstacked(TOY, params), params)
    config = dataclasses.replace(TOY, scan_unroll=3)
    apart = unstacked(config, params)
    assert unrolled(config) and isinstance(apart["layers"], tuple)
    back = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1}  # inputs, now last
    together = {
        name: np.moveaxis(np.stack([layer[name] for layer in apart["layers"]]),
                          range(-n, 0), range(1, 1 + n))
        for name in params["layers"] for n in [back.get(name, 0)]}
    jax.tree.map(np.testing.assert_array_equal, apart | {"layers": together}, params)
    ids, at = tokens((2, 5)), np.arange(5)[None]
    got, want = (jax.jit(lambda p: forward(Decoder(config), p, ids, at, causal_mask(5)))(p)
                 for p in (apart, params))
    np.testing.assert_allclose(got[0], want[0], atol=1e-5)
    for mine, stacked in zip(got[1], want[1]):
        assert isinstance(mine, tuple)
        np.testing.assert_allclose(np.stack(mine), stacked, atol=1e-5)


def test_memories_are_valid_row_by_row():
    params, decoder = noisy_params(TOY), Decoder(TOY)
    ids, length = tokens((2, 9)), np.array([5, 3], np.int32)
    _, (k, v) = full_pass(TOY, params, ids)
    pages = remember(empty_pages(TOY, 2, 5), (k[:, :, :, :5], v[:, :, :, :5]), [0, 0])

    @jax.jit
    def step(pages):
        hidden, _ = decoder.apply({"params": params}, ids[:, 8:], length[:, None],
                                  causal_mask(1), (page_a_row(pages, length),))
        return decoder.apply({"params": params}, hidden[:, 0], method="logits")

    got = step(pages)
    for b, n in enumerate(length):
        row = np.concatenate([ids[b, :n], ids[b, 8:]])
        want = reference.logits(reference.from_params(params), TOY, row)[-1]
        np.testing.assert_allclose(got[b], want, atol=2e-5 * np.abs(want).max())


# ---------------------------------------------------------------- packing and masks


def test_packed_rows_equal_separate_sequences():
    params = noisy_params(TOY)
    parts = [tokens((n,), seed=n) for n in (4, 3, 2)]
    row = np.concatenate([*parts, np.zeros(3, np.int32)])[None]
    segments = np.array([[1] * 4 + [2] * 3 + [3] * 2 + [0] * 3])
    positions = np.array([[*range(4), *range(3), *range(2), 0, 0, 0]])
    got, _ = full_pass(TOY, params, row, segment_mask(segments), positions)
    weights = reference.from_params(params)
    want = np.concatenate([reference.logits(weights, TOY, part) for part in parts])
    np.testing.assert_allclose(got[0, :9], want, atol=2e-5 * np.abs(want).max())


@hypothesis.given(st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_segment_mask_by_its_definition(segments):
    got = np.asarray(segment_mask(np.array([segments])))[0]
    for i, a in enumerate(segments):
        for j, b in enumerate(segments):
            assert got[i, j] == ((j <= i and a == b) if a else i == j)


def test_tokens_do_not_see_the_future():
    params, ids = noisy_params(TOY), tokens((2, 9))
    other = ids.copy()
    other[:, 6:] = (other[:, 6:] + 1) % TOY.vocab_size
    a, b = (np.asarray(full_pass(TOY, params, x)[0]) for x in (ids, other))
    np.testing.assert_array_equal(a[:, :6], b[:, :6])
    assert np.abs(a[:, 6:] - b[:, 6:]).max() > 1e-3


# ---------------------------------------------------------------- attention alone


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_attend_is_one_softmax_over_the_keys_of_the_mask():
    rng = np.random.default_rng(0)
    b, c, heads, kv, hd = 2, 5, 4, 2, 6
    q, k, v = draw(1, b, c, heads, hd), draw(2, b, kv, c, hd), draw(3, b, kv, c, hd)
    mask = (rng.random((b, c, c)) < 0.6) | np.eye(c, dtype=bool)
    got = np.asarray(jax.jit(attend)(q, k, v, mask))
    for row in range(b):
        for h in range(heads):
            want = reference.attention(*(x.astype(np.float64) for x in (
                q[row, :, h], k[row, h // 2], v[row, h // 2])), mask[row])
            np.testing.assert_allclose(got[row, :, h], want, atol=2e-6)


@pytest.mark.parametrize("size", [1e2, 1e8])
def test_a_large_masked_score_changes_nothing(size):
    """Value and gradients are those of attention without the masked key."""
    q, k, v = draw(1, 1, 2, 1, 4), draw(2, 1, 1, 3, 4), draw(3, 1, 1, 3, 4)
    k[0, 0, 2] = size * np.sign(q[0, 0, 0])
    v[0, 0, 2] = size
    mask = np.array([[[True, True, False]]])

    @jax.jit
    def loss(q, k, v, mask):
        return (attend(q, k, v, mask) ** 2).sum()

    with_key = jax.value_and_grad(loss, (0, 1, 2))(q, k, v, mask)
    without = jax.value_and_grad(loss, (0, 1, 2))(q, k[:, :, :2], v[:, :, :2], mask[:, :, :2])
    np.testing.assert_allclose(with_key[0], without[0], rtol=1e-6)
    np.testing.assert_allclose(with_key[1][0], without[1][0], rtol=1e-5, atol=1e-7)
    for full, part in zip(with_key[1][1:], without[1][1:]):
        np.testing.assert_allclose(full[:, :, :2], part, rtol=1e-5, atol=1e-7)
        np.testing.assert_array_equal(full[:, :, 2], 0)


def test_queries_with_nothing_to_see_stay_finite():
    q, k, v = draw(1, 1, 2, 1, 4), 1e4 * draw(2, 1, 1, 3, 4), draw(3, 1, 1, 3, 4)
    nothing = np.zeros((1, 1, 3), bool)
    value, grads = jax.jit(jax.value_and_grad(
        lambda *x: attend(*x, nothing).sum(), (0, 1, 2)))(q, k, v)
    np.testing.assert_allclose(value, 2 * v.mean(2).sum(), rtol=1e-5)
    assert all(np.isfinite(g).all() for g in grads)
    np.testing.assert_array_equal(grads[0], 0)


def test_gradients_through_padded_rows_are_finite():
    grads = gradient(TOY, noisy_params(TOY), IDS, SEGMENTS)
    assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


# ---------------------------------------------------------------- parameters, dtypes, traces


def test_parameter_shapes_follow_the_stated_head_dim():
    """head_dim 32 beside d_model 64 and 4 heads, where the division gives 16."""
    config = ModelConfig(50, 64, 2, 4, 2, 32, 48, qkv_bias=True, qk_norm=True,
                         tie_embeddings=False)
    params = jax.eval_shape(lambda k: init_params(config, k), jax.random.key(0))
    shapes = jax.tree.map(lambda x: x.shape, params)
    assert shapes == {
        "embed": (50, 64), "final_norm": (64,), "head": (64, 50), "layers": {
            "attn_norm": (2, 64), "mlp_norm": (2, 64), "q": (2, 64, 4, 32),
            "k": (2, 64, 2, 32), "v": (2, 64, 2, 32), "o": (2, 4, 32, 64),
            "q_bias": (2, 4, 32), "k_bias": (2, 2, 32), "v_bias": (2, 2, 32),
            "q_norm": (2, 32), "k_norm": (2, 32),
            "gate": (2, 64, 48), "up": (2, 64, 48), "down": (2, 48, 64)}}
    leaves = jax.tree.leaves(params)
    assert all(x.dtype == jnp.float32 and not x.weak_type for x in leaves)
    assert count_params(params) == sum(int(np.prod(x.shape)) for x in leaves)


def test_a_tied_head_is_the_embedding():
    params = noisy_params(TOY)
    assert set(params) == {"embed", "final_norm", "layers"}
    untied = dataclasses.replace(TOY, tie_embeddings=False)
    both = {**params, "head": params["embed"].T}
    tied, apart = (gradient(c, p, IDS, SEGMENTS) for c, p in ((TOY, params), (untied, both)))
    np.testing.assert_allclose(tied["embed"], apart["embed"] + apart["head"].T,
                               rtol=1e-4, atol=1e-6)


def test_layers_start_different_and_keys_matter():
    a, b = (jax.tree.map(np.asarray, init_params(TOY, jax.random.key(i))) for i in (0, 1))
    assert np.abs(a["layers"]["q"][0] - a["layers"]["q"][1]).max() > 0.01
    assert np.abs(a["layers"]["q"] - b["layers"]["q"]).max() > 0.01
    np.testing.assert_allclose(np.std(a["layers"]["q"]), TOY.d_model ** -0.5, rtol=0.1)


def test_remat_and_unrolling_change_no_gradient():
    params = noisy_params(TOY)
    other = dataclasses.replace(TOY, remat=Remat.LAYER, scan_unroll=2)
    plain, same = (gradient(c, params, IDS, SEGMENTS) for c in (TOY, other))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
                 plain, same)


def test_bfloat16_computes_near_float32_and_keeps_float32_masters():
    config = dataclasses.replace(TOY, compute_dtype="bfloat16")
    params, ids = noisy_params(config), tokens((2, 9))
    got, (k, v) = full_pass(config, params, ids)
    assert {k.dtype, v.dtype} == {jnp.dtype("bfloat16")}
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
    want, _ = full_pass(TOY, params, ids)
    assert got.dtype == jnp.float32
    assert 0 < np.sqrt(np.mean((got - want) ** 2)) < 0.03 * np.std(want)


def test_one_trace_serves_updates_and_decode_steps():
    decoder = Decoder(TOY)
    decode_traces = []

    @jax.jit
    def descend(params, grads):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    @jax.jit
    def decode(params, ids, at, near):
        decode_traces.append(1)
        hidden, near = decoder.apply({"params": params}, ids, jnp.full((2, 1), at), None,
                                     (written_to(near, at),))
        return hidden, at + 1, near

    params = init_params(TOY, jax.random.key(0))
    near, at = empty_pages(TOY, 2, 4), jnp.int32(0)
    for i in range(3):
        params = descend(params, gradient(TOY, params, tokens(IDS.shape, seed=i), SEGMENTS))
        _, at, near = decode(params, tokens((2, 1), seed=i), at, near)
    assert TRACES[TOY] == len(decode_traces) == 1
    written = np.abs(near[0]).sum((0, 2, 3)) > 0
    np.testing.assert_array_equal(written, [[True, True, True, False]] * 2)
