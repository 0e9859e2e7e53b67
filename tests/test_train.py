"""The closed loop at the size of seconds: admission, the static arm, restart, evaluation."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading

import jax
import kept_programs
import numpy as np
import pytest
from kept_programs import kept_in
from loop_cases import assert_follows_its_replay, tiny_config, write_config
from misbehaving_endpoint import Served, says, unused_url

from experiments import evaluate as evaluate_entry
from experiments import quickstart
from experiments import train as train_entry
from rods_jax import checkpoint, ledger, metrics
from rods_jax.config import UserError
from rods_jax.rollout.engine import make_prompt
from rods_jax.synthesis.exchange import FOLDER
from rods_jax.synthesis.journal import Stopped
from rods_jax.task_pool import Origin, Status, is_live
from rods_jax.tasks.leakage import HeldOutGuard
from rods_jax.train import Run, train
from rods_jax.tools.host import InProcessHost
from rods_jax.types import Source, Task

ROOT = pathlib.Path(__file__).resolve().parents[1]
# What a machine decides and not the run.
TIMES = ("tokens_per_s", "rollout_s", "device_s", "idle_s", "publish_s", "wall_s", "compiles",
         "compiled")
EVERY = dict(checkpoint_every=2, eval=dict(every=2))


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory):
    with kept_in(tmp_path_factory.mktemp("programs")) as folder:
        yield folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(folder):
    """The run that nothing interrupts: its folder and its summary."""
    return folder / "rods", train(tiny_config(**EVERY), folder / "rods", folder / "cache")


@pytest.fixture(scope="module")
def run(folder, whole):
    """A run beside it, to be looked into: 4 steps, each with its metrics."""
    run = Run(tiny_config(**EVERY), folder / "other", folder / "cache")
    rows = [run.train_step() for _ in range(4)]
    yield run, rows
    run.synthesizer.close()


def rows_of(path):
    return [{key: value for key, value in row.items() if key not in TIMES}
            for row in metrics.read(path / metrics.FILE)]


def host_of(path):
    return checkpoint.read_host(path / "checkpoints")[1]


# ---------------------------------------------------------------- the loop closes


def test_variants_are_asked_for_made_and_admitted(whole):
    path, summary = whole
    rows = metrics.read(path / metrics.FILE)
    assert [row["step"] for row in rows] == [0, 1, 2, 3] and summary["steps"] == 4
    assert [row["rollouts"] for row in rows] == [16, 32, 48, 64]
    assert 0 < summary["admitted"] == rows[-1]["admitted"] == rows[-1]["pool_generated"]
    assert rows[0]["admitted"] == 0 and any(row["zone_boundary"] for row in rows)
    assert all(left["admitted"] <= right["admitted"] for left, right in zip(rows, rows[1:]))
    assert summary["funnel"]["attempts"] >= summary["synthesized"] >= summary["admitted"]
    assert "held_in_progress" in rows[1] and "held_in_progress" not in rows[2]
    assert set(summary["evaluations"]["after"]) == {"held_in_sampled", "held_in_greedy"}
    assert json.loads((path / "summary.json").read_text()) == summary
    assert summary["env_errors"] == summary["drifts"] == 0


def test_no_candidate_is_lost(whole):
    path, summary = whole
    waiting = host_of(path)["synthesizer"]["waiting"]
    assert summary["synthesized"] == (summary["admitted"] + summary["refused_at_admission"]
                                      + len(waiting))
    events = summary["ledger"]["events"]
    assert summary["ledger"]["broken"] is None and events["born_seed"] == 8
    assert events["born_generated"] == summary["synthesized"]
    assert events["admitted_generated"] == summary["admitted"]
    assert events["chosen"] > 0 and events["scored"] >= 8


def test_an_admission_takes_at_most_its_share(whole):
    path, _ = whole
    rows = metrics.read(path / metrics.FILE)
    for before, after in zip(rows, rows[1:]):
        assert after["admitted"] - before["admitted"] <= int(0.5 * before["pool_active"])


def test_what_entered_the_pool_is_new_and_not_held_out(run):
    run, _ = run
    suite = run.parts.suite
    guard = HeldOutGuard(task for name in suite.held_out for task in suite.split(name))
    seeds = {task.uid: task for task in run.seeds}
    generated = [Task.from_json(row) for _, row in run.table.state()["generated"]]
    assert len(generated) == run.counters.admitted > 0
    for task in generated:
        assert task.source is Source.GENERATED and guard.leak(task) is None
        assert task.category is seeds[task.parent].category
    hashes = [task.content_hash for task in [*run.seeds, *generated]]
    assert len(set(hashes)) == len(hashes)
    pool = jax.device_get(run.pool)
    for slot in np.flatnonzero(pool.status_N != int(Status.EMPTY)):
        prompt = run.table.prompt(int(pool.uid_N[slot]))
        assert pool.prompt_NxP[slot, :pool.prompt_len_N[slot]].tolist() == list(prompt.ids)
        if pool.source_N[slot] == int(Origin.GENERATED):
            assert pool.parent_N[slot] == run.table.serial(prompt.task.parent) >= 0


def test_rollouts_of_a_trained_policy_follow_their_replay(run):
    run, _ = run
    make = lambda task: make_prompt(task, run.parts.suite, run.parts.chat)  # noqa: E731
    groups, _ = run.engine.run(run.learner.state.params, [make(task) for task in run.held_in], 4,
                               jax.random.key(3), 1.0)
    for group, task in zip(groups, run.held_in):
        for trajectory in group:
            assert_follows_its_replay(trajectory, task, max_len=run.config.sampler.max_len)
    assert any(outcome.n_calls for group in groups for t in group for outcome in t.outcomes)


def test_what_an_update_trained_on_is_counted_by_who_wrote_it(run):
    _, rows = run
    for row in rows:
        for author in ("prompt", "sampled"):  # groups without variance are not packed
            assert (row[f"tokens_{author}"] > 0) == (row["dead_share"] < 1)
        assert row["tokens_inserted"] >= 0 and type(row["tokens_inserted"]) is int
    assert any(row["tokens_inserted"] for row in rows)


def test_looking_into_a_run_does_not_change_it(whole, run):
    _, rows = run
    for row, other in zip(rows, metrics.read(whole[0] / metrics.FILE)):
        for name in row.keys() - set(TIMES):
            assert row[name] == other[name], name


def test_the_ledger_gives_back_the_pool(whole, run):
    run, _ = run
    told = ledger.replay(whole[0] / ledger.FILE, run.config.pool, run.config.sampler.prompt_len)
    for one, other in zip(jax.tree.leaves(told), jax.tree.leaves(run.pool), strict=True):
        assert one.dtype == other.dtype and one.tobytes() == np.asarray(other).tobytes()
    assert (run.folder / ledger.FILE).read_bytes() == (whole[0] / ledger.FILE).read_bytes()


def test_nothing_compiles_once_each_part_has_run(whole):
    """The programs of an admission are compiled in the first step after which one is due;
    evaluations and checkpoints between the steps need none."""
    compiles = [row["compiles"] for row in metrics.read(whole[0] / metrics.FILE)]
    assert compiles[1] == compiles[2] == compiles[3]


def test_a_held_in_task_is_refused_at_admission(folder, whole):
    run = Run(tiny_config(), folder / "leak", folder / "cache")
    live = np.asarray(is_live(run.pool)).sum()
    task = dataclasses.replace(run.held_in[3], uid="sly", scenario="else", parent=run.seeds[0].uid,
                               source=Source.GENERATED, generation=1)
    refused, leaks = run.counters.refused_at_admission, sum(run.guard.counts.values())
    assert run._admit([task]) == 0
    assert np.asarray(is_live(run.pool)).sum() == live and run.table.serial("sly") == -1
    assert run.counters.refused_at_admission == refused + 1
    assert sum(run.guard.counts.values()) == leaks + 1
    with pytest.raises(UserError, match="seed sly may not enter the pool"):
        run._admit([dataclasses.replace(task, source=Source.SEED)])
    run.synthesizer.close()


def test_the_static_arm_draws_the_same_tasks_and_makes_none(folder, whole):
    static = train(tiny_config(**EVERY, synthesis_on=False), folder / "static", folder / "cache")
    rows, others = rows_of(folder / "static"), rows_of(whole[0])
    assert static["synthesized"] == static["admitted"] == static["funnel"]["attempts"] == 0
    assert static["ledger"]["broken"] is None
    assert rows[-1]["pool_generated"] == 0 and rows[-1]["pool_active"] == 8
    assert rows[0] == others[0]
    assert static["rollouts"] == whole[1]["rollouts"]
    assert static["evaluations"]["before"] == whole[1]["evaluations"]["before"]

    summary = quickstart.summarize(folder, seed=0)
    assert summary["rods"]["admitted"] == whole[1]["admitted"]
    text = quickstart.table(summary)
    assert "mean progress, greedy" in text and "tasks admitted" in text
    assert quickstart.live_text("rods", others[-1] | {"tokens_per_s": 1.0}, 4).startswith(
        "rods 4/4 reward")


def test_an_epoch_visits_each_live_task_before_new_ones_come(folder, whole):
    run = Run(tiny_config(admit_every=0), folder / "epochs", folder / "cache")
    live, drawn, ends = [], [], []
    for step in range(5):
        before = set(np.asarray(run.pool.uid_N)[np.asarray(is_live(run.pool))].tolist())
        row = run.train_step()
        drawn.append(set(np.flatnonzero(np.asarray(run.pool.last_seen_N) == step).tolist()))
        live.append(before)
        ends.append((row["epoch"], row["admitted"]))
    run.synthesizer.close()
    assert [epoch for epoch, _ in ends[:4]] == [0, 0, 1, 1]
    assert not drawn[0] & drawn[1] and len(drawn[0] | drawn[1]) == 8
    assert ends[1][1] == 0 < ends[2][1]


def test_a_stage_without_tasks_is_one_line(folder, whole):
    stages = (dict(steps=None, reward="progress", categories=("long_context",)),)
    run = Run(tiny_config(tasks=dict(seeds=3, held_in=8), curriculum=dict(stages=stages)),
              folder / "empty", folder / "cache")
    with pytest.raises(UserError, match="step 0: no live task belongs to the categories"):
        run.train_step()
    run.synthesizer.close()


class Broken:
    """The toolbox, but no call of one task's rollouts can be executed."""

    def __init__(self, suite, uid):
        self._suite, self._uid = suite, uid

    def __getattr__(self, name):
        return getattr(self._suite, name)

    def make_env(self, task, hints=False):
        if task.uid == self._uid:
            raise ConnectionError("no worker")
        return self._suite.make_env(task)


