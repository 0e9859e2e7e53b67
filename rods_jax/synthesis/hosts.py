"""Where the synthesizer runs, as the trainer sees it. The folder between them is the same."""

from __future__ import annotations

import contextlib
import enum
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from rods_jax.synthesis.exchange import LOG, Header
from rods_jax.synthesis.journal import Stopped
from rods_jax.synthesis.pipeline import Maker
from rods_jax.synthesis.worker import Bell, OutageStop, serve

MOST_RESTARTS = 3  # of a synthesizer that brings no outcome in between
LOCK_WAIT_S = 30.0  # for the synthesizer of a trainer that was killed just now to end
STOPPED_EXIT = 3  # of a synthesizer that stopped because its endpoint is down


class Host(str, enum.Enum):
    THREAD = "thread"  # of the trainer
    PROCESS = "process"  # that the trainer starts and ends, with a Python of its own
    ELSEWHERE = "elsewhere"  # started by the user, on any machine that reaches the folder


class ThreadHost:
    """A daemon thread."""

    restarts = 0

    def __init__(self, folder: Path, make: Callable[[Header], Maker]):
        self._folder, self._make = folder, make
        self._bell, self._error = Bell(), None
        self.thread = threading.Thread(target=self._work, name="synthesizer", daemon=True)
        self.thread.start()

    def ring(self) -> None:
        """There are new requests."""
        self._bell.ring()

    def check(self, answered: int) -> None:
        """Raises what ended it. `answered`: outcomes seen so far."""
        if self._error is not None:
            raise self._error

    def close(self, timeout_s: float) -> None:
        """Lets the attempt at work end. TimeoutError when it hangs."""
        self._bell.stop()
        self.thread.join(timeout_s)
        if self.thread.is_alive():
            raise TimeoutError(f"the synthesizer's thread did not end within {timeout_s} s: "
                               "its attempt hangs in the suite")

    def _work(self) -> None:
        try:
            serve(self._folder, self._bell, self._make, lock_wait_s=LOCK_WAIT_S)
        except OutageStop:
            pass  # the folder says so
        except Exception as error:  # the trainer's thread is the one to raise it
            self._error = error


class ProcessHost:
    """`python -m experiments.synthesizer FOLDER`, a process that ends with this one, however
    that ends: it reads a pipe that this one alone holds open. One that dies is started again."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.restarts, self._barren, self._answered = 0, 0, 0
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # full: it has been rung
            os.write(self._process.stdin.fileno(), b"\n")

    def check(self, answered: int) -> None:
        if (code := self._process.poll()) is None or code == STOPPED_EXIT:
            return
        self._barren = 0 if answered > self._answered else self._barren
        self._answered = answered
        if self._barren == MOST_RESTARTS:
            log = self._folder / LOG
            said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-1:]
            raise Stopped(
                f"the synthesizer's process ended {MOST_RESTARTS + 1} times in a row, last with "
                f"exit code {code} ({''.join(said) or 'it said nothing'}); {log} has more, resume "
                "the run when that is mended")
        self._barren += 1
        self.restarts += 1
        self._process.stdin.close()
        self._start()

    def close(self, timeout_s: float) -> None:
        """Lets the attempt at work end, for so long."""
        self._process.stdin.close()
        for end in (self._process.terminate, self._process.kill):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
                return
            end()
        self._process.wait()

    def _start(self) -> None:
        with open(self._folder / LOG, "ab") as log:
            self._process = subprocess.Popen(
                # -P and the path: it imports what this process would.
                [sys.executable, "-P", "-m", "experiments.synthesizer", "--lifeline",
                 os.fspath(self._folder)],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
                stdin=subprocess.PIPE, stdout=log, stderr=log,
                start_new_session=True)  # Ctrl-C is the trainer's to handle
        os.set_blocking(self._process.stdin.fileno(), False)


class Elsewhere:
    """Nothing is started."""

    restarts = 0

    def __init__(self, folder: Path, say: Callable[[str], None]):
        say(f"synthesis: run `python -m experiments.synthesizer {folder.absolute()}` on any "
            "machine that reaches that folder")

    def ring(self) -> None:
        pass

    def check(self, answered: int) -> None:
        pass

    def close(self, timeout_s: float) -> None:
        pass


def start(host: Host, folder: Path, make: Callable[[Header], Maker],
          say: Callable[[str], None]) -> ThreadHost | ProcessHost | Elsewhere:
    if host is Host.THREAD:
        return ThreadHost(folder, make)
    return ProcessHost(folder) if host is Host.PROCESS else Elsewhere(folder, say)
