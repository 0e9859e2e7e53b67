"""BFCL's classes behind the gate: isolation and safety."""

from __future__ import annotations

import gc
import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rods_jax.tools import bfcl_data, bfcl_sandbox
from rods_jax.tools.bfcl import BFCLSuite
from rods_jax.tools.bfcl_env import BFCLEnv, BFCLWorld
from rods_jax.tools.bfcl_sandbox import Sandbox
from rods_jax.tools.scoring import Mode, Scoring
from rods_jax.types import ToolCall

BY_UID = {task.uid: task for task in BFCLSuite().tasks}

# ------------------------------------------------------------------------- isolation


def _records():
    module = bfcl_data.tool_module("TravelAPI")
    weather = bfcl_data.tool_module("VehicleControlAPI").LONG_WEATHER_EXTENSION
    return json.dumps([module.CREDIT_CARD_EXTENSION, module.BOOKING_RECORD_EXTENSION, weather])


def _texts(task):
    """Result texts of the gold transcript; it must score 1."""
    env, texts = BFCLEnv(task), []
    while (turn := env.begin_turn()) is not None:
        texts += [r.text for r in env.execute(task.turns[turn.index].gold)]
        assert env.end_turn("Done.").passed or not task.turns[turn.index].gold
    return texts


@pytest.mark.parametrize("uid", [
    pytest.param("multi_turn_long_context_170", marks=pytest.mark.slow), "multi_turn_base_60"])
def test_a_thousand_rollouts_are_independent_and_leave_memory_flat(uid):
    task, before, others = BY_UID[uid], _records(), _instances()
    once = _texts(task)
    tracemalloc.start()
    try:
        sizes = []
        for _ in range(5):
            assert all(_texts(task) == once for _ in range(200))
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert max(sizes[1:]) - sizes[0] < 50_000  # bytes over 800 rollouts
    assert _instances() == others  # those that tests before this one still hold
    assert _records() == before


def _instances():
    classes = tuple(bfcl_data.tool_class(d) for d in bfcl_data.DOMAINS)
    gc.collect()
    return sum(isinstance(o, classes) for o in gc.get_objects())


def test_states_do_not_share_what_the_classes_share():
    config = {"TwitterAPI": {"authenticated": True}}
    first, second = (Sandbox(["TwitterAPI"], config, False) for _ in range(2))
    gold_mentions = ["@a"]
    first.call(ToolCall("post_tweet", {"content": "x"}))
    first.call(ToolCall("post_tweet", {"content": "y", "mentions": gold_mentions}))
    first.call(ToolCall("mention", {"tweet_id": 0, "mentioned_usernames": ["@leak"]}))
    first.call(ToolCall("mention", {"tweet_id": 1, "mentioned_usernames": ["@leak"]}))
    assert gold_mentions == ["@a"]
    assert "leak" not in second.call(ToolCall("post_tweet", {"content": "x"})).text
    assert bfcl_data.tool_class("TwitterAPI").post_tweet.__defaults__ == ([], [])


def test_precision_and_weather_stay_local():
    module = bfcl_data.tool_module("MathAPI")
    dps, prec = module.mpmath.mp.dps, module.getcontext().prec
    math = Sandbox(["MathAPI"], {}, False)
    assert math.call(ToolCall("logarithm", {"value": 20, "base": 10, "precision": 2})).ok
    assert math.call(ToolCall("square_root", {"number": 2, "precision": 3})).ok
    assert (module.mpmath.mp.dps, module.getcontext().prec) == (dps, prec)
    before = _records()
    car = Sandbox(["VehicleControlAPI"], {}, True)
    assert car.call(ToolCall("get_outside_temperature_from_google", {})).ok
    assert _records() == before


@pytest.mark.parametrize("name", ["cp", "mv"])
def test_a_directory_into_itself_is_refused(name):
    config = {"GorillaFileSystem": {"root": {"r": {"type": "directory", "contents": {
        "d": {"type": "directory", "contents": {}}}}}}}
    box = Sandbox(["GorillaFileSystem"], config, False)
    assert not box.call(ToolCall(name, {"source": "d", "destination": "d"})).ok
    assert box.call(ToolCall("find", {})).text == '{"matches": ["./d"]}'


def _files(*calls):
    box = Sandbox(["GorillaFileSystem"], {"GorillaFileSystem": {"root": {
        "r": {"type": "directory", "contents": {}}}}}, False)
    keys = {"mkdir": ("dir_name",), "cd": ("folder",), "cp": ("source", "destination"),
            "mv": ("source", "destination"), "rm": ("file_name",), "ls": (), "du": ()}
    results = [box.call(ToolCall(name, dict(zip(keys[name], given)))) for name, *given in calls]
    return box, results


