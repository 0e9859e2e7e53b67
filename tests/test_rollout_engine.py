"""The engine on the toolbox: once with the real sampler and a babbling policy, once with a
scripted device that plays given messages and keeps every token it was fed."""

import collections
import dataclasses
import functools

import jax
import numpy as np
import pytest
from loop_cases import CHAT, SUITE, assert_follows_its_replay, babbler

from rods_jax import rewards
from rods_jax.grpo.batch import BatchShape, pack
from rods_jax.grpo.optimizer import OptimizerConfig, make_optimizer
from rods_jax.grpo.passes import micro_logprobs, rows_at
from rods_jax.grpo.update import UpdateConfig, init_state, make_update
from rods_jax.rollout.engine import Engine, EngineConfig, make_prompt, task_key
from rods_jax.rollout.shapes import SamplerConfig
from rods_jax.rollout.slots import Sampled
from rods_jax.tools.host import Crash, InProcessHost, Outage, ToolCrash
from rods_jax.types import Author, EndReason

SHAPE = SamplerConfig(slots=16, max_len=128, prompt_len=40, max_new=12, sharers=4, prompts=5,
                      prefill=((2, 16),), extend=((4, 8),), steps=10)
TEMPERATURE = 0.8
TASKS = [task for task in SUITE.split("train")[:12]
         if len(make_prompt(task, SUITE, CHAT).ids) <= SHAPE.prompt_len]
PROMPTS = [make_prompt(task, SUITE, CHAT) for task in TASKS]
POLICY = functools.cache(babbler)


# ---------------------------------------------------------------- the real sampler


@pytest.fixture(scope="module")
def policy():
    return POLICY()


@pytest.fixture(scope="module")
def engines(policy):
    return {slots: Engine(policy[0], dataclasses.replace(SHAPE, slots=slots),
                          EngineConfig(max_steps=3), CHAT, SUITE) for slots in (4, 16)}


@pytest.fixture(scope="module")
def played(engines, policy):
    return engines[16].run(policy[1], PROMPTS, 4, jax.random.key(5), TEMPERATURE)


def test_every_rollout_follows_its_replay(played):
    groups, stats = played
    assert [len(group) for group in groups] == [4] * len(TASKS)
    for group, task in zip(groups, TASKS):
        assert [t.sample for t in group] == [0, 1, 2, 3]
        for trajectory in group:
            assert_follows_its_replay(trajectory, task, max_len=SHAPE.max_len, max_steps=3)
            sampled = trajectory.author_L == Author.SAMPLED
            assert (trajectory.logprobs_L[sampled] < 0).all()
    ends = collections.Counter(t.end.value for group in groups for t in group)
    assert ends == stats.ends and stats.rollouts == sum(ends.values()) == 4 * len(TASKS)
    # The policy babbles, but not in one way only.
    assert len(ends) >= 3
    assert any(t.n_malformed for g in groups for t in g)


def test_counts_of_tokens(played):
    groups, stats = played
    sampled = sum(int((t.author_L == Author.SAMPLED).sum()) for g in groups for t in g)
    inserted = sum(int((t.author_L == Author.INSERTED).sum()) for g in groups for t in g)
    assert stats.sampled_tokens == sampled
    # A prompt is run once for its group, all but the last id; for each answer as many tokens
    # as it has: the stop token before it too, and not yet its last.
    assert stats.inserted_tokens == inserted + sum(len(prompt.ids) - 1 for prompt in PROMPTS)
    assert stats.evicted == 0
    assert 0 < stats.device_s <= stats.total_s and stats.waves > 1 and not stats.env_errors


def test_tokens_do_not_depend_on_slots_or_order(played, engines, policy):
    order = np.random.default_rng(0).permutation(len(PROMPTS))
    for slots in (4, 16):
        groups, _ = engines[slots].run(policy[1], [PROMPTS[i] for i in order], 4,
                                       jax.random.key(5), TEMPERATURE)
        for group, i in zip(groups, order):
            for mine, other in zip(group, played[0][i]):
                np.testing.assert_array_equal(mine.tokens_L, other.tokens_L)
                np.testing.assert_allclose(mine.logprobs_L, other.logprobs_L, atol=1e-5)
                assert mine.end is other.end and mine.outcomes == other.outcomes


