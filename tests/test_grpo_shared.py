"""Prompts that rows share: the same statistics, loss and gradients as rows that each hold their
prompt, whoever shares with whom and however rows and prompts are divided."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from grpo_cases import shared_groups, tiny_decoder
from grpo_reference import (
    KL, OPTIMIZER, PLAIN, SHAPE, assert_close, gradient, quick_jit, reference, rows_alone)
from rods_jax.grpo.batch import BatchShape, pack
from rods_jax.grpo.update import init_state, make_update

SHARED = BatchShape(micro=8, rows=2, length=12, tasks=3, group=4, prompts=1, prompt=6)


def start(config):
    params = tiny_decoder()[1]
    state = init_state(params, OPTIMIZER, keep_reference=config.loss.kl_coef > 0)
    if config.loss.kl_coef:
        state = state.replace(ref_params=jax.tree.map(lambda x: x * 0.9, params))
    return state


def run(config, shape, groups, rewards):
    update = quick_jit(make_update(tiny_decoder()[0], config, OPTIMIZER, shape))
    batch = pack(groups, rewards, shape, drop_dead=not config.dead_carry_loss)
    state, metrics = update(start(config), batch)
    return gradient(state), metrics


SHAPES = {
    "one at a time": SHARED,
    "two at a time": dataclasses.replace(SHARED, prompts=2, rows=3),
    "a row each": dataclasses.replace(SHARED, alone=True),
    "in buckets": dataclasses.replace(SHARED, lengths=(4, 8), rows=1, micro=12),
    "prompts cut": dataclasses.replace(SHARED, prompt=2, length=16),
}


@functools.cache
def of_whole_rows(config):
    return run(config, SHAPE, *shared_groups(1))


@pytest.mark.parametrize("shape, config", [
    ("two at a time", KL), ("a row each", KL),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("one at a time", KL), ("in buckets", KL), ("prompts cut", KL), ("one at a time", PLAIN)))])
def test_gradients_are_those_of_whole_rows(shape, config):
    got, metrics = run(config, SHAPES[shape], *shared_groups(1))
    want, whole = of_whole_rows(config)
    assert float(want["embed"].max()) > 1e-3
    assert_close(got, want)
    tokens, whole_tokens = metrics.tokens_A, whole.tokens_A
    assert_close(metrics.replace(tokens_A=0), whole.replace(tokens_A=0))
    # Only prompts are fewer: each is there once, and each row has a token of it.
    assert (tokens[1:] == whole_tokens[1:]).all() and tokens[0] < whole_tokens[0]


def test_rows_of_different_lengths_are_in_different_buckets():
    batch = pack(*shared_groups(1), SHAPES["in buckets"], drop_dead=False)
    assert len(set(batch.bucket_M[:batch.n_micro].tolist())) > 1


def test_gradients_are_those_of_the_reference():
    groups, rewards = shared_groups(2)
    rows = rows_alone(groups, rewards, KL)
    loss, grads = reference(tiny_decoder()[1], start(KL).ref_params, rows, KL)
    got, metrics = run(KL, SHARED, groups, rewards)
    assert metrics.loss == pytest.approx(loss, abs=1e-5)
    assert_close(got, grads)
