"""Task sets as TensorFlow Datasets data sets: array_record files, no TensorFlow.

    builder = BfclSeeds(data_dir=..., config="grouped")    # or "paper"; ToolboxSeeds(...)
    builder.download_and_prepare()
    rows = builder.as_data_source("train")                  # or tasks = builder.tasks("train")

    prepare_tasks(data_dir, "mine", {"train": train, "eval": held_in})    # any lists of tasks
    tasks = load_tasks(data_dir, "mine", "train")

One example is one task, its JSON text (the schema of `Task.to_json`) in feature "json". Order
within a split is kept, and the same tasks make the same bytes: one feature alone, since the
library writes several in an order that changes from process to process.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence

import tensorflow_datasets as tfds
from absl import logging as absl_logging

from rods_jax.tasks.lock import locked
from rods_jax.tools.bfcl import BFCLSuite
from rods_jax.tools.suites import SplitRule
from rods_jax.tools.toolbox import ToolboxSuite
from rods_jax.types import TASK_SCHEMA_VERSION, Task

_NAME = re.compile(r"[A-Za-z]\w*")
VERSION = f"{TASK_SCHEMA_VERSION}.1.0"


class TaskSets(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Base of the builders: how tasks are stored. A subclass says which, in `splits`."""

    VERSION = tfds.core.Version(VERSION)

    def __init__(self, *, config: str | tfds.core.BuilderConfig | None = None,
                 file_format: str = "array_record", **options):
        known = [c.name for c in self.BUILDER_CONFIGS]
        if isinstance(config, str) and config.partition(":")[0] not in known:
            raise ValueError(f"{self.name} has no config {config!r}: use one of "
                             f"{', '.join(known)}" if known else
                             f"{self.name} has no configs, so none named {config!r}: leave it out")
        with _quiet():
            super().__init__(config=config, file_format=file_format, **options)

    @abc.abstractmethod
    def splits(self) -> Mapping[str, Sequence[Task]]:
        """The tasks of every split, in order."""

    def download_and_prepare(self, **options) -> None:
        """Writes the splits once; nothing is downloaded. Again with the same tasks it changes
        nothing; with others it is a ValueError, since runs may already refer to what is there.
        Where what makes the tasks is missing, prepared ones are taken as they are, and it is a
        ValueError where there are none."""
        try:
            splits = self.splits()
        except ValueError:
            if self.data_path.exists():
                return
            raise
        empty = [name for name, tasks in splits.items() if not tasks]
        if empty or not splits:
            raise ValueError(f"no tasks for split {', '.join(empty) or '(none given)'}: "
                             "give every split at least one task")
        for name in (self.builder_config.name if self.builder_config else self.name, *splits):
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} cannot name a data set or a split: use letters, "
                                 "digits and underscores")
        with locked(self.data_path.parent / "lock"):
            if not self.data_path.exists():
                with _quiet():
                    super().download_and_prepare(**options)
                return
        stored = self._stored()
        for name, tasks in splits.items():
            if name not in stored.info.splits:
                raise ValueError(f"{self.data_path} holds other splits, {_names(stored)}, not "
                                 f"{name}; remove that folder or give another data_dir")
            if self.tasks(name) != list(tasks):
                raise ValueError(f"{self.data_path} holds other tasks in split {name}; remove "
                                 "that folder or give another data_dir")

    def tasks(self, split: str) -> list[Task]:
        """The tasks of a prepared split in their order. ValueError where there is none."""
        if not self.data_path.exists():
            raise ValueError(f"no prepared tasks at {self.data_path}: call prepare_tasks first, "
                             "or download_and_prepare of a suite's seeds")
        stored = self._stored()
        if split not in stored.info.splits:
            raise ValueError(f"{self.data_path} has no split {split!r}, only {_names(stored)}")
        with _quiet():
            return [Task.from_json(json.loads(row["json"]))
                    for row in stored.as_data_source(split)]

    def _stored(self) -> tfds.core.DatasetBuilder:
        """What is on disk now, which another process may have written since we looked."""
        try:
            with _quiet():
                return tfds.builder_from_directory(self.data_path)
        except Exception as error:
            raise ValueError(f"{self.data_path} is damaged ({type(error).__name__}): remove that "
                             "folder and prepare it again") from error

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict({"json": tfds.features.Text()}),
            description=self.__doc__, disable_shuffling=True)

    def _split_generators(self, dl_manager):
        del dl_manager  # nothing is downloaded
        return {name: self._generate_examples(tasks) for name, tasks in self.splits().items()}

    def _generate_examples(self, tasks: Sequence[Task]) -> Iterator[tuple[int, dict[str, str]]]:
        for i, task in enumerate(tasks):
            yield i, {"json": json.dumps(task.to_json(), ensure_ascii=False)}


