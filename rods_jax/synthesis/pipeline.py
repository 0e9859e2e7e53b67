"""One synthesis attempt: Plan, Execute, Rewrite, Critique, Augment (paper section 2)."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import os
import random
from collections import Counter
from collections.abc import Mapping

from rods_jax.synthesis.critique import critique
from rods_jax.synthesis.endpoint import EndpointConfig, Failure, FailureKind, open_endpoint
from rods_jax.synthesis.execute import Executed, ExecuteFailure, execute
from rods_jax.synthesis.judge import Judge
from rods_jax.synthesis.novelty import Known
from rods_jax.synthesis.outcome import (Candidate, Course, Outcome, PipelineReason,
                                        Rejection, Stage, Usage)
from rods_jax.synthesis.writers import (LLMWriter, Story, TemplateWriter, Writer, WriterKind,
                                        with_fallback)
from rods_jax.tasks.leakage import VARIANT_MARK, HeldOutGuard
from rods_jax.tasks.profile import Profile, base_form, distance, profile
from rods_jax.tools.env import Suite
from rods_jax.types import Category, Plan, Source, Task, Turn


class OnOutage(str, enum.Enum):
    """What happens when the endpoint fails."""

    FALL_BACK = "fall_back"  # to what works offline: the template writer, the rules alone
    GO_ON = "go_on"  # the attempt is rejected
    STOP = "stop"  # synthesis ends where nobody answers; for an answer of no use it goes on


@dataclasses.dataclass(frozen=True)
class SynthesisConfig:
    """k_max: runs of a plan in the simulator, repairs and new plans included (paper: 3).
    max_rewrites: texts written again with the critic's or the judge's feedback (paper: 1).
    max_profile_distance: in [0, 1], of the variant's base form to the seed's.
    variants_per_seed: attempts for each seed that is asked for.
    writer: of the user turns. judge: a language model rules on what passed the rules. endpoint:
    of the language model; on_outage: when it fails."""

    k_max: int = 3
    max_rewrites: int = 1
    max_profile_distance: float = 0.2
    variants_per_seed: int = 1
    writer: WriterKind = WriterKind.TEMPLATE
    judge: bool = False
    endpoint: EndpointConfig = EndpointConfig()
    on_outage: OnOutage = OnOutage.FALL_BACK

    def __post_init__(self):
        for name, least in (("k_max", 1), ("max_rewrites", 0), ("variants_per_seed", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}: give at least {least}")
        if not 0 <= self.max_profile_distance <= 1:
            raise ValueError(f"max_profile_distance is {self.max_profile_distance}: "
                             "give a number from 0 to 1")
        if self.writer is WriterKind.POLICY and self.judge:
            raise ValueError("judge is True, but with writer policy the model that judges would be "
                             "the one that writes: leave judge out, or set writer to llm")
        asker = "writer llm" if self.writer is WriterKind.LLM else "judge"
        for name, example in (("base_url", "http://localhost:8000/v1"),
                              ("model", "Qwen/Qwen3-32B")):
            # That of the policy is filled in by its run.
            if self.asks and self.writer is not WriterKind.POLICY \
                    and not getattr(self.endpoint, name):
                raise ValueError(f"endpoint.{name} is empty, but {asker} needs it: set it, for "
                                 f"instance to {example}")
        if not self.asks and self.endpoint != EndpointConfig():
            raise ValueError("endpoint is set, but writer template without judge asks none: set "
                             "writer to llm or judge to True, or leave endpoint out")
        if not self.asks and self.on_outage is not OnOutage.FALL_BACK:
            raise ValueError("on_outage has no effect with writer template without judge: leave it "
                             "out")

    @property
    def asks(self) -> bool:
        """Whether an endpoint is asked at all."""
        return self.judge or self.writer is not WriterKind.TEMPLATE


def candidate_rng(run_seed: int, step: int, seed_uid: str, index: int) -> random.Random:
    """The generator of one attempt: a function of its name alone, so that order, threads
    and restarts cannot change what it yields."""
    digest = hashlib.sha256(repr((run_seed, step, seed_uid, index)).encode()).digest()
    return random.Random(int.from_bytes(digest, "big"))


class OutageError(RuntimeError):
    """The writer's or judge's endpoint does not answer, and synthesis is to stop for it."""


def stop_for(outcome: Outcome, config: SynthesisConfig) -> None:
    """Raises OutageError, one line, where the attempt ended because nobody answered and
    `on_outage` is STOP. For callers to ask before they keep an outcome, so that the attempt
    is made again when they go on."""
    asked = isinstance(outcome, Rejection) and outcome.stage in (Stage.WRITE, Stage.JUDGE)
    outages = {kind.value for kind in FailureKind if kind.outage}
    if config.on_outage is OnOutage.STOP and asked and outcome.reason in outages:
        raise OutageError(
            f"the endpoint {config.endpoint.base_url} gave no answer ({outcome.reason}: "
            f"{outcome.detail}): see that it serves {config.endpoint.model}, or set on_outage to "
            "fall_back or go_on")


def decide(outcome: Outcome, known: Known) -> Outcome:
    """Whether the task is new, which then is known. For callers whose attempts were made side by
    side, knowing nothing of each other, to ask in order."""
    if isinstance(outcome, Rejection):
        return outcome
    if (found := known.refuse(outcome.task)) is None:
        known.add(outcome.task)
        return outcome
    return Rejection(Stage.NOVELTY, found.value, f"{outcome.task.uid} equals a known task",
                     **outcome.course())


@dataclasses.dataclass(frozen=True)
class Maker:
    """Makes variants. Can be sent to other processes where the suite can. `judge` rules after
    the rules have passed; None leaves it out."""

    suite: Suite
    config: SynthesisConfig
    guard: HeldOutGuard
    run_seed: int
    writer: Writer
    judge: Judge | None = None
    _profiles: dict[str, Profile] = dataclasses.field(default_factory=dict, repr=False,
                                                      compare=False)  # of seeds, by uid

    def attempt(self, seed: Task, step: int, index: int, known: Known) -> Outcome:
        """One attempt at a variant of `seed`; novelty is decided against `known`, which stays
        as it is. Never raises for what the suite, the writer or the judge does."""
        attempt = _Attempt(self, seed, Course(seed=seed.uid, step=step, index=index),
                           candidate_rng(self.run_seed, step, seed.uid, index))
        try:
            return attempt.outcome(known)
        # SystemExit too: a simulator may call exit, and no tool may end the run.
        except (Exception, SystemExit) as error:
            return dataclasses.replace(crash(seed.uid, step, index, error), **attempt.course.course())

    def seed_profile(self, seed: Task) -> Profile:
        if seed.uid not in self._profiles:
            self._profiles[seed.uid] = seed_profile_of(seed, self.suite)
        return self._profiles[seed.uid]


def make_maker(suite: Suite, config: SynthesisConfig, guard: HeldOutGuard, run_seed: int,
               environ: Mapping[str, str] = os.environ) -> Maker:
    """The maker with the writer and the judge that `config` asks for; one endpoint serves
    both. ValueError, one line, where the key that the config names is not in `environ`,
    and for the writer policy outside a training run, which alone has one."""
    if config.writer is WriterKind.POLICY and not config.endpoint.base_url:
        raise ValueError("writer policy is the model that a training run trains, and there is none "
                         "here: export a checkpoint (experiments.export), serve it, for instance "
                         "with vLLM, and use writer llm")
    writer: Writer = TemplateWriter(suite)
    endpoint = open_endpoint(config.endpoint, environ) if config.asks else None
    if config.writer is not WriterKind.TEMPLATE:
        llm = LLMWriter(endpoint, config.writer)
        falls_back = config.on_outage is OnOutage.FALL_BACK
        writer = with_fallback(llm, writer) if falls_back else llm
    return Maker(suite, config, guard, run_seed, writer, Judge(endpoint) if config.judge else None)


def crash(seed_uid: str, step: int, index: int, error: BaseException) -> Rejection:
    """The rejection for an exception, with the place it was raised at."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        place = f" at {code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    detail = f"{type(error).__name__}: {error}{place}"
    return Rejection(Stage.CRASH, type(error).__name__, detail, seed=seed_uid, step=step,
                     index=index)


def seed_profile_of(seed: Task, suite: Suite) -> Profile:
    """The seed's structure with nothing withheld: what a plan has to keep."""
    return profile(base_form(seed), suite)


@dataclasses.dataclass
class _Attempt:
    """One attempt on its way; `course` says how far it came."""

    maker: Maker
    seed: Task
    course: Course
    rng: random.Random

    def outcome(self, known: Known) -> Outcome:
        run = self._run()
        if isinstance(run, Rejection):
            return run
        inherited = self.maker.seed_profile(self.seed).unsourced
        written = self._write(run, inherited)
        if isinstance(written, Rejection):
            return written
        task, far = written
        if self.seed.category is not Category.BASE:
            task = self._augment(task, inherited)
            if isinstance(task, Rejection):
                return task
        if leak := self.maker.guard.leak(task):
            return self._reject(Stage.HELD_OUT, leak.value, f"{task.uid} equals a held-in task")
        if found := known.refuse(task):
            return self._reject(Stage.NOVELTY, found.value, f"{task.uid} equals a known task")
        return Candidate(task, distance=far, **self.course.course())

    def _note(self, usage: Usage = Usage(), **changes: str | int) -> None:
        """Adds to the usage, and sets other fields of the course."""
        self.course = dataclasses.replace(self.course, usage=self.course.usage + usage, **changes)

    def _reject(self, stage: Stage, reason: str, detail: str) -> Rejection:
        return Rejection(stage, reason, detail, **self.course.course())

    def _stamp(self, task: Task) -> Task:
        """Whose variant it is, and what it is called."""
        suffix = f"{VARIANT_MARK}{self.course.step}.{self.course.index}"
        return dataclasses.replace(
            task, uid=self.seed.uid + suffix, scenario=self.seed.scenario + suffix,
            source=Source.GENERATED, parent=self.seed.uid, generation=self.seed.generation + 1)

    # ------------------------------------------------------------ stages I and II

    def _run(self) -> Executed | Rejection:
        try:
            run = execute(self._plan(), self.maker.suite, self.rng, self._plan,
                          self.maker.config.k_max)
        except _NoPlan as error:
            return self._reject(Stage.PLAN, PipelineReason.NO_PLAN.value, str(error))
        self._note(tries=run.tries, repairs=run.repairs)
        if isinstance(run, ExecuteFailure):
            return self._reject(Stage.EXECUTE, run.reason.value, run.error)
        return run

    def _plan(self) -> Plan:
        try:
            return self.maker.suite.plan(self.seed, self.rng)
        except ValueError as error:  # how a suite says that a seed has no variant
            raise _NoPlan(str(error)) from error

    # ------------------------------------------------------------ stages III and IV

    def _write(self, run: Executed, inherited: Counter) -> tuple[Task, float] | Rejection:
        """The task in its BASE form and its distance to the seed: texts, rules, judge, and at
        most `max_rewrites` more texts."""
        suite, most_far = self.maker.suite, self.maker.config.max_profile_distance
        story, feedback = Story(self.seed, run, suite.tools(run.plan.domains)), ""
        for rewrites in range(self.maker.config.max_rewrites + 1):
            self._note(rewrites=rewrites)
            written = self.maker.writer.write(story, self.rng, feedback)
            self._note(written.usage)
            if isinstance(written, Failure):
                return self._reject(Stage.WRITE, written.kind.value, written.detail)
            self._note(writer=written.writer, fell_back=written.fell_back)
            if len(written.texts) != len(run.calls):
                return self._reject(Stage.WRITE, PipelineReason.WRONG_TURNS.value,
                                    f"{len(written.texts)} texts for {len(run.calls)} turns")
            task = self._stamp(_assemble(run, written.texts, suite))
            verdict = critique(task, suite, inherited=inherited)
            if not verdict.accepted:
                refused = self._reject(Stage.CRITIQUE, verdict.remarks[0].reason.value,
                                       verdict.feedback)
                if not verdict.curable:
                    break
                feedback = verdict.feedback
                continue
            far = distance(verdict.profile, self.maker.seed_profile(self.seed))
            if far > most_far:
                return self._reject(Stage.PROFILE, PipelineReason.TOO_FAR.value,
                                    f"distance {far:.3f} > {most_far}")
            refused = self._judge(task, run)
            if refused is None:
                return task, far
            if refused.reason != PipelineReason.JUDGE_REFUSED.value:
                break
            feedback = refused.detail
        return refused

    def _judge(self, task: Task, run: Executed) -> Rejection | None:
        if self.maker.judge is None:
            return None
        ruling = self.maker.judge.rule(task, run)
        self._note(ruling.usage)
        if isinstance(ruling, Failure):
            if self.maker.config.on_outage is OnOutage.FALL_BACK:
                self._note(unjudged=ruling.kind.value)
                return None
            return self._reject(Stage.JUDGE, ruling.kind.value, ruling.detail)
        if ruling.passed:
            return None
        return self._reject(Stage.JUDGE, PipelineReason.JUDGE_REFUSED.value, ruling.feedback)

    # ------------------------------------------------------------ stage V

    def _augment(self, task: Task, inherited: Counter) -> Task | Rejection:
        """Stage V, then the rules again for the category."""
        suite, category = self.maker.suite, self.seed.category
        augmented = suite.augment(task, category.value, self.rng)
        if augmented is None or augmented.category is not category:
            return self._reject(Stage.AUGMENT, PipelineReason.NOT_SUITED.value,
                                f"no {category.value} form of {task.uid}")
        augmented = self._stamp(augmented)
        same_gold = _gold(augmented) == _gold(task)
        if category is not Category.LONG_CONTEXT and not same_gold:
            return self._reject(Stage.AUGMENT, PipelineReason.CHANGED_GOLD.value,
                                f"the {category.value} form of {task.uid} has other gold calls")
        # Same calls on the same state were each found necessary before.
        checked = same_gold and augmented.initial_config == task.initial_config
        verdict = critique(augmented, suite, inherited=inherited, gold_checked=checked)
        if not verdict.accepted:
            return self._reject(Stage.AUGMENT_CRITIQUE, verdict.remarks[0].reason.value,
                                verdict.feedback)
        return augmented


class _NoPlan(Exception):
    """The planner refused the seed."""


def _assemble(run: Executed, texts: tuple[str, ...], suite: Suite) -> Task:
    tools = tuple(spec.name for spec in suite.tools(run.plan.domains))
    turns = tuple(Turn(text, calls, tools) for text, calls in zip(texts, run.calls))
    return Task(uid="", domains=run.plan.domains, category=Category.BASE,
                initial_config=run.plan.initial_config, turns=turns, scenario="")


def _gold(task: Task) -> list:
    return [call for turn in task.turns for call in turn.gold]
