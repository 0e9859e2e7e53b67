"""Where each tensor of a Hugging Face checkpoint goes in the decoder's parameter tree.

A Llama-shaped checkpoint stores linear maps as [out, in]; the decoder keeps [in, out] with
heads as an axis of their own and the layers stacked. No value changes on the way, so that
what goes in comes out bit for bit.
"""

from __future__ import annotations

import dataclasses
import enum

from rods_jax.models.config import PROJECTIONS, ModelConfig

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Layout(enum.Enum):
    """From the file's axes to the parameter's (of one layer)."""

    SAME = "same"  # [V, D] or [D]
    LINEAR = "linear"  # [out, in] -> [in, out]
    TO_HEADS = "to_heads"  # [H * HD, D] -> [D, H, HD]
    FROM_HEADS = "from_heads"  # [D, H * HD] -> [H, HD, D]
    HEAD_BIAS = "head_bias"  # [H * HD] -> [H, HD]


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
