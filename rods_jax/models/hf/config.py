"""A Hugging Face config.json, read into a ModelConfig and written from one.

What a file leaves out is filled in as transformers does for its family. Nothing that could
change the model passes unread: a key that is neither read nor known to be harmless is an
error, since a setting passed over gives a model that runs and is wrong.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
from collections.abc import Mapping
from typing import Any

from rods_jax.models.config import ModelConfig, llama3_rope_divisors


class Family(str, enum.Enum):
    """`model_type` of the models that the decoder computes. SmolLM2 is a llama."""

    LLAMA = "llama"
    QWEN2 = "qwen2"  # Qwen2 and Qwen2.5
    QWEN3 = "qwen3"  # the dense ones


@dataclasses.dataclass(frozen=True)
class HfConfig:
    """raw: the file's own JSON, whole."""

    family: Family
    model: ModelConfig
    raw: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class _Traits:
    """What a family has without a key for it, and what it takes an absent key to mean.

    kv_heads: None is as many as query heads. head_dim: None is hidden_size divided by the
    query heads. window, window_from: width of a sliding window and the layer it starts at.
    """

    architecture: str
    qkv_bias: bool
    qk_norm: bool
    kv_heads: int | None
    head_dim: int | None
    window: int | None
    window_from: int


_TRAITS = {
    Family.LLAMA: _Traits("LlamaForCausalLM", False, False, None, None, None, 0),
    Family.QWEN2: _Traits("Qwen2ForCausalLM", True, False, 32, None, 4096, 28),
    Family.QWEN3: _Traits("Qwen3ForCausalLM", False, True, 32, 128, 4096, 28),
}

_READ = frozenset("""
    model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim rms_norm_eps tie_word_embeddings rope_theta
    rope_scaling rope_parameters use_sliding_window sliding_window max_window_layers layer_types
    """.split())

# Keys whose other values ask for what the decoder does not compute: (values it does, remedy).
_NO_BIAS = "the decoder has no bias there: take a model without"
_NO_CUSTOM = "take a model that transformers computes without it"
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu",), "the decoder has silu alone: take another model"),
    "attention_bias": ((False,), _NO_BIAS),
    "mlp_bias": ((False,), _NO_BIAS),
    "attention_dropout": ((0,), "the decoder has no dropout: set it to 0"),
    "pretraining_tp": ((1, None), "the decoder does not split its matmuls: set it to 1"),
    "partial_rotary_factor": ((1, None), "the decoder rotates whole heads: take another model"),
    "rope_interleaved": ((False,), "the decoder rotates halves: take another model"),
    "use_mrope": ((False,), "the decoder's positions are single numbers: take another model"),
    "quantization_config": ((None,), "dequantize the model first"),
    "auto_map": ((None,), f"the model brings its own code: {_NO_CUSTOM}"),
    "per_layer_config": ((None,), f"the decoder's layers are alike: {_NO_CUSTOM}"),
    "is_encoder_decoder": ((False,), _NO_CUSTOM),
    "add_cross_attention": ((False,), _NO_CUSTOM),
    "tie_encoder_decoder": ((False,), _NO_CUSTOM),
    "pruned_heads": (({}, None), _NO_CUSTOM),
}

# Of no weight in what the model computes: bookkeeping, choices of generation and of training.
_HARMLESS = frozenset("""
    _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled
    _name_or_path attn_implementation begin_suppress_tokens bos_token_id
    chunk_size_feed_forward cls_token_id cross_attention_hidden_size decoder_start_token_id
    dtype eos_token_id finetuning_task gradient_checkpointing id2label initializer_range
    is_decoder is_llama_config label2id max_position_embeddings max_sequence_length
    model_max_length model_name name_or_path neftune_noise_alpha num_labels output_attentions
    output_hidden_states pad_token_id prefix problem_type return_dict sep_token_id
    suppress_tokens task_specific_params tf_legacy_loss tie_last_hidden_states tokenizer_class
    torch_dtype torchscript transformers.js_config transformers_version unsloth_fixed
    unsloth_version use_bfloat16 use_cache

    bad_words_ids diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty
    max_length max_new_tokens min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_scores remove_invalid_values repetition_penalty
    return_dict_in_generate temperature top_k top_p typical_p
    """.split())

# The keys of each kind of rotary scaling, beside those that all share.
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor",
               "original_max_position_embeddings"),
}
_ROPE_SHARED = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_DEFAULT_THETA, _DEFAULT_EPS = 10000.0, 1e-6

# low_freq_factor, high_freq_factor, original_max_position_embeddings of every Llama 3.x
_RELEASED_LLAMA3 = (1.0, 4.0, 8192)

_REQUIRED = object()