def test_a_broken_environment_costs_its_own_samples_only(folder, whole):
    run = Run(tiny_config(), folder / "broken", folder / "cache")
    broken = run.seeds[2]
    run.engine.host = InProcessHost(Broken(run.engine.suite, broken.uid))
    serial = run.table.serial(broken.uid)
    for step in range(4):
        row = run.train_step()
        slot = int(np.flatnonzero(np.asarray(run.pool.uid_N) == serial)[0])
        failures = int(run.pool.failures_N[slot])
        assert row["env_errors"] >= 4 * failures
        assert row["reward_mean"] is not None and np.isfinite(row["loss"])
    assert run.counters.env_errors > 0 and row["rollouts"] == 64
    assert int(np.asarray(is_live(run.pool))[slot])  # seeds stay
    run.synthesizer.close()


def test_variants_that_never_come_end_the_run_with_one_line(folder, whole, monkeypatch):
    run = Run(tiny_config(synthesizer=dict(timeout_s=0.05)), folder / "slow", folder / "cache")
    gate = threading.Event()
    monkeypatch.setattr(run.parts.suite, "plan", lambda seed, rng: gate.wait(30) and None,
                        raising=False)
    run.synthesizer.request(0, [(run.seeds[0], 1)])
    run.step = 1
    before = run.epoch, run.epoch_start, run.last_admission
    with pytest.raises(Stopped, match="synthesis of step 0 has not ended"):
        run.train_step()
    assert (run.epoch, run.epoch_start, run.last_admission) == before
    gate.set()
    run.synthesizer.close()


