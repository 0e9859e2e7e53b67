"""Chat templates as their makers wrote them, plain renderings and ids to compare with, and
dialogues that are played through a format and written out as messages.

The templates are files of the trl package, which is not imported. The rendering here is plain
Jinja without a sandbox, and the ids come from a tokenizers.Tokenizer that knows the control
tokens and finds them in the whole text.
"""

import dataclasses
import functools
import importlib.util
import json
import pathlib

import jinja2
import pytest
import tokenizers

from rods_jax.text.chat import TemplateFormat, Thinking
from rods_jax.text.template import make_template
from rods_jax.text.tokenizer import TextTokenizer, byte_tokenizer
from rods_jax.text.wire import Wire
from rods_jax.tools.env import UserTurn
from rods_jax.types import Category, Task, ToolCall, ToolResult, ToolSpec, Turn

QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
QWEN3 = (*QWEN, "<tool_response>", "</tool_response>", "<think>", "</think>")
LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
         "<|eom_id|>", "<|eot_id|>", "<|python_tag|>")


@dataclasses.dataclass(frozen=True)
class Family:
    """A template, the control tokens of its tokenizer and, of those, the ones named."""

    name: str
    control: tuple[str, ...]
    start: str  # opens a message
    end: str
    pad: str
    wire: Wire
    bos: str | None = None


FAMILIES = {family.name: family for family in (
    Family("qwen2_5", QWEN, "<|im_start|>", "<|im_end|>", QWEN[0], Wire.HERMES),
    Family("qwen3", QWEN3, "<|im_start|>", "<|im_end|>", QWEN[0], Wire.HERMES),
    Family("qwen3_instruct_2507", QWEN3, "<|im_start|>", "<|im_end|>", QWEN[0], Wire.HERMES),
    Family("llama3_1", LLAMA, "<|start_header_id|>", "<|eot_id|>", LLAMA[1], Wire.LLAMA_JSON,
           LLAMA[0]),
    Family("llama3_2", LLAMA, "<|start_header_id|>", "<|eot_id|>", LLAMA[1], Wire.LLAMA_JSON,
           LLAMA[0]))}


