import hashlib
import json
import os
import pathlib
import subprocess
import sys

import pytest

from rods_jax.tasks.tfds_builder import (BfclConfig, BfclSeeds, ToolboxSeeds, load_tasks,
                                         prepare_tasks)
from rods_jax.tools import bfcl_data
from rods_jax.tools.suites import SplitRule
from rods_jax.tools.toolbox import ToolboxSuite
from rods_jax.types import Category, Task
from test_synthesis_suite import notes_task

ROOT = pathlib.Path(__file__).resolve().parents[1]
CATEGORIES = ["base", "miss_func", "miss_param", "long_context"]


def many(n):
    return [notes_task(i, CATEGORIES[i % 4]) for i in range(n)]


def digests(folder):
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(pathlib.Path(folder).rglob("*")) if path.is_file()}


# ------------------------------------------------------------------- any lists


def test_round_trip_in_order_and_quiet(tmp_path, capfd):
    tasks = many(40)
    prepare_tasks(tmp_path, "notes", {"train": tasks[:30], "held_in": tasks[30:]})
    assert load_tasks(tmp_path, "notes", "train") == tasks[:30]
    assert load_tasks(tmp_path, "notes", "held_in") == tasks[30:]
    before = digests(tmp_path)
    prepare_tasks(tmp_path, "notes", {"train": tasks[:30], "held_in": tasks[30:]})
    assert digests(tmp_path) == before
    out, err = capfd.readouterr()
    assert out == "" and err == ""
    assert list(tmp_path.rglob("*.array_record*"))


def test_clear_errors(tmp_path):
    with pytest.raises(ValueError, match="call prepare_tasks first"):
        load_tasks(tmp_path, "notes", "train")
    with pytest.raises(ValueError, match="no tasks for split eval"):
        prepare_tasks(tmp_path, "notes", {"train": many(1), "eval": []})
    assert not list(tmp_path.rglob("*.array_record*"))
    prepare_tasks(tmp_path, "notes", {"train": many(2)})
    with pytest.raises(ValueError, match="has no split 'eval', only train"):
        load_tasks(tmp_path, "notes", "eval")
    with pytest.raises(ValueError, match="holds other tasks in split train; remove that folder"):
        prepare_tasks(tmp_path, "notes", {"train": many(3)})
    with pytest.raises(ValueError, match="holds other splits, train, not eval; remove that"):
        prepare_tasks(tmp_path, "notes", {"train": many(2), "eval": many(1)})
    assert load_tasks(tmp_path, "notes", "train") == many(2)


def test_needs_neither_tensorflow_nor_jax(tmp_path):
    prepare_tasks(tmp_path, "notes", {"train": many(2)})
    code = ("import sys; from rods_jax.tasks.tfds_builder import load_tasks;"
            f"assert len(load_tasks({str(tmp_path)!r}, 'notes', 'train')) == 2;"
            "print([m for m in ('tensorflow', 'jax') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


# ------------------------------------------------------------------- the suites' seeds


def test_toolbox_seeds(tmp_path, capfd):
    builder = ToolboxSeeds(data_dir=tmp_path)
    builder.download_and_prepare()
    assert {name: split.num_examples for name, split in builder.info.splits.items()} == {
        "train": 400, "held_in": 400, "new_structures": 200, "warm": 150}
    suite = ToolboxSuite()
    for name in builder.info.splits:
        assert builder.tasks(name) == list(suite.split(name)), name
    rows = ToolboxSeeds(data_dir=tmp_path).as_data_source("held_in")
    assert [Task.from_json(json.loads(row["json"])) for row in rows] == list(
        suite.split("held_in"))
    before = digests(tmp_path)
    ToolboxSeeds(data_dir=tmp_path).download_and_prepare()
    assert digests(tmp_path) == before
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ValueError, match="toolbox_seeds has no configs, so none named 'paper'"):
        ToolboxSeeds(data_dir=tmp_path, config="paper")


@pytest.fixture(scope="module")
def bfcl(tmp_path_factory):
    pytest.importorskip("bfcl_eval")
    folder = tmp_path_factory.mktemp("bfcl")
    for config in ("grouped", "paper", BfclConfig(rule=SplitRule.PAPER, seed=7)):
        BfclSeeds(data_dir=folder, config=config).download_and_prepare()
    return folder


@pytest.mark.parametrize("rule", SplitRule)
def test_bfcl_seeds(bfcl, rule):
    from rods_jax.tools.bfcl import SUSPECT, BFCLSuite
    builder = BfclSeeds(data_dir=bfcl, config=rule.value)
    suite = BFCLSuite(split_rule=rule)
    train, held_in = builder.tasks("train"), builder.tasks("held_in")
    assert train == list(suite.split("train")) and held_in == list(suite.split("held_in"))
    assert len(held_in) == 400 and not {t.uid for t in train} & SUSPECT
    assert {c: sum(t.category is c for t in held_in) for c in Category} == dict.fromkeys(
        Category, 100)
    crossing = {t.scenario for t in train} & {t.scenario for t in held_in}
    assert bool(crossing) is (rule is SplitRule.PAPER)
    assert len(builder.as_data_source("train")) == len(train)


