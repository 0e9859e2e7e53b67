"""From a config file to typed frozen dataclasses, strictly.

A config is a Python file with `get_config() -> ml_collections.ConfigDict`. It is the only
place a ConfigDict is seen: `load` turns it into nested frozen dataclasses and the rest of
the code takes those. Every mistake is one line that names the file, the full field, what it
got, what was expected and what to do.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import enum
import errno
import functools
import importlib.util
import json
import os
import pathlib
import re
import sys
import tempfile
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import ml_collections

from rods_jax.types import Json

Config = TypeVar("Config")


class UserError(ValueError):
    """A mistake that its one-line message tells how to mend; shown without a traceback."""


class ConfigError(UserError):
    """A config that cannot be used."""


@dataclasses.dataclass(frozen=True)
class _Origin:
    """Which file a value came from, or which `--set` replaced it (by full field path)."""

    file: str
    overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def set_by(self, path: str, said: str) -> str:
        """The `--set` whose field a complaint about the group `path` names, "" for none."""
        words = [word.strip(".") for word in re.findall(r"[\w.]+", said)]
        for text in self.overrides.values():
            field = text.partition("=")[0].strip()
            outer, _, name = field.rpartition(".")
            if field in words or (outer == path and name in words):
                return f"--set {text}"
        return ""

    def error(self, path: str, got: str, expected: str, remedy: str) -> ConfigError:
        where = self.file
        for field, text in self.overrides.items():
            if path == field or path.startswith((f"{field}.", f"{field}[")):
                where = f"--set {text}"
        line = f"{where}: {path or 'the config'}: got {got}, expected {expected}; {remedy}"
        return ConfigError(" ".join(line.split()))


def load(path: str | os.PathLike, overrides: Sequence[str], cls: type[Config]) -> Config:
    """Reads `get_config()` of the file at `path`, applies `field.subfield=value` overrides
    in order and returns a `cls`.

    The value of an override is a Python literal, or text where it is not one. Raises
    ConfigError, one line.
    """
    file = os.fspath(path)
    values = _plain(_run_config_file(file))
    applied = {}
    for text in overrides:
        field, value = parse_override(text)
        applied[_set(values, field, value, text)] = text
    return _convert(cls, values, _Origin(file, applied), "")


def typed(cls: type[Config], value: Any, where: str) -> Config:
    """The mapping `value` (a dict, a ConfigDict, nested) as the frozen dataclass `cls`.

    Strict: unknown and missing fields are errors, an int passes for a float, a bool never
    for an int, an enum is given by member or value, a tuple may be a list. `where` names
    the source in messages. Raises ConfigError, one line.
    """
    return _convert(cls, _plain(value), _Origin(where), "")


def to_json(value: Any) -> Json:
    """A config dataclass as JSON; `typed(type(value), to_json(value), ...)` gives it back."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return to_json(value.value)
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a {type(value).__name__} has no JSON form: {value!r}")


# ---------------------------------------------------------------- the file and its overrides


def _run_config_file(file: str) -> Any:
    if not os.path.isfile(file):
        raise ConfigError(f"{file}: no such config file; {_nearby_files(file)}")
    if file.endswith(".json"):  # what a run has written of its own config
        values = read_json(file, "give the config.json of a run, or a .py with get_config()")
        if not isinstance(values, dict):
            raise ConfigError(f"{file}: holds no object; give the config.json of a run")
        return values
    spec = importlib.util.spec_from_file_location("_config_file", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file}: not a Python file; a config is a .py with get_config()")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        get_config = getattr(module, "get_config", None)
        if not callable(get_config):
            raise ConfigError(f"{file}: has no function get_config(); define one that returns "
                              "an ml_collections.ConfigDict")
        config = get_config()
    except ConfigError:
        raise
    except Exception as e:  # whatever the file does wrong is its author's to mend
        reason = " ".join(str(e).split())
        raise ConfigError(f"{file}: {_line_in(file, e)}{type(e).__name__}: {reason}") from e
    if not isinstance(config, (ml_collections.ConfigDict, Mapping)):
        raise ConfigError(f"{file}: get_config() returned {_shown(config)}; return an "
                          "ml_collections.ConfigDict")
    return config


