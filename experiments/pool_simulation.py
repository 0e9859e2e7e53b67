"""The real task pool, driven as `rods_jax.train` drives it, by a policy that is a formula.

A task is a difficulty and a category; see `simulated_policy.Skill`. A variant is as difficult
as its parent, plus noise. Synthesis answers at once, some attempts are rejected, and in an
outage all are. `simulate(scenario)` returns one row an epoch.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import types

import jax
import numpy as np

from experiments.simulated_policy import Skill, progress_rewards
from rods_jax import boundary, task_pool
from rods_jax.boundary import N_CATEGORIES, BoundaryConfig, Zone
from rods_jax.task_pool import Dropped, Origin, PoolConfig, Reason
from rods_jax.types import Json

ADMIT_ROWS = 32  # rows offered to the pool at once
MAX_OUTSTANDING = 256  # attempts asked for and not collected, as synthesis.loop has it


class Refused(str, enum.Enum):
    """Why an attempt gave no task; the pool's own reasons are task_pool.Dropped."""

    ROOM = "no room"  # more than MAX_OUTSTANDING
    CRITIQUE = "critique"
    OUTAGE = "outage"


@dataclasses.dataclass(frozen=True)
class Outage:
    """No attempt gives a task in the epochs first..last."""

    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class Forgetting:
    """At the end of `epoch` the skill of `category` drops by `logits`."""

    epoch: int
    category: int = 2
    logits: float = 3.0


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What is simulated. An epoch is what train.py calls one: every live task seen once; with
    `admit_every` it is that many steps."""

    pool: PoolConfig = PoolConfig()
    band: BoundaryConfig = BoundaryConfig()
    epochs: int = 200
    seeds: int = 400
    tasks_per_step: int = 32
    rollouts: int = 16
    queue: int = 2  # admission batches that may wait before no more variants are asked for
    admit_every: int = 0
    synthesis: bool = True
    outage: Outage | None = None
    forgetting: Forgetting | None = None
    rate: float = 0.001  # see Skill
    difficulty: float = 1.0  # of the original seeds: mean and deviation, logits above the skill
    spread: float = 1.5
    noise: float = 0.5  # deviation of a variant's difficulty from its parent's, logits
    accepted: float = 0.63  # share of attempts that pass the critique
    random_seed: int = 0


@dataclasses.dataclass(frozen=True)
class EpochRow:
    """Shares in 0..1, of the tasks that live at the end of an epoch, before it retires any.
    The counts from `asked` on are totals since the start."""

    epoch: int
    steps: int
    live: int
    generated: int
    true_share: float  # live tasks whose pass rate lies in the band
    seen_share: float  # live tasks in the pool's own Zone.BOUNDARY
    drawn_share: float  # groups of this epoch whose pass rate lay in the band
    skill_C: tuple[float, ...]
    drawn_C: tuple[int, ...]  # groups of this epoch by category
    true_C: tuple[int, ...]  # those of them that lay in the band
    asked: int
    admitted: int
    pending: int  # asked, not answered
    waiting: int  # made, not admitted
    refused: dict[str, int]  # by Refused, and by Dropped for the pool's own
    revived: int
    retired: dict[str, int]  # by Reason

    @property
    def lost(self) -> int:
        """Attempts of which nobody knows what became."""
        return (self.asked - self.admitted - self.pending - self.waiting
                - sum(self.refused.values()))

    def to_json(self) -> Json:
        return dataclasses.asdict(self)


@functools.cache
def _programs(config: PoolConfig, band: BoundaryConfig, n_tasks: int) -> types.SimpleNamespace:
    """The pool's functions, jitted; once a setting, however many scenarios have it."""

    def sample(pool, seed, step, epoch_start):
        key = jax.random.fold_in(jax.random.key(seed), step)
        return task_pool.sample(pool, key, n_tasks, epoch_start, config, step=step)

    def observe(pool, draw, rewards_TxK, valid_TxK, step):
        groups = boundary.group_stats(rewards_TxK, valid_TxK)
        pool = task_pool.update_stats(pool, draw.indices_T, draw.uids_T, groups, step, config,
                                      band)
        return pool, task_pool.stats(pool, band)

    def turn(pool, step):
        pool, _ = task_pool.retire(pool, step, config, band)
        pool, _ = task_pool.revive(pool, config)
        return pool, task_pool.stats(pool, band)

    def choose(pool, epoch, from_generated):
        pool, _, uid_M, valid_M = task_pool.choose(
            pool, jax.random.key(0), epoch, band, from_generated=from_generated)
        return pool, uid_M, valid_M

    return types.SimpleNamespace(
        sample=jax.jit(sample), observe=jax.jit(observe), turn=jax.jit(turn),
        choose=jax.jit(choose), unseen=jax.jit(task_pool.unseen),
        add=jax.jit(functools.partial(task_pool.add, config=config)),
        prune=jax.jit(functools.partial(task_pool.prune, config=config)))


