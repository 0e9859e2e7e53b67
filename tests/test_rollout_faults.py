"""Tools that do harm to the process they run in: only their own rollouts notice."""

import collections
import dataclasses
import json
import os
import pathlib
import signal

import fault_suites
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollout_world as world
from fault_cases import Recorder, assert_all_free, assert_cut, assert_same, flat, play, pool_of
from fault_suites import FAULT, PID_FILE
from loop_cases import tiny_config
from rollout_world import SmallFormat, SmallSuite, make_task
from worker_suite import kill

from rods_jax.models.config import ModelConfig
from rods_jax.models.decoder import Decoder, init_params
from rods_jax.rollout.engine import Engine, EngineConfig
from rods_jax.rollout.shapes import SamplerConfig
from rods_jax.tools.env import UserTurn
from rods_jax.tools.host import InProcessHost, Outage
from rods_jax.tools.workers import WorkerPool
from rods_jax.train import Counters, Run
from rods_jax.types import Author, EndReason

SUITE = SmallSuite(fault_suites.nothing)  # in which `exit` does no harm
CHAT = SmallFormat()
EXIT_ID = 5 + world.CALLS.index(world.EXIT)
SHAPE = SamplerConfig(slots=6, max_len=96, prompt_len=24, max_new=10, sharers=4, prompts=2,
                      prefill=((2, 24),), extend=((4, 16),), steps=4, steps_waiting=2)
TASKS = [make_task(f"safe {i}", "hello"[:i], 1 + i % 3, ("yes", "no " * i)) for i in range(5)]
TASKS[2:2] = [make_task(f"exits {i}", "out", 2, ("fine",), (*world.SAFE, "exit"))
              for i in range(2)]


def talker(likely):
    """Random weights in which every hidden state also says these tokens, {id: logit}."""
    decoder = Decoder(ModelConfig(CHAT.vocab_size, d_model=16, n_layers=1, n_heads=2,
                                  n_kv_heads=2, head_dim=8, d_ff=24, tie_embeddings=False))
    params = init_params(decoder.config, jax.random.key(1))
    rng = np.random.default_rng(1)
    embed = rng.normal(0, 1, params["embed"].shape).astype(np.float32)
    head = rng.normal(0, 0.3, params["head"].shape).astype(np.float32)
    embed[:, 0], head[0] = 8.0, 0.0
    for token, logit in likely.items():
        head[0, token] = logit / 3.0
    return decoder, params | {"embed": jnp.asarray(embed), "head": jnp.asarray(head)}


DECODER, TALK = talker({world.END: 2.0, world.GO: 3.5, 5: 2.5, 6: 2.0, EXIT_ID: 1.5})


def exiter():
    """Says exit, and after that the end of the message."""
    params = talker({EXIT_ID: 60.0})[1]
    embed = params["embed"].at[:, 1].set(0.0).at[EXIT_ID, 1].set(8.0)
    head = params["head"].at[1].set(0.0).at[1, world.GO].set(60.0)
    return params | {"embed": embed, "head": head}


@pytest.fixture(scope="module")
def engine():
    return Engine(DECODER, SHAPE, EngineConfig(max_steps=4, stop_on_failed_turn=False), CHAT,
                  SUITE)


@pytest.fixture(scope="module")
def clean(engine):
    return play(engine, InProcessHost(SUITE), TALK, TASKS)[0]


def exit_at(trajectory):
    """How many tokens there are up to the end of the first message that calls exit where it
    may; None: there is no such message."""
    if not trajectory.task_uid.startswith("exits"):
        return None
    calls = False
    for i, (token, author) in enumerate(zip(trajectory.tokens_L, trajectory.author_L)):
        if author != Author.SAMPLED:
            calls = False
        elif token in CHAT.stop_ids:
            if calls and token == world.GO:
                return i + 1
            calls = False
        else:
            calls |= token == EXIT_ID
    return None


# ---------------------------------------------------------------- tools that do harm


class Killer(WorkerPool):
    """Kills the workers that say where they hang."""

    def poll(self):
        file = pathlib.Path(os.environ[PID_FILE])
        if file.exists():
            pid = int(file.read_text(encoding="ascii"))
            file.unlink()
            kill(pid)
        super().poll()

    def wait(self, pendings):
        while not any(pending.ready() for pending in pendings):
            self.pump(0.01)
            self.poll()


@pytest.mark.parametrize("factory, given, end, reason", [
    ("make_die", {}, EndReason.TOOL_CRASH, "died"),
    ("make_say_pid_and_hang", {"kind": Killer}, EndReason.TOOL_CRASH, "died"),
    ("make_hang", {"call_s": 2.0, "count": 4}, EndReason.TOOL_CRASH, "time"),
    ("make_eat", {}, EndReason.TOOL_CRASH, "memory"),
    ("make_fail", {}, EndReason.ENV_ERROR, "LookupError")])
