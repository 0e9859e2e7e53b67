"""Adapters against weights that numpy merged in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import models_reference as reference
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec
from memory_cases import empty_pages, page_a_row, remember, written_to

from rods_jax.models import lora
from rods_jax.models.attention import Segments, causal_mask
from rods_jax.models.config import PROJECTIONS, LoraConfig, ModelConfig, Remat
from rods_jax.models.decoder import Decoder, count_params, init_params
from rods_jax.models.sharding import ShardingRules, param_shardings

ALL = LoraConfig(rank=3, alpha=4.0)
# No two axes of weights or activations are alike, so that shapes tell products apart.
TOY = ModelConfig(vocab_size=40, d_model=28, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=12,
                  d_ff=20, lora=ALL)
PLAIN = dataclasses.replace(TOY, lora=None)
IDS = np.random.default_rng(2).integers(0, 40, (2, 5)).astype(np.int32)
SEGMENTS = np.array([[1, 1, 2, 2, 2], [1, 1, 1, 1, 0]], np.int32)


def noisy_params(config, seed=0):
    """No parameter at 0 or 1, so that each one shows; drawn by numpy, without compilation."""
    rng = np.random.default_rng(seed)

    def leaf(path, x):
        noise = 0.3 * rng.normal(size=x.shape).astype(np.float32)
        return noise + 1 if path[-1].key.endswith("norm") else noise

    return jax.tree_util.tree_map_with_path(leaf, shapes(config))


@functools.cache
def shapes(config):
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


def merged_by_numpy(params, config):
    """W + (alpha / r) A B in float64, one layer at a time, adapters gone."""
    layers = {n: np.array(x, np.float64) for n, x in params["layers"].items() if "_lora_" not in n}
    for name in config.lora.parameters:
        for i, w in enumerate(layers[name]):
            a, b = (np.asarray(params["layers"][f"{name}_lora_{end}"][i], np.float64)
                    for end in "ab")
            r = config.lora.rank
            w += (config.lora.alpha / r * a.reshape(-1, r) @ b.reshape(r, -1)).reshape(w.shape)
    return {**params, "layers": layers}


def float32(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float32), tree)


def quick_jit(f, **kwargs):
    """These tests compile far more than they compute."""
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0}, **kwargs)


@functools.partial(quick_jit, static_argnums=0)
def full_pass(config, params, ids):
    decoder, length = Decoder(config), ids.shape[1]
    positions = jnp.broadcast_to(jnp.arange(length), ids.shape)
    hidden, _ = decoder.apply({"params": params}, ids, positions, causal_mask(length))
    return decoder.apply({"params": params}, hidden, method="logits")


def loss(config, params):
    decoder = Decoder(config)
    positions = jnp.broadcast_to(jnp.arange(IDS.shape[1]), IDS.shape)
    hidden, _ = decoder.apply({"params": params}, IDS, positions, Segments(SEGMENTS))
    logits = decoder.apply({"params": params}, hidden, method="logits")
    return (jax.nn.log_softmax(logits)[..., 0] * (SEGMENTS > 0)).mean()


def adapter_loss(config, adapters, frozen):
    return loss(config, lora.join(frozen, adapters))


adapter_gradient = quick_jit(jax.grad(adapter_loss, argnums=1), static_argnums=0)


# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize("targets, names", [
    ("v_proj", ["v"]), ("q_proj|down_proj", ["q", "down"]), (".*_proj", list("qkvo") + [
        "gate", "up", "down"]), ("(q|k|v|o)_proj", list("qkvo"))])
def test_targets_name_the_adapted_weights(targets, names):
    config = dataclasses.replace(TOY, lora=LoraConfig(targets, rank=3))
    tree = shapes(config)
    got = {n: x.shape for n, x in tree["layers"].items() if "_lora_" in n}
    axes = {"q": ((28,), (4, 12)), "k": ((28,), (2, 12)), "v": ((28,), (2, 12)),
            "o": ((4, 12), (28,)), "gate": ((28,), (20,)), "up": ((28,), (20,)),
            "down": ((20,), (28,))}
    want = {}
    for name in names:
        want[f"{name}_lora_a"] = (2, *axes[name][0], 3)
        want[f"{name}_lora_b"] = (2, 3, *axes[name][1])
    assert got == want
    made = jax.eval_shape(lambda: lora.init_adapters(config, jax.random.key(0)))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == {
        "layers": {n: (shape, jnp.float32) for n, shape in want.items()}}


def test_targets_that_match_nothing_are_an_error():
    for wrong in ("proj", "embed_tokens", ""):
        with pytest.raises(ValueError, match="matches none of q_proj"):
            LoraConfig(wrong)


def test_without_lora_there_is_no_trace_of_it():
    """The same weights from the same key, so that a run can add adapters to them."""
    plain, adapted = quick_jit(lambda key: (init_params(PLAIN, key), init_params(TOY, key)))(
        jax.random.key(7))
    assert not [n for n in plain["layers"] if "lora" in n]
    frozen, adapters = lora.split(adapted)
    jax.tree.map(np.testing.assert_array_equal, frozen, plain)
    assert count_params(adapters) == 2 * 3 * sum(
        (28 + 48, 28 + 24, 28 + 24, 48 + 28, 28 + 20, 28 + 20, 20 + 28))


def test_fresh_values():
    wide = dataclasses.replace(TOY, d_model=96, lora=LoraConfig(rank=32))
    layers = quick_jit(lambda key: lora.init_adapters(wide, key))(jax.random.key(1))["layers"]
    for name in PROJECTIONS.values():
        a, b = np.asarray(layers[f"{name}_lora_a"]), np.asarray(layers[f"{name}_lora_b"])
        assert not b.any()
        bound = np.prod(a.shape[1:-1]) ** -0.5
        # uniform: the greatest is near the bound, the variance is bound^2 / 3
        assert 0.97 * bound < np.abs(a).max() <= bound
        assert a.var() == pytest.approx(bound ** 2 / 3, rel=0.1)
        assert abs(a.mean()) < 0.1 * bound
        assert not np.array_equal(a[0], a[1])
    flat = np.concatenate([x.ravel() for n, x in layers.items() if n.endswith("_lora_a")])
    assert len(np.unique(flat)) > 0.99 * len(flat)
    with pytest.raises(ValueError, match="config has no lora"):
        lora.init_adapters(PLAIN, jax.random.key(0))


# ---------------------------------------------------------------- the forward pass


@pytest.mark.parametrize("compute, stored", [
    ("float32", "float32"), ("bfloat16", "bfloat16")])
def test_a_fresh_adapter_changes_nothing(compute, stored):
    plain = dataclasses.replace(PLAIN, compute_dtype=compute)
    frozen = jax.tree.map(lambda x: jnp.asarray(x, stored), noisy_params(PLAIN))
    adapters = {n: x * n.endswith("_lora_a")
                for n, x in lora.split(noisy_params(TOY))[1]["layers"].items()}
    fresh = lora.join(frozen, {"layers": adapters})
    want = full_pass(plain, frozen, IDS)
    got = full_pass(dataclasses.replace(plain, lora=ALL), fresh, IDS)
    np.testing.assert_array_equal(got, want)
    assert np.asarray(want).std() > 0.1


@pytest.mark.parametrize("change, lora_config", [
    ({}, ALL),
    ({}, LoraConfig("v_proj", rank=1, alpha=3.0)),
    ({"qkv_bias": True, "tie_embeddings": False, "scan_unroll": 2},
     LoraConfig("q_proj|o_proj", rank=5, alpha=2.0)),
    ({"qk_norm": True, "n_kv_heads": 4}, LoraConfig("k_proj|(gate|up|down)_proj", 2, 2.0)),
], ids=["all", "one", "bias_untied_unrolled", "qk_norm_mha"])
def test_logits_equal_the_float64_reference_of_merged_weights(change, lora_config):
    config = dataclasses.replace(TOY, lora=lora_config, **change)
    params = noisy_params(config)
    weights = reference.from_params(merged_by_numpy(params, config))
    without = reference.from_params(lora.split(params)[0])
    for row, ids in zip(np.asarray(full_pass(config, params, IDS)), IDS):
        want = reference.logits(weights, config, ids)
        np.testing.assert_allclose(row, want, atol=2e-5 * np.abs(want).max())
        assert np.abs(want - reference.logits(without, config, ids)).max() > 0.1


def test_adapters_are_active_in_chunks_with_memories():
    """Prefill of 3, an extend of 1, then a token beside two memories."""
    params, decoder = noisy_params(TOY), Decoder(TOY)

    def run(start, stop, memories=()):
        at = jnp.broadcast_to(jnp.arange(start, stop), (2, stop - start))
        return decoder.apply({"params": params}, IDS[:, start:stop], at,
                             causal_mask(stop - start), memories)

    @quick_jit
    def in_pieces():
        first, kv = run(0, 3)
        cache = page_a_row(remember(empty_pages(TOY, 2, 4), kv, [0, 0]), [3, 3])
        second, kv = run(3, 4, (cache,))
        near = remember(empty_pages(TOY, 2, 2), kv, [0, 0])
        third, _ = run(4, 5, (cache, written_to(near, 1)))
        hidden = jnp.concatenate([first, second, third], 1)
        return decoder.apply({"params": params}, hidden, method="logits")
    np.testing.assert_allclose(in_pieces(), full_pass(TOY, params, IDS), atol=1e-4)


# ---------------------------------------------------------------- gradients


@functools.cache
def chain_rule():
    """dL/dA = scale dL/dW B^T and dL/dB = scale A^T dL/dW, of the model with merged weights."""
    params = noisy_params(TOY)
    by_weight = quick_jit(jax.grad(functools.partial(loss, PLAIN)))(
        float32(merged_by_numpy(params, TOY)))
    want, scale, r = {}, ALL.alpha / ALL.rank, ALL.rank
    for name in PROJECTIONS.values():
        a, b = (np.asarray(params["layers"][f"{name}_lora_{end}"], np.float64) for end in "ab")
        g = np.asarray(by_weight["layers"][name], np.float64)
        flat = g.reshape(2, np.prod(a.shape[1:-1]), -1)
        want[f"{name}_lora_a"] = scale * (
            flat @ b.reshape(2, r, -1).swapaxes(1, 2)).reshape(a.shape)
        want[f"{name}_lora_b"] = scale * (
            a.reshape(2, -1, r).swapaxes(1, 2) @ flat).reshape(b.shape)
    return {"layers": want}


@pytest.mark.parametrize("remat", list(Remat))
def test_gradients_obey_the_chain_rule(remat):
    config = dataclasses.replace(TOY, remat=remat)
    frozen, adapters = lora.split(noisy_params(config))
    got = adapter_gradient(config, adapters, frozen)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(
        x, y, atol=2e-5 * max(np.abs(y).max(), 1e-3)), got, chain_rule())
    assert min(np.abs(x).max() for x in jax.tree.leaves(got)) > 1e-4


def test_gradients_of_bfloat16_compute_point_the_same_way():
    config = dataclasses.replace(TOY, compute_dtype="bfloat16", remat=Remat.LAYER)
    frozen, adapters = lora.split(noisy_params(config))
    frozen = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), frozen)
    got = adapter_gradient(config, adapters, frozen)
    for name, want in chain_rule()["layers"].items():
        x = np.asarray(got["layers"][name])
        assert x.dtype == np.float32
        x, size, want_size = x.ravel(), np.linalg.norm(x), np.linalg.norm(want)
        assert x @ want.ravel() > 0.98 * size * want_size, name
        assert size == pytest.approx(want_size, rel=0.15), name


def products(jaxpr):
    """Shapes of all matrix products, in inner programs too."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            found.append(eqn.outvars[0].aval.shape)
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            found += products(inner) if hasattr(inner, "eqns") else []
    return found


