"""Tool calls as text: one parser and one writer a wire format.

    <tool_call>{"name": "book", "arguments": {"id": 7}}</tool_call>      parse_hermes
    {"name": "book", "parameters": {"id": 7}}; {...}                     parse_llama_json
    [book(id=7), pay(amount=12.5)]                                       parse_llama_pythonic
    [book(id=7), pay(amount=12.5)]                                       parse_call_list (BFCL)

(The toolbox's compact form is on token ids, see rods_jax/text/compact.py.)

What a model wrote is data: it is read by the json module and by `ast.parse`, whose tree is
walked for literals and never compiled or evaluated. No parser raises, whatever the text, and
each is bounded in size and depth (`Limits`). What cannot be read becomes an error with a
reason, and never a call with fewer arguments than were written. For all of them:

* Reasoning (<think> ... </think>) is cut off first; a call drafted in it is no call.
* Integers stay exact; NaN, Infinity, numbers beyond a float and repeated keys are refused.
* An argument object may be JSON, or a Python literal of the same shape (None, True, single
  quotes). A string that holds one is unpacked once. An empty string means no arguments.
* A bad escape such as "\\d" in a JSON string is refused, not guessed at.
* A call that is complete but whose closer never came counts, with a note.
* A tool's name is identifiers joined by "." or "-", as declared: `Files.ls` is not `ls`.

A parsed call is still no promise: Hermes calls may name any tool, and JSON arguments may have
any key. Whether the tool is visible and has such a parameter is for the environment to check.
"""

from rods_jax.tools.calls_hermes import format_call, format_hermes, parse_hermes
from rods_jax.tools.calls_json import parse_json_calls
from rods_jax.tools.calls_list import format_call_list, parse_call_list
from rods_jax.tools.calls_llama import (
    format_llama_json, parse_llama_json, parse_llama_pythonic)
from rods_jax.tools.calls_step import ParsedText
from rods_jax.tools.literals import LIMITS, Limits, coerce

__all__ = (
    "LIMITS", "Limits", "ParsedText", "coerce", "format_call", "format_call_list",
    "format_hermes", "format_llama_json", "parse_call_list", "parse_hermes", "parse_json_calls",
    "parse_llama_json", "parse_llama_pythonic")