def _nearby_files(file: str) -> str:
    folder = os.path.dirname(file) or "."
    if not os.path.isdir(folder):
        return f"there is no folder {folder} either"
    names = sorted(n for n in os.listdir(folder) if n.endswith(".py") and n[0] != "_")
    close = difflib.get_close_matches(os.path.basename(file), names, n=1)
    if close:
        return f"did you mean {os.path.join(folder, close[0])}?"
    return f"{folder} holds {', '.join(names) or 'no config'}"


def _line_in(file: str, e: Exception) -> str:
    """`line N: ` of the last frame inside the config file, empty if there is none."""
    if isinstance(e, SyntaxError):
        return f"line {e.lineno}: " if e.lineno else ""
    line, frame = "", e.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == file:
            line = f"line {frame.tb_lineno}: "
        frame = frame.tb_next
    return line


def _plain(value: Any) -> Any:
    """ConfigDicts as dicts, references resolved; a required placeholder that nobody filled
    is left out, so that it is reported as a missing field."""
    if isinstance(value, (ml_collections.ConfigDict, ml_collections.FrozenConfigDict)):
        filled = {}
        for key in value.keys():
            try:
                filled[key] = _plain(value[key])
            except ml_collections.config_dict.RequiredValueError:
                continue
        return filled
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value
    return value


