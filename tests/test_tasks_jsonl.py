import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rods_jax.tasks.jsonl import read_tasks, write_tasks
from rods_jax.types import Category, Source, Task, ToolCall, Turn
from test_synthesis_suite import notes_task

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2**60, 2**60) | st.text(max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=6)
calls = st.builds(ToolCall, st.text(max_size=6),
                  st.dictionaries(st.text(max_size=5), json_values, max_size=3))
turns = st.builds(Turn, st.text(max_size=20), st.lists(calls, max_size=3).map(tuple),
                  st.lists(st.text(max_size=5), max_size=3).map(tuple))
tasks = st.builds(
    Task, uid=st.text(max_size=5), domains=st.lists(st.text(max_size=4), max_size=2).map(tuple),
    category=st.sampled_from(Category),
    initial_config=st.dictionaries(st.text(max_size=5), json_values, max_size=3),
    turns=st.lists(turns, min_size=1, max_size=3).map(tuple), scenario=st.text(max_size=6),
    source=st.sampled_from(Source), parent=st.none() | st.text(max_size=4),
    generation=st.integers(0, 9))


@settings(max_examples=30, deadline=None)
@given(st.lists(tasks, max_size=4, unique_by=lambda t: t.uid))
def test_what_is_written_is_read(tmp_path_factory, some):
    path = tmp_path_factory.mktemp("t") / "tasks.jsonl"
    write_tasks(path, some)
    assert read_tasks(path) == some
    assert os.listdir(path.parent) == ["tasks.jsonl"]


def _lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("change, needle", [
    (lambda r: r.update(colour=1), "unknown field 'colour'"),
    (lambda r: r.pop("scenario"), "lacks the field 'scenario'"),
    (lambda r: r["turns"][0].update(user=3), "turns[0].user has the wrong type int"),
    (lambda r: r["turns"][1]["gold"][0].pop("name"), "turns[1].gold[0] lacks the field 'name'"),
    (lambda r: r.update(schema_version=9), "schema_version is 9"),
    (lambda r: r.update(category="hard"), "category 'hard'"),
    (lambda r: r.update(turns=[]), "turns is empty"),
])
def test_bad_line_is_one_clear_error(tmp_path, change, needle):
    good, bad = notes_task(0).to_json(), json.loads(json.dumps(notes_task(1).to_json()))
    change(bad)
    path = tmp_path / "tasks.jsonl"
    path.write_text(_lines(good) + "\n" + _lines(bad))
    with pytest.raises(ValueError) as error:
        read_tasks(path)
    text = str(error.value)
    assert f"{path}, line 3: " in text and needle in text and "\n" not in text


def test_not_json_and_equal_uids(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text(_lines(notes_task(0).to_json())[:-20])
    with pytest.raises(ValueError, match="line 1: not JSON"):
        read_tasks(path)
    path.write_text(_lines(notes_task(0).to_json(), notes_task(0).to_json()))
    with pytest.raises(ValueError, match="line 2: uid 'seed0' was used in line 1"):
        read_tasks(path)


def test_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "tasks.jsonl"
    write_tasks(path, [notes_task(0)])

    def breaks():
        yield notes_task(1)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_tasks(path, breaks())
    assert read_tasks(path) == [notes_task(0)]
    assert os.listdir(tmp_path) == ["tasks.jsonl"]
