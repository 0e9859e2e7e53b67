"""Where environments live: in this process, or in worker processes with limits.

A rollout is a handle; its operations are sent at once and answered in order:

    rollout = host.start(task, hints=False)
    results = host.execute(rollout, calls).result()
    outcome, turn = host.end_turn(rollout, said).result()
    host.finish(rollout)

`result` raises EnvError where the environment itself broke, and ToolCrash where a worker was
lost over this rollout. Both ways of hosting give the same results for the same operations.

Whoever has something else to do meanwhile looks now and then, and waits when that is done:

    host.poll()
    answered = [pending for pending in asked if pending.ready()]
    host.wait(asked)
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeVar

from rods_jax.tools.env import Environment, Suite, UserTurn
from rods_jax.tools.suites import SuiteSpec
from rods_jax.types import Task, ToolCall, ToolResult, TurnOutcome

T_co = TypeVar("T_co", covariant=True)
Closed = tuple[TurnOutcome, UserTurn | None]  # how a turn ended, and the next one


MOST_CALL_S = 86_400
MOST_MEMORY_MB = 2**24  # 16 TiB


@dataclasses.dataclass(frozen=True)
class HostConfig:
    # Worker processes; 0 runs the tools in this process, without such limits. A worker runs one
    # operation at a time: for tools that wait, as many as rollouts are played at once.
    count: int = 0
    call_s: float = 10.0  # wall seconds one call may take
    memory_mb: int = 1024  # what a worker may allocate beyond its size at start (address space)
    output_chars: int = 20_000  # of one result; the rest is cut, with a note how many

    def __post_init__(self):
        if self.count < 0:
            raise ValueError(f"workers.count is {self.count}: give 0, which runs the tools in "
                             "this process, or more")
        for name in ("call_s", "memory_mb", "output_chars"):
            if not getattr(self, name) > 0:
                raise ValueError(f"workers.{name} is {getattr(self, name)}: give more than 0")
        for name, most in (("call_s", MOST_CALL_S), ("memory_mb", MOST_MEMORY_MB)):
            if not getattr(self, name) <= most:
                raise ValueError(f"workers.{name} is {getattr(self, name)}: give at most {most}")


class Crash(enum.Enum):
    """Why a worker was lost."""

    TIME = "time"  # a call took longer than HostConfig.call_s
    MEMORY = "memory"  # it wanted more than HostConfig.memory_mb
    DIED = "died"  # it ended by itself: a signal, os._exit, a fault in C


class ToolCrash(Exception):
    """The rollout is lost with its worker. `call` is the one that ran, None where it was the
    environment at work: being made, or at the end of a turn."""

    def __init__(self, reason: Crash, task_uid: str, call: ToolCall | None):
        super().__init__(f"task {task_uid}: worker lost ({reason.value}) over "
                         f"{'the environment' if call is None else call.name}")
        self.reason, self.task_uid, self.call = reason, task_uid, call


class EnvError(Exception):
    """The environment itself raised: `kind` is the name of the exception's type."""

    def __init__(self, kind: str, text: str):
        super().__init__(f"{kind}: {text}" if text else kind)
        self.kind, self.text = kind, text


class Outage(Exception):
    """Workers cannot be started, or do not stay up; one line."""


class Pending(Protocol[T_co]):
    def ready(self) -> bool:
        """Whether `result` would return or raise at once, as far as the host has looked."""

    def result(self) -> T_co:
        """Waits for the answer. Raises ToolCrash, EnvError or Outage."""


class Host(Protocol):
    """`crashes`: rollouts lost, by reason; `replaced`: workers started in place of others."""

    crashes: collections.Counter[Crash]
    replaced: int

    def start(self, task: Task, hints: bool) -> int:
        """A new rollout with turn 0 begun. What goes wrong there shows in its operations."""

    def execute(self, rollout: int, calls: Sequence[ToolCall]) -> Pending[tuple[ToolResult, ...]]:
        """One result each, texts cut to output_chars. The calls run one by one."""

    def end_turn(self, rollout: int, said: str) -> Pending[Closed]:
        """Ends the turn and begins the next, which is None after the last."""

    def finish(self, rollout: int) -> None:
        """Frees the rollout; may be called twice, and after a crash."""

    def poll(self) -> None:
        """Looks once at what has come, without waiting, so that `ready` knows it. Operations
        that are out of time end here too. Raises nothing: what is wrong is in the results."""

    def wait(self, pendings: Collection[Pending]) -> None:
        """Returns when at least one of these is ready, at once if one is: `result`, which may
        raise, comes next. Sleeps meanwhile, under the same limits on time as `result`."""

    def close(self) -> None:
        """Ends the host; may be called twice."""


