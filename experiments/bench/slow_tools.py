"""What tools that take their time cost a rollout: the same tokens with and without them.

The whole engine plays, with its tools in worker processes and, to compare, in this one, where
they hold up everything. Passes with and without the wait take turns; the first is not counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
from collections.abc import Mapping, Sequence

import jax

from experiments.bench.slow_suite import SPEC, NumberFormat, SlowSuite, Talk, make_task
from rods_jax.config import UserError
from rods_jax.models.decoder import Decoder
from rods_jax.rollout.engine import Engine, EngineConfig, RolloutStats, make_prompt
from rods_jax.rollout.shapes import SamplerConfig
from rods_jax.tools.host import Host, HostConfig, make_host
from rods_jax.types import Json

TARGET = 0.15  # of the throughput, most that may be lost


@dataclasses.dataclass(frozen=True)
class Load:
    """`groups` of `group` rollouts each, of which the slots hold one. rows, pages: see
    SamplerConfig.wave_rows and cache_sizes."""

    talk: Talk = Talk()
    group: int = 16
    groups: int = 1
    rows: tuple[int, ...] = (8,)
    pages: tuple[float, ...] = (0.25, 0.5)

    @property
    def sampler(self) -> SamplerConfig:
        talk = self.talk
        longest = min(8 * talk.message, talk.length - talk.prompt)
        return SamplerConfig(
            slots=self.group, sharers=self.group, prompts=2, max_len=talk.length,
            prompt_len=talk.prompt, max_new=longest, page=64, prompt_page=256,
            prefill=((1, talk.prompt),), extend=((1, 64), (4, 64)),
            wave_rows=self.rows, cache_sizes=self.pages)


def slow_tools(decoder: Decoder, params, repeats: int, seconds: float = 0.05,
               workers: Sequence[int] = (16, 4, 0), load: Load = Load()) -> dict[str, Json]:
    """slow_tools_loss: the share of the throughput that is lost when each call takes so many
    seconds, with the first number of workers. by_workers: the same for each number; 0 are
    tools in this process. Raises UserError where the wait changed a token."""
    engine = make_engine(decoder, load)
    engine.warm_up(params)
    return measure(engine, params, repeats, seconds, workers, load)


def make_engine(decoder: Decoder, load: Load) -> Engine:
    chat = NumberFormat(decoder.config.vocab_size, load.talk.message)
    return Engine(decoder, load.sampler, EngineConfig(max_steps=load.talk.calls), chat,
                  SlowSuite())


def measure(engine: Engine, params, repeats: int, seconds: float, workers: Sequence[int],
            load: Load) -> dict[str, Json]:
    """`slow_tools` with an engine that is there."""
    suite = engine.suite
    prompts = {wait: [make_prompt(make_task(load.talk, number, wait), suite, engine.chat)
                      for number in range(load.groups)] for wait in (0.0, seconds)}
    found: dict[tuple[int, float], list[RolloutStats]] = {
        (count, wait): [] for count in workers for wait in prompts}
    first = None
    with contextlib.ExitStack() as stack:
        hosts: dict[int, Host] = {}
        for count in workers:
            hosts[count] = make_host(suite, SPEC, HostConfig(count=count))
            stack.callback(hosts[count].close)
        for repeat in range(repeats + 1):
            for count, wait in found:
                engine.host = hosts[count]
                groups, stats = engine.run(params, prompts[wait], load.group, jax.random.key(3),
                                           temperature=1.0)
                tokens = [t.tokens_L.tolist() for group in groups for t in group]
                first = first or tokens
                if tokens != first:
                    raise UserError(f"{count} workers and calls of {wait:g} s gave other tokens: "
                                    "the rollout engine is broken")
                print(_told(repeat, repeats, count, wait, stats), file=sys.stderr, flush=True)
                if repeat:
                    found[count, wait].append(stats)
    return _figures(found, workers, seconds, repeats, load)


def _told(repeat: int, repeats: int, count: int, wait: float, stats: RolloutStats) -> str:
    part = f"pass {repeat} of {repeats}" if repeat else "warm-up"
    return f"{part}, calls of {wait:g} s, {count} workers: {stats.total_s:.2f} s"


def _figures(found: Mapping[tuple[int, float], Sequence[RolloutStats]], workers: Sequence[int],
             seconds: float, repeats: int, load: Load) -> dict[str, Json]:
    by_workers = {}
    for count in workers:
        instant, slow = (_side(found[count, wait]) for wait in (0.0, seconds))
        by_workers[str(count)] = {"loss": 1 - slow["tokens_per_s"] / instant["tokens_per_s"],
                                  "instant": instant, "slow": slow}
    loss = by_workers[str(workers[0])]["loss"]
    return {"slow_tools_loss": loss, "target": TARGET, "met": loss < TARGET,
            "workers": workers[0], "seconds": seconds, "repeats": repeats,
            "rollouts": load.group * load.groups, **dataclasses.asdict(load.talk),
            "by_workers": by_workers}


def _side(passes: Sequence[RolloutStats]) -> dict[str, Json]:
    """tokens_per_s: sampled ones. idle_s: when all rollouts waited for their tools."""
    def median(name: str) -> float:
        return statistics.median(getattr(stats, name) for stats in passes)

    return {"tokens_per_s": statistics.median(
                stats.sampled_tokens / stats.total_s for stats in passes),
            "seconds": [stats.total_s for stats in passes],
            "sampled": passes[0].sampled_tokens, "inserted": passes[0].inserted_tokens,
            **{name: median(name) for name in ("waves", "device_s", "idle_s")}}


def lines(found: Mapping[str, Json]) -> list[str]:
    """The figures for people."""
    shown = [f"{found['rollouts']} rollouts, {found['calls']} calls each, of "
             f"{1000 * found['seconds']:g} ms against instant ones, medians of {found['repeats']}"]
    for count, row in found["by_workers"].items():
        where = f"{count} worker processes" if int(count) else "in this process"
        target = f", target below {100 * found['target']:g} %" \
            if int(count) == found["workers"] else ""
        instant, slow = (row[side]["tokens_per_s"] for side in ("instant", "slow"))
        shown.append(f"  tools {where}: {slow:.0f} tokens/s against {instant:.0f}, "
                     f"{100 * row['loss']:.1f} % lost{target}")
    return shown
