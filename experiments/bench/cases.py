"""What is sampled in the rollout bench: the shapes, and the tokens that nobody samples."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """`group` rollouts of one prompt of `prompt` tokens. Each is `messages` messages of `new`
    sampled tokens, never fewer, with a tool result of `tool` tokens between each two."""

    name: str
    group: int
    prompt: int
    new: int
    messages: int = 1
    tool: int = 0

    @property
    def length(self) -> int:
        """Tokens of a whole rollout."""
        return self.prompt + self.messages * self.new + (self.messages - 1) * self.tool

    @property
    def sampled(self) -> int:
        """Sampled tokens of all rollouts."""
        return self.group * self.messages * self.new


# The group of 2 is there for a sampler that lacks the memory for the same case at 16.
CASES = (
    Case("a", group=16, prompt=512, new=64),
    Case("b", group=16, prompt=4096, new=64),
    Case("b_group_2", group=2, prompt=4096, new=64),
    Case("c", group=16, prompt=512, new=64, messages=4, tool=200),
)


@dataclasses.dataclass(frozen=True)
class Work:
    """The given tokens of a case, the same for every side."""

    prompt_P: np.ndarray  # int32 [P]
    tools_MxGxK: np.ndarray  # int32 [messages - 1, group, tool]; each rollout's differ


def make_work(case: Case, vocab_size: int, seed: int = 0) -> Work:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(vocab_size, size=case.prompt, dtype=np.int32)
    tools = rng.integers(vocab_size, size=(case.messages - 1, case.group, case.tool),
                         dtype=np.int32)
    return Work(prompt, tools)
