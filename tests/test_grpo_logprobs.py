"""Chunked log-probs against the plain full-logits formula, values and gradients."""

import math
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rods_jax.grpo.advantage import AdvantageConfig
from rods_jax.grpo.batch import BatchShape, pack
from rods_jax.grpo.logprobs import permute_columns, predicted_mask, token_logprobs
from rods_jax.grpo.loss import LossConfig
from rods_jax.grpo.passes import Rows, micro_logprobs
from rods_jax.grpo.supervised import make_supervised
from rods_jax.grpo.update import UpdateConfig, init_state, make_update
from rods_jax.models.attention import Segments
from rods_jax.models.config import ModelConfig
from rods_jax.models.decoder import Decoder, init_params


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


@pytest.mark.parametrize("rows, length, vocab, chunk, share", [
    (3, 12, 11, 5, 0.4), (3, 7, 11, 100, 1.0), (2, 64, 512, 16, 0.6), (2, 6, 11, 2, 0.0)])
def test_chunked_equals_plain(rows, length, vocab, chunk, share):
    w, hidden, tokens, mask = inputs(rows, length, 6, vocab, share=share)

    def total(f):
        def g(w, hidden):
            logp, entropy = (jnp.where(mask, x, 0) for x in f(w, hidden))
            scale = jnp.cos(jnp.arange(length))  # of either sign, about 1
            return ((logp + 0.3 * entropy) * scale).sum(), (logp, entropy)
        return jax.jit(jax.value_and_grad(g, argnums=(0, 1), has_aux=True),
                       compiler_options=QUICK)(w, hidden)
    (_, got), got_grads = total(
        lambda w, h: token_logprobs(lambda x: x @ w, h, tokens, mask, 0.7, chunk))
    (_, want), want_grads = total(lambda w, h: plain(w, h, tokens, 0.7))
    assert bool(share) == all(np.abs(g).max() > 0.1 for g in want_grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
                 (got, got_grads), (want, want_grads))


# ---------------------------------------------------------------- in a decoder

# Small beside R x L x V, but for the vocabulary.
ROWS, LENGTH, VOCAB, CHUNK = 2, 64, 512, 16


def decoder_of(**fields):
    config = ModelConfig(VOCAB, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8,
                         d_ff=32, **fields)
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    rng = np.random.default_rng(3)
    return Decoder(config), jax.tree.map(
        lambda x: rng.normal(0.3, 0.4, x.shape).astype(np.float32), shapes)


POSITIONS = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))
ONES = np.ones((ROWS, LENGTH), np.int32)


def by_chunks(decoder, params, tokens, mask):
    rows = Rows(tokens, POSITIONS, ONES, ONES[:, 0])
    return micro_logprobs(decoder, params, rows, (), mask, 1.0, CHUNK, True)


def all_at_once(decoder, params, tokens, mask):
    variables = {"params": params}
    hidden, _ = decoder.apply(variables, tokens, POSITIONS, Segments(ONES))
    logits = decoder.apply(variables, hidden, method="logits")
    scores = plain(jnp.eye(VOCAB), logits, tokens, 1.0)
    return [jnp.where(mask, x, 0) for x in scores]


QUICK = {"xla_backend_optimization_level": 0}  # for what is compiled to be run once


def program(score, decoder, options=None):
    """Compiled: log-probs, entropies, and the gradient of a mean over both by the weights."""
    def f(params, tokens, mask):
        logp, entropy = score(decoder, params, tokens, mask)
        return (logp + 0.3 * entropy).sum() / mask.sum(), (logp, entropy)
    shape = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    params = jax.eval_shape(lambda: init_params(decoder.config, jax.random.key(0)))
    return jax.jit(jax.value_and_grad(f, has_aux=True), compiler_options=options).lower(
        params, shape, jax.ShapeDtypeStruct((ROWS, LENGTH), bool)).compile()


def largest_array(text):
    """Numbers in the largest array of a compiled program, of any dtype and layout."""
    return max(math.prod(map(int, dims.split(",")))
               for dims in re.findall(r"\b[a-z]+[0-9]*\[([0-9,]+)\]", text))


@pytest.mark.parametrize("tied, dtype", [
    (True, "float32"), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (False, "float32"), (True, "bfloat16")))])
