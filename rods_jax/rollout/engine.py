"""The host half of the rollout: slots, environments, token-in token-out.

`Engine.run` plays groups of rollouts to their end. A rollout owns its environment, its
dialogue codec and its ids; a slot that frees up takes the next group. Ids are appended as
they were sampled or inserted and are never made from text again; after every wave the
device's count of tokens is checked against the host's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections import Counter, deque
from collections.abc import Sequence

import jax
import numpy as np

from rods_jax.models.decoder import Decoder
from rods_jax.rollout.sampler import SamplerConfig, init_slots, make_prefill, make_wave
from rods_jax.text.formats import ChatFormat, Dialogue
from rods_jax.tools.env import Environment, Suite
from rods_jax.types import Author, EndReason, Task, Trajectory, TurnOutcome


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    max_steps: int = 8  # assistant messages a user turn
    stop_on_failed_turn: bool = True  # later turns rest on this one's state

    def __post_init__(self):
        if self.max_steps < 1:
            raise ValueError(f"max_steps is {self.max_steps}: give 1 or more")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A task ready to be rolled out: ids of its prompt, and the codec that made them."""

    task: Task
    dialogue: Dialogue
    ids: tuple[int, ...]


def make_prompt(task: Task, suite: Suite, chat: ChatFormat) -> Prompt:
    dialogue = chat.start(task, suite.tools(task.domains))
    turn = suite.make_env(task).begin_turn()
    return Prompt(task, dialogue, tuple(dialogue.prompt(turn)))


@dataclasses.dataclass
class RolloutStats:
    """Of one call of `run`; seconds are wall time."""

    rollouts: int = 0
    waves: int = 0
    sampled_tokens: int = 0
    inserted_tokens: int = 0
    device_s: float = 0.0
    total_s: float = 0.0
    ends: Counter = dataclasses.field(default_factory=Counter)
    env_errors: Counter = dataclasses.field(default_factory=Counter)  # by exception type


