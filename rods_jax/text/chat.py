"""A dialogue in a model's own chat template, token by token what that template would give.

The prompt is the template's own text, encoded. After that nothing is encoded twice: a message
stays as it was sampled, and what follows it (results, the next user turn) is cut out of the
template's text for a short dialogue that ends alike. How messages relate to the whole template
is checked when the format is made, see habits.py; contents cannot spell control tokens, see
guard.py.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence

from rods_jax.text import habits
from rods_jax.text.free import Asked
from rods_jax.text.guard import Guard
from rods_jax.text.habits import Message
from rods_jax.text.specials import read_specials
from rods_jax.text.template import NOW, Template, load_template
from rods_jax.text.tokenizer import TextTokenizer, tokenizer_from_json
from rods_jax.text.wire import Wire, guess_wire, read_calls
from rods_jax.tools.calls import ParsedText, format_call
from rods_jax.tools.env import UserTurn
from rods_jax.types import Json, ParsedStep, Task, ToolCall, ToolResult, ToolSpec

_ERROR = "The message held a tool call that could not be read, and nothing was run: "
_MORE = "More functions are at hand now:"
_TAG = re.compile(r"</?\w+>")
_CALLS_FOLLOW = "<|eom_id|>"  # ends a message of Llama 3 that waits for a result


class Thinking(str, enum.Enum):
    """What becomes of a model's thoughts."""

    OFF = "off"  # none are asked for; an empty think block in the prompt stays in the ids
    KEEP = "keep"  # they stay in the context, which only grows
    TEMPLATE = "template"  # as the template has it; one that drops them makes a row a turn


class TemplateFormat:
    """`stop_ids`: end tokens of the model; the one by which the template ends a message is
    added where it is missing. `system` None: what the template says by itself.
    `coerce_numbers`: digits given as text for a number parameter become that number.
    `bare_json`: with Wire.HERMES, an untagged JSON call of a declared tool counts as a call.

    Raises ValueError, one line, where the template cannot be followed, or writes tokens that
    the tokenizer does not have."""

    def __init__(self, tokenizer: TextTokenizer, template: Template, wire: Wire,
                 stop_ids: Sequence[int], pad_id: int, thinking: Thinking,
                 system: str | None = None, coerce_numbers: bool = False,
                 bare_json: bool = False):
        self.tokenizer, self.template, self.wire = tokenizer, template, wire
        self.thinking, self.pad_id, self.vocab_size = thinking, pad_id, tokenizer.vocab_size
        self.coerce_numbers, self.bare_json = coerce_numbers, bare_json
        short = () if system is None else ({"role": "system", "content": "s"},)
        self.guard = self._guard(short)
        self.system: tuple[Message, ...] = ()
        if system is not None:
            self.system = ({"role": "system", "content": self.guard.hide(system)},)
        stops = [name for name, i in tokenizer.control.items() if i in stop_ids]
        if len(stops) < len(set(stop_ids)):
            raise ValueError(f"stop ids {list(stop_ids)} are not all control tokens of the "
                             "tokenizer: take both from one model")
        if wire is not Wire.HERMES and _CALLS_FOLLOW in tokenizer.control:
            stops.append(_CALLS_FOLLOW)
        self.habits = habits.study(self.render, tokenizer.control, short, template.name)
        if thinking is Thinking.OFF and self.habits.opened:
            raise ValueError(f"{template.name} opens a thought in every prompt, also with "
                             "thinking off: use Thinking.KEEP or Thinking.TEMPLATE "
                             '(policy.thinking="keep" or "template")')
        self.rewrites = thinking is Thinking.TEMPLATE and self.habits.drops_thoughts
        if self.rewrites and self.habits.in_turn:
            raise ValueError(f"{template.name} drops thoughts within a turn, where ids can only "
                             "be appended: use Thinking.KEEP")
        self.end_id = tokenizer.control[self.habits.end]
        stops.append(self.habits.end)
        self.stop_ids = tuple(dict.fromkeys(
            [*stop_ids, *(tokenizer.control[name] for name in stops)]))
        self._ends = re.compile("|".join(re.escape(name) for name in stops))
        self._before = (*short, *habits.BEFORE)
        self._before_step = self._before[:-1]
        self._opening = {tools: self.render(self._before_step, _stubs(tools), True)
                         for tools in (False, True)}

    def _guard(self, system: Sequence[Message]) -> Guard:
        tags = set(_TAG.findall(self.template.source))
        guard = Guard(self.tokenizer, tags)
        if not habits.encloses(self.render, guard, system):
            return guard
        guard = Guard(self.tokenizer, tags, enclosed=True)
        try:
            apart = not habits.encloses(self.render, guard, system)
        except ValueError:  # it looks up a key that is now shown as something else
            apart = False
        if apart:
            return guard
        raise ValueError(f"{self.template.name} makes control tokens of names and keys, so they "
                         "cannot be kept apart from text: take another template")

    def start(self, task: Task, tools: Sequence[ToolSpec]) -> TemplateDialogue:
        return TemplateDialogue(self, {spec.name: spec for spec in tools})

    def render(self, messages: Sequence[Message], tools: Sequence[Message] | None,
               generate: bool) -> str:
        return self.template.render(messages, tools, generate,
                                    enable_thinking=self.thinking is not Thinking.OFF)

    def plain(self, asked: Asked) -> list[int]:
        """See text/free.py. A system message stands first in the user's where the template has
        no place for it; one of the format's own is not shown."""
        messages = [{"role": message["role"], "content": self.guard.hide(message["content"])}
                    for message in asked.messages]
        thinking = (self.thinking is not Thinking.OFF if asked.thinking is None
                    else asked.thinking)

        def ids(messages: Sequence[Message]) -> list[int]:
            return self.guard.encode(
                self.template.render(messages, None, True, enable_thinking=thinking))

        try:
            return ids(messages)
        except ValueError:
            if [message["role"] for message in messages[:2]] != ["system", "user"]:
                raise
            first, second, *rest = messages
            return ids([habits.user(f"{first['content']}\n\n{second['content']}"), *rest])

    def following(self, new: Sequence[Message], tools: bool) -> list[int]:
        """What `new` messages add behind the end token of an assistant message; `tools`:
        whether the prompt shows any."""
        return self.guard.encode(
            habits.tail(self.render, self._before, new, _stubs(tools), self.habits.end))

    def spoken(self, message: Message, tools: bool) -> list[int]:
        """The assistant's message as the template shows it, behind the generation prompt and
        up to its end token."""
        opening = self._opening[tools]
        text = self.render([*self._before_step, message], _stubs(tools), False)
        end = self._ends.search(text, len(opening))
        if not text.startswith(opening) or end is None:
            raise ValueError(f"{self.template.name} does not show this message behind its own "
                             "generation prompt: it cannot be written for the model")
        return self.guard.encode(text[len(opening): end.end()])