def test_neither_the_product_nor_a_frozen_gradient_is_formed():
    frozen, adapters = lora.split(noisy_params(TOY))
    weights = {tuple(sorted((int(np.prod(x.shape[1:1 + n])), int(np.prod(x.shape[1 + n:])))))
               for n, x in ((lora.input_axes(name), frozen["layers"][name])
                            for name in PROJECTIONS.values())}
    assert len(weights) == 3 and 10 not in {n for pair in weights for n in pair}

    def formed(config, *args):
        program = jax.make_jaxpr(jax.grad(functools.partial(adapter_loss, config)))(*args)
        found = [tuple(n for n in shape if n != 1) for shape in products(program.jaxpr)]
        assert len(found) > 20
        return weights & {tuple(sorted(shape)) for shape in found}
    assert not formed(TOY, adapters, frozen)
    whole = {"layers": frozen["layers"]}  # trained: every weight has a gradient
    assert formed(PLAIN, whole, {n: x for n, x in frozen.items() if n != "layers"}) == weights


def test_remat_of_dots_keeps_rank_numbers_a_token_for_an_adapter():
    def kept(config):
        params = noisy_params(config)
        _, pull = jax.eval_shape(lambda p: jax.vjp(functools.partial(loss, config), p), params)
        return count_params(pull) - count_params(params)
    dots = dataclasses.replace(TOY, remat=Remat.DOTS)
    tokens, layers, adapted = 10, 2, 7
    extra = kept(dots) - kept(dataclasses.replace(dots, lora=None))
    assert 0 < extra <= tokens * layers * adapted * ALL.rank


