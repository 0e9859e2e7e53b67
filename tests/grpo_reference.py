"""The whole update in its plain form: every trajectory alone in its row, all logits at once,
the loss and its derivative by log-prob in float64 loops."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_cases import tiny_decoder
from rods_jax.grpo.advantage import AdvantageConfig, Baseline
from rods_jax.grpo.batch import BatchShape
from rods_jax.grpo.loss import Aggregation, KlEstimator, LossConfig
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


def reference_token(x, sampler, ref, a, c):
    """Loss of one token without its entropy term, and the derivative by its log-prob x."""
    if c.truncated_importance is None:
        ratio = math.exp(x - sampler)
        clipped = min(max(ratio, 1 - c.clip_low), 1 + c.clip_high)
        loss, slope = -a * ratio, -a * ratio
        if -a * clipped > loss:
            loss, slope = -a * clipped, 0.0
        if a < 0 and loss > -a * c.dual_clip:
            loss, slope = -a * c.dual_clip, 0.0
    else:
        loss = slope = -a * min(math.exp(x - sampler), c.truncated_importance)
    d = ref - x
    if c.kl_estimator is KlEstimator.K3:
        kl, kl_slope = math.exp(d) - 1 - d, 1 - math.exp(d)
    else:
        kl, kl_slope = d * d / 2, -d
    return loss + c.kl_coef * kl, slope + c.kl_coef * kl_slope


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
        for j in np.flatnonzero(row):
            loss, slope = reference_token(
                logp[i, j], float(sampler[i, j + 1]), ref[i, j], factor[i], c)
            total += weight * (loss - c.entropy_coef * entropy[i, j])
            d_logp[i, j], d_entropy[i, j] = weight * slope, -weight * c.entropy_coef
    return total, dense_scores(params, tokens, config.temperature, d_logp, d_entropy)[2]


def gradient(state):
    return state.opt_state[0]


def assert_close(a, b, atol=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol, rtol=1e-5), a, b)
