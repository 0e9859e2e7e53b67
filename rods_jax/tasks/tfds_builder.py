"""Task lists as a TensorFlow Datasets data set: array_record files, no TensorFlow.

    prepare_tasks(data_dir, "toolbox", {"train": train, "eval": held_in})
    tasks = load_tasks(data_dir, "toolbox", "train")

One example is one task: its JSON text (the schema of `Task.to_json`), uid and category.
Order within a split is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence

import tensorflow_datasets as tfds
from absl import logging as absl_logging

from rods_jax.types import TASK_SCHEMA_VERSION, Task

VERSION = f"{TASK_SCHEMA_VERSION}.0.0"


@dataclasses.dataclass(kw_only=True)
class TaskListConfig(tfds.core.BuilderConfig):
    """`name` is the suite's; `splits` the tasks of each split, in order."""

    splits: Mapping[str, Sequence[Task]] = dataclasses.field(default_factory=dict, repr=False)


class RodsTasks(tfds.core.GeneratorBasedBuilder):
    """Multi-turn tool-use tasks of one suite."""

    VERSION = tfds.core.Version(VERSION)

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict({
                "json": tfds.features.Text(),
                "uid": tfds.features.Text(),
                "category": tfds.features.Text(),
            }),
            description=self.__doc__, disable_shuffling=True)

    def _split_generators(self, dl_manager):
        del dl_manager  # nothing is downloaded
        return {name: self._generate_examples(tasks)
                for name, tasks in self.builder_config.splits.items()}

    def _generate_examples(self, tasks: Sequence[Task]) -> Iterator[tuple[int, dict[str, str]]]:
        for i, task in enumerate(tasks):
            yield i, {"json": json.dumps(task.to_json(), ensure_ascii=False),
                      "uid": task.uid, "category": task.category.value}


def prepare_tasks(data_dir: str | os.PathLike, suite_name: str,
                  splits: Mapping[str, Sequence[Task]]) -> None:
    """Writes the splits once. Calling it again with the same tasks changes nothing; with
    other tasks it is a ValueError, since runs may already refer to what is there."""
    empty = [name for name, tasks in splits.items() if not tasks]
    if empty or not splits:
        raise ValueError(f"no tasks for split {', '.join(empty) or '(none given)'}: "
                         "give every split at least one task")
    with _quiet():
        if os.path.isdir(_folder(data_dir, suite_name)):
            for name, tasks in splits.items():
                if load_tasks(data_dir, suite_name, name) != list(tasks):
                    raise ValueError(
                        f"{_folder(data_dir, suite_name)} holds other tasks in split {name}; "
                        "remove that folder or give another data_dir")
            return
        builder = RodsTasks(data_dir=os.fspath(data_dir), file_format="array_record",
                            config=TaskListConfig(name=suite_name, splits=splits))
        with contextlib.redirect_stdout(io.StringIO()):  # it prints two banners
            builder.download_and_prepare()


def load_tasks(data_dir: str | os.PathLike, suite_name: str, split: str) -> list[Task]:
    """The tasks of a split in their order. Raises ValueError when there is no such data."""
    folder = _folder(data_dir, suite_name)
    if not os.path.isdir(folder):
        raise ValueError(f"no prepared tasks at {folder}: call prepare_tasks first")
    with _quiet():
        builder = tfds.builder_from_directory(folder)
        if split not in builder.info.splits:
            raise ValueError(f"{folder} has no split {split!r}, only "
                             + ", ".join(sorted(builder.info.splits)))
        rows = builder.as_data_source(split=split)
        return [Task.from_json(json.loads(row["json"])) for row in rows]


def _folder(data_dir: str | os.PathLike, suite_name: str) -> str:
    return os.path.join(os.fspath(data_dir), RodsTasks.name, suite_name, VERSION)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and only errors in the log while TFDS works."""
    verbosity = absl_logging.get_verbosity()
    absl_logging.set_verbosity(absl_logging.ERROR)
    tfds.disable_progress_bar()
    try:
        yield
    finally:
        absl_logging.set_verbosity(verbosity)
        tfds.enable_progress_bar()
