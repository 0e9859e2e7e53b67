"""google-tunix's own sampler at its best on a CPU, run by the Python of its own environment:
`python -m experiments.bench.peer_tunix FOLDER` (see serve.py).

float32, its own Qwen3 model, the group in one batch, programs compiled before they are timed,
a cache of exactly the length of the dialogue, prompts not padded, no echo. Tokens come from
the whole distribution at temperature 1, and no token ends a message.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import json
import os
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.qwen3.model import ModelConfig
from tunix.models.qwen3.params import create_model_from_safe_tensors

from experiments.bench.serve import Commands, serve

NO_TOKEN = -2  # as the end of a message: it never comes


class Ids:
    """A tokenizer whose texts are token ids already."""

    def encode(self, ids, **_):
        return list(ids)

    def decode(self, ids, **_):
        return ""

    def bos_id(self):
        return None

    def eos_id(self):
        return NO_TOKEN

    def pad_id(self):
        return -1  # no token either: the sampler takes every pad for padding


def read_config(folder: str) -> ModelConfig:
    keys = json.loads((pathlib.Path(folder) / "config.json").read_text(encoding="utf-8"))
    return ModelConfig(
        num_layers=keys["num_hidden_layers"], vocab_size=keys["vocab_size"],
        embed_dim=keys["hidden_size"], hidden_dim=keys["intermediate_size"],
        num_heads=keys["num_attention_heads"], num_kv_heads=keys["num_key_value_heads"],
        head_dim=keys["head_dim"], norm_eps=keys["rms_norm_eps"],
        rope_theta=int(keys["rope_theta"]), use_tied_embedding=keys["tie_word_embeddings"])


def make(folder: str) -> tuple[dict, Commands]:
    config = read_config(folder)
    model = create_model_from_safe_tensors(folder, config, dtype=jnp.float32)
    seeds = itertools.count()

    @functools.cache
    def sampler(length: int) -> Sampler:
        return Sampler(model, Ids(), CacheConfig(
            cache_size=length, num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads, head_dim=config.head_dim))

    def score(tokens: list[list[int]]) -> dict:
        """Log-prob of each token but the first, given those before it."""
        ids = jnp.array(tokens)
        rows, length = ids.shape
        seen = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))
        logits, _ = model(ids, jnp.broadcast_to(jnp.arange(length), ids.shape), None, seen)
        logprobs = jax.nn.log_softmax(logits)[:, :-1]
        found = jnp.take_along_axis(logprobs, ids[:, 1:, None], axis=-1)[..., 0]
        return {"logprobs": found.tolist()}

    def run(prompt: list[int], tools: list, group: int, new: int) -> dict:
        rows = [prompt] * group
        start = time.perf_counter()
        for message in range(len(tools) + 1):
            if message:
                rows = [row + tool for row, tool in zip(rows, tools[message - 1], strict=True)]
            length = len(rows[0])
            found = sampler(length + new)(
                rows, max_generation_steps=new, max_prompt_length=length, echo=False,
                eos_tokens=[NO_TOKEN], temperature=1.0, top_p=1.0, seed=next(seeds))
            rows = [row + np.asarray(tokens).tolist()
                    for row, tokens in zip(rows, found.tokens, strict=True)]
        seconds = time.perf_counter() - start
        given = group * len(prompt) + sum(len(tool) for round_ in tools for tool in round_)
        return {"seconds": seconds, "sampled": sum(map(len, rows)) - given,
                "distinct": len(set(map(tuple, rows)))}

    greeting = {"threads": len(os.sched_getaffinity(0)), "versions": {
        name: importlib.metadata.version(name) for name in ("google-tunix", "jax", "flax")}}
    return greeting, {"score": score, "run": run,
                      "need": lambda **case: _need(sampler, **case)}


def _need(sampler, prompt: int, group: int, new: int) -> dict:
    """Bytes that the sampler asks for to run `prompt` tokens: what its compiled program
    states, which is not run."""
    one = sampler(prompt + new)
    state = one.init_sample_state(
        jnp.zeros((group, prompt), jnp.int32), total_sampling_steps=prompt + new,
        include_logits=False, forbidden_token_ids=None, temperature=1.0, top_p=1.0, top_k=None,
        seed=jax.random.PRNGKey(0), beam_size=None)
    one.eos_ids = jnp.array([NO_TOKEN])
    program = one._compiled_prefill_fn.lower(
        one._flattened_transformer_state, state, None, echo=False).compile()
    sizes = program.memory_analysis()
    return {"bytes": sizes.temp_size_in_bytes + sizes.argument_size_in_bytes
            + sizes.output_size_in_bytes - sizes.alias_size_in_bytes}


if __name__ == "__main__":
    serve(make)