# ---------------------------------------------------------------- trees


def test_split_and_join_are_inverse_and_copy_nothing():
    params = noisy_params(TOY)
    frozen, adapters = lora.split(params)
    assert set(adapters) == {"layers"} and len(adapters["layers"]) == 14
    joined = lora.join(frozen, adapters)
    assert jax.tree.structure(joined) == jax.tree.structure(params)
    for a, b in zip(jax.tree.leaves(joined), jax.tree.leaves(params)):
        assert a is b
    assert "q_lora_a" not in frozen["layers"]  # not even by the way
    with pytest.raises(ValueError, match="hold no adapters: set lora"):
        lora.split(frozen)
    with pytest.raises(ValueError, match="layers/down_lora_a is among the frozen and the trained"):
        lora.join(params, adapters)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_merged_weights_are_rounded_once(stored):
    frozen, adapters = lora.split(noisy_params(TOY))
    frozen = jax.tree.map(lambda x: jnp.asarray(x, stored), frozen)
    params = lora.join(frozen, adapters)
    got = lora.merged(params, TOY)
    assert jax.tree.structure(got) == jax.tree.structure(frozen)
    want = merged_by_numpy(params, TOY)
    for name, x in got["layers"].items():
        assert x.dtype == stored
        exact = np.asarray(want["layers"][name], np.float64)
        # half a unit in the last place of the dtype, and float32's error before that
        half = 2.0 ** (np.floor(np.log2(np.abs(exact))) - (8 if stored == "bfloat16" else 24))
        assert (np.abs(np.asarray(x, np.float64) - exact) <= half + 3e-7).all(), name
    assert got["embed"] is params["embed"]
    if stored == "float32":
        np.testing.assert_allclose(full_pass(PLAIN, got, IDS), full_pass(TOY, params, IDS),
                                   atol=5e-5)


