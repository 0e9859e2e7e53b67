"""Floating-point operations of a decoder's passes, by formula.

A multiply and an add are two operations. Counted are the matmuls with weights, with adapters
and those of attention (each query with the keys it sees), not norms, rotary positions, softmax
and the optimizer, which are a few hundredths of it. Of a loop a compiler's own count has one
turn alone, and of a kernel nothing, so it cannot take this one's place.
"""

from __future__ import annotations

import dataclasses
import math

from rods_jax.models import lora
from rods_jax.models.config import Attention, ModelConfig, Remat

# Products of the size of queries x keys that each attention makes in the backward pass beside
# the four of the gradients, to have its scores again: one of queries and keys, where all
# gradients are made at once; splash makes those of queries and those of keys and values apart,
# each with scores and their gradients of its own.
_SCORES_AGAIN = {Attention.XLA: 1, Attention.CUDNN: 1, Attention.SPLASH: 3}


@dataclasses.dataclass(frozen=True)
class Work:
    """tokens: run through the layers. pairs: of a query and a key it sees. scored: tokens
    whose log-prob is taken, each by a run of the head."""

    tokens: int
    pairs: int
    scored: int


@dataclasses.dataclass(frozen=True)
class UpdateFlops:
    """Of one update. forward, backward: of the layers, attention and head, what the gradient
    cannot do without. reference: forward passes of the reference policy. What is computed
    again to save memory: layers_again by remat, attention_again the scores in the backward
    pass of a kernel, head_again the logits in the head's."""

    forward: int
    backward: int
    reference: int
    layers_again: int
    attention_again: int
    head_again: int

    @property
    def needed(self) -> int:
        return self.forward + self.backward + self.reference

    @property
    def computed(self) -> int:
        return self.needed + self.layers_again + self.attention_again + self.head_again


def layer_parameters(model: ModelConfig) -> int:
    """Numbers in the matmul weights of all layers, adapters left out."""
    return model.n_layers * sum(inner * outer for inner, outer in _projections(model).values())


def head_parameters(model: ModelConfig) -> int:
    return model.d_model * model.vocab_size


def adapter_parameters(model: ModelConfig) -> int:
    """Numbers in the adapters of all layers, 0 without any."""
    return model.n_layers * sum(_adapter(model, name) for name in _projections(model))


def pass_flops(model: ModelConfig, before: int, tokens: int) -> int:
    """Of running `tokens` tokens behind `before` others through all layers: 2 operations a
    token and weight; 4 a query, key it sees, head and component (scores, weighted values)."""
    weights = layer_parameters(model) + adapter_parameters(model)
    return 2 * weights * tokens + 2 * _product(model, seen(before, tokens))


def seen(before: int, tokens: int) -> int:
    """Pairs of a query and a key it sees, of `tokens` tokens behind `before` others."""
    return tokens * before + tokens * (tokens + 1) // 2


def shared_work(groups: int, rollouts: int, prompt: int, suffix: int) -> Work:
    """Of an update on `groups` prompts with so many rollouts each. A prompt is run once for its
    group; all of a suffix is scored."""
    return Work(groups * (prompt + rollouts * suffix),
                groups * (seen(0, prompt) + rollouts * seen(prompt, suffix)),
                groups * rollouts * suffix)


def update_flops(model: ModelConfig, work: Work, attention: Attention,
                 reference: bool = False) -> UpdateFlops:
    """attention: who computes it, AUTO resolved (`attention.choose`). reference: whether there
    is a KL term, for which the reference policy runs too.

    A weight's matmul has two of its size in the backward pass, for the gradient of its input and
    its own. Frozen weights (model.lora) have the first alone.
    """
    adapters = adapter_parameters(model)
    weights = 2 * layer_parameters(model) * work.tokens
    low_rank = 2 * adapters * work.tokens
    head = 2 * head_parameters(model) * work.scored
    product = _product(model, work.pairs)  # a forward pass has two, scores and values
    forward = weights + low_rank + 2 * product + head
    frozen = weights + head if model.lora else 0
    return UpdateFlops(
        forward=forward, backward=2 * forward - frozen, reference=forward * reference,
        layers_again=_layers_again(model, work),
        attention_again=_SCORES_AGAIN[attention] * product, head_again=head)


def _layers_again(model: ModelConfig, work: Work) -> int:
    """What remat computes again. Of a layer's last projection, `down`, nobody needs the result
    in the backward pass; of its adapter only what A makes."""
    if model.remat is Remat.NONE:
        return 0
    inner_outer = _projections(model)
    rank = model.lora.rank if model.lora else 0
    adapted = model.lora.parameters if model.lora else ()
    if model.remat is Remat.DOTS:  # keeps what weights and A make, and what attention gives
        again = sum(rank * inner_outer[name][1] for name in adapted if name != "down")
        return 2 * model.n_layers * again * work.tokens
    again = sum(inner * outer for name, (inner, outer) in inner_outer.items() if name != "down")
    again += sum(_adapter(model, name) for name in adapted)
    again -= rank * inner_outer["down"][1] * ("down" in adapted)
    return 2 * model.n_layers * again * work.tokens + 2 * _product(model, work.pairs)


def _projections(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of a layer's weights."""
    return {name: (math.prod(inputs), math.prod(outputs))
            for name, (inputs, outputs) in lora.weight_shapes(model).items()}


def _adapter(model: ModelConfig, name: str) -> int:
    """Numbers in the adapter of one layer's weight."""
    if model.lora is None or name not in model.lora.parameters:
        return 0
    return model.lora.rank * sum(_projections(model)[name])


def _product(model: ModelConfig, pairs: int) -> int:
    """Of one product of the size of queries x keys, in all layers and heads."""
    return 2 * model.n_layers * model.n_heads * model.head_dim * pairs
