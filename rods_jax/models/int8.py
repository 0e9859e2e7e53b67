"""Weights as 8-bit integers, one scale an output channel, for inference alone.

    scale = max |w| over the inputs / 127        q = round(w / scale)
    y = (x q) scale                              |w - q scale| <= scale / 2

Only weights are rounded: activations stay as they are, and every q is a number of bfloat16,
so the product is that of the rounded weights whatever the compute dtype. Of a weight
`layers/q` [Lyr, *in, *out] the scales are a parameter more, `layers/q_scale` float32
[Lyr, *out]; a tree that holds them belongs to a ModelConfig with `int8_weights`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rods_jax.models.config import PROJECTIONS
from rods_jax.models.lora import input_axes

SCALE = "_scale"  # end of the parameters' names
NAMES = tuple(PROJECTIONS.values())  # of the weights that are kept so, in every layer

NO_GRADIENT = ("int8 weights are for rollouts and have no gradient: train with int8_weights "
               "False in the model's config, and set rollout_weights in the run's")

_LARGEST = 127  # -128 stays unused, so that a weight and its negative round alike


def quantize(name: str, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(q int8 of the same shape, scale float32 [Lyr, *out]) of the stacked weight `name`.
    A weight that is not finite makes what its channel gives NaN."""
    wide, inputs = weights.astype(jnp.float32), tuple(range(1, 1 + input_axes(name)))
    largest = jnp.max(jnp.abs(wide), inputs, keepdims=True)
    # A channel of zeros needs a scale too, and one that no division makes subnormal.
    scale = jnp.maximum(largest / _LARGEST, jnp.finfo(jnp.float32).tiny)
    return jnp.round(wide / scale).astype(jnp.int8), jnp.squeeze(scale, inputs)


@jax.custom_jvp
def scaled(y: jax.Array, scale: jax.Array) -> jax.Array:
    """y [..., *out] times the scales of its channels. ValueError where it is differentiated:
    a gradient would be that of the rounded weights, and none would reach the weights."""
    return y * scale


@scaled.defjvp
def _refuse(primals, tangents):
    raise ValueError(NO_GRADIENT)