def test_merged_leaves_what_is_not_adapted():
    config = dataclasses.replace(TOY, lora=LoraConfig("v_proj", 2))
    params = noisy_params(config)
    got = lora.merged(params, config)
    assert got["layers"]["q"] is params["layers"]["q"]
    assert np.abs(np.asarray(got["layers"]["v"]) - params["layers"]["v"]).max() > 0.1
    plain = noisy_params(PLAIN)
    assert lora.merged(plain, PLAIN) is plain


@pytest.mark.parametrize("change, words", [
    ({"lora": LoraConfig(rank=4)}, r"layers/q_lora_a has the shape \(2, 28, 3\), .*rank 4\) asks "
                                   r"for \(2, 28, 4\)"),
    ({"lora": LoraConfig("q_proj|v_proj", rank=3)}, "layers/k_lora_a has no place, lora targets "
                                                    "are 'q_proj|v_proj'"),
    ({"lora": None}, "layers/down_lora_a has no place, lora targets are none"),
    ({"n_layers": 3}, r"asks for \(3, 28, 3\)"),
])
def test_adapters_that_do_not_fit_are_named(change, words):
    with pytest.raises(ValueError, match=words) as error:
        lora.merged(noisy_params(TOY), dataclasses.replace(TOY, **change))
    assert "\n" not in str(error.value)


