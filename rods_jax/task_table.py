"""The host's side of the pool: which task a serial number stands for, and its prompt.

The device knows a task by an int32 serial number; the table knows the task, its prompt ids
and the codec that made them. Serial numbers are never used twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rods_jax.rollout.engine import Prompt
from rods_jax.types import Json, Source, Task


class TaskTable:
    def __init__(self, make_prompt: Callable[[Task], Prompt]):
        self._make_prompt = make_prompt
        self._prompts: dict[int, Prompt] = {}
        self._serials: dict[str, int] = {}
        self._next = 0

    def add(self, task: Task) -> int:
        """Gives the task its serial number. Raises ValueError if its uid is already there."""
        if task.uid in self._serials:
            raise ValueError(f"task {task.uid} is in the table already")
        serial, self._next = self._next, self._next + 1
        self._put(serial, task)
        return serial

    def _put(self, serial: int, task: Task) -> None:
        self._prompts[serial] = self._make_prompt(task)
        self._serials[task.uid] = serial

    def prompt(self, serial: int) -> Prompt:
        return self._prompts[serial]

    def serial(self, uid: str | None) -> int:
        """The serial number of a uid, -1 for one that is not (or no longer) in the table."""
        return self._serials.get(uid, -1)

    def forget(self, serials: Iterable[int]) -> None:
        """Drops tasks that left the pool for good."""
        for serial in serials:
            del self._serials[self._prompts.pop(serial).task.uid]

    def serials(self) -> list[int]:
        return list(self._prompts)

    def state(self) -> dict[str, Json]:
        """What a restart needs beside the seeds: the generated tasks."""
        return {"next": self._next,
                "generated": [[serial, prompt.task.to_json()]
                              for serial, prompt in self._prompts.items()
                              if prompt.task.source is Source.GENERATED]}

    def restore(self, state: Mapping[str, Json]) -> None:
        """Adds the generated tasks of a saved table to one that holds the seeds."""
        for serial, row in state["generated"]:
            self._put(serial, Task.from_json(row))
        self._next = state["next"]
