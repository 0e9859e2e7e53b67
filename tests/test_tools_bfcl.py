"""The BFCL suite: data, isolation, safety and scoring, against the package itself."""

from __future__ import annotations

import collections
import copy
import importlib
import importlib.util
import inspect
import json
import pathlib
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rods_jax.tools import bfcl_data, bfcl_env
from rods_jax.tools.bfcl import SUSPECT, BFCLSuite, Scoring
from rods_jax.tools.bfcl_env import BFCLEnv, Sandbox, answer_key, replay, same_value
from rods_jax.types import CATEGORIES, Category, Task, ToolCall, Turn

SUITE = BFCLSuite()
BY_UID = {task.uid: task for task in SUITE.tasks}
PACKAGE = pathlib.Path(importlib.util.find_spec("bfcl_eval").submodule_search_locations[0])
SOURCE = "bfcl_eval.eval_checker.multi_turn_eval"


def play(task, edit=lambda turn, calls: calls, said=None, scoring=Scoring.NUMERIC):
    """Outcomes of the gold transcript after `edit(turn, calls)`; and all result texts."""
    env = BFCLEnv(task, scoring)
    outcomes, texts = [], []
    while (turn := env.begin_turn()) is not None:
        calls = edit(turn.index, list(task.turns[turn.index].gold))
        texts += [r.text for r in env.execute(calls)]
        reply = SUITE.gold_reply(task, turn.index) if said is None else said
        outcomes.append(env.end_turn(reply))
    return outcomes, texts


def score(outcomes):
    return sum(o.passed for o in outcomes) / len(outcomes)


# ------------------------------------------------------------------------- data