def test_harm_ends_its_own_rollouts_only(engine, clean, monkeypatch, tmp_path, factory, given, end,
                                         reason):
    monkeypatch.setenv(PID_FILE, str(tmp_path / "pid"))
    host = pool_of(factory, **given)
    groups, stats = play(engine, host, TALK, TASKS)
    harmed = 0
    for mine, other in zip(flat(groups), flat(clean), strict=True):
        at = exit_at(other)
        harmed += at is not None
        if at is None:
            assert_same(mine, other)
        else:
            assert_cut(mine, other, end, at)
            assert mine.end.usable == (end is EndReason.TOOL_CRASH) and not mine.end.truncated
    assert 0 < harmed < 8
    counted = stats.env_errors if end is EndReason.ENV_ERROR else stats.crashes
    assert counted == {reason: harmed} and stats.ends[end.value] == harmed
    assert sum((stats.crashes + stats.env_errors).values()) == harmed
    assert host.replaced == (0 if end is EndReason.ENV_ERROR else harmed)
    assert stats.ends == collections.Counter(t.end.value for t in flat(groups))


class Sniper(WorkerPool):
    """Each worker is killed once while it has rollouts; `idle`: and nothing to do."""

    idle = False

    def __init__(self, *given):
        super().__init__(*given)
        self.targets, self.polls = list(self.pids), 0

    def poll(self):
        self.polls += 1
        for worker in self.workers:
            if worker.pid in self.targets and worker.rollouts and worker.done \
                    and self.polls > 3 and not (self.idle and worker.queue):
                self.targets.remove(worker.pid)
                if self.idle:
                    kill(worker.pid)  # dead before anything else is sent to it
                else:
                    os.kill(worker.pid, signal.SIGKILL)
        super().poll()


class IdleSniper(Sniper):
    idle = True


@pytest.mark.parametrize("kind", [Sniper, IdleSniper])
def test_a_worker_killed_from_outside_costs_at_most_what_it_was_doing(engine, clean, kind):
    host = pool_of("make_small", kind)
    groups, stats = play(engine, host, TALK, TASKS)
    assert not host.targets and host.replaced == 2
    lost = [(mine, other) for mine, other in zip(flat(groups), flat(clean))
            if mine.end is EndReason.TOOL_CRASH]
    for mine, other in zip(flat(groups), flat(clean), strict=True):
        if mine.end is EndReason.TOOL_CRASH:
            assert_cut(mine, other, EndReason.TOOL_CRASH)
            assert mine.tokens_L[-1] in CHAT.stop_ids
        else:
            assert_same(mine, other)
    assert len(lost) <= (0 if kind.idle else 2)
    assert stats.crashes == ({"died": len(lost)} if lost else {}) and not stats.env_errors


EVERYBODY_EXITS = [make_task(f"exits {i}", "out", tools=("exit",)) for i in range(4)]


def test_a_tool_that_dies_in_every_call_ends_every_rollout(engine):
    """It is a crash of each, and no outage: between the calls the workers get things done."""
    host = pool_of("make_die")
    groups, stats = play(engine, host, exiter(), EVERYBODY_EXITS, 2)
    assert [t.end for t in flat(groups)] == [EndReason.TOOL_CRASH] * 8
    assert stats.ends == {"tool_crash": 8} and stats.crashes == {"died": 8} and host.replaced == 8
    assert all((t.n_steps, t.outcomes) == (1, ()) for t in flat(groups))


@pytest.mark.parametrize("module, factory", [("fault_suites", "make_stillborn"),
                                             ("worker_suite", "make_dead")])
def test_workers_that_do_not_stay_up_end_the_run_and_leave_nothing_behind(
        engine, clean, module, factory):
    """They die over every environment, or at once."""
    with pytest.raises(Outage, match="tool workers do not stay up: 3 in a row") as caught:
        play(engine, pool_of(factory, module=module, count=1), exiter(), EVERYBODY_EXITS, 2)
    assert "\n" not in str(caught.value)
    again, stats = play(engine, pool_of("make_small"), TALK, TASKS)
    for mine, other in zip(flat(again), flat(clean), strict=True):
        assert_same(mine, other)
    assert not stats.crashes and not stats.env_errors


# ---------------------------------------------------------------- a training step


class FirstCalls(Recorder):
    """Remembers each rollout's first call."""

    def __init__(self, suite):
        super().__init__(suite)
        self.first = {}

    def execute(self, rollout, calls):
        self.first.setdefault(rollout, [calls[0].name, dict(calls[0].arguments)])
        return super().execute(rollout, calls)


@dataclasses.dataclass
class Step:
    row: dict
    groups: list
    valid_TxG: np.ndarray
    params: dict


def caller(params, chat):
    """Says "check_balance <go>" as often as "done <end>", and now and then something else: each
    token points at the one behind it, and layers add nothing."""
    ids = {atom: i for i, atom in enumerate(chat.vocabulary)}
    (go, end), act = chat.stop_ids, chat.start(None, ()).user(UserTurn(0, "", ()))[-1]
    embed = np.random.default_rng(3).normal(0, 0.05, params["embed"].shape).astype(np.float32)
    for token, axes in ((act, {1: 1}), (ids["check_balance"], {1: 2.5, 2: 4}), (go, {2: 7}),
                        (ids["done"], {1: 2.5, 3: 4}), (end, {3: 7})):
        embed[token] = 0
        embed[token, list(axes)] = list(axes.values())
    layers = params["layers"] | {name: jnp.zeros_like(params["layers"][name])
                                 for name in ("o", "down")}
    return params | {"embed": jnp.asarray(embed), "layers": layers}


