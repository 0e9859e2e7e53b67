"""Advantages and the loss in float64 loops, with the derivatives written out by hand."""

import math

import numpy as np

from rods_jax.grpo.advantage import Baseline, Spread
from rods_jax.grpo.loss import Aggregation, KlEstimator, RatioLevel

FAR = 20.0  # beyond it a log-ratio counts as this much and has no gradient
BOUNDS = ("low", "high", "dual", "cut")


def group_statistics(rewards, valid, config):
    """mean, var, live, advantage."""
    tasks, group = rewards.shape
    mean, var, live = np.zeros(tasks), np.zeros(tasks), np.zeros(tasks, bool)
    advantage = np.zeros((tasks, group))
    members = [[g for g in range(group) if valid[t, g] and math.isfinite(rewards[t, g])]
               for t in range(tasks)]
    everyone = [float(rewards[t, g]) for t in range(tasks) for g in members[t]]
    for t in range(tasks):
        r = [float(rewards[t, g]) for g in members[t]]
        if not r:
            continue
        n = len(r)
        mean[t] = sum(r) / n
        squares = sum((x - mean[t]) ** 2 for x in r)
        var[t] = squares / n
        live[t] = n >= 2 and var[t] > config.var_floor
        if not live[t]:
            continue
        std = 1.0
        if config.scale_by_std:
            if config.spread is Spread.GROUP:
                std = math.sqrt(squares / (n - config.ddof)) + config.eps
            else:
                m = sum(everyone) / len(everyone)
                total = sum((x - m) ** 2 for x in everyone)
                std = math.sqrt(total / max(len(everyone) - config.ddof, 1)) + config.eps
        for g, x in zip(members[t], r):
            base = mean[t]
            if config.baseline is Baseline.LEAVE_ONE_OUT:
                base = (sum(r) - x) / (n - 1)
            a = (x - base) / std
            if config.clip is not None:
                a = min(max(a, -config.clip), config.clip)
            advantage[t, g] = a
    return mean, var, live, advantage


def _exponential(x):
    """exp and its derivative."""
    if abs(x) > FAR:
        return math.exp(math.copysign(FAR, x)), 0.0
    return math.exp(x), math.exp(x)


def policy_of(log_ratio, a, c):
    """Value, derivative by the log-ratio, and the names of the bounds that hold."""
    ratio, slope = _exponential(log_ratio)
    low, high = 1 - c.clip_low, 1 + c.clip_high
    value = max(-a * ratio, -a * min(max(ratio, low), high))
    slope = -a * slope if value == -a * ratio else 0.0
    hold = {"low"} if a < 0 and ratio < low else {"high"} if a > 0 and ratio > high else set()
    if c.dual_clip is not None and a < 0 and value > -a * c.dual_clip:
        value, slope, hold = -a * c.dual_clip, 0.0, hold | {"dual"}
    return value, slope, hold


def kl_of(d, c):
    """Value and derivative by the policy's log-prob, with d = ref - logp."""
    free, d = abs(d) <= FAR, min(max(d, -FAR), FAR)
    kl, slope = {KlEstimator.K1: (-d, 1.0), KlEstimator.K2: (d * d / 2, -d),
                 KlEstimator.K3: (math.exp(d) - 1 - d, 1 - math.exp(d))}[c.kl_estimator]
    if abs(kl) > c.kl_cap:
        return math.copysign(c.kl_cap, kl), 0.0
    return kl, slope if free else 0.0


def weights_of(live, traj, c):
    """{token: weight}"""
    length = {t: sum(traj[j] == t for j in live) for t in {traj[j] for j in live}}
    n = len(length)
    each = {Aggregation.TOKEN_MEAN: lambda t: 1 / len(live),
            Aggregation.SEQUENCE_MEAN: lambda t: 1 / (n * length[t]),
            Aggregation.CONSTANT: lambda t: 1 / (n * c.constant_length)}[c.aggregation]
    return {i: each(traj[i]) for i in live}


def loss_of(logp, sampler, advantage, mask, entropy, ref, traj, sequence, c):
    """terms: {name: [n]} of single tokens. total: the loss of all. d_logp, d_entropy: [n]."""
    terms = {k: np.zeros(len(logp)) for k in ("loss", "policy", "kl", "entropy", "gap", *BOUNDS)}
    total, d_logp, d_entropy = 0.0, np.zeros(len(logp)), np.zeros(len(logp))
    live = [i for i in range(len(logp)) if mask[i]]
    corrected = c.truncated_importance is not None
    for i, weight in weights_of(live, traj, c).items():
        made_of = [i]
        if c.ratio is RatioLevel.SEQUENCE:
            made_of = [j for j in live if sequence[j] == sequence[i]]
        gaps = [0.0 if corrected else logp[j] - sampler[j] for j in made_of]
        policy, slope, hold = policy_of(sum(gaps) / len(gaps), advantage[i], c)
        if corrected:
            w = _exponential(logp[i] - sampler[i])[0]
            hold |= {"cut"} if w > c.truncated_importance else set()
            w = min(w, c.truncated_importance)
            policy, slope = policy * w, slope * w
        for j in made_of:
            d_logp[j] += weight * slope / len(made_of)
        kl = 0.0
        if c.kl_coef:
            kl, slope = kl_of(ref[i] - logp[i], c)
            d_logp[i] += weight * c.kl_coef * slope
        d_entropy[i] = -weight * c.entropy_coef
        loss = policy + c.kl_coef * kl - c.entropy_coef * entropy[i]
        total += weight * loss
        for name, value in dict(loss=loss, policy=policy, kl=kl, entropy=entropy[i],
                                gap=abs(logp[i] - sampler[i]), **dict.fromkeys(hold, 1)).items():
            terms[name][i] = value
    return terms, total, d_logp, d_entropy
