"""Tasks that a worker cannot take: their own affair, whatever else the worker does."""

import dataclasses

import pytest
from worker_suite import add, task

from rods_jax.tasks.replay import Replay
from rods_jax.tools.host import EnvError, HostConfig
from rods_jax.tools.suites import SuiteName, SuiteSpec
from rods_jax.tools.workers import WorkerPool


@pytest.fixture
def pool():
    made = WorkerPool(SuiteSpec(SuiteName.CUSTOM, "worker_suite:make"), HostConfig(count=1))
    yield made
    made.close()


@pytest.mark.parametrize("odd", [dict(generation=-1), dict(turns=()), dict(uid="")])
def test_a_task_that_no_worker_reads_fails_alone(pool, odd):
    good, bad = task("good"), dataclasses.replace(task("bad"), **odd)
    rollouts = [pool.start(good, False), pool.start(bad, False), pool.start(good, False)]
    answers = [pool.execute(rollout, (add(0),)) for rollout in rollouts]
    assert [a.result()[0].text for a in (answers[0], answers[2])] == ['{"total": 0}'] * 2
    with pytest.raises(EnvError, match=next(iter(odd))):
        answers[1].result()
    assert pool.end_turn(rollouts[0], "").result()[0].passed
    found = pool.play_many([(good, None), (bad, None), (good, None)])
    assert [type(f) for f in found] == [Replay, EnvError, Replay]
    assert found[0].valid and found[2].valid and not pool.crashes and not pool.replaced


def test_a_task_that_is_no_json_is_named_and_the_pool_goes_on(pool):
    with pytest.raises(ValueError, match="task odd: it is not JSON data"):
        pool.start(dataclasses.replace(task("odd"), initial_config={"making": {1, 2}}), False)
    rollout = pool.start(task("good"), False)
    assert pool.execute(rollout, (add(0),)).result()[0].ok
