"""How the calls in a model's messages are written, and which reader takes them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from rods_jax.text.habits import check_tools
from rods_jax.text.template import Template
from rods_jax.tools.calls import (
    ParsedText, coerce, parse_hermes, parse_llama_json, parse_llama_pythonic)
from rods_jax.types import ToolCall, ToolSpec


class Wire(str, enum.Enum):
    """See rods_jax/tools/calls.py."""

    HERMES = "hermes"  # <tool_call> {"name": ..., "arguments": {...}} </tool_call>
    LLAMA_JSON = "llama_json"  # {"name": ..., "parameters": {...}}
    LLAMA_PYTHONIC = "llama_pythonic"  # [name(key=value)]


def read_calls(wire: Wire, text: str, specs: Mapping[str, ToolSpec], bare_json: bool = False,
               coerce_numbers: bool = False) -> ParsedText:
    """A message without its end token, read. `bare_json`: a message of HERMES may leave its
    tags out, as those of LLAMA_JSON always do."""
    if wire is Wire.HERMES:
        step = parse_hermes(text, specs if bare_json else None)
    elif wire is Wire.LLAMA_JSON:
        step = parse_llama_json(text, specs)
    else:
        step = parse_llama_pythonic(text, tuple(specs.values()))
    if not coerce_numbers:
        return step
    return dataclasses.replace(step, calls=tuple(
        ToolCall(call.name, coerce(call.arguments, specs[call.name].parameters))
        if call.name in specs else call for call in step.calls))


def guess_wire(template: Template) -> Wire:
    """The wire in which the template itself writes calls. Raises ValueError where that is none
    of those, or not certain, or where it writes none at all."""
    check_tools(template.render, (), template.name)
    call = ToolCall("look_up", {"word": "x"})
    spec = ToolSpec(call.name, "", {"type": "object", "properties": {"word": {}}}, "")
    function = {"name": call.name, "arguments": dict(call.arguments)}
    text = template.render([
        {"role": "user", "content": "a question"},
        {"role": "assistant", "content": "",
         "tool_calls": [{"type": "function", "function": function}]}])
    said = text.partition("a question")[2]
    if read_calls(Wire.HERMES, said, {}).calls == (call,):
        return Wire.HERMES
    llama = "ipython" in template.source and '"parameters"' in said
    if llama and read_calls(Wire.LLAMA_JSON, said, {spec.name: spec}).calls == (call,):
        return Wire.LLAMA_JSON
    raise ValueError(f"{template.name} does not show how the model writes its calls: give wire, "
                     f"one of {', '.join(wire.value for wire in Wire)}")