def test_another_key_gives_other_tokens_and_no_temperature_equal_ones(engines, policy, played):
    other, _ = engines[16].run(policy[1], PROMPTS[:4], 4, jax.random.key(6), TEMPERATURE)
    assert any(a.tokens_L.tolist() != b.tokens_L.tolist()
               for x, y in zip(other, played[0]) for a, b in zip(x, y))
    greedy, _ = engines[16].run(policy[1], PROMPTS[:4], 4, jax.random.key(6), 0.0)
    for group in greedy:
        assert len({tuple(t.tokens_L) for t in group}) == 1


@pytest.mark.slow
def test_logprobs_equal_a_full_forward_pass_over_the_packed_batch(played, policy):
    groups, (decoder, params) = played[0], policy
    shape = BatchShape(micro=6, rows=4, length=SHAPE.max_len, tasks=len(TASKS), group=4)
    # Rewards that make every group carry loss, whatever was babbled.
    rewards_TxG = np.random.default_rng(1).random((len(TASKS), 4)).astype(np.float32)
    batch = pack(groups, rewards_TxG, shape, drop_dead=True)
    sampled = sum(int((t.author_L == Author.SAMPLED).sum()) for g in groups for t in g)
    assert batch.sampled_MxRxL.sum() == sampled
    score = jax.jit(lambda batch, i: micro_logprobs(
        decoder, params, rows_at(batch, i, shape.length, shape), (), batch.sampled_MxRxL[i],
        TEMPERATURE, 32, False)[0])
    for i in range(int(batch.n_micro)):
        np.testing.assert_allclose(score(batch, i), batch.logprobs_MxRxL[i], atol=1e-4)

    optimizer = make_optimizer(OptimizerConfig(lr=1e-3))
    update = jax.jit(make_update(decoder, UpdateConfig(temperature=TEMPERATURE), optimizer))
    _, metrics = update(init_state(params, optimizer), batch)
    assert metrics.applied and metrics.n_tokens == sampled
    assert metrics.logprob_gap < 1e-5 and metrics.clip_low_share == metrics.clip_high_share == 0


# ---------------------------------------------------------------- answers that take time


class Late(InProcessHost):
    """Answers are there after so many looks, or once somebody waits for one of them."""

    def __init__(self, looks):
        super().__init__(SUITE)
        self._looks, self.waits, self.out = looks, 0, []

    def execute(self, rollout, calls):
        return self._later(super().execute(rollout, calls))

    def end_turn(self, rollout, said):
        return self._later(super().end_turn(rollout, said))

    def _later(self, answer):
        self.out.append(Answer(answer, self._looks))
        return self.out[-1]

    def poll(self):
        for answer in self.out:
            answer.looks -= 1

    def wait(self, pendings):
        assert pendings and not any(pending.ready() for pending in pendings)
        self.waits += 1
        next(iter(pendings)).looks = 0


@dataclasses.dataclass
class Answer:
    answer: object
    looks: int

    def ready(self):
        return self.looks <= 0

    def result(self):
        assert self.ready(), "asked for before it was there"
        return self.answer.result()


@pytest.mark.parametrize("looks", [2, 50])
def test_late_answers_change_no_token(played, engines, policy, looks):
    engine, host = engines[4], engines[4].host
    engine.host = Late(looks)
    try:
        groups, stats = engine.run(policy[1], PROMPTS, 4, jax.random.key(5), TEMPERATURE)
        waits = engine.host.waits
    finally:
        engine.host = host
    for mine, other in zip(sum(groups, []), sum(played[0], [])):
        assert mine.tokens_L.tolist() == other.tokens_L.tolist() and mine.end is other.end
    assert waits > 0 and stats.idle_s > 0


# ---------------------------------------------------------------- a scripted device


class Device:
    """Plays `script(uid key, sample) -> messages` in place of prefill, extend and waves, a few
    tokens a wave. `fed[uid key, sample]` holds the tokens that the real one would have in its
    cache, `most` the limit of each wave."""

    def __init__(self, engine, script, per_wave=3, drift=()):
        self.fed, self.most, self._state = {}, [], {}
        self._script, self._per_wave, self._drift = script, per_wave, drift
        engine.slots.prepare, engine.slots.sample = self._prepare, self._sample

    def _prepare(self, params, rows, budgets):
        assert min(budgets, default=1) >= 1
        return list(rows)

    def _sample(self, params, rows, budgets, key, temperature, most, leave):
        self.most.append(most)
        return [(row, self._say(row, budget)) for row, budget in zip(rows, budgets)]

    def _say(self, row, budget):
        if row.who not in self._state:
            self._state[row.who] = collections.deque(self._script(*row.who))
        messages = self._state[row.who]
        n = min(self._per_wave, budget, len(messages[0]))
        said, messages[0] = messages[0][:n], messages[0][n:]
        row.ids += said
        self.fed[row.who] = row.ids[:-1]
        stopped = said[-1] in CHAT.stop_ids
        if stopped:
            messages.popleft()
        return Sampled(said, [0.0] * n, stopped, row.who not in self._drift)


