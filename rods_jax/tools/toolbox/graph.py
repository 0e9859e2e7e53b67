"""The typed tool graph: every tool by name, and which kinds may flow into which input."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from rods_jax.tools.toolbox.bookings import Bookings
from rods_jax.tools.toolbox.domain import Domain
from rods_jax.tools.toolbox.files import Files
from rods_jax.tools.toolbox.messaging import Messaging
from rods_jax.tools.toolbox.payments import Payments
from rods_jax.tools.toolbox.signature import Tool
from rods_jax.types import ToolSpec

DOMAINS: dict[str, type[Domain]] = {d.NAME: d for d in (Files, Messaging, Bookings, Payments)}
TOOLS: dict[str, Tool] = {tool.name: tool for d in DOMAINS.values() for tool in d.TOOLS}
SPECS: dict[str, ToolSpec] = {name: tool.spec() for name, tool in TOOLS.items()}

# What may be put into a message or a file. Pins are left out on purpose.
SAYABLE = frozenset({
    "note", "amount", "booking", "link", "receipt", "request", "payment", "date", "city",
})
# What a text that is read may turn out to hold, by the domain that can use it.
CONTENTS: dict[str, tuple[str, ...]] = {
    "files": ("topic", "folder", "note"),
    "messaging": ("name", "user", "note", "pin"),
    "bookings": ("city", "date", "name", "booking"),
    "payments": ("user", "bill", "payment", "pin"),
}


def flows(kind: str, into: str) -> bool:
    """Whether a value of `kind` can be given to an input of kind `into`."""
    return kind == into or (into == "text" and kind in SAYABLE)


def in_order(domains: Sequence[str]) -> tuple[str, ...]:
    """The domains in the suite's own order. Raises ValueError on an unknown one."""
    unknown = [d for d in domains if d not in DOMAINS]
    if unknown:
        raise ValueError(f"unknown domain {unknown[0]!r}: use some of {', '.join(DOMAINS)}")
    return tuple(d for d in DOMAINS if d in domains)


def tool_names(domains: Sequence[str]) -> tuple[str, ...]:
    return tuple(t.name for d in in_order(domains) for t in DOMAINS[d].TOOLS)


@functools.cache
def chain_room(domains: tuple[str, ...], most: int = 6) -> dict[str, int]:
    """For each tool of the domains, how many calls can follow it so that each is fed by
    the one before (kinds alone are looked at), counted up to `most`."""
    tools = [TOOLS[name] for name in tool_names(domains)]
    contents = {kind for d in domains for kind in CONTENTS[d]}
    followers = {
        t.name: [u.name for u in tools if any(
            flows(kind, p.kind) for p in u.params for _, out in t.outputs
            for kind in (contents if out == "content" else (out,)) if not p.fresh)]
        for t in tools
    }
    room = dict.fromkeys(followers, 0)
    for _ in range(most):
        room = {name: max((1 + room[f] for f in after), default=0)
                for name, after in followers.items()}
    return {name: min(most, count) for name, count in room.items()}
