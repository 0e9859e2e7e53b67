"""The API graph of a set of tasks: which tool's results feed which tool's arguments.

Found by running the gold calls and tracing every argument value, never read off names. A
value that the user did not say comes from the latest earlier call that returned it. With
gates, also which call has to come first: without it, a later one fails.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from rods_jax.tasks.replay import replay, result_json
from rods_jax.tasks.trace import Origin, ValueTrace, leaves, normal, trace, words
from rods_jax.tools.env import Suite
from rods_jax.types import Json, Task

GRAPH_SCHEMA_VERSION = 1
SHOWN = 20  # edges and gates that str() lists

Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True, order=True)
class ToolNode:
    """`calls` gold calls of the tool, `failed` of them answered with an error."""

    name: str
    domain: str
    calls: int
    failed: int


@dataclasses.dataclass(frozen=True, order=True)
class ValueEdge:
    """`count` calls of `consumer` took in `argument` a value that `producer` had returned at
    `path`: keys joined by dots, `[]` any item, `{}` any key that is not an identifier or that
    is itself the value, and "" where the whole result or a text holds it."""

    producer: str
    path: str
    consumer: str
    argument: str
    count: int


@dataclasses.dataclass(frozen=True, order=True)
class GateEdge:
    """`count` calls of `then` failed once an earlier call of `first` was left out."""

    first: str
    then: str
    count: int


@dataclasses.dataclass(frozen=True)
class ApiGraph:
    """All parts sorted; equal graphs compare equal. `nodes` also hold tools never called."""

    n_tasks: int
    nodes: tuple[ToolNode, ...]
    edges: tuple[ValueEdge, ...]
    gates: tuple[GateEdge, ...] = ()

    def of_domain(self, domain: str) -> ApiGraph:
        """The tools of one domain and what runs between them. ValueError where it has none."""
        nodes = tuple(n for n in self.nodes if n.domain == domain)
        if not nodes:
            known = ", ".join(sorted({n.domain for n in self.nodes})) or "none"
            raise ValueError(f"unknown domain {domain!r}: the tasks use {known}")
        inside = {n.name for n in nodes}
        return ApiGraph(
            self.n_tasks, nodes,
            tuple(e for e in self.edges if {e.producer, e.consumer} <= inside),
            tuple(g for g in self.gates if {g.first, g.then} <= inside))

    def merge(self, other: ApiGraph) -> ApiGraph:
        """The graph of both task sets, counts added. ValueError where the two disagree about
        a tool's domain."""
        domains: dict[str, str] = {}
        calls: Counter[str] = Counter()
        failed: Counter[str] = Counter()
        for node in (*self.nodes, *other.nodes):
            if domains.setdefault(node.name, node.domain) != node.domain:
                raise ValueError(f"tool {node.name!r} is of domain {domains[node.name]} in one "
                                 f"graph and of {node.domain} in the other: merge graphs of "
                                 "one suite")
            calls[node.name] += node.calls
            failed[node.name] += node.failed
        edges: Counter[tuple] = Counter()
        gates: Counter[tuple] = Counter()
        for edge in (*self.edges, *other.edges):
            edges[dataclasses.astuple(edge)[:-1]] += edge.count
        for gate in (*self.gates, *other.gates):
            gates[gate.first, gate.then] += gate.count
        return _graph(self.n_tasks + other.n_tasks, domains, calls, failed, edges, gates)

    def to_json(self) -> dict[str, Json]:
        return {"schema_version": GRAPH_SCHEMA_VERSION, "n_tasks": self.n_tasks,
                "nodes": [dataclasses.asdict(n) for n in self.nodes],
                "edges": [dataclasses.asdict(e) for e in self.edges],
                "gates": [dataclasses.asdict(g) for g in self.gates]}

    @classmethod
    def from_json(cls, row: Mapping[str, Json]) -> ApiGraph:
        """ValueError that names the first field that is not as `to_json` writes it."""
        version = row.get("schema_version") if isinstance(row, Mapping) else None
        if version != GRAPH_SCHEMA_VERSION:
            raise ValueError(f"schema_version is {version}, this code reads "
                             f"{GRAPH_SCHEMA_VERSION}: make the graph again")
        if not isinstance(row.get("n_tasks"), int):
            raise ValueError("n_tasks is not an integer: make the graph again")
        return cls(row["n_tasks"], _parts(row, "nodes", ToolNode),
                   _parts(row, "edges", ValueEdge), _parts(row, "gates", GateEdge))

    def __str__(self) -> str:
        called = [n for n in self.nodes if n.calls]
        calls, failed = sum(n.calls for n in called), sum(n.failed for n in called)
        idle = [n.name for n in self.nodes if not n.calls]
        errors = [f"{n.name} {n.failed}/{n.calls}" for n in called if n.failed]
        lines = [f"{self.n_tasks} tasks, {calls} calls of {len(called)} tools in "
                 f"{len({n.domain for n in called})} domains, {failed} failed",
                 "most called: " + (", ".join(f"{n.name} {n.calls}" for n in sorted(
                     called, key=lambda n: (-n.calls, n.name))[:8]) or "none")]
        if errors:
            lines.append("failed: " + ", ".join(errors))
        if idle:
            lines.append(f"never called: {len(idle)} ({', '.join(idle[:8])}"
                         f"{', ...' if len(idle) > 8 else ''})")
        lines += _top("values passed on", self.edges, lambda e: (
            f"{e.producer}{'.' if e.path[:1].isidentifier() else ''}{e.path} -> "
            f"{e.consumer}.{e.argument}"))
        lines += _top("must come first", self.gates, lambda g: f"{g.first} -> {g.then}")
        return "\n".join(lines)