def gold_messages(task):
    """What an expert says: the calls of each turn in one message, then a closing word."""
    env, dialogue, said = SUITE.make_env(task), CHAT.start(task, SUITE.tools(task.domains)), []
    dialogue.prompt(env.begin_turn())
    for i, turn in enumerate(task.turns):
        if turn.gold:
            said.append(dialogue.step(turn.gold[:1]))
            dialogue.results(turn.gold[:1], env.execute(turn.gold[:1]))
        for call in turn.gold[1:]:
            said.append(dialogue.step((call,)))
            dialogue.results((call,), env.execute((call,)))
        said.append(dialogue.step((), SUITE.gold_reply(task, i)))
        env.end_turn("done")
        if i + 1 < len(task.turns):
            dialogue.user(env.begin_turn())
    return said


def word(name):
    return CHAT.vocabulary.index(name)


GO, END = CHAT.stop_ids
DONE = [word("done"), END]
BALANCE = [word("check_balance"), GO]  # answered, if only with an error
BAD = [word("done"), GO]  # not a call
STYLES = (gold_messages,
          lambda task: [DONE] * 9,
          lambda task: [BAD] * 9,
          lambda task: [[word("done")] * 20],
          lambda task: [BALANCE] * 9)


def scripted_engine(suite=SUITE, per_wave=3, styles=STYLES, drift=(), **config):
    """An engine whose samples 0, 1, ... of every task follow the styles."""
    engine = Engine(POLICY()[0], SHAPE, EngineConfig(**config), CHAT, suite)
    tasks = {task_key(task.uid): task for task in TASKS}
    device = Device(engine, lambda uid, sample: styles[sample](tasks[uid]), per_wave, drift)
    return engine, device


@pytest.mark.parametrize("per_wave", [1, 5, 12])
@pytest.mark.parametrize("stop", [True, False])
def test_scripts_end_as_they_should(per_wave, stop):
    engine, device = scripted_engine(per_wave=per_wave, stop_on_failed_turn=stop, max_steps=4)
    groups, stats = engine.run(POLICY()[1], PROMPTS, len(STYLES), jax.random.key(0), 1.0)
    for group, task in zip(groups, TASKS):
        gold, silent, malformed, endless, calling = group
        assert gold.end is EndReason.DONE and rewards.progress(gold) == 1.0
        n_empty = sum(not turn.gold for turn in task.turns)
        if len(task.turns) > 1 and task.turns[0].gold and stop:
            assert silent.end is EndReason.FAILED_TURN and len(silent.outcomes) == 1
        elif not stop or len(task.turns) == 1:
            assert silent.end is EndReason.DONE
            assert len(silent.outcomes) == len(task.turns)
            assert rewards.progress(silent) <= n_empty / len(task.turns) < 1
        assert malformed.end is EndReason.STEP_LIMIT
        assert malformed.n_malformed == malformed.n_steps == 4 and not malformed.outcomes
        assert endless.end is EndReason.TOKEN_LIMIT and endless.n_steps == 0
        assert (endless.author_L == Author.SAMPLED).sum() == SHAPE.max_new
        assert calling.end in (EndReason.STEP_LIMIT, EndReason.TOKEN_LIMIT)
        for sample, trajectory in enumerate(group):
            assert_follows_its_replay(trajectory, task, max_len=SHAPE.max_len, max_steps=4,
                                      stop_on_failed_turn=stop)
            fed = device.fed[task_key(task.uid), sample]
            last = int(np.flatnonzero(trajectory.author_L == Author.SAMPLED)[-1])
            assert trajectory.tokens_L.tolist()[:len(fed)] == fed and len(fed) == last
    assert stats.ends[EndReason.STEP_LIMIT.value] >= len(TASKS)