def read_config(folder: str | os.PathLike) -> HfConfig:
    """The model of a folder's config.json. Choices of a run (compute_dtype, remat, ...) keep
    their defaults: change them with dataclasses.replace.

    ValueError in one line that names the file and the key: a file that cannot be read, a
    family or a setting that the decoder lacks, a key that is missing, malformed or unknown.
    """
    path = os.path.join(folder, "config.json")
    keys = _Keys(path, _parse(path))
    family = keys.family()
    traits = _TRAITS[family]
    _check_known(keys, family)
    n_layers = keys.whole("num_hidden_layers")
    _check_window(keys, family, n_layers)
    heads, kv_heads, head_dim = _heads(keys, traits)
    theta, divisors = _rope(keys, head_dim)
    model = ModelConfig(
        vocab_size=keys.whole("vocab_size"), d_model=keys.whole("hidden_size"),
        n_layers=n_layers, n_heads=heads, n_kv_heads=kv_heads, head_dim=head_dim,
        d_ff=keys.whole("intermediate_size"), rope_theta=theta,
        norm_eps=keys.number("rms_norm_eps", _DEFAULT_EPS),
        tie_embeddings=keys.flag("tie_word_embeddings", False),
        qkv_bias=traits.qkv_bias, qk_norm=traits.qk_norm, rope_divisors=divisors)
    return HfConfig(family, model, keys.values)


def to_json(model: ModelConfig, family: Family, max_length: int | None = None) -> dict[str, Any]:
    """A config.json that transformers reads to the same model, in the keys that its versions
    4 and 5 both know. For weights that come without a config.json of their own.

    max_length: tokens the model was made for, which a ModelConfig does not hold; None leaves
        out `max_position_embeddings`, for which transformers then has a default of its own.
    ValueError for a model that is not of this family, and for rotary divisors that are
    neither equal (linear scaling) nor those of a released Llama 3.
    """
    traits = _TRAITS[family]
    for name, has in (("qkv_bias", traits.qkv_bias), ("qk_norm", traits.qk_norm)):
        if getattr(model, name) != has:
            raise ValueError(f"{name} is {getattr(model, name)}, in a {family.value} model it "
                             f"is {has}: choose the family that fits")
    data: dict[str, Any] = {
        "architectures": [traits.architecture], "model_type": family.value,
        "vocab_size": model.vocab_size, "hidden_size": model.d_model,
        "intermediate_size": model.d_ff, "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads, "num_key_value_heads": model.n_kv_heads,
        "head_dim": model.head_dim, "hidden_act": "silu", "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta, "rope_scaling": _rope_scaling(model),
        "tie_word_embeddings": model.tie_embeddings, "attention_dropout": 0.0,
        # Else a llama is taken to end at token 2, which may be a word.
        "bos_token_id": None, "eos_token_id": None}
    if family is not Family.QWEN2:
        data["attention_bias"] = False
    if family is Family.LLAMA:
        data["mlp_bias"] = False
    else:
        data["use_sliding_window"] = False
    if max_length is not None:
        data["max_position_embeddings"] = max_length
    return data


@dataclasses.dataclass(frozen=True)
class _Keys:
    """One JSON object of the file; inside: its place in it ("rope_scaling.")."""

    path: str
    values: Mapping[str, Any]
    inside: str = ""

    def fault(self, key: str, remedy: str) -> ValueError:
        name, value = json.dumps(self.inside + key)[1:-1], json.dumps(self.values[key])
        if len(value) > 80:
            value = value[:77] + "..."
        return ValueError(f"{self.path}: {name} is {value}: {remedy}")

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        if key in self.values:
            return self.values[key]
        if default is _REQUIRED:
            raise ValueError(f"{self.path} lacks the key {self.inside}{key}: add it")
        return default

    def whole(self, key: str, default: Any = _REQUIRED, least: int = 1) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.fault(key, f"give a whole number of at least {least}")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        value = self.get(key, default)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:  # a whole number beyond all floats
                number = math.inf
            if math.isfinite(number) and number > 0:
                return number
        raise self.fault(key, "give a positive number")

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.fault(key, "give true or false")
        return value

    def family(self) -> Family:
        value = self.get("model_type")
        if value not in [f.value for f in Family]:
            raise self.fault("model_type", "the model types that are read are "
                             + ", ".join(f.value for f in Family))
        return Family(value)


def _parse(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: give a folder that holds a model") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): give a folder that holds "
                         "a model") from None
    except (ValueError, RecursionError) as error:  # also for bytes that are not UTF-8
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is not JSON ({reason}): fetch it again") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} does not hold a JSON object: fetch it again")
    return data


def _check_known(keys: _Keys, family: Family) -> None:
    for key, value in keys.values.items():
        if key == "attention_bias" and family is Family.QWEN2:
            continue  # no key of this family, whose biases are always there
        if key in _ONLY:
            allowed, remedy = _ONLY[key]
            if value not in allowed:
                raise keys.fault(key, remedy)
        elif key not in _READ and key not in _HARMLESS:
            raise keys.fault(key, "the key is not known; if the model computes the same "
                             "without it, remove it")
    architecture = _TRAITS[family].architecture
    if keys.get("architectures", None) not in (None, [architecture]):
        raise keys.fault("architectures", f"of {family.value} models {architecture} is read")


