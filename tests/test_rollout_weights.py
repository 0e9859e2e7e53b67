"""Rollout weights on one device: what rounding costs, and what publishing keeps."""

import dataclasses

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import models_reference as reference
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rods_jax import metrics
from rods_jax.grpo.optimizer import OptimizerConfig, make_optimizer
from rods_jax.grpo.update import UpdateConfig, make_update
from rods_jax.models import int8, lora
from rods_jax.models.attention import causal_mask
from rods_jax.models.config import LoraConfig
from rods_jax.models.decoder import Decoder
from rods_jax.models.sharding import make_mesh
from rods_jax.rollout.weights import Precision, local_mesh, make_weights
from weights_cases import IDS, ROUNDED, TOY, equal, logits, nbytes, noisy, published

LORA = LoraConfig("q_proj|o_proj|down_proj", rank=2, alpha=4.0)


# ---------------------------------------------------------------- int8


# Numbers that XLA takes for zero, and whose quotients it does, follow no formula.
@given(hnp.arrays(np.float32, (2, 5, 3), elements=st.floats(-1e6, 1e6, width=32).map(
    lambda x: x if abs(x) > 1e-30 else 0.0)))
def test_quantizing_follows_its_formula(w):
    q, scale = (np.asarray(x) for x in int8.quantize("up", jnp.asarray(w)))
    assert (q.dtype, scale.dtype, q.shape, scale.shape) == (np.int8, np.float32, w.shape, (2, 3))
    largest = np.abs(w.astype(np.float64)).max(1)
    np.testing.assert_allclose(scale, largest / 127, rtol=1e-6, atol=2e-38)
    step = scale.astype(np.float64)[:, None]
    np.testing.assert_allclose(q, w / step, atol=0.5001)  # to the nearest of the steps
    assert (np.abs(w - q * step) <= step / 2 * (1 + 1e-4)).all()
    assert ((np.abs(q).max(1) == 127) | (largest < 1e-35)).all() and q.min() >= -127


def test_a_channel_of_zeros_and_one_that_is_not_finite():
    w = np.ones((1, 4, 3), np.float32)
    w[..., 1], w[0, 2, 2] = 0, np.nan
    q, scale = int8.quantize("up", jnp.asarray(w))
    assert not q[..., 1].any() and 0 < scale[0, 1] < 1e-37
    given_back = np.asarray(q, np.float64) * np.asarray(scale)[:, None]
    np.testing.assert_allclose(given_back[..., 0], 1.0, rtol=1e-6)
    assert np.isnan(given_back[..., 2]).all()


def test_scales_belong_to_output_channels():
    _, params = published(Precision.INT8, noisy())
    layers = params["layers"]
    assert layers["q_scale"].shape == (2, 4, 8) and layers["v_scale"].shape == (2, 2, 8)
    assert layers["o_scale"].shape == (2, 32) and layers["up_scale"].shape == (2, 64)
    w = np.asarray(noisy()["layers"]["o"], np.float64)
    np.testing.assert_allclose(layers["o_scale"], np.abs(w).max((1, 2)) / 127, rtol=1e-6)


def whole(params):
    """The float32 tree that int8 weights stand for."""
    layers = {k: np.asarray(x, np.float64) for k, x in params["layers"].items()}
    scales = {name: layers.pop(name + int8.SCALE) for name in int8.NAMES}
    for name, scale in scales.items():
        lead = layers[name].ndim - scale.ndim
        layers[name] = layers[name] * np.expand_dims(scale, tuple(range(1, 1 + lead)))
    rest = {k: np.asarray(x, np.float64) for k, x in params.items() if k != "layers"}
    return rest | {"layers": layers}


def test_the_decoder_computes_with_the_weights_that_int8_stands_for():
    decoder, params = published(Precision.INT8, noisy())
    want = [reference.logits(reference.from_params(whole(params)), TOY, row) for row in IDS]
    np.testing.assert_allclose(logits(decoder, params), want, atol=2e-5)