def test_in_a_decoder_chunks_equal_plain_and_hold_one_chunk_of_logits(tied, dtype):
    decoder, params = decoder_of(tie_embeddings=tied, compute_dtype=dtype)
    _, _, tokens, mask = inputs(ROWS, LENGTH, 1, VOCAB)
    chunked, full = program(by_chunks, decoder), program(all_at_once, decoder, QUICK)
    # Rules out R x L x V, and a head's gradient or weights once for each chunk.
    assert largest_array(chunked.as_text()) <= ROWS * CHUNK * VOCAB
    assert largest_array(full.as_text()) >= ROWS * (LENGTH - 1) * VOCAB
    ((_, got), got_grads), ((_, want), want_grads) = (
        run(params, tokens, mask) for run in (chunked, full))
    near = partial(np.testing.assert_allclose, atol=1e-5 if dtype == "float32" else 2e-2)
    jax.tree.map(near, got, want)
    # In bfloat16 every chunk rounds its part of a weight's gradient.
    jax.tree.map(lambda a, b: near(a / np.abs(b).max(), b / np.abs(b).max()),
                 got_grads, want_grads)


def batch_shapes(prompts=0):
    """Of a batch of 2 micro-batches."""
    shape = BatchShape(micro=2, rows=ROWS, length=LENGTH + 1, tasks=2, group=2, prompts=prompts,
                       prompt=prompts and 8)
    batch = pack([], np.zeros((2, 2)), shape, drop_dead=True)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)


@pytest.mark.parametrize("supervised, prompts", [
    (False, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((False, 0), (True, 0)))])
def test_a_whole_step_holds_one_chunk_of_logits(supervised, prompts):
    decoder, _ = decoder_of()
    optimizer = optax.sgd(0.1)
    step = make_supervised(decoder, optimizer, CHUNK) if supervised else make_update(
        decoder, UpdateConfig(loss=LossConfig(kl_coef=0.1, entropy_coef=0.1), logit_chunk=CHUNK,
                              advantage=AdvantageConfig(dead_keep_kl=True)), optimizer)
    state = jax.eval_shape(lambda: init_state(
        init_params(decoder.config, jax.random.key(0)), optimizer, keep_reference=True))
    text = jax.jit(step).lower(state, batch_shapes(prompts)).compile().as_text()
    assert VOCAB * 16 < largest_array(text) <= ROWS * CHUNK * VOCAB


# ---------------------------------------------------------------- what is computed


@pytest.mark.parametrize("counts, chunks", [
    ((0, 0), 0), ((1, 0), 1), ((4, 3), 1), ((2, 5), 2), ((15, 15), 4)])
def test_the_head_runs_over_as_many_chunks_as_the_fullest_row_needs(counts, chunks):
    """Wherever in the rows of 16 the scored tokens are: once forward, once backward."""
    w, hidden, tokens, _ = inputs(2, 16, 4, 7)
    mask = np.zeros((2, 16), bool)
    for row, count in zip(mask, counts):
        row[np.random.default_rng(count).choice(np.arange(1, 16), count, replace=False)] = True
    runs = []

    def head(w, x):
        jax.debug.callback(lambda: runs.append(x.shape))
        return x @ w

    def total(w, hidden, mask):
        return token_logprobs(partial(head, w), hidden, tokens, mask, 1.0, 4)[0].sum()
    jax.jit(total, compiler_options=QUICK)(w, hidden, mask)
    jax.effects_barrier()
    assert runs == [(2, 4, 4)] * chunks
    jax.jit(jax.grad(total, argnums=(0, 1)), compiler_options=QUICK)(w, hidden, mask)
    jax.effects_barrier()
    assert runs == [(2, 4, 4)] * 3 * chunks


def test_weights_without_a_gradient_cost_none():
    """Forward a product; backward that product again, the hidden states' gradient, and only
    where they are trained the weights' gradient."""
    w, hidden, tokens, mask = inputs(2, 6, 4, 7)

    def total(w, hidden):
        return token_logprobs(lambda x: x @ w, hidden, tokens, mask, 1.0, 2)[0].sum()
    count = lambda argnums: str(jax.make_jaxpr(  # noqa: E731
        jax.grad(total, argnums=argnums))(w, hidden)).count("dot_general")
    assert (count((0, 1)), count(1)) == (4, 3)


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
