"""A model's chat template: its makers' own text for a list of messages and tools.

A template is Jinja, a small programming language, and comes with the weights. It is rendered in
jinja2's immutable sandbox, where no attribute that starts with an underscore can be reached and
nothing that is passed in can be changed. What templates expect beside plain Jinja, as
transformers gives it to them:

    tojson                 no HTML escapes, text beyond ASCII as it is; indent, separators,
                           sort_keys and ensure_ascii as in json.dumps
    raise_exception(text)  the template refuses its input
    strftime_now(form)     the date; here a fixed one, so that runs repeat
    break, continue        in loops
    generation             {% generation %} ... {% endgeneration %} around assistant text
    bos_token, eos_token   and pad_token, unk_token, where the tokenizer names them

Loops over `range`, products and output are bounded. That stops accidents; it is no wall against
a file made to do harm.

Needs the `jinja2` package.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rods_jax.text.guard import AS_JSON
from rods_jax.text.json_file import read_object, read_optional
from rods_jax.types import Json

NOW = datetime.datetime(2024, 7, 26)  # the day that Llama 3.1's template names by default

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
_OLDEST_JINJA = (3, 1, 6)  # before it the sandbox is known to leak
_MAX_STEPS = 1_000_000  # of all loops over `range` in one rendering
_MAX_CHARS = 20_000_000  # of output, and of what a product makes
_MAX_POWER = 64


@dataclasses.dataclass(frozen=True)
class Template:
    """`name`: the file's, for errors. `variables`: what every rendering sees beside its
    messages and tools. `compiled`: a jinja2.Template."""

    name: str
    source: str
    variables: Mapping[str, Any]
    compiled: Any

    def render(self, messages: Sequence[Mapping[str, Json]],
               tools: Sequence[Mapping[str, Json]] | None = None, generate: bool = False,
               **variables: Json) -> str:
        """The text of the messages; `generate`: and the header of the assistant's next one.
        All data must be plain JSON. Raises ValueError, one line, for whatever the template
        raises or stumbles over."""
        parts, size = [], 0
        try:
            for part in self.compiled.generate(
                    {**self.variables, **variables, "messages": list(messages), "tools": tools,
                     "documents": None, "add_generation_prompt": generate, "range": _range()}):
                parts.append(part)
                size += len(part)
                if size > _MAX_CHARS:
                    raise OverflowError(f"over {_MAX_CHARS} characters of output")
        except Exception as error:  # a template is a program: it may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"{self.name}{_line(error)}: {reason}") from None
        return "".join(parts)


def make_template(source: str, name: str = "the chat template",
                  special: Mapping[str, str] | None = None,
                  now: datetime.datetime = NOW) -> Template:
    """`special`: bos_token, eos_token, pad_token, unk_token, those that there are. A template
    that writes another of them is refused when it does. Raises ValueError with the line of a
    syntax error."""
    jinja2 = _jinja2()
    environment = _environment(now)
    try:
        compiled = environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"{name} line {error.lineno}: {error.message}") from None
    except SyntaxError as error:  # of the Python that it became: {% break %} outside a loop
        raise ValueError(f"{name} cannot be run: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"{name} nests too deep") from None
    variables = {token: _lacking(token) for token in _SPECIAL} | dict(special or {})
    return Template(name, source, variables, compiled)


def load_template(folder: str | os.PathLike, now: datetime.datetime = NOW) -> Template:
    """From chat_template.jinja, chat_template.json, or "chat_template" in
    tokenizer_config.json, the first that there is; of several named templates the one called
    tool_use, else default. Its special tokens are those of tokenizer_config.json."""
    folder = pathlib.Path(folder)
    source, path = _source(folder)
    special = special_tokens(read_optional(folder / "tokenizer_config.json"))
    return make_template(source, str(path), special, now)


def special_tokens(config: Mapping[str, Json]) -> dict[str, str]:
    """The special tokens that a tokenizer_config.json names, each a string or an object that
    holds one."""
    found = {}
    for name in _SPECIAL:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str) and value:
            found[name] = value
    return found


# ------------------------------------------------------------------------------ files


def _source(folder: pathlib.Path) -> tuple[str, pathlib.Path]:
    for path in (folder / "additional_chat_templates" / "tool_use.jinja",
                 folder / "chat_template.jinja"):
        if path.exists():
            try:
                return path.read_text(encoding="utf-8"), path
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"{path} cannot be read ({error}): fetch it again") from None
    for path in (folder / "chat_template.json", folder / "tokenizer_config.json"):
        if path.exists() and (value := read_object(path).get("chat_template")) is not None:
            return _choose(value, path), path
    raise ValueError(f"{folder} has no chat_template.jinja, chat_template.json or chat_template "
                     "in tokenizer_config.json: take an instruction-tuned model, or write one")


def _choose(value: Json, path: pathlib.Path) -> str:
    named = value
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value
                 if isinstance(item, dict)}
    if isinstance(named, dict):
        value = named.get("tool_use", named.get("default"))
    if not isinstance(value, str):
        raise ValueError(f"{path}: chat_template is neither text nor a list that names a "
                         "tool_use or default template")
    return value


# ------------------------------------------------------------------------------ sandbox


def _jinja2() -> Any:
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
    except ImportError:
        raise ValueError("the package jinja2 is not installed: pip install jinja2") from None
    version = tuple(int(part) for part in re.findall(r"\d+", jinja2.__version__)[:3])
    if version < _OLDEST_JINJA:
        raise ValueError(f"jinja2 {jinja2.__version__} has a sandbox that leaks: "
                         "pip install -U jinja2")
    return jinja2


def _environment(now: datetime.datetime) -> Any:
    jinja2 = _jinja2()

    class Bounded(jinja2.sandbox.ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context, operator, left, right):
            _check_product(operator, left, right)
            return super().call_binop(context, operator, left, right)

    class Generation(jinja2.ext.Extension):
        """The tag says which text is the assistant's. Here that is known without it."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    class Namespace(jinja2.utils.Namespace):
        """One that takes no names of Python's own."""

        def __init__(*args, **kwargs):  # as jinja2's: a template may name a value `self`
            self, *args = args
            jinja2.utils.Namespace.__init__(self)
            for name, value in dict(*args, **kwargs).items():
                self[name] = value

        def __setitem__(self, name, value):
            if str(name).startswith("_"):
                raise jinja2.exceptions.SecurityError(f"{name!r} cannot be set on a namespace")
            jinja2.utils.Namespace.__setitem__(self, name, value)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(str(message))

    environment = Bounded(trim_blocks=True, lstrip_blocks=True,
                          extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals.pop("lipsum")
    environment.globals.update(
        namespace=Namespace, raise_exception=raise_exception,
        strftime_now=lambda form: now.strftime(form))
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
            sort_keys: bool = False) -> str:
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators,
                      sort_keys=sort_keys).translate(AS_JSON)
    return re.sub("[^\0-~]", _escape, text) if ensure_ascii else text