class _Rollout:
    """One rollout in a slot: what the host knows of it."""

    def __init__(self, prompt: Prompt, group: int, sample: int):
        self.group, self.sample = group, sample
        self.task = prompt.task
        self.dialogue = prompt.dialogue.clone()
        self._env: Environment | None = None
        self.tokens = list(prompt.ids)
        self.author = [Author.PROMPT] * len(prompt.ids)
        self.logprobs = [0.0] * len(prompt.ids)
        self.pending: list[int] = []  # ids that the device has not seen yet
        self.message: list[int] = []  # the assistant message being sampled
        self.outcomes: list[TurnOutcome] = []
        self.turn_steps = self.n_steps = self.n_malformed = 0

    def env(self, suite: Suite) -> Environment:
        """Made when first needed: that may fail like every other use of it."""
        if self._env is None:
            self._env = suite.make_env(self.task)
            self._env.begin_turn()
        return self._env

    def insert(self, ids: Sequence[int]) -> None:
        self.tokens.extend(ids)
        self.author.extend([Author.INSERTED] * len(ids))
        self.logprobs.extend([0.0] * len(ids))
        self.pending.extend(ids)

    def sampled(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        self.tokens.extend(ids)
        self.author.extend([Author.SAMPLED] * len(ids))
        self.logprobs.extend(logprobs)
        self.message.extend(ids)
        self.pending.append(ids[-1])  # the one sampled token that is not in the cache

    def finish(self, end: EndReason) -> Trajectory:
        return Trajectory(
            task_uid=self.task.uid, sample=self.sample,
            tokens_L=np.asarray(self.tokens, np.int32), author_L=np.asarray(self.author, np.int8),
            logprobs_L=np.asarray(self.logprobs, np.float32), outcomes=tuple(self.outcomes),
            n_turns=len(self.task.turns), end=end, n_steps=self.n_steps,
            n_malformed=self.n_malformed)


class Engine:
    """Owns the compiled programs and the slots; the weights come with every call."""

    def __init__(self, decoder: Decoder, sampler: SamplerConfig, config: EngineConfig,
                 chat: ChatFormat, suite: Suite):
        self.decoder, self.sampler, self.config = decoder, sampler, config
        self.chat, self.suite = chat, suite
        self._slots = init_slots(decoder, sampler)
        self._prefill = jax.jit(make_prefill(decoder, sampler), donate_argnums=1)
        self._waves = {
            bucket: jax.jit(make_wave(decoder, sampler, chat.stop_ids, bucket), donate_argnums=1)
            for bucket in sampler.buckets}

    def run(self, params, prompts: Sequence[Prompt], group_size: int, key: jax.Array,
            temperature: float) -> tuple[list[list[Trajectory]], RolloutStats]:
        """Rolls out every prompt `group_size` times. Returns trajectories [T][G] in the
        order of `prompts`. `key` is made from the run's seed and the step; temperature 0
        is greedy."""
        self.check(prompts, group_size)
        began, stats = time.perf_counter(), RolloutStats()
        done: list[list[Trajectory | None]] = [[None] * group_size for _ in prompts]
        # Long tasks first: a rollout is a chain of waves, and a long one that starts last
        # would keep the device at work for a few slots.
        queue = deque(sorted(range(len(prompts)), key=lambda i: -_messages(prompts[i].task)))
        live: list[_Rollout | None] = [None] * self.sampler.slots
        who_Bx2 = np.zeros((self.sampler.slots, 2), np.uint32)
        while queue or any(live):
            self._refill(params, prompts, group_size, queue, live, who_Bx2)
            ended = self._wave(params, live, key, who_Bx2, np.float32(temperature), stats)
            for slot, end in ended.items():
                rollout = live[slot]
                done[rollout.group][rollout.sample] = rollout.finish(end)
                live[slot] = None
                stats.ends[end.value] += 1
        stats.rollouts = len(prompts) * group_size
        stats.total_s = time.perf_counter() - began
        return done, stats

    def check(self, prompts: Sequence[Prompt], group_size: int) -> None:
        """Raises ValueError, one line, for what `run` could not play."""
        if group_size > self.sampler.slots:
            raise ValueError(f"group size {group_size} exceeds sampler.slots "
                             f"{self.sampler.slots}: raise sampler.slots")
        for prompt in prompts:
            if not 0 < len(prompt.ids) <= self.sampler.prompt_len:
                raise ValueError(
                    f"prompt of task {prompt.task.uid} has {len(prompt.ids)} tokens, "
                    f"sampler.prompt_len is {self.sampler.prompt_len}: raise it or drop the task")

    def _refill(self, params, prompts, group_size, queue, live, who_Bx2) -> None:
        """Starts whole groups while there is room for as many as one prefill takes."""
        at_once = min(self.sampler.prefill_groups, self.sampler.slots // group_size)
        while queue:
            free = [slot for slot, rollout in enumerate(live) if rollout is None]
            n = min(at_once, len(queue))
            if len(free) < n * group_size:
                return
            tokens_TxP = np.zeros((self.sampler.prefill_groups, self.sampler.prompt_len), np.int32)
            length_T = np.ones((self.sampler.prefill_groups,), np.int32)
            group_B = np.full((self.sampler.slots,), -1, np.int32)
            for t in range(n):
                group = queue.popleft()
                prompt = prompts[group]
                tokens_TxP[t, :len(prompt.ids)] = prompt.ids
                length_T[t] = len(prompt.ids)
                for sample in range(group_size):
                    slot = free.pop()
                    live[slot] = _Rollout(prompt, group, sample)
                    group_B[slot] = t
                    who_Bx2[slot] = task_key(prompt.task.uid), sample
            self._slots = self._prefill(params, self._slots, tokens_TxP, length_T, group_B)

    def _wave(self, params, live, key, who_Bx2, temperature, stats: RolloutStats,
              ) -> dict[int, EndReason]:
        """One wave over all slots; returns the slots whose rollout ended, and why."""
        B, C, M = self.sampler.slots, self.sampler.chunk, self.sampler.max_new
        chunk_BxC = np.zeros((B, C), np.int32)
        n_B, budget_B = np.zeros((B,), np.int32), np.zeros((B,), np.int32)
        sample_B = np.zeros((B,), bool)
        longest = 0
        for slot, rollout in enumerate(live):
            if rollout is None:
                continue
            longest = max(longest, len(rollout.tokens) - len(rollout.pending))
            take = rollout.pending[:C]
            rollout.pending = rollout.pending[C:]
            chunk_BxC[slot, :len(take)] = take
            n_B[slot] = len(take)
            sample_B[slot] = not rollout.pending
            budget_B[slot] = min(M - len(rollout.message),
                                 self.sampler.max_len - len(rollout.tokens))
        bucket = next(b for b in self.sampler.buckets if b >= longest)
        began = time.perf_counter()
        self._slots, out = self._waves[bucket](
            params, self._slots, chunk_BxC, n_B, sample_B, budget_B, key, who_Bx2,
            temperature)
        out = jax.device_get(out)
        stats.device_s += time.perf_counter() - began
        stats.waves += 1
        stats.sampled_tokens += int(out.count_B.sum())
        stats.inserted_tokens += int(n_B.sum())

        ended = {}
        for slot, rollout in enumerate(live):
            if rollout is None:
                continue
            if sample_B[slot]:
                n = int(out.count_B[slot])
                rollout.sampled(out.tokens_BxM[slot, :n].tolist(),
                                out.logprobs_BxM[slot, :n].tolist())
            if out.length_B[slot] != len(rollout.tokens) - len(rollout.pending):
                end = EndReason.DRIFT
            elif not sample_B[slot]:
                end = None
            else:
                end = self._advance(rollout, bool(out.stopped_B[slot]), stats)
            if end is not None:
                ended[slot] = end
        return ended

    def _advance(self, rollout: _Rollout, stopped: bool, stats: RolloutStats) -> EndReason | None:
        """After a wave in which the rollout sampled: acts on a complete message."""
        if not stopped:
            room = (len(rollout.message) < self.sampler.max_new
                    and len(rollout.tokens) < self.sampler.max_len)
            return None if room else EndReason.TOKEN_LIMIT
        message, rollout.message = rollout.message, []
        try:
            end, ids = self._act(rollout, message)
        # The environment broke, by no fault of the policy; a simulator may even call exit.
        except (Exception, SystemExit) as error:
            stats.env_errors[type(error).__name__] += 1
            return EndReason.ENV_ERROR
        if end is not None:
            return end
        # One token must be left to sample, or the message could not even be empty.
        if len(rollout.tokens) + len(ids) >= self.sampler.max_len:
            return EndReason.TOKEN_LIMIT
        rollout.insert(ids)
        return None

    def _act(self, rollout: _Rollout, message: list[int]) -> tuple[EndReason | None, list[int]]:
        """Parses a message, executes it or ends the turn; returns the ids to insert."""
        env, step = rollout.env(self.suite), rollout.dialogue.parse(message)
        rollout.n_steps += 1
        rollout.turn_steps += 1
        if step.errors or step.calls:
            if step.errors:
                rollout.n_malformed += 1
                ids = rollout.dialogue.errors(step.errors)
            else:
                results = env.execute(step.calls)
                ids = rollout.dialogue.results(step.calls, results)
            if rollout.turn_steps >= self.config.max_steps:
                return EndReason.STEP_LIMIT, []
            return None, ids
        outcome = env.end_turn(step.text)
        rollout.outcomes.append(outcome)
        rollout.turn_steps = 0
        turn = env.begin_turn()
        if turn is None:
            return EndReason.DONE, []
        if self.config.stop_on_failed_turn and not outcome.passed:
            return EndReason.FAILED_TURN, []
        return None, rollout.dialogue.user(turn)


def _messages(task: Task) -> int:
    """How many assistant messages the gold dialogue has, one call a message."""
    return sum(len(turn.gold) + 1 for turn in task.turns)


def task_key(uid: str) -> int:
    """32 bits of the task's uid for the rollout's random key."""
    return int.from_bytes(hashlib.sha256(uid.encode()).digest()[:4], "little")
