"""Reads BFCL V3 multi-turn out of the installed bfcl-eval package: 4 x 200 tasks and the
documents of eight tool classes. Only data files and the tool classes are used; the package's
own executor, utilities and settings are never imported, so nothing is written anywhere.

Index i is the same story in all four files, hence the scenario "bfcl-i": a split has to keep
all four together, or a held-in task has a near copy among the training tasks.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import importlib.util
import inspect
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rods_jax.types import CATEGORIES, Category, Json, Task, ToolCall, ToolSpec, Turn

PACKAGE = "bfcl_eval"
INSTALL = "pip install --no-deps bfcl-eval==2026.3.23 mpmath"
N_SCENARIOS = 200

_SOURCE = PACKAGE + ".eval_checker.multi_turn_eval.func_source_code."
# Tool class (a "domain") -> stem of its module and of its document file.
MODULES: Mapping[str, str] = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
DOMAINS: tuple[str, ...] = tuple(MODULES)

_JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array"}


def _uids(index: int, *categories: Category) -> frozenset[str]:
    return frozenset(f"multi_turn_{c.value}_{index}" for c in categories or CATEGORIES)


_NOT_LONG = (Category.BASE, Category.MISS_FUNC, Category.MISS_PARAM)
_NOT_BASE = (Category.MISS_FUNC, Category.MISS_PARAM, Category.LONG_CONTEXT)

# Tasks whose gold an agent cannot derive from what it sees: text that no tool produces
# (4, 18, 30, 143, 171, 184, 187), a contradicted value (base_176, miss_func_15), gold
# shifted by one turn (miss_param_180), 34 calls in one turn (long_context_38 and _46), a
# withheld function that the gold does not need, so the request could be served at once
# (miss_func_33 and _133).
SUSPECT: frozenset[str] = frozenset().union(
    _uids(4), _uids(18), _uids(30, *_NOT_LONG), _uids(143, *_NOT_BASE), _uids(171), _uids(184),
    _uids(187), _uids(176, Category.BASE), _uids(15, Category.MISS_FUNC),
    _uids(180, Category.MISS_PARAM), _uids(38, Category.LONG_CONTEXT),
    _uids(46, Category.LONG_CONTEXT), _uids(33, Category.MISS_FUNC),
    _uids(133, Category.MISS_FUNC),
)


def _package_dir() -> pathlib.Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"the BFCL suite needs the bfcl-eval package: {INSTALL}")
    return pathlib.Path(next(iter(spec.submodule_search_locations)))


def _rows(path: pathlib.Path) -> list[dict[str, Json]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        raise ValueError(
            f"bfcl-eval has no file {path.name}, install the known version: {INSTALL}") from None
    return [json.loads(line) for line in text.splitlines() if line.strip()]


@functools.cache
def tool_class(domain: str) -> type[Any]:
    """The package's class for a domain. ValueError where domain or package is unknown."""
    return getattr(tool_module(domain), domain)


@functools.cache
def tool_module(domain: str) -> Any:
    if domain not in MODULES:
        raise ValueError(f"unknown BFCL domain {domain!r}, use one of {', '.join(DOMAINS)}")
    _package_dir()
    try:
        return importlib.import_module(_SOURCE + MODULES[domain])
    except ImportError as error:
        raise ValueError(f"the BFCL class {domain} does not import ({error}): {INSTALL}") from None


@functools.cache
def parameter_names(domain: str, tool: str) -> tuple[str, ...]:
    """Names of the tool's parameters in positional order, as the class itself has them."""
    return tuple(inspect.signature(getattr(tool_class(domain), tool)).parameters)[1:]


def _schema(node: Mapping[str, Json]) -> dict[str, Json]:
    """A document's parameter node as JSON schema."""
    out: dict[str, Json] = dict(node)
    if "type" in out:
        out["type"] = _JSON_TYPES.get(out["type"], out["type"])
    if isinstance(out.get("properties"), Mapping):
        out["properties"] = {k: _schema(v) for k, v in out["properties"].items()}
    if isinstance(out.get("items"), Mapping):
        out["items"] = _schema(out["items"])
    return out


@functools.cache
def domain_specs(domain: str) -> tuple[ToolSpec, ...]:
    """The documented tools of a class, in the order of its document file."""
    if domain not in MODULES:
        raise ValueError(f"unknown BFCL domain {domain!r}, use one of {', '.join(DOMAINS)}")
    file = _package_dir() / "data" / "multi_turn_func_doc" / f"{MODULES[domain]}.json"
    specs = []
    for row in _rows(file):
        schema = _schema(row["parameters"])
        order = parameter_names(domain, row["name"])
        schema["properties"] = {name: schema["properties"][name] for name in order}
        # The documents write a missing default as the string "None".
        defaults = inspect.signature(getattr(tool_class(domain), row["name"])).parameters
        for name, prop in schema["properties"].items():
            if defaults[name].default is not inspect.Parameter.empty:
                prop["default"] = copy.copy(defaults[name].default)
        specs.append(ToolSpec(row["name"], row["description"], schema, domain))
    return tuple(specs)


@functools.cache
def tool_domains() -> Mapping[str, str]:
    """Tool name -> its domain. Names are unique over the eight classes."""
    return {spec.name: domain for domain in DOMAINS for spec in domain_specs(domain)}


def parse_gold(text: str) -> ToolCall:
    """`mv('a', destination='b')` -> a call with keyword arguments only. Nothing runs."""
    node = ast.parse(text, mode="eval").body
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError(f"ground truth {text!r} is not a plain call: {INSTALL}")
    name = node.func.id
    if name not in tool_domains():
        raise ValueError(f"ground truth calls the unknown tool {name!r}: {INSTALL}")
    names = parameter_names(tool_domains()[name], name)
    given = {names[i]: ast.literal_eval(arg) for i, arg in enumerate(node.args)}
    given |= {k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg}
    ordered = {k: given[k] for k in names if k in given}
    return ToolCall(name, ordered | given)


def _task(row: Mapping[str, Json], gold: Sequence[Sequence[str]], category: Category) -> Task:
    domains = tuple(row["involved_classes"])
    documented = [spec.name for domain in domains for spec in domain_specs(domain)]
    calls_by_turn = [tuple(parse_gold(text) for text in turn) for turn in gold]
    release = {}  # withheld tool -> the turn that brings it, earlier where gold needs it
    for turn, names in row.get("missed_function", {}).items():
        for name in names:
            uses = [i for i, calls in enumerate(calls_by_turn) if name in {c.name for c in calls}]
            release[name] = min([int(turn), *uses])
    turns = []
    for i, (messages, calls) in enumerate(zip(row["question"], calls_by_turn, strict=True)):
        withheld = {name for name, turn in release.items() if turn > i}
        user = "\n".join(message["content"] for message in messages)
        visible = tuple(name for name in documented if name not in withheld)
        turns.append(Turn(user, calls, visible))
    config = {k: v for k, v in row["initial_config"].items() if k in domains}
    index = row["id"].rsplit("_", 1)[1]
    return Task(row["id"], domains, category, config, tuple(turns), f"bfcl-{index}")


@functools.cache
def load_tasks() -> tuple[Task, ...]:
    """All 800 tasks: by category in the order of CATEGORIES, then by index."""
    data = _package_dir() / "data"
    tasks = []
    for category in CATEGORIES:
        name = f"BFCL_v4_multi_turn_{category.value}.json"
        answers = {r["id"]: r["ground_truth"] for r in _rows(data / "possible_answer" / name)}
        tasks += [_task(row, answers[row["id"]], category) for row in _rows(data / name)]
    return tuple(tasks)
