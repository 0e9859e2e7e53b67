"""Optimizers: a typed config in, an optax transformation out."""

from __future__ import annotations

import dataclasses
import enum
import math

import jax
import optax


class OptimizerKind(str, enum.Enum):
    ADAMW = "adamw"
    LION = "lion"  # one moment instead of two
    SGD = "sgd"  # betas[0] is the momentum


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """lr: the peak. warmup: updates of linear rise from 0, 0 for none. decay_steps: updates
    after the warm-up over which lr falls along a cosine to lr * final_share, 0 for constant.
    weight_decay: decoupled, on matrices only (norms and biases are spared). clip_norm: of
    the whole gradient, None for none."""

    kind: OptimizerKind = OptimizerKind.ADAMW
    lr: float = 1e-6
    warmup: int = 0
    decay_steps: int = 0
    final_share: float = 0.1
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self):
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"lr is {self.lr}: give a positive number")
        if self.warmup < 0 or self.decay_steps < 0:
            raise ValueError(f"warmup {self.warmup} and decay_steps {self.decay_steps}: "
                             "give update counts, 0 or more")
        if not 0 <= self.final_share <= 1:
            raise ValueError(f"final_share is {self.final_share}: give a number from 0 to 1")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay is {self.weight_decay}: give 0 or more")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm is {self.clip_norm}: give a positive bound or None")
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"betas are {self.betas}: give two numbers from 0 to below 1")


def schedule(config: OptimizerConfig) -> optax.Schedule:
    """Learning rate by update count."""
    if config.decay_steps:
        after = optax.cosine_decay_schedule(config.lr, config.decay_steps, config.final_share)
    else:
        after = optax.constant_schedule(config.lr)
    if not config.warmup:
        return after
    # The first update already moves: its rate is lr / warmup, not 0.
    rise = optax.linear_schedule(config.lr / config.warmup, config.lr, config.warmup - 1) \
        if config.warmup > 1 else optax.constant_schedule(config.lr)
    return optax.join_schedules([rise, after], [config.warmup])


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    b1, b2 = config.betas
    rate = schedule(config)
    if config.kind is OptimizerKind.ADAMW:
        scale = optax.scale_by_adam(b1=b1, b2=b2, eps=config.eps)
    elif config.kind is OptimizerKind.LION:
        scale = optax.scale_by_lion(b1=b1, b2=b2)
    else:
        scale = optax.trace(decay=b1) if b1 else optax.identity()
    parts = [scale]
    if config.clip_norm is not None:
        parts.insert(0, optax.clip_by_global_norm(config.clip_norm))
    if config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=decayed))
    return optax.chain(*parts, optax.scale_by_learning_rate(rate))


def decayed(params):
    """Tree of bool: False for norm scales and biases, told by name because layers are
    stacked and their scales are matrices too."""
    def is_matrix(path, _):
        name = jax.tree_util.keystr(path[-1:])
        return "norm" not in name and "bias" not in name
    return jax.tree_util.tree_map_with_path(is_matrix, params)