def test_int8_costs_no_digits_under_bfloat16():
    """Every int8 number is one of bfloat16, so only activations are rounded: int8 weights are as
    near to float32 as the same weights in float32 masters."""
    config = dataclasses.replace(TOY, compute_dtype="bfloat16")
    decoder, params = published(Precision.INT8, noisy(), config)
    masters = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), whole(params))
    exact = logits(Decoder(TOY), masters)
    error = np.abs(logits(decoder, params) - exact).mean()
    assert error < 1.1 * np.abs(logits(Decoder(config), masters) - exact).mean()


# ---------------------------------------------------------------- what rounding costs


@pytest.mark.parametrize("precision, near", [(Precision.BF16, 0.02), (Precision.INT8, 0.04)])
def test_logits_stay_near_and_likeliest_tokens_mostly_the_same(precision, near):
    params = noisy()
    exact = logits(Decoder(TOY), params)
    got = logits(*published(precision, params))
    error = np.sqrt(np.square(got - exact).mean()) / exact.std()
    assert 1e-4 < error < near
    assert (got.argmax(-1) == exact.argmax(-1)).mean() > 0.9


def test_bf16_weights_are_what_a_bfloat16_decoder_reads_anyway():
    config, params = dataclasses.replace(TOY, compute_dtype="bfloat16"), noisy()
    decoder, rounded = published(Precision.BF16, params, config)
    assert decoder == Decoder(config)
    equal(logits(decoder, rounded), logits(Decoder(config), params))


def test_bytes():
    config = dataclasses.replace(TOY, d_model=64, d_ff=256, n_layers=3)
    params = noisy(config)
    _, half = published(Precision.BF16, params, config)
    assert 0.5 < nbytes(half) / nbytes(params) < 0.51
    _, quarter = published(Precision.INT8, params, config)
    bulk = lambda tree: nbytes([x for name, x in tree["layers"].items()  # noqa: E731
                                if name.removesuffix(int8.SCALE) in int8.NAMES])
    assert 0.25 < bulk(quarter) / bulk(params) < 0.27
    for name in ("embed", "head"):
        assert quarter[name].dtype == half[name].dtype == jnp.bfloat16
    for name in ("attn_norm", "q_bias", "k_norm"):
        assert quarter["layers"][name] is half["layers"][name] is params["layers"][name]
    assert quarter["final_norm"] is params["final_norm"]


# ---------------------------------------------------------------- publishing


def test_weights_as_trained_on_one_device_are_not_touched():
    params, decoder = noisy(), Decoder(TOY)
    for mesh in (None, local_mesh(make_mesh(1, 1, 1, jax.devices()[:1]))):
        reader, weights = make_weights(decoder, Precision.TRAINED, mesh)
        got, took = weights.publish(params)
        assert took == 0 and reader == decoder
        assert jax.tree.structure(got) == jax.tree.structure(params)
        for mine, trained in zip(jax.tree.leaves(got), jax.tree.leaves(params), strict=True):
            assert mine.unsafe_buffer_pointer() == trained.unsafe_buffer_pointer()
            assert mine is trained if mesh is None else mine.sharding.mesh == mesh


@pytest.mark.parametrize("precision", ROUNDED)
def test_the_trainer_keeps_its_weights_and_rollouts_theirs(precision):
    params = noisy()
    before = jax.tree.map(np.array, params)
    decoder, weights = make_weights(Decoder(TOY), precision)
    got, took = weights.publish(params)
    kept = jax.tree.map(np.array, got)
    assert took > 0
    equal(params, before)
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    moved = step(params)  # as an update does: its old weights are gone
    own = [name for name in got["layers"] if not got["layers"][name].is_deleted()]
    assert set(own) >= {*int8.NAMES} and params["embed"].is_deleted()
    equal([got["layers"][name] for name in own], [kept["layers"][name] for name in own])
    with metrics.CompileCounter() as compiles:
        later = [weights.publish(tree)[0] for tree in (moved, step(noisy(seed=1)))]
    assert compiles.counts().keys() <= {"<lambda>"}  # the step itself, for its other argument
    assert (np.asarray(later[0]["embed"]) != kept["embed"]).any()
    equal(later[0], published(precision, moved)[1])


