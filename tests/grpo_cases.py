"""Small trajectories and batches for the tests of rods_jax.grpo."""

from functools import cache

import jax
import numpy as np

from rods_jax.models import lora
from rods_jax.models.config import ModelConfig
from rods_jax.models.decoder import Decoder, init_params
from rods_jax.types import Author, EndReason, Trajectory

VOCAB = 13


def trajectory(tokens, author, logprobs=None, end=EndReason.DONE, uid="t", sample=0):
    tokens = np.asarray(tokens, np.int32)
    logprobs = np.zeros(len(tokens)) if logprobs is None else logprobs
    return Trajectory(uid, sample, tokens, np.asarray(author, np.int8),
                      np.asarray(logprobs, np.float32), (), 1, end)


def random_authors(rng, prompt, longest):
    """Who wrote each token: `prompt` tokens of it, then the policy and its tools in turn."""
    author = [Author.PROMPT] * prompt
    while len(author) < longest - 5:
        author += [Author.SAMPLED] * int(rng.integers(1, 4))
        author += [Author.INSERTED] * int(rng.integers(0, 3))
        if rng.random() < 0.4:
            break
    return np.asarray(author, np.int8)


def random_trajectory(rng, uid="t", sample=0, longest=14, end=EndReason.DONE):
    """Prompt, then sampled and inserted stretches in turn; ids include 0, the padding id."""
    author = random_authors(rng, int(rng.integers(1, 4)), longest)
    n = len(author)
    logprobs = np.where(author == Author.SAMPLED, -2.5 + 0.6 * rng.standard_normal(n), 0.0)
    return trajectory(rng.integers(0, VOCAB, n), author, logprobs, end, uid, sample)


@cache
def tiny_decoder(vocab_size=VOCAB, n_kv_heads=1, adapted=None):
    """A decoder and weights for it, which are the same with and without adapters."""
    config = ModelConfig(vocab_size, d_model=8, n_layers=1, n_heads=2, n_kv_heads=n_kv_heads,
                         head_dim=4, d_ff=16, lora=adapted)
    if adapted is not None:
        plain, layers = tiny_decoder(vocab_size, n_kv_heads)[1], {}
        rng = np.random.default_rng(4)
        for name, shape in lora.shapes(config).items():
            layers[name] = jax.numpy.asarray(rng.normal(0, 0.3, (1, *shape)).astype(np.float32))
        return Decoder(config), lora.join(plain, {"layers": layers})
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    rng = np.random.default_rng(3)
    # Drawn by numpy: compiling the draws takes longer than the tests.
    draw = lambda leaf: rng.normal(0.3, 0.4, leaf.shape).astype(np.float32)  # noqa: E731
    return Decoder(config), jax.tree.map(lambda leaf: jax.numpy.asarray(draw(leaf)), shapes)


def small_batch(seed=0, tasks=3, group=4):
    """Groups and rewards: group 0 is dead, the last group has a sample missing."""
    rng = np.random.default_rng(seed)
    groups = [[random_trajectory(rng, f"t{t}", g) for g in range(group)] for t in range(tasks)]
    rewards = rng.integers(0, 5, (tasks, group)).astype(np.float32) / 4
    rewards[:, :2] = [0.0, 1.0]
    rewards[0] = 0.5
    groups[-1][-1] = None
    rewards[-1, -1] = np.nan
    return groups, rewards


def group_of(rng, prompt, size, task, longest=15):
    """Rollouts of one prompt: messages and tool results in turn, of different lengths."""
    found = []
    for sample in range(size):
        author = random_authors(rng, len(prompt), longest)
        ids = np.concatenate([prompt, rng.integers(0, VOCAB, len(author) - len(prompt))])
        logprobs = np.where(author == Author.SAMPLED,
                            -2.5 + 0.6 * rng.standard_normal(len(ids)), 0)
        found.append(trajectory(ids, author, logprobs, uid=f"t{task}", sample=sample))
    return found


def shared_groups(seed, lengths=(4, 1, 7)):
    """Groups of prompts of these lengths; the first is dead, the last lacks a sample."""
    rng = np.random.default_rng(seed)
    groups = [group_of(rng, rng.integers(0, VOCAB, n), 4, t) for t, n in enumerate(lengths)]
    rewards = rng.integers(0, 5, (len(lengths), 4)).astype(np.float32) / 4
    rewards[:, :2] = [0.0, 1.0]
    rewards[0] = 0.5
    groups[-1][-1] = None
    rewards[-1, -1] = np.nan
    return groups, rewards
