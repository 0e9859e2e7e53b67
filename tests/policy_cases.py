"""A policy of a few hundred weights that does what a real one does now and then: its vocabulary
holds a whole call as one token, and its head favours that token and the stop token."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from rods_jax.models.config import ModelConfig
from rods_jax.models.decoder import init_params
from rods_jax.text.tokenizer import byte_level_tokenizer


def call(name, **arguments):
    return (f'<tool_call>\n{json.dumps({"name": name, "arguments": arguments})}\n</tool_call>')


def small_tokenizer(texts, more=(), pieces=1000):
    """BPE pieces of `texts`, so that prompts are as short as real ones; the control tokens of
    ChatML and `more`."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(
        vocab_size=pieces, show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    made = json.loads(model.to_str())["model"]
    marks = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *more)
    return byte_level_tokenizer(
        made["vocab"], list(map(tuple, made["merges"])),
        {mark: len(made["vocab"]) + i for i, mark in enumerate(marks)})


def small_model(tokenizer, **sizes):
    return ModelConfig(**dict(vocab_size=tokenizer.vocab_size, d_model=8, n_layers=1, n_heads=1,
                              n_kv_heads=1, head_dim=8, d_ff=8, tie_embeddings=False) | sizes)


def biased_params(model, tokenizer, likely):
    """Every embedding shares a direction, which layers that say little leave as it is and the
    head reads as the `likely` tokens (their spelling to their logit)."""
    params = init_params(model, jax.random.key(0))
    params["layers"] |= {name: 0.1 * params["layers"][name] for name in ("o", "down")}
    embed_VxD = 0.1 * params["embed"] / jnp.abs(params["embed"]).max()
    head_DxV = np.zeros((model.d_model, model.vocab_size), np.float32)
    for token, logit in likely.items():
        head_DxV[0, tokenizer.control[token]] = logit
    return params | {"embed": embed_VxD.at[:, 0].add(1.0), "head": jnp.asarray(head_DxV)}
