"""The bench of the task pool on tiny pools, and its figures from seconds made by hand."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from experiments.bench import pool as bench
from rods_jax import task_pool
from rods_jax.boundary import BoundaryConfig
from rods_jax.run_config import PolicyConfig, batch_shape
from rods_jax.task_pool import Status


@pytest.mark.slow
def test_one_run_from_the_command_line():
    done = subprocess.run(
        [sys.executable, "-m", "experiments.bench", "pool", "--repeats", "1", "--json", "-"],
        capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["sizes"].keys() == found["growth"].keys() == {"1024", "4096", "16384", "65536"}
    assert set(found["targets"]) == {
        "share_of_update_at_1024", "ms_at_65536", "slowest_ms_at_65536"}
    assert found["all_met"] == all(found[key] < found["targets"][key] for key in found["targets"])
    assert found["growth"]["1024"] == 1


@pytest.fixture(scope="module")
def tiny():
    config = bench.quickstart()
    return dataclasses.replace(
        config, tasks_per_step=4, group_size=2,
        tasks=dataclasses.replace(config.tasks, seeds=4),
        policy=PolicyConfig(d_model=8, n_layers=1, n_heads=2, n_kv_heads=2, d_ff=8, slots=16))


@pytest.mark.slow
def test_it_runs_and_every_operation_is_timed(tiny, capsys):
    found = bench.bench_pool(bench.PoolPlan(tiny, sizes=(16,), repeats=1))
    assert "pass 1 of 1" in capsys.readouterr().err
    for size in found["sizes"].values():
        ms = size["operations_ms"]
        assert set(ms) == {*bench.STEP, *bench.EPOCH} and min(ms.values()) > 0
        assert size["step_ms"] == pytest.approx(
            sum(ms.values()) - sum(ms[name] for name in bench.EPOCH))
    assert found["update"]["rollouts"] == 2  # of two groups, the one that disagrees
    assert found["update"]["seconds"][0] > 0
    shown = bench.pool_table(found).splitlines()
    assert shown[1].split() == ["capacity", "each", "16"]
    assert [line.split()[0] for line in shown[2:16]] == [
        *bench.STEP, "one", "growth", *bench.EPOCH]
    assert shown[-1].endswith("of 3 targets met")


def test_the_pool_has_work_for_every_operation(tiny):
    pool = dataclasses.replace(tiny.pool, capacity=400, p_max=160)
    state = bench.full_pool(pool, 3)
    stats = task_pool.stats(state, BoundaryConfig())
    by_status = np.asarray(stats.by_status)
    assert by_status[Status.EMPTY] == 0 and by_status[Status.TRIAL] > 10
    assert by_status.sum() == 400 and int(stats.live_by_source[0]) == 160
    assert 0 < int(task_pool.unseen(state, bench.BEGAN)) < int(stats.live)
    pruned, gone = task_pool.prune(state, pool)
    assert gone.sum() == int(stats.live_by_source[1]) - 160 > 5
    retired, reason = task_pool.retire(state, bench.NOW, pool)
    assert (np.asarray(reason) > 0).sum() > 20
    _, back = task_pool.revive(retired, pool)
    assert back.sum() > 5


def test_the_batch_has_the_shapes_of_the_config_and_half_of_its_groups(tiny):
    shape = batch_shape(tiny)
    batch = bench.random_batch(tiny, shape, 50)
    assert batch.tokens_MxRxL.shape == (shape.micro, shape.rows, shape.length)
    assert batch.valid_TxG.all() and batch.rewards_TxG.shape == (2, 2)
    held = batch.traj_MxRxL[batch.segments_MxRxL > 0]
    assert set(held.tolist()) == {0, 1} and batch.sampled_MxRxL.sum() >= 2 * 8
    assert (np.asarray(batch.rewards_TxG).std(axis=1) > 0).tolist() == [True, False]


def test_an_epoch_draws_each_task_once_and_admits_its_share(tiny):
    assert bench.Epoch.of(880, tiny) == bench.Epoch(steps=220.0, adds=6)  # 176 in rows of 32


def seconds(step, epoch, slow=()):
    flat = dict.fromkeys(bench.STEP, step) | dict.fromkeys(bench.EPOCH, epoch) | dict(slow)
    return {name: [each, 0.0, 9.0] for name, each in flat.items()}


def test_figures_are_of_medians():
    epochs = {10: bench.Epoch(steps=4.0, adds=3), 80: bench.Epoch(steps=8.0, adds=5)}
    found = bench.pool_figures(
        [1.0, 9.0, 0.5], {80: seconds(4e-4, 2e-3, {"sample": 1e-3}), 10: seconds(1e-4, 2e-4)},
        epochs)
    # Eight calls a step; retire, revive, prune and three of add an epoch.
    small, large = found["sizes"]["10"], found["sizes"]["80"]
    assert small["step_ms"] == pytest.approx(0.8) and small["epoch_ms"] == pytest.approx(1.2)
    assert large["step_ms"] == pytest.approx(3.8) and large["epoch_ms"] == pytest.approx(16.0)
    assert found["share_of_update_at_10"] == pytest.approx((0.8 + 1.2 / 4) / 1000)
    assert found["share_if_each_step_ends_an_epoch"] == pytest.approx((0.8 + 1.2) / 1000)
    assert (found["ms_at_80"], found["slowest_ms_at_80"]) == pytest.approx((3.8, 2.0))
    assert found["growth"] == pytest.approx({"10": 1.0, "80": 3.8 / 0.8})
    assert found["targets"] == {
        "share_of_update_at_10": 0.01, "ms_at_80": 5.0, "slowest_ms_at_80": 5.0}
    assert found["all_met"]


@pytest.mark.parametrize("update_s, slow", [
    (0.1, {}), (1.0, {"sample": 3e-3}), (1.0, {"prune": 5e-3})])
def test_each_target_can_be_missed(update_s, slow):
    found = bench.pool_figures(
        [update_s], {10: seconds(1e-4, 4e-4), 80: seconds(4e-4, 2e-3, slow)},
        {size: bench.Epoch(steps=4.0, adds=3) for size in (10, 80)})
    missed = [key for key, target in found["targets"].items() if found[key] >= target]
    assert len(missed) == 1 and not found["all_met"]
