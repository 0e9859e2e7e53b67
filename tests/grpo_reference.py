"""The whole update in its plain form: every trajectory alone in its row, all logits at once,
the loss and its derivative by log-prob in float64 loops."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_cases import tiny_decoder
from loss_reference import kl_of, policy_of

from rods_jax.grpo.advantage import AdvantageConfig, Baseline
from rods_jax.grpo.batch import BatchShape
from rods_jax.grpo.loss import Aggregation, LossConfig, RatioLevel
from rods_jax.grpo.optimizer import OptimizerConfig, make_optimizer
from rods_jax.grpo.update import UpdateConfig, make_update
from rods_jax.models.attention import causal_mask
from rods_jax.types import EndReason

SHAPE = BatchShape(micro=6, rows=2, length=16, tasks=3, group=4)
PLAIN = UpdateConfig(logit_chunk=4)
KL = UpdateConfig(
    loss=LossConfig(aggregation=Aggregation.TOKEN_MEAN, kl_coef=0.3, entropy_coef=0.05,
                    clip_low=0.1, clip_high=0.15, dual_clip=1.3),
    advantage=AdvantageConfig(ddof=1, dead_keep_kl=True), temperature=0.7, logit_chunk=5)


def recorder():
    """An optimizer link that keeps the last gradient in its state."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), lambda grads, *_: (grads, grads))


OPTIMIZER = optax.chain(recorder(), make_optimizer(OptimizerConfig(lr=0.01, weight_decay=0.1)))


def quick_jit(f, **kwargs):
    """These tests compile far more than they compute."""
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0}, **kwargs)


@cache
def update_of(config, adapted=None):
    """The jitted update, and a list that grows by one with every trace."""
    traces = []
    inner = make_update(tiny_decoder(adapted=adapted)[0], config, OPTIMIZER)

    def update(state, batch):
        traces.append(1)
        return inner(state, batch)
    return quick_jit(update), traces


def reference_advantages(rewards, config):
    advantage = np.zeros(rewards.shape)
    for t, row in enumerate(rewards.astype(np.float64)):
        r = row[np.isfinite(row)]
        if r.var() > 1e-8:
            a = config.advantage
            base = r.mean()
            if a.baseline is Baseline.LEAVE_ONE_OUT:
                base = (r.sum() - row) / (r.size - 1)
            std = r.std(ddof=a.ddof) + a.eps if a.scale_by_std else 1.0
            advantage[t] = np.nan_to_num((row - base) / std)
    return advantage


def rows_alone(groups, rewards, config):
    """Every trajectory that carries loss, alone in a row of L: tokens, scored, sampler, A."""
    advantage, length = reference_advantages(rewards, config), SHAPE.length
    tokens, scored, sampler, factor = [], [], [], []
    for t, group in enumerate(groups):
        live = np.nanvar(rewards[t].astype(np.float64)) > 1e-8
        for g, r in enumerate(group):
            cut = r is not None and config.loss.mask_truncated and r.end is EndReason.TOKEN_LIMIT
            if r is None or cut or not (live or config.advantage.dead_keep_kl):
                continue
            fill = (0, length - len(r.tokens_L))
            tokens.append(np.pad(r.tokens_L, fill))
            scored.append(np.pad(r.author_L == 1, fill))
            sampler.append(np.pad(r.logprobs_L, fill))
            factor.append(advantage[t, g])
    return [np.stack(x) for x in (tokens, scored, sampler)] + [np.asarray(factor)]


@cache
def dense():
    """Jitted (params, tokens, temperature, d_logp, d_entropy) -> log-prob and entropy of
    tokens 1 .. L-1, and the gradient by params for these derivatives."""
    decoder = tiny_decoder()[0]

    def scores(params, tokens, temperature):
        length = tokens.shape[1]
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        hidden, _ = decoder.apply({"params": params}, tokens, positions, causal_mask(length))
        logits = decoder.apply({"params": params}, hidden, method="logits") / temperature
        logp = jax.nn.log_softmax(logits)[:, :-1]
        entropy = -(jnp.exp(logp) * logp).sum(-1)
        return jnp.take_along_axis(logp, tokens[:, 1:, None], -1)[..., 0], entropy

    def f(params, tokens, temperature, d_logp, d_entropy):
        values, pull = jax.vjp(lambda p: scores(p, tokens, temperature), params)
        return *values, pull((d_logp, d_entropy))[0]
    return quick_jit(f)


def dense_scores(params, tokens, temperature, d_logp=None, d_entropy=None):
    """As `dense`, any number of rows up to one for each trajectory of a batch."""
    n, length = tokens.shape
    zeros = np.zeros((n, length - 1))
    d_logp, d_entropy = (zeros if d is None else d for d in (d_logp, d_entropy))
    rows = ((0, SHAPE.tasks * SHAPE.group - n), (0, 0))
    logp, entropy, grads = dense()(
        params, np.pad(tokens, rows), np.float32(temperature),
        *(np.pad(d, rows).astype(np.float32) for d in (d_logp, d_entropy)))
    return np.asarray(logp[:n], np.float64), np.asarray(entropy[:n], np.float64), grads


def reference_rollout(logp, sampler, ref, a, c):
    """Losses of a rollout's tokens without their entropy terms, and the derivatives of the sum
    by log-prob."""
    corrected = c.truncated_importance is not None
    gaps = np.zeros(len(logp)) if corrected else logp - sampler
    if c.ratio is RatioLevel.SEQUENCE:
        gaps = np.full(len(logp), gaps.mean())
    policy = np.array([policy_of(gap, a, c)[:2] for gap in gaps])
    if corrected:
        policy *= np.minimum(np.exp(logp - sampler), c.truncated_importance)[:, None]
    if c.ratio is RatioLevel.SEQUENCE:
        policy[:, 1] = policy[:, 1].mean()
    kl = np.array([kl_of(d, c) for d in ref - logp])
    return (policy + c.kl_coef * kl).T


def reference(params, ref_params, rows, config):
    """Loss and gradient of the whole batch."""
    tokens, scored, sampler, factor = rows
    c = config.loss
    logp, entropy, _ = dense_scores(params, tokens, config.temperature)
    ref = dense_scores(ref_params or params, tokens, config.temperature)[0]
    total, d_logp, d_entropy = 0.0, np.zeros(logp.shape), np.zeros(logp.shape)
    for i, row in enumerate(scored[:, 1:]):
        if c.aggregation is Aggregation.TOKEN_MEAN:
            weight = 1 / scored.sum()
        elif c.aggregation is Aggregation.SEQUENCE_MEAN:
            weight = 1 / (len(tokens) * row.sum())
        else:
            weight = 1 / (len(tokens) * c.constant_length)
        at = np.flatnonzero(row)
        loss, slope = reference_rollout(
            logp[i, at], sampler[i, at + 1].astype(np.float64), ref[i, at], factor[i], c)
        total += weight * (loss - c.entropy_coef * entropy[i, at]).sum()
        d_logp[i, at], d_entropy[i, at] = weight * slope, -weight * c.entropy_coef
    return total, dense_scores(params, tokens, config.temperature, d_logp, d_entropy)[2]


def gradient(state):
    return state.opt_state[0]


def assert_close(a, b, atol=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol, rtol=1e-5), a, b)