def test_a_directory_cannot_end_up_inside_itself_by_way_of_a_copy():
    box, results = _files(
        ("mkdir", "p"), ("cd", "p"), ("mkdir", "t"), ("cd", ".."), ("cp", "p", "x"),
        ("cp", "p", "y"), ("mv", "y", "x"), ("cd", "x"), ("mv", "y", "t"))
    assert [r.ok for r in results] == [True] * 8 + [False]
    assert "would hold itself" in results[-1].text
    assert json.loads(box.call(ToolCall("ls", {})).text) == {
        "current_directory_content": ["t", "y"]}  # as before
    assert box.call(ToolCall("du", {})).ok


def test_a_removed_directory_one_stands_in_is_bounded_too():
    box, results = _files(
        ("mkdir", "a"), ("cd", "a"), ("mkdir", "sub"), ("cd", ".."), ("cp", "a", "b"),
        ("rm", "a"), ("cd", "b"), ("cd", "sub"), ("cd", ".."), ("mkdir", "."), ("cp", ".", "y"))
    assert all(r.ok for r in results[:9])
    system = box.instance("GorillaFileSystem")
    assert system._current_dir.name == "a" and "a" not in system.root.contents
    assert bfcl_sandbox._n_entries(system._current_dir.contents) < 10
    answer = box.call(ToolCall("cp", {"source": "zz", "destination": ["a"]}))
    assert "No such file or directory" in answer.text


def test_a_tree_cannot_be_doubled_for_ever():
    level = [("mkdir", "p"), ("cp", "d", "p"), ("mv", "d", "e"), ("mv", "e", "p"), ("mv", "p", "d")]
    box, results = _files(("mkdir", "d"), *(level * 30))
    refused = [r.text for r in results if "over 20000 entries" in r.text]
    assert refused and all(r.ok for r in results[:5 * 12])
    assert len(box.call(ToolCall("find", {})).text) < 5_000_000


def test_a_tree_without_end_is_unequal_not_fatal():
    config = {"GorillaFileSystem": {"root": {"r": {"type": "directory", "contents": {
        "d": {"type": "directory", "contents": {}}}}}}}
    a, b = (Sandbox(["GorillaFileSystem"], config, False) for _ in range(2))
    for box in (a, b):
        directory = box.instance("GorillaFileSystem").root.contents["d"]
        directory.contents["d"] = directory
    for mode in Mode:
        assert not BFCLWorld(a, typed=True).same(BFCLWorld(b, typed=True), mode)
    assert not a.call(ToolCall("du", {})).ok


# ------------------------------------------------------------------------- safety

HOSTILE = (
    "__import__('os').system('touch {file}')", "importlib.import_module('os')",
    "open('{file}', 'w')", "globals()", "copy.deepcopy([1])", "json.dumps(1)", "(exit)()",
    "quit.__call__()", "[exit][0]()", "().__class__.__base__.__subclasses__()", "lambda: 1",
    "[x for x in (1,)]", "(x := 1)", "f'{{1}}'", "1 if 1 else 2", "not 1", "*[1]", "**{{}}",
    "9**9**9", "'a'*10**9", "ls()", "ls.__func__", "ls()()", "ls();ls()", "ls()\nls()", "b'x'",
    "1j", "...", "1e999", "_load_scenario", "__init__", "__class__", "__eq__", "root", "exit",
    "\uff4c\uff53", "GorillaFileSystem.ls", "_navigate_to_directory", "", " ls", "ls\0",
)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_never_run(text, tmp_path):
    marker = tmp_path / "made"
    text = text.format(file=marker) if "{file}" in text else text
    task = BY_UID["multi_turn_base_1"]
    env = BFCLEnv(task)
    env.begin_turn()
    as_name, = env.execute([ToolCall(text, {})])
    as_key, = env.execute([ToolCall("ls", {text: True})])
    assert not as_name.ok and not as_key.ok
    as_value, = env.execute([ToolCall("echo", {"content": text})])
    if "\0" not in text:
        assert json.loads(as_value.text) == {"terminal_output": text}
    env.execute([ToolCall("cd", {"folder": text}), ToolCall("find", {"path": text})])
    assert not marker.exists()