class Stepper:
    """One training step from the same state, as often as one likes, with any host."""

    def __init__(self, folder):
        policy = dict(d_model=16, n_layers=1, n_heads=2, n_kv_heads=2, d_ff=32, slots=8)
        self.run = Run(tiny_config(synthesis_on=False, minibatches=1, warm_start=None,
                                   policy=policy), folder / "run", folder / "cache")
        state = self.run.learner.state
        self._train = state.replace(params=caller(state.params, self.run.parts.chat))
        self._pool = self.run.pool
        self._engine_run, self._update = self.run.engine.run, self.run.learner.update
        self.run.engine.run, self.run.learner.update = self._seen_run, self._seen_update

    def _seen_run(self, *given):
        self.groups, stats = self._engine_run(*given)
        return self.groups, stats

    def _seen_update(self, train, batch):
        self.valid_TxG = batch.valid_TxG
        return self._update(train, batch)

    def __call__(self, host):
        run = self.run
        run.learner.state, run.pool = jax.tree.map(jnp.copy, (self._train, self._pool))
        run.step = run.epoch = run.epoch_start = run.last_admission = 0
        run.counters, run.host, run.engine.host = Counters(), host, host
        try:
            row = run.train_step()
        finally:
            host.close()
            assert_all_free(run.engine)
        return Step(row, self.groups, self.valid_TxG, jax.device_get(run.learner.state.params))


@pytest.fixture(scope="module")
def stepper(tmp_path_factory):
    made = Stepper(tmp_path_factory.mktemp("faults"))
    yield made
    made.run.close()


@pytest.fixture(scope="module")
def clean_step(stepper):
    """The step without a fault, and the first call of each rollout that made one, by task and
    sample."""
    host = FirstCalls(stepper.run.parts.suite)
    step = stepper(host)
    samples = collections.Counter()
    first = {}
    for handle, uid in host.started.items():
        if handle in host.first:
            first[uid, samples[uid]] = host.first[handle]
        samples[uid] += 1
    return step, first


def rarest(first):
    """The task and first call that fewest rollouts share."""
    counts = collections.Counter(json.dumps([uid, call]) for (uid, _), call in first.items())
    return json.loads(min(sorted(counts), key=counts.get))


@pytest.mark.parametrize("harm, given, end", [
    ("die", {}, EndReason.TOOL_CRASH),
    ("say_pid_and_hang", {"kind": Killer}, EndReason.TOOL_CRASH),
    ("hang", {"call_s": 2.0}, EndReason.TOOL_CRASH),
    ("eat", {}, EndReason.TOOL_CRASH),
    ("fail", {}, EndReason.ENV_ERROR)])
def test_a_step_goes_on_and_counts_what_was_lost(stepper, clean_step, monkeypatch, tmp_path, harm,
                                                 given, end):
    whole, first = clean_step
    uid, call = rarest(first)
    monkeypatch.setenv(FAULT, json.dumps({"uid": uid, "call": call, "harm": harm}))
    monkeypatch.setenv(PID_FILE, str(tmp_path / "pid"))
    step = stepper(pool_of("make_toolbox", **given))
    hit = {who for who, made in first.items() if made == call and who[0] == uid}
    for t, (group, others) in enumerate(zip(step.groups, whole.groups, strict=True)):
        for g, (mine, other) in enumerate(zip(group, others, strict=True)):
            struck = (mine.task_uid, mine.sample) in hit
            if struck:
                assert_cut(mine, other, end)
            else:
                assert_same(mine, other)
            assert bool(step.valid_TxG[t, g]) == mine.end.usable
            assert mine.end.usable == (not struck or end is EndReason.TOOL_CRASH)
    row, crashed = step.row, end is EndReason.TOOL_CRASH
    assert 0 < len(hit) < len(first)
    assert (row["tool_crashes"], row["env_errors"], row["drifts"]) == (
        (len(hit), 0, 0) if crashed else (0, len(hit), 0))
    assert row["ends"] == collections.Counter(t.end.value for t in flat(step.groups))
    assert row["ends"][end.value] == len(hit) and row["rollouts"] == whole.row["rollouts"] == 16
    assert row["workers_replaced"] == len(hit) * crashed
    assert stepper.run.step == 1 and np.isfinite(row["loss"])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(step.params))


def test_an_outage_ends_a_step_and_the_next_host_plays_it(stepper, clean_step):
    whole, _ = clean_step
    with pytest.raises(Outage, match="do not stay up"):
        stepper(pool_of("make_dead", module="worker_suite", count=1))
    again = stepper(InProcessHost(stepper.run.parts.suite))
    for mine, other in zip(flat(again.groups), flat(whole.groups), strict=True):
        assert_same(mine, other)
    for one, other in zip(jax.tree.leaves(again.params), jax.tree.leaves(whole.params)):
        np.testing.assert_array_equal(one, other)
