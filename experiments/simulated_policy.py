"""Policies that are formulas, so that what a detector or the pool should find is known.

`Tasks` are tasks of known reward distribution, for one moment of a policy. `Skill` is a policy
that learns: a turn of difficulty d passes with probability 1 / (1 + exp(d - skill)), skill
being one number a category, and each group of rollouts raises the skill of its category in
proportion to its phi, since only rollouts that disagree teach. Dim letters as in the rest of
the project; M tasks, U values that a reward may take, N turns.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from rods_jax import boundary
from rods_jax.boundary import BoundaryConfig

TURNS = 4  # of a task with a progress reward


@dataclasses.dataclass(frozen=True)
class Tasks:
    """Rewards k / (U - 1), k = 0..U-1, with known probabilities [M, U]."""

    probability_MxU: np.ndarray

    @property
    def values_U(self) -> np.ndarray:
        return np.linspace(0.0, 1.0, self.probability_MxU.shape[1])

    @property
    def mean_M(self) -> np.ndarray:
        return self.probability_MxU @ self.values_U

    @property
    def var_M(self) -> np.ndarray:
        gap_MxU = self.values_U - self.mean_M[:, None]
        return (self.probability_MxU * gap_MxU ** 2).sum(axis=1)

    def draw(self, rng: np.random.Generator, rollouts: int) -> np.ndarray:
        """Rewards of `rollouts` independent rollouts, float32 [M, K]."""
        until_MxU = np.cumsum(self.probability_MxU, axis=1)[:, :-1]
        chance_MxKx1 = rng.random((len(until_MxU), rollouts, 1))
        return self.values_U[(chance_MxKx1 >= until_MxU[:, None]).sum(axis=2)].astype(np.float32)


def at_boundary(tasks: Tasks, band: BoundaryConfig) -> np.ndarray:
    """bool [M]: expected reward in the band, both ends included, and variance above 0."""
    mean_M = tasks.mean_M
    inside_M = (mean_M >= band.alpha_minus) & (mean_M <= band.alpha_plus)
    return inside_M & (tasks.var_M > 1e-12)  # what rounding leaves of a variance of 0


def binary_tasks(rng: np.random.Generator, n: int) -> Tasks:
    """Success or failure: one fifth never succeeds, one fifth always, the rest with a
    probability that is uniform in 0..1."""
    p_M = rng.random(n)
    kind_M = rng.random(n)
    p_M = np.where(kind_M < 0.2, 0.0, np.where(kind_M < 0.4, 1.0, p_M))
    return Tasks(np.stack([1.0 - p_M, p_M], axis=1))


def fractional_tasks(rng: np.random.Generator, n: int) -> Tasks:
    """Progress over N turns, of four sorts in equal parts: always the same fraction (uniform);
    turns that pass independently; turns of which the first failure ends the task; a fraction
    that only one turn makes waver. Probabilities are uniform in 0..1."""
    sort_M, p_M = rng.integers(4, size=n), rng.random(n)
    turn_U = np.arange(TURNS + 1)
    ways_U = np.array([1, 4, 6, 4, 1])  # binomial coefficients of TURNS
    p_Mx1 = p_M[:, None]
    passed_MxU = p_Mx1 ** turn_U
    independent_MxU = ways_U * passed_MxU * (1.0 - p_Mx1) ** (TURNS - turn_U)
    chain_MxU = passed_MxU * np.where(turn_U < TURNS, 1.0 - p_Mx1, 1.0)
    constant_MxU = np.eye(TURNS + 1)[rng.integers(TURNS + 1, size=n)]
    least_M = rng.integers(TURNS, size=n)
    one_UxU = np.eye(TURNS + 1)
    wavering_MxU = (1.0 - p_Mx1) * one_UxU[least_M] + p_Mx1 * one_UxU[least_M + 1]
    sorts = np.stack([constant_MxU, independent_MxU, chain_MxU, wavering_MxU])
    return Tasks(sorts[sort_M, np.arange(n)])


@dataclasses.dataclass(frozen=True)
class Skill:
    """skill_C: logits by category; rate: logits that a group of phi 1 adds."""

    skill_C: np.ndarray
    rate: float

    def pass_rate(self, category_T: np.ndarray, difficulty_T: np.ndarray) -> np.ndarray:
        """Probability that a turn passes, which is the expected progress reward."""
        return 1.0 / (1.0 + np.exp(difficulty_T - self.skill_C[category_T]))

    def learn(self, category_T: np.ndarray, pass_rate_T: np.ndarray) -> Skill:
        """After a step on these groups."""
        gain_C = np.bincount(category_T, boundary.phi(pass_rate_T), minlength=len(self.skill_C))
        return dataclasses.replace(self, skill_C=self.skill_C + self.rate * gain_C)

    def forget(self, category: int, logits: float) -> Skill:
        lost_C = np.where(np.arange(len(self.skill_C)) == category, logits, 0.0)
        return dataclasses.replace(self, skill_C=self.skill_C - lost_C)


def progress_rewards(rng: np.random.Generator, pass_rate_T: np.ndarray,
                     rollouts: int) -> np.ndarray:
    """float32 [T, K]: share of TURNS independent turns that pass."""
    passed_TxK = rng.binomial(TURNS, pass_rate_T[:, None], (len(pass_rate_T), rollouts))
    return (passed_TxK / TURNS).astype(np.float32)
