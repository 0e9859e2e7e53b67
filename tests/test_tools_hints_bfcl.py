"""Hints for the BFCL classes, each on a failure that the class itself produces."""

import ast
import pathlib
import re

import pytest
from bfcl_hint_cases import (
    BRAKE, CASES, CRUISE, FILES, LOCK, LOCKED, MATH, OPEN, READY, START, TICKET, TICKETS, TRAVEL,
    VEHICLE, call, file, folder)
from hypothesis import given
from hypothesis import strategies as st

from rods_jax.tools.bfcl_data import MODULES, domain_specs, tool_module
from rods_jax.tools.bfcl_env import BFCLWorld
from rods_jax.tools.bfcl_hints import advice
from rods_jax.tools.bfcl_hints_accounts import FIELDS
from rods_jax.tools.bfcl_hints_case import failed
from rods_jax.tools.bfcl_hints_math import PAIRS, SI_UNITS
from rods_jax.tools.bfcl_hints_travel import CURRENCIES
from rods_jax.tools.bfcl_hints_vehicle import CAPACITY, OPTIONS, TOP_SPEED
from rods_jax.tools.bfcl_sandbox import Sandbox
from rods_jax.types import ToolCall


def fails(config, made, before=(), hidden=(), typed=True):
    """(error, hint) of a call that must fail, after others; all tools visible but `hidden`."""
    domain, = config
    world = BFCLWorld(Sandbox([domain], config, False), typed)
    everything = frozenset(s.name for s in domain_specs(domain))
    for earlier in before:
        assert world.call(earlier, everything).ok
    visible = everything - set(hidden)
    result = world.call(made, visible)
    assert not result.ok, result
    return failed(None, made, result, visible).error, advice(world, made, result, visible)


@pytest.mark.parametrize("config, made, key, hidden, before", CASES,
                         ids=[f"{i}-{case[1].name}" for i, case in enumerate(CASES)])
def test_a_refusal_gets_its_hint(config, made, key, hidden, before):
    error, hint = fails(config, made, before, hidden)
    assert key in hint, (error, hint)
    assert 1 <= len(re.findall(r"[.?](?= |$)", hint)) <= 3 and len(hint) < 330
    assert not any(re.search(rf"\b{name}\b", hint) for name in hidden), hint
    assert not re.search("tok-secret|hush|4000-1111|911", hint.replace(str(made.arguments), ""))


# Errors that no state and no argument of a declared type provokes.
UNREACHABLE = {
    "cd: ..: No such directory", "mv: cannot move .*: Not a file or directory",
    "cp: cannot copy .*: Not a file or directory", "rm: cannot remove .*: Not a file or directory",
    "cp: cannot copy .* to .*: File exists", "KeyError during formatting: .*",
    "No available route for the given parameters", ".* must be (a number|numbers)",
    "Input must be a number.*",
    "Conversion resulted in a value too large to represent", "First input must be a number, .*",
}


def refusals(domain):
    """(tool, pattern) of every error text that is written in the source of a class."""
    source = pathlib.Path(tool_module(domain).__file__).read_text(encoding="utf-8")
    for tool in ast.walk(ast.parse(source)):
        for node in ast.walk(tool) if isinstance(tool, ast.FunctionDef) else ():
            found = []
            if isinstance(node, ast.Dict):
                found = [v for k, v in zip(node.keys, node.values, strict=True)
                         if isinstance(k, ast.Constant) and k.value == "error"]
            elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                found = node.exc.args
            for text in found:
                while isinstance(text, ast.BinOp):
                    text = text.left
                parts = text.values if isinstance(text, ast.JoinedStr) else [text]
                pattern = "".join(re.escape(str(p.value)) if isinstance(p, ast.Constant) else ".*"
                                  for p in parts)
                yield tool.name, pattern


@pytest.mark.parametrize("domain", MODULES)
def test_every_error_in_the_source_is_among_the_cases(domain):
    seen = [fails(config, made, before, hidden)[0]
            for config, made, _, hidden, before in CASES if domain in config]
    patterns = {pattern for _, pattern in refusals(domain)}
    assert patterns
    lacking = {p for p in patterns if not any(re.match(p, error) for error in seen)}
    assert not {p for p in lacking
                if not any(p == u or re.fullmatch(u, p.replace("\\", "")) for u in UNREACHABLE)}


