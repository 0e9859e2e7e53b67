"""Adapters in PEFT's form. Names, axes and the sum B A are written out here once more; what
PEFT itself makes of them is compared by tests/check_peft_adapter.py."""

import dataclasses
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import models_reference as reference
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rods_jax.models import lora
from rods_jax.models.attention import causal_mask
from rods_jax.models.config import LoraConfig, ModelConfig
from rods_jax.models.decoder import Decoder, init_params
from rods_jax.models.hf import adapter
from rods_jax.models.hf.adapter import load_adapter, read_lora, save_adapter

SOME = LoraConfig("q_proj|o_proj|down_proj", rank=3, alpha=4.5)
MODEL = ModelConfig(vocab_size=40, d_model=28, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=12,
                    d_ff=20, qkv_bias=True, tie_embeddings=False, lora=SOME)
# module -> (name in the reference, out, in)
MODULES = {"self_attn.q_proj": ("q", 48, 28), "self_attn.k_proj": ("k", 24, 28),
           "self_attn.v_proj": ("v", 24, 28), "self_attn.o_proj": ("o", 28, 48),
           "mlp.gate_proj": ("gate", 20, 28), "mlp.up_proj": ("up", 20, 28),
           "mlp.down_proj": ("down", 28, 20)}
SETTINGS = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 4.5,
            "target_modules": ["o_proj", "q_proj", "down_proj"]}
ALL = ("q", "k", "v", "o", "gate", "up", "down")

# What PEFT 0.21 writes beside the settings above.
PEFT_DEFAULTS = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None,
    "auto_mapping": None, "base_model_name_or_path": "some/model", "bias": "none",
    "corda_config": None, "ensure_weight_tying": False, "eva_config": None,
    "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": True, "layer_replication": None, "layers_pattern": None,
    "layers_to_transform": None, "loftq_config": {}, "lora_bias": False, "lora_dropout": 0.05,
    "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None,
    "peft_version": "0.21.2", "qalora_group_size": 16, "rank_pattern": {}, "revision": None,
    "target_parameters": None, "trainable_token_indices": None, "use_dora": False,
    "use_qalora": False, "use_rslora": False}


def noisy_params(config, seed=0):
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return jax.tree.map(lambda x: 0.3 * rng.normal(size=x.shape).astype(np.float32), shapes)


def peft_tensors(names=("q", "o", "down"), rank=3, dtype=np.float32, seed=5):
    rng, found = np.random.default_rng(seed), {}
    for layer in range(2):
        for module, (name, out, inner) in MODULES.items():
            if name in names:
                key = f"base_model.model.model.layers.{layer}.{module}"
                found[f"{key}.lora_A.weight"] = rng.normal(size=(rank, inner)).astype(dtype)
                found[f"{key}.lora_B.weight"] = rng.normal(size=(out, rank)).astype(dtype)
    return found


def write(folder, settings=SETTINGS, tensors=None):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(peft_tensors() if tensors is None else tensors,
              folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


# ---------------------------------------------------------------- out


def test_a_saved_adapter_has_the_names_and_axes_of_peft(tmp_path):
    params = noisy_params(MODEL)
    save_adapter(tmp_path / "out", params, MODEL, "Qwen/Qwen2.5-0.5B")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text()) == {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 4.5,
        "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
        "target_modules": ["q_proj", "o_proj", "down_proj"],
        "base_model_name_or_path": "Qwen/Qwen2.5-0.5B"}
    got = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {k: (x.shape, x.dtype) for k, x in got.items()} == {
        k: (x.shape, x.dtype) for k, x in peft_tensors().items()}
    layers = params["layers"]
    for i in range(2):
        at = f"base_model.model.model.layers.{i}."
        for row in range(3):
            a = got[at + "self_attn.q_proj.lora_A.weight"][row]
            np.testing.assert_array_equal(a, layers["q_lora_a"][i, :, row])
            b = got[at + "self_attn.q_proj.lora_B.weight"][:, row]
            np.testing.assert_array_equal(b, layers["q_lora_b"][i, row].ravel())
            a = got[at + "self_attn.o_proj.lora_A.weight"][row]
            np.testing.assert_array_equal(a, layers["o_lora_a"][i, :, :, row].ravel())
            b = got[at + "mlp.down_proj.lora_B.weight"][:, row]
            np.testing.assert_array_equal(b, layers["down_lora_b"][i, row])


