"""Plans call structures over the typed tool graph, executing as it goes.

One planner serves both uses. A slot of a fresh task only says which earlier call must feed
it; a slot of a variant says exactly what feeds the call and how many arguments the user
gives. The planner fills slot after slot with a tool and sources for its arguments, adds to
the initial world what the call needs, runs the call, and starts over where it gets stuck.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from rods_jax.tools.toolbox.entities import Maker
from rods_jax.tools.toolbox.graph import (CONTENTS, DOMAINS, TOOLS, chain_room, flows, in_order,
                                          tool_names)
from rods_jax.tools.toolbox.signature import CURRENCIES, Param, Tool
from rods_jax.tools.toolbox.world import World, make_world, run_tool, world_config
from rods_jax.types import Json, Plan, PlannedCall, Ref


@dataclasses.dataclass(frozen=True)
class Slot:
    """What is asked of one call. `feeds`: calls that must feed it. `exact`: no other may,
    and `said`, `again` count its other arguments; `fed`: how many the `feeds` give; `pointed`:
    how many of `again` were given in an earlier turn and are not said anew; None leaves
    either open. `tool`: the tool to fall back on. `follow`: how many calls must still follow it in a chain, each fed by the one before;
    `pause`: another call stands between it and the next of them."""

    turn: int
    feeds: frozenset[int] = frozenset()
    follow: int = 0
    pause: bool = True
    exact: bool = False
    said: int = 0
    again: int = 0
    fed: int | None = None
    pointed: int | None = None
    tool: str | None = None


@dataclasses.dataclass(frozen=True)
class Handle:
    """A value that later calls may use. `key` is its place in the result of `call`, or None
    where the user said it. `noun` is what one calls it; `mentioned`: it is what a text that
    was read turned out to hold."""

    call: int
    key: str | None
    kind: str
    noun: str
    value: Any
    mentioned: bool = False


@dataclasses.dataclass
class _Board:
    """One attempt. `settled`: domains whose door is known to start open or shut."""

    rng: random.Random
    maker: Maker
    live: dict
    initial: dict
    visible: frozenset[str]
    max_depth: int
    n_slots: int
    handles: list[Handle] = dataclasses.field(default_factory=list)
    settled: set[str] = dataclasses.field(default_factory=set)
    levels: list[int] = dataclasses.field(default_factory=list)
    calls: list[tuple[Slot, PlannedCall]] = dataclasses.field(default_factory=list)
    notes: list[dict] = dataclasses.field(default_factory=list)
    results: list[str] = dataclasses.field(default_factory=list)


_NOUNS = {"user": "person", "note": "text"}


def noun_of(kind: str, key: str | None = None) -> str:
    """What a user calls a value; amounts go by the key that they came under."""
    return key if kind == "amount" and key else _NOUNS.get(kind, kind)


def make_plan(slots: Sequence[Slot], domains: Sequence[str], max_depth: int,
              rng: random.Random, attempts: int = 60, keep_tools: bool = False) -> Plan | None:
    """A plan that fills the slots, runs without an error and gives every call a result text
    of its own; None where the attempts did not find one.

    Slots that name a tool keep it more and more often in the second half of the attempts, so
    that a variant takes other tools where the graph allows and its seed's where it does not.
    `keep_tools`: they keep it always.
    """
    domains = in_order(domains)
    maker = Maker(rng)
    blank = {name: DOMAINS[name].blank(maker) for name in domains}
    for attempt in range(attempts):
        keep = 1.0 if keep_tools else max(0.0, 4 * attempt / attempts - 2)
        board = _new_board(blank, maker.taken, max_depth, len(slots), rng)
        if all(_fill(board, slot, rng.random() < keep) for slot in slots):
            used = in_order({TOOLS[c.name].domain for _, c in board.calls})
            plan = _finish(board, domains)
            if used == domains and run_plan(plan)[1] == [json.loads(r) for r in board.results]:
                return plan
    return None


def run_plan(plan: Plan, stop: int | None = None) -> tuple[World, list[dict]]:
    """Runs the first `stop` calls (all by default): the world after them and their JSON
    results. A call whose reference failed gets an error as its result."""
    world, visible = make_world(plan.initial_config), frozenset(tool_names(plan.domains))
    results: list[dict] = []
    for call in [c for turn in plan.turns for c in turn][:stop]:
        arguments = resolve(call, results)
        if arguments is None:
            results.append({"error": "missing argument"})
        else:
            results.append(json.loads(run_tool(world, call.name, arguments, visible).text))
    return world, results


def resolve(call: PlannedCall, results: Sequence[Mapping]) -> dict[str, Json] | None:
    """The call's arguments with every Ref replaced; None where a result lacks the value."""
    arguments: dict[str, Json] = {}
    for key, value in call.arguments.items():
        if isinstance(value, Ref):
            source = results[value.call]
            if value.path[0] not in source:
                return None
            value = source[value.path[0]]
            value = str(value) if key == "text" else value
        arguments[key] = value
    return arguments