def test_constants_are_those_of_the_classes():
    math, vehicle = Sandbox([MATH], {}, False), Sandbox([VEHICLE], READY, False)
    travel, ticket = Sandbox([TRAVEL], {}, False), Sandbox([TICKET], {TICKET: TICKETS}, False)
    for a in SI_UNITS:
        assert math.call(call("si_unit_conversion", value=1, unit_in=a, unit_out="m")).ok
    for a, b in [*PAIRS, *((b, a) for a, b in PAIRS)]:
        assert math.call(call("imperial_si_conversion", value=1, unit_in=a, unit_out=b)).ok
    for other in CURRENCIES[1:]:
        for pair in ({"base_currency": "USD", "target_currency": other},
                     {"base_currency": other, "target_currency": "USD"}):
            assert travel.call(call("compute_exchange_rate", value=1, **pair)).ok
    for option in OPTIONS:
        assert vehicle.call(call("displayCarStatus", option=option)).ok
    for speed, ok in ((TOP_SPEED, True), (TOP_SPEED + 5, False)):
        made = call("setCruiseControl", speed=speed, activate=True, distanceToNextVehicle=1)
        assert vehicle.call(made).ok == ok
    assert CAPACITY == tool_module(VEHICLE).MAX_FUEL_LEVEL
    assert ticket.call(call("edit_ticket", ticket_id=1, updates=dict.fromkeys(FIELDS, "x"))).ok


def test_the_advice_of_the_engine_works():
    world = BFCLWorld(Sandbox([VEHICLE], OPEN, False), True)
    visible = frozenset(s.name for s in domain_specs(VEHICLE))
    hint = advice(world, CRUISE, world.call(CRUISE, visible), visible)
    assert [m in hint for m in (LOCK, "pressBrakePedal(pedalPosition=1.0)", "startEngine(")]
    assert hint.index("lockDoors") < hint.index("pressBrake") < hint.index("startEngine")
    assert all(world.call(made, visible).ok for made in (LOCKED, BRAKE, START, CRUISE))


TREES = st.recursive(
    st.builds(file), lambda inner: st.builds(lambda d: folder(**d), st.dictionaries(
        st.sampled_from("abcdef"), inner, max_size=4)), max_leaves=14)


@given(TREES, st.lists(st.sampled_from(["x", "y", "a", "b", "..", "/"]), max_size=4),
       st.sampled_from("abcdef"), st.sampled_from(["cat", "cd", "tail", "rmdir"]))
def test_whoever_follows_the_way_arrives(tree, walk, name, tool):
    """Where a hint names a way to an entry of that very name, its steps lead there."""
    world = BFCLWorld(Sandbox([FILES], {FILES: {"root": {"top": folder(x=tree, y=tree)}}}, False),
                      True)
    visible = frozenset(s.name for s in domain_specs(FILES))
    for step in walk:
        world.call(call("cd", folder=step), visible)
    argument = {"cd": "folder", "rmdir": "dir_name"}.get(tool, "file_name")
    made = ToolCall(tool, {argument: name})
    result = world.call(made, visible)
    if result.ok or result.text.endswith('not empty"}'):
        return
    hint = advice(world, made, result, visible)
    assert hint
    way = re.fullmatch(rf"'{name}' is not .*?: (?:first )?cd to (.*?)(?:, then call \w+ again"
                       r"|, one a call)\.", hint)
    if way:
        steps = re.findall(r"'([^']+)'", way[1])
        assert steps and all(world.call(call("cd", folder=s), visible).ok for s in steps)
        again = world.call(made, visible)
        assert tool == "cd" or again.ok or "not empty" in again.text
    else:  # nothing of this name and sort is anywhere
        wanted = (lambda e: hasattr(e, "contents")) if tool in ("cd", "rmdir") else (
            lambda e: hasattr(e, "content"))
        folders = [world.sandbox.instance(FILES).root]
        for place in folders:
            folders += [e for e in place.contents.values() if hasattr(e, "contents")]
            entry = place.contents.get(name)
            assert entry is None or not wanted(entry) or "is a " in hint, hint


def test_a_withheld_tool_is_never_named():
    """With only the called tool at hand, and with one after the other of those that a hint
    names withheld."""
    for config, made, _, _, before in CASES:
        domain, = config
        others = [s.name for s in domain_specs(domain) if s.name != made.name]

        def named(hidden):
            _, hint = fails(config, made, before, hidden)
            return {n for n in others if re.search(rf"\b{n}\b", hint)}

        assert not named(others), made
        for name in named(()):
            assert name not in named((name,)), (made, name)


def test_every_class_has_cases():
    assert {domain for config, *_ in CASES for domain in config} == set(MODULES)
