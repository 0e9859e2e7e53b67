"""The bench of slow tools on a tiny model: the same tokens with and without the wait."""

import time

import jax
import pytest

from experiments.bench import slow_tools as bench
from experiments.bench.slow_suite import NumberFormat, SlowEnv, SlowSuite, Talk, make_task
from rods_jax.config import UserError
from rods_jax.models.config import ModelConfig
from rods_jax.models.decoder import Decoder, init_params
from rods_jax.rollout.engine import RolloutStats
from rods_jax.types import ToolCall, ToolResult

MODEL = ModelConfig(vocab_size=64, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8,
                    d_ff=16)
TALK = Talk(prompt=9, calls=3, message=4, least=3, most=9)
LOAD = bench.Load(TALK, group=4, groups=2, rows=(), pages=())


@pytest.fixture(scope="module")
def tiny():
    decoder, params = Decoder(MODEL), init_params(MODEL, jax.random.key(0))
    engine = bench.make_engine(decoder, LOAD)
    engine.warm_up(params)
    return lambda workers: bench.measure(engine, params, 1, 0.005, workers, LOAD)


@pytest.mark.slow
def test_it_runs_and_shows_what_is_lost(tiny):
    found = tiny((2, 0))
    assert set(found["by_workers"]) == {"2", "0"} and found["target"] == 0.15
    assert found["slow_tools_loss"] == found["by_workers"]["2"]["loss"]
    assert found["met"] == (found["slow_tools_loss"] < 0.15)
    sides = [row[side] for row in found["by_workers"].values() for side in ("instant", "slow")]
    for side in sides:
        assert len(side["seconds"]) == 1 and side["tokens_per_s"] > 0 and side["waves"] > 1
    assert len({(side["sampled"], side["inserted"]) for side in sides}) == 1
    # 8 rollouts of 3 messages, nearly all of them whole.
    assert 8 * 3 < sides[0]["sampled"] < 8 * LOAD.sampler.max_len
    here = found["by_workers"]["0"]
    assert here["slow"]["seconds"][0] > 0.005 * 8  # one after the other
    text = bench.lines(found)
    assert text[0] == "8 rollouts, 3 calls each, of 5 ms against instant ones, medians of 1"
    assert "2 worker processes" in text[1] and text[1].endswith("target below 15 %")
    assert "in this process" in text[2] and "target" not in text[2]


def test_the_loss_is_that_of_the_medians():
    def side(*seconds):
        return [RolloutStats(sampled_tokens=100, total_s=s) for s in seconds]

    found = bench._figures({(4, 0.0): side(1.0, 2.0, 9.0), (4, 0.05): side(2.5, 0.1, 8.0)},
                           (4,), 0.05, 3, LOAD)
    assert found["slow_tools_loss"] == pytest.approx(1 - 2.0 / 2.5) and not found["met"]


@pytest.mark.slow
def test_other_tokens_end_it(tiny, monkeypatch):
    plain = SlowEnv.execute

    def execute(self, calls):
        results = plain(self, calls)
        if self.task.initial_config["seconds"]:
            results = tuple(ToolResult(r.text + " 7", True) for r in results)
        return results
    monkeypatch.setattr(SlowEnv, "execute", execute)
    with pytest.raises(UserError, match="calls of 0.005 s gave other tokens"):
        tiny((0,))


def test_results_have_every_length_and_messages_the_mean_one():
    talk = Talk()
    task = make_task(talk, 0, 0.0)
    chat, env = NumberFormat(8192, talk.message), SlowSuite().make_env(task)
    dialogue = chat.start(task, ())
    assert len(dialogue.prompt(env.begin_turn())) == talk.prompt == 512
    assert len(chat.stop_ids) == 256
    sizes = set()
    for n in range(3 * 151):
        calls = dialogue.parse([n]).calls
        ids = dialogue.results(calls, env.execute(calls))
        assert not set(ids) & set(chat.stop_ids) and max(ids) < 8192
        sizes.add(len(ids))
    assert sizes == set(range(50, 201)) and calls == (ToolCall("look_up", {"n": n}),)
    assert env.end_turn("").passed and env.begin_turn() is None


def test_a_slow_tool_takes_its_time():
    env, began = SlowSuite().make_env(make_task(TALK, 0, 0.01)), time.monotonic()
    env.execute([ToolCall("look_up", {"n": 1})] * 2)
    assert time.monotonic() - began >= 0.02
