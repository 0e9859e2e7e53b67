"""Optimizer configs against their formulas."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rods_jax.grpo.optimizer import (
    OptimizerConfig, OptimizerKind, decayed, make_optimizer, schedule)

PARAMS = {"embed": jnp.ones((2, 2)), "final_norm": jnp.ones(2),
          "layers": {"q": jnp.ones((1, 2, 2)), "q_bias": jnp.ones((1, 2)),
                     "q_norm": jnp.ones((1, 2))}}


def test_schedule_rises_then_stays_or_falls():
    rate = schedule(OptimizerConfig(lr=0.4, warmup=4))
    np.testing.assert_allclose([rate(i) for i in range(6)], [0.1, 0.2, 0.3, 0.4, 0.4, 0.4],
                               rtol=1e-6)
    rate = schedule(OptimizerConfig(lr=1.0, warmup=1, decay_steps=10, final_share=0.2))
    np.testing.assert_allclose([rate(0), rate(1), rate(6), rate(11), rate(99)],
                               [1.0, 1.0, 0.6, 0.2, 0.2], rtol=1e-6)


def test_decay_spares_norms_and_biases():
    assert decayed(PARAMS) == {"embed": True, "final_norm": False,
                               "layers": {"q": True, "q_bias": False, "q_norm": False}}
    optimizer = make_optimizer(OptimizerConfig(lr=0.1, weight_decay=0.5))
    zeros = {"embed": jnp.zeros((2, 2)), "final_norm": jnp.zeros(2),
             "layers": {k: jnp.zeros_like(v) for k, v in PARAMS["layers"].items()}}
    updates, _ = optimizer.update(zeros, optimizer.init(PARAMS), PARAMS)
    np.testing.assert_allclose(updates["embed"], np.full((2, 2), -0.05), rtol=1e-6)
    np.testing.assert_array_equal(updates["final_norm"], [0, 0])
    np.testing.assert_array_equal(updates["layers"]["q_norm"], [[0, 0]])


@pytest.mark.parametrize("kind", list(OptimizerKind))
def test_two_steps_by_formula(kind):
    config = OptimizerConfig(kind=kind, lr=0.1, clip_norm=1.0, betas=(0.9, 0.99))
    optimizer = make_optimizer(config)
    params, state = {"w": jnp.asarray([1.0, -2.0])}, None
    state = optimizer.init(params)
    w, m, v = np.array([1.0, -2.0]), np.zeros(2), np.zeros(2)
    for step, g in enumerate((np.array([3.0, 4.0]), np.array([0.3, -0.4])), 1):
        updates, state = optimizer.update({"w": jnp.asarray(g, jnp.float32)}, state, params)
        params = optax.apply_updates(params, updates)
        g = g / max(1.0, np.linalg.norm(g))
        if kind is OptimizerKind.ADAMW:
            m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
            w = w - 0.1 * (m / (1 - 0.9 ** step)) / (np.sqrt(v / (1 - 0.99 ** step)) + 1e-8)
        elif kind is OptimizerKind.LION:
            w, m = w - 0.1 * np.sign(0.9 * m + 0.1 * g), 0.99 * m + 0.01 * g
        else:
            m = 0.9 * m + g
            w = w - 0.1 * m
        np.testing.assert_allclose(params["w"], w, atol=1e-5)


@pytest.mark.parametrize("bad,match", [
    ({"lr": 0.0}, "lr is 0.0"), ({"warmup": -1}, "warmup -1"),
    ({"final_share": 2.0}, "final_share"),
    ({"weight_decay": -1.0}, "weight_decay"), ({"clip_norm": 0.0}, "clip_norm"),
    ({"betas": (0.9, 1.0)}, "betas")])
def test_bad_config_is_named(bad, match):
    with pytest.raises(ValueError, match=f"^{match}"):
        OptimizerConfig(**bad)