def parse_override(text: str) -> tuple[str, Any]:
    """The field and the value of `field.subfield=value`: a Python literal, or else text."""
    field, equals, value = text.partition("=")
    field = field.strip()
    if not equals or not all(part.isidentifier() for part in field.split(".")):
        raise ConfigError(f"--set {text}: got {text!r}, expected field.subfield=value; "
                          "write for instance --set optimizer.lr=1e-4")
    try:
        return field, ast.literal_eval(value.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return field, value


def _set(values: dict[str, Any], field: str, value: Any, text: str) -> str:
    """Sets the dotted `field` and returns the outermost field that this changed or made.
    Whether the field exists is for `_convert` to say, since a field left at its default is
    absent from the config file."""
    *groups, last = field.split(".")
    changed = field
    for depth, group in enumerate(groups, start=1):
        inner = values.get(group)
        if inner is None:
            inner = {}
            changed = min(changed, ".".join(groups[:depth]), key=len)
        elif dataclasses.is_dataclass(inner) and not isinstance(inner, type):
            inner = {f.name: getattr(inner, f.name) for f in dataclasses.fields(inner)}
        if not isinstance(inner, dict):
            outer = ".".join(groups[:depth])
            raise ConfigError(f"--set {text}: {field}: got a field below {outer}, expected "
                              f"{outer} to be a group of fields, it is {_shown(inner)}; "
                              f"set {outer} itself")
        values[group] = inner
        values = inner
    values[last] = value
    return changed


# ---------------------------------------------------------------- strict conversion


def _convert(kind: Any, value: Any, origin: _Origin, path: str) -> Any:
    """`value` as the annotated type `kind`, or ConfigError."""
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _convert_dataclass(kind, value, origin, path)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _convert_enum(kind, value, origin, path)
    generic = typing.get_origin(kind)
    if generic in (typing.Union, types.UnionType):
        return _convert_union(kind, value, origin, path)
    if generic is typing.Literal:
        options = typing.get_args(kind)
        for option in options:
            if type(option) is type(value) and option == value:
                return value
        raise origin.error(path, _shown(value), _options(options), _closest(value, options))
    if kind is tuple or generic is tuple:
        return _convert_tuple(kind, value, origin, path)
    if kind in (dict, Mapping) or generic in (dict, Mapping):
        return _convert_mapping(kind, value, origin, path)
    return _convert_scalar(kind, value, origin, path)


def _convert_dataclass(cls: Any, value: Any, origin: _Origin, path: str) -> Any:
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        names = list(_fields(cls)) or ["no fields"]
        raise origin.error(path, _shown(value), f"the fields of {cls.__name__}",
                           f"set each on its own, as {_join(path, names[0])}=..., or give a group "
                           f"with {', '.join(names)}")
    fields = _fields(cls)
    for key in value:
        if key not in fields:
            inner = _join(path, str(key))
            raise origin.error(inner, "an unknown field", f"a field of {cls.__name__}",
                               _closest(key, list(fields)))
    arguments = {}
    for name, (kind, required) in fields.items():
        inner = _join(path, name)
        if name in value:
            arguments[name] = _convert(kind, value[name], origin, inner)
        elif required:
            raise origin.error(inner, "nothing", _kind(kind), f"set {inner}, it has no default")
    try:
        return cls(**arguments)
    except ConfigError:
        raise
    except ValueError as e:  # the dataclass's own check of its values
        where = origin.set_by(path, str(e)) or f"{origin.file}: {path or cls.__name__}"
        raise ConfigError(" ".join(f"{where}: {e}".split())) from e


@functools.cache
def _fields(cls: Any) -> dict[str, tuple[Any, bool]]:
    """name -> (type, required) of what the constructor takes."""
    hints = typing.get_type_hints(cls)
    return {
        f.name: (hints[f.name], f.default is dataclasses.MISSING
                 and f.default_factory is dataclasses.MISSING)
        for f in dataclasses.fields(cls) if f.init
    }


def _convert_enum(kind: type[enum.Enum], value: Any, origin: _Origin, path: str) -> Any:
    if isinstance(value, kind):
        return value
    for member in kind:
        if type(member.value) is type(value) and member.value == value:
            return member
    options = [m.value for m in kind]
    raise origin.error(path, _shown(value), _options(options), _closest(value, options))


def _convert_union(kind: Any, value: Any, origin: _Origin, path: str) -> Any:
    options = typing.get_args(kind)
    if value is None and type(None) in options:
        return None
    options = [o for o in options if o is not type(None)]
    if len(options) == 1:  # Optional: the inner message is the better one
        return _convert(options[0], value, origin, path)
    # An exact type first, so that an int stays an int in `int | float`.
    for option in sorted(options, key=lambda o: type(value) is not o):
        try:
            return _convert(option, value, origin, path)
        except ConfigError:
            continue
    raise origin.error(path, _shown(value), _kind(kind), "give one of these")


def _convert_tuple(kind: Any, value: Any, origin: _Origin, path: str) -> tuple:
    if not isinstance(value, (list, tuple)):
        raise origin.error(path, _shown(value), _kind(kind), f"write ({value!r},)")
    inner = typing.get_args(kind) or (Any, ...)
    if typing.get_origin(inner[0]) is tuple and value and not any(
            isinstance(item, (list, tuple)) for item in value):
        raise origin.error(path, _shown(value), _kind(kind), f"write ({tuple(value)!r},)")
    if len(inner) == 2 and inner[1] is Ellipsis:
        inner = (inner[0],) * len(value)
    if len(inner) != len(value):
        raise origin.error(path, f"{len(value)} values", _kind(kind),
                           f"give exactly {len(inner)}")
    return tuple(_convert(k, v, origin, f"{path}[{i}]")
                 for i, (k, v) in enumerate(zip(inner, value)))


def _convert_mapping(kind: Any, value: Any, origin: _Origin, path: str) -> dict:
    if not isinstance(value, Mapping):
        raise origin.error(path, _shown(value), _kind(kind), "give a group of fields")
    key_kind, value_kind = typing.get_args(kind) or (Any, Any)
    return {_convert(key_kind, k, origin, path): _convert(value_kind, v, origin, _join(path, str(k)))
            for k, v in value.items()}


def _convert_scalar(kind: Any, value: Any, origin: _Origin, path: str) -> Any:
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if kind is pathlib.Path and isinstance(value, (str, pathlib.Path)):
        return pathlib.Path(value)
    if kind in (bool, int, str) and type(value) is kind or kind is type(None) and value is None:
        return value
    remedy = f"give {_a(kind)}"
    if kind is str:
        remedy = f"put it in quotes: \"{value}\""
    elif kind is bool:
        remedy = "write True or False"
    elif kind is int and isinstance(value, float) and value.is_integer():
        remedy = f"write {int(value)}"
    raise origin.error(path, _shown(value), _kind(kind), remedy)


# ---------------------------------------------------------------- words


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shown(value: Any) -> str:
    text = repr(value)
    if len(text) > 60:
        text = text[:57] + "..."
    return text if value is None else f"{text} ({type(value).__name__})"


def _kind(kind: Any) -> str:
    if isinstance(kind, type) and typing.get_origin(kind) is None:
        return "None" if kind is type(None) else kind.__name__
    return str(kind).replace("typing.", "")


def _a(kind: Any) -> str:
    return ("an " if _kind(kind)[0] in "aeiou" else "a ") + _kind(kind)


def _options(options: Sequence[Any]) -> str:
    return "one of " + ", ".join(map(repr, options))


def _closest(value: Any, options: Sequence[Any]) -> str:
    names = [str(o) for o in options]
    close = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]}?"
    return f"choose from {', '.join(names)}" if names else "remove it"


