"""A synthesizer beside nothing: a folder, the notes suite, and what was asked of them."""

import os
import pathlib
import random
import time

from rods_jax.config import to_json
from rods_jax.synthesis.exchange import Header
from rods_jax.synthesis.hosts import Host
from rods_jax.synthesis.loop import LoopConfig, Synthesizer
from rods_jax.synthesis.pipeline import SynthesisConfig, make_maker
from rods_jax.tasks.leakage import HeldOutGuard
from rods_jax.tools.suites import SuiteName, SuiteSpec
from test_synthesis_suite import NotesSuite, notes_task

CONFIG = SynthesisConfig()
REQUESTS = [(0, [(notes_task(0), 2), (notes_task(1, "miss_func"), 1)]),
            (1, [(notes_task(2, "miss_param"), 2)]),
            (3, [(notes_task(0), 3), (notes_task(3, "long_context"), 1)])]
EXPECTED = ["seed0~0.0", "seed0~0.1", "seed1~0.0", "seed2~1.0", "seed2~1.1",
            "seed0~3.0", "seed0~3.1", "seed0~3.2", "seed3~3.0"]


class ServedNotes(NotesSuite):
    """The notes suite, for another process to make."""

    held_out = ()
    siblings_cross = False
    plans = True


class SlowNotes(ServedNotes):
    def plan(self, seed, rng):
        time.sleep(0.05)
        return super().plan(seed, rng)


class FewNotes(ServedNotes):
    """There are but few different variants: what is new depends on what came before."""

    kinds, seconds = 8, 0

    def plan(self, seed, rng):
        time.sleep(self.seconds)
        return super().plan(seed, random.Random(rng.randrange(self.kinds)))


class SlowFewNotes(FewNotes):
    kinds, seconds = 80, 0.04


class DeadlyNotes(ServedNotes):
    def plan(self, seed, rng):
        os._exit(9)


class HangingNotes(ServedNotes):
    def plan(self, seed, rng):
        pathlib.Path("hangs").touch()
        time.sleep(60)


def spec(factory="ServedNotes"):
    return SuiteSpec(SuiteName.CUSTOM, f"synthesis_cases:{factory}")


def header_of(known=(), run_seed=5, factory="ServedNotes", config=CONFIG):
    return Header(spec(factory).to_json(), to_json(config), run_seed, tuple(known))


def maker_of(suite=None, run_seed=5, config=CONFIG):
    return lambda header: make_maker(suite or ServedNotes(), config, HeldOutGuard(), run_seed)


def start(folder, suite=None, *, known=(), run_seed=5, factory="ServedNotes", config=CONFIG,
          say=print, host="thread", **loop):
    return Synthesizer(folder, header_of(known, run_seed, factory, config), config,
                       maker_of(suite, run_seed, config), LoopConfig(Host(host), **loop), say=say)


def restore(state, folder, suite=None, *, known=(), run_seed=5, factory="ServedNotes",
            config=CONFIG, say=print, host="thread", **loop):
    return Synthesizer.restore(state, folder, header_of(known, run_seed, factory, config), config,
                               maker_of(suite, run_seed, config), LoopConfig(Host(host), **loop),
                               say=say)


def ask(synthesizer, requests=REQUESTS):
    return [synthesizer.request(step, tasks) for step, tasks in requests]


def uids(candidates):
    return [candidate.task.uid for candidate in candidates]