def test_waves_are_short_while_answers_are_out():
    engine, device = scripted_engine(styles=(lambda task: [BALANCE] * 2 + [DONE] * 9,))
    engine.sampler = dataclasses.replace(SHAPE, steps_waiting=4)
    engine.run(POLICY()[1], PROMPTS, 1, jax.random.key(0), 1.0)
    assert set(device.most) == {SHAPE.wave}  # every answer is there at once
    engine, device = scripted_engine(per_wave=1, styles=(lambda task: [BALANCE] * 2 + [DONE] * 9,))
    engine.sampler, engine.host = dataclasses.replace(SHAPE, steps_waiting=4), Late(3)
    engine.run(POLICY()[1], [PROMPTS[0], PROMPTS[1]], 1, jax.random.key(0), 1.0)
    assert set(device.most) == {4, SHAPE.wave}


def test_a_dialogue_that_fills_its_slot_ends_with_the_token_limit():
    engine, _ = scripted_engine(styles=(lambda task: [BALANCE] * 99,), max_steps=99)
    groups, _ = engine.run(POLICY()[1], PROMPTS, 1, jax.random.key(0), 1.0)
    for (trajectory,), task in zip(groups, TASKS):
        assert trajectory.end is EndReason.TOKEN_LIMIT
        assert SHAPE.max_len - SHAPE.max_new < len(trajectory.tokens_L) <= SHAPE.max_len
        assert_follows_its_replay(trajectory, task, max_len=SHAPE.max_len, max_steps=99)


def test_drift_ends_only_the_rollout_that_drifts():
    drifting = task_key(TASKS[2].uid), 1
    engine, _ = scripted_engine(styles=(gold_messages,) * 3, drift={drifting})
    groups, stats = engine.run(POLICY()[1], PROMPTS, 3, jax.random.key(0), 1.0)
    for t, group in enumerate(groups):
        for g, trajectory in enumerate(group):
            end = EndReason.DRIFT if (t, g) == (2, 1) else EndReason.DONE
            assert trajectory.end is end
    assert stats.ends == {"drift": 1, "done": 3 * len(TASKS) - 1}
    batch = pack(groups, np.ones((len(TASKS), 3), np.float32), BatchShape(
        micro=9, rows=4, length=SHAPE.max_len, tasks=len(TASKS), group=3), drop_dead=False)
    assert np.argwhere(~batch.valid_TxG).tolist() == [[2, 1]]
    assert not (batch.traj_MxRxL == 2 * 3 + 1).any()


class Broken:
    """The toolbox, but the environment of one task raises in one of its methods."""

    def __init__(self, uid, method):
        self._uid, self._method = uid, method

    def __getattr__(self, name):
        return getattr(SUITE, name)

    def make_env(self, task, hints=False):
        if task.uid == self._uid and self._method == "make_env":
            raise SystemExit("no worker")
        env = SUITE.make_env(task)
        if task.uid == self._uid:
            def fail(*arguments):
                raise KeyError("broken")
            setattr(env, self._method, fail)
        return env


@pytest.mark.parametrize("method", ["make_env", "begin_turn", "execute", "end_turn"])
def test_a_broken_environment_ends_its_own_rollouts_only(method):
    broken = next(i for i, task in enumerate(TASKS) if task.turns[0].gold)
    engine, _ = scripted_engine(Broken(TASKS[broken].uid, method), styles=(gold_messages,) * 2)
    groups, stats = engine.run(POLICY()[1], PROMPTS, 2, jax.random.key(0), 1.0)
    for t, group in enumerate(groups):
        wanted = EndReason.ENV_ERROR if t == broken else EndReason.DONE
        assert [trajectory.end for trajectory in group] == [wanted] * 2
    assert stats.env_errors == {"SystemExit" if method == "make_env" else "KeyError": 2}
    assert stats.ends["env_error"] == 2 and not groups[broken][0].end.usable


class Crashing(InProcessHost):
    """Loses the second call of one rollout, as a worker that dies over it would."""

    def __init__(self, uid):
        super().__init__(SUITE)
        self._uid, self.calls, self.finished = uid, collections.Counter(), []

    def start(self, task, hints):
        handle = super().start(task, hints)
        self.calls[handle] = 0 if task.uid == self._uid else -99
        return handle

    def execute(self, rollout, calls):
        self.calls[rollout] += 1
        if self.calls[rollout] == 2:
            return Lost(ToolCrash(Crash.TIME, self._uid, calls[0]))
        return super().execute(rollout, calls)

    def finish(self, rollout):
        super().finish(rollout)
        self.finished.append(rollout)


@dataclasses.dataclass
class Lost:
    error: Exception

    def ready(self):
        return True

    def result(self):
        raise self.error


