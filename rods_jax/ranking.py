"""Who comes first among the slots of a pool, without a sort of all of them.

On a CPU a sort of 65,536 slots by several keys takes tens of milliseconds. What is asked for
is less: a few of the best in their order, or which ones the best are in any order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def rank_within(order_N: Array, group_N: Array, member_N: Array, n_groups: int) -> Array:
    """int32 [N]: how many members of its own group come before a slot in `order_N` (a
    permutation of the slots). Meaningful for members; their group lies in 0..n_groups-1."""
    group = group_N[order_N].astype(jnp.int32)
    in_group_NxK = (group[:, None] == jnp.arange(n_groups)) & member_N[order_N][:, None]
    before_NxK = jnp.cumsum(in_group_NxK, axis=0, dtype=jnp.int32) - in_group_NxK
    rank = jnp.where(in_group_NxK, before_NxK, 0).sum(axis=1, dtype=jnp.int32)
    return jnp.zeros_like(rank).at[order_N].set(rank)


def best_of_each(score_N: Array, group_N: Array, n_groups: int, k: int) -> Array:
    """int32 [n_groups * min(k, N)]: of each group in turn the k members of highest score, best
    first, equal scores by index; -1 where there are fewer. Who is in no group has a number
    outside 0..n_groups-1. Scores are finite and float32, for which `top_k` need not sort."""
    score_N = jnp.where(score_N == 0.0, 0.0, score_N)  # to top_k, -0.0 is less than 0.0
    codes = jnp.arange(n_groups, dtype=group_N.dtype)
    member_KxN = group_N == codes[:, None]
    _, index_KxM = jax.lax.top_k(
        jnp.where(member_KxN, score_N, -jnp.inf), min(k, score_N.shape[0]))
    held_KxM = group_N[index_KxM] == codes[:, None]
    return jnp.where(held_KxM, index_KxM, -1).reshape(-1)


@jax.jit  # without it each call outside a jitted function would compile its loops anew
def lowest_of_each(key_N: Array, group_N: Array, room_K: Array) -> Array:
    """bool [N]: of each group k in 0..K-1 the room_K[k] members of lowest key, equal keys by
    index. Who is in no group has a number outside. Keys are float32 and not NaN.

    Where every group has room for all its members, the usual case, it costs only their count."""
    codes = jnp.arange(room_K.shape[0], dtype=group_N.dtype)
    count_K = (group_N == codes[:, None]).sum(axis=1, dtype=jnp.int32)
    room_K = jnp.maximum(room_K, 0)

    def select() -> Array:
        order_N = _in_order(key_N)

        def of_group(code: Array, count: Array, room: Array) -> Array:
            member_N = group_N == code
            return jax.lax.cond(count <= room, lambda: member_N,
                                lambda: _lowest(order_N, member_N, room))

        return jax.lax.map(lambda x: of_group(*x), (codes, count_K, room_K)).any(axis=0)

    return jax.lax.cond((count_K <= room_K).all(),
                        lambda: (group_N >= 0) & (group_N < codes.shape[0]), select)


def _in_order(x_N: Array) -> Array:
    """uint32 [N] that compare as the floats do. Their bits nearly do so: only the sign counts
    the wrong way round, and with it set all the others do."""
    x_N = jnp.where(x_N == 0.0, 0.0, x_N)  # for -0.0
    bits_N = jax.lax.bitcast_convert_type(x_N, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits_N >= sign, ~bits_N, bits_N | sign)


def _lowest(order_N: Array, member_N: Array, room: Array) -> Array:
    """bool [N], the `room` members of lowest order, fewer than all. Finds the largest limit
    below which not too many of them lie, bit by bit from the highest, and fills up with those
    at the limit: 32 counts, where a sort of a large pool takes tens of milliseconds."""
    def with_bit(i: Array, limit: Array) -> Array:
        higher = limit | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        fits = (member_N & (order_N < higher)).sum(dtype=jnp.int32) <= room
        return jnp.where(fits, higher, limit)

    limit = jax.lax.fori_loop(0, 32, with_bit, jnp.uint32(0))
    below_N, tied_N = member_N & (order_N < limit), member_N & (order_N == limit)
    left = room - below_N.sum(dtype=jnp.int32)
    return below_N | (tied_N & (jnp.cumsum(tied_N, dtype=jnp.int32) <= left))
