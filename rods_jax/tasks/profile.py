"""The structural profile of a task: what a variant must keep (paper section 2).

Profile: which call consumes what another produced, how deep such chains go, where every
argument came from, how many turns and calls a turn, what the task withholds, how often a
turn leans on an earlier one. Measured by running the gold calls, never read off names.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from rods_jax.tasks.replay import replay, result_json
from rods_jax.tasks.trace import NO_SOURCE, Origin, ValueTrace, trace
from rods_jax.tools.env import Suite
from rods_jax.types import Category, Json, Task, Turn


@dataclasses.dataclass(frozen=True, order=True)
class Edge:
    """Call `consumer` takes in `argument` a value that call `producer` returned (flat)."""

    producer: int
    consumer: int
    argument: str


@dataclasses.dataclass(frozen=True)
class Profile:
    category: Category
    calls: tuple[str, ...]  # names, flat
    calls_per_turn: tuple[int, ...]
    edges: tuple[Edge, ...]  # sorted, no duplicates
    depth: int  # edges on the longest producer-consumer chain
    flow: tuple[tuple[int, str, Origin], ...]  # consuming call, argument, origin
    cross_turn: int  # values that come from an earlier turn, said or returned

    @property
    def n_turns(self) -> int:
        return len(self.calls_per_turn)

    @property
    def origins(self) -> Counter[Origin]:
        return Counter(origin for _, _, origin in self.flow)

    @property
    def unsourced(self) -> Counter[tuple[str, str]]:
        """How many values of each (tool, argument) the task leaves to a look around or to
        inference, since nobody said or returned them. A benchmark's gold may hold text
        that no tool produces; such a task can fail for ever."""
        return Counter((self.calls[call], argument) for call, argument, origin in self.flow
                       if origin in NO_SOURCE)

    @property
    def turn_of_call(self) -> tuple[int, ...]:
        return tuple(t for t, n in enumerate(self.calls_per_turn) for _ in range(n))

    def to_json(self) -> dict[str, Json]:
        return {
            "category": self.category.value,
            "calls": list(self.calls),
            "calls_per_turn": list(self.calls_per_turn),
            "edges": [[e.producer, e.consumer, e.argument] for e in self.edges],
            "depth": self.depth,
            "flow": [[call, argument, origin.value] for call, argument, origin in self.flow],
            "cross_turn": self.cross_turn,
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Json]) -> Profile:
        """What `to_json` wrote, also after a trip through a file. ValueError, one line, where
        the row is not that."""
        try:
            known = cls(
                category=Category(row["category"]), calls=tuple(row["calls"]),
                calls_per_turn=tuple(row["calls_per_turn"]),
                edges=tuple(Edge(*edge) for edge in row["edges"]), depth=row["depth"],
                flow=tuple((call, argument, Origin(origin))
                           for call, argument, origin in row["flow"]),
                cross_turn=row["cross_turn"])
            if known.to_json() != row or sum(known.calls_per_turn) != len(known.calls):
                raise ValueError("its fields do not fit together")
        except KeyError as error:
            raise ValueError(f"not a profile: it lacks the field {error}; "
                             "measure the task again") from error
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a profile: {error}; measure the task again") from error
        return known

    def __str__(self) -> str:
        turn_of = self.turn_of_call
        head = (f"{self.category.value}: {self.n_turns} turns, calls a turn "
                f"{'+'.join(map(str, self.calls_per_turn))}, depth {self.depth}, "
                f"{self.cross_turn} values from earlier turns")
        origins = ", ".join(f"{o.value} {self.origins[o]}" for o in Origin if self.origins[o])
        lines = [head, f"arguments from: {origins or 'none'}"]
        for i, name in enumerate(self.calls):
            needs = [f"{e.argument} <- #{e.producer} {self.calls[e.producer]}"
                     for e in self.edges if e.consumer == i]
            lines.append(f"  turn {turn_of[i]}  #{i} {name}" + (f"  ({'; '.join(needs)})"
                                                               if needs else ""))
        return "\n".join(lines)


def base_form(task: Task) -> Task:
    """The task with nothing withheld: each turn in which the agent must ask or decline
    is joined with the one that brings what was missing. Long contexts stay as they are."""
    if task.category is Category.BASE:
        return task
    turns, waiting = list(task.turns), []
    if task.category in (Category.MISS_FUNC, Category.MISS_PARAM):
        turns = []
        for i, turn in enumerate(task.turns):
            if not turn.gold and i + 1 < len(task.turns):
                waiting.append(turn.user)
                continue
            user = " ".join(text for text in (*waiting, turn.user) if text)
            turns.append(Turn(user, turn.gold, turn.tools))
            waiting = []
        # All tools are visible from the start: none was withheld.
        tools = task.turns[-1].tools
        turns = [dataclasses.replace(turn, tools=tools) for turn in turns]
    return dataclasses.replace(task, category=Category.BASE, turns=tuple(turns))


def profile(task: Task, suite: Suite) -> Profile:
    """Runs the gold calls in a fresh environment and traces every argument value."""
    results = [result_json(result) for result in replay(suite, task).results]
    return profile_of(task, trace(task, suite.tools(task.domains), results))


def profile_of(task: Task, traces: Sequence[ValueTrace]) -> Profile:
    """The profile from values traced already."""
    calls = tuple(call.name for turn in task.turns for call in turn.gold)
    turn_of = [t for t, turn in enumerate(task.turns) for _ in turn.gold]
    edges = tuple(sorted({Edge(v.producer, v.call, v.argument)
                          for v in traces if v.producer is not None}))
    depth_of = [0] * len(calls)
    for edge in sorted(edges, key=lambda e: e.consumer):
        depth_of[edge.consumer] = max(depth_of[edge.consumer], depth_of[edge.producer] + 1)
    return Profile(
        category=task.category, calls=calls,
        calls_per_turn=tuple(len(turn.gold) for turn in task.turns),
        edges=edges, depth=max(depth_of, default=0),
        flow=tuple((v.call, v.argument, v.origin) for v in traces),
        cross_turn=sum(_crosses(v, turn_of, task) for v in traces),
    )


def _crosses(value: ValueTrace, turn_of: Sequence[int], task: Task) -> bool:
    """Said or returned before the last turn that had gold calls ended."""
    if value.producer is not None:
        return turn_of[value.producer] < value.turn
    return value.said_in is not None and any(
        task.turns[t].gold for t in range(value.said_in, value.turn))


def distance(a: Profile, b: Profile) -> float:
    """How far two structures are apart: 0 the same, 1 nothing in common. Symmetric.

    The mean of seven parts, each in [0, 1]: category, turns, calls a turn, depth, links
    (by the turns they join), argument origins (total variation), cross-turn values.
    Names of tools and arguments play no part: a variant may use others.
    """
    parts = (
        float(a.category is not b.category),
        _gap(a.n_turns, b.n_turns),
        _overlap_gap(_by_turn(a), _by_turn(b)),
        _gap(a.depth, b.depth),
        _overlap_gap(_links(a), _links(b)),
        _shares_gap(a.origins, b.origins),
        _gap(a.cross_turn, b.cross_turn),
    )
    return sum(parts) / len(parts)


def _gap(a: int, b: int) -> float:
    return abs(a - b) / max(a, b, 1)


def _by_turn(p: Profile) -> Counter:
    return Counter(dict(enumerate(p.calls_per_turn)))


def _links(p: Profile) -> Counter:
    turn_of = p.turn_of_call
    return Counter((turn_of[e.producer], turn_of[e.consumer]) for e in p.edges)


def _overlap_gap(a: Counter, b: Counter) -> float:
    """1 - intersection / union of two multisets; two empty ones are equal."""
    union = (a | b).total()
    return 1.0 - (a & b).total() / union if union else 0.0


def _shares_gap(a: Counter, b: Counter) -> float:
    n_a, n_b = a.total(), b.total()
    if not n_a or not n_b:
        return float(n_a != n_b)
    return 0.5 * sum(abs(a[key] / n_a - b[key] / n_b) for key in sorted({*a, *b}))
