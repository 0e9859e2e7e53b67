"""The fixed splits: sizes, categories, no leak, the same in every process."""

import collections
import hashlib
import json
import os
import pathlib
import subprocess
import sys

import pytest

from rods_jax.tools.toolbox import ToolboxSuite, split, structure_key
from rods_jax.tools.toolbox.graph import TOOLS
from rods_jax.tools.toolbox.generator import MIX, SPLIT_SIZES, is_sound
from rods_jax.tools.toolbox.structure import base_key, call_shapes
from rods_jax.types import CATEGORIES, Source, Task

NAMES = ("train", "held_in", "new_structures", "warm")


def test_sizes_categories_and_names():
    assert {n: len(split(n)) for n in NAMES} == SPLIT_SIZES == {
        "train": 400, "held_in": 400, "new_structures": 200, "warm": 150}
    for name in NAMES:
        for i, task in enumerate(split(name)):
            assert task.uid == f"toolbox-{name}-{i:04d}" and task.source is Source.SEED
            assert task.category is CATEGORIES[i % 4]
    assert ToolboxSuite().split("warm") is split("warm")
    with pytest.raises(ValueError, match="unknown split 'test'"):
        split("test")
    assert set(MIX) <= set(NAMES)


def test_every_task_is_sound_and_survives_json():
    for name in NAMES:
        for task in split(name):
            assert is_sound(task)
            assert Task.from_json(json.loads(json.dumps(task.to_json()))) == task


def test_no_two_tasks_share_a_scenario_or_a_content_hash():
    everything = [t for n in NAMES for t in split(n)]
    assert len({t.scenario for t in everything}) == len(everything)
    assert len({t.content_hash for t in everything}) == len(everything)


def test_structures_are_shared_or_new_as_promised():
    for seed, held in zip(split("train"), split("held_in"), strict=True):
        assert structure_key(seed) == structure_key(held)
        assert seed.initial_config != held.initial_config
    known = {base_key(call_shapes(t)) for n in ("train", "held_in", "warm") for t in split(n)}
    fresh = {base_key(call_shapes(t)) for t in split("new_structures")}
    assert not known & fresh
    keys = {structure_key(t) for n in ("train", "held_in", "warm") for t in split(n)}
    assert not keys & {structure_key(t) for t in split("new_structures")}
    warm = {base_key(call_shapes(t)) for t in split("warm")}
    assert warm & {base_key(call_shapes(t)) for t in split("train")}


def test_the_first_hundred_are_a_fair_sample():
    first, rest = split("train")[:100], split("train")[100:]
    assert collections.Counter(t.category for t in first) == {c: 25 for c in CATEGORIES}

    def mean_calls(tasks):
        return sum(len(t.gold) for task in tasks for t in task.turns) / len(tasks)
    assert abs(mean_calls(first) - mean_calls(rest)) < 0.8
    # Few traces must show every tool several times, so they are longer than the seeds.
    shown = collections.Counter(c.name for task in split("warm") for t in task.turns
                                for c in t.gold)
    assert min(shown[name] for name in TOOLS) >= 3
    assert mean_calls(split("warm")) > mean_calls(split("train"))


def test_a_rewording_changes_texts_alone():
    suite, told = ToolboxSuite(), 0
    for task in split("warm")[:24]:
        family = suite.wordings(task, 5)
        assert family == suite.wordings(task, 5) and family[0] == task and len(family) <= 5
        assert len({t.uid for t in family}) == len(family)
        told += len({tuple(turn.user for turn in t.turns) for t in family})
        for other in family[1:]:
            silent = [tuple((turn.gold, turn.tools) for turn in t.turns) for t in (task, other)]
            assert silent[0] == silent[1] and is_sound(other)
            assert (other.initial_config, other.category, other.scenario) == (
                task.initial_config, task.category, task.scenario)
            assert call_shapes(other) == call_shapes(task)
    assert told > 24 * 4
    assert suite.wordings(split("train")[0], 5) == (split("train")[0],)
    assert suite.wordings(task, 1) == (task,)


def digest(tasks):
    return hashlib.sha256(json.dumps([t.to_json() for t in tasks]).encode()).hexdigest()


def test_another_process_with_another_hash_seed_makes_the_same_splits():
    code = ("import hashlib, json\n"
            "from rods_jax.tools.toolbox import split\n"
            "rows = [t.to_json() for n in ('train', 'warm') for t in split(n)]\n"
            "print(hashlib.sha256(json.dumps(rows).encode()).hexdigest())\n")
    env = {**os.environ, "PYTHONHASHSEED": "77"}
    out = subprocess.run([sys.executable, "-c", code], env=env, check=True, text=True,
                         capture_output=True, cwd=pathlib.Path(__file__).parents[1]).stdout.strip()
    assert out == digest([*split("train"), *split("warm")])
