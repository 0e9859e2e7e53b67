"""Floating-point operations and bytes that a case cannot do without, by formula.

What is counted says models/flops.py. The prompt is counted once a group, whoever samples.
"""

from __future__ import annotations

from experiments.bench.cases import Case
from rods_jax.models.config import ModelConfig
from rods_jax.models.flops import head_parameters, layer_parameters, pass_flops

FLOAT32 = 4  # bytes


def prefill_flops(model: ModelConfig, case: Case) -> int:
    return pass_flops(model, 0, case.prompt)


def extend_flops(model: ModelConfig, case: Case) -> int:
    """Of the tool results. The last token of a message runs with the result behind it."""
    return case.group * sum(
        pass_flops(model, _begin(case, message) + case.new - 1, 1 + case.tool)
        for message in range(case.messages - 1))


def decode_flops(model: ModelConfig, case: Case) -> int:
    """Of all draws, and of the passes between the draws of a message."""
    draws = 2 * head_parameters(model) * case.new * case.messages
    return case.group * (draws + sum(
        pass_flops(model, _begin(case, message), case.new - 1)
        for message in range(case.messages)))


def decode_weight_bytes(model: ModelConfig, case: Case) -> int:
    """Weights read by the steps of decoding, each once a step for the whole group."""
    a_message = case.new * head_parameters(model) + (case.new - 1) * layer_parameters(model)
    return FLOAT32 * case.messages * a_message


def decode_kv_bytes(model: ModelConfig, case: Case) -> int:
    """Keys and values read by the steps of decoding: a step reads the prompt's once for the
    group and each rollout's own."""
    entries = 0
    for message in range(case.messages):
        for step in range(1, case.new):
            own = _begin(case, message) + step - case.prompt
            entries += case.prompt + case.group * own
    return entries * 2 * model.n_layers * model.n_kv_heads * model.head_dim * FLOAT32


def _begin(case: Case, message: int) -> int:
    """Tokens before a message."""
    return case.prompt + message * (case.new + case.tool)
