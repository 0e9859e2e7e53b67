"""Where each tensor of a Hugging Face checkpoint goes in the decoder's parameter tree.

A Llama-shaped checkpoint stores linear maps as [out, in]; the decoder keeps [in, out] with
heads as an axis of their own and the layers stacked. No value changes on the way, so that
what goes in comes out bit for bit.
"""

from __future__ import annotations

import dataclasses
import enum
import re

from rods_jax.models.config import PROJECTIONS, ModelConfig

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"

# Tables that some checkpoints carry and every reader computes itself.
_COMPUTED = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\."
                       r"(inv_freq|cos_cached|sin_cached)")


class Layout(enum.Enum):
    """From the file's axes to the parameter's (of one layer)."""

    SAME = "same"  # [V, D] or [D]
    LINEAR = "linear"  # [out, in] -> [in, out]
    TO_HEADS = "to_heads"  # [H * HD, D] -> [D, H, HD]
    FROM_HEADS = "from_heads"  # [D, H * HD] -> [H, HD, D]
    HEAD_BIAS = "head_bias"  # [H * HD] -> [H, HD]


# Which axis of the file's shape is grouped by heads.
_HEAD_AXIS = {Layout.TO_HEADS: 0, Layout.FROM_HEADS: 1, Layout.HEAD_BIAS: 0}
_ORDER = {Layout.LINEAR: (1, 0), Layout.TO_HEADS: (2, 0, 1), Layout.FROM_HEADS: (1, 2, 0)}


@dataclasses.dataclass(frozen=True)
class Slot:
    """One kind of tensor. parameter: its path in the tree ("embed", "layers/q"). tensor: its
    name in the file, with {layer} where it is one of a layer. shape: in the file. heads: how
    many the file's rows (or columns) are grouped by, 0 where they are not."""

    parameter: str
    tensor: str
    shape: tuple[int, ...]
    layout: Layout
    heads: int = 0

    @property
    def stacked(self) -> bool:
        return "{layer}" in self.tensor

    def name(self, layer: int) -> str:
        return self.tensor.format(layer=layer)

    @property
    def head_axis(self) -> int | None:
        return _HEAD_AXIS.get(self.layout)

    @property
    def split(self) -> tuple[int, ...]:
        """`shape` with the axis that is grouped by heads written as two, [.., H, HD, ..]."""
        axis = self.head_axis
        if axis is None:
            return self.shape
        width = self.shape[axis] // self.heads
        return (*self.shape[:axis], self.heads, width, *self.shape[axis + 1:])

    @property
    def order(self) -> tuple[int, ...]:
        """Axes of `split` in the order of the parameter's:
        parameter == tensor.reshape(split).transpose(order)."""
        return _ORDER.get(self.layout, tuple(range(len(self.split))))

    @property
    def inverse(self) -> tuple[int, ...]:
        """The way back: tensor == parameter.transpose(inverse).reshape(shape)."""
        return tuple(self.order.index(axis) for axis in range(len(self.order)))

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """Of one layer."""
        return tuple(self.split[axis] for axis in self.order)


def slots(config: ModelConfig) -> tuple[Slot, ...]:
    """Every tensor that a checkpoint of this shape holds, adapters apart. A tied head has
    none."""
    c = config
    d, f, hd = c.d_model, c.d_ff, c.head_dim
    heads = {"q": c.n_heads, "k": c.n_kv_heads, "v": c.n_kv_heads, "o": c.n_heads}
    found = [Slot("embed", EMBED, (c.vocab_size, d), Layout.SAME),
             Slot("final_norm", "model.norm.weight", (d,), Layout.SAME)]
    if not c.tie_embeddings:
        found.append(Slot("head", HEAD, (c.vocab_size, d), Layout.LINEAR))

    def layer(name: str, tensor: str, shape, layout: Layout, n: int = 0) -> None:
        found.append(Slot(f"layers/{name}", "model.layers.{layer}." + tensor, shape, layout, n))

    layer("attn_norm", "input_layernorm.weight", (d,), Layout.SAME)
    layer("mlp_norm", "post_attention_layernorm.weight", (d,), Layout.SAME)
    for proj, name in PROJECTIONS.items():
        if name == "o":
            layer(name, f"self_attn.{proj}.weight", (d, c.n_heads * hd), Layout.FROM_HEADS,
                  c.n_heads)
        elif name in heads:
            n = heads[name]
            layer(name, f"self_attn.{proj}.weight", (n * hd, d), Layout.TO_HEADS, n)
            if c.qkv_bias:
                layer(f"{name}_bias", f"self_attn.{proj}.bias", (n * hd,), Layout.HEAD_BIAS, n)
        else:
            shape = (d, f) if name == "down" else (f, d)
            layer(name, f"mlp.{proj}.weight", shape, Layout.LINEAR)
    if c.qk_norm:
        layer("q_norm", "self_attn.q_norm.weight", (hd,), Layout.SAME)
        layer("k_norm", "self_attn.k_norm.weight", (hd,), Layout.SAME)
    return tuple(found)


def places(config: ModelConfig) -> dict[str, tuple[Slot, int]]:
    """(slot, layer) of every tensor by its name in the file, in the order that a forward
    pass uses them."""
    every = slots(config)
    embed, *after = (slot for slot in every if not slot.stacked)
    stacked = [slot for slot in every if slot.stacked]
    order = [(embed, 0), *((slot, layer) for layer in range(config.n_layers) for slot in stacked),
             *((slot, 0) for slot in after)]
    return {slot.name(layer): (slot, layer) for slot, layer in order}


def is_computed(tensor: str) -> bool:
    """Whether a tensor of this name may lie in a file although no parameter comes of it."""
    return _COMPUTED.fullmatch(tensor) is not None
