"""Append-only files of JSON lines, of which a kill leaves at most the last line torn.

`Appender` is the one writer of such a file, `Tail` any reader of it, also in another process
or on another machine. A last line without its end is dropped; any other damage is an error.

`Journal` is the record of the offline synthesis, so that a killed run goes on where it was.
Its first line: what the outcomes depend on. Then one outcome a line, in order of attempts.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from rods_jax.synthesis.outcome import Outcome, outcome_from_json
from rods_jax.types import Json


class JournalError(ValueError):
    """A file that cannot be used; one line that names it and the remedy."""


class Stopped(JournalError):
    """Synthesis does not go on by itself, though its files are sound: a run that is resumed may
    find it working again."""


class Appender:
    """Opens or begins the file; a torn last line is cut off."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: what `append` has written stays when this process is killed.
        self._file = open(self.path, "a+b", buffering=0)
        self._file.truncate(_whole(self._file))

    def append(self, rows: Iterable[Mapping[str, Json]]) -> None:
        """A line each, all of them or none where the disk is full."""
        left = memoryview(b"".join(
            json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
            for row in rows))
        size = os.fstat(self._file.fileno()).st_size
        try:
            while left:
                left = left[self._file.write(left):]
        except BaseException:
            self._file.truncate(size)  # else the next line would go on with half a line
            raise

    def check(self) -> None:
        """Raises JournalError where the file was removed or moved away: what is written to it
        would reach nobody."""
        mine = os.fstat(self._file.fileno())
        try:
            there = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            there = None
        if there is None or not os.path.samestat(mine, there):
            raise JournalError(f"{self.path}: removed, moved or replaced while it was written to; "
                               "put it back and resume the run, or begin it anew")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Appender:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()


def _whole(file) -> int:
    """Bytes up to the end of the last whole line; reads from the end."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 2**16)
        file.seek(start)
        if (newline := file.read(end - start).rfind(b"\n")) >= 0:
            return start + newline + 1
        end = start
    return 0


def sync(path: str | os.PathLike) -> None:
    """What anybody wrote to the file, if there is one, is on disk when this returns, so that a
    power cut does not take it either."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        os.fsync(file.fileno())


class Tail:
    """The lines of a file that may still grow, each read once."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.lines = 0  # read so far
        self._offset = 0

    def feed(self, take: Callable[[dict[str, Json]], None]) -> int:
        """Calls `take` with each new line and returns how many there were, none where there is
        no file yet. Raises JournalError, also for a line that `take` cannot read."""
        try:
            # Opened each time: a network file system looks at the server's copy only then.
            with open(self.path, "rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    raise JournalError(
                        f"{self.path}: lost lines that had been read already; resume the run "
                        "from its newest checkpoint")
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return 0
        lines = data.split(b"\n")[:-1]
        for line in lines:
            self.lines += 1
            self._offset += len(line) + 1
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("not an object")
                take(row)
            except JournalError:
                raise
            except (ValueError, TypeError, KeyError) as error:
                raise JournalError(
                    f"{self.path}, line {self.lines}: damaged ({error}); remove the lines from "
                    "there on, or the file to begin anew") from error
        return len(lines)


class Journal:
    """Opens or begins the file; `outcomes` are those that it held, `append` adds one.

    Raises JournalError when the file was written under another `header` or is damaged."""

    def __init__(self, path: str | os.PathLike, header: Mapping[str, Json]):
        self.path = Path(path)
        self.outcomes: list[Outcome] = []
        self._file = Appender(self.path)
        try:
            self._read(header)
        except JournalError:
            self._file.close()
            raise

    def _read(self, header: Mapping[str, Json]) -> None:
        def take(row: dict[str, Json]) -> None:
            if tail.lines > 1:
                self.outcomes.append(outcome_from_json(row))
            elif row != header:
                raise JournalError(f"{self.path} was begun with other settings"
                                   f"{_difference(row, header)}; give those, another --out, or "
                                   "remove the file")

        tail = Tail(self.path)
        if not tail.feed(take):
            self._file.append([header])

    def append(self, outcome: Outcome) -> None:
        self._file.append([outcome.to_json()])

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()


def _difference(old: Mapping[str, Json], new: Mapping[str, Json]) -> str:
    for key in new:
        if old.get(key) != new[key]:
            return f" ({key} was {old.get(key)!r}, now {new[key]!r})"
    return ""
