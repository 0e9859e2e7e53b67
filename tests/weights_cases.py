"""A small model, and its weights as rollouts get them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from rods_jax.models.attention import causal_mask
from rods_jax.models.config import ModelConfig
from rods_jax.models.decoder import Decoder, init_params
from rods_jax.rollout.weights import Precision, make_weights

TOY = ModelConfig(vocab_size=48, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8,
                  d_ff=64, qkv_bias=True, qk_norm=True, tie_embeddings=False)
ROUNDED = (Precision.BF16, Precision.INT8)
IDS = np.random.default_rng(5).integers(0, TOY.vocab_size, (3, 12)).astype(np.int32)


def noisy(config=TOY, seed=0):
    """Weights of the size that init gives them; biases and norms that are not all alike."""
    rng = np.random.default_rng(seed)

    def leaf(path, x):
        name = path[-1].key
        fan = {"o": 2, "embed": 1}.get(name, 1)
        size = 0.2 if "norm" in name or "bias" in name else np.prod(x.shape[1:1 + fan]) ** -0.5
        return jnp.asarray(size * rng.standard_normal(x.shape) + ("norm" in name), jnp.float32)
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return jax.tree_util.tree_map_with_path(leaf, shapes)


@functools.partial(jax.jit, static_argnums=0)
def _logits(decoder, params, ids):
    at = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    hidden, _ = decoder.apply({"params": params}, ids, at, causal_mask(ids.shape[1]))
    return decoder.apply({"params": params}, hidden, method="logits")


def logits(decoder, params, ids=IDS):
    return np.asarray(_logits(decoder, params, ids))


def published(precision, params, config=TOY, **more):
    decoder, weights = make_weights(Decoder(config), precision)
    return decoder, weights.publish(params, **more)[0]


def nbytes(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)
