"""One GRPO update with google-tunix's own model and log-prob function, at its best on a CPU, run
by the Python of its own environment: `python -m experiments.bench.peer_tunix_update FOLDER`
(see serve.py).

The log-probs are those of `tunix.rl.common.compute_per_token_logps`, called as its GRPO loss
calls it; around it are the bench's loss, `nnx.value_and_grad` and an `nnx.Optimizer` under one
`nnx.jit` that donates model and optimizer, as tunix's trainer has them. Its own GRPO loss
is not run: it takes entropies and other metrics as well, which are left out in its favour.
float32, activations kept (no remat, its fastest), compiled before it is timed. The advantages
are there before the clock starts.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3.model import RematConfig
from tunix.models.qwen3.params import create_model_from_safe_tensors
from tunix.rl.common import compute_per_token_logps

from experiments.bench.peer_tunix import read_config
from experiments.bench.serve import Commands, serve

NO_TOKEN = -1  # as padding and as the end: it never comes


def make(folder: str) -> tuple[dict, Commands]:
    config = dataclasses.replace(read_config(folder), remat_config=RematConfig.NONE)
    now: dict = {}

    def prepare(prompt: list[int], completions: list, sampler: list, rewards: list[float],
                eps: float, lr: float, rows: int, clip_low: float, clip_high: float,
                clip_norm: float) -> dict:
        """The weights as they are in the folder, an optimizer that has seen nothing, and the
        work of every step from now on. rows: in a micro-batch."""
        if len(completions) % rows:
            raise ValueError(f"{rows} rows do not divide {len(completions)} rollouts")
        reward_G = np.asarray(rewards, np.float32)
        folded = lambda x: jnp.asarray(x).reshape(-1, rows, *np.shape(x)[1:])  # noqa: E731
        now["batch"] = jax.tree.map(folded, {
            "prompt": np.broadcast_to(np.asarray(prompt, np.int32), (len(rewards), len(prompt))),
            "completion": np.asarray(completions, np.int32),
            "sampler": np.asarray(sampler, np.float32),
            "advantage": (reward_G - reward_G.mean()) / (reward_G.std() + np.float32(eps))})
        model = create_model_from_safe_tensors(folder, config, dtype=jnp.float32)
        rule = optax.chain(optax.clip_by_global_norm(clip_norm),
                           optax.adamw(lr, weight_decay=0.0))
        now["model"], now["optimizer"] = model, nnx.Optimizer(model, rule, wrt=nnx.Param)
        for part in (model, now["optimizer"]):  # as a step returns them, or it compiles twice
            nnx.update(part, jax.device_put(nnx.state(part), jax.devices()[0]))
        now["step"] = _make_step((1 - clip_low, 1 + clip_high))
        return {}

    def step() -> dict:
        """One optimizer step, timed until the parameters are there."""
        start = time.perf_counter()
        loss, norm, logprobs = now["step"](now["model"], now["optimizer"], now["batch"])
        jax.block_until_ready((nnx.state(now["model"]), nnx.state(now["optimizer"])))
        seconds = time.perf_counter() - start
        rows = np.asarray(logprobs).reshape(-1, logprobs.shape[-1])
        return {"seconds": seconds, "loss": float(loss), "grad_norm": float(norm),
                "logprobs": rows.tolist()}

    greeting = {"threads": len(os.sched_getaffinity(0)), "versions": {
        name: importlib.metadata.version(name) for name in ("google-tunix", "jax", "flax")}}
    return greeting, {"prepare": prepare, "step": step}


def _make_step(clip: tuple[float, float]):
    def loss_of(model, part, group: int):
        graph, state = nnx.split(model)
        logp = compute_per_token_logps(
            graph, state, prompt_tokens=part["prompt"], completion_tokens=part["completion"],
            pad_id=NO_TOKEN, eos_id=NO_TOKEN, stop_gradient=False, temperature=1.0)
        ratio = jnp.exp(logp - part["sampler"])
        advantage = part["advantage"][:, None]
        terms = -jnp.minimum(ratio * advantage, jnp.clip(ratio, *clip) * advantage)
        return terms.mean(-1).sum() / group, logp

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def step(model, optimizer, batch):
        micro, rows = batch["advantage"].shape
        gradient = nnx.value_and_grad(loss_of, has_aux=True)
        total, grads, found = 0.0, None, []
        for i in range(micro):
            part = jax.tree.map(lambda x, i=i: x[i], batch)
            (loss, logp), some = gradient(model, part, micro * rows)
            total += loss
            grads = some if grads is None else jax.tree.map(jnp.add, grads, some)
            found.append(logp)
        optimizer.update(model, grads)
        return total, optax.global_norm(grads), jnp.stack(found)

    return step


if __name__ == "__main__":
    serve(make)
