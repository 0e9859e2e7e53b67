"""Whether the tensors of a checkpoint are those that a decoder of a given shape needs."""

from __future__ import annotations

import dataclasses
import math

from rods_jax.models.config import CHOICES, ModelConfig
from rods_jax.models.hf.files import DTYPES, Weights
from rods_jax.models.hf.names import EMBED, HEAD, is_computed, places, slots

# How a pass is computed, and what lies beside the weights: no part of a checkpoint.
_BLOCK_BYTES = 16 * 2 ** 20


def check_tensors(weights: Weights, model: ModelConfig) -> None:
    """ValueError in one line, naming file and tensor: for one that is missing, unknown, of
    another shape or of a type that is not read, and for a head that is tied to the embedding
    but differs from it."""
    # The last layer first: a damaged count of layers may be any number.
    for name in [slot.name(model.n_layers - 1) for slot in slots(model)]:
        if name not in weights.tensors:
            raise _missing(weights, name)
    expected = places(model)
    for name, (slot, _) in expected.items():
        if name not in weights.tensors:
            raise _missing(weights, name)
        stored = weights.tensors[name]
        if stored.dtype not in DTYPES:
            raise ValueError(f"tensor {name} in {stored.file} is of type {stored.dtype}, this "
                             f"reads {', '.join(DTYPES)}: take weights that are not quantized")
        if stored.shape != slot.shape:
            raise ValueError(f"tensor {name} in {stored.file} has the shape {stored.shape}, "
                             f"config.json asks for {slot.shape}")
    tied = {HEAD} if model.tie_embeddings else set()
    for name, stored in weights.tensors.items():
        if name not in expected and name not in tied and not is_computed(name):
            raise ValueError(f"tensor {name} in {stored.file} has no place in this decoder: "
                             "the model is not of the shape it reads")
    if tied & weights.tensors.keys():
        _check_tied(weights)


def _missing(weights: Weights, name: str) -> ValueError:
    remedy = ("if the model has no head of its own, config.json must say tie_word_embeddings"
              if name == HEAD else "its config.json asks for it")
    return ValueError(f"{weights.folder} lacks the tensor {name}: {remedy}")


def check_same_model(model: ModelConfig, of_source: ModelConfig, source: str) -> None:
    """ValueError for the first field that decides parameters or forward pass and differs.
    Floats may differ by rounding: other file formats keep them in float32."""
    for field in dataclasses.fields(ModelConfig):
        ours, theirs = getattr(model, field.name), getattr(of_source, field.name)
        if field.name not in CHOICES and not _close(ours, theirs):
            raise ValueError(f"{source} is another model: its {field.name} is {theirs}, that of "
                             f"these weights {ours}")


def _close(a, b) -> bool:
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_close, a, b))
    return math.isclose(a, b, rel_tol=1e-5) if isinstance(a, float) else a == b


def _check_tied(weights: Weights) -> None:
    """A head in the file may only repeat the embedding: else one of the two would be lost."""
    head, embed = weights.tensors[HEAD], weights.tensors[EMBED]
    same = (head.dtype, head.shape) == (embed.dtype, embed.shape)
    rows, width = embed.shape
    step = max(1, _BLOCK_BYTES // (4 * width))
    for start in range(0, rows, step):
        block = (slice(start, min(start + step, rows)),)
        if not same or weights.read(HEAD, block).tobytes() != weights.read(
                EMBED, block).tobytes():
            raise ValueError(f"{HEAD} in {head.file} differs from {EMBED} although config.json "
                             "ties them: if the head is real, set tie_word_embeddings to false")
