"""Chunked log-probs against the plain full-logits formula, values and gradients."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rods_jax.grpo.logprobs import permute_columns, predicted_mask, token_logprobs


def plain(w, hidden, tokens, temperature):
    """Log-prob of token i from position i - 1, entropy there, with all logits at once."""
    logp = jax.nn.log_softmax((hidden @ w) / temperature)
    entropy = -(jnp.exp(logp) * logp).sum(-1)
    score = jnp.take_along_axis(logp[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    pad = ((0, 0), (1, 0))
    return jnp.pad(score, pad), jnp.pad(entropy[:, :-1], pad)


def inputs(rows, length, width, vocab, seed=0, share=0.4):
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, length)) < share
    mask[:, 0] = False
    return (jnp.asarray(rng.standard_normal((width, vocab)), jnp.float32),
            jnp.asarray(rng.standard_normal((rows, length, width)), jnp.float32),
            jnp.asarray(rng.integers(0, vocab, (rows, length)), jnp.int32), jnp.asarray(mask))


@pytest.mark.parametrize("length,chunk,share", [(12, 5, 0.4), (7, 100, 1.0)])
def test_chunked_equals_plain(length, chunk, share):
    w, hidden, tokens, mask = inputs(3, length, 6, 11, share=share)

    def total(f):
        def g(w, hidden):
            logp, entropy = f(w, hidden)
            scale = jnp.arange(1.0, length + 1)
            return (jnp.where(mask, logp + 0.3 * entropy, 0) * scale).sum()
        return jax.jit(jax.value_and_grad(g, argnums=(0, 1)))(w, hidden)
    got = total(lambda w, h: token_logprobs(lambda x: x @ w, h, tokens, mask, 0.7, chunk))
    want = total(lambda w, h: plain(w, h, tokens, 0.7))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-5), got, want)


def test_no_full_logits_in_the_compiled_text():
    w, hidden, tokens, mask = inputs(2, 64, 8, 512)

    def text(f):
        g = jax.grad(lambda w, h: jnp.where(mask, f(w, h)[0], 0).sum(), argnums=(0, 1))
        return jax.jit(g).lower(w, hidden).compile().as_text()
    chunked = text(lambda w, h: token_logprobs(lambda x: x @ w, h, tokens, mask, 1.0, 16))
    full = text(lambda w, h: plain(w, h, tokens, 1.0))
    # 64 x 512 in any grouping of its axes, with or without the rows in front.
    for shape in ("[2,64,512]", "[128,512]", "[2,4,16,512]", "[4,2,16,512]", "[2,63,512]",
                  "[126,512]", "[4,32,512]", "[64,2,512]"):
        assert "f32" + shape not in chunked
    assert "f32[2,63,512]" in full or "f32[2,64,512]" in full or "f32[128,512]" in full


@cache
def scored(chunk, entropy_gradient):
    """Jitted: sums of log-prob and of entropy, and both gradients by (w, hidden)."""
    def f(w, hidden, tokens, mask):
        both = lambda w, x: token_logprobs(  # noqa: E731
            lambda h: h @ w, x, tokens, mask, 1.0, chunk, entropy_gradient)
        logp, entropy = both(w, hidden)
        grads = [jax.grad(lambda w, x: both(w, x)[i].sum(), argnums=(0, 1))(w, hidden)
                 for i in (0, 1)]
        return logp.sum(), entropy.sum(), *grads
    return jax.jit(f)


def test_entropy_without_gradient_has_the_same_value():
    with_it, without = (scored(4, flag)(*inputs(2, 6, 4, 7)) for flag in (True, False))
    np.testing.assert_allclose(with_it[:2], without[:2], rtol=1e-6)
    assert all(np.any(g) for g in with_it[3]) and not any(np.any(g) for g in without[3])


def test_first_response_token_has_a_loss():
    """Tokens P P P R R: the position of the third P predicts the first R."""
    segments = jnp.ones((2, 6), jnp.int32)
    sampled = jnp.asarray([[False] * 3 + [True] * 2 + [False]] * 2)
    np.testing.assert_array_equal(predicted_mask(sampled, segments)[0], [0, 0, 0, 1, 1, 0])
    w, hidden, tokens, _ = inputs(2, 6, 4, 7)
    only = jnp.zeros((2, 6), bool).at[0, 3].set(True)
    _, _, (_, grad), _ = scored(4, False)(w, hidden, tokens, predicted_mask(only, segments))
    moved = np.abs(grad).sum(-1) > 0
    assert np.argwhere(moved).tolist() == [[0, 2]]


def test_prediction_never_crosses_segments_nor_starts_one():
    segments = jnp.asarray([[1, 1, 2, 2, 0, 0]])
    np.testing.assert_array_equal(
        predicted_mask(jnp.ones((1, 6), bool), segments)[0], [0, 1, 0, 1, 0, 0])


def test_scored_under_the_sampling_temperature():
    hidden = jnp.asarray([[[2.0, 0.0], [0.0, 0.0]]])
    mask = jnp.asarray([[False, True]])
    logp, _ = token_logprobs(lambda h: h, hidden, jnp.zeros((1, 2), jnp.int32), mask, 0.5, 1)
    assert logp[0, 1] == pytest.approx(-0.01815, abs=1e-5)
    logp, entropy = token_logprobs(lambda h: h, hidden, jnp.zeros((1, 2), jnp.int32), mask, 1.0, 1)
    assert logp[0, 1] == pytest.approx(-0.12693, abs=1e-5)
    p = 1 / (1 + math.exp(-2.0))
    assert entropy[0, 1] == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), abs=1e-5)


@pytest.mark.parametrize("junk", [1e30, np.inf, np.nan])
def test_what_unscored_positions_hold_stays_out(junk):
    w, hidden, tokens, mask = inputs(2, 6, 4, 7)
    predicts = jnp.roll(mask, -1, 1).at[:, -1].set(False)
    spoilt = jnp.where(predicts[..., None], hidden, junk)
    got, clean = (scored(4, False)(w, x, tokens, mask) for x in (spoilt, hidden))
    jax.tree.map(np.testing.assert_array_equal, got, clean)


def test_permutation_gradient_is_the_inverse_permutation():
    rng = np.random.default_rng(0)
    order = jnp.asarray(np.stack([rng.permutation(5) for _ in range(2)]))
    x = jnp.asarray(rng.standard_normal((2, 5, 3)), jnp.float32)
    scale = jnp.asarray(rng.standard_normal((2, 5, 3)), jnp.float32)
    got = jax.grad(lambda x: (permute_columns(x, order, jnp.argsort(order, 1)) * scale).sum())(x)
    want = jax.grad(lambda x: (jnp.take_along_axis(x, order[..., None], 1) * scale).sum())(x)
    np.testing.assert_allclose(got, want)
