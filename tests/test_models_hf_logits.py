"""The decoder against transformers: logits of whole models, read from their files.

tests/fixtures/hf holds tiny models as transformers saved them and the logits that it computed
for them in float32 (tests/make_hf_fixtures.py). On 8 devices in a process of its own (run
this file)."""

import dataclasses
import functools
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

from eight_devices import run_on_eight_devices
from rods_jax.models.attention import causal_mask
from rods_jax.models.config import Attention
from rods_jax.models.decoder import Decoder
from rods_jax.models.hf.config import Family, read_config
from rods_jax.models.hf.load import load
from rods_jax.models.sharding import batch_sharding, make_mesh

FIXTURES = pathlib.Path(__file__).parent / "fixtures" / "hf"
CASES = sorted(folder.name for folder in FIXTURES.iterdir() if (folder / "expected.npz").exists())

# Largest difference over the largest logit. Measured: 7e-7 to 3e-6.
TOLERANCE = 1e-5

ON_MESHES = {"fsdp": (1, 8, 1), "tensor": (4, 1, 2), "both": (2, 2, 2)}
MESH_CASES = ("llama_rope_llama3", "qwen2_untied", "qwen3_tied")


def expected(name):
    """ids [2, L] and logits [2, L, V]."""
    with np.load(FIXTURES / name / "expected.npz") as data:
        return data["ids"], data["logits"]


@functools.cache
def forward(model, activations=None):
    decoder = Decoder(model, activations)

    @jax.jit
    def run(params, ids):
        positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
        hidden, _ = decoder.apply({"params": params}, ids, positions, causal_mask(ids.shape[1]))
        return decoder.apply({"params": params}, hidden, method="logits")
    return run


def logits(model, params, ids, activations=None):
    return jax.device_get(forward(model, activations)(params, ids))


@functools.cache
def loaded(name):
    return load(FIXTURES / name, dtype="float32")


def distance(got, want):
    return np.abs(got - want).max() / np.abs(want).max()


def test_every_family_and_setting_has_a_case():
    read = [read_config(FIXTURES / name) for name in CASES]
    assert {config.family for config in read} == set(Family)
    for family in Family:
        models = [config.model for config in read if config.family is family]
        assert {m.tie_embeddings for m in models} == {True, False}
        assert any(m.head_dim * m.n_heads != m.d_model for m in models)
    kinds = [config.raw["rope_parameters"]["rope_type"] for config in read]
    assert set(kinds) == {"default", "linear", "llama3"}
    assert [list(FIXTURES.glob(f"{name}/model-*-of-*")) != [] for name in CASES].count(True) == 1
    assert [config.raw["dtype"] for config in read].count("bfloat16") == 1


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name):
    ids, want = expected(name)
    config, params = loaded(name)
    got = logits(config.model, params, ids)
    assert got.dtype == np.float32 and got.shape == want.shape
    assert distance(got, want) < TOLERANCE


def test_weights_kept_in_bfloat16_give_the_same_logits():
    # The fixture's logits are computed in float32 from the same bfloat16 weights.
    ids, want = expected("qwen3_bfloat16")
    config, params = load(FIXTURES / "qwen3_bfloat16")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    assert distance(logits(config.model, params, ids), want) < TOLERANCE


def test_layers_unrolled_and_plain_attention_give_the_same_logits():
    ids, want = expected("qwen3_tied")
    config, params = loaded("qwen3_tied")
    model = dataclasses.replace(config.model, scan_unroll=2, attention=Attention.XLA)
    assert distance(logits(model, params, ids), want) < TOLERANCE


def of_layers(params, **change):
    layers = {name: change.get(name, lambda x: x)(leaf) for name, leaf in params["layers"].items()}
    return {**params, "layers": layers}


def interleaved(x):
    """Components of a head in the order of the other rotary layout: 0 with 1, 2 with 3."""
    return np.asarray(x).reshape(*x.shape[:-1], 2, -1).swapaxes(-1, -2).reshape(x.shape)


def zero(x):
    return np.zeros_like(x)


WRONG = {
    "llama3 scaling ignored": ("llama_rope_llama3", {"rope_divisors": ()}, {}),
    "llama3 scaling taken for linear": ("llama_rope_llama3", {"rope_divisors": (8.0,) * 8}, {}),
    "linear scaling ignored": ("llama_rope_linear", {"rope_divisors": ()}, {}),
    "default theta": ("smollm2", {"rope_theta": 1e4}, {}),
    "another eps": ("qwen2_tied", {"norm_eps": 1e-5}, {}),
    "head of an untied model ignored": ("qwen2_untied", {"tie_embeddings": True}, {}),
    "biases dropped": ("qwen2_tied", {"qkv_bias": False}, {}),
    "bias of k dropped": ("qwen2_untied", {}, {"k_bias": zero}),
    "bias of v dropped": ("qwen2_untied", {}, {"v_bias": zero}),
    "norms of q and k dropped": ("qwen3_tied", {"qk_norm": False}, {}),
    "the other rotary layout": ("llama_tied", {}, {"q": interleaved, "k": interleaved}),
    "layers in another order": ("qwen3_untied", {}, {"up": lambda x: x[::-1]}),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_reading_would_be_seen(fault):
    name, change, of_params = WRONG[fault]
    ids, want = expected(name)
    config, params = loaded(name)
    model = dataclasses.replace(config.model, **change)
    got = logits(model, of_layers(params, **of_params), ids)
    # The decoder passes over parameters that its config has no place for.
    assert distance(got, want) > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["llama_head_dim", "qwen2_head_dim"])
def test_head_dim_by_division_does_not_load(name, tmp_path):
    folder = shutil.copytree(FIXTURES / name, tmp_path / name)
    data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert data.pop("head_dim") * data["num_attention_heads"] != data["hidden_size"]
    (folder / "config.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ValueError, match="self_attn"):
        load(folder)


@pytest.mark.slow
def test_eight_devices_compute_what_transformers_does():
    done = run_on_eight_devices(__file__)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[:2] for line in lines] == [[c, m] for c in MESH_CASES for m in ON_MESHES]
    assert all(float(line[2]) < TOLERANCE for line in lines), lines


def compare_on_eight_devices():
    for case in MESH_CASES:
        ids, want = expected(case)
        ids, want = np.tile(ids, (4, 1)), np.tile(want, (4, 1, 1))
        for name, sizes in ON_MESHES.items():
            mesh = make_mesh(*sizes)
            config, params = load(FIXTURES / case, dtype="float32", mesh=mesh)
            for whole in (params["layers"]["up"], params["layers"]["o"], params["embed"]):
                part = whole.addressable_shards[0].data  # each device holds its own alone
                assert part.size * sizes[1] * sizes[2] == whole.size
            rows = batch_sharding(mesh)
            got = logits(config.model, params, jax.device_put(ids, rows), rows)
            print(case, name, distance(got, want), flush=True)


if __name__ == "__main__":
    compare_on_eight_devices()