def _names(stored: tfds.core.DatasetBuilder) -> str:
    return ", ".join(sorted(stored.info.splits))


class ToolboxSeeds(TaskSets):
    """The embedded toolbox: splits train, held_in, new_structures and warm."""

    def splits(self) -> Mapping[str, Sequence[Task]]:
        suite = ToolboxSuite()
        return {name: suite.split(name) for name in suite.split_names}


@dataclasses.dataclass(kw_only=True, eq=False)
class BfclConfig(tfds.core.BuilderConfig):
    """`rule`: whether siblings stay on one side. `seed`: of the draw; 0 is the suite's own.
    The name follows from both: "grouped", "paper", "grouped_seed7"."""

    name: str = ""
    rule: SplitRule = SplitRule.GROUPED
    seed: int = 0

    def __post_init__(self):
        self.name = self.rule.value + (f"_seed{self.seed}" if self.seed else "")


class BfclSeeds(TaskSets):
    """BFCL V3 multi-turn: splits train (without tasks whose gold cannot be derived) and
    held_in, 100 tasks a category each. Needs the package bfcl-eval to prepare, not to read."""

    BUILDER_CONFIGS = [BfclConfig(rule=rule) for rule in SplitRule]

    def splits(self) -> Mapping[str, Sequence[Task]]:
        suite = BFCLSuite(split_rule=self.builder_config.rule, split_seed=self.builder_config.seed)
        return {name: suite.split(name) for name in suite.split_names}


@dataclasses.dataclass(kw_only=True, eq=False)
class TaskListConfig(tfds.core.BuilderConfig):
    """`name` is the suite's; `splits` the tasks of each split, in order."""

    splits: Mapping[str, Sequence[Task]] = dataclasses.field(default_factory=dict, repr=False)


class RodsTasks(TaskSets):
    """Multi-turn tool-use tasks of one suite."""

    def splits(self) -> Mapping[str, Sequence[Task]]:
        return self.builder_config.splits


def prepare_tasks(data_dir: str | os.PathLike, suite_name: str,
                  splits: Mapping[str, Sequence[Task]]) -> None:
    """Writes the splits once, see `TaskSets.download_and_prepare`."""
    _lists(data_dir, suite_name, splits).download_and_prepare()


def load_tasks(data_dir: str | os.PathLike, suite_name: str, split: str) -> list[Task]:
    """The tasks of a split in their order. Raises ValueError when there is no such data."""
    return _lists(data_dir, suite_name, {}).tasks(split)


def _lists(data_dir: str | os.PathLike, suite_name: str,
           splits: Mapping[str, Sequence[Task]]) -> RodsTasks:
    return RodsTasks(data_dir=os.fspath(data_dir),
                     config=TaskListConfig(name=suite_name, splits=splits))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars, no banners and only errors in the log while TFDS works."""
    verbosity = absl_logging.get_verbosity()
    absl_logging.set_verbosity(absl_logging.ERROR)
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        absl_logging.set_verbosity(verbosity)
        tfds.enable_progress_bar()
