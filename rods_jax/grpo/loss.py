"""The GRPO loss, one token at a time, and the weights that turn tokens into one number.

With ratio = exp(logp - old), advantage A and KL to a reference policy, a token's loss is

    max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))     (PPO, clip-higher)
    at most -A * dual_clip where A < 0                                 (dual clip)
    x min(exp(old - sampler), cap)                                     (truncated importance)
    + kl_coef * KL - entropy_coef * entropy

`old` is the sampler's own log-prob; with a truncated importance weight it is the trainer's
log-prob before this update, and the weight carries the gap between the two. One update
takes one gradient step, so the trainer's log-prob before it is the current one without its
gradient: the ratio is then 1 and the weight does all the correcting.

The ratio may also be one of the whole sequence (GSPO, https://arxiv.org/abs/2507.18071):

    ratio = exp(mean over the sequence's tokens that carry loss of (logp - old))

Each token of the sequence gets it, both clips act on it, and its gradient reaches every token
through the mean. A sequence is a row of ids: the whole rollout where the chat format appends,
one turn where it rewrites earlier turns. Such ratios lie far closer to 1 than a token's; the
paper clips at 1 - 3e-4 and 1 + 4e-4. The importance weight stays a token's own.

All else is elementwise over arrays of any one shape. Masked tokens are replaced before any
exponential, so what they hold can poison neither a value nor a gradient.
"""

from __future__ import annotations

import dataclasses
import enum
import math

import flax.struct
import jax
import jax.numpy as jnp

# Log-ratios are bounded by this before exp: e^20 = 5e8 is far outside every clip and finite.
_MAX_LOG_RATIO = 20.0


class Aggregation(str, enum.Enum):
    TOKEN_MEAN = "token_mean"  # mean over all tokens that carry loss
    SEQUENCE_MEAN = "sequence_mean"  # mean over sequences of the mean over their tokens
    CONSTANT = "constant"  # mean over sequences of (sum over tokens / constant_length)


class RatioLevel(str, enum.Enum):
    """Whose log-ratios a token's ratio is made of."""

    TOKEN = "token"  # its own
    SEQUENCE = "sequence"  # the mean over its sequence


class KlEstimator(str, enum.Enum):
    """Of KL(policy, reference) from one sampled token, with d = ref - logp."""

    K1 = "k1"  # -d
    K2 = "k2"  # d^2 / 2
    K3 = "k3"  # exp(d) - 1 - d: unbiased as a value, never negative, low variance


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """ratio: of a token or of its sequence. clip_low, clip_high: the ratio's band around 1.
    dual_clip: above 1, or None. constant_length: tokens, the divisor under CONSTANT.
    kl_cap: bound on |KL| of a token. truncated_importance: cap of the sampler correction,
    None for the plain ratio to the sampler. mask_truncated: rollouts that hit a limit carry
    no loss (they stay in their group's statistics)."""

    ratio: RatioLevel = RatioLevel.TOKEN
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = 10.0
    aggregation: Aggregation = Aggregation.SEQUENCE_MEAN
    constant_length: float = 1024.0
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = KlEstimator.K3
    kl_cap: float = 10.0
    entropy_coef: float = 0.0
    truncated_importance: float | None = None
    mask_truncated: bool = False

    def __post_init__(self):
        if not 0 <= self.clip_low <= 1:
            raise ValueError(f"clip_low is {self.clip_low}: give a number from 0 to 1")
        for name in ("clip_high", "kl_coef", "entropy_coef"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}: give a finite number, 0 or more")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip is {self.dual_clip}: give a number above 1 or None")
        for name in ("constant_length", "kl_cap"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}: give a positive number")
        if self.truncated_importance is not None and not self.truncated_importance > 0:
            raise ValueError(f"truncated_importance is {self.truncated_importance}: give a "
                             "positive cap or None")


@flax.struct.dataclass
class TokenTerms:
    """Per token, 0 where masked. loss: all terms. policy, kl, entropy: the single terms
    before their coefficients. low, high, dual, cut: bool, where the lower clip, the upper
    clip, the dual clip or the importance cap holds. gap: |logp - sampler|."""

    loss: jax.Array
    policy: jax.Array
    kl: jax.Array
    entropy: jax.Array
    low: jax.Array
    high: jax.Array
    dual: jax.Array
    cut: jax.Array
    gap: jax.Array


def bounded_ratio(log_new, log_old, mask) -> jax.Array:
    """exp(log_new - log_old), 1 where masked. Beyond e^20 either way the value stays at the
    bound and the gradient is 0."""
    return _bounded_exp(jnp.where(mask, log_new - log_old, 0.0))


def sequence_ratio(log_new, log_old, mask, sequence) -> jax.Array:
    """exp of the mean of log_new - log_old over the sequence's tokens under the mask, bounded
    as `bounded_ratio`; of every token of the sequence, masked or not. sequence: see
    `token_terms`."""
    log_ratio = jnp.where(mask, log_new - log_old, 0.0)
    add = lambda x: jnp.zeros(x.size, x.dtype).at[sequence].add(x)  # noqa: E731
    mean = add(log_ratio) / jnp.maximum(add(mask.astype(log_ratio.dtype)), 1.0)
    return _bounded_exp(mean[sequence])


