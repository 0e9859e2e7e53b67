"""ChatML with Hermes tool calls, the form Qwen2.5-Instruct and its kin are trained on.

    <|im_start|>system ... <tools> one line a tool </tools> ... <|im_end|>
    <|im_start|>user ... <|im_end|>
    <|im_start|>assistant
    <tool_call>
    {"name": "pay", "arguments": {"amount": 12.5}}
    </tool_call><|im_end|>
    <|im_start|>user
    <tool_response>
    {"status": "ok"}
    </tool_response><|im_end|>

Markers are written by id and content with a tokenizer that has no control tokens, so no text
can open or close a message. Earlier messages are never rendered again: thoughts, spacing and
odd arguments stay as they were sampled.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping, Sequence

from rods_jax.text.free import Asked
from rods_jax.text.shots import Shot, nearest
from rods_jax.text.tokenizer import TextTokenizer
from rods_jax.tools import schema
from rods_jax.tools.calls import coerce, format_call, parse_hermes
from rods_jax.tools.env import UserTurn
from rods_jax.types import ParsedStep, Task, ToolCall, ToolResult, ToolSpec

_START, _END, _EOS = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
_SYSTEM = "You are an assistant who gets things done with tools."
_ERROR = "The message held a tool call that could not be read, and nothing was run: "


class Schemas(enum.Enum):
    """How tools are stated in the prompt."""

    FULL = "full"  # the whole JSON schema
    SIGNATURES = "signatures"  # name(a: str, b: int = 1)  # what it does


class _Tag(str):
    """A piece of the template itself: written by id where the tokenizer has such a token.
    Text of users, tools and the policy is never one."""


class HermesFormat:
    """`bare_json`: an untagged JSON call of a declared tool counts as a call (else as text).
    `coerce_numbers`: digits given as text for a number parameter become that number.
    `shots`: worked examples, of which each prompt shows the `n_shots` most like its task, as
    messages before the user's own."""

    rewrites = False

    def __init__(self, tokenizer: TextTokenizer, schemas: Schemas, system: str = _SYSTEM,
                 bare_json: bool = False, coerce_numbers: bool = False,
                 shots: Sequence[Shot] = (), n_shots: int = 0):
        for name in (_START, _END, _EOS):
            if name not in tokenizer.control:
                raise ValueError(f"the tokenizer has no {name}: use one of a ChatML model")
        self.tokenizer, self.schemas, self.system = tokenizer, schemas, system
        self.bare_json, self.coerce_numbers = bare_json, coerce_numbers
        self.shots, self.n_shots = tuple(shots), n_shots
        self.vocab_size = tokenizer.vocab_size
        self.stop_ids = (tokenizer.control[_END], tokenizer.control[_EOS])
        self.pad_id = tokenizer.control[_EOS]

    def start(self, task: Task, tools: Sequence[ToolSpec]) -> HermesDialogue:
        return HermesDialogue(self, {spec.name: spec for spec in tools},
                              nearest(self.shots, task, self.n_shots))

    def plain(self, asked: Asked) -> list[int]:
        """See text/free.py. ChatML knows no thoughts."""
        pieces = []
        for message in asked.messages:
            pieces += [_Tag(_START), f"{message['role']}\n", message["content"], _Tag(_END), "\n"]
        return self.encode([*pieces, _Tag(_START), "assistant\n"])

    def encode(self, pieces: Sequence[str]) -> list[int]:
        """Tags by id; the text between two of them as one string."""
        ids: list[int] = []
        text: list[str] = []
        for piece in pieces:
            control = self.tokenizer.control.get(piece) if isinstance(piece, _Tag) else None
            if control is None:
                text.append(piece)
                continue
            ids += [*self.tokenizer.encode("".join(text)), control]
            text = []
        return ids + self.tokenizer.encode("".join(text))


