"""Rows and messages that are full at a bad moment: within the JSON of a call, before a result."""

import collections
import dataclasses

import fault_suites
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollout_world as world
from fault_cases import Recorder, flat, play, pool_of
from rollout_world import SmallFormat, SmallSuite, chars, make_task

from rods_jax.models.config import ModelConfig
from rods_jax.models.decoder import Decoder, init_params
from rods_jax.rollout.engine import Engine, EngineConfig
from rods_jax.rollout.shapes import SamplerConfig
from rods_jax.tools.calls_json import parse_json_calls
from rods_jax.types import Author, EndReason, ParsedStep

SUITE = SmallSuite(fault_suites.nothing)
SHAPE = SamplerConfig(slots=6, max_len=70, prompt_len=58, max_new=10, sharers=4, prompts=2,
                      prefill=((2, 24),), extend=((4, 16),), steps=4, steps_waiting=2)

CALL = ('{', '"name"', ':', '"read"', ', ', '"arguments"', ': ', '{ ', '}', ' }')
FIRST_PIECE = world.FIRST + world.N_CHARS
MESSAGE = [*range(FIRST_PIECE, FIRST_PIECE + len(CALL)), world.GO]


class PieceFormat(SmallFormat):
    """Calls are JSON, an id for each of its pieces."""

    vocab_size = FIRST_PIECE + len(CALL)

    def start(self, task, tools):
        return PieceDialogue(self)


class PieceDialogue(world.SmallDialogue):
    def clone(self):
        return PieceDialogue(self.form, self.n_said, self.history)

    def parse(self, ids):
        self.n_said += 1
        found = parse_json_calls(
            "".join(CALL[i - FIRST_PIECE] for i in ids if i >= FIRST_PIECE), ("read",))
        return ParsedStep(found.calls, found.text, errors=found.errors)


def reciter():
    """After whatever ends in ACT it writes the same call, piece by piece."""
    n = PieceFormat.vocab_size
    decoder = Decoder(ModelConfig(n, d_model=64, n_layers=1, n_heads=2, n_kv_heads=2, head_dim=8,
                                  d_ff=8, tie_embeddings=False))
    params = jax.tree.map(np.array, init_params(decoder.config, jax.random.key(0)))
    for name in ("o", "down"):
        params["layers"][name][:] = 0
    params["embed"][:], params["head"][:] = np.eye(n, 64), 0
    for token, then in zip((world.ACT, *MESSAGE), MESSAGE):
        params["head"][token, then] = 20.0
    return decoder, jax.tree.map(jnp.asarray, params)


@pytest.fixture(scope="module")
def reciting():
    """An engine by its max_new."""
    decoder, params = reciter()
    made = {}

    def get(max_new):
        if max_new not in made:
            made[max_new] = Engine(
                decoder, dataclasses.replace(SHAPE, max_new=max_new),
                EngineConfig(max_steps=3), PieceFormat(), SUITE)
        return made[max_new]
    return get, params


@pytest.mark.parametrize("max_new", [1, 10])
def test_a_message_cut_within_its_call_runs_nothing(reciting, max_new):
    get, params = reciting
    assert max_new < len(MESSAGE)
    host, tasks = Recorder(SUITE), [make_task(f"t{i}", "x" * i) for i in range(1, 4)]
    groups, stats = play(get(max_new), host, params, tasks, 2)
    for t in flat(groups):
        sampled = t.tokens_L[t.author_L == Author.SAMPLED].tolist()
        assert sampled == MESSAGE[:max_new] and t.author_L[-1] == Author.SAMPLED
        assert t.end is EndReason.TOKEN_LIMIT and t.end.usable and t.end.truncated
        assert (t.n_steps, t.outcomes, t.n_malformed) == (0, (), 0)
    assert not host.executed and stats.ends == {"token_limit": 6}


def expected(prompt, said, max_len, max_steps=3):
    """(tokens, end, calls that ran) of a reciter that gets `said` ids after each call."""
    tokens = list(prompt)
    for step in range(max_steps):
        message = MESSAGE[:max_len - len(tokens)]
        tokens += message
        if len(message) < len(MESSAGE):
            return tokens, EndReason.TOKEN_LIMIT, step
        if step + 1 == max_steps:
            return tokens, EndReason.STEP_LIMIT, max_steps
        answer = [world.FIRST + step + 1, *said, world.END, world.ACT]
        if len(tokens) + len(answer) >= max_len:
            return tokens, EndReason.TOKEN_LIMIT, step + 1
        tokens += answer


@pytest.mark.parametrize("workers", [0, 2])
def test_a_row_that_is_full_ends_wherever_it_is(reciting, workers):
    """Prompts and results of many lengths in one run: rows end within the first call, the
    second, the third, in the stop token, and before a result that they have no room for."""
    get, params = reciting
    engine = get(len(MESSAGE) + 1)
    tasks = [make_task(f"prompt {n}", "p" * n, texts=("ok",)) for n in range(1, 56, 2)]
    tasks += [make_task(f"result {n}", "ab", texts=("r" * n,)) for n in (*range(46, 56), 200)]
    host = pool_of("make_small") if workers else Recorder(SUITE)
    groups, stats = play(engine, host, params, tasks, 1)
    ends, cuts, ran = collections.Counter(), set(), {}
    for (t,), task in zip(groups, tasks):
        text, = task.initial_config["texts"]
        prompt = PieceFormat().start(task, ()).prompt(SUITE.make_env(task).begin_turn())
        tokens, end, ran[task.uid] = expected(prompt, chars(text), 70)
        assert (t.tokens_L.tolist(), t.end) == (tokens, end), task.uid
        assert t.end.usable and t.end.truncated and len(tokens) <= 70
        assert t.n_steps == ran[task.uid] and t.outcomes == () and t.n_malformed == 0
        ends[end.value] += 1
        cuts.add((t.n_steps, len(tokens) - 70))
    assert stats.ends == ends and set(ends) == {"token_limit", "step_limit"}
    assert {(1, 0), (2, 0)} < cuts and any(n == 1 and left < 0 for n, left in cuts)
    assert not workers and host.executed == collections.Counter(ran) or host.replaced == 0
    assert not stats.crashes and not stats.env_errors
