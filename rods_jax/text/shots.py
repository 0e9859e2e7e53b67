"""Worked examples for the prompt of a model that was never trained to call tools.

A shot is one turn of a training task: what the user said and the gold call that met it. A
prompt shows the shots most like its own task's first turn. Shots come from other scenarios
only: the siblings of a task, and the seed of a variant, hold its own answer.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from rods_jax.tasks.leakage import root_scenario
from rods_jax.types import Category, Task, ToolCall


@dataclasses.dataclass(frozen=True)
class Shot:
    user: str
    call: ToolCall
    scenario: str


def shots_of(tasks: Iterable[Task], max_chars: int = 240) -> tuple[Shot, ...]:
    """A shot for each turn of a BASE task that one call meets and that takes at most
    `max_chars` characters to ask."""
    return tuple(Shot(turn.user, turn.gold[0], task.scenario)
                 for task in tasks if task.category is Category.BASE
                 for turn in task.turns if len(turn.gold) == 1 and len(turn.user) <= max_chars)


def nearest(shots: Sequence[Shot], task: Task, count: int) -> tuple[Shot, ...]:
    """The `count` shots, each of another tool, whose words are most like those of the task's
    first turn, the best last. Only of tools that this turn can see.

    Likeness is the weight of the common words over that of all, a word weighing
    log((n + 1) / (shots that hold it + 1)): what every user says tells nothing apart."""
    said = [_words(shot.user) for shot in shots]
    holding = Counter(word for words in said for word in words)
    turn, own = task.turns[0], root_scenario(task.scenario)
    wanted = _words(turn.user)

    def weight(words: frozenset[str]) -> float:
        return sum(math.log((len(shots) + 1) / (holding[word] + 1)) for word in sorted(words))

    likeness = [weight(words & wanted) / max(weight(words | wanted), 1e-9) for words in said]
    best: dict[str, Shot] = {}
    for i in sorted(range(len(shots)), key=lambda i: -likeness[i]):
        if shots[i].call.name in turn.tools and shots[i].scenario != own:
            best.setdefault(shots[i].call.name, shots[i])
    return tuple(best.values())[:count][::-1]


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text.lower()))