def test_the_draw_is_part_of_a_config(bfcl):
    seven = BfclConfig(rule=SplitRule.PAPER, seed=7)
    assert seven.name == "paper_seed7" and BfclConfig().name == "grouped"
    assert len({tuple(t.uid for t in BfclSeeds(data_dir=bfcl, config=config).tasks("train"))
                for config in ("grouped", "paper", seven)}) == 3
    with pytest.raises(ValueError, match="bfcl_seeds has no config 'papers': use one of grouped"):
        BfclSeeds(data_dir=bfcl, config="papers")
    with pytest.raises(ValueError, match="no prepared tasks at .*seed8"):
        BfclSeeds(data_dir=bfcl, config=BfclConfig(seed=8)).tasks("train")


def test_the_library_finds_the_seeds_by_name(bfcl):
    import tensorflow_datasets as tfds
    rows = tfds.data_source("bfcl_seeds/grouped", split="held_in", data_dir=bfcl, download=False)
    assert len(rows) == 400


def test_bytes_are_the_same_in_another_process(bfcl, tmp_path):
    """Also where strings hash otherwise."""
    ToolboxSeeds(data_dir=tmp_path / "here").download_and_prepare()
    code = ("import sys; from rods_jax.tasks.tfds_builder import *;"
            "BfclSeeds(data_dir=sys.argv[1], config='grouped').download_and_prepare();"
            "ToolboxSeeds(data_dir=sys.argv[1]).download_and_prepare()")
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "there"], cwd=ROOT, text=True,
                          env={**os.environ, "PYTHONHASHSEED": "12345"}, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    there, here = digests(tmp_path / "there"), digests(tmp_path / "here") | digests(bfcl)
    assert len(there) > 8 and {name: here.get(name) for name in there} == there


def test_without_the_package(bfcl, tmp_path, monkeypatch):
    """Prepared tasks can be read, and preparing says what to install and leaves nothing."""
    monkeypatch.setattr(bfcl_data, "PACKAGE", "no_such_package")
    bfcl_data.load_tasks.cache_clear()
    try:
        builder = BfclSeeds(data_dir=tmp_path, config="grouped")
        with pytest.raises(ValueError) as error:
            builder.download_and_prepare()
        assert str(error.value).startswith("the BFCL suite needs the bfcl-eval package: pip inst")
        assert "\n" not in str(error.value) and not list(tmp_path.iterdir())
        there = BfclSeeds(data_dir=bfcl, config="grouped")
        there.download_and_prepare()
        assert isinstance(there.tasks("train")[0], Task)
    finally:
        bfcl_data.load_tasks.cache_clear()


def test_seeds_that_were_changed_on_disk_are_refused(tmp_path, monkeypatch):
    """As after an update of the code: what is there is not what the suite gives now."""
    now = ToolboxSeeds.splits
    with monkeypatch.context() as patch:
        patch.setattr(ToolboxSeeds, "splits",
                      lambda self: {name: tasks[:2] for name, tasks in now(self).items()})
        ToolboxSeeds(data_dir=tmp_path).download_and_prepare()
    with pytest.raises(ValueError, match="holds other tasks in split train; remove that folder"):
        ToolboxSeeds(data_dir=tmp_path).download_and_prepare()


def test_names_that_could_not_be_read_back_are_refused(tmp_path):
    for suite, split in (("../evil", "train"), ("notes", "train[:5]"), ("notes", "a/b")):
        with pytest.raises(ValueError, match="cannot name a data set or a split"):
            prepare_tasks(tmp_path / "data", suite, {split: many(2)})
    assert not (tmp_path / "evil").exists()


def test_two_processes_may_prepare_at_once(tmp_path):
    code = ("import sys; sys.path.insert(0, 'tests'); from test_tasks_tfds import many;"
            "from rods_jax.tasks.tfds_builder import prepare_tasks;"
            f"prepare_tasks({str(tmp_path)!r}, 'notes', {{'train': many(30)}})")
    both = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
            for _ in range(2)]
    assert [(p.communicate()[1], p.returncode) for p in both] == [("", 0)] * 2
    assert load_tasks(tmp_path, "notes", "train") == many(30)


def test_a_folder_that_lost_a_file_says_so(tmp_path):
    prepare_tasks(tmp_path, "notes", {"train": many(2)})
    next(tmp_path.rglob("dataset_info.json")).unlink()
    with pytest.raises(ValueError, match="is damaged .*remove that folder"):
        load_tasks(tmp_path, "notes", "train")
