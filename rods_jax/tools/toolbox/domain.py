"""What the four domains share: plain comparable state, made from JSON and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from rods_jax.tools.toolbox.entities import Maker
from rods_jax.tools.toolbox.signature import Tool, ToolError
from rods_jax.types import copy_json

UPCOMING = 9  # ids a world holds ready; a task makes at most that many calls


@dataclasses.dataclass
class Domain:
    """State of one domain. Fields are JSON data; two states compare with `==`.

    A tool is a method of the tool's name that returns a JSON object or raises ToolError.
    `prepare` is for planning: it adds to the INITIAL state (and to this live one) what the
    coming call needs, and says False where that cannot be done without changing the past.
    """

    NAME: ClassVar[str] = ""
    TOOLS: ClassVar[tuple[Tool, ...]] = ()
    DOOR: ClassVar[str] = ""  # the tool to call before most others, or ""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]):
        """Raises ValueError where the fields are not those of the domain."""
        fields = [f.name for f in dataclasses.fields(cls)]
        if list(config) != fields and set(config) != set(fields):
            raise ValueError(f"config of {cls.NAME} has fields {sorted(config)}, needs {fields}")
        return cls(**{name: copy_json(config[name]) for name in fields})

    def to_config(self) -> dict[str, Any]:
        return {f.name: copy_json(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def blank(cls, maker: Maker):
        """A world in which nothing exists yet but ids to come; the door is shut."""
        raise ValueError(f"{cls.__name__} is not a world of its own")

    def is_open(self) -> bool:
        """Whether the door is open now, or there is none."""
        return True

    def open_door(self, initial: Domain, maker: Maker) -> None:
        """Planning: the world starts with the door open."""

    def prepare(self, tool: str, args: Mapping[str, Any], initial: Domain, maker: Maker) -> bool:
        del tool, args, initial, maker
        return True

    def clutter_up(self, surfaces: list[str]) -> None:
        """Adds real but unneeded entries, which listing tools then show."""

    def has(self, kind: str, value: str) -> bool:
        """Whether a value of a kind that this domain owns can be used now."""
        del kind, value
        return True


def take(ids: list) -> Any:
    """The next of the ids a world holds ready."""
    if not ids:
        raise ToolError("limit reached")
    return ids.pop(0)
