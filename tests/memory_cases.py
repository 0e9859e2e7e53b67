"""Memories for tests of the decoder: one page a row, which Rows and Tables read alike."""

import jax
import jax.numpy as jnp
import numpy as np

from rods_jax.models.decoder import unrolled
from rods_jax.models.memory import Memory, Rows, Tables, store


def empty_pages(config, rows, entries):
    """k and v of `rows` pages, as rollouts of this config hold them."""
    shape = (config.n_layers, rows, config.n_kv_heads)
    k = jnp.zeros((*shape, config.head_dim, entries), config.compute_dtype)
    v = jnp.zeros((*shape, entries, config.head_dim), config.compute_dtype)
    return (tuple(k), tuple(v)) if unrolled(config) else (k, v)


def remember(pages, kv, start_B):
    """The pages with a chunk's K/V behind the first start_B[b] entries of row b's page."""
    chunk = jax.tree.leaves(kv)[0].shape[-2]
    rows = jnp.arange(len(start_B))
    return store(*pages, kv, rows[:, None], jnp.asarray(start_B), jnp.full_like(rows, chunk))


def page_a_row(pages, length_B):
    """What a chunk reads: the first length_B[b] entries of page b."""
    own = np.arange(len(length_B), dtype=np.int32)[:, None]
    return Memory(*pages, Tables(own, jnp.asarray(length_B), 1))


def written_to(pages, at):
    """What a chunk reads and is written into: its own row of the pages, from `at` on."""
    return Memory(*pages, Rows(jnp.int32(at)))