@functools.cache
def source(name: str) -> str:
    spec = importlib.util.find_spec("trl")
    if spec is None:
        pytest.skip("the chat templates are files of the package trl, which is not here")
    folder = pathlib.Path(spec.submodule_search_locations[0])
    return (folder / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


# ------------------------------------------------------------------------------ reference


@functools.cache
def _compiled(name: str) -> jinja2.Template:
    def refuse(message):
        raise jinja2.TemplateError(message)

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True,
                                     extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: "26 Jul 2024"
    return environment.from_string(source(name))


def render(name: str, messages, tools, generate: bool, **variables) -> str:
    """What the template says of a whole dialogue."""
    bos = FAMILIES[name].bos
    special = {} if bos is None else {"bos_token": bos}
    return _compiled(name).render(messages=messages, tools=tools or None,
                                  add_generation_prompt=generate, **special, **variables)


@dataclasses.dataclass(frozen=True)
class Codec:
    """The tokenizer under test and a reference that knows the same control tokens."""

    tokenizer: TextTokenizer
    whole: tokenizers.Tokenizer

    def ids(self, text: str) -> list[int]:
        return self.whole.encode(text, add_special_tokens=False).ids


def codec(plain: TextTokenizer, control: tuple[str, ...]) -> Codec:
    """The pieces of `plain` with other control tokens behind them, some special, some not."""
    whole = tokenizers.Tokenizer.from_str(plain.plain.to_str())
    first = plain.vocab_size
    for i in range(whole.get_vocab_size(), first):  # ids must come out as in `plain`
        whole.add_tokens([tokenizers.AddedToken(f"\u2400gap {i}", normalized=False)])
    for token in control:
        whole.add_tokens([tokenizers.AddedToken(
            token, normalized=False, special=token.startswith("<|"))])
    ids = {token: whole.token_to_id(token) for token in control}
    size = 1 + max([first, *ids.values()])
    return Codec(TextTokenizer(plain.plain, ids, size, plain.no_piece), whole)


@functools.cache
def byte_codec(name: str) -> Codec:
    return codec(byte_tokenizer(), FAMILIES[name].control)


# ------------------------------------------------------------------------------ dialogues


@dataclasses.dataclass(frozen=True)
class Say:
    calls: tuple[ToolCall, ...] = ()
    text: str = ""
    thought: str = ""  # then the message is sampled, since experts write none


@dataclasses.dataclass(frozen=True)
class Results:
    texts: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class User:
    text: str
    new_tools: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Script:
    """A dialogue: the first user text and all that follows it."""

    user: str
    beats: tuple[Say | Results | User, ...]
    tools: tuple[str, ...] = ("find", "book")
    system: str | None = None


SPECS = {spec.name: spec for spec in (
    ToolSpec("find", "Finds flights, trains & <b>ferries</b>.", {
        "type": "object", "properties": {
            "to": {"type": "string", "description": "A city, e.g. \"Malmö\"", "default": "東京"},
            "via": {"type": "array", "items": {"type": "object", "properties": {
                "stop": {"type": "string"}, "hours": {"type": "number"}}}},
            "limit": {"type": ["integer", "null"]}}, "required": ["to"]}, "travel"),
    ToolSpec("book", "", {"type": "object", "properties": {}}, "travel"),
    ToolSpec("pay", "Pays.\nAt once.", {"type": "object", "properties": {
        "amount": {"type": "number"}}}, "money"))}
TASK = Task("t", ("travel",), Category.BASE, {}, (Turn("x", (), ("find",)),), scenario="s")

FIND = ToolCall("find", {"to": "Kraków <3 & \"more\"", "via": [{"stop": "a\nb", "hours": 1.5}],
                         "limit": None})
BOOK = ToolCall("book", {})
SCRIPTS = {
    "short": Script("Hello", (Say(text="Hi."),), tools=()),
    "call": Script("Fly me to Kraków", (
        Say((FIND,)), Results(('{"price": 12.50, "ok": true}',)), Say(text="Found it. ✈"))),
    "turns": Script("Find it", (
        Say((FIND,)), Results(("[]",)), Say((BOOK,), "Then I book."), Results(("",)),
        Say(text="Done."), User(""), Say(text=""), User("And pay?", ("pay",)),
        Say((ToolCall("pay", {"amount": -0.5}),)), Results(("error: no\n\nmoney  ",)),
        Say(text="No money.\n")), system="Be brief."),
    "no system, no tools at first": Script("", (
        Say(text="What?"), User("", ("find", "pay")), Say((FIND,)), Results(("x",)),
        Say(text="Yes"), User("  spaced  \n"), Say(text="ok")), tools=()),
    "odd texts": Script("日本語 \u200b\t x", (
        Say((ToolCall("find", {"to": "", "via": [], "é": {"ü": [True, [None, {}]]}}),)),
        Results(("\n\n{\"a\": \"\\u00e9 \\\" \"}\n",)), Say(text="{\"not\": \"a call\"}"),
        User("\r\n x \x0b")), system=""),
}
PARALLEL = Script("Two things", (
    Say((FIND, BOOK)), Results(("one", "two")), Say((BOOK, BOOK, FIND), "Now:"),
    Results(("", "b", "c")), Say(text="ok"), User("more"), Say((BOOK,)), Results(("d",)),
    Say(text="end")), system="S")
THOUGHTS = Script("Think", (
    Say((FIND,), thought="I look\n\nfirst"), Results(("r",)), Say((BOOK,), "So", "then\tbook"),
    Results(("s",)), Say(text="Booked.", thought="all done"), User("again"),
    Say((BOOK,), thought="once more"), Results(("t",)), Say(text="Yes.", thought="fine"),
    User("", ("pay",)), Say(text="Thanks.", thought="polite")), system="S")


def tool_json(name: str) -> dict:
    spec = SPECS[name]
    return {"type": "function", "function": {
        "name": spec.name, "description": spec.description, "parameters": spec.parameters}}


def message(beat: Say | User) -> dict:
    """The message in the form that templates are written for."""
    if isinstance(beat, User):
        text = beat.text
        if beat.new_tools:
            lines = [json.dumps(tool_json(name), ensure_ascii=False) for name in beat.new_tools]
            stated = "More functions are at hand now:\n" + "\n".join(lines)
            text = f"{text}\n\n{stated}" if text else stated
        return {"role": "user", "content": text}
    made = {"role": "assistant", "content": beat.text}
    if beat.calls:
        made["tool_calls"] = [
            {"type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in beat.calls]
    return made | ({"reasoning_content": beat.thought} if beat.thought else {})


def opening(script: Script) -> tuple[list[dict], list[dict]]:
    """The first messages and the tools."""
    system = [] if script.system is None else [{"role": "system", "content": script.system}]
    return ([*system, {"role": "user", "content": script.user}],
            [tool_json(name) for name in script.tools])


def written_out(script: Script) -> tuple[list[dict], list[dict]]:
    """All messages and the tools."""
    messages, tools = opening(script)
    for beat in script.beats:
        messages += ([{"role": "tool", "content": text} for text in beat.texts]
                     if isinstance(beat, Results) else [message(beat)])
    return messages, tools


def make_format(name: str, thinking=Thinking.OFF, tokenizer=None, **options) -> TemplateFormat:
    family = FAMILIES[name]
    tokenizer = tokenizer or byte_codec(name).tokenizer
    special = {} if family.bos is None else {"bos_token": family.bos}
    stops = (tokenizer.control[family.end], tokenizer.control[family.pad])
    return TemplateFormat(tokenizer, make_template(source(name), f"{name}.jinja", special),
                          options.pop("wire", family.wire), stops, stops[1], thinking, **options)


def turn_of(beat: User, index: int = 1) -> UserTurn:
    return UserTurn(index, beat.text, (), beat.new_tools)


def answers(texts: tuple[str, ...]) -> list[ToolResult]:
    return [ToolResult(text, True) for text in texts]