def test_adapters_alone_are_enough_and_come_back_bit_for_bit(tmp_path):
    params = noisy_params(MODEL)
    adapters = lora.split(params)[1]
    save_adapter(tmp_path / "whole", params, MODEL, "base")
    save_adapter(tmp_path / "alone", jax.tree.map(jnp.asarray, adapters), MODEL, "base")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    assert read_lora(tmp_path / "alone", MODEL) == SOME
    got = load_adapter(tmp_path / "alone", MODEL)
    assert jax.tree.structure(got) == jax.tree.structure(adapters)
    jax.tree.map(np.testing.assert_array_equal, got, adapters)


def test_whole_alphas_are_written_as_peft_types_them(tmp_path):
    config = dataclasses.replace(MODEL, lora=LoraConfig("v_proj", 2, 32.0))
    save_adapter(tmp_path / "out", noisy_params(config), config, "base")
    assert '"lora_alpha": 32,' in (tmp_path / "out" / "adapter_config.json").read_text()


@pytest.mark.parametrize("config, words", [
    (dataclasses.replace(MODEL, lora=None), "config has no lora: there is no adapter"),
    (dataclasses.replace(MODEL, lora=LoraConfig("v_proj", 3)), "layers/v_lora_a is missing"),
    (dataclasses.replace(MODEL, lora=dataclasses.replace(SOME, rank=4)), "rank 4"),
])
def test_what_does_not_fit_is_not_saved(tmp_path, config, words):
    with pytest.raises(ValueError, match=words):
        save_adapter(tmp_path / "out", noisy_params(MODEL), config, "base")
    assert not list(tmp_path.iterdir())


def test_a_folder_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    params = noisy_params(MODEL)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("x")
    with pytest.raises(ValueError, match="taken is not empty"):
        save_adapter(tmp_path / "taken", params, MODEL, "base")
    with pytest.raises(ValueError, match="file exists and is not a folder"):
        save_adapter(tmp_path / "taken" / "file", params, MODEL, "base")
    (tmp_path / "empty").mkdir()
    save_adapter(tmp_path / "empty", params, MODEL, "base")
    save_adapter(tmp_path / "new" / "deep", params, MODEL, "base")
    assert read_lora(tmp_path / "new" / "deep", MODEL) == SOME

    def full(path, tensors):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(path))
    monkeypatch.setattr(adapter, "write_weights", full)
    with pytest.raises(OSError, match="No space left"):
        save_adapter(tmp_path / "never", params, MODEL, "base")
    monkeypatch.undo()

    def torn(path, to):
        assert sorted(p.name for p in path.iterdir()) == [
            "adapter_config.json", "adapter_model.safetensors"]
        raise OSError(5, "Input/output error", str(to))
    monkeypatch.setattr(pathlib.Path, "rename", torn)  # all is there before the name is
    with pytest.raises(OSError, match="Input/output"):
        save_adapter(tmp_path / "never", params, MODEL, "base")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "new", "taken"]


# ---------------------------------------------------------------- in


@pytest.mark.parametrize("targets, names", [
    (["o_proj", "q_proj", "down_proj"], ("q", "o", "down")),
    (["model.layers.0.mlp.up_proj", "layers.1.mlp.up_proj", "k_proj"], ("k", "up")),
    (r".*\.self_attn\.(q|v)_proj", ("q", "v")), ("all-linear", ALL), (r".*_proj", ALL),
    (["q_proj", "v_proj", "fc1"], ("q", "v")),
])
def test_targets_are_read_as_peft_reads_them(tmp_path, targets, names):
    settings = PEFT_DEFAULTS | SETTINGS | {"target_modules": targets}
    folder = write(tmp_path, settings, peft_tensors(names))
    assert set(read_lora(folder, MODEL).parameters) == set(names)
    config = dataclasses.replace(MODEL, lora=read_lora(folder, MODEL))
    got = load_adapter(folder, config)["layers"]
    assert set(got) == {f"{n}_lora_{end}" for n in names for end in "ab"}


