import dataclasses
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rods_jax.tasks.jsonl import (TYPES, read_tasks, read_tools, tool_to_json, write_tasks,
                                  write_tools)
from rods_jax.types import Category, Source, Task, ToolCall, ToolSpec, Turn
from test_synthesis_suite import SPECS, notes_task

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
    Task, uid=st.text(min_size=1, max_size=5), domains=st.lists(st.text(max_size=4), max_size=2).map(tuple),
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


def test_a_field_twice_and_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "tasks.jsonl"
    line = _lines(notes_task(0).to_json())
    path.write_text(line.replace('"uid"', '"uid": "a", "uid"'))
    with pytest.raises(ValueError, match="line 1: field 'uid' is there twice; correct"):
        read_tasks(path)
    path.write_bytes(line.encode().replace(b"kite", b"\xff\xfe"))
    with pytest.raises(ValueError, match="line 1: not UTF-8 text"):
        read_tasks(path)
    path.write_text("[" * 200_000 + "\n")
    with pytest.raises(ValueError, match="line 1: nested too deeply"):
        read_tasks(path)


# ------------------------------------------------------------------- tools

scalar_schemas = st.fixed_dictionaries({"type": st.sampled_from(TYPES)},
                                       optional={"description": st.text(max_size=9)})
schemas = st.recursive(
    scalar_schemas,
    lambda inner: st.fixed_dictionaries({"type": st.just("array"), "items": inner})
    | st.fixed_dictionaries({"type": st.just("object"), "properties": st.dictionaries(
        st.text(max_size=4), inner, max_size=3)}), max_leaves=5)
identifiers = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,20}", fullmatch=True)
words = st.text(min_size=1, max_size=12).filter(str.strip)
tools = st.builds(
    lambda name, description, domain, properties, n: ToolSpec(name, description, {
        "type": "object", "properties": properties, "required": list(properties)[:n]}, domain),
    identifiers, words, words, st.dictionaries(st.text(max_size=5), schemas, max_size=3),
    st.integers(0, 3))


@settings(max_examples=40, deadline=None)
@given(st.lists(tools, max_size=4, unique_by=lambda t: t.name))
def test_tools_written_are_read(tmp_path_factory, some):
    path = tmp_path_factory.mktemp("t") / "tools.jsonl"
    write_tools(path, some)
    assert read_tools(path) == some
    assert os.listdir(path.parent) == ["tools.jsonl"]


def test_the_tools_of_the_suites_are_read_as_they_are(tmp_path):
    pytest.importorskip("bfcl_eval")
    from rods_jax.tools.bfcl import BFCLSuite
    from rods_jax.tools.toolbox import ToolboxSuite
    for suite in (BFCLSuite(), ToolboxSuite()):
        write_tools(tmp_path / "tools.jsonl", suite.tools(suite.domains))
        assert tuple(read_tools(tmp_path / "tools.jsonl")) == suite.tools(suite.domains)


def _properties(row, **part):
    row["parameters"]["properties"]["x"] = part


@pytest.mark.parametrize("change, needle", [
    (lambda r: r.update(colour=1), "tool has an unknown field 'colour'"),
    (lambda r: r.pop("domain"), "tool lacks the field 'domain'"),
    (lambda r: r.update(name=3), "tool.name has the wrong type int"),
    (lambda r: r.update(schema_version=True), "tool.schema_version has the wrong type bool"),
    (lambda r: r.update(schema_version=9), "schema_version is 9, this code reads 1"),
    (lambda r: r.update(name="my tool"), "name 'my tool' is not a letter"),
    (lambda r: r.update(description=" "), "description is empty"),
    (lambda r: r.update(parameters=[]), "tool.parameters has the wrong type list"),
    (lambda r: r["parameters"].update(type="array"), "parameters.type is 'array'"),
    (lambda r: r["parameters"].pop("type"), "parameters.type None is not one of string"),
    (lambda r: r["parameters"].update(properties=[]), "parameters.properties is not an object"),
    (lambda r: r["parameters"].update(required="id"), "parameters.required is not a list"),
    (lambda r: r["parameters"].update(required=["ID"]), "required names 'ID', which is not in"),
    (lambda r: r["parameters"].update(additionalProperties=True), "additionalProperties is not f"),
    (lambda r: _properties(r, type="str"), "parameters.properties.x.type 'str' is not one of"),
    (lambda r: _properties(r, type=["string", "any"]), "properties.x.type 'any' is not one of"),
    (lambda r: _properties(r), "parameters.properties.x.type None is not one of"),
    (lambda r: _properties(r, type="array", items={"type": "x"}), "properties.x.items.type 'x'"),
    (lambda r: _properties(r, type="integer", minimum=1), "x has the keyword 'minimum', which no"),
    (lambda r: _properties(r, type="string", enum=[]), "properties.x.enum is not a list of values"),
    (lambda r: _properties(r, type="integer", default="1"), "x.default does not fit its own"),
])
def test_a_bad_tool_is_one_clear_error(tmp_path, change, needle):
    rows = [json.loads(json.dumps(tool_to_json(spec))) for spec in SPECS[:2]]
    change(rows[1])
    path = tmp_path / "tools.jsonl"
    path.write_text(_lines(*rows))
    with pytest.raises(ValueError) as error:
        read_tools(path)
    text = str(error.value)
    assert text.startswith(f"{path}, line 2: ") and needle in text and "\n" not in text
    assert text.endswith("; correct that field or drop the line")


def test_equal_tool_names_are_refused_both_ways(tmp_path):
    path = tmp_path / "tools.jsonl"
    other = ToolSpec("read", "Reads.", {"type": "object"}, "elsewhere")
    path.write_text(_lines(*map(tool_to_json, (*SPECS, other))))
    with pytest.raises(ValueError, match="line 5: name 'read' was used in line 2; give every tool"):
        read_tools(path)
    path.unlink()
    with pytest.raises(ValueError, match="two tools are named 'read'"):
        write_tools(path, (*SPECS, other))
    with pytest.raises(ValueError, match="properties.x.type 'text' is not one of"):
        write_tools(path, [ToolSpec("f", "F.", {"type": "object", "properties": {
            "x": {"type": "text"}}}, "d")])
    assert not os.listdir(tmp_path)


def test_a_text_that_no_file_can_hold_names_its_task(tmp_path):
    half = dataclasses.replace(notes_task(1), uid="half", scenario="\ud800")
    with pytest.raises(ValueError, match="task half: a text holds half a surrogate pair"):
        write_tasks(tmp_path / "t.jsonl", [notes_task(0), half])
    assert not list(tmp_path.iterdir())
    row = json.dumps(half.to_json())
    (tmp_path / "in.jsonl").write_text(row + "\n")
    with pytest.raises(ValueError, match="line 1: a text holds half a surrogate pair"):
        read_tasks(tmp_path / "in.jsonl")
