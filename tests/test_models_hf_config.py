"""config.json read and written. That the readings are right in numbers is shown by the logits
in test_models_hf_logits.py; here are the keys, the defaults and what is refused."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rods_jax.models.config import ModelConfig, llama3_rope_divisors
from rods_jax.models.hf.config import Family, HfConfig, read_config, to_json
from rods_jax.models.hf.names import slots

FIXTURES = pathlib.Path(__file__).parent / "fixtures" / "hf"
SAVED = sorted(folder.parent for folder in FIXTURES.glob("*/expected.npz"))
OLD = [folder for folder in SAVED if (folder / "old").is_dir()]

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}


def read(tmp_path, family="llama", without=(), **change) -> HfConfig:
    data = {"model_type": family, **SIZES, "head_dim": 16, **change}
    data = {key: value for key, value in data.items() if key not in without}
    (tmp_path / "config.json").write_text(json.dumps(data), encoding="utf-8")
    return read_config(tmp_path)


def refused(tmp_path, family="llama", **change) -> str:
    with pytest.raises(ValueError) as error:
        read(tmp_path, family, **change)
    text = str(error.value)
    assert "\n" not in text and text.startswith(str(tmp_path / "config.json"))
    return text.removeprefix(str(tmp_path / "config.json"))


RELEASED = {
    "llama-3.1-8b": ModelConfig(
        vocab_size=128256, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128,
        d_ff=14336, rope_theta=5e5, norm_eps=1e-5, tie_embeddings=False,
        rope_divisors=llama3_rope_divisors(128, 5e5, 8.0, 1.0, 4.0, 8192)),
    "llama-3.2-1b": ModelConfig(
        vocab_size=128256, d_model=2048, n_layers=16, n_heads=32, n_kv_heads=8, head_dim=64,
        d_ff=8192, rope_theta=5e5, norm_eps=1e-5, tie_embeddings=True,
        rope_divisors=llama3_rope_divisors(64, 5e5, 32.0, 1.0, 4.0, 8192)),
    "smollm2-135m": ModelConfig(
        vocab_size=49152, d_model=576, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64,
        d_ff=1536, rope_theta=1e5, norm_eps=1e-5, tie_embeddings=True),
    "qwen2.5-0.5b": ModelConfig(
        vocab_size=151936, d_model=896, n_layers=24, n_heads=14, n_kv_heads=2, head_dim=64,
        d_ff=4864, rope_theta=1e6, norm_eps=1e-6, tie_embeddings=True, qkv_bias=True),
    "qwen3-4b-2507": ModelConfig(
        vocab_size=151936, d_model=2560, n_layers=36, n_heads=32, n_kv_heads=8, head_dim=128,
        d_ff=9728, rope_theta=5e6, norm_eps=1e-6, tie_embeddings=True, qk_norm=True),
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_files_read_to_their_models(name):
    config = read_config(FIXTURES / "released" / name)
    assert config.model == RELEASED[name]
    assert config.family.value == config.raw["model_type"]
    assert config.raw == json.loads(
        (FIXTURES / "released" / name / "config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("folder", OLD, ids=lambda f: f.name)
def test_old_and_new_keys_read_to_the_same_model(folder):
    old, new = read_config(folder / "old"), read_config(folder)
    assert old.model == new.model and old.family is new.family
    assert "rope_theta" in old.raw and "rope_parameters" in new.raw


def shapes(model):
    return {slot.tensor.split(".")[-2]: slot.shape for slot in slots(model)
            if slot.stacked and slot.tensor.endswith("weight")}


def test_head_dim_wins_over_division(tmp_path):
    got = shapes(read_config(FIXTURES / "released" / "qwen3-4b-2507").model)
    assert got["q_proj"] == (4096, 2560) and got["o_proj"] == (2560, 4096)
    assert got["k_proj"] == got["v_proj"] == (1024, 2560)
    assert got["q_norm"] == got["k_norm"] == (128,)
    for family in Family:
        got = shapes(read(tmp_path, family.value, head_dim=32).model)
        assert got["q_proj"] == (128, 64) and got["o_proj"] == (64, 128)
        assert got["k_proj"] == got["v_proj"] == (64, 64)


def test_head_dim_left_out_or_null(tmp_path):
    for family, width in (("llama", 16), ("qwen2", 16), ("qwen3", 128)):
        assert read(tmp_path, family, without=("head_dim",)).model.head_dim == width
    for family in ("llama", "qwen2"):
        assert read(tmp_path, family, head_dim=None).model.head_dim == 16
    assert ": head_dim is null" in refused(tmp_path, "qwen3", head_dim=None)


ROPE_FORMS = {
    "rope_scaling, rope_type": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"}},
    "rope_scaling, type": {"rope_theta": 5e5, "rope_scaling": {"type": "llama3"}},
    "both types": {"rope_theta": 500000,
                   "rope_scaling": {"type": "llama3", "rope_type": "llama3"}},
    "rope_parameters": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}},
    "rope_parameters, theta twice": {
        "rope_theta": 5e5, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}},
}


@pytest.mark.parametrize("form", ROPE_FORMS)
@pytest.mark.parametrize("head_dim, factor, kept, between, divided", [
    (128, 8.0, 29, [1.2075, 1.5534, 2.0263, 2.6945, 3.6843, 5.2573], 29),
    (64, 32.0, 15, [1.6513, 3.2923, 9.6667], 14),
])
def test_llama3_scaling_in_every_form(tmp_path, form, head_dim, factor, kept, between, divided):
    settings = {**LLAMA3, "factor": factor}
    change = {key: {**value, **settings} if isinstance(value, dict) else value
              for key, value in ROPE_FORMS[form].items()}
    for family in Family:
        model = read(tmp_path, family.value, head_dim=head_dim, **change).model
        assert model.rope_theta == 5e5
        np.testing.assert_allclose(
            model.rope_divisors, [1.0] * kept + between + [factor] * divided, rtol=3e-5)


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_linear_scaling_divides_all_frequencies(tmp_path, key):
    model = read(tmp_path, rope_theta=1e6, rope_scaling={key: "linear", "factor": 2}).model
    assert model.rope_theta == 1e6 and model.rope_divisors == (2.0,) * 8


@pytest.mark.parametrize("rope", [
    {}, {"rope_scaling": None}, {"rope_scaling": {}}, {"rope_parameters": None},
    {"rope_scaling": {"type": "default"}}, {"rope_parameters": {"rope_type": "default"}}])
def test_no_scaling(tmp_path, rope):
    model = read(tmp_path, rope_theta=7.0, **rope).model
    assert model.rope_theta == 7.0 and model.rope_divisors == ()


def test_what_a_file_leaves_out_is_as_in_transformers(tmp_path):
    wide = {"num_attention_heads": 64, "without": ("num_key_value_heads", "head_dim")}
    for family, kv_heads in (("llama", 64), ("qwen2", 32), ("qwen3", 32)):
        model = read(tmp_path, family, hidden_size=128, **wide).model
        assert model.n_kv_heads == kv_heads
        assert (model.norm_eps, model.rope_theta, model.tie_embeddings) == (1e-6, 1e4, False)
        assert model.qkv_bias == (family == "qwen2") and model.qk_norm == (family == "qwen3")
        assert read(tmp_path, family, num_key_value_heads=None).model.n_kv_heads == 4


def test_a_tied_head_is_read_from_the_file(tmp_path):
    assert read(tmp_path, tie_word_embeddings=True).model.tie_embeddings
    assert not read(tmp_path, tie_word_embeddings=False).model.tie_embeddings


def test_keys_that_change_nothing_are_passed_over(tmp_path):
    plain = read(tmp_path).model
    more = {"architectures": ["LlamaForCausalLM"], "_name_or_path": "a/b",
            "torch_dtype": "bfloat16", "dtype": "float32", "transformers_version": "4.42.3",
            "use_cache": False, "bos_token_id": 1, "eos_token_id": [1, 2], "pad_token_id": None,
            "initializer_range": 0.04, "max_position_embeddings": 8, "is_llama_config": True,
            "rope_interleaved": False, "pretraining_tp": 1, "unsloth_fixed": True,
            "unsloth_version": "2025.1", "attention_dropout": 0.0, "mlp_bias": False,
            "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
            "quantization_config": None, "attention_bias": False, "partial_rotary_factor": 1.0,
            "temperature": 0.6, "top_p": 0.9, "max_length": 4096, "hidden_act": "silu"}
    assert read(tmp_path, **more).model == plain
    # Qwen2 has no such switch: its biases are always there.
    for value in (True, False):
        assert read(tmp_path, "qwen2", attention_bias=value).model.qkv_bias


@pytest.mark.parametrize("family, change, words", [
    ("gemma2", {}, 'model_type is "gemma2": the model types that are read are llama, qwen2, qwen3'),
    ("llama", {"model_type": ["llama"]}, 'model_type is ["llama"]'),
    ("llama", {"attention_bias": True}, "attention_bias is true: the decoder has no bias there"),
    ("qwen3", {"attention_bias": True}, "attention_bias is true"),
    ("llama", {"mlp_bias": True}, "mlp_bias is true"),
    ("qwen2", {"hidden_act": "gelu"}, 'hidden_act is "gelu": the decoder has silu alone'),
    ("llama", {"pretraining_tp": 2}, "pretraining_tp is 2: the decoder does not split"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved is true"),
    ("qwen2", {"use_mrope": True}, "use_mrope is true"),
    ("llama", {"quantization_config": {"bits": 4}},
     'quantization_config is {"bits": 4}: dequantize the model first'),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
    ("llama", {"auto_map": {"AutoConfig": "x.Y"}}, "auto_map is"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]},
     "of llama models LlamaForCausalLM is read"),
    ("qwen2", {"architectures": ["Qwen3ForCausalLM"]}, "of qwen2 models Qwen2ForCausalLM is read"),
    ("qwen3", {"num_experts": 8}, "num_experts is 8: the key is not known"),
    ("llama", {"logit_scale": 0.5}, "logit_scale is 0.5: the key is not known"),
    ("llama", {"new\nline": 1}, "new\\nline is 1: the key is not known"),
    ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings is 1: give true or false"),
    ("llama", {"num_key_value_heads": 3}, "num_attention_heads is 4: it must be a multiple of "
                                          "num_key_value_heads, here 3"),
    ("llama", {"head_dim": 15}, "head_dim is 15: heads are 15 wide"),
    ("llama", {"head_dim": None, "hidden_size": 36}, "hidden_size is 36: heads are 9 wide"),
    ("llama", {"head_dim": None, "hidden_size": 66}, "hidden_size is 66: no multiple of "
                                                     "num_attention_heads, 4: add head_dim"),
    ("llama", {"rms_norm_eps": "1e-5"}, 'rms_norm_eps is "1e-5": give a positive number'),
    ("llama", {"rms_norm_eps": 0}, "rms_norm_eps is 0: give a positive number"),
    ("llama", {"rope_theta": None}, "rope_theta is null: give a positive number"),
    ("llama", {"rope_theta": True}, "rope_theta is true: give a positive number"),
    ("llama", {"rope_theta": 10 ** 400}, "give a positive number"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN: give a positive number"),
])
def test_what_the_decoder_lacks_is_refused_by_name(tmp_path, family, change, words):
    assert words in refused(tmp_path, family, **change)


@pytest.mark.parametrize("key", list(SIZES))
@pytest.mark.parametrize("value", [True, "4", 4.0, 0, -4, [4]])
def test_sizes_are_whole_numbers(tmp_path, key, value):
    shown = json.dumps(value)
    assert f": {key} is {shown}: give a whole number of at least 1" in refused(
        tmp_path, **{key: value})


@pytest.mark.parametrize("key", ["model_type", *sorted(SIZES.keys() - {"num_key_value_heads"})])
def test_missing_keys_are_named(tmp_path, key):
    with pytest.raises(ValueError) as error:
        read(tmp_path, without=(key,))
    assert str(error.value) == f"{tmp_path / 'config.json'} lacks the key {key}: add it"


@pytest.mark.parametrize("rope, words", [
    *[({"rope_scaling": {"rope_type": kind, "factor": 2.0}},
       f'rope_scaling.rope_type is "{kind}": the kinds that are read are default, linear, llama3')
      for kind in ("yarn", "dynamic", "longrope", "mrope")],
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 'rope_scaling.type is "yarn"'),
    ({"rope_parameters": {"rope_type": ["llama3"]}}, 'rope_parameters.rope_type is ["llama3"]'),
    ({"rope_scaling": {"rope_type": "llama3", "type": "linear", "factor": 2.0}},
     'rope_scaling.type is "linear": beside it is another rope_type'),
    ({"rope_scaling": {"rope_type": "linear"}}, " lacks the key rope_scaling.factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, 'rope_scaling.factor is "2"'),
    ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "rope_scaling.factor is -1"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2, "beta_fast": 32}},
     "rope_scaling.beta_fast is 32: the key is not known for the kind linear"),
    ({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}},
     "rope_scaling.mrope_section is [1]"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}},
     "rope_parameters.full_attention is"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
     "rope_parameters.partial_rotary_factor is 0.5"),
    ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}},
     "rope_scaling.low_freq_factor is 4.0: it must be below high_freq_factor, here 4.0"),
    ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 8.5}},
     "rope_scaling.original_max_position_embeddings is 8.5"),
    ({"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
     "rope_parameters.rope_theta is 10000.0: beside it is a rope_theta of 1000000.0"),
    ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "default"}},
     "rope_parameters says otherwise: keep one"),
    ({"rope_scaling": "linear"}, 'rope_scaling is "linear": give an object or null'),
])
def test_rotary_scaling_that_is_not_computed_is_refused(tmp_path, rope, words):
    assert words in refused(tmp_path, **rope)


@pytest.mark.parametrize("missing", LLAMA3)
def test_llama3_scaling_needs_all_its_keys(tmp_path, missing):
    rope = {"rope_type": "llama3", **LLAMA3}
    del rope[missing]
    assert f"lacks the key rope_scaling.{missing}" in refused(tmp_path, rope_scaling=rope)


FULL = ["full_attention", "full_attention"]
WINDOW = {"use_sliding_window": True, "sliding_window": 16}


@pytest.mark.parametrize("family, change", [
    ("qwen2", {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 0}),
    ("qwen2", {"sliding_window": 32768}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": None}),
    ("qwen2", {**WINDOW, "max_window_layers": 2}),  # the windows would start above the last layer
    ("qwen3", {**WINDOW}),  # from layer 28 on
    ("qwen3", {**WINDOW, "max_window_layers": 0, "layer_types": FULL}),
    ("llama", {"sliding_window": None}),
    ("llama", {"use_sliding_window": False, "sliding_window": 16}),
])
def test_sliding_windows_that_are_off(tmp_path, family, change):
    assert read(tmp_path, family, **change).model == read(tmp_path, family).model


@pytest.mark.parametrize("family, change, key", [
    ("qwen2", {**WINDOW, "max_window_layers": 1}, "use_sliding_window"),
    ("qwen3", {**WINDOW, "max_window_layers": 0}, "use_sliding_window"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, "use_sliding_window"),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, "use_sliding_window"),
    ("qwen2", {**WINDOW, "num_hidden_layers": 29}, "use_sliding_window"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("qwen3", {"layer_types": FULL * 2}, "layer_types"),
    ("llama", {"sliding_window": 4096}, "sliding_window"),
    ("llama", WINDOW, "use_sliding_window"),
])
def test_sliding_windows_are_refused(tmp_path, family, change, key):
    got = refused(tmp_path, family, **change)
    assert got.startswith(f": {key} is ") and "every layer must see all earlier tokens" in got


@pytest.mark.parametrize("content, words", [
    (None, "does not exist: give a folder that holds a model"),
    (b"{", "is not JSON"), (b"", "is not JSON"), (b"\xff\xfe{}", "is not JSON"),
    (b"[" * 100000, "is not JSON"), (b"[1]", "does not hold a JSON object"),
])
def test_files_that_are_no_config(tmp_path, content, words):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=words) as error:
        read_config(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path / "config.json") in str(error.value)


def test_a_folder_that_is_none(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(ValueError, match="give a folder that holds a model"):
            read_config(folder)


VALUES = st.none() | st.booleans() | st.integers(-2, 40) | st.floats() | st.text(max_size=4) | (
    st.lists(st.sampled_from(["full_attention", 1]), max_size=3)) | st.dictionaries(
        st.sampled_from(["rope_type", "type", "factor", "rope_theta"]),
        st.sampled_from(["linear", "llama3", 2.0, None]), max_size=4)
KEYS = sorted({key for folder in SAVED for key in read_config(folder).raw} | {
    "rope_scaling", "rope_theta", "torch_dtype", "x"})


@given(st.sampled_from(list(Family)), st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
def test_any_file_is_read_or_refused_in_one_line(tmp_path_factory, family, change):
    try:
        got = read(tmp_path_factory.getbasetemp(), family.value, **change)
    except ValueError as error:
        assert "\n" not in str(error) and "config.json" in str(error)
    else:
        assert isinstance(got.model, ModelConfig)


@st.composite
def models(draw):
    family = draw(st.sampled_from(list(Family)))
    head_dim, kv_heads = 2 * draw(st.integers(1, 64)), draw(st.integers(1, 4))
    theta = draw(st.sampled_from([1e4, 5e5, 1e6]) | st.floats(1.5, 1e7))
    factor = draw(st.floats(1.0, 64.0))
    divisors = draw(st.sampled_from([
        (), (factor,) * (head_dim // 2),
        llama3_rope_divisors(head_dim, theta, factor, 1.0, 4.0, 8192)]))
    return family, ModelConfig(
        vocab_size=draw(st.integers(1, 10 ** 6)), d_model=draw(st.integers(1, 10 ** 4)),
        n_layers=draw(st.integers(1, 100)), n_heads=kv_heads * draw(st.integers(1, 8)),
        n_kv_heads=kv_heads, head_dim=head_dim, d_ff=draw(st.integers(1, 10 ** 5)),
        rope_theta=theta, norm_eps=draw(st.sampled_from([1e-5, 1e-6]) | st.floats(1e-9, 1e-2)),
        tie_embeddings=draw(st.booleans()), qkv_bias=family is Family.QWEN2,
        qk_norm=family is Family.QWEN3, rope_divisors=divisors)


@given(models())
def test_what_is_written_reads_to_the_same_model(tmp_path_factory, case):
    family, model = case
    folder = tmp_path_factory.getbasetemp()
    try:
        data = to_json(model, family)
    except ValueError:  # the last frequency is not yet fully divided: the factor is not to be seen
        assert len(set(model.rope_divisors)) > 1
        longest = 2 * np.pi * model.rope_theta ** (1 - 2 / model.head_dim)
        assert longest < 8192
        return
    (folder / "config.json").write_text(json.dumps(data), encoding="utf-8")
    assert read_config(folder) == HfConfig(family, model, data)


@pytest.mark.parametrize("folder", SAVED, ids=lambda f: f.name)
def test_written_keys_are_those_that_transformers_writes(folder):
    config = read_config(folder)
    if folder.name == "llama_rope_llama3":
        with pytest.raises(ValueError, match="export with the model's source folder"):
            to_json(config.model, config.family)
        return
    written, saved = to_json(config.model, config.family, max_length=64), config.raw
    rope = saved["rope_parameters"]
    assert written.pop("rope_theta") == rope["rope_theta"]
    scaling = written.pop("rope_scaling")
    assert (scaling or {}).get("factor") == rope.get("factor")
    assert (scaling or {}).get("rope_type", "default") == rope["rope_type"]
    for key in ("bos_token_id", "eos_token_id"):
        assert written.pop(key) is None
    for key, value in written.items():
        if key != "head_dim" or key in saved:  # Qwen2 leaves it out where division gives it
            assert saved[key] == value, key


@pytest.mark.parametrize("name, factor", [("llama-3.1-8b", 8.0), ("llama-3.2-1b", 32.0)])
def test_released_llama3_scaling_is_found_from_rounded_divisors(name, factor):
    model = RELEASED[name]
    rounded = tuple(float(np.float32(d)) for d in model.rope_divisors)
    got = to_json(dataclasses.replace(model, rope_divisors=rounded), Family.LLAMA)
    assert got["rope_scaling"] == {"rope_type": "llama3", **LLAMA3, "factor": factor}


@pytest.mark.parametrize("family, change, words", [
    (Family.LLAMA, {"qkv_bias": True}, "qkv_bias is True, in a llama model it is False"),
    (Family.QWEN2, {}, "qkv_bias is False, in a qwen2 model it is True"),
    (Family.QWEN3, {}, "qk_norm is False, in a qwen3 model it is True"),
    (Family.LLAMA, {"rope_divisors": (1.0,) * 31 + (3.0,)},
     "export with the model's source folder"),
])
def test_models_that_a_file_cannot_say_are_refused(family, change, words):
    model = dataclasses.replace(RELEASED["smollm2-135m"], **change)
    with pytest.raises(ValueError, match=words) as error:
        to_json(model, family)
    assert "\n" not in str(error.value)


def test_the_length_is_written_where_it_is_known():
    model = RELEASED["smollm2-135m"]
    assert "max_position_embeddings" not in to_json(model, Family.LLAMA)
    assert to_json(model, Family.LLAMA, max_length=8192)["max_position_embeddings"] == 8192
