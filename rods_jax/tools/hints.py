"""Actionable hints on failure: the environment-augmentation baseline, over any tool class.

A failed call is answered with its own error and a hint: what was wrong and what would help.
Scores never see hints: the environment inside keeps the tools' own texts.

    HintedEnv(env, schema_hints(specs))     # for tools that have no hints of their own

A suite that knows its tools writes a Hint of its own. It may read the agent's world as far as
visible tools could show it too, is true in that state, says no secret, and draws nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence

from rods_jax.tools import schema
from rods_jax.tools.env import UserTurn
from rods_jax.tools.twin import TwinEnv, World
from rods_jax.types import Json, ToolCall, ToolResult, ToolSpec, TurnOutcome

# From the agent's world after the call, the call, its result and the tools visible in this turn
# to the text shown in place of the result's (so that each suite may put its hint where its
# readers find it), or "" where nothing helps.
Hint = Callable[[World, ToolCall, ToolResult, frozenset[str]], str]

_LONGEST = 80  # characters of a name that are looked at
_ALIKE = 0.6  # difflib's ratio of names that may be meant for each other


class HintedEnv:
    """Implements rods_jax.tools.env.Environment around another."""

    def __init__(self, env: TwinEnv, hint: Hint):
        self.task = env.task
        self._env, self._hint = env, hint

    def begin_turn(self) -> UserTurn | None:
        return self._env.begin_turn()

    def execute(self, calls: Sequence[ToolCall]) -> tuple[ToolResult, ...]:
        """One call at a time, so that a hint speaks of the state its call met."""
        return tuple(self._execute(call) for call in calls)

    def _execute(self, call: ToolCall) -> ToolResult:
        result, = self._env.execute((call,))
        if result.ok:
            return result
        shown = self._hint(self._env.world, call, result, self._env.visible())
        return ToolResult(shown, False) if shown else result

    def end_turn(self, said: str) -> TurnOutcome:
        return self._env.end_turn(said)


def below(text: str, said: str) -> str:
    """The result with the hint on a line of its own; "" where nothing is said."""
    return f"{text}\nHint: {said}" if said else ""


def schema_hints(specs: Sequence[ToolSpec]) -> Hint:
    """The Hint that knows no more of the tools than their names and schemas."""
    by_name = {spec.name: spec for spec in specs}
    return lambda world, call, result, visible: below(
        result.text, generic_hint(call, by_name, visible))


# ------------------------------------------------------------------- names and schemas


def generic_hint(call: ToolCall, specs: Mapping[str, ToolSpec], visible: frozenset[str]) -> str:
    """What names and schemas alone tell of a failed call, or "" where they find no fault.
    `specs`: every declared tool by name, visible or not."""
    name = call.name if isinstance(call.name, str) else ""
    if name not in visible:
        return _no_such_tool(name, specs, visible)
    if name not in specs:
        return ""
    wrong = schema.complaint(call.arguments, specs[name].parameters)
    if wrong is None:
        return ""
    return f"{_remedy(wrong, call.arguments, specs[name])} Signature: {schema.signature(specs[name])}."


def closest(word: str, choices: Iterable[str], most: int = 1,
            alike: float = _ALIKE) -> list[str]:
    """The choices that `word` may stand for, likeliest first, blind to case and joints; with
    the usual `alike` also those that hold it or that it holds, where none is spelled so."""
    forms: dict[str, str] = {}
    for choice in choices:
        forms.setdefault(_form(choice), choice)
    form = _form(word)
    found = difflib.get_close_matches(form, forms, most, alike)
    if not found and len(form) > 2 and alike <= _ALIKE:
        found = [f for f in forms if len(f) > 2 and (form in f or f in form)][:most]
    return [forms[f] for f in found]


def _form(word: str) -> str:
    return "".join(c for c in word[:_LONGEST].casefold() if c not in "_- ")


def _no_such_tool(name: str, specs: Mapping[str, ToolSpec], visible: frozenset[str]) -> str:
    bare = name.rpartition(".")[2]
    if bare in visible:
        return f"Call the tool by its bare name: {bare}."
    if name in specs:  # declared, but withheld now: what is spelled like it does another thing
        return f"{name} is not at hand now: if no other tool does it, tell the user."
    near = closest(bare, sorted(visible), 3)
    if near:
        return f"There is no such tool, the nearest name is {' or '.join(near)}."
    return "No tool for this is at hand now: tell the user."


def _remedy(wrong: str, arguments: Json, spec: ToolSpec) -> str:
    """What to change first. Values are not repeated: they may be secrets."""
    if not isinstance(arguments, Mapping):
        return "Give the arguments as an object."
    properties = spec.parameters.get("properties") or {}
    required = spec.parameters.get("required") or ()
    unknown = [name for name in arguments if name not in properties]
    missing = [name for name in required if name not in arguments]
    if unknown:
        free = [name for name in properties if name not in arguments]
        near = closest(str(unknown[0]), free) or (missing if len(missing) == 1 else [])
        shown = str(unknown[0])[:_LONGEST]
        return f"Call it {near[0]!r}, not {shown!r}." if near else f"Leave out {shown!r}."
    if missing:
        return f"Give {' and '.join(map(repr, missing))} too; ask the user if it is not known."
    faulty = next((n for n in arguments if wrong.startswith(f"argument {n!r} ")), "")
    return f"{wrong[:1].upper()}{wrong[1:]}{_rewrite(arguments[faulty], properties[faulty])}."


def _rewrite(value: Json, part: Mapping[str, Json]) -> str:
    """How the same value would fit, where that is plain to see."""
    kind = part.get("type")
    if isinstance(value, str):
        literal = (_is_number(value) and kind in ("integer", "number")) or (
            kind == "boolean" and value.lower() in ("true", "false"))
        if literal:
            return ", written without quotes"
    if kind == "string" and isinstance(value, (int, float)):
        return ", written in quotes"
    if kind == "array" and isinstance(value, (str, int, float)):
        return ", even for one value"
    return ", without a fraction" if kind == "integer" and isinstance(value, float) else ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
