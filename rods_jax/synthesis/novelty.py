"""Which tasks exist already, so that none is made twice."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from rods_jax.types import Task


class Novelty(str, enum.Enum):
    """Why a task is not new."""

    CONTENT = "same_content"


class Known:
    """Fingerprints of the tasks that exist."""

    def __init__(self, tasks: Iterable[Task] = ()):
        self._content: set[str] = set()
        self.update(tasks)

    def refuse(self, task: Task) -> Novelty | None:
        """Why the task is not new, or None. Pure: counts nothing."""
        return Novelty.CONTENT if task.content_hash in self._content else None

    def add(self, task: Task) -> None:
        self._content.add(task.content_hash)

    def update(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            self.add(task)

    def to_json(self) -> list[str]:
        return sorted(self._content)

    @classmethod
    def from_json(cls, row: Iterable[str]) -> Known:
        known = cls()
        known._content.update(row)
        return known
