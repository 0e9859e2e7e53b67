"""memory.attend against one plain float64 softmax over all keys that a query sees, joined."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import models_reference as reference
import numpy as np
import pytest

from rods_jax.models import memory
from rods_jax.models.attention import causal_mask
from rods_jax.models.memory import (
    Rows, Seats, Tables, attend, each, store, store_by_page, store_by_token)

B, H, HD, E = 4, 4, 6, 3  # rows, heads, head width, entries a page
LOUD = 1e4  # of what nobody may see: shows at once where it leaks


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def quick_jit(f):
    """These tests compile far more than they compute."""
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})


@dataclasses.dataclass
class Case:
    """A memory, and what row b sees of it: keys and values [KV, n, HD], or for Rows, where it
    differs from query to query, [C] of them."""

    memory: tuple
    seen: list


def entries(rng, kv, n):
    return normal(rng, kv, n, HD), normal(rng, kv, n, HD)


def put(pages, page, index, k, v):
    """Of one token, k, v [KV, HD]."""
    pages[0][page, :, :, index], pages[1][page, :, index] = k, v


def loud_pages(rng, n, kv):
    return LOUD * normal(rng, n, kv, HD, E), LOUD * normal(rng, n, kv, E, HD)


def fill(pages, own, k, v):
    for i in range(k.shape[1]):
        put(pages, own[i // E], i % E, k[:, i], v[:, i])


def tables(rng, kv, lengths, width, block):
    """Rows of these lengths; pages in no order, more of them than are used."""
    n = B * width + 2
    pages, free = loud_pages(rng, n, kv), list(rng.permutation(n))
    page_BxW, seen = np.full((B, width), n, np.int32), []
    for b, length in enumerate(lengths):
        own = [free.pop() for _ in range(-(-length // E))]
        page_BxW[b, :len(own)] = own
        seen.append(entries(rng, kv, length))
        fill(pages, own, *seen[-1])
    where = Tables(jnp.asarray(page_BxW), jnp.asarray(lengths, jnp.int32), block)
    return Case((*pages, where), seen)


def seats(rng, kv, groups, lengths, width, n_seats=3):
    """groups: which of the sequences of these lengths a row reads, None for no one. Rows of a
    group sit at the same pages."""
    n = len(lengths) * width + 2
    pages, free = loud_pages(rng, n, kv), list(rng.permutation(n))
    row_NxG = rng.integers(0, B, (n, n_seats)).astype(np.int32)  # of empty seats any row
    length_N = rng.integers(0, E + 1, n).astype(np.int32)
    at_BxW = np.full((B, width), n * n_seats, np.int32)
    found = [entries(rng, kv, length) for length in lengths]
    places = [[free.pop() for _ in range(-(-length // E))] for length in lengths]
    for own, (k, v) in zip(places, found):
        fill(pages, own, k, v)
        for i, page in enumerate(own):
            length_N[page] = min(E, k.shape[1] - i * E)
    taken = dict.fromkeys(range(len(lengths)), 0)
    for b, group in enumerate(groups):
        if group is None:
            continue
        seat, own = taken[group], np.array(places[group], np.int32)
        taken[group] += 1
        row_NxG[own, seat] = b
        at_BxW[b, :len(own)] = own * n_seats + seat
    nothing = np.zeros((kv, 0, HD), np.float32)
    return Case((*pages, Seats(*map(jnp.asarray, (row_NxG, length_N, at_BxW)))),
                [(nothing, nothing) if group is None else found[group] for group in groups])


def rows(rng, kv, at, size, k_new, v_new):
    """The chunk's own k, v [B, KV, C, HD] become the entries from `at` on."""
    k, v = normal(rng, B, kv, HD, size), normal(rng, B, kv, size, HD)
    k[..., at:] *= LOUD
    v[:, :, at:] *= LOUD
    chunk = k_new.shape[2]
    seen = [[(np.concatenate([k[b, :, :, :at].swapaxes(1, 2), k_new[b, :, :c + 1]], 1),
              np.concatenate([v[b, :, :at], v_new[b, :, :c + 1]], 1)) for c in range(chunk)]
            for b in range(B)]
    return Case((k, v, Rows(jnp.int32(at))), seen)


def chunk_of(rng, kv, length):
    return normal(rng, B, length, H, HD), (normal(rng, B, kv, length, HD),
                                          normal(rng, B, kv, length, HD))


