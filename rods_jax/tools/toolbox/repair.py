"""Patches a plan's initial world so that a call that failed can run."""

from __future__ import annotations

import dataclasses
import random

from rods_jax.tools.toolbox.entities import Maker
from rods_jax.tools.toolbox.graph import TOOLS
from rods_jax.tools.toolbox.structure import flatten
from rods_jax.tools.toolbox.world import make_world, world_config
from rods_jax.tools.toolbox.planner import resolve, run_plan
from rods_jax.types import Plan, Ref


def repair_plan(plan: Plan, call: int, error: str, rng: random.Random) -> Plan | None:
    """The plan with what flat call `call` lacks (a file, a message, money, an open door)
    added to its initial world; None where adding things cannot help. `error` is only read
    to leave alone what no world can mend."""
    if "argument" in error or "unknown tool" in error or "limit" in error:
        return None
    calls = [c for turn in plan.turns for c in turn]
    name = calls[call].name
    domain = TOOLS[name].domain
    if domain not in plan.initial_config:
        return None
    world, results = run_plan(plan, stop=call)
    initial = make_world(plan.initial_config)
    said = {str(v) for c in calls for v in c.arguments.values() if not isinstance(v, Ref)}
    maker = Maker(rng, set(flatten(dict(plan.initial_config))) | said)
    args = resolve(calls[call], results)
    if args is None:
        return None
    state = world[domain]
    if TOOLS[name].needs_door and not state.is_open():
        state.open_door(initial[domain], maker)
    if not state.prepare(name, args, initial[domain], maker):
        return None
    patched = dataclasses.replace(plan, initial_config=world_config(initial))
    _, results = run_plan(patched, stop=call + 1)
    return None if any("error" in r for r in results) else patched