def _escape(match: re.Match[str]) -> str:
    # A lone surrogate stands for another character (see guard.py) and must stay whole.
    surrogate = 0xD800 <= ord(match[0]) <= 0xDFFF
    return match[0] if surrogate else json.dumps(match[0])[1:-1]


def _range() -> Any:
    """`range` with a bound on the steps of all its loops together."""
    left = _MAX_STEPS

    def bounded(*bounds: int) -> range:
        nonlocal left
        steps = range(*bounds)
        if steps and abs(steps[-1] - steps[0]) // abs(steps.step) >= left:
            raise OverflowError(f"over {_MAX_STEPS} steps of loops over range")
        left -= len(steps)
        return steps

    return bounded


def _check_product(operator: str, left: Any, right: Any) -> None:
    if operator == "**":
        if abs(right) > _MAX_POWER:
            raise OverflowError(f"a power over {_MAX_POWER}")
        return
    for held, times in ((left, right), (right, left)):
        if hasattr(held, "__len__") and isinstance(times, int) and len(held) * times > _MAX_CHARS:
            raise OverflowError(f"a product of over {_MAX_CHARS} items")


def _lacking(token: str) -> Any:
    """Undefined, as tests and conditions in a template see it, but it cannot be written: a
    prompt without its first token would look right and be wrong."""
    jinja2 = _jinja2()

    class Lacking(jinja2.Undefined):
        def __str__(self):
            self._fail_with_undefined_error()

    return Lacking(hint=f"it writes {token}, which tokenizer_config.json does not name")


def _line(error: BaseException) -> str:
    """Where in the template an error came up; jinja2 puts its lines into the traceback."""
    line, at = "", error.__traceback__
    while at is not None:
        if at.tb_frame.f_code.co_filename == "<template>":
            line = f" line {at.tb_lineno}"
        at = at.tb_next
    return line