def make_host(suite: Suite, spec: SuiteSpec, config: HostConfig) -> Host:
    """`suite` was made from `spec`; workers make their own."""
    if config.count == 0:
        return InProcessHost(suite, config.output_chars)
    from rods_jax.tools.workers import WorkerPool  # it imports this module
    return WorkerPool(spec, config)


# ------------------------------------------------------- the same in every kind of host


def open_env(suite: Suite, task: Task, hints: bool) -> Environment:
    env = suite.make_env(task, hints)
    env.begin_turn()
    return env


def run_call(env: Environment, call: ToolCall, output_chars: int) -> ToolResult:
    """Runs one call; scoring, which is the environment's, has seen the whole text."""
    result, = env.execute((call,))
    return ToolResult(cut(result.text, output_chars), result.ok)


def close_turn(env: Environment, said: str) -> Closed:
    outcome = env.end_turn(said)
    return outcome, env.begin_turn()


def any_ready(pendings: Collection[Pending]) -> bool:
    """Raises ValueError where there are none, which nobody could wait for."""
    if not pendings:
        raise ValueError("there are no operations to wait for: give one or more")
    return any(pending.ready() for pending in pendings)


def cut(text: str, output_chars: int) -> str:
    left = len(text) - output_chars
    return f"{text[:output_chars]}\n[{left} more characters cut]" if left > 0 else text


def env_error(error: BaseException) -> EnvError:
    """An exception of somebody's tools as plain data; its text may be missing or huge."""
    if isinstance(error, EnvError):
        return error
    try:
        text = str(error)
    except Exception:
        text = ""
    return EnvError(type(error).__name__, cut(text, 500))


# ------------------------------------------------------------------------- this process


class _Done:
    """A Pending whose operation has already run."""

    def __init__(self, value, error: EnvError | None = None):
        self._value, self._error = value, error

    def ready(self) -> bool:
        return True

    def result(self):
        if self._error is not None:
            raise self._error
        return self._value


class InProcessHost:
    """Implements Host over a suite, without limits on time and memory. An operation runs when
    it is asked for, so it is ready from the beginning."""

    def __init__(self, suite: Suite, output_chars: int = HostConfig.output_chars):
        self.crashes: collections.Counter[Crash] = collections.Counter()
        self.replaced = 0
        self._suite, self._output_chars = suite, output_chars
        self._ids = itertools.count()
        self._tasks: dict[int, tuple[Task, bool]] = {}
        self._envs: dict[int, Environment] = {}

    def start(self, task: Task, hints: bool) -> int:
        rollout = next(self._ids)
        self._tasks[rollout] = task, hints
        return rollout

    def execute(self, rollout: int, calls: Sequence[ToolCall]) -> Pending[tuple[ToolResult, ...]]:
        return self._run(rollout, lambda env: tuple(
            run_call(env, call, self._output_chars) for call in calls))

    def end_turn(self, rollout: int, said: str) -> Pending[Closed]:
        return self._run(rollout, lambda env: close_turn(env, said))

    def _run(self, rollout: int, operate: Callable[[Environment], object]) -> Pending:
        if rollout not in self._tasks:
            raise ValueError(f"rollout {rollout} is not live: start it first")
        try:
            if rollout not in self._envs:
                self._envs[rollout] = open_env(self._suite, *self._tasks[rollout])
            return _Done(operate(self._envs[rollout]))
        except KeyboardInterrupt:
            raise
        # The environment broke, by no fault of the policy; a simulator may even call exit.
        except BaseException as error:
            return _Done(None, env_error(error))

    def finish(self, rollout: int) -> None:
        self._tasks.pop(rollout, None)
        self._envs.pop(rollout, None)

    def poll(self) -> None:
        pass

    def wait(self, pendings: Collection[Pending]) -> None:
        any_ready(pendings)

    def close(self) -> None:
        self._tasks.clear()
        self._envs.clear()
