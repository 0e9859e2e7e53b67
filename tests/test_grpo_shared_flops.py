"""What an update computes, counted while it is run: little more than the tokens that differ
need."""

import dataclasses

import jax
import numpy as np
import pytest

from executed_flops import executed_flops
from grpo_cases import trajectory
from rods_jax.grpo.batch import BatchShape, pack
from rods_jax.grpo.optimizer import OptimizerConfig, OptimizerKind, make_optimizer
from rods_jax.grpo.update import UpdateConfig, init_state, make_update
from rods_jax.models.config import Attention, ModelConfig, Remat
from rods_jax.models.decoder import Decoder, init_params
from rods_jax.models.flops import shared_work, update_flops
from rods_jax.types import Author

pytestmark = pytest.mark.slow

# The proportions of 16 rollouts of 512 + 128 tokens, a quarter as long, in a small decoder.
GROUP, PROMPT, SUFFIX = 8, 128, 32
MODEL = ModelConfig(64, d_model=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=96)
SHAPE = BatchShape(micro=1, rows=GROUP, length=SUFFIX + 1, tasks=1, group=GROUP, prompts=1,
                   prompt=PROMPT)


def counted(model, shape):
    rng = np.random.default_rng(0)
    prompt = rng.integers(64, size=PROMPT)
    author = [Author.PROMPT] * PROMPT + [Author.SAMPLED] * SUFFIX
    group = [trajectory(np.concatenate([prompt, rng.integers(64, size=SUFFIX)]), author)
             for _ in range(GROUP)]
    optimizer = make_optimizer(OptimizerConfig(kind=OptimizerKind.SGD))
    params = init_params(model, jax.random.key(0))
    batch = pack([group], np.arange(GROUP, dtype=np.float32)[None], shape, True)
    update = make_update(Decoder(model), UpdateConfig(logit_chunk=SUFFIX), optimizer, shape)
    return executed_flops(update, init_state(params, optimizer), batch)


@pytest.mark.parametrize("remat", [Remat.NONE, Remat.LAYER])
def test_an_update_computes_little_more_than_it_must(remat):
    model = dataclasses.replace(MODEL, remat=remat)
    formula = update_flops(model, shared_work(1, GROUP, PROMPT, SUFFIX), Attention.XLA)
    again = formula.computed - formula.needed
    got = counted(model, SHAPE)
    assert formula.needed < got - again < 1.15 * formula.needed


def test_whole_rows_compute_several_times_as_much():
    whole = dataclasses.replace(SHAPE, prompts=0, prompt=0, length=PROMPT + SUFFIX + 1)
    assert counted(MODEL, whole) > 2.5 * counted(MODEL, SHAPE)