def _new_board(blank: World, taken: set[str], max_depth: int, n_slots: int,
               rng: random.Random) -> _Board:
    """A first state of an attempt: a world with nothing in it but the ids to come."""
    config = world_config(blank)
    visible = frozenset(tool_names(tuple(blank)))
    return _Board(rng, Maker(rng, set(taken)), make_world(config), make_world(config), visible,
                  max_depth, n_slots)


def _finish(board: _Board, domains: tuple[str, ...]) -> Plan:
    turns: dict[int, list[PlannedCall]] = {}
    for slot, call in board.calls:
        turns.setdefault(slot.turn, []).append(call)
    return Plan(
        domains=domains,
        initial_config=world_config(board.initial),
        turns=tuple(tuple(turns[t]) for t in sorted(turns)),
        parent=None,
        narrative={"calls": board.notes},
    )


def _fill(board: _Board, slot: Slot, keep: bool) -> bool:
    """Adds one call; False where no tool fits or the call it made did not work."""
    names = [slot.tool] if keep and slot.tool in board.visible else _candidates(board, slot)
    weights = _weights(board, slot, names)
    while names:
        index = board.rng.choices(range(len(names)), weights)[0]
        tool = TOOLS[names.pop(index)]
        weights.pop(index)
        choices = _bindings(board, tool, slot)
        for _ in range(min(3, len(choices))):
            weight = [1 + 4 * sum(isinstance(s, Handle) for s in c) for c in choices]
            choice = choices.pop(board.rng.choices(range(len(choices)), weight)[0])
            done = _apply(board, tool, slot, choice)
            if done is not None:
                return done
    return False


def _candidates(board: _Board, slot: Slot) -> list[str]:
    """Tools that can stand in the slot. When as many slots are left as domains that have
    no call yet, only theirs; one signs in once."""
    used = {TOOLS[call.name].domain for _, call in board.calls}
    unused = [d for d in board.live if d not in used]
    pressed = len(unused) >= board.n_slots - len(board.calls)
    room = chain_room(tuple(board.live))
    fed = [h for h in board.handles if h.call in slot.feeds and h.key is not None]
    return [
        tool.name
        for domain, state in board.live.items() if not pressed or domain in unused
        for tool in state.TOOLS
        if room[tool.name] >= slot.follow
        and (tool.name != state.DOOR or domain not in board.settled or domain == "files")
        and (slot.pause or slot.follow < 2 or tool.name != "find_file")
        and len(slot.feeds) <= len(tool.params)
        and (not slot.feeds or any(flows(h.kind, p.kind) for h in fed for p in tool.params))
    ]


def _weights(board: _Board, slot: Slot, names: Sequence[str]) -> list[float]:
    """Prefers tools not used yet, domains not used yet, tools that results can feed and
    tools other than the seed's."""
    used = collections.Counter(call.name for _, call in board.calls)
    domains = {TOOLS[name].domain for name in used}
    kinds = {h.kind for h in board.handles if h.key is not None}
    left = board.n_slots - len(board.calls)
    hurry = 3 + 6 * (len(board.live) - len(domains)) / left  # to call every domain in time
    weights = []
    for name in names:
        tool = TOOLS[name]
        fits = any(flows(kind, p.kind) for p in tool.params for kind in kinds)
        new = tool.domain not in domains
        if name == "open_folder" and board.calls and board.calls[-1][1].name == "find_file":
            weights.append(40.0)  # what was found lies in a folder that is shut
            continue
        if name == board.live[tool.domain].DOOR and tool.domain not in board.settled:
            weights.append(4 * hurry)
            continue
        weights.append(0.25 ** used[name] * (hurry if new else 1) * (4 if fits else 1)
                       * (0.1 if name == slot.tool else 1))
    return weights


# ---------------------------------------------------------------- sources of arguments

_SAID = "said"  # the user gives a new value


def _bindings(board: _Board, tool: Tool, slot: Slot) -> list[tuple]:
    """All ways to source the arguments: a Handle each, or _SAID."""
    options = [_sources(board, tool, param) for param in tool.params]
    return [c for c in itertools.product(*options) if _accepts(board, slot, c)]


def _sources(board: _Board, tool: Tool, param: Param) -> list:
    sources: list = [_SAID]
    if param.fresh or param.kind == "currency":
        return sources
    owner = board.live[tool.domain]
    for handle in board.handles:
        if not flows(handle.kind, param.kind) or not owner.has(param.kind, handle.value):
            continue
        if handle.key is None and handle.kind == "pin":
            continue
        if board.levels[handle.call] >= board.max_depth and handle.key is not None:
            continue
        if handle.key is not None and reference(board.handles, handle) is None:
            continue
        sources.append(handle)
    return sources


def _accepts(board: _Board, slot: Slot, choice: tuple) -> bool:
    handles = [s for s in choice if isinstance(s, Handle)]
    if len({id(h) for h in handles}) < len(handles):
        return False
    if len({str(h.value) for h in handles}) < len(handles):
        return False
    feeds = {h.call for h in handles if h.key is not None}
    if not slot.feeds <= feeds:
        return False
    if not slot.exact:
        return True
    again = sum(h.key is None for h in handles)
    fed = len(handles) - again
    return (feeds == slot.feeds and again == slot.again
            and len(choice) - len(handles) == slot.said
            and (slot.fed is None or fed == slot.fed)
            and (slot.pointed is None or slot.pointed <= sum(
                _can_be_pointed_at(board, slot, h) for h in handles)))