def wanted(q, own, cases, last_is_rows):
    """[B, C, H, HD] in float64."""
    n, share = q.shape[1], H // own[0].shape[1]
    out = np.zeros(q.shape)
    for b, c, h in np.ndindex(B, n, H):
        parts = [case.seen[b] for case in cases]
        if last_is_rows:
            parts[-1] = parts[-1][c]
        else:
            parts = [*parts, (own[0][b, :, :c + 1], own[1][b, :, :c + 1])]
        k, v = (np.concatenate([part[i][h // share] for part in parts]).astype(np.float64)
                for i in (0, 1))
        out[b, c, h] = reference.attention(q[b, c, h][None].astype(np.float64), k, v,
                                           np.ones((1, len(k)), bool))[0]
    return out


@quick_jit
def attended(q, own, mask, memories):
    return attend(q, own, mask, memories)


def check(q, own, cases, last_is_rows=False, atol=5e-6):
    mask = None if last_is_rows else causal_mask(q.shape[1])
    out, kv = attended(q, own, mask, [case.memory for case in cases])
    np.testing.assert_allclose(out, wanted(q, own, cases, last_is_rows), atol=atol)
    return kv


# ---------------------------------------------------------------- one memory


@pytest.mark.parametrize("kv", [1, 2, 4])
@pytest.mark.parametrize("block", [1, 2, 6])
def test_tables_are_read_row_by_row(kv, block):
    """No token, a part of a page, whole pages, all pages."""
    rng = np.random.default_rng(kv)
    q, own = chunk_of(rng, kv, 3)
    case = tables(rng, kv, (0, 1, 2 * E, 6 * E), 6, block)
    k, v = check(q, own, [case])
    np.testing.assert_array_equal(k, own[0])
    np.testing.assert_array_equal(v, own[1])


@pytest.mark.parametrize("kv", [1, 2, 4])
def test_seats_read_a_shared_page_for_every_row_at_it(kv):
    rng = np.random.default_rng(kv)
    q, own = chunk_of(rng, kv, 1)
    check(q, own, [seats(rng, kv, (0, 1, 0, None), (2 * E, E + 1), 2)])


def test_nobody_needs_to_sit_anywhere():
    rng = np.random.default_rng(0)
    q, own = chunk_of(rng, 2, 1)
    check(q, own, [seats(rng, 2, (None,) * B, (E,), 2), tables(rng, 2, (0,) * B, 2, 1)])


@pytest.mark.parametrize("at, chunk, size", [(0, 1, 5), (4, 1, 5), (2, 3, 7), (0, 4, 4)])
def test_rows_take_the_chunk_in_and_read_it(at, chunk, size):
    rng = np.random.default_rng(at)
    q, own = chunk_of(rng, 2, chunk)
    case = rows(rng, 2, at, size, *own)
    k, v = check(q, own, [case], last_is_rows=True)
    want_k, want_v = (np.array(x) for x in case.memory[:2])
    want_k[..., at:at + chunk], want_v[:, :, at:at + chunk] = own[0].swapaxes(2, 3), own[1]
    np.testing.assert_array_equal(k, want_k)
    np.testing.assert_array_equal(v, want_v)


# ---------------------------------------------------------------- several


@pytest.mark.parametrize("kv", [1, 2, 4])
def test_a_decode_step_joins_prompt_pages_own_pages_and_its_rows(kv):
    rng = np.random.default_rng(kv + 10)
    q, own = chunk_of(rng, kv, 1)
    check(q, own, [seats(rng, kv, (0, 0, 0, 1), (2 * E + 1, E), 3),
                   seats(rng, kv, (0, None, 2, 3), (1, 0, 2 * E, E), 2, n_seats=1),
                   rows(rng, kv, 2, 5, *own)], last_is_rows=True)


@hypothesis.settings(max_examples=12)
@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4]), st.booleans())
def test_any_mixture_is_one_softmax(seed, kv, decode):
    rng = np.random.default_rng(seed)
    q, own = chunk_of(rng, kv, 1 if decode else 2)
    lengths = lambda: tuple(int(n) for n in rng.integers(0, 4 * E + 1, B))  # noqa: E731
    cases = [tables(rng, kv, lengths(), 4, 2), tables(rng, kv, lengths(), 4, 4)]
    if decode:
        groups = tuple(rng.choice([0, 1, 2, None], B))
        cases.append(seats(rng, kv, groups, lengths()[:3], 4, n_seats=B))
    check(q, own, cases)


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_rows_in_turn_give_what_they_give_together(monkeypatch, at_once):
    """As on a CPU whose cache does not hold the scores of all rows."""
    rng = np.random.default_rng(7)
    q, own = chunk_of(rng, 2, 3)
    cases = [tables(rng, 2, (0, 1, 2 * E, 6 * E), 6, 2), tables(rng, 2, (E, 0, 3, 5 * E), 6, 3)]
    most_keys = max(3, 3 * E)
    monkeypatch.setattr(memory, "_CACHED", at_once * H * 3 * most_keys)
    attended = jax.jit(lambda q, own, memories: attend(q, own, causal_mask(3), memories)[0])
    args = q, own, [case.memory for case in cases]
    np.testing.assert_allclose(attended(*args), wanted(q, own, cases, False), atol=5e-6)
    assert (f"length={B // at_once}" in str(attended.trace(*args).jaxpr)) == (at_once < B)