def _check_window(keys: _Keys, family: Family, n_layers: int) -> None:
    """ValueError where a layer would see less than all earlier tokens."""
    traits = _TRAITS[family]
    every = "every layer must see all earlier tokens: take a model without sliding windows"
    kinds = keys.get("layer_types", None)
    if kinds is not None:  # decides alone
        if kinds != ["full_attention"] * n_layers:
            raise keys.fault("layer_types", every)
        return
    # A llama has no such switch: a width is then enough to ask for a window.
    if not keys.flag("use_sliding_window", family is Family.LLAMA):
        return
    if keys.get("sliding_window", traits.window) is None:
        return
    if keys.whole("max_window_layers", traits.window_from, least=0) < n_layers:
        switch = "use_sliding_window" if "use_sliding_window" in keys.values else "sliding_window"
        raise keys.fault(switch, every)


def _heads(keys: _Keys, traits: _Traits) -> tuple[int, int, int]:
    """Query heads, K/V heads and their width."""
    heads, width = keys.whole("num_attention_heads"), keys.whole("hidden_size")
    kv_heads = heads
    if keys.get("num_key_value_heads", traits.kv_heads) is not None:
        kv_heads = keys.whole("num_key_value_heads", traits.kv_heads)
    if heads % kv_heads:
        raise keys.fault("num_attention_heads", "it must be a multiple of num_key_value_heads, "
                         f"here {kv_heads}: correct one of the two")
    if keys.get("head_dim", traits.head_dim) is not None:
        head_dim = keys.whole("head_dim", traits.head_dim)
    elif traits.head_dim is not None:  # null: the family's own or the quotient?
        raise keys.fault("head_dim", "give the width of a head")
    elif width % heads:
        raise keys.fault("hidden_size", f"no multiple of num_attention_heads, {heads}: add "
                         "head_dim")
    else:
        head_dim = width // heads
    if head_dim % 2:
        raise keys.fault("head_dim" if keys.get("head_dim", None) else "hidden_size",
                         f"heads are {head_dim} wide, rotary positions need an even number")
    return heads, kv_heads, head_dim


def _rope(keys: _Keys, head_dim: int) -> tuple[float, tuple[float, ...]]:
    """theta and the divisors. transformers 4 writes rope_theta and rope_scaling, 5 writes
    rope_parameters with all of it."""
    rope, theta = _rope_keys(keys), keys.number("rope_theta", _DEFAULT_THETA)
    if "rope_theta" in rope.values:
        inner = rope.number("rope_theta")
        if "rope_theta" in keys.values and inner != theta:
            raise rope.fault("rope_theta", f"beside it is a rope_theta of {theta}: keep one")
        theta = inner
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("type", kind) != kind:
        raise rope.fault("type", "beside it is another rope_type: keep one")
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise rope.fault("rope_type" if "rope_type" in rope.values else "type",
                         "the kinds that are read are " + ", ".join(_ROPE_KEYS))
    for key in rope.values:
        if key not in _ROPE_SHARED and key not in _ROPE_KEYS[kind]:
            raise rope.fault(key, f"the key is not known for the kind {kind}")
    allowed, remedy = _ONLY["partial_rotary_factor"]
    if rope.get("partial_rotary_factor", None) not in allowed:
        raise rope.fault("partial_rotary_factor", remedy)
    if kind == "linear":
        return theta, (rope.number("factor"),) * (head_dim // 2)
    if kind == "default":
        return theta, ()
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if not low < high:
        raise rope.fault("low_freq_factor", f"it must be below high_freq_factor, here {high}")
    return theta, llama3_rope_divisors(head_dim, theta, rope.number("factor"), low, high,
                                       rope.whole("original_max_position_embeddings"))


def _rope_keys(keys: _Keys) -> _Keys:
    found = []
    for name in ("rope_parameters", "rope_scaling"):
        value = keys.get(name, None)
        if value is not None and not isinstance(value, dict):
            raise keys.fault(name, "give an object or null")
        if value:
            found.append(_Keys(keys.path, value, f"{name}."))
    if len(found) == 2 and found[0].values != found[1].values:
        raise keys.fault("rope_scaling", "rope_parameters says otherwise: keep one")
    return found[0] if found else _Keys(keys.path, {}, "rope_parameters.")


def _rope_scaling(model: ModelConfig) -> dict[str, Any] | None:
    divisors = model.rope_divisors
    if not divisors:
        return None
    factor = divisors[-1]
    if set(divisors) == {factor}:
        # Readers before transformers 4.43 look for "type".
        return {"rope_type": "linear", "type": "linear", "factor": factor}
    released = llama3_rope_divisors(model.head_dim, model.rope_theta, factor, *_RELEASED_LLAMA3)
    # Divisors out of a GGUF file went through float32.
    if all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(divisors, released)):
        low, high, original = _RELEASED_LLAMA3
        return {"rope_type": "llama3", "factor": factor, "low_freq_factor": low,
                "high_freq_factor": high, "original_max_position_embeddings": original}
    raise ValueError("rope_divisors are not those of linear or of a released Llama 3's scaling, "
                     "so config.json cannot say them: export with the model's source folder")
