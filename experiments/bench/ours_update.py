"""Our side of the update bench. All that is known here of a batch's layout is in this file."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.update_cases import UpdateCase, UpdateWork
from rods_jax.grpo.batch import BatchShape, pack
from rods_jax.grpo.update import (
    OptimizerConfig, UpdateConfig, init_state, make_optimizer, make_update)
from rods_jax.models.decoder import Decoder
from rods_jax.types import Author, EndReason, Trajectory

# Rollouts in a micro-batch, and of each the tokens whose logits are there at a time.
ROWS, LOGIT_CHUNK = {"small": 16, "long": 8}, 128


class OursUpdate:
    """A case on our update, with the loss and optimizer of a run by default. The first `run`
    compiles; loss and grad_norm are that step's."""

    def __init__(self, decoder: Decoder, params, case: UpdateCase, work: UpdateWork,
                 sampler_GxS: np.ndarray):
        optimizer = make_optimizer(OptimizerConfig())
        # Copied, since a step takes the state's memory along.
        self._state = init_state(jax.tree.map(jnp.copy, params), optimizer)
        self._batch = jax.device_put(_batch(case, work, sampler_GxS))
        self._step = jax.jit(make_update(
            decoder, UpdateConfig(logit_chunk=LOGIT_CHUNK), optimizer), donate_argnums=0)
        self.loss: float | None = None
        self.grad_norm: float | None = None

    def run(self) -> float:
        """Seconds of one step."""
        start = time.perf_counter()
        self._state, metrics = jax.block_until_ready(self._step(self._state, self._batch))
        seconds = time.perf_counter() - start
        if self.loss is None:
            self.loss, self.grad_norm = float(metrics.loss), float(metrics.grad_norm)
        return seconds


def _batch(case: UpdateCase, work: UpdateWork, sampler_GxS: np.ndarray):
    author_L = np.repeat([Author.PROMPT, Author.SAMPLED], [case.prompt, case.suffix])
    logprobs_GxL = np.pad(sampler_GxS, ((0, 0), (case.prompt, 0))).astype(np.float32)
    group = [Trajectory("bench", sample, tokens_L, author_L.astype(np.int8), logprobs_L, (), 1,
                        EndReason.DONE)
             for sample, (tokens_L, logprobs_L) in enumerate(zip(work.tokens_GxL, logprobs_GxL))]
    rows = min(ROWS.get(case.name, case.group), case.group)
    # A row begins with the prompt's last token.
    shape = BatchShape(micro=-(-case.group // rows), rows=rows, length=1 + case.suffix, tasks=1,
                       group=case.group, prompts=1, prompt=case.prompt)
    return pack([group], work.rewards_G[None], shape, drop_dead=True)