@dataclasses.dataclass(frozen=True)
class HermesDialogue:
    """Nothing here changes, so a clone is the dialogue itself."""

    form: HermesFormat
    specs: Mapping[str, ToolSpec]
    shots: tuple[Shot, ...] = ()

    def clone(self) -> HermesDialogue:
        return self

    def prompt(self, turn: UserTurn) -> list[int]:
        pieces = [_Tag(_START), "system\n", self.form.system,
                  "\n\n# Tools\n\nThese functions are at hand:\n",
                  *self._tools(turn.tools),
                  "\n\nTo call functions, write a JSON object for each, like this:\n",
                  _Tag("<tool_call>"), '\n{"name": "function", "arguments": {"parameter": "value"}}\n',
                  _Tag("</tool_call>"),
                  "\nTheir results come back in the next message. Once the request is met, or "
                  "something is missing that only the user can give, answer in plain words "
                  "without a call.",
                  _Tag(_END), "\n"]
        for shot in self.shots:
            pieces += [*self._message([shot.user]), *_call(shot.call), _Tag(_END), "\n"]
        return self.form.encode([*pieces, *self._message([turn.text])])

    def user(self, turn: UserTurn) -> list[int]:
        content: list[str] = [turn.text] if turn.text else []
        if turn.new_tools:
            content += ["\n\n"] if content else []
            content += ["More functions are at hand now:\n", *self._tools(turn.new_tools)]
        return self.form.encode(["\n", *self._message(content)])

    def results(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[int]:
        if len(calls) != len(results):
            raise ValueError(f"{len(calls)} calls but {len(results)} results: give one each")
        return self._responses([result.text for result in results])

    def errors(self, errors: Sequence[str]) -> list[int]:
        return self._responses([_ERROR + "; ".join(errors)])

    def step(self, calls: Sequence[ToolCall], text: str = "") -> list[int]:
        pieces: list[str] = [text] if text else []
        for call in calls:
            pieces += ["\n"] if pieces else []
            pieces += _call(call)
        return self.form.encode([*pieces, _Tag(_END)])

    def parse(self, ids: Sequence[int]) -> ParsedStep:
        """A message without a stop id still counts if its calls are complete (with a note);
        otherwise it is an error, since more text may have been meant to come."""
        ids = [int(i) for i in ids]
        stopped = bool(ids) and ids[-1] in self.form.stop_ids
        if any(not 0 <= i < self.form.vocab_size for i in ids):
            return ParsedStep(errors=("an id outside the vocabulary",))
        body = ids[:-1] if stopped else ids
        if any(i in self.form.stop_ids for i in body):
            return ParsedStep(errors=("tokens after the stop token",))
        declared = self.specs if self.form.bare_json else None
        step = parse_hermes(self.form.tokenizer.decode(body), declared)
        if self.form.coerce_numbers:
            calls = tuple(
                ToolCall(c.name, coerce(c.arguments, self.specs[c.name].parameters))
                if c.name in self.specs else c for c in step.calls)
            step = dataclasses.replace(step, calls=calls)
        if stopped:
            return step
        if step.calls and not step.errors:
            return dataclasses.replace(step, notes=(*step.notes, "truncated: no stop token"))
        return dataclasses.replace(
            step, errors=(*step.errors, "truncated: no stop token"))

    def text(self, ids: Sequence[int]) -> str:
        return self.form.tokenizer.decode(int(i) for i in ids)

    def _message(self, content: Sequence[str]) -> list[str]:
        """A user message and the header of the assistant's next one."""
        return [_Tag(_START), "user\n", *content, _Tag(_END), "\n",
                _Tag(_START), "assistant\n"]

    def _responses(self, texts: Sequence[str]) -> list[int]:
        content: list[str] = []
        for text in texts:
            content += ["\n"] if content else []
            content += [_Tag("<tool_response>"), "\n", text, "\n", _Tag("</tool_response>")]
        return self.form.encode(["\n", *self._message(content)])

    def _tools(self, names: Sequence[str]) -> list[str]:
        for name in names:
            if name not in self.specs:
                raise ValueError(f"tool {name!r} is unknown: start the dialogue with its spec")
        state = full_schema if self.form.schemas is Schemas.FULL else signature
        lines = "\n".join(state(self.specs[name]) for name in names)
        return [_Tag("<tools>"), "\n", lines, "\n", _Tag("</tools>")]


def _call(call: ToolCall) -> list[str]:
    return [_Tag("<tool_call>"), "\n", format_call(call), "\n", _Tag("</tool_call>")]


# ------------------------------------------------------------------------------ tools

def full_schema(spec: ToolSpec) -> str:
    """One line of JSON in the shape of an OpenAI function."""
    function = {"name": spec.name, "description": spec.description,
                "parameters": dict(spec.parameters)}
    return json.dumps({"type": "function", "function": function}, ensure_ascii=False)


def signature(spec: ToolSpec) -> str:
    """One line: `name(a: str, b: int = 1)  # first sentence of the description`."""
    # BFCL's documents open with a word on the whole family of tools. A dot inside a number or
    # a path ends no sentence.
    own = " ".join(spec.description.split()).rpartition("Tool description: ")[2]
    sentence = own.split(". ")[0].rstrip(".")
    return schema.signature(spec) + (f"  # {sentence}" if sentence else "")
