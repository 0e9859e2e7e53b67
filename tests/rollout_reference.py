"""A whole rollout as its rules say it: one at a time, one token at a time, and for every token
the whole row so far goes through the model. No cache, no slots, no batch."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rods_jax.models.attention import causal_mask
from rods_jax.models.decoder import Decoder
from rods_jax.rollout.engine import EngineConfig, Prompt
from rods_jax.text.formats import ChatFormat
from rods_jax.tools.env import Environment
from rods_jax.tools.host import ToolCrash
from rods_jax.types import Author, EndReason, Task, Trajectory


PAD = 64


@dataclasses.dataclass(frozen=True)
class Limits:
    """In tokens; `top_k` 0 and `top_p` 1 keep all tokens."""

    max_len: int
    max_new: int
    top_k: int = 0
    top_p: float = 1.0


# ------------------------------------------------------------------------------ one draw


def log_softmax(scores_V: np.ndarray) -> np.ndarray:
    top = scores_V.max()
    return scores_V - top - np.log(np.exp(scores_V - top).sum())


def kept(scores_V: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """bool [V]: the k likeliest tokens, and of these the fewest whose probability, before any
    are left out, reaches p."""
    probs_V = np.exp(log_softmax(scores_V))
    share, keep_V = 0.0, np.zeros(len(scores_V), bool)
    likeliest_first = sorted(range(len(scores_V)), key=lambda i: (-scores_V[i], i))
    for i in likeliest_first[:top_k or None]:
        if share >= top_p:
            break
        keep_V[i] = True
        share += probs_V[i]
    return keep_V


def draw(logits_V: np.ndarray, gumbel_V: np.ndarray, temperature: float, limits: Limits,
         ) -> tuple[int, float]:
    """A token and its log-prob under the distribution it was drawn from."""
    logits_V = np.asarray(logits_V, np.float64)
    if temperature == 0:
        token = int(logits_V.argmax())
        return token, log_softmax(logits_V)[token]
    scores_V = logits_V / temperature
    scores_V = np.where(kept(scores_V, limits.top_k, limits.top_p), scores_V, -np.inf)
    token = int((scores_V + gumbel_V).argmax())
    return token, log_softmax(scores_V)[token]


@jax.jit
def gumbel(key: jax.Array, task: jax.Array, sample: jax.Array, position: jax.Array,
           like_V: jax.Array) -> jax.Array:
    for number in (task, sample, position):
        key = jax.random.fold_in(key, number)
    return jax.random.gumbel(key, like_V.shape)


def rollout_numbers(uid: str, sample: int, row: int) -> tuple[np.uint32, np.uint32]:
    """What the run's key is folded with, before the token's position."""
    task = int.from_bytes(hashlib.sha256(uid.encode()).digest()[:4], "little")
    return np.uint32(task), np.uint32(sample | row << 16)


# Compiled for speed, whatever else is not.
@functools.partial(jax.jit, static_argnums=0,
                   compiler_options={"xla_backend_optimization_level": 2})
def _forward(decoder: Decoder, params, tokens_L, n):
    L = tokens_L.shape[0]
    hidden, _ = decoder.apply({"params": params}, tokens_L[None], jnp.arange(L)[None],
                              causal_mask(L))
    return decoder.apply({"params": params}, hidden[0, n - 1], method="logits")


@dataclasses.dataclass(frozen=True)
class Model:
    decoder: Decoder
    params: dict

    def __call__(self, ids: Sequence[int]) -> np.ndarray:
        """float32 logits [V] of what follows the ids, which are padded to few lengths."""
        padded = np.zeros((-(-len(ids) // PAD) * PAD,), np.int32)
        padded[:len(ids)] = ids
        return np.asarray(_forward(self.decoder, self.params, padded, np.int32(len(ids))))


# ------------------------------------------------------------------------------ one rollout


class Transcript:
    """What a trajectory holds of tokens."""

    def __init__(self, prompt: Sequence[int]):
        self.tokens: list[int] = []
        self.author: list[int] = []
        self.logprobs: list[float] = []
        self.rows: list[int] = []
        self.begin_row(prompt)

    def begin_row(self, ids: Sequence[int]) -> None:
        self.rows.append(len(self.tokens))
        self.add(ids, Author.PROMPT)

    def add(self, ids: Sequence[int], author: Author, logprob: float = 0.0) -> None:
        self.tokens += ids
        self.author += [author] * len(ids)
        self.logprobs += [logprob] * len(ids)

    @property
    def row(self) -> list[int]:
        """All that the next token is drawn from."""
        return self.tokens[self.rows[-1]:]


def say(model: Model, script: Transcript, limits: Limits, stop_ids: Sequence[int], uid: str,
        sample: int, key: jax.Array, temperature: float) -> list[int]:
    """One message, up to a stop token or until a limit is reached."""
    message: list[int] = []
    while len(message) < limits.max_new and len(script.row) < limits.max_len:
        logits_V = model(script.row)
        who = rollout_numbers(uid, sample, len(script.rows) - 1)
        noise_V = gumbel(key, *who, np.uint32(len(script.row)), logits_V)
        token, logprob = draw(logits_V, np.asarray(noise_V), temperature, limits)
        script.add([token], Author.SAMPLED, logprob)
        message.append(token)
        if token in stop_ids:
            break
    return message


def play(model: Model, chat: ChatFormat, make_env: Callable[[Task], Environment],
         config: EngineConfig, limits: Limits, prompt: Prompt, sample: int, key: jax.Array,
         temperature: float) -> Trajectory:
    """Rollout `sample` of the prompt's task."""
    script, dialogue, task = Transcript(prompt.ids), prompt.dialogue.clone(), prompt.task
    env: Environment | None = None
    outcomes, n_steps, n_malformed, turn_steps = [], 0, 0, 0

    def done(end: EndReason) -> Trajectory:
        return Trajectory(
            task.uid, sample, np.asarray(script.tokens, np.int32),
            np.asarray(script.author, np.int8), np.asarray(script.logprobs, np.float32),
            tuple(outcomes), len(task.turns), end, n_steps, n_malformed, tuple(script.rows))

    while True:
        message = say(model, script, limits, chat.stop_ids, task.uid, sample, key, temperature)
        if message[-1] not in chat.stop_ids:
            return done(EndReason.TOKEN_LIMIT)
        step = dialogue.parse(message)
        n_steps, turn_steps = n_steps + 1, turn_steps + 1
        n_malformed += bool(step.errors)
        closing = config.malformed_ends_turn if step.errors else not step.calls
        cut = not closing and turn_steps == config.max_steps
        scored = cut and config.score_cut_turn and len(outcomes) + 1 == len(task.turns)
        try:
            if env is None and (closing or scored or not step.errors):
                env = make_env(task)
                env.begin_turn()
            turn = None
            if closing:
                outcome = env.end_turn(step.text)
                turn = env.begin_turn()
                outcomes.append(outcome)
                turn_steps = 0
            elif step.errors:
                ids = dialogue.errors(step.errors)
            else:
                ids = dialogue.results(step.calls, env.execute(step.calls))
            if scored:
                outcomes.append(env.end_turn(""))
        except ToolCrash:
            return done(EndReason.TOOL_CRASH)
        except (Exception, SystemExit):
            return done(EndReason.ENV_ERROR)
        if closing and turn is None:
            return done(EndReason.DONE)
        if closing and config.stop_on_failed_turn and not outcomes[-1].passed:
            return done(EndReason.FAILED_TURN)
        if cut:
            return done(EndReason.STEP_LIMIT)
        if closing:
            ids = dialogue.user(turn)
        new_row = closing and chat.rewrites
        # One token must be left to sample.
        if len(ids) + (0 if new_row else len(script.row)) >= limits.max_len:
            return done(EndReason.TOKEN_LIMIT)
        if new_row:
            script.begin_row(ids)
        else:
            script.add(ids, Author.INSERTED)
