"""What two tasks of one structure share: the tools by turn and what feeds what.

Every argument of a gold call has a source: the user said it, an earlier argument is said
again, or an earlier result holds it. Read off by running the gold calls.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from rods_jax.tools.toolbox.graph import TOOLS
from rods_jax.tools.toolbox.world import make_world, run_tool
from rods_jax.types import Category, Task


@dataclasses.dataclass(frozen=True)
class CallShape:
    """One gold call: how many arguments the user newly gave, how many repeat an earlier
    argument, and which earlier calls (flat index) feed it with results."""

    turn: int
    tool: str
    said: int
    again: int
    feeds: frozenset[int]


def words_of(text: str) -> list[str]:
    """Words of a user text without the punctuation at their end."""
    return [w for w in (word.rstrip(",.?") for word in text.split()) if w]


def flatten(value: Any) -> list[str]:
    """Keys and scalar values of JSON data as words, in order."""
    if isinstance(value, dict):
        return [w for k, v in value.items() for w in (*str(k).split(), *flatten(v))]
    if isinstance(value, (list, tuple)):
        return [w for v in value for w in flatten(v)]
    return str(value).split()


def gold_results(task: Task) -> list[tuple[int, Any, bool]]:
    """(turn, JSON result, ok) of every gold call, run in order on a fresh world."""
    world = make_world(task.initial_config)
    rows = []
    for index, turn in enumerate(task.turns):
        visible = frozenset(turn.tools)
        for call in turn.gold:
            result = run_tool(world, call.name, call.arguments, visible)
            rows.append((index, json.loads(result.text), result.ok))
    return rows


def call_shapes(task: Task, strict: bool = False) -> tuple[CallShape, ...]:
    """The gold calls' shapes in the BASE form: turns without gold are not counted.

    An argument whose source is not seen counts as said, or if `strict` raises ValueError;
    so does a tool that is not of this suite.
    """
    results = [flatten(result) for _, result, _ in gold_results(task)]
    said: set[str] = set()
    given: set[str] = set()
    shapes: list[CallShape] = []
    turn_index = 0
    for turn in task.turns:
        said.update(words_of(turn.user))
        for call in turn.gold:
            if call.name not in TOOLS:
                raise ValueError(f"{task.uid}: {call.name!r} is not a tool of the toolbox")
            feeds: set[int] = set()
            n_said = n_again = 0
            for param in TOOLS[call.name].params:
                word = str(call.arguments.get(param.name, ""))
                source = next((i for i in range(len(shapes)) if word in results[i]), None)
                if word in said:
                    repeats = word in given and param.kind != "currency"
                    n_again, n_said = n_again + repeats, n_said + (not repeats)
                elif source is not None:
                    feeds.add(source)
                elif word in given:
                    n_again += 1
                elif not strict:
                    n_said += 1
                else:
                    raise ValueError(f"{task.uid}: argument {word!r} of {call.name} has no source")
            given.update(str(v) for v in call.arguments.values())
            shapes.append(CallShape(turn_index, call.name, n_said, n_again, frozenset(feeds)))
        turn_index += bool(turn.gold)
    return tuple(shapes)


def pointed(task: Task) -> tuple[int, ...]:
    """Of each gold call, how many arguments the user gave in an earlier turn and does not say
    again in this one (turns without gold are one with the next)."""
    before: set[str] = set()
    now: set[str] = set()
    counts = []
    for turn in task.turns:
        now.update(words_of(turn.user))
        for call in turn.gold:
            values = {str(v) for v in call.arguments.values()}
            counts.append(len((values & before) - now))
        if turn.gold:
            before |= now
            now = set()
    return tuple(counts)


def depth(shapes: tuple[CallShape, ...]) -> int:
    """Edges on the longest chain of calls in which each feeds the next."""
    levels: list[int] = []
    for shape in shapes:
        levels.append(1 + max((levels[i] for i in shape.feeds), default=-1))
    return max(levels, default=0)


def base_key(shapes: tuple[CallShape, ...]) -> str:
    """Stable text for tools by turn and edges, e.g. "find_file,open_folder;read_file|0>1"."""
    turns: dict[int, list[str]] = {}
    for shape in shapes:
        turns.setdefault(shape.turn, []).append(shape.tool)
    edges = [f"{i}>{j}" for j, shape in enumerate(shapes) for i in sorted(shape.feeds)]
    return ";".join(",".join(names) for names in turns.values()) + "|" + ",".join(edges)


def structure_key(task: Task) -> str:
    """The category, where the empty turn stands, the tools by turn and the edges."""
    empty = [str(i) for i, turn in enumerate(task.turns) if not turn.gold]
    return "|".join([Category(task.category).value, "".join(empty), base_key(call_shapes(task))])