def _can_be_pointed_at(board: _Board, slot: Slot, handle: Handle) -> bool:
    """Whether the user gave the value in an earlier turn and words single it out."""
    return (handle.key is None and board.calls[handle.call][0].turn < slot.turn
            and reference(board.handles, handle) is not None)


def reference(handles: Sequence[Handle], handle: Handle) -> str | None:
    """How a user can point at a value without saying it: "mentions" for what the last text
    read holds, "last" or "first" of its noun; None where no such words single it out."""
    if handle.mentioned:
        texts = [h for h in handles if h.mentioned]
        return "mentions" if texts[-1] is handle else None
    same = [h for h in handles if h.noun == handle.noun and not h.mentioned]
    if same[-1] is handle:
        return "last"
    return "first" if same[0] is handle else None


# ---------------------------------------------------------------- one call


def _apply(board: _Board, tool: Tool, slot: Slot, choice: tuple) -> bool | None:
    """Runs the call on the live world. None: nothing was changed, another choice may do.
    False: the attempt is spoilt."""
    state, initial = board.live[tool.domain], board.initial[tool.domain]
    shut = state.DOOR and tool.needs_door and tool.domain not in board.settled
    if shut:
        state.open_door(initial, board.maker)
    if state.DOOR and (tool.needs_door or tool.name == state.DOOR):
        board.settled.add(tool.domain)
    values = [_value(board, p, s) for p, s in zip(tool.params, choice)]
    args = {p.name: v for p, v in zip(tool.params, values)}
    board.maker.content = _content_kind(board, slot)
    if not state.prepare(tool.name, args, initial, board.maker):
        return False if shut else None
    result = run_tool(board.live, tool.name, args, board.visible)
    if not result.ok or result.text in board.results:
        return False
    _record(board, tool, slot, choice, args, json.loads(result.text))
    board.results.append(result.text)
    return True


def _value(board: _Board, param: Param, source) -> Any:
    if isinstance(source, Handle):
        return str(source.value) if param.kind == "text" else source.value
    if param.kind == "currency":
        return board.rng.choice(CURRENCIES)
    return board.maker.new("note" if param.kind == "text" else param.kind)


def _content_kind(board: _Board, slot: Slot) -> str:
    """What a text that is read now shall hold: something that the calls to come can use."""
    domains = tuple(board.live)
    kinds = sorted({k for d in domains for k in CONTENTS[d]})
    if all(d in board.settled for d in domains if DOMAINS[d].DOOR and d != "files"):
        kinds = [k for k in kinds if k != "pin"]
    if not slot.follow:
        return board.rng.choice(kinds) if board.rng.random() < 0.3 else "note"
    room = chain_room(domains)
    fitting = [k for k in kinds if any(
        flows(k, p.kind) and room[name] >= slot.follow - 1
        for name in board.visible for p in TOOLS[name].params if not p.fresh)]
    return board.rng.choice(fitting or kinds)


def _record(board: _Board, tool: Tool, slot: Slot, choice: tuple, args: dict,
            result: dict) -> None:
    index = len(board.calls)
    arguments: dict[str, Any] = {}
    notes: dict[str, Any] = {}
    feeds = []
    new = []
    to_point = slot.pointed
    for param, source in zip(tool.params, choice):
        value = args[param.name]
        if isinstance(source, Handle):
            pointer = reference(board.handles, source)
            if source.key is not None:
                feeds.append(source.call)
                arguments[param.name] = Ref(source.call, (source.key,))
            else:
                arguments[param.name] = value
            how = pointer or "repeat"
            notes[param.name] = {"how": how, "noun": source.noun,
                                 "result": source.key is not None}
            if to_point is not None and _can_be_pointed_at(board, slot, source):
                notes[param.name]["point"] = to_point > 0
                to_point -= 1
            continue
        arguments[param.name] = value
        kind = "note" if param.kind == "text" else param.kind
        notes[param.name] = {"how": "said", "noun": noun_of(kind), "result": False}
        if kind != "currency":
            new.append(Handle(index, None, kind, noun_of(kind), value))
    board.handles.extend(new)
    known = {str(h.value) for h in board.handles}
    for key, kind in tool.outputs:
        value = result[key]
        if str(value) in known:
            continue  # no news: it was said or found before
        if kind == "content":
            held = board.maker.content
            board.handles.append(Handle(index, key, held, noun_of(held), value, mentioned=True))
        else:
            board.handles.append(Handle(index, key, kind, noun_of(kind, key), value))
    board.levels.append(1 + max((board.levels[c] for c in feeds), default=-1))
    board.calls.append((slot, PlannedCall(tool.name, arguments)))
    board.notes.append({"args": notes, "holds": noun_of(board.maker.content)})
