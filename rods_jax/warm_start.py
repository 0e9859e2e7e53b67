"""Supervised training on gold traces: where a small policy starts from.

Traces come from tasks of the suite's own split "warm", which shares no task with the seeds.
All arms of a comparison read the same cached file: its name is a hash of all that decides it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from rods_jax import checkpoint
from rods_jax.config import to_json
from rods_jax.grpo.batch import BatchShape, pack
from rods_jax.grpo.optimizer import OptimizerConfig, make_optimizer
from rods_jax.grpo.supervised import make_supervised
from rods_jax.grpo.update import init_state
from rods_jax.policy import Parts, split
from rods_jax.run_config import RunConfig, WarmStartConfig
from rods_jax.text.compact import CompactFormat
from rods_jax.text.formats import ChatFormat
from rods_jax.tools.env import Suite
from rods_jax.types import Author, EndReason, Task, Trajectory, TurnOutcome


def gold_trajectory(task: Task, suite: Suite, chat: ChatFormat) -> Trajectory:
    """What an expert's rollout would look like, one call a message, made through the same
    environment and codec as a sampled one. Raises ValueError if gold does not score 1."""
    env, dialogue = suite.make_env(task), chat.start(task, suite.tools(task.domains))
    turn = env.begin_turn()
    tokens = dialogue.prompt(turn)
    author = [Author.PROMPT] * len(tokens)
    outcomes: list[TurnOutcome] = []

    def write(ids, by: Author):
        tokens.extend(ids)
        author.extend([by] * len(ids))

    while turn is not None:
        for call in task.turns[turn.index].gold:
            write(dialogue.step((call,)), Author.SAMPLED)
            write(dialogue.results((call,), env.execute((call,))), Author.INSERTED)
        reply = suite.gold_reply(task, turn.index)
        write(dialogue.step((), reply), Author.SAMPLED)
        outcomes.append(env.end_turn(reply))
        turn = env.begin_turn()
        if turn is not None:
            write(dialogue.user(turn), Author.INSERTED)
    if not all(outcome.passed for outcome in outcomes):
        raise ValueError(f"gold of task {task.uid} does not score 1.0: {outcomes}")
    length = len(tokens)
    return Trajectory(
        task_uid=task.uid, sample=0, tokens_L=np.asarray(tokens, np.int32),
        author_L=np.asarray(author, np.int8), logprobs_L=np.zeros((length,), np.float32),
        outcomes=tuple(outcomes), n_turns=len(task.turns), end=EndReason.DONE)


def hide(trace: Trajectory, chat: CompactFormat, share: float, rng: np.random.Generator,
         ) -> Trajectory:
    """The trace with a share of the words that the policy reads made unknown. A policy that
    has seen words missing spreads its bets on a word it has never met, where it would else
    be sure and wrong, and GRPO would have nothing to choose from."""
    read_L = (trace.author_L != Author.SAMPLED) & chat.is_word(trace.tokens_L)
    hidden_L = read_L & (rng.random(read_L.shape) < share)
    return dataclasses.replace(trace, tokens_L=np.where(hidden_L, chat.unk_id, trace.tokens_L))


def cache_path(config: RunConfig, parts: Parts, gold: list[list[Trajectory]],
               root: pathlib.Path) -> pathlib.Path:
    """Named after settings, traces as token ids, and the weights training starts from."""
    settings = [to_json(config.warm_start), to_json(parts.decoder.config), config.sampler.max_len]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    traces = [trace.tokens_L for wordings in gold for trace in wordings]
    for array in [*traces, *jax.tree.leaves(parts.params)]:
        digest.update(np.ascontiguousarray(array).tobytes())
    return root / f"warm_{digest.hexdigest()[:16]}"


def warm_start(config: RunConfig, parts: Parts, root: pathlib.Path,
               report: Callable[[int, int, float], None]) -> tuple[Any, pathlib.Path]:
    """Parameters after the warm start, read from the cache below `root` or made and put
    there. `report(pass, passes, loss)` is called after every pass that is trained."""
    warm = config.warm_start
    gold = [[gold_trajectory(said, parts.suite, parts.chat)
             for said in parts.suite.wordings(task, warm.wordings)]
            for task in split(parts.suite, "warm", warm.traces)]
    path = cache_path(config, parts, gold, root)
    if checkpoint.latest(path) is not None:
        return checkpoint.restore(path, parts.params).arrays, path
    params = _train(warm, config, parts, gold, report)
    checkpoint.save(path, warm.passes, params, {"passes": warm.passes})
    return params, path


def _train(warm: WarmStartConfig, config: RunConfig, parts: Parts,
           gold: list[list[Trajectory]], report: Callable[[int, int, float], None]) -> Any:
    part = -(-len(gold) // warm.batches)
    shape = BatchShape(micro=-(-part // warm.rows), rows=warm.rows,
                       length=config.sampler.max_len, tasks=part, group=1)
    steps = warm.passes * -(-len(gold) // part)
    optimizer = make_optimizer(OptimizerConfig(
        lr=warm.lr, warmup=max(1, steps // 20), decay_steps=steps, weight_decay=warm.weight_decay))
    step = jax.jit(make_supervised(parts.decoder, optimizer), donate_argnums=0)
    state = init_state(jax.tree.map(lambda x: x.copy(), parts.params), optimizer)
    rng = np.random.default_rng(warm.seed)
    for done in range(warm.passes):
        traces = [hide(wordings[rng.integers(len(wordings))], parts.chat, warm.hide, rng)
                  for wordings in gold]
        order = rng.permutation(len(traces))
        losses = []
        for start in range(0, len(order), part):
            groups = [[traces[i]] for i in order[start:start + part]]
            rewards = np.ones((part, 1), np.float32)
            state, metrics = step(state, pack(groups, rewards, shape, drop_dead=False))
            losses.append(metrics.loss)
        report(done + 1, warm.passes, float(np.mean(jax.device_get(losses))))
    return state.params