def test_bfloat16_comes_near():
    rng = np.random.default_rng(5)
    q, own = chunk_of(rng, 2, 1)
    cases = [seats(rng, 2, (0, 0, 1, None), (2 * E, E + 1), 2), rows(rng, 2, 2, 4, *own)]
    want = wanted(q, own, cases, True)
    half = lambda tree: jax.tree.map(  # noqa: E731
        lambda x: x.astype(jnp.bfloat16) if x.dtype == np.float32 else x, tree)
    out, kv = attended(half(q), half(own), None, half([case.memory for case in cases]))
    assert out.dtype == kv[0].dtype == jnp.bfloat16
    error = np.abs(np.asarray(out, np.float64) - want)
    assert 0 < error.max() < 0.05


def test_large_scores_stay_finite():
    """The parts of a softmax are joined by their peaks: no exponential overflows."""
    rng = np.random.default_rng(6)
    q, own = chunk_of(rng, 2, 1)
    q *= 300
    cases = [tables(rng, 2, (0, 1, E, 2 * E), 2, 1), seats(rng, 2, (0, 0, 1, None), (E, 2), 1)]
    check(q, own, cases, atol=2e-4)


# ---------------------------------------------------------------- store


@pytest.mark.parametrize("layered", [False, True])
@pytest.mark.parametrize("store", [store_by_token, store_by_page, store])
def test_store_puts_each_token_in_its_place_and_drops_those_without(store, layered):
    rng = np.random.default_rng(7)
    layers, n, kv, chunk = 2, 4 * B, 2, 2 * E + 1
    k, v = normal(rng, layers, n, kv, HD, E), normal(rng, layers, n, kv, E, HD)
    new = normal(rng, layers, B, kv, chunk, HD), normal(rng, layers, B, kv, chunk, HD)
    page_BxW = rng.permutation(n).reshape(B, 4).astype(np.int32)
    at_B = np.resize([0, 1, E, E + 2, 2 * E - 1], B).astype(np.int32)
    n_B = np.resize([chunk, 3, 0, E, 1], B).astype(np.int32)
    page_BxW[0, 1], page_BxW[3, 1:] = n, n + 7  # no pages
    split = tuple if layered else jnp.asarray
    got_k, got_v = quick_jit(store)(split(k), split(v), tuple(map(split, new)), page_BxW, at_B, n_B)
    assert isinstance(got_k, tuple) == isinstance(got_v, tuple) == layered
    want_k, want_v = k.copy(), v.copy()
    for b in range(B):
        for c in range(n_B[b]):
            page, at = page_BxW[b, (at_B[b] + c) // E], (at_B[b] + c) % E
            for i in range(layers):
                if page < n:
                    put((want_k[i], want_v[i]), page, at, new[0][i, b, :, c], new[1][i, b, :, c])
    np.testing.assert_array_equal(np.stack(got_k), want_k)
    np.testing.assert_array_equal(np.stack(got_v), want_v)


def test_each_goes_layer_by_layer():
    x, y = np.arange(6.0).reshape(2, 3), np.ones((2, 3))
    together = each(lambda a, b: a.sum() + b, x, y)
    apart = each(lambda a, b: a.sum() + b, tuple(x), tuple(y))
    np.testing.assert_array_equal(together, [[4.0] * 3, [13.0] * 3])
    assert isinstance(apart, tuple)
    np.testing.assert_array_equal(np.stack(apart), together)