def adapted():
    """Frozen weights in float32 and adapters that add something."""
    config = dataclasses.replace(TOY, lora=LORA)
    rng = np.random.default_rng(7)
    adapters = {name: jnp.asarray(0.1 * rng.standard_normal((TOY.n_layers, *shape)), jnp.float32)
                for name, shape in lora.shapes(config).items()}
    return config, noisy(), {"layers": adapters}


@pytest.mark.parametrize("precision", ROUNDED)
def test_adapters_stay_apart_and_frozen_weights_are_rounded_once(precision):
    config, frozen, adapters = adapted()
    decoder, weights = make_weights(Decoder(config), precision)
    first, took = weights.publish(adapters, frozen)
    assert took > 0
    for name, x in adapters["layers"].items():
        assert first["layers"][name] is x
    moved = jax.tree.map(lambda x: x * 2, adapters)
    second, took = weights.publish(moved, jax.tree.map(jnp.copy, frozen))
    assert took == 0
    for name in int8.NAMES:
        assert second["layers"][name] is first["layers"][name]
    # Joined or apart, it is one model; and its adapters do what they do beside exact weights.
    equal(first, published(precision, lora.join(frozen, adapters), config)[1])
    plain = published(precision, frozen)
    added = logits(decoder, first) - logits(*plain)
    exact = (logits(Decoder(config), lora.join(frozen, adapters))
             - logits(Decoder(TOY), frozen))
    assert np.abs(added - exact).max() < 0.1 * np.abs(exact).max()


def test_updates_too_small_for_merged_weights_reach_the_rollouts():
    config, frozen, adapters = adapted()
    small = jax.tree.map(lambda x: x * 0.01, adapters)
    assert lora.rounding_loss(lora.join(jax.tree.map(lambda x: x.astype(jnp.bfloat16), frozen),
                                        small), config) > 0.9
    decoder, weights = make_weights(Decoder(config), Precision.BF16)
    with_them, without = (weights.publish(tree, frozen)[0] for tree in (
        small, jax.tree.map(jnp.zeros_like, small)))
    exact = logits(Decoder(config), lora.join(frozen, small)) - logits(Decoder(TOY), frozen)
    added = logits(decoder, with_them) - logits(decoder, without)
    assert np.corrcoef(added.ravel(), exact.ravel())[0, 1] > 0.9


# ---------------------------------------------------------------- refusals


def test_int8_weights_are_not_trained():
    _, params = published(Precision.INT8, noisy())
    for unroll in (1, 2):
        decoder = Decoder(dataclasses.replace(TOY, int8_weights=True, scan_unroll=unroll))

        def loss(embed):
            return decoder.apply({"params": params | {"embed": embed}}, IDS, IDS * 0,
                                 causal_mask(IDS.shape[1]))[0].sum()
        with pytest.raises(ValueError, match="int8 weights are for rollouts .*: train") as error:
            jax.jit(jax.grad(loss))(params["embed"])
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="int8 weights are for rollouts"):
        make_update(decoder, UpdateConfig(), make_optimizer(OptimizerConfig()))


def test_decoder_and_weights_must_belong_together():
    reader, params = published(Precision.INT8, noisy())
    half = params | {"layers": params["layers"] | {"up": noisy()["layers"]["up"]}}
    for decoder, given in ((Decoder(TOY), params), (reader, half)):
        with pytest.raises(ValueError, match="int8_weights is .*: take decoder and weights"):
            logits(decoder, given)
