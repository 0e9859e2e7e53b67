"""Hints for the BFCL tool classes: what names and schemas tell, then what the class's own
rules and the agent's state tell. A hint names only tools that are visible, and never a
password, a token or a card number."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping

from rods_jax.tools.bfcl_data import DOMAINS, domain_specs, tool_domains
from rods_jax.tools.bfcl_env import BFCLWorld
from rods_jax.tools.bfcl_hints_accounts import (
    message_hint, ticket_hint, trading_hint, twitter_hint)
from rods_jax.tools.bfcl_hints_case import RAISED, TELL, Failed, failed
from rods_jax.tools.bfcl_hints_files import files_hint
from rods_jax.tools.bfcl_hints_math import math_hint
from rods_jax.tools.bfcl_hints_travel import travel_hint
from rods_jax.tools.bfcl_hints_vehicle import vehicle_hint
from rods_jax.tools.hints import below, generic_hint
from rods_jax.types import ToolCall, ToolResult, ToolSpec

_OF_CLASS: Mapping[str, Callable[[Failed], str]] = {
    "GorillaFileSystem": files_hint, "MathAPI": math_hint, "MessageAPI": message_hint,
    "TwitterAPI": twitter_hint, "TicketAPI": ticket_hint, "TradingBot": trading_hint,
    "TravelAPI": travel_hint, "VehicleControlAPI": vehicle_hint,
}
# What the sandbox refuses before a class sees it.
_REFUSED = ("the arguments are too large", "a number is too large", "a number is not finite",
            "a string is too long", "a string holds a NUL", "the keys of an object")
_LONGEST = 600  # characters of a hint
_KEY_ERROR = re.compile(r"'(\w{1,40})'")


def bfcl_hint(world: BFCLWorld, call: ToolCall, result: ToolResult,
              visible: frozenset[str]) -> str:
    """The result with a hint below it, or "" where nothing helps."""
    said = advice(world, call, result, visible)
    if len(said) > _LONGEST:  # it repeats an argument of that length
        said = f"{said[:_LONGEST]}..."
    return below(result.text, said)


def advice(world: BFCLWorld, call: ToolCall, result: ToolResult,
           visible: frozenset[str]) -> str:
    """One or two sentences for a failed call, or ""."""
    by_schema = generic_hint(call, _specs(), visible)
    if by_schema and result.text.startswith(RAISED):
        return by_schema
    case = failed(None, call, result, visible)
    if case.says(*_REFUSED):
        return "Give plain JSON values of ordinary size."
    domain = tool_domains().get(call.name) if isinstance(call.name, str) else None
    if domain not in world.sandbox.domains:
        return by_schema
    said = _OF_CLASS[domain](failed(world.sandbox.instance(domain), call, result, visible))
    return said or by_schema or _no_field(case)


def _no_field(case: Failed) -> str:
    """A KeyError that the class did not foresee: a record of the scenario lacks a field."""
    found = _KEY_ERROR.fullmatch(case.error)
    if not found:
        return ""
    return f"A stored record has no {found[1]}, so {case.name} cannot work here: {TELL}."


@functools.cache
def _specs() -> Mapping[str, ToolSpec]:
    return {spec.name: spec for domain in DOMAINS for spec in domain_specs(domain)}
