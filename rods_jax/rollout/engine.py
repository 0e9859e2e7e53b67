"""The host half of the rollout: environments, token-in token-out.

`Engine.run` plays groups of rollouts to their end. A rollout owns its environment, its
dialogue codec and its ids, and sits in a slot (rollout/slots.py) until it ends; the slot then
takes the next one. Rollouts that wait for their environment hold up nobody: the others
sample on. Ids are appended as they were sampled or inserted and are never made from text
again; after every wave a checksum of what the device has in its cache is compared with them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from rods_jax.models.decoder import Decoder, unstacked
from rods_jax.rollout.shapes import SamplerConfig
from rods_jax.rollout.slots import Row, Sampled, SharedPrompt, Slots
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
    # Run without being sampled: prompts, once a group, answers, and again what was evicted.
    inserted_tokens: int = 0
    evicted: int = 0  # rows that gave up their K/V to older ones, and were run again
    device_s: float = 0.0  # prefill, extend and waves, until their results are here
    idle_s: float = 0.0  # nothing could be sampled, all waited for their environments
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
    cut: bool = False  # the turn ends since the rollout is out of steps

    def ready(self) -> bool:
        return self.pending is None or self.pending.ready()


class _Rollout:
    """One rollout in a slot: what the host knows of it."""

    def __init__(self, prompt: Prompt, group: int, sample: int, handle: int, row: Row):
        self.group, self.sample, self.handle, self.row = group, sample, handle, row
        self.task = prompt.task
        self.dialogue = prompt.dialogue.clone()
        self.tokens, self.prompt_len = list(prompt.ids), len(prompt.ids)
        self.author = [Author.PROMPT] * len(prompt.ids)
        self.logprobs = [0.0] * len(prompt.ids)
        self.message: list[int] = []  # the assistant message being sampled
        self.asked: _Asked | None = None  # what it waits for
        self.rows = [0]  # where in the ids each row begins
        self.outcomes: list[TurnOutcome] = []
        self.turn_steps = self.n_steps = self.n_malformed = 0

    def insert(self, ids: Sequence[int]) -> None:
        self._append(ids, Author.INSERTED, [0.0] * len(ids))
        self.row.ids.extend(ids)

    def begin_row(self, ids: Sequence[int]) -> None:
        """The prompt of a turn whose earlier turns look otherwise than they were sampled."""
        self.rows.append(len(self.tokens))
        self._append(ids, Author.PROMPT, [0.0] * len(ids))

    def sampled(self, found: Sampled) -> None:
        self._append(found.ids, Author.SAMPLED, found.logprobs)
        self.message.extend(found.ids)

    def _append(self, ids, author: Author, logprobs) -> None:
        self.tokens.extend(ids)
        self.author.extend([author] * len(ids))
        self.logprobs.extend(logprobs)

    @property
    def who(self) -> tuple[int, int]:
        """Of the rollout's random key: its task, and its sample with the row, whose positions
        count from 0 again."""
        return task_key(self.task.uid), self.sample | (len(self.rows) - 1) << 16

    def finish(self, end: EndReason) -> Trajectory:
        return Trajectory(
            task_uid=self.task.uid, sample=self.sample,
            tokens_L=np.asarray(self.tokens, np.int32), author_L=np.asarray(self.author, np.int8),
            logprobs_L=np.asarray(self.logprobs, np.float32), outcomes=tuple(self.outcomes),
            n_turns=len(self.task.turns), end=end, n_steps=self.n_steps,
            n_malformed=self.n_malformed, rows=tuple(self.rows))


@dataclasses.dataclass
class _Part:
    """Samples first .. last - 1 of a group, which share a prompt on one device."""

    group: int
    first: int
    last: int
    shared: SharedPrompt | None = None  # None: not yet, or each has the prompt of its own


def rolled_out(decoder: Decoder, sampler: SamplerConfig) -> Decoder:
    """The decoder with its layers one by one, where the sampler says so."""
    if not sampler.unrolled:
        return decoder
    return decoder.clone(config=dataclasses.replace(
        decoder.config, scan_unroll=decoder.config.n_layers))


class Engine:
    """Owns the compiled programs and the slots; the weights come with every call."""

    def __init__(self, decoder: Decoder, sampler: SamplerConfig, config: EngineConfig,
                 chat: ChatFormat, suite: Suite, host: Host | None = None,
                 mesh: Mesh | None = None):
        """`host` runs the environments; by default they run in this process. mesh: the devices
        that play, see Slots."""
        decoder = rolled_out(decoder, sampler)
        self.decoder, self.sampler, self.config = decoder, sampler, config
        self.chat, self.suite, self.host = chat, suite, host or InProcessHost(suite)
        self.slots = Slots(decoder, sampler, chat.stop_ids, mesh)

    def warm_up(self, params) -> int:
        """Compiles every program of the engine; returns how many there are."""
        return self.slots.warm_up(unstacked(self.decoder.config, params), jax.random.key(0))

    def run(self, params, prompts: Sequence[Prompt], group_size: int, key: jax.Array,
            temperature: float, hints: bool = False,
            ) -> tuple[list[list[Trajectory]], RolloutStats]:
        """Rolls out every prompt `group_size` times. Returns trajectories [T][G] in the
        order of `prompts`. `key` is made from the run's seed and the step; temperature 0
        is greedy. `hints`: the tools say what would help after a failed call. Raises Outage
        where worker processes cannot be kept up."""
        self.check(prompts)
        began, stats, evicted = time.perf_counter(), RolloutStats(), self.slots.evicted
        params = unstacked(self.decoder.config, params)
        done: list[list[Trajectory | None]] = [[None] * group_size for _ in prompts]
        queue = deque(self._parts(prompts, group_size))
        opened: list[_Part | None] = [None] * self.slots.devices
        live: dict[int, _Rollout] = {}  # by the id of the row
        try:
            while queue or any(opened) or live:
                self._start(prompts, queue, opened, live, hints)
                ended = self._answers(live, stats)
                if not ended:
                    ended = self._wave(params, live, key, temperature, stats)
                for rollout, end in ended:
                    done[rollout.group][rollout.sample] = rollout.finish(end)
                    stats.ends[end.value] += 1
                    self._free(live, rollout)
        finally:  # an outage must not leave slots taken
            for rollout in list(live.values()):
                self._free(live, rollout)
            for part in opened:
                if part is not None and part.shared is not None:
                    self.slots.let_go(part.shared)
        stats.rollouts = len(prompts) * group_size
        stats.evicted = self.slots.evicted - evicted
        stats.total_s = time.perf_counter() - began
        return done, stats

    def _free(self, live: dict[int, _Rollout], rollout: _Rollout) -> None:
        del live[id(rollout.row)]
        self.slots.release(rollout.row)
        self.host.finish(rollout.handle)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raises ValueError, one line, for what `run` could not play."""
        for prompt in prompts:
            if not prompt.ids:
                raise ValueError(f"prompt of task {prompt.task.uid} has no tokens: drop the task")
            if len(prompt.ids) > self.sampler.prompt_len:
                raise ValueError(
                    f"prompt of task {prompt.task.uid} has {len(prompt.ids)} tokens, "
                    f"sampler.prompt_len is {self.sampler.prompt_len}: raise it or drop the task")

    # ------------------------------------------------------------------ slots

    def _parts(self, prompts: Sequence[Prompt], group_size: int) -> list[_Part]:
        """Groups, cut where a prompt's seats end and where devices would have nothing to do.
        Long tasks first: a rollout is a chain of waves, and a long one that starts last
        would keep the device at work for a few slots."""
        each = -(-len(prompts) * group_size // self.slots.devices)
        size = max(1, min(group_size, self.sampler.sharers, each))
        order = sorted(range(len(prompts)), key=lambda i: -_messages(prompts[i].task))
        return [_Part(group, first, min(first + size, group_size))
                for group in order for first in range(0, group_size, size)]

    def _start(self, prompts, queue, opened, live, hints) -> None:
        """Fills the free slots, the emptiest device first, each with the part that it began,
        then with the next."""
        devices = list(range(self.slots.devices))
        while devices:
            device = max(devices, key=self.slots.free)  # the first of equals
            part = opened[device]
            if part is None and queue and self.slots.free(device):
                part = opened[device] = queue.popleft()
            if part is None or not self.slots.free(device) \
                    or not self._room(device, part, prompts[part.group]):
                devices.remove(device)
                continue
            prompt = prompts[part.group]
            handle = self.host.start(prompt.task, hints)
            row = self.slots.take(device, prompt.ids, part.shared)
            rollout = live[id(row)] = _Rollout(prompt, part.group, part.first, handle, row)
            row.who = rollout.who
            part.first += 1
            if part.first == part.last:
                if part.shared is not None:
                    self.slots.let_go(part.shared)
                opened[device] = None

    def _room(self, device: int, part: _Part, prompt: Prompt) -> bool:
        """Whether there are pages to start a rollout with. One that is alone needs no prompt
        that others could read."""
        alone = part.shared is None and part.last - part.first == 1
        own = self.sampler.wave + len(prompt.ids) * alone
        if not self.slots.room(device, own):
            return False
        if part.shared is None and not alone:
            part.shared = self.slots.share(prompt.ids, device)
        return alone or part.shared is not None

    # ------------------------------------------------------------------ waves

    def _wave(self, params, live, key, temperature, stats: RolloutStats,
              ) -> list[tuple[_Rollout, EndReason]]:
        """One wave over the rollouts that wait for nothing; those that ended, and why."""
        out = [r.asked.pending for r in live.values() if r.asked is not None]
        rollouts = {id(r.row): r for r in live.values() if r.asked is None}
        began, ran = time.perf_counter(), self.slots.ran
        ready = self.slots.prepare(params, [r.row for r in rollouts.values()],
                                   [self._budget(r) for r in rollouts.values()])
        if not ready:  # all wait, for their environments or for pages of those that do
            self.host.wait(out)
            stats.idle_s += time.perf_counter() - began
            return []
        most = self.sampler.steps_waiting if out else self.sampler.wave
        found = self.slots.sample(
            params, ready, [self._budget(rollouts[id(row)]) for row in ready], key, temperature,
            min(most, self.sampler.wave), self.sampler.straggler_share)
        stats.device_s += time.perf_counter() - began
        stats.inserted_tokens += self.slots.ran - ran
        stats.waves += 1
        stats.sampled_tokens += sum(len(sampled.ids) for _, sampled in found)
        ended = []
        for row, sampled in found:
            rollout = rollouts[id(row)]
            rollout.sampled(sampled)
            if sampled.intact:
                self._go_on(rollout, lambda: self._ask(rollout, sampled.stopped), ended, stats)
            else:
                ended.append((rollout, EndReason.DRIFT))
        return ended

    def _budget(self, rollout: _Rollout) -> int:
        return min(self.sampler.max_new - len(rollout.message),
                   self._longest(rollout) - len(rollout.row.ids))

    def _longest(self, rollout: _Rollout) -> int:
        """Tokens that a row of it may have."""
        own = self.sampler.max_own
        return self.sampler.max_len if own is None else min(
            self.sampler.max_len, rollout.prompt_len + own)

    # ------------------------------------------------------------------ environments

    def _answers(self, live, stats: RolloutStats) -> list[tuple[_Rollout, EndReason]]:
        """Takes what the environments have answered by now; those that ended, and why."""
        self.host.poll()
        ended = []
        for rollout in live.values():
            while rollout.asked is not None and rollout.asked.ready():
                asked, rollout.asked = rollout.asked, None
                self._go_on(rollout, lambda: self._answer(rollout, asked), ended, stats)
        return ended

    def _ask(self, rollout: _Rollout, stopped: bool) -> EndReason | _Asked | None:
        """After a wave in which the rollout sampled: parses a complete message and sends what
        it wants to the environment. None: the message goes on."""
        if not stopped:
            return None if self._budget(rollout) > 0 else EndReason.TOKEN_LIMIT
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

    def _answer(self, rollout: _Rollout, asked: _Asked) -> EndReason | _Asked | None:
        """Takes the environment's answer: ends the rollout, asks again or inserts what comes
        next."""
        if asked.ends_turn:
            outcome, turn = asked.pending.result()
            rollout.outcomes.append(outcome)
            rollout.turn_steps = 0
            if asked.cut:
                return EndReason.STEP_LIMIT
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
            return _Asked(asked.step, self.host.end_turn(rollout.handle, ""), ends_turn=True,
                          cut=True)
        return EndReason.STEP_LIMIT

    def _insert(self, rollout: _Rollout, ids: Sequence[int]) -> EndReason | None:
        # One token must be left to sample, or the message could not even be empty.
        if len(rollout.row.ids) + len(ids) >= self._longest(rollout):
            return EndReason.TOKEN_LIMIT
        rollout.insert(ids)
        return None

    def _begin_row(self, rollout: _Rollout, ids: Sequence[int]) -> EndReason | None:
        if len(ids) >= self._longest(rollout):
            return EndReason.TOKEN_LIMIT
        rollout.begin_row(ids)
        self.slots.restart(rollout.row, ids, rollout.who)
        return None

    @staticmethod
    def _go_on(rollout: _Rollout, step: Callable[[], _Asked | EndReason | None],
               ended: list[tuple[_Rollout, EndReason]], stats: RolloutStats) -> None:
        """A step of a rollout, whose environment may break. A call that took its worker down is
        the policy's doing; any other failure is not, and a simulator may even call exit."""
        try:
            found = step()
        except ToolCrash as crash:
            stats.crashes[crash.reason.value] += 1
            found = EndReason.TOOL_CRASH
        except Outage:
            raise
        except (Exception, SystemExit) as error:
            stats.env_errors[getattr(error, "kind", type(error).__name__)] += 1
            found = EndReason.ENV_ERROR
        if isinstance(found, EndReason):
            ended.append((rollout, found))
        else:
            rollout.asked = found


def _messages(task: Task) -> int:
    """How many assistant messages the gold dialogue has, one call a message."""
    return sum(len(turn.gold) + 1 for turn in task.turns)


def task_key(uid: str) -> int:
    """32 bits of the task's uid for the rollout's random key."""
    return int.from_bytes(hashlib.sha256(uid.encode()).digest()[:4], "little")
