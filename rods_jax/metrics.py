"""What a run tells: a line of JSON a step, a live line for the person, a count of compiles."""

from __future__ import annotations

import collections
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import jax.monitoring
import numpy as np

from rods_jax.config import UserError, write_text
from rods_jax.types import Json

FILE = "metrics.jsonl"  # its name in a run folder
ZONES = ("hard", "boundary", "mastered", "silent")
_COMPILED = "/jax/core/compile/backend_compile_duration"
_TRACED = "/jax/core/compile/jaxpr_trace_duration"


# ---------------------------------------------------------------- the record on disk


def read(path: str | os.PathLike) -> list[dict[str, Json]]:
    """The lines of a metrics file in order; a last line that a kill cut short is left out.
    Raises UserError for any other damage, FileNotFoundError."""
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    except UnicodeDecodeError as e:
        raise UserError(f"{path}: not UTF-8 ({e}); restore the file") from e
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise ValueError("not an object with a whole number `step`")
        except ValueError as e:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise UserError(f"{path}: line {number} is damaged ({e}); remove that line") from e
        rows.append(row)
    return rows


class MetricWriter:
    """Appends one JSON object a step to a file, each line whole on disk when `write` returns.

    `keep_through`: lines of later steps are dropped at the start, which is how a resumed run
    takes up its file again: pass the restored step, or -1 to begin anew.
    """

    def __init__(self, path: str | os.PathLike, keep_through: int):
        self.path = pathlib.Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if self.path.exists() and keep_through >= 0:
            kept = [row for row in read(self.path) if row["step"] <= keep_through]
        self.last_step = kept[-1]["step"] if kept else None
        write_text(self.path, "".join(map(_line, kept)))
        self._file = open(self.path, "a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """`metrics`: numbers, text, None, 0-d arrays or lists of them. What is not finite is
        written as null. Raises ValueError if `step` does not grow, UserError if the file was
        removed: what is written then is in no folder."""
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(f"{self.path}: step {step} comes after step {self.last_step}; "
                             "steps must grow")
        if not self.path.exists():
            raise UserError(f"{self.path}: was removed while the run wrote to it; begin the run "
                            "anew")
        self._file.write(_line({"step": int(step), **metrics}))
        self._file.flush()
        self.last_step = step

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps({k: _json(v) for k, v in row.items()}, allow_nan=False) + "\n"


def _json(value: Any) -> Json:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(k): _json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return _json(np.asarray(value).tolist())


# ---------------------------------------------------------------- the live line


class Progress:
    """One line about where a run stands: rewritten in place on a terminal, a plain line every
    `plain_every_s` seconds elsewhere. `start` is the step a resumed run begins at."""

    def __init__(self, total_steps: int, start: int = 0, stream: TextIO | None = None,
                 plain_every_s: float = 10.0, clock: Callable[[], float] = time.monotonic):
        self._total = total_steps
        self._step = start
        self._stream = sys.stderr if stream is None else stream
        self._tty = self._stream.isatty()
        self._every = plain_every_s
        self._clock = clock
        self._last_update = clock()
        self._last_line = -math.inf
        self._seconds_a_step: float | None = None
        self._width = 0  # of the live line on the screen

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows the state after `step` steps."""
        now = self._clock()
        if step > self._step:
            pace = (now - self._last_update) / (step - self._step)
            old = self._seconds_a_step
            # Exponential smoothing: steady enough to read, quick enough to follow longer
            # dialogues later in training.
            self._seconds_a_step = pace if old is None else 0.8 * old + 0.2 * pace
        self._step, self._last_update = step, now
        line = self._text(step, metrics)
        if self._tty:
            self._rewrite(line)
        elif now - self._last_line >= self._every or step >= self._total:
            self._last_line = now
            print(line, file=self._stream, flush=True)

    def note(self, text: str) -> None:
        """A line of its own, above the live line."""
        if self._tty and self._width:
            self._rewrite("")
            self._stream.write("\r")
        print(text, file=self._stream, flush=True)
        self._width = 0

    def close(self) -> None:
        """Leaves the last state on the screen and goes to the next line."""
        if self._tty and self._width:
            self._stream.write("\n")
            self._stream.flush()
        self._width = 0

    def _rewrite(self, line: str) -> None:
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError):
            columns = 200
        line = line[:max(columns - 1, 20)]  # a wrapped line could not be taken back
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)

    def _text(self, step: int, metrics: Mapping[str, Any]) -> str:
        parts = [f"step {step}/{self._total}"]
        if (reward := _number(metrics.get("reward_mean"))) is not None:
            parts.append(f"reward {reward:.3f}")
        shares = [(zone, _number(metrics.get(f"zone_{zone}"))) for zone in ZONES]
        if any(share is not None for _, share in shares):
            parts.append(" ".join(f"{zone} {share:.0%}" for zone, share in shares
                                  if share is not None))
        if (pool := _number(metrics.get("pool_active"))) is not None:
            parts.append(f"pool {pool:.0f}")
        if (speed := _number(metrics.get("tokens_per_s"))) is not None:
            parts.append(f"{speed:,.0f} tok/s")
        if self._seconds_a_step is not None and step < self._total:
            parts.append(f"{duration((self._total - step) * self._seconds_a_step)} left")
        return " | ".join(parts)


def _number(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def duration(seconds: float) -> str:
    """`42 s`, `3 min 05 s`, `2 h 10 min`."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"


# ---------------------------------------------------------------- compiles


class CompileCounter:
    """Counts jax's traces and compiles by function name while it is open.

        with CompileCounter() as compiles:
            warm_up()
            before = compiles.counts()
            train()
            assert not compiles.since(before)

    Reads jax.monitoring's events, so it sees every compile of the process, also those of
    libraries. `seconds` is the time the compiler took.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._compiled: collections.Counter[str] = collections.Counter()
        self._traced: collections.Counter[str] = collections.Counter()

    def __enter__(self) -> CompileCounter:
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def counts(self) -> dict[str, int]:
        """Function name -> compiles so far."""
        return dict(self._compiled)

    def traces(self) -> dict[str, int]:
        """Function name -> traces so far (a trace may find a compiled program again)."""
        return dict(self._traced)

    @property
    def total(self) -> int:
        return self._compiled.total()

    def since(self, before: Mapping[str, int]) -> dict[str, int]:
        """What was compiled since `before = counts()`."""
        return {name: n - before.get(name, 0) for name, n in self._compiled.items()
                if n > before.get(name, 0)}

    def _listen(self, event: str, seconds: float, **details: Any) -> None:
        name = str(details.get("fun_name", "unnamed"))
        name = name.removeprefix("jit(").removesuffix(")") if name.startswith("jit(") else name
        if event == _COMPILED:
            self._compiled[name] += 1
            self.seconds += seconds
        elif event == _TRACED:
            self._traced[name] += 1