# ---------------------------------------------------------------- where variants are made


@pytest.mark.slow
def test_a_process_of_its_own_makes_the_same_run(folder, whole):
    path = folder / "process"
    summary = train(tiny_config(**EVERY, synthesizer=dict(host="process")), path, folder / "cache")
    assert rows_of(path) == rows_of(whole[0])
    assert (path / ledger.FILE).read_bytes() == (whole[0] / ledger.FILE).read_bytes()
    assert host_of(path)["synthesizer"] == host_of(whole[0])["synthesizer"]
    assert summary["synthesis"]["restarts"] == 0 and summary["funnel"] == whole[1]["funnel"]


@pytest.mark.slow
def test_a_run_that_does_not_wait_accounts_for_every_task(folder, whole):
    config = tiny_config(synthesizer=dict(wait=False))
    summary = train(config, folder / "hasty", folder / "cache")
    assert summary["ledger"]["broken"] is None and summary["rollouts"] == 64
    assert summary["funnel"]["attempts"] <= whole[1]["funnel"]["attempts"]


def test_a_run_that_stops_for_its_endpoint_keeps_a_checkpoint_and_goes_on(folder, whole):
    def config(url):
        return tiny_config(synthesis=dict(writer="llm", on_outage="stop", endpoint=dict(
            base_url=url, model="m", tries=1)))

    path = folder / "stopped"
    with pytest.raises(Stopped, match="the endpoint .* gave no answer"):
        train(config(unused_url()), path, folder / "cache")
    step = checkpoint.read_host(path / "checkpoints")[0]
    assert 0 < step < 4 and len(metrics.read(path / metrics.FILE)) == step
    with Served(says("no texts")) as server:
        summary = train(config(server.url), path, folder / "cache",
                        checkpoint.latest(path / "checkpoints"))
    assert [row["step"] for row in metrics.read(path / metrics.FILE)] == [0, 1, 2, 3]
    told = summary["synthesis"]
    assert told["requests"] > 0 and told["failures"] == {"not_json": told["requests"]}
    assert summary["admitted"] == 0 and summary["ledger"]["broken"] is None


