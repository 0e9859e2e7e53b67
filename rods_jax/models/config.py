"""The shape of a decoder: everything that decides parameters and forward pass."""

from __future__ import annotations

import dataclasses
import enum
import math
import re

_COMPUTE_DTYPES = ("float32", "bfloat16")

# The weights of a layer that LoRA may adapt, under the names that checkpoints give them.
PROJECTIONS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o",
               "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


# Fields of a ModelConfig that say how a model is computed or trained, not which model it is.
CHOICES = ("compute_dtype", "remat", "attention", "scan_unroll", "lora", "int8_weights")


class Remat(str, enum.Enum):
    """What a layer keeps for the backward pass; the rest is computed again."""

    NONE = "none"  # everything is kept
    DOTS = "dots"  # the outputs of matmuls with weights
    LAYER = "layer"  # the layer's input alone


class Attention(str, enum.Enum):
    """Who computes a chunk's attention to itself. Memories are always read by XLA."""

    AUTO = "auto"  # what is fastest where the program runs, see models/attention.py
    XLA = "xla"
    CUDNN = "cudnn"
    SPLASH = "splash"  # Pallas, TPU


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters: y = x W + (alpha / rank) (x A) B, https://arxiv.org/abs/2106.09685.

    targets: a regular expression that the name of a projection must match as a whole
        ("q_proj|v_proj"); the names are those of PROJECTIONS, in every layer alike.
    """

    targets: str = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"
    rank: int = 16
    alpha: float = 32.0

    def __post_init__(self):
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"lora rank is {self.rank!r}: give a positive whole number")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"lora alpha is {self.alpha}: give a positive number")
        try:
            matched = self.parameters
        except re.error as error:
            raise ValueError(f"lora targets {self.targets!r} is no regular expression: "
                             f"{error}") from None
        if not matched:
            raise ValueError(f"lora targets {self.targets!r} matches none of "
                             + ", ".join(PROJECTIONS))

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the adapted parameters: q, k, ..."""
        return tuple(name for proj, name in PROJECTIONS.items()
                     if re.fullmatch(self.targets, proj))

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Llama-shaped decoder. `head_dim` is stated, never derived from `d_model`: some
    models (Qwen3) set it apart. Raises ValueError for values that do not fit together.

    rope_divisors: one number for each of the head_dim / 2 rotary frequencies, which is
        divided by it; empty leaves the frequencies alone (see `llama3_rope_divisors`).
    compute_dtype: dtype of activations and matmuls. Parameters that are trained are float32.
    remat, attention: how a pass is computed, never what. lora: adapters beside the weights,
        parameters of their own; None has none.
    int8_weights: the projections are int8 with scales beside them (models/int8.py), for
        inference alone; rollout/weights.py makes such a tree of a trained one.
    scan_unroll: layers unrolled in a step of the layer scan. Small models run faster on a
        CPU with all layers unrolled, large ones compile faster with 1.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    compute_dtype: str = "float32"
    remat: Remat = Remat.NONE
    attention: Attention = Attention.AUTO
    lora: LoraConfig | None = None
    int8_weights: bool = False
    scan_unroll: int = 1
    rope_divisors: tuple[float, ...] = ()

    def __post_init__(self):
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads",
                     "head_dim", "d_ff", "scan_unroll"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}: give a positive whole number")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads "
                             f"{self.n_kv_heads}: every K/V head serves equally many heads")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary positions need pairs")
        if not (math.isfinite(self.rope_theta) and self.rope_theta > 0):
            raise ValueError(f"rope_theta is {self.rope_theta}: give a positive number")
        if not (math.isfinite(self.norm_eps) and self.norm_eps > 0):
            raise ValueError(f"norm_eps is {self.norm_eps}: give a positive number")
        if self.compute_dtype not in _COMPUTE_DTYPES:
            raise ValueError(f"compute_dtype {self.compute_dtype!r} is not one of "
                             + ", ".join(_COMPUTE_DTYPES))
        if not isinstance(self.rope_divisors, tuple):
            raise ValueError("rope_divisors is not a tuple: wrap it in tuple(...)")
        if self.rope_divisors and len(self.rope_divisors) != self.head_dim // 2:
            raise ValueError(f"rope_divisors has {len(self.rope_divisors)} entries, "
                             f"head_dim {self.head_dim} needs {self.head_dim // 2}")
        if not all(math.isfinite(d) and d > 0 for d in self.rope_divisors):
            raise ValueError("rope_divisors holds a number that is not positive and finite")


def llama3_rope_divisors(
    head_dim: int, rope_theta: float, factor: float, low_freq_factor: float,
    high_freq_factor: float, original_length: int,
) -> tuple[float, ...]:
    """Divisors of the rotary frequencies under Llama 3.1's `rope_type: llama3` scaling.

    With w the wavelength in tokens and r = original_length / w: frequencies with
    r > high_freq_factor stay, those with r < low_freq_factor are divided by `factor`, and
    between the two the frequency is a linear blend (weight s of the unscaled one,
    s = (r - low) / (high - low)), so its divisor is 1 / (s + (1 - s) / factor), written so
    that it is exactly 1 for s = 1 and exactly `factor` for s = 0.
    """
    if not low_freq_factor < high_freq_factor:
        raise ValueError(f"low_freq_factor {low_freq_factor} is not below high_freq_factor "
                         f"{high_freq_factor}")
    divisors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * rope_theta ** (2 * i / head_dim)
        turns = original_length / wavelength
        keep = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
        keep = min(max(keep, 0.0), 1.0)
        divisors.append(factor / (keep * factor + (1.0 - keep)))
    return tuple(divisors)
