"""Attention to a row and to a prompt that rows share, in blocks and by the kernels, against all
scores at once: values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rods_jax.models import blockwise
from rods_jax.models.attention import cudnn, splash
from rods_jax.models.blockwise import Rows

KERNELS = {"blocks": blockwise.attend, "splash": functools.partial(splash, interpret=True),
           "cudnn": functools.partial(cudnn, implementation="xla")}


def plain(q, k, v, prompt_k, prompt_v, rows):
    """By the definition: one softmax over the prompt's keys and the row's own."""
    (_, length, heads, width), prompt = q.shape, prompt_k.shape[2]
    k, v = (jnp.concatenate([shared[rows.prompt_B], own], 2).repeat(heads // own.shape[1], 1)
            for shared, own in ((prompt_k, k), (prompt_v, v)))
    ids, at = rows.ids_BxC, np.arange(length)
    own = (ids[:, :, None] == ids[:, None]) & (ids != 0)[:, :, None] & (at <= at[:, None])
    of_prompt = np.arange(prompt) < rows.length_K[rows.prompt_B][:, None]
    seen = np.concatenate([np.broadcast_to(of_prompt[:, None], (*own.shape[:2], prompt)),
                           own | np.eye(length, dtype=bool)], 2)
    scores = jnp.einsum("bqhd,bhkd->bhqk", q, k) / width ** 0.5
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30), -1)
    return jnp.einsum("bhqk,bhkd->bqhd", weights, v)


def case(b, length, heads, kv, prompts, prompt, alone, seed=0):
    """q, k, v, the prompts' k, v, and rows of segments with padding behind them."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    ids = np.sort(rng.integers(1, 2 if alone else 4, (b, length)), 1).astype(np.int32)
    for row, n in zip(ids, rng.integers(0, length // 2, b)):
        row[length - n:] = 0
    rows = Rows(ids, rng.integers(0, prompts, b).astype(np.int32),
                rng.integers(0, prompt + 1, prompts).astype(np.int32))
    shapes = (b, kv, length, 8), (b, kv, length, 8), (prompts, kv, prompt, 8), (
        prompts, kv, prompt, 8)
    return draw(b, length, heads, 8), *map(lambda s: draw(*s), shapes), rows


def value_and_gradients(attend, *arrays, rows):
    """At real tokens, and by q, k, v and the prompts' k, v, for a random sum of them."""
    real = (rows.ids_BxC > 0)[:, :, None, None]
    toward = np.random.default_rng(9).normal(size=arrays[0].shape).astype(np.float32) * real

    @jax.jit
    def both(*arrays):
        out, pull = jax.vjp(lambda *a: attend(*a, rows), *arrays)
        return jnp.where(real, out, 0), pull(toward)
    return both(*arrays)


def assert_equal_to_plain(attend, arrays, rows):
    got, want = (value_and_gradients(f, *arrays, rows=rows) for f in (attend, plain))
    assert np.abs(want[0]).max() > 0.1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)


@pytest.mark.parametrize("b, length, heads, kv, prompts, prompt", [
    (3, 20, 4, 2, 2, 16), (5, 13, 2, 1, 1, 3), (2, 9, 2, 2, 3, 0), (4, 200, 2, 1, 2, 300),
    (3, 150, 2, 2, 1, 530)],
    ids=["gqa", "one prompt", "no prompt", "blocks, row by row", "blocks, one prompt"])
def test_blocks_equal_all_scores_at_once(b, length, heads, kv, prompts, prompt):
    *arrays, rows = case(b, length, heads, kv, prompts, prompt, alone=False)
    assert_equal_to_plain(blockwise.attend, arrays, rows)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("heads, kv", [(2, 2), (4, 2), (2, 1)], ids=["mha", "gqa", "mqa"])
def test_kernels_equal_plain_behind_a_shared_prompt(kernel, heads, kv):
    *arrays, rows = case(3, 128, heads, kv, 2, 128, alone=True)
    assert_equal_to_plain(KERNELS[kernel], arrays, rows)


def test_a_part_of_the_queries_is_that_part_of_all():
    *arrays, rows = case(2, 48, 2, 1, 1, 0, alone=True)
    whole = blockwise.attend(*arrays, rows)
    for first in (0, 16, 32):
        part = blockwise.attend(arrays[0][:, first:first + 16], *arrays[1:], rows, first=first)
        real = rows.ids_BxC[:, first:first + 16, None, None] > 0
        np.testing.assert_allclose(part * real, whole[:, first:first + 16] * real, atol=1e-6)


def test_no_array_holds_all_scores():
    *arrays, rows = case(2, 1024, 1, 1, 1, 1024, alone=True)
    text = jax.jit(jax.grad(lambda *a: blockwise.attend(*a, rows).sum(), argnums=(0, 1, 3))).lower(
        *arrays).compile().as_text()
    assert "1024,1024]" not in text and "1024,2048]" not in text and "512,256]" in text


def test_what_nobody_may_see_cannot_matter():
    """Keys beyond a prompt's length and of padding, even where they are huge."""
    q, k, v, prompt_k, prompt_v, rows = case(3, 20, 2, 1, 2, 16, alone=False)
    beyond = (np.arange(16) >= rows.length_K[:, None])[:, None, :, None]
    padding = (rows.ids_BxC == 0)[:, None, :, None]
    dirty = [np.where(where, np.float32(1e4), x) for x, where in (
        (k, padding), (v, padding), (prompt_k, beyond), (prompt_v, beyond))]
    got, want = (value_and_gradients(blockwise.attend, q, *others, rows=rows)
                 for others in (dirty, (k, v, prompt_k, prompt_v)))
    np.testing.assert_array_equal(got[0], want[0])
    assert all(np.isfinite(g).all() for g in got[1])
    np.testing.assert_allclose(got[1][3], want[1][3], atol=1e-6)
