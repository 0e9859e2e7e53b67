"""LoRA adapters in PEFT's form: adapter_model.safetensors beside adapter_config.json.

PEFT has A as [r, in] and B as [out, r] of every adapted projection of every layer; the
decoder keeps [in, r] and [r, out], heads as axes of their own and the layers stacked
(models/lora.py). No value changes on the way.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from rods_jax.models import lora
from rods_jax.models.config import PROJECTIONS, LoraConfig, ModelConfig
from rods_jax.models.hf.export import check_finite
from rods_jax.models.hf.files import DTYPES, write_weights
from rods_jax.models.hf.names import Slot, slots
from rods_jax.models.hf.publish import free_target, published

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"

_PREFIX = "base_model.model."

# Keys with more than one value that asks for what the decoder computes: those values.
_ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none", None),
    # Others (pissa, olora, corda, loftq) put a part of the base model into the adapter.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}

_READ = frozenset(("r", "lora_alpha", "target_modules", "exclude_modules"))

# Of no weight in what a trained adapter computes. Every other key must be off.
_HARMLESS = frozenset("""
    auto_mapping base_model_name_or_path corda_config eva_config inference_mode loftq_config
    lora_dropout lora_ga_config megatron_config megatron_core peft_version qalora_group_size
    revision runtime_config
    """.split())


def save_adapter(folder: str | os.PathLike, params: Mapping[str, Any], config: ModelConfig,
                 base: str) -> None:
    """Writes the adapters in `params` (the whole tree or they alone) as float32 to `folder`,
    which must be empty or not there yet. It appears whole or not at all.

    base: path or hub name of the model they belong to, for PEFT to load. On several
    processes all call this; the first one writes. ValueError in one line where adapters and
    config do not fit; OSError where the disk is full or refuses.
    """
    target = free_target(folder)
    if config.lora is None:
        raise ValueError("the model's config has no lora: there is no adapter to save")
    lora.check(params, config)
    tensors = {name: tensor for slot in _adapted(config)
               for name, tensor in _to_file(slot, params["layers"])}
    for name, tensor in tensors.items():
        check_finite(name, tensor)
    if jax.process_index() == 0:
        with published(target) as draft:
            write_weights(draft / WEIGHTS, tensors)
            settings = json.dumps(_settings(config.lora, base), indent=2) + "\n"
            (draft / CONFIG).write_text(settings, encoding="utf-8")
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("hf_adapter_saved")


def read_lora(folder: str | os.PathLike, config: ModelConfig) -> LoraConfig:
    """What the adapter in `folder` adapts in a model of `config`, whose own lora is not
    looked at. ValueError as in `load_adapter`."""
    path = pathlib.Path(folder) / CONFIG
    settings = _read_settings(path)
    chosen: set[frozenset[str]] = set()
    for layer in range(config.n_layers):
        chosen.add(frozenset(_projection(slot) for slot in _projections(config)
                             if _targeted(settings, _module(slot, layer), path)))
    if len(chosen) > 1:
        raise ValueError(f"{path}: target_modules differ by layer, which this decoder cannot: "
                         "take an adapter of the same projections in every layer")
    names, = chosen
    targets = "|".join(name for name in PROJECTIONS if name in names)
    if not targets:
        raise ValueError(f"{path}: target_modules match none of {', '.join(PROJECTIONS)}: take "
                         "an adapter of this model")
    try:
        return LoraConfig(targets, settings["r"], float(settings["lora_alpha"]))
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path}: {error}") from None


def load_adapter(folder: str | os.PathLike, config: ModelConfig) -> dict[str, Any]:
    """Adapters as float32 jax arrays, to be joined to the model's weights.

    config: with lora as `read_lora` returns it; another pattern of the same projections will
    do. ValueError in one line that names file and key: for a folder that is not a whole LoRA
    adapter, for settings of PEFT that this decoder does not compute (use_rslora, use_dora,
    rank_pattern, modules_to_save, ...), and for tensors that are missing, unknown, of another
    shape or of a type that is not read.
    """
    found, path = read_lora(folder, config), pathlib.Path(folder) / WEIGHTS
    own = config.lora
    if own is None or (own.parameters, own.rank, own.scale) != (
            found.parameters, found.rank, found.scale):
        raise ValueError(f"{folder} is an adapter of another form than the model's lora, {own}: "
                         f"set that to {found}")
    tensors = _read_tensors(path)
    layers = {}
    for slot in _adapted(config):
        for end, shape in ((lora.A, (own.rank, slot.shape[1])),
                           (lora.B, (slot.shape[0], own.rank))):
            stack = [_take(tensors, _tensor(slot, layer, end), shape, path)
                     for layer in range(config.n_layers)]
            name = _name(slot) + end
            flat = np.stack(stack).swapaxes(1, 2)
            layers[name] = jnp.asarray(
                flat.reshape(config.n_layers, *lora.shapes(config)[name]), jnp.float32)
    for name in tensors:
        raise ValueError(f"tensor {name} in {path} is of no projection that its {CONFIG} "
                         "targets: this reads plain LoRA of projections alone")
    return {"layers": layers}


# ---------------------------------------------------------------- names


def _projections(config: ModelConfig) -> list[Slot]:
    return [slot for slot in slots(config) if _name(slot) in PROJECTIONS.values()]


def _adapted(config: ModelConfig) -> list[Slot]:
    return [slot for slot in _projections(config) if _name(slot) in config.lora.parameters]


def _name(slot: Slot) -> str:
    """q, k, ..."""
    return slot.parameter.removeprefix("layers/")


def _module(slot: Slot, layer: int) -> str:
    """model.layers.0.self_attn.q_proj"""
    return slot.name(layer).removesuffix(".weight")


def _projection(slot: Slot) -> str:
    """q_proj"""
    return _module(slot, 0).rpartition(".")[2]


def _tensor(slot: Slot, layer: int, end: str) -> str:
    return f"{_PREFIX}{_module(slot, layer)}.lora_{'A' if end == lora.A else 'B'}.weight"


# ---------------------------------------------------------------- settings


def _settings(config: LoraConfig, base: str) -> dict[str, Any]:
    alpha = int(config.alpha) if config.alpha == int(config.alpha) else config.alpha
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
        "r": config.rank, "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none",
        "target_modules": [proj for proj, name in PROJECTIONS.items()
                           if name in config.parameters],
        "fan_in_fan_out": False, "inference_mode": True}


def _read_settings(path: pathlib.Path) -> dict[str, Any]:
    """Those of plain LoRA, whatever else the file says."""
    try:
        settings = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): give the folder of a LoRA "
                         "adapter") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({_one_line(error)}): fetch it again") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} does not hold a JSON object: fetch it again")
    for key in ("peft_type", "r", "lora_alpha", "target_modules"):
        if settings.get(key) is None:
            raise ValueError(f"{path} lacks the key {key}: save the adapter with PEFT")
    for key, value in settings.items():
        if key in _ONLY:
            fits = any(value is x or value == x for x in _ONLY[key])
        else:
            off = value is None or value is False or value in ([], {})
            fits = off or key in _READ or key in _HARMLESS
        if not fits:
            raise ValueError(f"{path}: {key} is {_short(value)}: this reads plain LoRA alone, "
                             "so merge the adapter into its model with PEFT")
    alpha = settings["lora_alpha"]
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
        raise ValueError(f"{path}: lora_alpha is {_short(alpha)}: give a number")
    return settings


def _targeted(settings: Mapping[str, Any], module: str, path: pathlib.Path) -> bool:
    """Whether PEFT adapts the module."""
    if settings.get("exclude_modules") and _matches(settings, "exclude_modules", module, path):
        return False
    return _matches(settings, "target_modules", module, path)


def _matches(settings: Mapping[str, Any], key: str, module: str, path: pathlib.Path) -> bool:
    """A text is a pattern for the whole name, a list holds names or their last parts."""
    wanted = settings[key]
    if isinstance(wanted, str):
        if wanted.lower() == "all-linear":
            return True
        try:
            return re.fullmatch(wanted, module) is not None
        except re.error as error:
            raise ValueError(f"{path}: {key} is no regular expression: {error}") from None
    if not isinstance(wanted, list) or not all(isinstance(name, str) for name in wanted):
        raise ValueError(f"{path}: {key} is {_short(wanted)}: give a list of names or a pattern")
    return any(module == name or module.endswith(f".{name}") for name in wanted)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


# ---------------------------------------------------------------- tensors


def _to_file(slot: Slot, layers: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """(name, tensor) of all layers."""
    for end in (lora.A, lora.B):
        stack = _on_host(layers[_name(slot) + end]).astype(np.float32)
        rank_last = end == lora.A
        for layer, x in enumerate(stack):
            flat = x.reshape(-1, x.shape[-1]) if rank_last else x.reshape(x.shape[0], -1)
            yield _tensor(slot, layer, end), np.ascontiguousarray(flat.T)


def _on_host(x) -> np.ndarray:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def _read_tensors(path: pathlib.Path) -> dict[str, Any]:
    """Tensor by name, as numpy arrays of the file's dtype."""
    try:
        import safetensors
    except ImportError:
        raise ValueError("the package safetensors is not installed: "
                         "pip install safetensors") from None
    if not path.is_file():
        raise ValueError(f"{path} is not there: " + (
            "convert adapter_model.bin to safetensors with PEFT"
            if path.with_suffix(".bin").exists() else "fetch it"))
    try:
        with safetensors.safe_open(path, framework="np") as file:
            for name in file.keys():
                dtype = file.get_slice(name).get_dtype()
                if dtype not in DTYPES:
                    raise ValueError(f"tensor {name} in {path} is of type {dtype}, this reads "
                                     + ", ".join(DTYPES))
            return {name: file.get_tensor(name) for name in file.keys()}
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({_one_line(error)}): "
                         "fetch it again") from None


def _take(tensors: dict[str, np.ndarray], name: str, shape: tuple[int, ...],
          path: pathlib.Path) -> np.ndarray:
    """Removes it from `tensors`, as float32."""
    if name not in tensors:
        raise ValueError(f"{path} lacks the tensor {name}, which target_modules of its {CONFIG} "
                         "ask for: fetch both again")
    x = tensors.pop(name)
    if x.shape != shape:
        raise ValueError(f"tensor {name} in {path} has the shape {x.shape}, r and the model ask "
                         f"for {shape}: it belongs to another model")
    return x.astype(np.float32)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