def test_import_is_light_and_writes_nothing():
    code = ("import sys, rods_jax.tools.bfcl; "
            "assert not {'bfcl_eval', 'jax', 'mpmath'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True)
    assert "bfcl_eval.utils" not in sys.modules
    assert not {"result", "score", ".file_locks"} & {p.name for p in PACKAGE.iterdir()}


def test_without_the_package_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(bfcl_data.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(bfcl_data, "load_tasks", bfcl_data.load_tasks.__wrapped__)
    with pytest.raises(ValueError, match="pip install --no-deps bfcl-eval==") as error:
        BFCLSuite()
    assert "\n" not in str(error.value)


def test_tasks_match_the_files():
    assert len(SUITE.tasks) == 800 and len(BY_UID) == 800
    assert collections.Counter(t.category for t in SUITE.tasks) == dict.fromkeys(CATEGORIES, 200)
    n_calls = collections.Counter()
    for task in SUITE.tasks:
        n_calls[task.category] += sum(len(t.gold) for t in task.turns)
        assert Task.from_json(json.loads(json.dumps(task.to_json()))) == task
    assert [n_calls[c] for c in CATEGORIES] == [1142, 1140, 1140, 1203]
    assert BY_UID["multi_turn_base_12"].scenario == "bfcl-12"


def test_gold_arguments_are_keywords_of_the_class():
    positional = bfcl_data.parse_gold("sort('final_report.pdf')")
    assert positional.arguments == {"file_name": "final_report.pdf"}
    for task in SUITE.tasks:
        for turn in task.turns:
            for call in turn.gold:
                domain = bfcl_data.tool_domains()[call.name]
                assert domain in task.domains
                signature = inspect.signature(getattr(bfcl_data.tool_class(domain), call.name))
                signature.bind(None, **call.arguments)


@pytest.mark.parametrize("text", ["f", "a.b()", "cd(folder=x)", "cd(ls())", "unknown()"])
def test_gold_that_is_no_plain_call_is_refused(text):
    with pytest.raises(ValueError):
        bfcl_data.parse_gold(text)


def test_withheld_tools_appear_with_their_turn():
    for task in SUITE.tasks:
        full = {spec.name for spec in SUITE.tools(task.domains)}
        for turn in task.turns:
            assert {c.name for c in turn.gold} <= set(turn.tools) <= full
        assert set(task.turns[-1].tools) == full
        if task.category is Category.MISS_FUNC:
            # The request, without gold, then an empty turn that brings what it needs.
            at = [i for i, t in enumerate(task.turns) if not t.user]
            assert len(at) == 1 and at[0] > 0
            before, now = task.turns[at[0] - 1], task.turns[at[0]]
            assert not before.gold
            needed = {c.name for c in now.gold} & (set(now.tools) - set(before.tools))
            assert needed or task.uid in SUSPECT
        else:
            assert all(set(t.tools) == full for t in task.turns)


def test_specs_are_json_schema_in_signature_order():
    assert len({s.name for s in SUITE.tools(bfcl_data.DOMAINS)}) == 128
    known = {"object", "string", "number", "integer", "boolean", "array"}
    for spec in SUITE.tools(bfcl_data.DOMAINS):
        names = bfcl_data.parameter_names(spec.domain, spec.name)
        assert tuple(spec.parameters["properties"]) == names
        assert spec.parameters["type"] == "object"
        assert {p["type"] for p in spec.parameters["properties"].values()} <= known
        assert "None" not in [p.get("default") for p in spec.parameters["properties"].values()]
        json.dumps(spec.parameters)
    with pytest.raises(ValueError, match="Abacus"):
        SUITE.tools(["Abacus"])


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_split_keeps_siblings_together(seed):
    train, held = (SUITE.split(name, seed, drop_suspect=False) for name in ("train", "held_in"))
    assert len({t.uid for t in (*train, *held)}) == len(train) + len(held) == 800
    assert not {t.scenario for t in train} & {t.scenario for t in held}
    assert SUITE.split("train", seed, drop_suspect=False) == train
    for tasks in (train, held):
        assert [t.category for t in tasks] == list(CATEGORIES) * 100
        assert len({t.scenario for t in tasks[:100]}) == 100
    kept = [t for t in train if t.uid not in SUSPECT]
    fit = SUITE.split("train", seed)
    assert {t.uid for t in fit} == {t.uid for t in kept} and len(fit) == len(kept) < 400
    assert [t.category for t in fit[:320]] == list(CATEGORIES) * 80
    assert SUITE.split("held_in", seed) == held
    with pytest.raises(ValueError, match="test"):
        SUITE.split("test")


def test_a_suite_of_some_domains():
    wanted = ("GorillaFileSystem", "MathAPI")
    suite = BFCLSuite(domains=wanted)
    assert suite.domains == wanted and SUITE.domains == bfcl_data.DOMAINS
    for name in ("train", "held_in"):
        found = suite.split(name)
        assert {d for t in found for d in t.domains} == set(wanted)
        fit = {t.uid for t in SUITE.split(name) if set(t.domains) <= set(wanted)}
        assert {t.uid for t in found} == fit and len(found) == len(fit)
        assert [t.category for t in found[:40]] == list(CATEGORIES) * 10
    with pytest.raises(ValueError, match="Abacus"):
        BFCLSuite(domains=["Abacus"])


def test_suspects_are_tasks():
    assert len(SUSPECT) == 33 and set(BY_UID) >= SUSPECT


# ------------------------------------------------------------------------- gold


@pytest.mark.parametrize("scoring", list(Scoring))
def test_gold_scores_one_everywhere(scoring):
    failed = []
    for task in SUITE.tasks:
        outcomes, _ = play(task, scoring=scoring)
        if score(outcomes) != 1 or any(o.n_errors for o in outcomes):
            failed.append(task.uid)
    assert failed == []


def test_gold_texts_do_not_depend_on_what_ran_before():
    sample = random.Random(0).sample(SUITE.tasks, 80)
    first = {t.uid: [r.text for r in replay(t)] for t in sample}
    random.Random(1).shuffle(sample)
    assert {t.uid: [r.text for r in replay(t)] for t in sample} == first


@pytest.fixture
def pristine_package():
    """The package's executor changes its own constants; put them back."""
    module = importlib.import_module(SOURCE + ".func_source_code.long_context")
    names = ("CREDIT_CARD_EXTENSION", "BOOKING_RECORD_EXTENSION", "LONG_WEATHER_EXTENSION")
    saved = {name: copy.deepcopy(getattr(module, name)) for name in names}
    yield
    for name in names:
        getattr(module, name).clear()
        getattr(module, name).update(saved[name])
    post = bfcl_data.tool_class("TwitterAPI").post_tweet
    post.__defaults__ = ([], [])


def test_texts_equal_the_packages_executor(monkeypatch, tmp_path, pristine_package):
    monkeypatch.setenv("BFCL_PROJECT_ROOT", str(tmp_path))
    utils = importlib.import_module(SOURCE + ".multi_turn_utils")
    compared = 0
    for category in CATEGORIES:
        name = f"BFCL_v4_multi_turn_{category.value}.json"
        rows = [json.loads(r) for r in (PACKAGE / "data" / name).read_text().splitlines()]
        answers = [json.loads(r)["ground_truth"] for r in
                   (PACKAGE / "data" / "possible_answer" / name).read_text().splitlines()]
        for i in range(CATEGORIES.index(category), 200, 4):
            theirs = []
            for calls in answers[i]:
                texts, _ = utils.execute_multi_turn_func_call(
                    calls, rows[i]["initial_config"], rows[i]["involved_classes"], "parity",
                    rows[i]["id"], long_context=category is Category.LONG_CONTEXT)
                theirs += texts
            assert [r.text for r in replay(BY_UID[rows[i]["id"]])] == theirs, rows[i]["id"]
            compared += 1
    assert compared == 200


# ------------------------------------------------------------------------- scoring


def test_damage_costs_turns():
    rng = random.Random(3)
    tasks = rng.sample([t for t in SUITE.tasks if t.category is Category.BASE], 60)
    worse = [
        score(play(t, lambda i, c: [])[0]) for t in tasks
    ] + [
        score(play(t, lambda i, c: c[1:] if i == len(t.turns) - 1 else c)[0]) for t in tasks
        if t.turns[-1].gold
    ]
    assert sum(s < 1 for s in worse) >= len(worse) - 1
    dropped, total = 0, 0
    for task in tasks:
        n = sum(len(t.gold) for t in task.turns)
        for k in range(n):
            left = [k]

            def drop(i, calls, left=left):
                kept = [c for j, c in enumerate(calls) if j != left[0]]
                left[0] -= len(calls)
                return kept
            total += 1
            dropped += score(play(task, drop)[0]) < 1
    assert dropped >= 0.99 * total


def test_empty_turns_want_an_answer_and_no_call():
    for uid in ("multi_turn_miss_func_0", "multi_turn_miss_param_1"):
        task = BY_UID[uid]
        empty = next(i for i, t in enumerate(task.turns) if not t.gold)
        assert play(task)[0][empty].passed
        assert not play(task, said="  ")[0][empty].passed
        tool = next(n for n in ("pwd", "ls") if n in task.turns[empty].tools)
        called = play(task, lambda i, c, e=empty, n=tool: [ToolCall(n, {})] if i == e else c)[0]
        assert not called[empty].passed
        assert called[empty + 1].passed  # a harmless call leaves the state as it was


def test_gold_replies_say_why_nothing_was_called():
    func, param = BY_UID["multi_turn_miss_func_0"], BY_UID["multi_turn_miss_param_1"]
    empty = [next(i for i, t in enumerate(x.turns) if not t.gold) for x in (func, param)]
    assert "function" in SUITE.gold_reply(func, empty[0])
    assert SUITE.gold_reply(param, empty[1]).endswith("?")
    assert SUITE.gold_reply(func, 0) == "Done."


def test_a_withheld_tool_cannot_be_called():
    task = BY_UID["multi_turn_miss_func_0"]
    env = BFCLEnv(task)
    env.begin_turn()
    assert "sort" not in task.turns[0].tools
    result, = env.execute([ToolCall("sort", {"file_name": "x"})])
    assert not result.ok and result.text == "Error during execution: name 'sort' is not defined"
    seen = []
    env = BFCLEnv(task)
    while (turn := env.begin_turn()) is not None:
        seen.append(turn.new_tools)
        env.end_turn("")
    assert ("sort",) in seen and seen[0] == ()


def test_gold_advances_also_where_the_agent_failed():
    task = BY_UID["multi_turn_base_0"]
    late, _ = play(task, lambda i, c: [] if i == 0 else (
        list(task.turns[0].gold) + c if i == 1 else c))
    assert [o.passed for o in late] == [False, True, True, True]


def test_protocol_misuse_is_an_error():
    env = BFCLEnv(BY_UID["multi_turn_base_0"])
    with pytest.raises(ValueError, match="begin_turn"):
        env.execute([])
    with pytest.raises(ValueError, match="begin_turn"):
        env.end_turn("x")
    env.begin_turn()
    with pytest.raises(ValueError, match="end_turn"):
        env.begin_turn()


def _cruise(speed, distance, activate=True):
    config = {"VehicleControlAPI": {"engineState": "running"}}
    call = ToolCall("setCruiseControl", {"speed": speed, "activate": activate,
                                         "distanceToNextVehicle": distance})
    tools = tuple(s.name for s in SUITE.tools(["VehicleControlAPI"]))
    return Task("cruise", ("VehicleControlAPI",), Category.BASE, config,
                (Turn("Cruise.", (call,), tools),), "cruise")


@pytest.mark.parametrize("name,gold,said,passes", [
    ("setCruiseControl", {"speed": 65, "activate": True, "distanceToNextVehicle": 100},
     {"speed": 65.0, "activate": True, "distanceToNextVehicle": 100.0}, True),
    ("adjustClimateControl", {"temperature": 22}, {"temperature": 22.0}, True),
    ("adjustClimateControl", {"temperature": 1}, {"temperature": True}, False),
    ("adjustClimateControl", {"temperature": 22}, {"temperature": 22.5}, False),
])
def test_numbers_are_compared_as_numbers(name, gold, said, passes):
    base = _cruise(65, 100)
    task = Task("t", base.domains, base.category, base.initial_config,
                (Turn("Go.", (ToolCall(name, gold),), base.turns[0].tools),), "t")
    edit = lambda i, c: [ToolCall(name, said)]  # noqa: E731
    assert play(task, edit)[0][0].passed is passes


def test_official_scoring_compares_texts_and_skips_empty_turns():
    base = _cruise(65, 100)
    turn = Turn("Warm.", (ToolCall("adjustClimateControl", {"temperature": 22}),),
                base.turns[0].tools)
    task = Task("t", base.domains, base.category, base.initial_config, (turn,), "t")
    float_call = [ToolCall("adjustClimateControl", {"temperature": 22.0})]
    assert play(task, lambda i, c: float_call)[0][0].passed
    assert not play(task, lambda i, c: float_call, scoring=Scoring.OFFICIAL)[0][0].passed
    silent = BY_UID["multi_turn_miss_param_1"]
    outcomes, _ = play(silent, said="", scoring=Scoring.OFFICIAL)
    assert score(outcomes) == 1


@settings(max_examples=80, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
                    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=2), x,
                                                                        max_size=3)))
