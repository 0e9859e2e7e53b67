"""What runs in a worker process: a suite of its own, and the environments of many rollouts.

    python -m rods_jax.tools.worker REQUESTS ANSWERS LIFELINE

The arguments are numbers of open pipe ends. REQUESTS brings frames that are done in order,
ANSWERS takes the answers, LIFELINE says nothing and closes with the parent. A frame is its
length (4 bytes) and a JSON list. This process never imports jax.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import BinaryIO

from rods_jax.tasks.replay import gold_transcript, play
from rods_jax.tools.env import Environment, Suite
from rods_jax.tools.host import EnvError, close_turn, env_error, open_env, run_call
from rods_jax.tools.suites import SuiteSpec, make_suite
from rods_jax.types import Json, Task, ToolCall

LENGTH = struct.Struct("!I")
MEMORY_EXIT = 86  # exit code of a worker that met its memory limit
REPORT_S = 0.05  # most time without a word while quick tasks are played


class Request(IntEnum):
    """First entry of a frame to the worker. Those with an answer come first."""

    HELLO = 0  # spec, output_chars, memory_mb -> [None] when the suite is made
    START = 1  # rollout, task number, hints -> [None]
    EXECUTE = 2  # rollout, [[name, arguments], ...] -> [[text, ok]], one frame a call
    END = 3  # rollout, said -> [[outcome, turn or None]]
    PLAY = 4  # [[task number, transcript or None for gold], ...], texts -> [row, ...], frames
    TASK = 5  # task number, task
    FORGET = 6  # task number
    FINISH = 7  # rollout


class Answer(IntEnum):
    """First entry of a frame from the worker."""

    ROWS = 0  # list of rows, see Request
    ERROR = 1  # what was raised instead: type name, text; ends the answer


def frame(message: list[Json]) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return LENGTH.pack(len(body)) + body


def frames(stream: BinaryIO) -> Iterator[list[Json]]:
    """The frames of a stream until it ends."""
    while len(head := stream.read(LENGTH.size)) == LENGTH.size:
        yield json.loads(stream.read(LENGTH.unpack(head)[0]))


def limit_memory(memory_mb: int) -> None:
    """What may be allocated from now on, where the system tells our size (Linux)."""
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm", encoding="ascii") as sizes:
            size = int(sizes.read().split()[0]) * resource.getpagesize()
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = size + memory_mb * 2**20
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def end_with(lifeline: int) -> None:
    """The kernel ends this process when the other end of the pipe closes, also while a tool
    spins in C. (The kernel's own parent-death signal would come when the thread that started
    us ends.) Where that is not to be had, the end of REQUESTS ends an idle worker."""
    if hasattr(fcntl, "F_SETOWN") and hasattr(os, "O_ASYNC"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)  # SIGIO, which ends a process


class Worker:
    """`send` takes one answer frame."""

    def __init__(self, send: Callable[[list[Json]], None]):
        self._send = send
        self._suite: Suite | None = None
        self._output_chars = 0
        self._tasks: dict[int, Task | EnvError] = {}
        self._rollouts: dict[int, Environment | EnvError] = {}
        self._do = {
            Request.HELLO: self._hello, Request.START: self._start,
            Request.EXECUTE: self._execute, Request.END: self._end, Request.PLAY: self._play,
            Request.TASK: self._task, Request.FORGET: self._forget,
            Request.FINISH: self._finish}

    def serve(self, message: list[Json]) -> None:
        """Does one request. Whatever the tools raise is an answer, as long as there is
        memory: without it, nothing of this process can be relied on."""
        try:
            self._do[message[0]](*message[1:])
        except MemoryError:
            os._exit(MEMORY_EXIT)
        except BaseException as error:  # SystemExit and KeyboardInterrupt of a tool included
            if message[0] >= Request.TASK:  # nobody waits for an answer to it
                raise
            found = env_error(error)
            self._send([Answer.ERROR, found.kind, found.text])

    def _hello(self, spec: Json, output_chars: int, memory_mb: int) -> None:
        self._suite, self._output_chars = make_suite(SuiteSpec.from_json(spec)), output_chars
        gc.collect()
        gc.freeze()  # what the suite has loaded stays as long as we do
        limit_memory(memory_mb)
        self._send([Answer.ROWS, [None]])

    def _task(self, number: int, task: Json) -> None:
        try:
            self._tasks[number] = Task.from_json(task)
        except ValueError as error:  # said by whatever needs the task
            self._tasks[number] = env_error(error)

    def _known(self, number: int) -> Task:
        task = self._tasks[number]
        if isinstance(task, EnvError):
            raise task
        return task

    def _forget(self, number: int) -> None:
        self._tasks.pop(number, None)

    def _start(self, rollout: int, number: int, hints: bool) -> None:
        try:
            self._rollouts[rollout] = open_env(self._suite, self._known(number), hints)
        except MemoryError:
            raise
        except EnvError as error:
            self._rollouts[rollout] = error
        except BaseException as error:  # said again by every operation
            self._rollouts[rollout] = env_error(error)
        self._send([Answer.ROWS, [None]])

    def _env(self, rollout: int) -> Environment:
        env = self._rollouts[rollout]
        if isinstance(env, EnvError):
            raise env
        return env

    def _execute(self, rollout: int, calls: list[Json]) -> None:
        env = self._env(rollout)
        for name, arguments in calls:
            result = run_call(env, ToolCall(name, arguments), self._output_chars)
            self._send([Answer.ROWS, [[result.text, bool(result.ok)]]])

    def _end(self, rollout: int, said: str) -> None:
        outcome, turn = close_turn(self._env(rollout), said)
        shown = turn and [turn.index, turn.text, list(turn.tools), list(turn.new_tools)]
        self._send([Answer.ROWS, [[outcome_row(outcome), shown]]])

    def _finish(self, rollout: int) -> None:
        self._rollouts.pop(rollout, None)

    def _play(self, items: list[Json], texts: bool) -> None:
        rows, told = [], time.monotonic()
        for number, transcript in items:
            if rows and time.monotonic() - told > REPORT_S:
                self._send([Answer.ROWS, rows])
                rows, told = [], time.monotonic()
            rows.append(self._play_one(number, transcript, texts))
        self._send([Answer.ROWS, rows])

    def _play_one(self, number: int, transcript: Json, texts: bool) -> Json:
        """[type name, text] of what was raised, or [outcomes, results, turns given]."""
        try:
            task = self._known(number)
            turns = gold_transcript(task) if transcript is None else [
                [[ToolCall(*call) for call in step] for step in turn] for turn in transcript]
            done = play(self._suite, task, turns)
        except MemoryError:
            raise
        except EnvError as error:
            return [error.kind, error.text]
        except BaseException as error:
            found = env_error(error)
            return [found.kind, found.text]
        results = [[r.text, bool(r.ok)] for r in done.results] if texts else []
        return [[outcome_row(o) for o in done.outcomes], results, done.n_given]


def outcome_row(outcome) -> Json:
    return [bool(outcome.state_ok), bool(outcome.exec_ok), outcome.n_calls, outcome.n_errors]


def main(requests: int, answers: int, lifeline: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    for end in (requests, answers, lifeline):
        os.set_inheritable(end, False)
    end_with(lifeline)
    with os.fdopen(requests, "rb") as stream, os.fdopen(answers, "wb") as out:
        own = os.getpid()

        def send(message: list[Json]) -> None:
            if os.getpid() != own:  # a tool has forked, and this is not the worker
                os._exit(0)
            out.write(frame(message))
            out.flush()

        worker = Worker(send)
        try:
            for message in frames(stream):
                worker.serve(message)
        except BrokenPipeError:  # nobody listens any more
            os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