# ---------------------------------------------------------------- entry points


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes the whole file or leaves what was there: a reader never sees half of it."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_json(path: str | os.PathLike, value: Json) -> None:
    """The result of an entry point: one JSON object to the file, or as one line to
    standard output where `path` is `-`."""
    if os.fspath(path) == "-":
        print(json.dumps(value, sort_keys=True), flush=True)
    else:
        write_text(path, json.dumps(value, sort_keys=True, indent=1) + "\n")


def read_json(path: str | os.PathLike, remedy: str) -> Json:
    """JSON of a file. Raises UserError, naming the file and the remedy, where it holds none."""
    try:
        return json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except ValueError as e:  # of the text or of its encoding
        raise UserError(f"{os.fspath(path)}: is not JSON ({e}); {remedy}") from e


def check_out(path: str | os.PathLike, folder: bool = False) -> None:
    """Raises UserError where `path` could not be written, before hours went into what is to
    be written there. `folder`: the path is to be a folder, else a file."""
    path = pathlib.Path(path)
    if path.exists() and path.is_dir() != folder:
        wrong, right = ("file", "folder") if folder else ("folder", "file")
        raise UserError(f"{path}: is a {wrong}; give the name of a {right}")
    above = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if not above.is_dir() and above != path.absolute():
        raise UserError(f"{path}: {above} is a file; give another place")
    if not os.access(above, os.W_OK):
        raise UserError(f"{path}: {above} may not be written to; give another place")


_NO_ROOM = {errno.ENOSPC: "make room there", errno.EDQUOT: "make room there",
            errno.EFBIG: "raise the limit of a file's size (ulimit -f)"}


def no_room(error: Exception) -> str:
    """The system's words and the remedy where an error says that a disk, a quota or a file is
    full, else "". Libraries put the system's words into errors of their own."""
    for number, remedy in _NO_ROOM.items():
        if getattr(error, "errno", None) == number or os.strerror(number) in str(error):
            return f"{os.strerror(number)}: {remedy}"
    return ""


@contextlib.contextmanager
def naming(folder: pathlib.Path) -> Iterator[None]:
    """Where no room is left, the system does not say where: inside, the folder is named."""
    try:
        yield
    except OSError as e:
        if not (why := no_room(e)):
            raise
        raise UserError(f"{e.filename or folder}: {why} and start again, with --resume where it "
                        "has a checkpoint") from e


def run_main(main: Callable[[], int | None],
             user_errors: tuple[type[Exception], ...] = ()) -> NoReturn:
    """Runs an entry point and exits: 0 or what `main` returns; 2 with one line on standard
    error for a UserError, a file that cannot be reached, a full disk or one of
    `user_errors`; 130 on Ctrl-C. Anything else is a fault of this code and keeps its
    traceback."""
    try:
        sys.exit(main() or 0)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except (UserError, *user_errors) as e:
        message = str(e) or type(e).__name__
    except BrokenPipeError:  # who read our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as e:
        known = isinstance(e, (FileNotFoundError, FileExistsError, IsADirectoryError,
                               NotADirectoryError, PermissionError))
        if not (known or no_room(e) or e.errno == errno.EROFS):
            raise
        reason = no_room(e) or e.strerror or str(e) or type(e).__name__
        message = f"{e.filename}: {reason}" if e.filename else reason
    print("error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)
