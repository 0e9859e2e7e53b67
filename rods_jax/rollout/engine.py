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
from collections.abc import Callable, Sequence

import jax
import numpy as np

from rods_jax.models.decoder import Decoder
from rods_jax.rollout.sampler import SamplerConfig, forget, init_slots, make_prefill, make_wave
from rods_jax.text.formats import ChatFormat, Dialogue
from rods_jax.tools.env import Suite
from rods_jax.tools.host import Host, InProcessHost, Outage, Pending, ToolCrash
from rods_jax.types import Author, EndReason, ParsedStep, Task, Trajectory, TurnOutcome


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    max_steps: int = 8  # assistant messages a user turn
    stop_on_failed_turn: bool = True  # later turns rest on this one's state
    malformed_ends_turn: bool = False  # else the agent is told and may try again
    score_cut_turn: bool = False  # a last turn that ran out of steps is scored as it stands

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
    crashes: Counter = dataclasses.field(default_factory=Counter)  # by reason, see tools/host.py


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A message that waits for its environment; `pending` None where nothing was to be run."""

    step: ParsedStep
    pending: Pending | None
    ends_turn: bool = False


class _Rollout:
    """One rollout in a slot: what the host knows of it."""

    def __init__(self, prompt: Prompt, group: int, sample: int, handle: int):
        self.group, self.sample, self.handle = group, sample, handle
        self.task = prompt.task
        self.dialogue = prompt.dialogue.clone()
        self.tokens = list(prompt.ids)
        self.author = [Author.PROMPT] * len(prompt.ids)
        self.logprobs = [0.0] * len(prompt.ids)
        self.pending: list[int] = []  # ids that the device has not seen yet
        self.message: list[int] = []  # the assistant message being sampled
        self.rows = [0]  # where in the ids each row begins
        self.fresh = False  # whether the device must forget the slot's ids before the next
        self.outcomes: list[TurnOutcome] = []
        self.turn_steps = self.n_steps = self.n_malformed = 0

    def insert(self, ids: Sequence[int]) -> None:
        self.tokens.extend(ids)
        self.author.extend([Author.INSERTED] * len(ids))
        self.logprobs.extend([0.0] * len(ids))
        self.pending.extend(ids)

    def begin_row(self, ids: Sequence[int]) -> None:
        """The prompt of a turn whose earlier turns look otherwise than they were sampled."""
        self.rows.append(len(self.tokens))
        self.tokens.extend(ids)
        self.author.extend([Author.PROMPT] * len(ids))
        self.logprobs.extend([0.0] * len(ids))
        self.pending, self.fresh = list(ids), True

    @property
    def row_length(self) -> int:
        return len(self.tokens) - self.rows[-1]

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
            n_malformed=self.n_malformed, rows=tuple(self.rows))


class Engine:
    """Owns the compiled programs and the slots; the weights come with every call."""

    def __init__(self, decoder: Decoder, sampler: SamplerConfig, config: EngineConfig,
                 chat: ChatFormat, suite: Suite, host: Host | None = None):
        """`host` runs the environments; by default they run in this process."""
        self.decoder, self.sampler, self.config = decoder, sampler, config
        self.chat, self.suite, self.host = chat, suite, host or InProcessHost(suite)
        self._slots = init_slots(decoder, sampler)
        self._prefill = jax.jit(make_prefill(decoder, sampler), donate_argnums=1)
        self._forget = jax.jit(forget, donate_argnums=0)
        self._waves = {
            bucket: jax.jit(make_wave(decoder, sampler, chat.stop_ids, bucket), donate_argnums=1)
            for bucket in sampler.buckets}

    def run(self, params, prompts: Sequence[Prompt], group_size: int, key: jax.Array,
            temperature: float, hints: bool = False,
            ) -> tuple[list[list[Trajectory]], RolloutStats]:
        """Rolls out every prompt `group_size` times. Returns trajectories [T][G] in the
        order of `prompts`. `key` is made from the run's seed and the step; temperature 0
        is greedy. `hints`: the tools say what would help after a failed call. Raises Outage
        where worker processes cannot be kept up."""
        self.check(prompts, group_size)
        began, stats = time.perf_counter(), RolloutStats()
        done: list[list[Trajectory | None]] = [[None] * group_size for _ in prompts]
        # Long tasks first: a rollout is a chain of waves, and a long one that starts last
        # would keep the device at work for a few slots.
        queue = deque(sorted(range(len(prompts)), key=lambda i: -_messages(prompts[i].task)))
        live: list[_Rollout | None] = [None] * self.sampler.slots
        who_Bx2 = np.zeros((self.sampler.slots, 2), np.uint32)
        while queue or any(live):
            self._refill(params, prompts, group_size, queue, live, who_Bx2, hints)
            self._forget_rows(live, who_Bx2)
            ended = self._wave(params, live, key, who_Bx2, np.float32(temperature), stats)
            for slot, end in ended.items():
                rollout = live[slot]
                done[rollout.group][rollout.sample] = rollout.finish(end)
                self.host.finish(rollout.handle)
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

    def _refill(self, params, prompts, group_size, queue, live, who_Bx2, hints) -> None:
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
                    handle = self.host.start(prompt.task, hints)
                    live[slot] = _Rollout(prompt, group, sample, handle)
                    group_B[slot] = t
                    who_Bx2[slot] = task_key(prompt.task.uid), sample
            self._slots = self._prefill(params, self._slots, tokens_TxP, length_T, group_B)

    def _forget_rows(self, live, who_Bx2) -> None:
        """Empties the slots in which a row begins, and gives its draws keys of their own:
        positions count from 0 again."""
        fresh_B = np.array([rollout is not None and rollout.fresh for rollout in live])
        if not fresh_B.any():
            return
        self._slots = self._forget(self._slots, fresh_B)
        for slot in np.flatnonzero(fresh_B):
            rollout = live[slot]
            rollout.fresh = False
            who_Bx2[slot, 1] = rollout.sample | (len(rollout.rows) - 1) << 16

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
            longest = max(longest, rollout.row_length - len(rollout.pending))
            take = rollout.pending[:C]
            rollout.pending = rollout.pending[C:]
            chunk_BxC[slot, :len(take)] = take
            n_B[slot] = len(take)
            sample_B[slot] = not rollout.pending
            budget_B[slot] = min(M - len(rollout.message),
                                 self.sampler.max_len - rollout.row_length)
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

        steps: dict[int, _Asked | EndReason | None] = {}
        for slot, rollout in enumerate(live):
            if rollout is None:
                continue
            if sample_B[slot]:
                n = int(out.count_B[slot])
                rollout.sampled(out.tokens_BxM[slot, :n].tolist(),
                                out.logprobs_BxM[slot, :n].tolist())
            if out.length_B[slot] != rollout.row_length - len(rollout.pending):
                steps[slot] = EndReason.DRIFT
            elif sample_B[slot]:
                steps[slot] = self._safely(
                    lambda: self._ask(rollout, bool(out.stopped_B[slot])), stats)
        # All were asked before the first is waited for, so workers run side by side.
        for slot, step in steps.items():
            if isinstance(step, _Asked):
                steps[slot] = self._safely(lambda: self._answer(live[slot], step), stats)
        return {slot: end for slot, end in steps.items() if end is not None}

    def _ask(self, rollout: _Rollout, stopped: bool) -> EndReason | _Asked | None:
        """After a wave in which the rollout sampled: parses a complete message and sends what
        it wants to the environment. None: the message goes on."""
        if not stopped:
            room = (len(rollout.message) < self.sampler.max_new
                    and rollout.row_length < self.sampler.max_len)
            return None if room else EndReason.TOKEN_LIMIT
        message, rollout.message = rollout.message, []
        step = rollout.dialogue.parse(message)
        rollout.n_steps += 1
        rollout.turn_steps += 1
        rollout.n_malformed += bool(step.errors)
        if step.errors and not self.config.malformed_ends_turn:
            return _Asked(step, None)
        if step.calls and not step.errors:
            return _Asked(step, self.host.execute(rollout.handle, step.calls))
        return _Asked(step, self.host.end_turn(rollout.handle, step.text), ends_turn=True)

    def _answer(self, rollout: _Rollout, asked: _Asked) -> EndReason | None:
        """Takes the environment's answer: ends the rollout or inserts what comes next."""
        if asked.ends_turn:
            outcome, turn = asked.pending.result()
            rollout.outcomes.append(outcome)
            rollout.turn_steps = 0
            if turn is None:
                return EndReason.DONE
            if self.config.stop_on_failed_turn and not outcome.passed:
                return EndReason.FAILED_TURN
            ids = rollout.dialogue.user(turn)
            if self.chat.rewrites:
                return self._begin_row(rollout, ids)
            return self._insert(rollout, ids)
        if asked.pending is None:
            ids = rollout.dialogue.errors(asked.step.errors)
        else:
            ids = rollout.dialogue.results(asked.step.calls, asked.pending.result())
        if rollout.turn_steps < self.config.max_steps:
            return self._insert(rollout, ids)
        last = len(rollout.outcomes) + 1 == len(rollout.task.turns)
        if self.config.score_cut_turn and last:
            outcome, _ = self.host.end_turn(rollout.handle, "").result()
            rollout.outcomes.append(outcome)
        return EndReason.STEP_LIMIT

    def _insert(self, rollout: _Rollout, ids: Sequence[int]) -> EndReason | None:
        # One token must be left to sample, or the message could not even be empty.
        if rollout.row_length + len(ids) >= self.sampler.max_len:
            return EndReason.TOKEN_LIMIT
        rollout.insert(ids)
        return None

    def _begin_row(self, rollout: _Rollout, ids: Sequence[int]) -> EndReason | None:
        if len(ids) >= self.sampler.max_len:
            return EndReason.TOKEN_LIMIT
        rollout.begin_row(ids)
        return None

    def _safely(self, step: Callable[[], _Asked | EndReason | None], stats: RolloutStats,
                ) -> _Asked | EndReason | None:
        """A step whose environment may break. A call that took its worker down is the policy's
        doing; any other failure is not, and a simulator may even call exit."""
        try:
            return step()
        except ToolCrash as crash:
            stats.crashes[crash.reason.value] += 1
            return EndReason.TOOL_CRASH
        except Outage:
            raise
        except (Exception, SystemExit) as error:
            stats.env_errors[getattr(error, "kind", type(error).__name__)] += 1
            return EndReason.ENV_ERROR


def _messages(task: Task) -> int:
    """How many assistant messages the gold dialogue has, one call a message."""
    return sum(len(turn.gold) + 1 for turn in task.turns)


def task_key(uid: str) -> int:
    """32 bits of the task's uid for the rollout's random key."""
    return int.from_bytes(hashlib.sha256(uid.encode()).digest()[:4], "little")