def test_excluded_modules_are_left_out(tmp_path):
    settings = SETTINGS | {"target_modules": "all-linear", "exclude_modules": [
        "k_proj", "v_proj", "gate_proj", "up_proj"]}
    folder = write(tmp_path, settings)
    assert read_lora(folder, MODEL) == SOME
    assert len(load_adapter(folder, MODEL)["layers"]) == 6


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_logits_equal_the_reference_with_b_times_a_added(tmp_path, dtype):
    tensors = peft_tensors(dtype=dtype)
    adapters = load_adapter(write(tmp_path, PEFT_DEFAULTS | SETTINGS, tensors), MODEL)
    assert {x.dtype for x in jax.tree.leaves(adapters)} == {np.dtype(np.float32)}
    frozen = lora.split(noisy_params(MODEL))[0]
    ids = np.random.default_rng(1).integers(0, 40, 7).astype(np.int32)
    decoder, params = Decoder(MODEL), {"params": lora.join(frozen, adapters)}

    def run():
        hidden, _ = decoder.apply(params, ids[None], np.arange(7)[None], causal_mask(7))
        return decoder.apply(params, hidden, method="logits")
    got = jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})()

    weights = {key: np.array(x, np.float64) for key, x in reference.from_params(frozen).items()}
    for layer in range(2):
        for module, (name, *_) in MODULES.items():
            key = f"base_model.model.model.layers.{layer}.{module}"
            if f"{key}.lora_A.weight" in tensors:
                a, b = (tensors[f"{key}.lora_{end}.weight"].astype(np.float64) for end in "AB")
                weights[layer, name] += 4.5 / 3 * b @ a
    want = reference.logits(weights, MODEL, ids)
    np.testing.assert_allclose(got[0], want, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("key, value", [
    ("use_rslora", True), ("use_dora", True), ("rank_pattern", {"v_proj": 2}),
    ("alpha_pattern", {"v_proj": 2}), ("bias", "all"), ("bias", "lora_only"),
    ("lora_bias", True), ("modules_to_save", ["lm_head"]), ("layers_to_transform", [0, 1]),
    ("layers_to_transform", 1), ("layers_pattern", "layers"), ("fan_in_fan_out", True),
    ("init_lora_weights", "pissa_niter_4"), ("init_lora_weights", "olora"),
    ("peft_type", "LOHA"), ("task_type", "SEQ_CLS"), ("layer_replication", [[0, 2]]),
    ("trainable_token_indices", [1]), ("target_parameters", ["experts"]), ("use_qalora", True),
    ("alora_invocation_tokens", [5]), ("some_new_setting", "on"), ("some_new_setting", 1),
])
def test_what_this_decoder_does_not_compute_is_refused_by_name(tmp_path, key, value):
    folder = write(tmp_path, PEFT_DEFAULTS | SETTINGS | {key: value})
    for read in (read_lora, load_adapter):
        with pytest.raises(ValueError, match=f"adapter_config.json: {key} is ") as error:
            read(folder, MODEL)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("settings, words", [
    ({"target_modules": ["layers.0.self_attn.q_proj", "o_proj"]}, "target_modules differ by layer"),
    ({"target_modules": r"model\.layers\.1\..*"}, "target_modules differ by layer"),
    ({"target_modules": ["c_attn"]}, "target_modules match none of q_proj"),
    ({"target_modules": [3]}, r"target_modules is \[3\]: give a list"),
    ({"target_modules": "("}, "target_modules is no regular expression"),
    ({"target_modules": None}, "lacks the key target_modules"),
    ({"exclude_modules": "("}, "exclude_modules is no regular expression"),
    ({"r": 0}, "adapter_config.json: lora rank is 0"), ({"r": True}, "lora rank is True"),
    ({"r": "8"}, "lora rank is '8'"), ({"lora_alpha": "8"}, "lora_alpha is \"8\": give a number"),
    ({"lora_alpha": -1}, "lora alpha is -1.0"), ({"lora_alpha": 10 ** 400}, "adapter_config.json"),
    ({"peft_type": None}, "lacks the key peft_type"),
    ({"r": 4}, "is an adapter of another form than the model's lora, LoraConfig.* rank=4"),
    ({"lora_alpha": 5}, "another form .*alpha=4.5.*set that to .*alpha=5.0"),
    ({"target_modules": ["q_proj"]}, r"another form .*set that to LoraConfig\(targets='q_proj'"),
])
def test_settings_that_do_not_fit_are_named(tmp_path, settings, words):
    folder = write(tmp_path, SETTINGS | settings)
    with pytest.raises(ValueError, match=words) as error:
        load_adapter(folder, MODEL)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_a_model_without_lora_is_told_what_to_set(tmp_path):
    with pytest.raises(ValueError, match="model's lora, None: set that to LoraConfig"):
        load_adapter(write(tmp_path), dataclasses.replace(MODEL, lora=None))


@pytest.mark.parametrize("name, change, words", [
    ("layers.1.self_attn.o_proj.lora_B.weight", None, "lacks the tensor .*target_modules"),
    ("layers.0.self_attn.q_proj.lora_A.weight", np.zeros((3, 27), np.float32),
     r"has the shape \(3, 27\), r and the model ask for \(3, 28\)"),
    ("layers.0.mlp.down_proj.lora_B.weight", np.zeros((3, 28), np.float32), r"\(28, 3\)"),
    ("layers.0.mlp.down_proj.lora_B.weight", np.zeros((28, 3), np.int32), "of type I32"),
    ("layers.0.self_attn.v_proj.lora_A.weight", np.zeros((3, 28), np.float32),
     "is of no projection that its adapter_config.json targets"),
    ("layers.2.self_attn.q_proj.lora_A.weight", np.zeros((3, 28), np.float32), "no projection"),
    ("layers.0.self_attn.q_proj.lora_magnitude_vector", np.zeros(48, np.float32),
     "no projection"),
    ("embed_tokens.weight", np.zeros((40, 28), np.float32), "no projection"),
])
def test_tensors_that_do_not_fit_are_named(tmp_path, name, change, words):
    name, tensors = f"base_model.model.model.{name}", peft_tensors()
    tensors[name] = change
    folder = write(tmp_path, tensors={k: x for k, x in tensors.items() if x is not None})
    with pytest.raises(ValueError, match=words) as error:
        load_adapter(folder, MODEL)
    assert "\n" not in str(error.value) and name in str(error.value)


def test_folders_that_are_no_adapter_are_named(tmp_path):
    def fails(words):
        with pytest.raises(ValueError, match=words) as error:
            load_adapter(tmp_path, MODEL)
        assert "\n" not in str(error.value)
    fails("adapter_config.json cannot be read .No such file")
    write(tmp_path)
    weights, settings = (tmp_path / n for n in ("adapter_model.safetensors", "adapter_config.json"))
    content = weights.read_bytes()
    for broken in (b"", content[:100], content[:-1]):
        weights.write_bytes(broken)
        fails("adapter_model.safetensors is not a whole safetensors file")
    weights.unlink()
    fails("adapter_model.safetensors is not there: fetch it")
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    fails("convert adapter_model.bin to safetensors")
    for text, words in (("{", "is not JSON"), ("[]", "does not hold a JSON object"),
                        ("[" * 100000, "is not JSON"), ("\ud800", "is not JSON")):
        settings.write_bytes(text.encode("utf-8", "surrogatepass"))
        fails(words)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    folder = write(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ValueError, match="pip install safetensors"):
        load_adapter(folder, MODEL)
    with pytest.raises(ValueError, match="pip install safetensors"):
        save_adapter(tmp_path / "out", noisy_params(MODEL), MODEL, "base")
    assert not (tmp_path / "out").exists()


def test_values_that_are_not_finite_are_refused(tmp_path):
    params = init_params(MODEL, jax.random.key(0))
    params["layers"]["q_lora_b"] = params["layers"]["q_lora_b"].at[1, 0, 0, 0].set(jnp.nan)
    with pytest.raises(ValueError, match=r"layers.1.self_attn.q_proj.lora_B.weight holds values"):
        save_adapter(tmp_path / "out", params, MODEL, "base")
    assert not list(tmp_path.iterdir())