def test_same_value_and_answer_key_agree_on_floats_for_ints(value):
    def floats(v):
        if isinstance(v, bool) or v is None or isinstance(v, str):
            return v
        if isinstance(v, int):
            return float(v)
        return [floats(x) for x in v] if isinstance(v, list) else {
            k: floats(x) for k, x in v.items()}
    assert same_value(value, floats(value))
    assert answer_key(json.dumps(value)) == answer_key(json.dumps(floats(value)))
    assert not same_value([value, True], [value, 1])
    assert answer_key(json.dumps([value, True])) != answer_key(json.dumps([value, 1]))


# ------------------------------------------------------------------------- isolation


def _records():
    module = bfcl_data.tool_module("TravelAPI")
    weather = bfcl_data.tool_module("VehicleControlAPI").LONG_WEATHER_EXTENSION
    return json.dumps([module.CREDIT_CARD_EXTENSION, module.BOOKING_RECORD_EXTENSION, weather])


def test_two_hundred_rollouts_of_one_task_are_independent():
    task = BY_UID["multi_turn_long_context_170"]
    before = _records()
    once = play(task)[1]
    assert all(play(task)[1] == once for _ in range(199))
    assert _records() == before


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


def test_a_tree_without_end_is_unequal_not_fatal():
    config = {"GorillaFileSystem": {"root": {"r": {"type": "directory", "contents": {
        "d": {"type": "directory", "contents": {}}}}}}}
    a, b = (Sandbox(["GorillaFileSystem"], config, False) for _ in range(2))
    for box in (a, b):
        directory = box.instances["GorillaFileSystem"].root.contents["d"]
        directory.contents["d"] = directory
    for scoring in Scoring:
        assert not bfcl_env.same_state(a, b, scoring)
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
