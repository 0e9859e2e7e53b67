"""An append-only record of synthesis outcomes, so that a killed run goes on where it was.

First line: what the outcomes depend on. Then one outcome a line, in order of attempts. A
last line that was cut off by a kill is dropped; any other damage is an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from rods_jax.synthesis.outcome import Outcome, outcome_from_json
from rods_jax.types import Json


class Journal:
    """Opens or begins the file; `outcomes` are those that it held, `append` adds one.

    Raises ValueError when the file was written under another `header` or is damaged."""

    def __init__(self, path: str | os.PathLike, header: Mapping[str, Json]):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = self._cut_torn_line()
        self.outcomes: list[Outcome] = []
        for number, line in enumerate(whole, start=1):
            try:
                row = json.loads(line)
                if number > 1:
                    self.outcomes.append(outcome_from_json(row))
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{self.path}, line {number}: damaged ({error}); remove the "
                                 "lines from there on, or the file to begin anew") from error
            if number == 1 and row != header:
                raise ValueError(f"{self.path} was begun with other settings"
                                 f"{_difference(row, header)}; give those, another --out, or "
                                 "remove the file")
        self._file: BinaryIO = open(self.path, "ab")
        if not whole:
            self._write(header)

    def append(self, outcome: Outcome) -> None:
        self._write(outcome.to_json())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def _write(self, row: Mapping[str, Json]) -> None:
        self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def _cut_torn_line(self) -> list[bytes]:
        if not self.path.exists():
            return []
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            with open(self.path, "r+b") as file:
                file.truncate(whole)
        return data[:whole].splitlines()


def _difference(old: Json, new: Mapping[str, Json]) -> str:
    if not isinstance(old, Mapping):
        return ""
    for key in new:
        if old.get(key) != new[key]:
            return f" ({key} was {old.get(key)!r}, now {new[key]!r})"
    return ""
