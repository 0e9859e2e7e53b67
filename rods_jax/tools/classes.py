"""A user's own tool classes as a Suite, see docs/new_domain.md.

    ClassSuite("notes", classes={"notes": Notes}, splits={"train": FILE, "held_in": FILE})

A task's initial_config holds, by domain, the constructor's arguments of its class. Every
rollout has instances of its own, and their attributes without a leading underscore are the
state that is compared. Nothing is evaluated: a call reaches a declared tool by its name, after
its arguments were checked against the declared schema.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import os
import random
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from rods_jax.tasks.jsonl import read_tasks, read_tools, tool_from_json, tool_to_json
from rods_jax.tasks.leakage import crossing
from rods_jax.tools import schema
from rods_jax.tools.class_specs import check_spec, class_specs
from rods_jax.tools.env import Environment
from rods_jax.tools.hints import HintedEnv, schema_hints
from rods_jax.tools.scoring import Mode, Scoring, same_value
from rods_jax.tools.twin import GoldRuns, TwinEnv
from rods_jax.types import (CATEGORIES, Category, Json, Plan, Task, ToolCall, ToolResult, ToolSpec,
                            copy_json)

_SHARED = (list, dict, set)  # what instances would share where a class body or a default holds it
_LOCK = threading.RLock()
_LONGEST = 80  # characters of a name that are repeated


class ClassSuite:
    """Implements rods_jax.tools.env.Suite without synthesis: train with synthesis_on=False. A
    subclass that brings plan, repair, write and augment sets `plans`."""

    plans = False

    def __init__(self, name: str, classes: Mapping[str, type],
                 splits: Mapping[str, str | os.PathLike | Sequence[Task]],
                 tools: str | os.PathLike | Sequence[ToolSpec] = (),
                 scoring: Scoring = Scoring(), held_out: Sequence[str] = ("held_in",),
                 siblings_cross: bool = False):
        """`classes`: the tool class of each domain. `splits`, `tools`: JSON-lines files or what
        they hold; without `tools` they are read off the classes. `held_out`: splits that never
        train; unless `siblings_cross`, they share no scenario with "train". ValueError, one
        line, where any of it does not fit."""
        if scoring.mode is Mode.OFFICIAL:
            raise ValueError(f"suite {name} has no official checker: use scoring mode train")
        self.name, self.domains, self.scoring = name, tuple(classes), scoring
        self.held_out, self.siblings_cross = tuple(held_out), siblings_cross
        self._classes = dict(classes)
        self._specs = _specs(name, self._classes, tools)
        self._splits = {split: tuple(read_tasks(tasks) if isinstance(tasks, (str, os.PathLike))
                                     else tasks) for split, tasks in splits.items()}
        self._check_splits()
        self._hint = schema_hints(tuple(self._specs.values()))
        self._gold = GoldRuns(self._world)

    def _check_splits(self) -> None:
        """Empty or missing splits, a uid given twice, siblings on both sides."""
        split_of: dict[str, str] = {}
        for split, tasks in self._splits.items():
            if not tasks:
                raise ValueError(f"suite {self.name}: split {split!r} is empty: give it a task or "
                                 "leave it out")
            for task in tasks:
                if task.uid in split_of:
                    raise ValueError(f"suite {self.name}: uid {task.uid!r} is in split "
                                     f"{split_of[task.uid]} and again in {split}: give every task "
                                     "its own")
                split_of[task.uid] = split
        for split in self.held_out:
            if split not in self._splits:
                raise ValueError(f"suite {self.name}: there is no split {split!r}, which held_out "
                                 "names: add it to splits, or name others in held_out")
            share = crossing(self._splits.get("train", ()), self._splits[split])
            if share and not self.siblings_cross:
                raise ValueError(f"suite {self.name}: {share:.0%} of {split} share a scenario with "
                                 "train: keep a scenario on one side, or set siblings_cross=True")

    @property
    def split_names(self) -> tuple[str, ...]:
        return tuple(self._splits)

    def split(self, name: str) -> tuple[Task, ...]:
        """The tasks of a split; categories take turns, within one the given order is kept."""
        if name not in self._splits:
            raise ValueError(f"unknown split {name!r}: use one of {', '.join(self._splits)}")
        columns = [[t for t in self._splits[name] if t.category is c] for c in CATEGORIES]
        return tuple(t for row in itertools.zip_longest(*columns) for t in row if t is not None)

    def wordings(self, task: Task, count: int) -> tuple[Task, ...]:
        return (task,)

    def tools(self, domains: Sequence[str]) -> tuple[ToolSpec, ...]:
        self._known(domains)
        return tuple(spec for d in domains for spec in self._specs.values() if spec.domain == d)

    def make_env(self, task: Task, hints: bool = False) -> Environment:
        env = TwinEnv(task, self._world(task), self._gold, self.scoring)
        return HintedEnv(env, self._hint) if hints else env

    def _world(self, task: Task) -> ClassWorld:
        self._known((*task.domains, *task.initial_config))
        classes = {domain: self._classes[domain] for domain in task.domains}
        return ClassWorld(task, classes, self._specs)

    def _known(self, domains: Sequence[str]) -> None:
        for domain in domains:
            if domain not in self._classes:
                raise ValueError(f"unknown domain {domain!r}: suite {self.name} has "
                                 f"{', '.join(self.domains)}")

    def gold_reply(self, task: Task, turn: int) -> str:
        current = task.turns[turn]
        if current.gold:
            return "Done."
        following = task.turns[turn + 1:turn + 2]
        if any(set(t.tools) - set(current.tools) for t in following):
            return "I cannot do this: no available tool covers it."
        if task.category is Category.MISS_PARAM:
            return "A detail is missing. Which value should I use?"
        return "There is nothing more to run for this."

    # ------------------------------------------------------------ synthesis

    def plan(self, seed: Task, rng: random.Random) -> Plan:
        self._no_planner()

    def repair(self, plan: Plan, call: int, error: str, rng: random.Random) -> Plan | None:
        self._no_planner()

    def write(self, plan: Plan, results: Sequence[Mapping], rng: random.Random,
              feedback: str = "") -> tuple[str, ...]:
        self._no_planner()

    def augment(self, task: Task, category: str, rng: random.Random) -> Task | None:
        self._no_planner()

    def _no_planner(self) -> NoReturn:
        raise ValueError(f"suite {self.name} brings no planner: set synthesis_on=False")


def _specs(suite: str, classes: Mapping[str, type],
           tools: str | os.PathLike | Sequence[ToolSpec]) -> dict[str, ToolSpec]:
    """Name -> spec, domains in their order."""
    if not classes:
        raise ValueError(f"suite {suite} has no tool class: give classes={{domain: class}}")
    for domain, cls in classes.items():
        if not isinstance(cls, type):
            raise ValueError(f"suite {suite}: domain {domain} has a {type(cls).__name__} in place "
                             "of a class: give the class itself")
    given = (read_tools(tools) if isinstance(tools, (str, os.PathLike)) else
             [tool_from_json(tool_to_json(spec)) for spec in tools])
    for spec in given:
        if spec.domain not in classes:
            raise ValueError(f"tool {spec.name!r} is of domain {spec.domain!r}, which suite "
                             f"{suite} has no class for: it has {', '.join(classes)}")
        check_spec(spec, classes[spec.domain])
    specs: dict[str, ToolSpec] = {}
    for domain, cls in classes.items():
        for spec in [s for s in given if s.domain == domain] if given else class_specs(cls, domain):
            if spec.name in specs:
                raise ValueError(f"tool {spec.name!r} is in domains {specs[spec.name].domain} and "
                                 f"{domain}: a call names no domain, so rename one")
            specs[spec.name] = spec
    return specs


class ClassWorld:
    """Implements rods_jax.tools.twin.World. ValueError where the constructor refuses the task's
    initial_config."""

    def __init__(self, task: Task, classes: Mapping[str, type], specs: Mapping[str, ToolSpec]):
        self._specs = specs
        self._instances = {domain: _instance(cls, task, domain) for domain, cls in classes.items()}

    def call(self, call: ToolCall, visible: frozenset[str]) -> ToolResult:
        """MemoryError and KeyboardInterrupt pass: they are the process's affair."""
        try:
            return self._call(call, visible)
        except (MemoryError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a tool may even exit or cancel
            return ToolResult(f"Error: {_said(error)}", False)

    def _call(self, call: ToolCall, visible: frozenset[str]) -> ToolResult:
        name = call.name if isinstance(call.name, str) else type(call.name).__name__
        spec = self._specs.get(name) if name in visible else None
        if spec is None or spec.domain not in self._instances:
            return ToolResult(f"Error: there is no tool {name[:_LONGEST]!r}", False)
        wrong = schema.complaint(call.arguments, spec.parameters)
        if wrong:
            return ToolResult(f"Error: {name}: {wrong}", False)
        # Copies, because a tool may keep and change what it was given.
        arguments = copy_json(dict(call.arguments))
        for key, value in arguments.items():
            if isinstance(value, float) and spec.parameters["properties"][key].get(
                    "type") == "integer":
                arguments[key] = int(value)
        instance = self._instances[spec.domain]
        with _own_defaults(type(instance)):
            return _result(getattr(instance, name)(**arguments))

    def same(self, other: ClassWorld | ClassSnapshot, mode: Mode) -> bool:
        """False also where a state has no end or its parts cannot be compared."""
        del mode
        try:
            return same_value(self.state(), other.state())
        except MemoryError:
            raise
        except Exception:  # of an __eq__ that a tool class brings, or a RecursionError
            return False

    def snapshot(self) -> ClassSnapshot | None:
        try:
            return ClassSnapshot(copy.deepcopy(self.state()))
        except MemoryError:
            raise
        except Exception:  # it holds what cannot be copied, or has no end
            return None

    def state(self) -> dict[str, dict[str, Any]]:
        return {domain: _public(instance) for domain, instance in self._instances.items()}


@dataclasses.dataclass(frozen=True)
class ClassSnapshot:
    """A state to compare with, without tools."""

    values: Mapping[str, Mapping[str, Any]]

    def state(self) -> Mapping[str, Mapping[str, Any]]:
        return self.values


def _instance(cls: type, task: Task, domain: str) -> Any:
    """A new instance that shares nothing with any other."""
    config = task.initial_config.get(domain, {})
    where = f"task {task.uid}: {cls.__name__}(**initial_config[{domain!r}])"
    if not isinstance(config, Mapping):
        raise ValueError(f"{where}: that is no object; give the constructor's arguments by name")
    try:
        with _own_defaults(cls):
            instance = cls.__new__(cls)
            vars(instance).update(_class_data(cls))
            instance.__init__(**copy.deepcopy(dict(config)))
    except (MemoryError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ValueError(f"{where} raised {type(error).__name__}: {_said(error)}; correct "
                         "initial_config or the constructor") from error
    return instance


def _class_data(cls: type) -> dict[str, Any]:
    """Copies of the containers that the class body holds, for one instance."""
    return {name: copy.deepcopy(value) for klass in reversed(cls.__mro__)
            for name, value in vars(klass).items()
            if isinstance(value, _SHARED) and not name.startswith("__")}


@contextlib.contextmanager
def _own_defaults(cls: type) -> Iterator[None]:
    """Gives the methods fresh copies of their mutable defaults, so that what a call keeps or
    changes reaches no other rollout. Such classes run one call at a time."""
    if not _sharing(cls):
        yield
        return
    with _LOCK:
        kept = [(f, f.__defaults__, f.__kwdefaults__) for f in _sharing(cls)]
        for function, defaults, by_name in kept:
            function.__defaults__ = copy.deepcopy(defaults)
            function.__kwdefaults__ = copy.deepcopy(by_name)
        try:
            yield
        finally:
            for function, defaults, by_name in kept:
                function.__defaults__, function.__kwdefaults__ = defaults, by_name


@functools.cache
def _sharing(cls: type) -> tuple[types.FunctionType, ...]:
    """The class's functions, private ones too, that have a mutable default."""
    functions = [member for klass in cls.__mro__ for member in vars(klass).values()
                 if isinstance(member, types.FunctionType)]
    return tuple(f for f in functions if any(
        isinstance(value, _SHARED)
        for value in (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values())))


def _public(value: Any) -> Any:
    """State as plain data: an object that does not say how it compares is its attributes."""
    if isinstance(value, Mapping):
        return {key: _public(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_public(item) for item in value]
    if type(value).__eq__ is object.__eq__ and hasattr(value, "__dict__"):
        return {"": type(value).__name__} | {
            key: _public(item) for key, item in vars(value).items() if not key.startswith("_")}
    return value


def _result(value: Any) -> ToolResult:
    """A text as it is, other JSON data as JSON. An object with an `error` did not go well."""
    if isinstance(value, str):
        return ToolResult(value, True)
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the tool's answer is not JSON data ({error})") from error
    return ToolResult(text, not (isinstance(value, dict) and value.get("error")))


def _said(error: BaseException) -> str:
    """The error's own words on one line, its type where it has none."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # an exception class whose own __str__ fails
        text = ""
    return text or type(error).__name__