def segment_numbers(segments_RxL: jax.Array) -> jax.Array:
    """int32 [R, L], each below R * L: the sequences of packed rows, for `token_terms`.
    segments_RxL: counted from 1 in each row, 0 where padded."""
    rows, length = segments_RxL.shape
    return jnp.arange(rows)[:, None] * length + jnp.maximum(segments_RxL - 1, 0)


def _bounded_exp(log_ratio) -> jax.Array:
    return jnp.exp(jnp.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))


def kl_terms(logp, ref_logp, mask, config: LossConfig) -> jax.Array:
    """KL to the reference per token, bounded by kl_cap (gradient 0 beyond); 0 where masked."""
    d = jnp.where(mask, ref_logp - logp, 0.0)
    d = jnp.clip(d, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    if config.kl_estimator is KlEstimator.K1:
        kl = -d
    elif config.kl_estimator is KlEstimator.K2:
        kl = 0.5 * jnp.square(d)
    else:
        kl = jnp.exp(d) - 1.0 - d
    return jnp.clip(kl, -config.kl_cap, config.kl_cap)


def token_terms(logp, sampler_logp, advantage, mask, entropy, ref_logp,
                config: LossConfig, sequence=None) -> TokenTerms:
    """All terms per token; arrays of one shape, mask bool.

    ref_logp: the reference policy's log-prob, None exactly where kl_coef is 0.
    entropy: of the policy at each token, in nats.
    sequence: int32, whose token it is: a number from 0 to the arrays' size - 1, another one
        for each sequence. Masked tokens may hold any of them. Needed for RatioLevel.SEQUENCE.
        With truncated_importance that ratio is 1 too, and each of the n tokens gets the
        gradient -A * (sum over the sequence of min(exp(old - sampler), cap)) / n.
    """
    by_sequence = config.ratio is RatioLevel.SEQUENCE
    if by_sequence and sequence is None:
        raise ValueError("the ratio is that of a sequence: name each token's in `sequence`")
    if (ref_logp is None) != (config.kl_coef == 0):
        raise ValueError(f"kl_coef is {config.kl_coef} and the reference log-probs are "
                         f"{'missing' if ref_logp is None else 'given'}: the one needs the other")
    advantage = jnp.where(mask, advantage, 0.0)
    cap = config.truncated_importance
    old = sampler_logp if cap is None else jax.lax.stop_gradient(logp)
    ratio = (sequence_ratio(logp, old, mask, sequence) if by_sequence
             else bounded_ratio(logp, old, mask))
    # The maximum of the two products, written out so that on a bound, where clipped and plain
    # ratio are equal, the whole gradient flows: with truncated_importance and a band that
    # begins or ends at 1 every ratio lies there.
    low = (advantage < 0) & (ratio < 1.0 - config.clip_low)
    high = (advantage > 0) & (ratio > 1.0 + config.clip_high)
    clipped = jnp.where(low, 1.0 - config.clip_low, 1.0 + config.clip_high)
    policy = -advantage * jnp.where(low | high, clipped, ratio)
    dual = jnp.zeros_like(mask)
    if config.dual_clip is not None:
        bound = -advantage * config.dual_clip
        dual = (advantage < 0) & (policy > bound)
        policy = jnp.where(dual, bound, policy)
    cut = jnp.zeros_like(mask)
    if cap is not None:
        weight = bounded_ratio(jax.lax.stop_gradient(logp), sampler_logp, mask)
        cut = mask & (weight > cap)
        policy = policy * jnp.minimum(weight, cap)

    entropy = jnp.where(mask, entropy, 0.0)
    kl = jnp.zeros_like(policy) if ref_logp is None else kl_terms(logp, ref_logp, mask, config)
    loss = policy + config.kl_coef * kl - config.entropy_coef * entropy
    return TokenTerms(
        loss=loss, policy=policy, kl=kl, entropy=entropy,
        low=low, high=high, dual=dual, cut=cut,
        gap=jnp.abs(jnp.where(mask, logp - sampler_logp, 0.0)))


def token_weights(mask, traj, n_traj: int, config: LossConfig) -> tuple[jax.Array, jax.Array]:
    """Weights w so that sum(w * loss) is the loss of the whole batch; and the number of
    sequences that carry loss, float32.

    mask: bool, tokens that carry loss. traj: int32 < n_traj, whose token it is. Only
    sequences with at least one such token are counted, so that the loss does not depend on
    whether sequences without any are packed. All 0 where no token carries loss.
    """
    count = jnp.zeros(n_traj, jnp.float32).at[traj].add(mask.astype(jnp.float32))
    n_sequences = (count > 0).sum().astype(jnp.float32)
    if config.aggregation is Aggregation.TOKEN_MEAN:
        weight = jnp.full(n_traj, 1.0 / jnp.maximum(count.sum(), 1.0))
    elif config.aggregation is Aggregation.SEQUENCE_MEAN:
        weight = 1.0 / (jnp.maximum(count, 1.0) * jnp.maximum(n_sequences, 1.0))
    else:
        weight = jnp.full(n_traj, 1.0 / (config.constant_length * jnp.maximum(n_sequences, 1.0)))
    return jnp.where(mask, weight[traj], 0.0), n_sequences
