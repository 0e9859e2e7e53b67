"""Log-probs and entropies of given tokens, without ever holding all logits.

Position i predicts the token at i + 1 of the same segment. The rows' predicting positions
are brought to the front, then a loop runs the head over chunks of columns, as many as hold
anything: [R, L, V] never exists, neither forward nor backward, and what predicts nothing
costs no logits. The backward pass is written out, for what a generic one keeps of every
chunk includes the head's weights, once a chunk. It runs the head again and adds the gradient
of the weights up in the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero


def predicted_mask(sampled: jax.Array, segments: jax.Array) -> jax.Array:
    """bool [..., L]: tokens the policy wrote that follow a token of the same segment. Only
    these have a prediction to score."""
    before = jnp.roll(segments, 1, axis=-1).at[..., 0].set(0)
    return sampled & (segments != 0) & (segments == before)


def token_logprobs(
    head: Callable[[jax.Array], jax.Array], hidden_RxLxD: jax.Array, tokens_RxL: jax.Array,
    mask_RxL: jax.Array, temperature: float, chunk: int, entropy_gradient: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """float32 [R, L] each: log-prob of each masked-in token under softmax(logits /
    temperature), and the entropy of that distribution in nats; 0 elsewhere.

    head: hidden [..., D] -> float32 logits [..., V]. hidden_RxLxD: column L - 1 predicts nothing
    and may be missing. mask_RxL: which tokens to score (see `predicted_mask`); column 0 cannot
    be, nothing precedes it. chunk: columns a step, so
    R * chunk * V logits are alive at a time. entropy_gradient: False where the entropy is
    only looked at, which saves its part of the backward pass.
    """
    # Shift: column i now holds what position i predicts.
    target_RxL, wanted_RxL = tokens_RxL[:, 1:], mask_RxL[:, 1:]
    length = target_RxL.shape[1]
    chunk = min(chunk, length)
    n_chunks = -(-length // chunk)

    order_RxL = jnp.argsort(~wanted_RxL, axis=1, stable=True)
    inverse_RxL = jnp.argsort(order_RxL, axis=1)
    take = partial(jnp.take_along_axis, axis=1)

    def filled(x):  # to whole chunks
        return jnp.pad(x, ((0, 0), (0, n_chunks * chunk - length)) + ((0, 0),) * (x.ndim - 2))

    hidden = filled(permute_columns(hidden_RxLxD[:, :length], order_RxL, inverse_RxL))
    head, weights = jax.closure_convert(head, hidden[:, :chunk])

    def score(weights, hidden, target, wanted):
        hidden = jnp.where(wanted[..., None], hidden, 0)  # what padding holds stays out
        logits = head(hidden, *weights) / temperature
        log_p = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        logp = jnp.take_along_axis(log_p, target[..., None], axis=-1)[..., 0]
        if not entropy_gradient:
            log_p = jax.lax.stop_gradient(log_p)
        entropy = -(jnp.exp(log_p) * log_p).sum(-1)
        return jnp.where(wanted, logp, 0.0), jnp.where(wanted, entropy, 0.0)

    n_used = -(-wanted_RxL.sum(axis=1).max() // chunk)
    scores = _by_chunks(score, chunk, weights, hidden, filled(take(target_RxL, order_RxL)),
                        filled(take(wanted_RxL, order_RxL)), n_used)

    def restored(y):  # column i scores token i again
        return jnp.pad(take(y[:, :length], inverse_RxL), ((0, 0), (1, 0)))

    return restored(scores[0]), restored(scores[1])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_chunks(score, chunk: int, weights, hidden_RxLxD, target_RxL, wanted_RxL, n_used):
    """score(weights, hidden, target, wanted) -> two of [R, chunk], over the first n_used
    chunks of columns; 0 beyond them."""
    def step(i, out):
        part = score(weights, *_columns((hidden_RxLxD, target_RxL, wanted_RxL), i, chunk))
        return _with_columns(out, part, i, chunk)

    zeros = jnp.zeros(wanted_RxL.shape, jnp.float32)
    return jax.lax.fori_loop(0, n_used, step, (zeros, zeros))


def _by_chunks_forward(score, chunk: int, weights, *rest):
    values = [x.value for x in rest]
    out = _by_chunks(score, chunk, [w.value for w in weights], *values)
    return out, ([w.value for w in weights], [w.perturbed for w in weights], values)


def _by_chunks_backward(score, chunk: int, saved, grads):
    weights, trained, (hidden_RxLxD, target_RxL, wanted_RxL, n_used) = saved
    grads = tuple(jnp.zeros(g.aval.shape, g.aval.dtype) if isinstance(g, SymbolicZero) else g
                  for g in grads)
    # Frozen weights get no gradient: it would cost as much as that of all hidden states.
    pick = lambda tree: [x for x, t in zip(tree, trained) if t]  # noqa: E731

    def step(i, total):
        hidden, target, wanted, *grad = _columns(
            (hidden_RxLxD, target_RxL, wanted_RxL, *grads), i, chunk)

        def again(some, hidden):
            some = iter(some)
            whole = [next(some) if t else w for w, t in zip(weights, trained)]
            return score(whole, hidden, target, wanted)

        d_weights, d_hidden = jax.vjp(again, pick(weights), hidden)[1](tuple(grad))
        return (jax.tree.map(lambda total, d: total + d.astype(total.dtype), total[0], d_weights),
                _with_columns(total[1], d_hidden, i, chunk))

    # Added up in float32 whatever the weights are in, and rounded once.
    zeros = [jnp.zeros(w.shape, jnp.float32) for w in pick(weights)], jnp.zeros_like(hidden_RxLxD)
    d_weights, d_hidden = jax.lax.fori_loop(0, n_used, step, zeros)
    d_weights = iter([d.astype(w.dtype) for d, w in zip(d_weights, pick(weights))])
    return [next(d_weights) if t else None for t in trained], d_hidden, None, None, None


_by_chunks.defvjp(_by_chunks_forward, _by_chunks_backward, symbolic_zeros=True)


def _columns(arrays, i, chunk: int):
    """Chunk number i of the columns of each array."""
    return tuple(jax.lax.dynamic_slice_in_dim(x, i * chunk, chunk, axis=1) for x in arrays)


def _with_columns(arrays, parts, i, chunk: int):
    """The arrays with chunk number i replaced."""
    return jax.tree.map(lambda x, part: jax.lax.dynamic_update_slice_in_dim(
        x, part, i * chunk, axis=1), arrays, parts)


@jax.custom_vjp
def permute_columns(x_RxLxD: jax.Array, order_RxL: jax.Array, inverse_RxL: jax.Array) -> jax.Array:
    """Each row's columns in the given order. The gradient of a permutation is the inverse
    permutation: a gather, where the generic rule would scatter."""
    del inverse_RxL
    return jax.vmap(lambda x, order: x[order])(x_RxLxD, order_RxL)


def _permute_forward(x_RxLxD, order_RxL, inverse_RxL):
    return permute_columns(x_RxLxD, order_RxL, inverse_RxL), (order_RxL, inverse_RxL)


def _permute_backward(saved, grad_RxLxD):
    order_RxL, inverse_RxL = saved
    return permute_columns(grad_RxLxD, inverse_RxL, order_RxL), None, None


permute_columns.defvjp(_permute_forward, _permute_backward)
