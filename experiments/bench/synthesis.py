"""What synthesis beside training costs a step, the synthesizer's process having a core of its own.

Two runs of configs/quickstart.py, warm-started as there, train in this process on one core and
take turns, step by step. Nothing is admitted to the pool of either, so both draw the same tasks,
roll out the same tokens and take the same updates, which is checked. One of them asks for as
many variants in every step as a step chooses seeds at most, in the first lines of that step, and
collects what is there in its last; its process makes them on another core meanwhile and has made
all of them before the other run's step is timed.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

from experiments.bench import machine
from experiments.bench.rollout_table import busy_lines
from rods_jax.config import UserError, load
from rods_jax.run_config import RunConfig
from rods_jax.startup import installed_versions
from rods_jax.synthesis.hosts import Host
from rods_jax.synthesis.loop import LoopConfig, Synthesizer
from rods_jax.train import Run
from rods_jax.types import Json

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "quickstart.py"
KEY, TARGET = "step_time_on_over_off", 1.02  # most
DRAIN_S = 120.0  # for the variants of a step to be made, outside of what is timed
# What two steps have in common that did the same.
SAME = ("reward_mean", "loss", "tokens_prompt", "tokens_sampled", "tokens_inserted")


@dataclasses.dataclass(frozen=True)
class SynthesisPlan:
    """config: of the run. repeats: counted steps of each. cache: where warm starts are kept."""

    config: RunConfig = dataclasses.field(default_factory=lambda: load(CONFIG, (), RunConfig))
    repeats: int = 24
    cache: pathlib.Path = pathlib.Path("runs/cache")


def bench_synthesis(plan: SynthesisPlan) -> dict[str, Json]:
    """Call it before anything else uses jax, which looks at the cores once."""
    if len(cores := sorted(os.sched_getaffinity(0))) < 2:
        raise UserError("the bench of synthesis needs two cores: one trains, one synthesizes")
    os.sched_setaffinity(0, {cores[0]})
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _measure(plan, pathlib.Path(folder), cores[1])
    finally:
        os.sched_setaffinity(0, cores)


def _measure(plan: SynthesisPlan, folder: pathlib.Path, core: int) -> dict[str, Json]:
    config = dataclasses.replace(
        plan.config, synthesis_on=False,
        synthesizer=LoopConfig(Host.PROCESS, wait=False, timeout_s=DRAIN_S))
    with Run(config, folder / "on", plan.cache) as on, \
            Run(config, folder / "off", plan.cache) as off:
        on.synthesizer.open()
        os.sched_setaffinity(on.synthesizer.pid, {core})
        attempts = min(config.boundary.budget, len(on.seeds))
        for run in (on, off):
            run.warm_up()
        _step_with(on, attempts)
        off.train_step()
        others = machine.Others([on.synthesizer.pid])
        steps: dict[str, list[float]] = {"on": [], "off": []}
        for number in range(plan.repeats):
            order = ("on", "off") if number % 2 else ("off", "on")
            rows = {}
            for arm in order:
                start = time.perf_counter()
                rows[arm] = _step_with(on, attempts) if arm == "on" else off.train_step()
                steps[arm].append(time.perf_counter() - start)
                _drain(on.synthesizer)
            if any(rows["on"][name] != rows["off"][name] for name in SAME):
                raise UserError(f"step {off.step - 1} was not the same with synthesis as without: "
                                "the times say nothing")
            print(f"step {number + 1} of {plan.repeats}: {steps['on'][-1]:.3f} s with, "
                  f"{steps['off'][-1]:.3f} s without", file=sys.stderr, flush=True)
        busy = others.cores_busy()
        made = on.synthesizer.funnel
    return {**synthesis_figures(steps["on"], steps["off"]), "attempts_a_step": attempts,
            "attempts": made.attempts, "accepted_share": made.accepted_share,
            "repeats": plan.repeats, "versions": installed_versions(),
            "machine": {"cores": machine.cores(), "others_cores_busy": busy}}


def _step_with(run: Run, attempts: int) -> dict[str, Json]:
    """A step that asks, and takes what is there, as one does at an admission."""
    seeds = itertools.islice(itertools.cycle(run.seeds), run.step * attempts,
                             (run.step + 1) * attempts)
    run.synthesizer.request(run.step, [(seed, 1) for seed in seeds])
    row = run.train_step()
    run.synthesizer.settle([c.task.uid for c in run.synthesizer.collect(run.step)])
    return row


def _drain(synthesizer: Synthesizer) -> None:
    """Until its process has nothing to do."""
    end = time.monotonic() + DRAIN_S
    while synthesizer.outstanding:
        if time.monotonic() > end:
            raise UserError(f"{synthesizer.outstanding} variants were not made within "
                            f"{DRAIN_S:.0f} s: is the other core free?")
        time.sleep(0.01)
        synthesizer.settle([c.task.uid for c in synthesizer.collect(sys.maxsize)])


def synthesis_figures(on_s: Sequence[float], off_s: Sequence[float]) -> dict[str, Json]:
    """From the seconds of steps that did the same, in pairs: the median of their ratios, its
    quartiles, and of either the median."""
    ratios = [on / off for on, off in zip(on_s, off_s, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else 3 * ratios
    return {KEY: statistics.median(ratios), "quartiles": [quartiles[0], quartiles[2]],
            "target": TARGET, "all_met": statistics.median(ratios) <= TARGET,
            "step_s": {"on": statistics.median(on_s), "off": statistics.median(off_s)},
            "seconds": {"on": list(on_s), "off": list(off_s)}}


def synthesis_table(found: Mapping[str, Json]) -> str:
    first, last = found["quartiles"]
    return "\n".join([
        f"steps of configs/quickstart.py on one core, {found['attempts_a_step']} variants asked "
        f"for in each and made on another, {found['repeats']} pairs of steps",
        f"{'with synthesis':22}{found['step_s']['on']:>8.3f} s",
        f"{'without':22}{found['step_s']['off']:>8.3f} s",
        f"with over without {found[KEY]:.4f} (quartiles {first:.4f} and {last:.4f}, target "
        f"{TARGET:g} at most: {'met' if found['all_met'] else 'missed'})",
        f"{found['attempts']} attempts, {found['accepted_share']:.0%} accepted",
        *busy_lines(found["machine"])])
