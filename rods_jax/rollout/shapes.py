"""What a rollout engine is told of sizes: the declared shapes of its programs, and its memory.

Every program has one of these shapes and no other, so all of them can be compiled before a
run begins (`Slots.warm_up`) and nothing is compiled after.
"""

from __future__ import annotations

import dataclasses
import math

from rods_jax.models.config import ModelConfig
from rods_jax.rollout.draw import Filter


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """Sizes in tokens but `slots`, `sharers`, `prompts` and the rows of shapes; all of one
    device, or of one group of devices that share a copy of the weights.

    The defaults suit a policy of some hundred thousand parameters on a CPU. For large models
    make chunks and pages larger: page=64, prompt_page=256, extend=((8, 32), (8, 256)). On TPUs
    take page=128 and prompt_page=256: of heads narrower than 128 a smaller page would not lie
    in one piece.
    """

    slots: int = 128  # rollouts in flight
    max_len: int = 256  # longest row: prompt and all that comes after
    prompt_len: int = 96  # longest prompt (system, tools, first user turn)
    max_new: int = 24  # longest assistant message
    max_own: int | None = None  # most that a row has after its prompt; None: what max_len leaves
    sharers: int = 16  # rollouts that share one copy of a prompt's K/V; best the group's size
    prompts: int = 8  # prompts of prompt_len held for sharing; slots beyond their rows stay empty
    prefill: tuple[tuple[int, int], ...] = ((2, 32),)  # (rows, tokens) of prompts run at once
    extend: tuple[tuple[int, int], ...] = ((64, 16),)  # (rows, tokens) of rollouts run at once
    wave_rows: tuple[int, ...] = ()  # rows sampled at once; `slots` is always one
    # Shares of its full size that the cache begins with and grows through; 1 is always the last.
    # A step of a wave reads all of the cache. Each size has programs of its own.
    cache_sizes: tuple[float, ...] = ()
    page: int = 16  # of K/V that a rollout takes at once
    prompt_page: int = 32  # of K/V that a prompt takes at once
    steps: int = 32  # most tokens a rollout samples before the host looks again
    steps_waiting: int = 8  # the same while tool calls are out: their rollouts shall rejoin
    straggler_share: float = 0.0  # a wave ends once at most this share of its rows samples on
    # Layers one by one, from arrays of their own: waves are twice as fast on a CPU and take
    # longer to compile, and a step makes a copy of the weights. Small models do it anyway.
    unrolled: bool = False
    # K/V of a copy; None takes what all slots can ever fill. While the cache grows, one of its
    # arrays is there twice: the keys or values of a layer, or of all where they are stacked.
    kv_bytes: int | None = None
    top_k: int = 0  # see draw.Filter; not in training
    top_p: float = 1.0

    def __post_init__(self):
        if self.prompt_len + self.max_new > self.max_len:
            raise ValueError(
                f"sampler.prompt_len {self.prompt_len} + max_new {self.max_new} exceeds "
                f"max_len {self.max_len}: raise max_len or shorten the others")
        if self.max_own is not None and self.max_own < self.max_new:
            raise ValueError(f"sampler.max_own {self.max_own} is below max_new {self.max_new}: "
                             "raise it")
        if not 0 <= self.straggler_share < 1:
            raise ValueError("sampler.straggler_share must lie in [0, 1)")
        for name in ("slots", "prompt_len", "max_new", "sharers", "prompts", "page",
                     "prompt_page", "steps", "steps_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"sampler.{name} is {getattr(self, name)}, must be at least 1")
        for name in ("prefill", "extend"):
            shapes = getattr(self, name)
            if not shapes or any(len(shape) != 2 or min(shape) < 1 for shape in shapes):
                raise ValueError(f"sampler.{name} is {shapes}: give pairs of rows and tokens, "
                                 "each 1 or more, such as ((8, 16), (8, 128))")
        if any(not 0 < rows for rows in self.wave_rows):
            raise ValueError(f"sampler.wave_rows is {self.wave_rows}: give numbers of rows")
        if any(not 0 < share <= 1 for share in self.cache_sizes):
            raise ValueError(f"sampler.cache_sizes is {self.cache_sizes}: give shares of the "
                             "full size, above 0 and at most 1")
        Filter(self.top_k, self.top_p)  # raises on a bad value

    @property
    def keep(self) -> Filter:
        return Filter(self.top_k, self.top_p)

    @property
    def wave(self) -> int:
        """Most tokens of a wave."""
        return min(self.steps, self.max_new)

    @property
    def read(self) -> int:
        """Earlier tokens of a row that prefill and extend read at once, about: so few that
        short rows read little for nothing, so many that reading is not done in crumbs."""
        return min(512, self.max_len // 4)

    @property
    def extend_shapes(self) -> tuple[tuple[int, int], ...]:
        """`extend`, with no more rows than there are slots."""
        return tuple(dict.fromkeys((min(rows, self.slots), n) for rows, n in self.extend))

    @property
    def row_buckets(self) -> tuple[int, ...]:
        return tuple(sorted({rows for rows in self.wave_rows if rows < self.slots} | {self.slots}))

    @property
    def row_pages(self) -> int:
        """Pages of its own that a row of max_len takes."""
        return -(-self.max_len // self.page)

    @property
    def prompt_pages(self) -> int:
        """Pages that a prompt of prompt_len takes."""
        return -(-self.prompt_len // self.prompt_page)

    def kv_taken(self, plan: PagePlan, own: int) -> int:
        """Bytes of K/V where there are so many own pages."""
        tokens = plan.shared * self.prompt_page + own * self.page
        return tokens * plan.token_bytes

    def own_sizes(self, n_own: int) -> tuple[int, ...]:
        """How many own pages the cache may hold, ascending; of n_own at most."""
        return tuple(sorted({n_own} | {math.ceil(share * n_own) for share in self.cache_sizes}))


@dataclasses.dataclass(frozen=True)
class PagePlan:
    """Pages of a device or group of them. token_bytes: K/V of one token in all layers."""

    shared: int
    own: int
    token_bytes: int


def plan_memory(config: SamplerConfig, model: ModelConfig) -> PagePlan:
    """How many pages there are. ValueError, with the figures, where `kv_bytes` cannot hold the
    prompts and one row of max_len, without which a rollout could wait for ever."""
    itemsize = 2 if model.compute_dtype == "bfloat16" else 4
    token = 2 * model.n_layers * model.n_kv_heads * model.head_dim * itemsize
    shared = config.prompts * config.prompt_pages
    if config.kv_bytes is None:
        return PagePlan(shared, config.slots * config.row_pages, token)
    prompts = shared * config.prompt_page * token
    row = config.row_pages * config.page * token
    own = (config.kv_bytes - prompts) // (config.page * token)
    if own < config.row_pages:
        raise ValueError(
            f"sampler.kv_bytes is {config.kv_bytes:,}, but {config.prompts} prompts of "
            f"{config.prompt_len} tokens take {prompts:,} and a row of {config.max_len} tokens "
            f"{row:,} ({token:,} bytes a token): give at least {prompts + row:,}, or lower "
            "sampler.prompts or max_len")
    return PagePlan(shared, min(own, config.slots * config.row_pages), token)