# ---------------------------------------------------------------- interrupted = uninterrupted


@pytest.fixture(scope="module")
def resumed(folder, whole, programs):
    """The same run as a kill between steps 3 and 4 would leave it, taken up from step 2 by
    another process with another hash seed, through the command line."""
    path = folder / "resumed"
    shutil.copytree(whole[0], path)
    (path / "summary.json").unlink()
    newest = checkpoint.step_dir(path / "checkpoints", 4)
    newest.rename(newest.with_name(".tmp-step_000000004"))
    (newest.with_name(".tmp-step_000000004") / "manifest.json").unlink()
    told = (path / ledger.FILE).read_text()
    (path / ledger.FILE).write_text(told[:-20])
    lines = (path / metrics.FILE).read_text().splitlines(keepends=True)
    (path / metrics.FILE).write_text("".join(lines[:3]) + lines[3][:40])
    config = write_config(folder / "tiny.py", **EVERY)
    settings = {name.upper(): str(value) for name, value in kept_programs.SETTINGS.items()}
    done = subprocess.run(
        [sys.executable, "-m", "experiments.train", "--config", config, "--out", path,
         "--cache", folder / "cache", "--resume", "--json", "-"],
        cwd=ROOT, capture_output=True, text=True,
        env=os.environ | settings | {"JAX_COMPILATION_CACHE_DIR": str(programs),
                                     "PYTHONHASHSEED": "7"})
    assert done.returncode == 0, done.stderr[-2000:]
    return path, json.loads(done.stdout.splitlines()[-1])


def test_interrupted_equals_uninterrupted(whole, resumed, run):
    assert (resumed[0] / ledger.FILE).read_bytes() == (whole[0] / ledger.FILE).read_bytes()
    assert rows_of(resumed[0]) == rows_of(whole[0])
    assert host_of(resumed[0]) == host_of(whole[0])
    like = {"train": run[0].learner.state, "pool": run[0].pool}
    left, right = (checkpoint.restore(path / "checkpoints", like) for path in (whole[0], resumed[0]))
    assert left.step == right.step == 4
    for one, other in zip(jax.tree.leaves(left.arrays), jax.tree.leaves(right.arrays)):
        np.testing.assert_array_equal(one, other)
    drop = lambda summary: {k: v for k, v in summary.items() if k != "wall_s"}  # noqa: E731
    assert drop(resumed[1]) == drop(whole[1])


