"""Task files: one JSON object a line, read strictly and written atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from rods_jax.types import Task


def read_tasks(path: str | os.PathLike) -> list[Task]:
    """All tasks of a JSON-lines file; empty lines are skipped.

    Raises ValueError, one line, that names the file, the line, the field and the remedy.
    Two tasks with one uid are an error too, since the pool tells tasks apart by uid.
    """
    tasks, line_of = [], {}
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                task = Task.from_json(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: not JSON ({error.msg}, column {error.colno}); "
                                 "write one task a line") from error
            except ValueError as error:
                raise ValueError(
                    f"{where}: {error}; correct that field or drop the line") from error
            if task.uid in line_of:
                raise ValueError(f"{where}: uid {task.uid!r} was used in line "
                                 f"{line_of[task.uid]}; give every task its own uid")
            line_of[task.uid] = number
            tasks.append(task)
    return tasks


def write_tasks(path: str | os.PathLike, tasks: Iterable[Task]) -> None:
    """Writes a JSON-lines file; after a crash `path` holds all of the old or all of the new."""
    lines = (json.dumps(task.to_json(), ensure_ascii=False) + "\n" for task in tasks)
    write_atomically(path, lines)


def write_atomically(path: str | os.PathLike, lines: Iterable[str]) -> None:
    """Text to a temporary file beside `path`, synced, then renamed over it."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as out:
            out.writelines(lines)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