@pytest.mark.parametrize("value", [
    b"x", 1j, ..., float("inf"), float("nan"), 10**5000, {1: 2}, {"a": {2, 3}}, object(), len,
    "a\0b", "a" * 30_000, list(range(6_000)), [[[[[[[[[[[[[[]]]]]]]]]]]]]],
], ids=lambda value: type(value).__name__)
def test_values_that_are_no_json_literal_are_refused(value):
    box = Sandbox(["MathAPI", "GorillaFileSystem"], {}, False)
    result = box.call(ToolCall("echo", {"content": value}))
    assert not result.ok and result.text.startswith("Error during execution: ")


@pytest.mark.parametrize("call", [
    ToolCall("power", {"base": 7, "exponent": 60_000_000}),
    ToolCall("power", {"base": -(10**70), "exponent": 10**6}),
    ToolCall("power", {"base": 7.5, "exponent": 60_000_000}),
    ToolCall("round_number", {"number": 5, "decimal_places": -(10**9)}),
    ToolCall("logarithm", {"value": 3, "base": 7, "precision": 300_000}),
    ToolCall("square_root", {"number": 2, "precision": 2_000_000}),
])
def test_expensive_arithmetic_is_tamed(call):
    assert len(Sandbox(["MathAPI"], {}, False).call(call).text) < 2_000


def test_odd_arguments_answer_with_an_error():
    box = Sandbox(["MathAPI", "GorillaFileSystem"], {}, False)
    for call in (ToolCall("add", {"a": 1}), ToolCall("add", {"a": 1, "b": 2, "c": 3}),
                 ToolCall("add", {"self": 1, "a": 1, "b": 2}), ToolCall("add", []),
                 ToolCall(None, {}), ToolCall(10**5000, {}),
                 ToolCall("cd", {"folder": 3}), ToolCall("send_message", {})):
        result = box.call(call)
        assert not result.ok and result.text.startswith("Error during execution: ")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(bfcl_data.tool_domains())),
       st.lists(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
                | st.lists(st.text(max_size=3), max_size=3), max_size=6))
def test_any_literal_arguments_give_text(name, values):
    domain = bfcl_data.tool_domains()[name]
    names = bfcl_data.parameter_names(domain, name)
    box = Sandbox([domain], {}, False)
    result = box.call(ToolCall(name, dict(zip(names, values, strict=False))))
    assert isinstance(result.text, str) and isinstance(result.ok, bool)


def test_strings_that_look_like_calls_stay_as_they_are():
    config = {"GorillaFileSystem": {"root": {"r": {"type": "directory", "contents": {
        "a.txt": {"type": "file", "content": ""}}}}}}
    box = Sandbox(["GorillaFileSystem"], config, False)
    for content in ("run cd (x) then touch(y)", "hello (world)"):
        box.call(ToolCall("echo", {"content": content, "file_name": "a.txt"}))
        assert json.loads(box.call(ToolCall("cat", {"file_name": "a.txt"})).text) == {
            "file_content": content}


# ------------------------------------------------------------------------- schema


@pytest.mark.parametrize("name, arguments, said", [
    ("mean", {"numbers": [1, "2"]}, "argument 'numbers' has an item that must be of type number"),
    ("mean", {"numbers": 3}, "argument 'numbers' must be of type array"),
    ("mean", {}, "missing argument 'numbers'"),
    ("mean", {"numbers": [1], "x y": 1}, "unknown argument 'x y', known: numbers"),
    ("add", {"a": True, "b": 1}, "argument 'a' must be of type number"),
    ("round_number", {"number": 2.5, "decimal_places": 1.5}, "must be of type integer"),
])
def test_arguments_are_checked_against_the_schema(name, arguments, said):
    visible = frozenset(bfcl_data.tool_domains())
    world = BFCLWorld(Sandbox(["MathAPI"], {}, False), typed=True)
    result = world.call(ToolCall(name, arguments), visible)
    assert not result.ok and result.text.startswith(f"Error during execution: {name}: ")
    assert said in result.text
    # The benchmark has no such check: the class itself meets the arguments.
    bare = BFCLWorld(Sandbox(["MathAPI"], {}, False), typed=False)
    assert bare.call(ToolCall(name, arguments), visible).text != result.text


def test_gold_fits_the_schemas_and_scores_without_an_error():
    env = BFCLEnv(BY_UID["multi_turn_base_173"], Scoring())  # a ticket id that is a string
    while (turn := env.begin_turn()) is not None:
        gold = env.task.turns[turn.index].gold
        assert all(r.ok for r in env.execute(gold)) and env.end_turn("Done.").passed