def test_a_half_written_checkpoint_is_cleaned_away(resumed):
    names = sorted(p.name for p in (resumed[0] / "checkpoints").iterdir())
    assert names == ["step_000000002", "step_000000004"]


def test_the_table_of_a_resumed_run_is_the_same(folder, whole, run):
    other = Run(tiny_config(**EVERY), folder / "third", folder / "cache")
    with pytest.raises(ValueError, match="third/synthesis: the checkpoint speaks of .* no header"):
        other.resume(whole[0] / "checkpoints")
    shutil.copytree(whole[0] / FOLDER, folder / "third" / FOLDER)
    other.resume(whole[0] / "checkpoints")
    assert other.table.state() == run[0].table.state()
    assert sorted(other.table.serials()) == sorted(run[0].table.serials())
    for serial in other.table.serials():
        assert other.table.prompt(serial).ids == run[0].table.prompt(serial).ids
    assert other.counters.rollouts == 64 and other.step == 4
    other.synthesizer.close()


def test_resuming_with_another_config_is_one_line(folder, whole):
    before = sorted(p.name for p in whole[0].iterdir())
    config = write_config(folder / "again.py", **EVERY)
    arguments = ["--config", str(config), "--out", str(whole[0]), "--cache",
                 str(folder / "cache"), "--resume", "--set"]
    with pytest.raises(UserError, match=r"another config\.optimizer \(lr: 0\.001 then, 0\.5 now\)"):
        train_entry.main([*arguments, "optimizer.lr=0.5"])
    with pytest.raises(UserError, match=r"another config\.policy \(d_ff: 64 then, 32 now\)"):
        train_entry.main([*arguments, "policy.d_ff=32", "--set", "warm_start=None"])
    with pytest.raises(UserError, match="holds a run already; add --resume"):
        train_entry.main(arguments[:-2])
    assert sorted(p.name for p in whole[0].iterdir()) == before


def test_a_run_that_has_ended_is_left_as_it_is(folder, whole, capsys):
    config = write_config(folder / "ended.py", **EVERY)
    files = {p: p.stat().st_mtime_ns for p in whole[0].rglob("*")}
    train_entry.main(["--config", str(config), "--out", str(whole[0]), "--cache",
                      str(folder / "cache"), "--resume", "--json", "-"])
    *_, told, summary = capsys.readouterr().out.splitlines()
    assert told.endswith("step_000000004 is at step 4 already: nothing to train")
    assert json.loads(summary) == whole[1]
    assert {p: p.stat().st_mtime_ns for p in whole[0].rglob("*")} == files


def test_a_run_whose_folder_is_removed_stops_after_its_step(folder, whole, monkeypatch):
    path, step, steps = folder / "gone", Run.train_step, []

    def step_and_remove(run):
        steps.append(run.step)
        found = step(run)
        if run.step == 2:
            shutil.rmtree(path)
        return found

    monkeypatch.setattr(Run, "train_step", step_and_remove)
    with pytest.raises(UserError, match="gone/.* was removed while the run wrote to it"):
        train(tiny_config(**EVERY), path, folder / "cache")
    assert steps == [0, 1]


# ---------------------------------------------------------------- experiments.evaluate


def test_evaluating_the_checkpoint_gives_the_numbers_of_the_run(folder, whole, capsys):
    config = write_config(folder / "evaluate.py", **EVERY)
    for place in (whole[0], whole[0] / "checkpoints" / "step_000000004"):
        evaluate_entry.main(["--config", str(config), "--checkpoint", str(place), "--json", "-"])
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        after = whole[1]["evaluations"]["after"]
        assert found["sampled"] == after["held_in_sampled"]
        assert found["greedy"] == after["held_in_greedy"]
        assert found["step"] == 4 and found["split"] == "held_in"
    evaluate_entry.main(["--config", str(config), "--checkpoint", str(whole[0]), "--split", "train",
                         "--json", str(folder / "found.json")])
    assert "8 tasks of train" in capsys.readouterr().out
    assert json.loads((folder / "found.json").read_text())["greedy"]["n_tasks"] == 8
    with pytest.raises(UserError, match=r"another config\.policy \(slots: 8 then, 9 now\)"):
        evaluate_entry.main(["--config", str(config), "--checkpoint", str(whole[0]),
                             "--set", "policy.slots=9"])
