"""Rules in this process; numbers on 8 devices in a process of its own (run this file)."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from eight_devices import run_on_eight_devices
from rods_jax.models.config import ModelConfig
from rods_jax.models.attention import causal_mask
from rods_jax.models.decoder import Decoder, init_params
from rods_jax.models.sharding import (MeshConfig, ShardingRules, batch_sharding, make_mesh,
                                      param_shardings, replicated)

TOY = ModelConfig(vocab_size=48, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8,
                  d_ff=64, qkv_bias=True, qk_norm=True, tie_embeddings=False)
MESHES = {"fsdp": (1, 8, 1), "tensor": (4, 1, 2), "both": (2, 2, 2)}


def abstract_params(config=TOY):
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


def mesh(data, fsdp, tensor, context=1):
    return AbstractMesh((data, fsdp, context, tensor), ("data", "fsdp", "context", "tensor"))


def test_every_parameter_has_the_axes_of_its_kind():
    got = param_shardings(abstract_params(), mesh(1, 2, 2))
    spec = {jax.tree_util.keystr(p, simple=True, separator="/"): s.spec
            for p, s in jax.tree_util.tree_leaves_with_path(got)}
    P = PartitionSpec
    width = ("fsdp", "context")
    assert spec["embed"] == P("tensor", width)
    assert spec["head"] == P(width, "tensor")
    assert spec["final_norm"] == P(None)
    assert spec["layers/q"] == spec["layers/v"] == P(None, width, "tensor", None)
    assert spec["layers/o"] == P(None, "tensor", None, width)
    assert spec["layers/k_bias"] == P(None, "tensor", None)
    assert spec["layers/q_norm"] == spec["layers/mlp_norm"] == P(None, None)
    assert spec["layers/up"] == P(None, width, "tensor")
    assert spec["layers/down"] == P(None, "tensor", width)
    assert len(spec) == len(jax.tree.leaves(abstract_params()))


def test_an_optimizer_state_is_laid_out_like_its_parameters():
    params = abstract_params()
    state = jax.eval_shape(optax.adamw(1e-3).init, params)
    got = param_shardings(state, mesh(1, 2, 2))
    assert got[0].count.spec == PartitionSpec()
    assert got[0].mu == got[0].nu == param_shardings(params, mesh(1, 2, 2))


def test_batches_split_along_the_asked_axis():
    m = mesh(2, 2, 1)
    assert batch_sharding(m).spec == PartitionSpec(("data", "fsdp"))
    assert batch_sharding(m, axis=1).spec == PartitionSpec(None, ("data", "fsdp"))


def test_uneven_axes_are_an_error_unless_allowed():
    with pytest.raises(ValueError, match="layers/k: axis kv_heads of size 2 does not divide "
                                         "over tensor=4") as error:
        param_shardings(abstract_params(), mesh(1, 1, 4))
    assert "\n" not in str(error.value)
    got = param_shardings(abstract_params(), mesh(1, 1, 4), ShardingRules(replicate_uneven=True))
    width = ("fsdp", "context")
    assert got["layers"]["k"].spec == PartitionSpec(None, width, None, None)
    assert got["layers"]["q"].spec == PartitionSpec(None, width, "tensor", None)


@pytest.mark.parametrize("rules, words", [
    (ShardingRules(mlp="model"), "rule mlp names mesh axis 'model', the mesh has data, fsdp"),
    (ShardingRules(mlp="fsdp"), "two of its axes .* map to the same mesh axis"),
])
def test_rules_that_cannot_hold_are_named(rules, words):
    with pytest.raises(ValueError, match=words):
        param_shardings(abstract_params(), mesh(1, 2, 2), rules)


def test_unknown_parameters_are_named():
    with pytest.raises(ValueError, match="adapter"):
        param_shardings({"layers": {"adapter": np.zeros((2, 3))}}, mesh(1, 1, 1))


def test_a_mesh_needs_as_many_devices_as_its_axes_say():
    with pytest.raises(ValueError, match="needs 6 devices, there are 1"):
        make_mesh(1, 2, 3, jax.devices()[:1])
    assert dict(make_mesh(1, 1, 1, jax.devices()[:1]).shape) == {
        "data": 1, "fsdp": 1, "context": 1, "tensor": 1}


def test_weights_are_split_over_devices_that_share_a_sequence():
    on = mesh(1, 2, 2, context=2)
    q = param_shardings(abstract_params(), on)["layers"]["q"]
    assert q.shard_shape((2, 32, 4, 8)) == (2, 32 // (2 * 2), 4 // 2, 8)
    assert batch_sharding(on).shard_shape((8, 6)) == (4, 6)
    suffixes = batch_sharding(on, over=ShardingRules().rows)
    assert suffixes.shard_shape((8, 6)) == (2, 6)


def test_a_mesh_config_says_how_many_devices_it_is_for():
    assert MeshConfig(data=2, fsdp=3, tensor=4).size == 24
    with pytest.raises(ValueError, match="mesh context is 0: give 1 or more devices"):
        MeshConfig(context=0)


def test_eight_devices_compute_what_one_does():
    done = run_on_eight_devices(__file__)
    assert done.stdout.split() == list(MESHES)
    assert "rematerialization" not in done.stderr, done.stderr[-2000:]


def compare_on_eight_devices():
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) * 0.3,
                          abstract_params())
    ids = rng.integers(0, TOY.vocab_size, (8, 6)).astype(np.int32)
    positions = np.broadcast_to(np.arange(6, dtype=np.int32), (8, 6))

    def compiled(decoder, with_gradient):
        def loss(params, ids):
            hidden, _ = decoder.apply({"params": params}, ids, positions, causal_mask(6))
            logits = decoder.apply({"params": params}, hidden, method="logits")
            return jax.nn.log_softmax(logits)[..., 0].mean(), logits
        return jax.jit(jax.value_and_grad(loss, has_aux=True) if with_gradient else loss)

    (_, want), want_gradient = jax.device_get(compiled(Decoder(TOY), True)(params, ids))
    for name, sizes in MESHES.items():
        on = make_mesh(*sizes)
        rows = batch_sharding(on)
        placed = jax.device_put(params, param_shardings(params, on))
        assert jax.device_put(1.0, replicated(on)).is_fully_replicated
        whole = placed["layers"]["up"]  # of which each device holds its part only
        assert whole.addressable_shards[0].data.size * sizes[1] * sizes[2] == whole.size
        run = compiled(Decoder(TOY, rows), name == "both")
        out = run(placed, jax.device_put(ids, rows))
        (_, logits), gradient = out if name == "both" else (out, None)
        assert logits.addressable_shards[0].data.shape[0] == 8 // (sizes[0] * sizes[1])
        np.testing.assert_allclose(logits, want, atol=2e-5 * np.abs(want).max())
        if gradient is not None:
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6),
                         jax.device_get(gradient), want_gradient)
        print(name)


if __name__ == "__main__":
    compare_on_eight_devices()
