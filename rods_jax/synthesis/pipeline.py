"""One synthesis attempt: Plan, Execute, Rewrite, Critique, Augment (paper section 2)."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Collection

from rods_jax.synthesis.critique import Verdict, critique
from rods_jax.synthesis.execute import Executed, ExecuteFailure, execute
from rods_jax.synthesis.outcome import Candidate, Outcome, PipelineReason, Rejection, Stage
from rods_jax.tasks.leakage import VARIANT_MARK, HeldOutGuard
from rods_jax.tasks.profile import Profile, base_form, distance, profile
from rods_jax.tools.env import Suite
from rods_jax.types import Category, Plan, Source, Task, Turn


@dataclasses.dataclass(frozen=True)
class SynthesisConfig:
    """k_max: runs of a plan in the simulator, repairs and new plans included (paper: 3).
    max_rewrites: texts written again with the critic's feedback (paper: 1).
    max_profile_distance: in [0, 1], of the variant's base form to the seed's.
    variants_per_seed: attempts for each seed that is asked for."""

    k_max: int = 3
    max_rewrites: int = 1
    max_profile_distance: float = 0.2
    variants_per_seed: int = 1

    def __post_init__(self):
        for name, least in (("k_max", 1), ("max_rewrites", 0), ("variants_per_seed", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}: give at least {least}")
        if not 0 <= self.max_profile_distance <= 1:
            raise ValueError(f"max_profile_distance is {self.max_profile_distance}: "
                             "give a number from 0 to 1")


def candidate_rng(run_seed: int, step: int, seed_uid: str, index: int) -> random.Random:
    """The generator of one attempt: a function of its name alone, so that order, threads
    and restarts cannot change what it yields."""
    digest = hashlib.sha256(repr((run_seed, step, seed_uid, index)).encode()).digest()
    return random.Random(int.from_bytes(digest, "big"))


def synthesize(seed: Task, suite: Suite, rng: random.Random, config: SynthesisConfig,
               guard: HeldOutGuard, known_hashes: Collection[str], *, step: int = 0,
               index: int = 0, seed_profile: Profile | None = None) -> Outcome:
    """One attempt at a variant of `seed`; novelty is decided against `known_hashes`.

    `seed_profile` is `seed_profile_of(seed, suite)`, for callers that keep it. Exceptions
    of the suite pass through; `attempt` turns them into a rejection.
    """
    name = _Name(seed, step, index)
    try:
        run = execute(_plan(seed, suite, rng), suite, rng, lambda: _plan(seed, suite, rng),
                      config.k_max)
    except _NoPlan as error:
        return Rejection(Stage.PLAN, PipelineReason.NO_PLAN.value, str(error), seed.uid, step,
                         index)
    if isinstance(run, ExecuteFailure):
        return name.reject(Stage.EXECUTE, run.reason.value, run.error, run)
    seed_profile = seed_profile or seed_profile_of(seed, suite)
    inherited = seed_profile.unsourced
    written = _write(name, run, suite, rng, config, inherited)
    if isinstance(written, Rejection):
        return written
    task, verdict, rewrites = written
    far = distance(verdict.profile, seed_profile)
    if far > config.max_profile_distance:
        return name.reject(Stage.PROFILE, PipelineReason.TOO_FAR.value,
                           f"distance {far:.3f} > {config.max_profile_distance}", run, rewrites)
    if seed.category is not Category.BASE:
        task = _augment(name, task, suite, rng, run, rewrites, inherited)
        if isinstance(task, Rejection):
            return task
    if leak := guard.leak(task):
        return name.reject(Stage.HELD_OUT, leak.value, f"{task.uid} equals a held-in task",
                           run, rewrites)
    if task.content_hash in known_hashes:
        return name.reject(Stage.NOVELTY, PipelineReason.DUPLICATE.value,
                           f"{task.uid} equals a known task", run, rewrites)
    return Candidate(task, seed.uid, step, index, far, run.tries, run.repairs, rewrites)


def attempt(seed: Task, suite: Suite, run_seed: int, config: SynthesisConfig,
            guard: HeldOutGuard, known_hashes: Collection[str], step: int, index: int,
            profiles: dict[str, Profile]) -> Outcome:
    """`synthesize` under its own name's generator; a crash becomes a rejection.
    `profiles` keeps seed profiles by uid between calls."""
    try:
        if seed.uid not in profiles:
            profiles[seed.uid] = seed_profile_of(seed, suite)
        return synthesize(
            seed, suite, candidate_rng(run_seed, step, seed.uid, index), config, guard,
            known_hashes, step=step, index=index, seed_profile=profiles[seed.uid])
    # SystemExit too: a simulator may call exit, and no tool may end the run.
    except (Exception, SystemExit) as error:
        return crash(seed.uid, step, index, error)


def crash(seed_uid: str, step: int, index: int, error: BaseException) -> Rejection:
    """The rejection for an exception, with the place it was raised at."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        place = f" at {code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    detail = f"{type(error).__name__}: {error}{place}"
    return Rejection(Stage.CRASH, type(error).__name__, detail, seed_uid, step, index)


def seed_profile_of(seed: Task, suite: Suite) -> Profile:
    """The seed's structure with nothing withheld: what a plan has to keep."""
    return profile(base_form(seed), suite)


@dataclasses.dataclass(frozen=True)
class _Name:
    """Whose variant an attempt makes, and what it will be called."""

    seed: Task
    step: int
    index: int

    def stamp(self, task: Task) -> Task:
        suffix = f"{VARIANT_MARK}{self.step}.{self.index}"
        return dataclasses.replace(
            task, uid=self.seed.uid + suffix, scenario=self.seed.scenario + suffix,
            source=Source.GENERATED, parent=self.seed.uid, generation=self.seed.generation + 1)

    def reject(self, stage: Stage, reason: str, detail: str,
               run: Executed | ExecuteFailure, rewrites: int = 0) -> Rejection:
        return Rejection(stage, reason, detail, self.seed.uid, self.step, self.index,
                         run.tries, run.repairs, rewrites)


class _NoPlan(Exception):
    """The planner refused the seed."""


def _plan(seed: Task, suite: Suite, rng: random.Random) -> Plan:
    try:
        return suite.plan(seed, rng)
    except ValueError as error:  # how a suite says that a seed has no variant
        raise _NoPlan(str(error)) from error


def _write(name: _Name, run: Executed, suite: Suite, rng: random.Random, config: SynthesisConfig,
           inherited: Counter) -> tuple[Task, Verdict, int] | Rejection:
    """Stages III and IV: texts, critique, and at most `max_rewrites` more texts."""
    feedback, results = "", run.result_objects()
    for rewrites in range(config.max_rewrites + 1):
        texts = suite.write(run.plan, results, rng, feedback)
        if len(texts) != len(run.calls):
            return name.reject(Stage.WRITE, PipelineReason.WRONG_TURNS.value,
                               f"{len(texts)} texts for {len(run.calls)} turns", run, rewrites)
        task = name.stamp(_assemble(run, texts, suite))
        verdict = critique(task, suite, inherited=inherited)
        if verdict.accepted:
            return task, verdict, rewrites
        if not verdict.curable:
            break
        feedback = verdict.feedback
    return name.reject(Stage.CRITIQUE, verdict.remarks[0].reason.value, verdict.feedback,
                       run, rewrites)


def _assemble(run: Executed, texts: tuple[str, ...], suite: Suite) -> Task:
    tools = tuple(spec.name for spec in suite.tools(run.plan.domains))
    turns = tuple(Turn(text, calls, tools) for text, calls in zip(texts, run.calls))
    return Task(uid="", domains=run.plan.domains, category=Category.BASE,
                initial_config=run.plan.initial_config, turns=turns, scenario="")


def _augment(name: _Name, task: Task, suite: Suite, rng: random.Random, run: Executed,
             rewrites: int, inherited: Counter) -> Task | Rejection:
    """Stage V, then stage IV again for the category."""
    category = name.seed.category
    reject: Callable = lambda stage, reason, detail: name.reject(
        stage, reason, detail, run, rewrites)
    augmented = suite.augment(task, category.value, rng)
    if augmented is None or augmented.category is not category:
        return reject(Stage.AUGMENT, PipelineReason.NOT_SUITED.value,
                      f"no {category.value} form of {task.uid}")
    augmented = name.stamp(augmented)
    same_gold = _gold(augmented) == _gold(task)
    if category is not Category.LONG_CONTEXT and not same_gold:
        return reject(Stage.AUGMENT, PipelineReason.CHANGED_GOLD.value,
                      f"the {category.value} form of {task.uid} has other gold calls")
    # Same calls on the same state were each found necessary before.
    checked = same_gold and augmented.initial_config == task.initial_config
    verdict = critique(augmented, suite, inherited=inherited, gold_checked=checked)
    if not verdict.accepted:
        return reject(Stage.AUGMENT_CRITIQUE, verdict.remarks[0].reason.value, verdict.feedback)
    return augmented


def _gold(task: Task) -> list:
    return [call for turn in task.turns for call in turn.gold]
