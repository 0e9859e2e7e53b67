"""A format that rewrites earlier turns: one row of ids a turn, each with its own true prompt."""

import dataclasses

import jax
import numpy as np
import pytest
from loop_cases import CHAT, FORGETFUL, SUITE, babbler

from rods_jax.grpo.batch import BatchShape, pack
from rods_jax.grpo.loss import LossConfig, token_weights
from rods_jax.grpo.passes import micro_logprobs, rows_at
from rods_jax.rollout.engine import Engine, EngineConfig, make_prompt
from rods_jax.rollout.shapes import SamplerConfig
from rods_jax.types import Author, EndReason, Trajectory

SHAPE = SamplerConfig(slots=8, max_len=96, prompt_len=40, max_new=12, sharers=4, prompts=3,
                      prefill=((2, 16),), extend=((4, 16),))
TEMPERATURE = 0.8
TASKS = [task for task in SUITE.split("train")[:30] if len(task.turns) > 1
         and len(make_prompt(task, SUITE, CHAT).ids) <= SHAPE.prompt_len][:6]


@pytest.fixture(scope="module")
def played():
    decoder, params = babbler()
    engine = Engine(decoder, SHAPE, EngineConfig(max_steps=3, stop_on_failed_turn=False),
                    FORGETFUL, SUITE)
    prompts = [make_prompt(task, SUITE, FORGETFUL) for task in TASKS]
    groups, stats = engine.run(params, prompts, 4, jax.random.key(2), TEMPERATURE)
    return decoder, params, prompts, groups, stats


def test_each_turn_begins_a_row_with_its_prompt(played):
    *_, prompts, groups, stats = played
    rows = 0
    for prompt, group in zip(prompts, groups):
        for t in group:
            assert t.end is not EndReason.DRIFT and len(t.rows) <= max(1, len(t.outcomes) + 1)
            rows += len(t.rows)
            for begin, end in t.spans:
                assert t.tokens_L[begin:end][:len(prompt.ids)].tolist() == list(prompt.ids)
                assert (t.author_L[begin:end][:len(prompt.ids)] == Author.PROMPT).all()
                assert end - begin <= SHAPE.max_len
    assert rows > sum(len(group) for group in groups) + 5, "no rollout got to a second turn"
    assert not stats.env_errors


def test_the_sampler_scored_what_the_trainer_scores_row_by_row(played):
    decoder, params, _, groups, _ = played
    shape = BatchShape(micro=16, rows=4, length=SHAPE.max_len, tasks=len(TASKS), group=4)
    batch = pack(groups, np.random.default_rng(1).random((len(TASKS), 4)).astype(np.float32),
                 shape, drop_dead=False)
    sampled = sum(int((t.author_L == Author.SAMPLED).sum()) for g in groups for t in g)
    assert batch.sampled_MxRxL.sum() == sampled
    score = jax.jit(lambda batch, i: micro_logprobs(
        decoder, params, rows_at(batch, i, shape.length, shape), (), batch.sampled_MxRxL[i],
        TEMPERATURE, 32, False)[0])
    for i in range(int(batch.n_micro)):
        np.testing.assert_allclose(score(batch, i), batch.logprobs_MxRxL[i], atol=1e-4)


def test_rows_of_a_rollout_draw_with_keys_of_their_own(played):
    """Equal contexts at equal positions would else give equal tokens in every turn."""
    decoder, params, *_ = played
    task = dataclasses.replace(TASKS[0], turns=(TASKS[0].turns[0],) * 4)
    engine = Engine(decoder, SHAPE, EngineConfig(max_steps=1, stop_on_failed_turn=False,
                                                 malformed_ends_turn=True), FORGETFUL, SUITE)
    groups, _ = engine.run(params, [make_prompt(task, SUITE, FORGETFUL)], 8, jax.random.key(0),
                           1.5)
    alike = pairs = 0
    for t in groups[0]:
        said = [tuple(t.tokens_L[a:b][t.author_L[a:b] == Author.SAMPLED]) for a, b in t.spans[1:]]
        pairs += max(0, len(said) - 1)
        alike += sum(x == y for x, y in zip(said, said[1:]))
    assert pairs >= 3 and alike < pairs


def two_rows():
    P, S, IN = Author.PROMPT, Author.SAMPLED, Author.INSERTED
    return Trajectory(
        "task", 0, np.arange(1, 10, dtype=np.int32),
        np.array([P, P, S, S, IN, P, S, S, IN], np.int8),
        np.array([0, 0, -1, -2, 0, 0, -3, -4, 0], np.float32), (), 2, EndReason.DONE,
        rows=(0, 5))


def test_rows_are_packed_as_segments_of_one_trajectory():
    batch = pack([[two_rows()]], np.ones((1, 1), np.float32),
                 BatchShape(micro=1, rows=1, length=8, tasks=1, group=1), drop_dead=False)
    assert batch.tokens_MxRxL[0, 0].tolist() == [1, 2, 3, 4, 6, 7, 8, 0]
    assert batch.positions_MxRxL[0, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    assert batch.segments_MxRxL[0, 0].tolist() == [1, 1, 1, 1, 2, 2, 2, 0]
    assert batch.logprobs_MxRxL[0, 0].tolist() == [0, 0, -1, -2, 0, -3, -4, 0]
    # One sequence to the loss, however many rows it has.
    _, n_sequences = token_weights(batch.sampled_MxRxL, batch.traj_MxRxL, 1, LossConfig())
    assert n_sequences == 1


@pytest.mark.parametrize("rows", [(), (1,), (0, 0), (0, 9), (0, 5, 4)])
def test_rows_that_do_not_divide_the_ids_are_named(rows):
    with pytest.raises(ValueError, match="do not divide its 9 tokens"):
        dataclasses.replace(two_rows(), rows=rows)
