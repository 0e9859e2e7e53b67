"""Our end of the line to a peer: another sampler in a process of its own, which loads the
weights once and then waits for work, so that it is idle while another side runs."""

from __future__ import annotations

import enum
import json
import os
import pathlib
import queue
import subprocess
import tempfile
import threading
from collections.abc import Sequence

from rods_jax.config import UserError
from rods_jax.types import Json

FOLDER = pathlib.Path(".venv-bench")
ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMIT_S = 3600.0  # for one answer

# The comparison is on the CPU, and the weights come from a folder.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
               "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": ""}


class PeerName(enum.Enum):
    TRANSFORMERS = "transformers"
    TUNIX = "tunix"


def python_of(name: PeerName, folder: pathlib.Path, given: pathlib.Path | None) -> pathlib.Path:
    """The Python that has a peer installed. Raises UserError where there is none."""
    python = given or folder / name.value / "bin" / "python"
    if not os.access(python, os.X_OK) or python.is_dir():
        raise UserError(f"{name.value} has no Python at {python}: install it with "
                        f"`make bench-peers`, or leave it out with --without {name.value}")
    return python.absolute()  # not resolved: an environment's Python is a link out of it


class Peer:
    """A running peer. Raises UserError, in one line that names it, where it dies, answers
    nonsense, cannot do what it is asked or takes longer than `limit_s` seconds."""

    def __init__(self, name: str, command: Sequence[str], limit_s: float = LIMIT_S):
        self.name, self._limit_s = name, limit_s
        self._log = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            text=True, errors="replace", cwd=ROOT, env={**os.environ, **ENVIRONMENT})
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.greeting = self._answer("start")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, do: str, **what: Json) -> dict[str, Json]:
        """What the peer answers to one command."""
        try:
            self._process.stdin.write(json.dumps({"do": do, **what}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it is dead; so its output has ended as well
        return self._answer(do)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._log):
            try:
                stream.close()
            except BrokenPipeError:  # what was left to be written
                pass

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _read(self) -> None:
        with self._process.stdout as answers:
            for line in answers:
                self._lines.put(line)
        self._lines.put("")  # the end

    def _answer(self, do: str) -> dict[str, Json]:
        try:
            line = self._lines.get(timeout=self._limit_s)
        except queue.Empty:
            raise self._fault(f"has not answered {do} in {self._limit_s:.0f} s") from None
        if not line:
            self._lines.put("")  # whoever asks once more shall not wait
            code = self._process.wait()
            raise self._fault(f"ended with exit code {code} at {do}{self._last_words()}")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._fault(f"answered {do} with {line.strip()[:80]!r}, which is no JSON object")
        if "error" in answer:
            raise self._fault(f"could not {do}: {answer['error']}")
        return answer

    def number(self, answer: dict[str, Json], key: str) -> float:
        """A number of an answer."""
        value = answer.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise self._fault(f"answered {value!r} as {key}, which is no positive number")
        return value

    def _fault(self, what: str) -> UserError:
        return UserError(f"{self.name} {what}; install it anew with `make bench-peers`, or leave "
                         f"it out with --without {self.name}")

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return f" ({lines[-1][:300]})" if lines else ""
