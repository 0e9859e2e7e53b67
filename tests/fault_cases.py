"""What the tests of faults in rollouts share."""

import collections
import itertools

import jax
import numpy as np

from rods_jax.rollout.engine import make_prompt
from rods_jax.tools.host import HostConfig, InProcessHost
from rods_jax.tools.suites import SuiteName, SuiteSpec
from rods_jax.tools.workers import WorkerPool
from rods_jax.types import Author

KEY = jax.random.key(4)


def pool_of(factory, kind=WorkerPool, module="fault_suites", **given):
    config = HostConfig(**({"count": 2, "call_s": 60.0, "memory_mb": 512} | given))
    return kind(SuiteSpec(SuiteName.CUSTOM, f"{module}:{factory}"), config)


def play(engine, host, params, tasks, group=4):
    """Closes the host, and looks whether the engine has all its slots and pages again."""
    engine.host = host
    try:
        prompts = [make_prompt(task, engine.suite, engine.chat) for task in tasks]
        return engine.run(params, prompts, group, KEY, 1.0)
    finally:
        host.close()
        assert_all_free(engine)


def assert_all_free(engine):
    slots, memory = engine.slots, engine.slots.plan
    assert slots.free(0) == engine.sampler.slots and not slots.rows
    assert (len(slots._own[0]), len(slots._shared[0])) == (memory.own, memory.shared)


def flat(groups):
    return list(itertools.chain(*groups))


def assert_same(mine, other):
    who = f"sample {other.sample} of {other.task_uid}"
    assert mine.tokens_L.tolist() == other.tokens_L.tolist(), who
    assert mine.author_L.tolist() == other.author_L.tolist(), who
    np.testing.assert_allclose(mine.logprobs_L, other.logprobs_L, atol=1e-4, err_msg=who)
    for name in ("task_uid", "sample", "outcomes", "end", "n_steps", "n_malformed", "rows"):
        assert getattr(mine, name) == getattr(other, name), (who, name)


def assert_cut(mine, other, end, length=None):
    """It is the other one up to some sampled token."""
    n = len(mine.tokens_L)
    assert mine.end is end and (mine.task_uid, mine.sample) == (other.task_uid, other.sample)
    assert n <= len(other.tokens_L) and (length is None or n == length)
    assert mine.tokens_L.tolist() == other.tokens_L.tolist()[:n]
    assert mine.author_L.tolist() == other.author_L.tolist()[:n]
    assert mine.author_L[-1] == Author.SAMPLED
    np.testing.assert_allclose(mine.logprobs_L, other.logprobs_L[:n], atol=1e-4)
    assert mine.outcomes == other.outcomes[:len(mine.outcomes)]


class Recorder(InProcessHost):
    """Counts operations by task."""

    def __init__(self, suite):
        super().__init__(suite)
        self.started, self.executed = {}, collections.Counter()

    def start(self, task, hints):
        handle = super().start(task, hints)
        self.started[handle] = task.uid
        return handle

    def execute(self, rollout, calls):
        self.executed[self.started[rollout]] += len(calls)
        return super().execute(rollout, calls)
