"""Floating-point operations that an update cannot do without, by formula, counted as in
bounds.py: matmuls with weights and those of attention.

The gradient of a matmul takes two matmuls of the same size, one for each factor, so a step is
three times its forward pass; attention too (scores and weighted values: 4 operations forward,
8 backward, for a query, key it sees, head and component). What is computed again in the
backward pass to spare memory is counted apart.
"""

from __future__ import annotations

from experiments.bench.bounds import head_parameters, pass_flops
from experiments.bench.update_cases import UpdateCase
from rods_jax.models.config import ModelConfig

STEP = 3  # forward passes


def shared_flops(model: ModelConfig, case: UpdateCase) -> int:
    """Of a step that runs the prompt once for the group."""
    suffixes = case.group * pass_flops(model, case.prompt, case.suffix)
    return STEP * (pass_flops(model, 0, case.prompt) + suffixes + head_flops(model, case))


def whole_flops(model: ModelConfig, case: UpdateCase) -> int:
    """Of a step that runs every rollout whole, the prompt with each."""
    return STEP * (case.group * pass_flops(model, 0, case.length) + head_flops(model, case))


def head_flops(model: ModelConfig, case: UpdateCase) -> int:
    """Of the logits of all scored tokens, forward. Also what it takes to compute them again."""
    return 2 * head_parameters(model) * case.scored


def shared_scores_flops(model: ModelConfig, case: UpdateCase) -> int:
    """Of all scores of attention, forward, the prompt's once for the group: what an attention
    that keeps none of them computes again. Half of its forward pass."""
    per_pair = 2 * model.n_layers * model.n_heads * model.head_dim
    prompt = case.prompt * (case.prompt + 1) // 2
    suffix = case.suffix * case.prompt + case.suffix * (case.suffix + 1) // 2
    return per_pair * (prompt + case.group * suffix)
