"""What is learnt from in the update bench: the shapes, the tokens, the rewards."""

from __future__ import annotations

import dataclasses

import numpy as np

# Of the sampler's log-probs around the model's own. One token in eight is outside the clip.
NOISE = 0.15


@dataclasses.dataclass(frozen=True)
class UpdateCase:
    """One group of `group` rollouts: a prompt of `prompt` tokens, then `suffix` tokens each,
    all of them sampled. torch_rows, tunix_rows: rows in a micro-batch of those who run each
    rollout whole; tunix_rows is None where it is not run."""

    name: str
    group: int
    prompt: int
    suffix: int
    torch_rows: int
    tunix_rows: int | None = None

    @property
    def length(self) -> int:
        """Tokens of a whole rollout."""
        return self.prompt + self.suffix

    @property
    def scored(self) -> int:
        """Tokens that carry loss."""
        return self.group * self.suffix


# torch in the small case: 8 rows are faster than 16, 4 or 2. In the long one 2 take 4.5 GB.
UPDATE_CASES = (
    UpdateCase("small", group=16, prompt=512, suffix=128, torch_rows=8, tunix_rows=16),
    UpdateCase("long", group=16, prompt=4096, suffix=512, torch_rows=2),
)


@dataclasses.dataclass(frozen=True)
class UpdateWork:
    """What every side is given, the same for all, but for the sampler's log-probs, which are
    the model's own plus noise_GxS."""

    prompt_P: np.ndarray  # int32 [P]
    suffix_GxS: np.ndarray  # int32 [G, S]
    noise_GxS: np.ndarray  # float32 [G, S]
    rewards_G: np.ndarray  # float32 [G]; the group is live

    @property
    def tokens_GxL(self) -> np.ndarray:
        """Every rollout whole."""
        prompt_GxP = np.broadcast_to(self.prompt_P, (len(self.suffix_GxS), len(self.prompt_P)))
        return np.concatenate([prompt_GxP, self.suffix_GxS], axis=1)


def make_update_work(case: UpdateCase, vocab_size: int, seed: int = 0) -> UpdateWork:
    rng = np.random.default_rng(seed)
    shape = case.group, case.suffix
    rewards_G = rng.integers(5, size=case.group).astype(np.float32) / 4
    rewards_G[:2] = 0, 1
    return UpdateWork(rng.integers(vocab_size, size=case.prompt, dtype=np.int32),
                      rng.integers(vocab_size, size=shape, dtype=np.int32),
                      rng.normal(0, NOISE, shape).astype(np.float32), rewards_G)