class _Synthesizer:
    """Attempts and their results in order: pending until collected, waiting until admitted.
    Every attempt asked for is in exactly one place or counted under one reason."""

    def __init__(self, scenario: Scenario, rng: np.random.Generator):
        self.scenario, self.rng = scenario, rng
        self.asked = 0
        self.refused: collections.Counter[str] = collections.Counter()
        self.pending: list[tuple[int, bool]] = []  # parent, whether the outage takes it
        self.waiting: list[int] = []  # parents

    def backlog(self) -> int:
        return len(self.pending) + len(self.waiting)

    def request(self, parents: list[int], epoch: int) -> None:
        room = max(MAX_OUTSTANDING - len(self.pending), 0)
        out = self.scenario.outage
        down = out is not None and out.first <= epoch <= out.last
        self.asked += len(parents)
        self.refused[Refused.ROOM.value] += max(len(parents) - room, 0)
        self.pending += [(parent, down) for parent in parents[:room]]

    def collect(self) -> None:
        for parent, down in self.pending:
            if down:
                self.refused[Refused.OUTAGE.value] += 1
            elif self.rng.random() >= self.scenario.accepted:
                self.refused[Refused.CRITIQUE.value] += 1
            else:
                self.waiting.append(parent)
        self.pending = []


class _Simulation:
    """State between steps, named as in train.Run. Tasks are numbered by their uid."""

    def __init__(self, scenario: Scenario):
        self.scenario = scenario
        self.programs = _programs(scenario.pool, scenario.band, scenario.tasks_per_step)
        self.pool = task_pool.init(scenario.pool, 1)
        self.rng = np.random.default_rng(scenario.random_seed)
        self.synthesizer = _Synthesizer(scenario, self.rng)
        self.policy = Skill(np.zeros(N_CATEGORIES), scenario.rate)
        self.step = self.epoch = self.epoch_start = self.last_admission = self.admitted = 0
        self.stats = None  # of the pool, after the last step
        self.category = np.arange(scenario.seeds) % N_CATEGORIES
        self.difficulty = self.rng.normal(
            scenario.difficulty, scenario.spread, scenario.seeds)
        self._add(range(scenario.seeds), [-1] * scenario.seeds)
        self._start_tally()

    def _start_tally(self) -> None:
        self.drawn_C, self.true_C = np.zeros((2, N_CATEGORIES), int)

    def _pass_rate(self, uids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Category and pass rate of tasks."""
        category_T = self.category[uids]
        return category_T, self.policy.pass_rate(category_T, self.difficulty[uids])

    def _in_band(self, pass_rate_T: np.ndarray) -> np.ndarray:
        """At the boundary: between 0 and 1 the variance of independent turns is above 0."""
        band = self.scenario.band
        return (pass_rate_T >= band.alpha_minus) & (pass_rate_T <= band.alpha_plus)

    def _add(self, uids, parents) -> None:
        """Offers tasks to the pool, which counts what it refuses."""
        for start in range(0, len(uids), ADMIT_ROWS):
            part = slice(start, start + ADMIT_ROWS)
            ids, of = list(uids[part]), list(parents[part])
            rows, keep_A = task_pool.make_rows(
                [[1]] * len(ids), ids, of, [int(self.category[i]) for i in ids],
                [Origin.SEED if p < 0 else Origin.GENERATED for p in of], ADMIT_ROWS, 1)
            before = np.asarray(self.pool.dropped)
            self.pool, placed_A = self.programs.add(self.pool, rows, keep_A, np.int32(self.step))
            self.admitted += int((np.asarray(placed_A) >= 0).sum()) * (of[0] >= 0)
            refused = np.asarray(self.pool.dropped) - before
            for reason in Dropped:
                self.synthesizer.refused[reason.name.lower()] += int(refused[reason])

    def boundary_of_epoch(self) -> None:
        self.pool, stats = self.programs.turn(self.pool, np.int32(self.step))
        if self.scenario.synthesis:
            self.synthesizer.collect()
            waiting = self.synthesizer.waiting
            parents = waiting[:self._admission_limit(stats)]
            self.synthesizer.waiting = waiting[len(parents):]
            first = len(self.category)
            of = np.asarray(parents, int)
            noise = self.rng.normal(0.0, self.scenario.noise, len(of))
            self.category = np.append(self.category, self.category[of])
            self.difficulty = np.append(self.difficulty, self.difficulty[of] + noise)
            self._add(range(first, len(self.category)), parents)
            self.pool, _ = self.programs.prune(self.pool)
        self.last_admission = self.step

    def _admission_limit(self, stats) -> int:
        return task_pool.admissible(int(stats.live), self.scenario.pool,
                                    int(stats.live_by_zone[Zone.BOUNDARY]))

    def _ask_for_variants(self, epoch: int) -> None:
        live, at_boundary = int(self.stats.live), int(self.stats.live_by_zone[Zone.BOUNDARY])
        limit = max(1, self._admission_limit(self.stats))
        if self.synthesizer.backlog() >= self.scenario.queue * limit:
            return
        self.pool, uid_M, valid_M = self.programs.choose(
            self.pool, np.int32(self.epoch),
            task_pool.runs_dry(live, at_boundary, self.scenario.pool))
        chosen = np.asarray(uid_M)[np.asarray(valid_M)].tolist()
        self.synthesizer.request(chosen, epoch)

    def train_step(self, epoch: int) -> None:
        s = self.scenario
        draw = jax.device_get(self.programs.sample(
            self.pool, np.int32(s.random_seed), np.int32(self.step), np.int32(self.epoch_start)))
        category_T, pass_rate_T = self._pass_rate(draw.uids_T[draw.filled_T])
        rewards_TxK = np.zeros((s.tasks_per_step, s.rollouts), np.float32)
        rewards_TxK[draw.filled_T] = progress_rewards(self.rng, pass_rate_T, s.rollouts)
        valid_TxK = np.broadcast_to(draw.filled_T[:, None], rewards_TxK.shape)
        self.pool, stats = self.programs.observe(
            self.pool, draw, rewards_TxK, valid_TxK, np.int32(self.step))
        self.stats = jax.device_get(stats)
        self.drawn_C += np.bincount(category_T, minlength=N_CATEGORIES)
        self.true_C += np.bincount(category_T[self._in_band(pass_rate_T)], minlength=N_CATEGORIES)
        self.policy = self.policy.learn(category_T, pass_rate_T)
        if s.synthesis:
            self._ask_for_variants(epoch)
        self.step += 1

    def run_epoch(self, epoch: int) -> EpochRow:
        s, began = self.scenario, self.step
        while True:
            self.train_step(epoch)
            over = not int(self.programs.unseen(self.pool, np.int32(self.epoch_start)))
            if over:
                self.epoch += 1
                self.epoch_start = self.step
            if self.step - self.last_admission >= s.admit_every if s.admit_every else over:
                break
        row = self._row(epoch, self.step - began)
        self.boundary_of_epoch()
        if s.forgetting is not None and s.forgetting.epoch == epoch:
            self.policy = self.policy.forget(s.forgetting.category, s.forgetting.logits)
        self._start_tally()
        return row

    def _row(self, epoch: int, steps: int) -> EpochRow:
        uids = np.asarray(self.pool.uid_N)[np.asarray(task_pool.is_live(self.pool))]
        _, pass_rate = self._pass_rate(uids)
        made, retired = self.synthesizer, np.asarray(self.pool.retired)
        return EpochRow(
            epoch=epoch, steps=steps, live=len(uids),
            generated=int(self.stats.live_by_source[Origin.GENERATED]),
            true_share=float(self._in_band(pass_rate).mean()),
            seen_share=float(self.stats.live_by_zone[Zone.BOUNDARY] / len(uids)),
            drawn_share=float(self.true_C.sum() / self.drawn_C.sum()),
            skill_C=tuple(self.policy.skill_C.tolist()), drawn_C=tuple(self.drawn_C.tolist()),
            true_C=tuple(self.true_C.tolist()), asked=made.asked, admitted=self.admitted,
            pending=len(made.pending), waiting=len(made.waiting),
            refused={k: n for k, n in made.refused.items() if n},
            revived=int(self.pool.revived),
            retired={r.name.lower(): int(retired[r]) for r in Reason if retired[r]})


def simulate(scenario: Scenario) -> list[EpochRow]:
    """One row an epoch, epochs from 0 on. Equal scenarios give equal rows."""
    simulation = _Simulation(scenario)
    return [simulation.run_epoch(epoch) for epoch in range(scenario.epochs)]