def test_a_call_that_takes_its_worker_down_fails_its_rollout():
    lost = next(i for i, task in enumerate(TASKS)
                if sum(len(t.gold) for t in task.turns) > 1 and len(task.turns) > 1)
    host = Crashing(TASKS[lost].uid)
    engine, _ = scripted_engine(styles=(gold_messages,) * 2)
    engine.host = host
    groups, stats = engine.run(POLICY()[1], PROMPTS, 2, jax.random.key(0), 1.0)
    for t, group in enumerate(groups):
        for trajectory in group:
            assert trajectory.end is (EndReason.TOOL_CRASH if t == lost else EndReason.DONE)
            assert trajectory.end.usable
            wanted = len(trajectory.outcomes) / len(TASKS[t].turns)
            assert rewards.reward(rewards.RewardKind.PROGRESS, trajectory, TASKS[t]) == wanted
    assert rewards.progress(groups[lost][0]) < 1
    assert stats.crashes == {"time": 2} and not stats.env_errors
    assert sorted(host.finished) == list(range(2 * len(TASKS)))


def test_no_worker_at_all_stops_the_run():
    class Down(InProcessHost):
        def execute(self, rollout, calls):
            return Lost(Outage("workers do not start"))
    engine, _ = scripted_engine(styles=(gold_messages,))
    engine.host = Down(SUITE)
    with pytest.raises(Outage, match="do not start"):
        engine.run(POLICY()[1], PROMPTS, 1, jax.random.key(0), 1.0)
    assert engine.slots.free(0) == SHAPE.slots and not engine.slots.rows


def test_the_benchmarks_rules_end_turns_otherwise():
    """A message that cannot be read ends its turn; a last turn without steps left is scored."""
    one = [i for i, task in enumerate(TASKS) if len(task.turns) == 1 and task.turns[0].gold]
    assert one
    styles = (lambda task: [BAD] * 9, lambda task: [BALANCE] * 9,
              lambda task: [m for m in gold_messages(task)[:-1]] + [BALANCE] * 9)
    rules = dict(stop_on_failed_turn=False, max_steps=4, malformed_ends_turn=True,
                 score_cut_turn=True)
    engine, _ = scripted_engine(styles=styles, **rules)
    groups, _ = engine.run(POLICY()[1], PROMPTS, len(styles), jax.random.key(0), 1.0)
    for task, (malformed, calling, late) in zip(TASKS, groups):
        assert malformed.end is EndReason.DONE
        assert malformed.n_malformed == malformed.n_steps == len(task.turns)
        assert len(malformed.outcomes) == len(task.turns) and rewards.progress(malformed) < 1
    for i in one:
        _, calling, late = groups[i]
        assert calling.end in (EndReason.STEP_LIMIT, EndReason.TOKEN_LIMIT)
        if calling.end is EndReason.STEP_LIMIT:
            assert calling.n_steps == 4 and len(calling.outcomes) == 1
        if late.end is EndReason.STEP_LIMIT and len(TASKS[i].turns[0].gold) <= 4:
            assert rewards.progress(late) == 1.0
    assert any(groups[i][2].end is EndReason.STEP_LIMIT for i in one)


def test_hints_reach_the_dialogue_and_no_score():
    plain, _ = scripted_engine(styles=STYLES)
    hinted, _ = scripted_engine(styles=STYLES)
    found = [engine.run(POLICY()[1], PROMPTS, len(STYLES), jax.random.key(0), 1.0, hints=on)[0]
             for engine, on in ((plain, False), (hinted, True))]
    longer = 0
    for a, b in zip(sum(found[0], []), sum(found[1], [])):
        assert a.outcomes == b.outcomes[:len(a.outcomes)]
        longer += len(b.tokens_L) > len(a.tokens_L)
    assert longer


def test_a_group_may_be_larger_than_the_slots(engines, policy):
    few, many = (engines[slots].run(policy[1], PROMPTS[:2], 6, jax.random.key(1), 1.0)[0]
                 for slots in (4, 16))
    for a, b in zip(sum(few, []), sum(many, [])):
        assert a.sample == b.sample and a.tokens_L.tolist() == b.tokens_L.tolist()


def test_what_cannot_be_played_is_refused(engines, policy):
    long = dataclasses.replace(PROMPTS[0], ids=PROMPTS[0].ids * 20)
    with pytest.raises(ValueError, match=f"prompt of task {TASKS[0].uid} has"):
        engines[16].run(policy[1], [PROMPTS[1], long], 2, jax.random.key(0), 1.0)
    assert engines[16].run(policy[1], [], 2, jax.random.key(0), 1.0)[0] == []
