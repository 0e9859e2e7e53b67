"""One worker process seen from its parent: its pipes, what it was asked, its clock.

Nothing here waits: bytes that a pipe does not take stay here, so that neither side can block
the other however long the answers and the queue are.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time

from rods_jax.tools.host import EnvError, Outage
from rods_jax.tools.worker import LENGTH, Answer, Request, frame
from rods_jax.types import Json, Task, ToolCall

_NAMES = {Request.START: "the making of its environment",
          Request.END: "the end of a turn, where gold calls run", Request.PLAY: "a replay"}
PIPE_BYTES = 2**20  # what a worker may be ahead of a parent that is busy elsewhere
# Of all pipes of a pool together. Beyond a user's share, 64 MiB as a rule, Linux gives all
# the user's programs pipes of 8 KiB.
PIPES_BYTES = 2**25
LEAST_PIPE_BYTES = 2**16  # what a pipe has by itself


@dataclasses.dataclass(eq=False)
class Rollout:
    """`home`: where its environment is. `history`: every operation so far. `lost`: why there
    will be no more answers."""

    number: int
    task: Task
    home: WorkerProcess
    history: list[Operation] = dataclasses.field(default_factory=list)
    lost: Exception | None = None


@dataclasses.dataclass(eq=False)
class Operation:
    """A request with an answer of `due` rows, at most `limit_s` seconds from one frame to the
    next, or an error. `lost`: why the answer never comes. `first`: what this one repeats."""

    request: Request
    arguments: list[Json]
    due: int
    limit_s: float
    rollout: Rollout | None = None
    tasks: tuple[tuple[int, Task], ...] = ()  # what the worker must know, by number
    calls: tuple[ToolCall, ...] = ()
    first: Operation | None = None
    rows: list[Json] = dataclasses.field(default_factory=list)
    error: EnvError | None = None
    lost: Exception | None = None
    begin: int = 0  # its frame's place in all that its worker was sent, in bytes
    end: int = 0

    @property
    def answered(self) -> bool:
        return self.error is not None or len(self.rows) >= self.due

    @property
    def settled(self) -> bool:
        return self.lost is not None or self.answered

    @property
    def call(self) -> ToolCall | None:
        """The one that runs while the operation does."""
        return self.calls[len(self.rows)] if len(self.rows) < len(self.calls) else None

    @property
    def shown(self) -> str:
        call = self.call
        if call is None:
            return _NAMES[self.request]
        text = " ".join(f"{call.name}({json.dumps(dict(call.arguments))})".split())
        return text if len(text) <= 100 else f"{text[:97]}..."

    def fresh(self) -> Operation:
        """The same to be sent to another worker: itself, or its repetition if answered."""
        if self.answered:
            return dataclasses.replace(self, first=self, rows=[], error=None)
        self.rows.clear()
        return self


class WorkerProcess:
    """`pipe_bytes`: of its requests and of its answers. `barren`: tasks over which the workers
    before it in this place were lost, "" for none, since one of them got an operation done.
    Raises Outage where no process can be started."""

    def __init__(self, hello: Operation, pipe_bytes: int, barren: tuple[str, ...] = ()):
        ends: list[int] = []
        try:
            for _ in range(3):
                ends.extend(os.pipe())
            requests_in, self.requests, self.answers, answers_out, *life = ends
            lifeline_in, self._lifeline = life
            theirs = (requests_in, answers_out, lifeline_in)
            self._process = subprocess.Popen(
                # -P and the path: the worker imports what this process would.
                [sys.executable, "-P", "-m", "rods_jax.tools.worker", *map(str, theirs)],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
                pass_fds=theirs, stdin=subprocess.DEVNULL, stdout=2,  # what tools print
                start_new_session=True)  # whatever tools start ends with their worker
        except OSError as error:
            for end in ends:
                os.close(end)
            raise Outage(f"tool workers cannot be started ({error}): set a lower workers.count, "
                         "or 0 to run the tools in this process") from error
        for end in theirs:
            os.close(end)
        for end in (self.requests, self.answers):
            os.set_blocking(end, False)
            _widen(end, pipe_bytes)
        self.queue: collections.deque[Operation] = collections.deque()
        self.rollouts: dict[int, Rollout] = {}
        self.barren = barren
        self.known: set[int] = set()  # numbers of tasks it was sent
        self.done = False  # an operation was answered
        self.running: Operation | None = None  # what it had begun when it ended
        self.closed = False  # it has closed its end: it is dead or dying
        self._inbox, self._outbox = bytearray(), bytearray()
        self._written = 0  # bytes of all that its pipe has taken
        self._since = time.monotonic()
        self.ask(hello)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None

    @property
    def writing(self) -> bool:
        return bool(self._outbox)

    @property
    def expires(self) -> float | None:
        """When the operation that runs is out of time (monotonic clock). The clock starts
        anew with everything the worker says, and while its request is still on its way."""
        return self._since + self.queue[0].limit_s if self.queue else None

    def ask(self, operation: Operation) -> None:
        for number, task in operation.tasks:
            if number not in self.known:
                try:
                    self.tell(Request.TASK, number, task.to_json())
                except (TypeError, ValueError) as error:
                    raise ValueError(f"task {task.uid}: it is not JSON data ({error}); use texts, "
                                     "numbers, lists and objects alone") from error
                self.known.add(number)
        operation.begin = self._written + len(self._outbox)
        self.tell(operation.request, *operation.arguments)
        operation.end = self._written + len(self._outbox)
        if not self.queue:
            self._since = time.monotonic()
        self.queue.append(operation)
        self.write()

    def tell(self, request: Request, *arguments: Json) -> None:
        """Something without an answer, sent with what comes next."""
        self._outbox += frame([request, *arguments])

    def forget(self, number: int) -> None:
        if number in self.known:
            self.known.remove(number)
            self.tell(Request.FORGET, number)

    def finish(self, rollout: int) -> None:
        if self.rollouts.pop(rollout, None) is not None:
            self.tell(Request.FINISH, rollout)
            self.write()

    def write(self) -> None:
        while self._outbox:
            try:
                n = os.write(self.requests, self._outbox)
            except BlockingIOError:
                return
            except OSError:  # nobody reads: the end of its answers will tell
                self._outbox.clear()
                return
            if self.queue and self.queue[0].end > self._written:
                self._since = time.monotonic()
            self._written += n
            del self._outbox[:n]

    def read(self) -> list[tuple[Answer, list[Json]]]:
        """All whole answers that are here."""
        while not self.closed:
            try:
                data = os.read(self.answers, PIPE_BYTES)
            except BlockingIOError:
                break
            self.closed = not data
            self._inbox += data
            self._since = time.monotonic()
        found, start = [], 0
        while len(self._inbox) - start >= LENGTH.size:
            end = start + LENGTH.size + LENGTH.unpack_from(self._inbox, start)[0]
            if len(self._inbox) < end:
                break
            kind, *rest = json.loads(self._inbox[start + LENGTH.size:end])
            found.append((Answer(kind), rest))
            start = end
        del self._inbox[:start]
        return found

    def _taken(self) -> int:
        """Bytes that the worker has taken out of its pipe. It reads ahead only when it is
        not waiting, so what it has not taken it has not begun."""
        left = fcntl.ioctl(self.requests, termios.FIONREAD, bytes(4))
        return self._written - int.from_bytes(left, sys.byteorder)

    def dismiss(self) -> None:
        """An idle worker ends by itself after this."""
        if self.requests >= 0:
            os.close(self.requests)
            self.requests = -1

    def end(self) -> int:
        """Kills the process and what it has started, if need be, and takes leave of it.
        Returns how it ended as subprocess has it: of a process that was ending by itself,
        its own exit code or signal."""
        if not self.ended:
            os.killpg(self._process.pid, signal.SIGKILL)  # no other's: it is not reaped yet
            self._process.wait()
            if self.queue and self.queue[0].begin < self._taken():
                self.running = self.queue[0]
            self.dismiss()
            os.close(self.answers)
            os.close(self._lifeline)
        return self._process.returncode


def call_row(call: ToolCall) -> Json:
    return [call.name, dict(call.arguments)]


def pipe_share(count: int) -> int:
    """Of one pipe where a pool has `count` workers, a power of two."""
    share = PIPES_BYTES // (2 * count)
    return max(LEAST_PIPE_BYTES, min(PIPE_BYTES, 1 << share.bit_length() >> 1))


def _widen(pipe: int, size: int) -> None:
    """If the system lets us; a narrow pipe only makes a worker wait for us earlier."""
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, size)
