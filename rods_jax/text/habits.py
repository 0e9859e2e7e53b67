"""What a chat template does with a dialogue that grows, found out by rendering a few.

A rollout's ids only ever grow, so a template can be followed only if its text for a dialogue
starts with its text for the part that was there before. Two things may differ. What a
generation prompt opens with on the assistant's behalf (an empty think block) need not come
again in later renderings: the ids keep it. And thoughts may be dropped later on, which
`drops_thoughts` tells.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence

from rods_jax.text.guard import MARK, Guard
from rods_jax.tools.calls_step import THINK, UNTHINK
from rods_jax.types import Json

Message = Mapping[str, Json]
# (messages, tools, whether the header of the next assistant message follows) -> text
Render = Callable[[Sequence[Message], Sequence[Message] | None, bool], str]

_FIRST, _NEXT = "what is asked", "what is asked next"
_REPLY, _RESULT, _THOUGHT = "what is said", "what comes back", "what is thought"
_CHANGES = ("{} does not only append: its text for a dialogue's beginning changes as the dialogue "
            "goes on, so it cannot be followed")
_CONTROL = re.compile(r"<[|｜][^<>|｜\s]+[|｜]>")  # how most models spell control tokens


@dataclasses.dataclass(frozen=True)
class Habits:
    """`end`: the control token that closes an assistant message. `prefill`: what a generation
    prompt opens one with. `opened`: from a <think> on that a generation prompt leaves open; ""
    where there is none. `drops_thoughts`: of earlier turns once a new one begins; `in_turn`:
    already before."""

    end: str
    prefill: str
    opened: str
    drops_thoughts: bool
    in_turn: bool


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def called(calls: Sequence[tuple[str, Json]], text: str = "") -> Message:
    """`calls`: names with arguments."""
    return {"role": "assistant", "content": text, "tool_calls": [
        {"type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in calls]}


def result(name: str, text: str) -> Message:
    return {"role": "tool", "name": name, "content": text}


def tool(name: str) -> Message:
    """A tool in the shape of an OpenAI function."""
    return {"type": "function", "function": {
        "name": name, "description": "", "parameters": {"type": "object", "properties": {}}}}


STUB_TOOLS = (tool("f"),)  # for short dialogues, in place of the real ones
BEFORE = (user(_FIRST), said(MARK))  # a short dialogue, in place of the real one


def tail(render: Render, before: Sequence[Message], new: Sequence[Message],
         tools: Sequence[Message] | None, end: str) -> str:
    """What `new` messages add to a dialogue whose last message is MARK: the text behind the
    end token of that one."""
    return render([*before, *new], tools, True).partition(MARK)[2].removeprefix(end)


def study(render: Render, control: Collection[str], system: Sequence[Message], name: str,
          ) -> Habits:
    """`control`: the tokenizer's control tokens. `system`: a system message, if dialogues have
    one. `name`: of the template, for errors. Raises ValueError, one line, where the template
    cannot be followed."""
    check_tools(render, system, name)
    for token in _CONTROL.findall(_with_tools(render, system)):
        if token not in control:
            raise ValueError(f"{name} writes {token}, which the tokenizer does not have: "
                             "take both from one model")
    opening = [*system, user(_FIRST)]
    before, _, behind = render([*opening, said(_REPLY), user(_NEXT)], None, True).partition(_REPLY)
    alone = render([*opening, said(_REPLY)], None, False).partition(_REPLY)[2]
    # Of two tokens that match, the longer one counts. What opens the next message ends none.
    end = max((token for token in control if behind.startswith(token)), key=len, default=None)
    if end is None or not alone.startswith(end):
        raise ValueError(f"{name} closes no assistant message with a control token of the "
                         f"tokenizer but with {behind[:20]!r}: take both from one model")
    prompt = render(opening, None, True)
    if not prompt.startswith(before):
        if not before.startswith(render(opening, None, False)):
            raise ValueError(_CHANGES.format(name))
        raise ValueError(f"{name} shows an assistant message otherwise than its own generation "
                         "prompt begins one: it cannot be followed token by token")
    prefill = prompt[len(before):]
    for tools in (None, [tool("g"), tool("h")]):
        _check_appends(render, opening, tools, end, prefill, name)
    thought = [*opening, said(f"<think>\n{_THOUGHT}\n</think>\n\n{_REPLY}")]
    return Habits(
        end, prefill, _opened(render, opening, name),
        drops_thoughts=_THOUGHT not in render([*thought, user(_NEXT)], None, True),
        in_turn=_THOUGHT not in render([*thought, result("f", _RESULT)], None, True))


def check_tools(render: Render, system: Sequence[Message], name: str) -> None:
    """Raises ValueError, one line, where tools, calls or results have no place."""
    text = _with_tools(render, system)
    for what, sign in (("tools", "look_up"), ("calls", "go_there"), ("results", _RESULT)):
        if sign not in text:
            raise ValueError(
                f"{name} shows no {what}, so no tools can be used through it: set "
                'policy.chat="hermes" (in Python: HermesFormat of rods_jax/text/hermes.py), or '
                "take a model whose template has a place for tools")


def _with_tools(render: Render, system: Sequence[Message]) -> str:
    return render([*system, user(_FIRST), called([("go_there", {})]), result("f", _RESULT)],
                  [tool("look_up")], True)


def encloses(render: Render, guard: Guard, system: Sequence[Message]) -> bool:
    """Whether the template puts signs around a key or name that make a control token of it, as
    "<" and ">" around "think"."""
    words = sorted(guard.middles)
    benign = [f"w{i}" for i in range(len(words))]

    def control(words: Sequence[str]) -> list[str]:
        tools = [guard.hide({"type": "function", "function": {
            "name": w, "description": w, w: w, "parameters": {
                "type": "object", w: w, "properties": {w: {"type": "string", w: w}}}}})
            for w in words]
        made = called([("f", guard.hide({w: w for w in words}))])
        return guard.token.findall(
            render([*system, user(_FIRST), made, result("f", _RESULT)], tools, True))

    return control(words) != control(benign)


def _opened(render: Render, opening: Sequence[Message], name: str) -> str:
    """Checks, too, that every generation prompt begins a message alike."""
    added = set()
    for messages in (opening, [*opening, called([("f", {})]), result("f", _RESULT)]):
        for tools in (None, STUB_TOOLS):
            prompt = render(messages, tools, True)
            asked = os.path.commonprefix([prompt, render(messages, tools, False)])
            added.add(prompt[len(asked):])
    if len(added) > 1:
        raise ValueError(f"{name} begins a message after results, or with tools, otherwise than "
                         "one after a user's text: it cannot be followed")
    header = added.pop()
    at = header.rfind(THINK)  # also one that later renderings show again
    return header[at:] if at > header.rfind(UNTHINK) else ""


def _check_appends(render: Render, opening: Sequence[Message],
                   tools: Sequence[Message] | None, end: str, prefill: str, name: str) -> None:
    """That a long dialogue's text is its prompt and then, message by message, what is said
    and the tail of what follows."""
    shown, messages = render(opening, tools, True), list(opening)
    before, stubs = [*opening[:-1], *BEFORE], STUB_TOOLS if tools else None
    for i, new in enumerate([[result("f", _RESULT), result("g", "")], [user(_NEXT)],
                             [result("f", _RESULT)], [result("f", "")], [user(_FIRST)]]):
        reply = f"{_REPLY} {i}"
        messages += [said(reply), *new]
        shown = (shown.removesuffix(prefill) + reply + end
                 + tail(render, before, new, stubs, end))
        if shown != render(messages, tools, True):
            raise ValueError(_CHANGES.format(name))