def api_graph(tasks: Iterable[Task], suite: Suite, *, gates: bool = False) -> ApiGraph:
    """Runs the gold calls of every task. `gates` runs them again without each call in turn."""
    n_tasks, domains = 0, {}
    calls: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    edges: Counter[tuple] = Counter()
    blocked: Counter[tuple] = Counter()
    for task in tasks:
        n_tasks += 1
        specs = suite.tools(task.domains)
        domains.update({spec.name: spec.domain for spec in specs})
        names = [call.name for turn in task.turns for call in turn.gold]
        ran = replay(suite, task).results
        calls.update(names)
        failed.update(name for name, result in zip(names, ran, strict=True) if not result.ok)
        results = [result_json(result) for result in ran]
        edges.update(map(tuple, _value_edges(names, results, trace(task, specs, results))))
        if gates:
            blocked.update(_gates(suite, task, names, [result.ok for result in ran]))
    return _graph(n_tasks, domains, calls, failed, edges, blocked)


def _value_edges(names: Sequence[str], results: Sequence[Json],
                 values: Sequence[ValueTrace]) -> list[tuple[str, str, str, str]]:
    """One entry for each call, argument and place it came from, however many values."""
    found = set()
    for value in values:
        if value.origin is Origin.RESULT:
            producer, path = latest_source(value.value, value.argument, results[:value.call])
            found.add((value.call, names[producer], path, names[value.call], value.argument))
    return [edge for _, *edge in sorted(found)]


def latest_source(value: Json, argument: str, results: Sequence[Json]) -> tuple[int, str]:
    """Index of the latest result that holds the value, and where in it, generalised. A result
    that equals it goes before a text that only mentions it; single digits and letters count
    under a fitting key alone, as in tracing. ValueError where no result holds it."""
    form = normal(value)
    for index in reversed(range(len(results))):
        for path, leaf in leaves(results[index]):
            if normal(leaf) == form and (len(form) > 1 or _fits(path, argument)):
                return index, general(path, leaf)
    for index in reversed(range(len(results))):
        for path, leaf in leaves(results[index]):
            if len(form) > 1 and f" {form} " in f" {normal(leaf)} ":
                return index, general(path, leaf)
    raise ValueError(f"no result holds {value!r}: trace it first")


def general(path: Path, leaf: Json) -> str:
    """A path that other results of the same tool share; see ValueEdge."""
    text = ""
    for i, part in enumerate(path):
        last_is_key = i == len(path) - 1 and part == leaf
        if isinstance(part, int):
            text += "[]"
        elif last_is_key or not part.isidentifier():
            text += "{}"
        else:
            text += f".{part}" if text else part
    return text


def _fits(path: Path, argument: str) -> bool:
    keys = [key for key in path if isinstance(key, str)]
    return not keys or bool(set(words(argument)) & set(words(keys[-1])))


def _gates(suite: Suite, task: Task, names: Sequence[str],
           ran_ok: Sequence[bool]) -> list[tuple[str, str]]:
    """(first, then) for every call `then` that fails only where the call `first` is missing."""
    found = []
    for drop, first in enumerate(names):
        later = range(drop + 1, len(names))
        without = replay(suite, task, drop=drop).results[drop:]
        found += [(first, names[i]) for i, result in zip(later, without, strict=True)
                  if ran_ok[i] and not result.ok]
    return found


def _parts(row: Mapping[str, Json], key: str, kind: type) -> tuple:
    """The sorted dataclasses of one list. ValueError that names the field."""
    fields = {f.name: int if f.type == "int" else str for f in dataclasses.fields(kind)}
    rows = row.get(key)
    if not isinstance(rows, list):
        raise ValueError(f"{key} is not a list: make the graph again")
    for i, part in enumerate(rows):
        if (not isinstance(part, Mapping) or part.keys() != fields.keys()
                or any(type(part[name]) is not fields[name] for name in fields)):
            raise ValueError(f"{key}[{i}] has not exactly the fields {', '.join(fields)}: make "
                             "the graph again")
    return tuple(sorted(kind(**part) for part in rows))


def _top(title: str, edges: Sequence, shown: Callable) -> list[str]:
    """A heading and the edges with the highest counts."""
    if not edges:
        return []
    ranked = sorted(edges, key=lambda edge: (-edge.count, edge))
    more = [f"  and {len(ranked) - SHOWN} more"] if len(ranked) > SHOWN else []
    return [f"{title}: {len(ranked)} edges, {sum(e.count for e in ranked)} uses",
            *(f"  {edge.count:4}  {shown(edge)}" for edge in ranked[:SHOWN]), *more]


def _graph(n_tasks: int, domains: Mapping[str, str], calls: Counter, failed: Counter,
           edges: Counter, gates: Counter) -> ApiGraph:
    return ApiGraph(
        n_tasks, tuple(ToolNode(name, domains[name], calls[name], failed[name])
                       for name in sorted(domains)),
        tuple(sorted(ValueEdge(*key, count) for key, count in edges.items())),
        tuple(sorted(GateEdge(*key, count) for key, count in gates.items())))