def test_missing_adapters_are_named():
    params = noisy_params(dataclasses.replace(TOY, lora=LoraConfig("q_proj", rank=3)))
    with pytest.raises(ValueError, match="layers/k_lora_a is missing, lora targets"):
        lora.merged(params, TOY)


# ---------------------------------------------------------------- on a mesh


def test_adapters_lie_as_their_weights_do():
    mesh = AbstractMesh((1, 2, 1, 2), ("data", "fsdp", "context", "tensor"))
    width = ("fsdp", "context")
    got = {n: s.spec for n, s in param_shardings(shapes(TOY), mesh)["layers"].items()}
    P = PartitionSpec
    assert got["q_lora_a"] == P(None, width, None)
    assert got["q_lora_b"] == got["k_lora_b"] == P(None, None, "tensor", None)
    assert got["o_lora_a"] == P(None, "tensor", None, None)
    assert got["o_lora_b"] == P(None, None, width)
    assert got["up_lora_a"] == P(None, width, None)
    assert got["up_lora_b"] == P(None, None, "tensor")
    assert got["down_lora_a"] == P(None, "tensor", None)
    assert got["down_lora_b"] == P(None, None, width)
    with pytest.raises(ValueError, match="down_lora_a: axis lora of size 3 does not divide"):
        param_shardings(shapes(TOY), mesh, ShardingRules(lora="tensor"))


@pytest.mark.parametrize("dtype", [
    "float16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("float32", "bfloat16"))])
def test_what_rounding_loses_is_the_error_of_merging(dtype):
    config = dataclasses.replace(TOY, lora=LoraConfig("q_proj|down_proj", rank=2, alpha=1.0))
    params = init_params(config, jax.random.key(0))
    layers = params["layers"]
    assert lora.rounding_loss(params, config) is None  # B is 0
    for name in ("q", "down"):
        layers[name] = layers[name].astype(dtype)
        shape = layers[name + "_lora_b"].shape
        layers[name + "_lora_b"] = 1e-2 * jax.random.normal(jax.random.key(1), shape)
    merged = lora.merged(params, config)["layers"]
    error = size = 0.0
    for name, axes in (("q", "ldr,lrhk->ldhk"), ("down", "lfr,lrd->lfd")):
        a, b, w = (np.asarray(layers[name + part], np.float64) for part in ("_lora_a", "_lora_b", ""))
        added = 0.5 * np.einsum(axes, a, b)
        error += ((np.asarray(merged[name], np.float64) - w - added) ** 2).sum()
        size += (added ** 2).sum()
    lost = lora.rounding_loss(params, config)
    assert lost == pytest.approx((error / size) ** 0.5, rel=1e-2, abs=1e-4)
    assert (lost > 1e-2) == (dtype == "bfloat16") or dtype == "float16"
