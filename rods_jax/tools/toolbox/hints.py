"""Hints for the toolbox: a field or two beside "error", in the lexicon's own words.

Every word is one of the lexicon, part of the call, or a folder or a balance that a visible tool
would show, so a format with a closed vocabulary reads `no such file use find_file` and meets no
new word:

    {"error": "no folder open", "folder": "/work", "use": "open_folder"}
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from rods_jax.tools.hints import closest
from rods_jax.tools.toolbox.env import ToolboxWorld
from rods_jax.tools.toolbox.graph import DOMAINS, TOOLS
from rods_jax.tools.toolbox.phrases import UNAVAILABLE, VAGUE
from rods_jax.tools.toolbox.signature import CURRENCIES, Tool, ToolError
from rods_jax.tools.toolbox.world import check_arguments
from rods_jax.types import Json, ToolCall, ToolResult

Extra = dict[str, Json]


@dataclasses.dataclass(frozen=True)
class _Failed:
    """`args`: of the right names and types, as texts."""

    state: Any
    tool: str
    args: Mapping[str, str]
    visible: frozenset[str]

    def door(self, tool: str) -> Extra:
        """The tool that must come first."""
        return {"use": tool} if tool in self.visible else {tool: UNAVAILABLE}

    def unknown(self, argument: str, source: str = "") -> Extra:
        """The value names nothing; `source` is the tool that finds one that does."""
        return {argument: "unknown"} | ({"use": source} if source in self.visible else {})


def toolbox_hint(world: ToolboxWorld, call: ToolCall, result: ToolResult,
                 visible: frozenset[str]) -> str:
    """The result with the fields of the hint, or "" where nothing helps."""
    said = json.loads(result.text)
    extra = _extra(world, call, said["error"], visible)
    return json.dumps(said | extra) if extra else ""


def _extra(world: ToolboxWorld, call: ToolCall, error: str, visible: frozenset[str]) -> Extra:
    if error == "unknown tool":
        return _no_such_tool(world, call.name, visible)
    tool = TOOLS[call.name]
    if error.endswith("argument"):
        return _arguments(tool, call.arguments)
    args = {name: str(value) for name, value in check_arguments(tool, call.arguments).items()}
    return _RULES[error](_Failed(world.domains[tool.domain], tool.name, args, visible))


def _no_such_tool(world: ToolboxWorld, name: Any, visible: frozenset[str]) -> Extra:
    declared = isinstance(name, str) and name in TOOLS
    if declared and TOOLS[name].domain not in world.domains:
        return {"use": [domain for domain in DOMAINS if domain in world.domains]}
    near = [] if declared or not isinstance(name, str) else closest(name, sorted(visible))
    return {"use": near[0]} if near else {"tool": UNAVAILABLE, "tell": "user"}


def _arguments(tool: Tool, given: Any) -> Extra:
    """The names that belong to the tool, or what the first wrong value should be."""
    names = [p.name for p in tool.params]
    if not isinstance(given, Mapping) or set(given) != set(names):
        return {"use": [tool.name, *names]}
    for param in tool.params:
        try:
            check_arguments(dataclasses.replace(tool, params=(param,)),
                            {param.name: given[param.name]})
        except ToolError:
            choices = list(CURRENCIES) if param.kind == "currency" else VAGUE[param.kind]
            return {param.name: choices}
    return {}


# --------------------------------------------------------------- refusals of the domains


def _folder_first(f: _Failed) -> Extra:
    """Open the folder that holds the file, named where find_file could tell it."""
    file = f.args.get("file", "")
    places = [folder for folder, files in f.state.folders.items() if file in files]
    known = "find_file" in f.visible and len(places) == 1 and places[0] != f.state.open
    return ({"folder": places[0]} if known else {}) | f.door("open_folder")


def _no_file(f: _Failed) -> Extra:
    if f.tool == "find_file":
        return f.unknown("topic")
    first = _folder_first(f)
    return first if "folder" in first else f.unknown("file", "find_file")


def _file_exists(f: _Failed) -> Extra:
    return ({"in": f.args["folder"]} if f.tool == "move_file"
            else {"copy": "some file not in folder"})


def _no_person(f: _Failed) -> Extra:
    return f.unknown("name") if f.tool == "find_contact" else f.unknown("user", "find_contact")


def _no_message(f: _Failed) -> Extra:
    if f.tool != "last_message":
        return f.unknown("message", "last_message")
    known = f.args["user"] in f.state.users
    return {"from": f.args["user"]} if known else f.unknown("user", "find_contact")


def _no_trip(f: _Failed) -> Extra:
    if f.tool != "search_trips":
        return f.unknown("trip", "search_trips")
    cities = [city for city, _, _ in f.state.trips.values()]
    return {"on" if f.args["city"] in cities else "to":
            f.args["date" if f.args["city"] in cities else "city"]}


def _no_booking(f: _Failed) -> Extra:
    return f.unknown("name") if f.tool == "find_booking" else f.unknown("booking", "find_booking")


def _no_bill(f: _Failed) -> Extra:
    return ({"from": f.args["user"]} if f.tool == "find_bill"
            else f.unknown("bill", "find_bill"))


def _low_balance(f: _Failed) -> Extra:
    return ({"balance": f.state.balance} if "check_balance" in f.visible
            else {"amount": "over balance"})


_RULES: Mapping[str, Callable[[_Failed], Extra]] = {
    "no folder open": _folder_first,
    "no such file": _no_file,
    "no such folder": lambda f: f.unknown("folder", "find_file"),
    "file exists": _file_exists,
    "not signed in": lambda f: f.door("sign_in"),
    "wallet locked": lambda f: f.door("unlock_wallet"),
    "wrong pin": lambda f: {"use": "pin for wallet" if f.tool == "unlock_wallet"
                            else "pin for messaging"},
    "no such person": _no_person,
    "no such message": _no_message,
    "no such trip": _no_trip,
    "no such hold": lambda f: f.unknown("hold", "hold_seat"),
    "no such booking": _no_booking,
    "no such bill": _no_bill,
    "no such payment": lambda f: f.unknown("payment"),
    "same date": lambda f: {"it is on": f.args["date"]},
    "wrong amount": lambda f: {"amount": VAGUE["amount"]},
    "low balance": _low_balance,
    "limit reached": lambda f: {"tell": "user"},
}