@dataclasses.dataclass(frozen=True)
class _Last:
    """The last assistant message: its text for the template, and whether it lacks an end."""

    content: str
    cut: bool


class TemplateDialogue:
    """State: whether the prompt showed tools, how the last message ended, and, where the
    format rewrites, all messages so far."""

    def __init__(self, form: TemplateFormat, specs: Mapping[str, ToolSpec]):
        self.form, self.specs = form, specs
        self._tools: list[Message] | None = None
        self._history: tuple[Message, ...] = ()
        self._last: _Last | None = None

    def clone(self) -> TemplateDialogue:
        other = TemplateDialogue(self.form, self.specs)
        other._tools, other._history, other._last = self._tools, self._history, self._last
        return other

    # ------------------------------------------------------------------------ text to ids

    def prompt(self, turn: UserTurn) -> list[int]:
        form = self.form
        self._tools = [form.guard.hide(self._schema(name)) for name in turn.tools] or None
        self._history, self._last = (*form.system, self._asked(turn.text, ())), None
        return form.guard.encode(form.render(self._history, self._tools, True))

    def user(self, turn: UserTurn) -> list[int]:
        """Tools that became visible are stated in the user's message."""
        message = self._asked(turn.text, turn.new_tools)
        if not self.form.rewrites:
            return self._append([message])
        self._remember([message])
        return self.form.guard.encode(self.form.render(self._history, self._tools, True))

    def results(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[int]:
        if len(calls) != len(results) or not calls:
            raise ValueError(f"{len(calls)} calls but {len(results)} results: give one each")
        hide = self.form.guard.hide
        return self._append([habits.result(hide(call.name), hide(result.text))
                             for call, result in zip(calls, results)])

    def errors(self, errors: Sequence[str]) -> list[int]:
        """As a result, so that the turn goes on."""
        text = self.form.guard.hide(_ERROR + "; ".join(errors))
        return self._append([habits.result("error", text)])

    def step(self, calls: Sequence[ToolCall], text: str = "") -> list[int]:
        """Raises ValueError for a call that could not be read back, and where the template
        refuses the message: Llama 3's takes one call a message. Some templates leave out text
        beside calls."""
        hide = self.form.guard.hide
        made = [_checked(call) for call in calls]
        message = (habits.called([(c.name, hide(c.arguments)) for c in made], hide(text))
                   if made else habits.said(hide(text)))
        ids = self.form.spoken(message, self._tools is not None)
        self._hear(ids[:-1], cut=False)
        return ids

    def _append(self, messages: Sequence[Message]) -> list[int]:
        cut = self._last is not None and self._last.cut
        self._remember(messages)
        ids = self.form.following(messages, self._tools is not None)
        return [self.form.end_id, *ids] if cut else ids

    def _remember(self, messages: Sequence[Message]) -> None:
        """Moves the last message into the history, `messages` behind it."""
        if self.form.rewrites:
            if self._last is None:
                raise ValueError("no assistant message came before this: call parse or step "
                                 "with it first")
            self._history += (habits.said(self._last.content), *messages)
        self._last = None

    def _hear(self, ids: Sequence[int], cut: bool) -> None:
        form = self.form
        content = form.habits.prefill + form.guard.read(ids) if form.rewrites else ""
        self._last = _Last(content, cut)

    def _asked(self, text: str, new_tools: Sequence[str]) -> Message:
        parts = [text] if text else []
        if new_tools:
            lines = [json.dumps(self._schema(name), ensure_ascii=False) for name in new_tools]
            parts.append("\n".join([_MORE, *lines]))
        return habits.user(self.form.guard.hide("\n\n".join(parts)))

    def _schema(self, name: str) -> Message:
        if name not in self.specs:
            raise ValueError(f"tool {name!r} is unknown: start the dialogue with its spec")
        spec = self.specs[name]
        return {"type": "function", "function": {
            "name": spec.name, "description": spec.description,
            "parameters": dict(spec.parameters)}}

    # ------------------------------------------------------------------------ ids to calls

    def parse(self, ids: Sequence[int]) -> ParsedStep:
        """A message without a stop id still counts if its calls are complete (with a note);
        otherwise it is an error, since more text may have been meant to come."""
        form, ids = self.form, [int(i) for i in ids]
        stopped = bool(ids) and ids[-1] in form.stop_ids
        body = ids[:-1] if stopped else ids
        self._hear([i for i in body if 0 <= i < form.vocab_size], cut=not stopped)
        if any(not 0 <= i < form.vocab_size for i in ids):
            return ParsedStep(errors=("an id outside the vocabulary",))
        if any(i in form.stop_ids for i in body):
            return ParsedStep(errors=("tokens after the stop token",))
        # A thought that the prompt opened may stay open, and what is drafted in it is no call.
        step = read_calls(form.wire, form.habits.opened + form.tokenizer.decode(body),
                          self.specs, form.bare_json, form.coerce_numbers)
        return step if stopped else _cut(step)

    def text(self, ids: Sequence[int]) -> str:
        return self.form.tokenizer.decode(int(i) for i in ids)


def _stubs(tools: bool) -> Sequence[Message] | None:
    return habits.STUB_TOOLS if tools else None


def _cut(step: ParsedText) -> ParsedText:
    reason = "truncated: no stop token"
    if step.calls and not step.errors:
        return dataclasses.replace(step, notes=(*step.notes, reason))
    return dataclasses.replace(step, errors=(*step.errors, reason))


def _checked(call: ToolCall) -> ToolCall:
    """The call with its arguments as an object, also where they came as JSON text."""
    arguments: Json = call.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise ValueError(f"arguments of {call.name!r} are no JSON: {error}") from None
    if not isinstance(arguments, Mapping):
        raise ValueError(f"arguments of {call.name!r} are not an object: give names and values")
    call = ToolCall(call.name, dict(arguments))
    format_call(call)  # refuses what could not be read back
    return call


def chat_format(folder: str | os.PathLike, thinking: Thinking, wire: Wire | None = None,
                system: str | None = None, coerce_numbers: bool = False,
                bare_json: bool = False, now: datetime.datetime = NOW) -> TemplateFormat:
    """From the tokenizer, template and end tokens in a Hugging Face folder. `wire` None: the
    one that the template shows, where it shows one. `now`: the date for templates that state
    it; fixed, or the same task would have another prompt tomorrow."""
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: check the path")
    tokenizer, template = tokenizer_from_json(folder), load_template(folder, now)
    specials = read_specials(folder, tokenizer)
    return TemplateFormat(
        tokenizer, template, guess_wire(template) if wire is None else wire,
        specials.stop_ids, specials.pad_id, thinking, system, coerce_numbers, bare_json)
