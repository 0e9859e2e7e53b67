"""The distribution that tokens are sampled from, against plain float64 numpy."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollout_reference as reference

from rods_jax.rollout.draw import Filter, draw, filtered, row_keys

ALL = Filter()
KEY = jax.random.key(7)


# One compilation a shape; op by op there would be dozens.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
by_filter = quick_jit(filtered, static_argnums=1)
by_draw = quick_jit(draw, static_argnums=4)


@functools.partial(quick_jit, static_argnums=0)
def keys(n):
    return jax.vmap(lambda i: jax.random.fold_in(KEY, i))(jnp.arange(n))


@functools.partial(quick_jit, static_argnums=0)
def one_key(n):
    """The first of `keys`, n times."""
    return jax.vmap(lambda i: jax.random.fold_in(KEY, 0))(jnp.arange(n))


@functools.partial(quick_jit, static_argnums=2)
def gumbel(key, position, vocab):
    return jax.random.gumbel(jax.random.fold_in(key, position), (vocab,))


def drawn(logits_BxV, keys_B, position_B, temperature, keep=ALL):
    token_B, logprob_B = by_draw(np.asarray(logits_BxV), keys_B, np.asarray(position_B, np.int32),
                                 np.float32(temperature), keep)
    assert token_B.dtype == jnp.int32 and logprob_B.dtype == jnp.float32
    return np.asarray(token_B), np.asarray(logprob_B)


# ---------------------------------------------------------------- what is left out


# No sum of equal shares of 1 is one of these shares: rounding decides nothing.
@hypothesis.given(st.lists(st.integers(-6, 6), min_size=5, max_size=5), st.integers(0, 6),
                  st.sampled_from([1e-4, 0.37, 0.71, 0.93, 1.0]))
def test_filters_keep_what_their_definition_says(values, top_k, top_p):
    """Many of the logits are equal."""
    logits = np.array(values, np.float32) / 2
    got = np.asarray(by_filter(logits[None], Filter(top_k, top_p)))[0]
    kept = reference.kept(logits.astype(np.float64), top_k, top_p)
    np.testing.assert_array_equal(got, np.where(kept, logits, -np.inf))


def test_of_equal_tokens_the_lower_ids_are_kept():
    logits = np.array([[1.0, 3.0, 1.0, 3.0, 1.0]], np.float32)
    for top_k, kept in ((1, [1]), (2, [1, 3]), (3, [0, 1, 3]), (4, [0, 1, 2, 3])):
        assert np.flatnonzero(np.isfinite(by_filter(logits, Filter(top_k))[0])).tolist() == kept
    equal = np.zeros((1, 4), np.float32)  # a quarter each, without rounding
    assert np.isfinite(by_filter(equal, Filter(0, 0.5))[0]).tolist() == [True, True, False, False]


def test_the_likeliest_token_is_always_left():
    logits = np.array([[0.0, 5.0, 1.0], [9.0, -9.0, -9.0]], np.float32)
    got = np.isfinite(by_filter(logits, Filter(0, 1e-6)))
    assert got.tolist() == [[False, True, False], [True, False, False]]


def test_without_filters_nothing_changes():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 7)))
    assert not ALL.on and filtered(logits, ALL) is logits
    np.testing.assert_array_equal(by_filter(logits, Filter(7, 1.0)), logits)


@pytest.mark.parametrize("fields, words", [
    (dict(top_k=-1), "top_k is -1"), (dict(top_p=0.0), "top_p is 0.0"),
    (dict(top_p=1.5), "top_p is 1.5"), (dict(top_p=float("nan")), "top_p is nan")])
def test_filters_without_sense_are_refused(fields, words):
    with pytest.raises(ValueError, match=words) as error:
        Filter(**fields)
    assert "\n" not in str(error.value) and "give" in str(error.value)


# ---------------------------------------------------------------- log-probs


def test_a_log_prob_is_that_of_what_is_left():
    logits = np.log(np.array([[0.6, 0.3, 0.1]] * 200, np.float32))
    tokens, logprobs = drawn(logits, keys(200), np.arange(200), 1.0, Filter(0, 0.9))
    assert set(tokens) == {0, 1}
    np.testing.assert_allclose(logprobs[tokens == 0], -0.40547, atol=2e-5)
    np.testing.assert_allclose(logprobs[tokens == 1], -1.09861, atol=2e-5)


def test_a_log_prob_is_that_of_the_temperature():
    logits = np.array([[2.0, 0.0]] * 50, np.float32)
    tokens, logprobs = drawn(logits, keys(50), np.zeros(50, np.int32), 0.5)
    assert (tokens == 0).any()
    np.testing.assert_allclose(logprobs[tokens == 0], -0.01815, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("keep", [ALL, Filter(4, 1.0), Filter(0, 0.7), Filter(6, 0.6)])
def test_tokens_and_log_probs_equal_the_reference(temperature, keep):
    logits = 2 * np.random.default_rng(1).normal(size=(32, 11)).astype(np.float32)
    position = np.arange(32) + 5
    tokens, logprobs = drawn(logits, keys(32), position, temperature, keep)
    limits = reference.Limits(0, 0, keep.top_k, keep.top_p)
    for b, key in enumerate(keys(32)):
        noise = np.asarray(gumbel(key, np.int32(position[b]), 11))
        token, logprob = reference.draw(logits[b], noise, temperature, limits)
        assert tokens[b] == token
        np.testing.assert_allclose(logprobs[b], logprob, atol=2e-6)


def test_greedy_is_scored_at_temperature_1_without_filter():
    logits = 2 * np.random.default_rng(2).normal(size=(6, 9)).astype(np.float32)
    logits[0, [3, 7]] = 9  # of equal ones the first
    for keep in (ALL, Filter(1, 0.1)):
        tokens, logprobs = drawn(logits, keys(6), np.arange(6), 0.0, keep)
        assert tokens.tolist() == logits.argmax(-1).tolist() and tokens[0] == 3
        for row, token, logprob in zip(logits, tokens, logprobs):
            want = reference.log_softmax(row.astype(np.float64))[token]
            np.testing.assert_allclose(logprob, want, atol=2e-6)


def test_bfloat16_logits_are_scored_in_float32():
    logits = jnp.asarray(np.random.default_rng(3).normal(size=(4, 9)), jnp.bfloat16)
    _, logprobs = drawn(logits, keys(4), np.arange(4), 0.0)
    want = [reference.log_softmax(row).max() for row in np.asarray(logits, np.float64)]
    np.testing.assert_allclose(logprobs, want, atol=2e-6)


# ---------------------------------------------------------------- randomness


def test_a_draw_does_not_depend_on_the_batch():
    logits = np.random.default_rng(4).normal(size=(8, 13)).astype(np.float32)
    position = np.array([3, 3, 9, 0, 1, 2, 700, 5])
    whole = drawn(logits, keys(8), position, 0.9)
    order = np.random.default_rng(5).permutation(8)
    shuffled = drawn(logits[order], keys(8)[order], position[order], 0.9)
    for mine, all_ in zip(shuffled, whole):
        np.testing.assert_array_equal(mine, all_[order])
    for b, key in enumerate(keys(8)):
        alone = drawn(logits[b:b + 1], key[None], position[b:b + 1], 0.9)
        for mine, all_ in zip(alone, whole):
            np.testing.assert_allclose(mine[0], all_[b], rtol=1e-6)


def test_keys_and_positions_give_other_draws():
    logits = np.zeros((64, 50), np.float32)
    by_position = drawn(logits, one_key(64), np.arange(64), 1.0)[0]
    by_key = drawn(logits, keys(64), np.zeros(64, np.int32), 1.0)[0]
    assert len(set(by_position)) > 25 and len(set(by_key)) > 25


def test_a_rows_key_is_folded_from_both_its_numbers():
    who = np.array([[0, 0], [2**32 - 1, 3], [5, 1 << 16 | 2], [5, 2]], np.uint32)
    got = jax.random.key_data(quick_jit(row_keys)(KEY, who))
    for row, (task, sample) in zip(got, who):
        want = jax.random.fold_in(jax.random.fold_in(KEY, task), sample)
        np.testing.assert_array_equal(row, jax.random.key_data(want))
    assert len({tuple(row) for row in got.tolist()}) == 4


# Of the chi-square distribution, exceeded once in 10,000 times; by degrees of freedom.
CRITICAL = {2: 18.42, 5: 25.74}


@pytest.mark.parametrize("temperature, keep, free", [
    (1.0, ALL, 5), (0.6, ALL, 5), (1.0, Filter(3, 1.0), 2)])
def test_tokens_come_as_often_as_they_should(temperature, keep, free):
    n = 6000
    logits = np.array([0.1, 1.3, -0.4, 0.9, 0.0, 0.6], np.float32)
    tokens, _ = drawn(np.tile(logits, (n, 1)), one_key(n), np.arange(n),
                      temperature, keep)
    scores = logits.astype(np.float64) / temperature
    scores[~reference.kept(scores, keep.top_k, keep.top_p)] = -np.inf
    want = n * np.exp(reference.log_softmax(scores))
    counts = np.bincount(tokens, minlength=6)
    assert not counts[want == 0].any() and (want > 0).sum() == free + 1
    counts, want = counts[want > 0], want[want > 0]
    assert ((counts - want) ** 2 / want).sum() < CRITICAL[free]
