"""Which tasks exist already, so that a variant is told from them.

A variant is refused where it equals a known task (seed, pool task or other candidate) in
content, in what is said or in what is done:

* same content or same text: the agent sees the same task again;
* same gold calls: whatever the words, there is nothing new to do, and a policy that knows the
  first by heart solves the second.

An equal entity-masked text does not refuse: a template writer has a finite stock of sentences,
the calls and the world still differ, and short requests ("sign in with _") would soon be used
up. It is counted instead (`repeats`). Against held-in tasks all forms refuse, the masked one
too: see tasks/leakage.py.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

from rods_jax.tasks.fingerprint import Fingerprint, fingerprint
from rods_jax.types import Task


class Novelty(str, enum.Enum):
    """Why a task is not new."""

    CONTENT = "same_content"
    TEXT = "same_text"
    GOLD = "same_gold"


_FIELDS = {Novelty.CONTENT: "content", Novelty.TEXT: "text", Novelty.GOLD: "gold"}
_MASKED = "masked"
_REPEATS = "repeats"


class Known:
    """A growing set of tasks, kept by their hashes alone. `repeats`: how many of those that
    `add` took share the masked text of an earlier one."""

    def __init__(self, tasks: Iterable[Task | Fingerprint] = ()):
        self._seen: dict[str, set[str]] = {name: set() for name in (*_FIELDS.values(), _MASKED)}
        self.repeats = 0
        for task in tasks:
            self._take(_print(task))

    def refuse(self, task: Task | Fingerprint) -> Novelty | None:
        """The first reason why the task is not new, or None. Changes nothing."""
        found = _print(task)
        for reason, name in _FIELDS.items():
            if getattr(found, name) in self._seen[name]:
                return reason
        return None

    def add(self, task: Task | Fingerprint) -> None:
        found = _print(task)
        self.repeats += found.masked in self._seen[_MASKED]
        self._take(found)

    def update(self, tasks: Iterable[Task | Fingerprint]) -> None:
        for task in tasks:
            self.add(task)

    def _take(self, found: Fingerprint) -> None:
        for name, seen in self._seen.items():
            value = getattr(found, name)
            if value is not None:
                seen.add(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Known) and self.to_json() == other.to_json()

    __hash__ = None  # it grows

    def to_json(self) -> list[str]:
        """"kind:hash" of all, sorted, and "repeats:n"."""
        rows = [f"{name}:{value}" for name, seen in self._seen.items() for value in seen]
        return [*sorted(rows), f"{_REPEATS}:{self.repeats}"]

    @classmethod
    def from_json(cls, rows: Sequence[str]) -> Known:
        """What `to_json` wrote. ValueError, one line, on anything else."""
        known = cls()
        for row in rows:
            kind, _, value = row.partition(":") if isinstance(row, str) else ("", "", "")
            if kind in known._seen and value:
                known._seen[kind].add(value)
            elif kind == _REPEATS and value.isdecimal():
                known.repeats = int(value)
            else:
                raise ValueError(f"not a record of known tasks: {row!r}; begin the run anew")
        return known


def _print(task: Task | Fingerprint) -> Fingerprint:
    return task if isinstance(task, Fingerprint) else fingerprint(task)
