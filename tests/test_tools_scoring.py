"""Scores of a turn, argument checks, and the environment that all suites share."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rods_jax.tools import schema
from rods_jax.tools.scoring import (EmptyTurn, Mode, Scoring, answer_key, empty_turn_passes,
                                    holds_results, same_value)
from rods_jax.tools.suites import SplitRule, SuiteName, SuiteSpec, make_suite
from rods_jax.tools.twin import GOLD_RUNS, GoldRuns, TwinEnv
from rods_jax.types import Category, Task, ToolCall, ToolResult, Turn

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-3, 3) | st.text(max_size=3),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=2), x, max_size=3))


def reference_equal(a, b):
    """Numbers by value, true apart from 1, written without the code's own helpers."""
    if isinstance(a, bool) != isinstance(b, bool):
        return False
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and not [1 for x, y in zip(a, b) if not reference_equal(x, y)]
    if isinstance(a, dict) and isinstance(b, dict):
        return set(a) == set(b) and not [k for k in a if not reference_equal(a[k], b[k])]
    numbers = isinstance(a, (int, float)) and isinstance(b, (int, float))
    return a == b if numbers or type(a) is type(b) else False


@settings(max_examples=300, deadline=None)
@given(JSON, JSON)
def test_values_and_texts_compare_as_the_reference_does(a, b):
    assert not same_value({True: 1}, {1: 1}) and same_value({1: 1}, {1.0: 1})
    assert not same_value({(1,), frozenset([2])}, {(True,), frozenset([2])})
    assert not same_value({(1, (True,)): 0}, {(1, (1,)): 0})
    assert not same_value({True}, {1}) and same_value({True, 2}, {2.0, True})
    for x, y in ((a, b), (a, json.loads(json.dumps(a)))):
        assert same_value(x, y) == reference_equal(x, y)
        assert (answer_key(json.dumps(x)) == answer_key(json.dumps(y))) == reference_equal(x, y)


def floats(v):
    if isinstance(v, bool) or v is None or isinstance(v, str):
        return v
    if isinstance(v, (int, float)):
        return float(v)
    return [floats(x) for x in v] if isinstance(v, list) else {k: floats(x) for k, x in v.items()}


@settings(max_examples=100, deadline=None)
@given(JSON)
def test_integral_floats_equal_ints_and_true_is_not_one(value):
    assert same_value(value, floats(value))
    assert answer_key(json.dumps(value)) == answer_key(json.dumps(floats(value)))
    assert not same_value([value, True], [value, 1])
    assert answer_key(json.dumps([value, True])) != answer_key(json.dumps([value, 1]))


TEXTS = st.lists(st.sampled_from(["1", "1.0", "true", '{"a": 2}', '{"a": 2.0}', "x"]), max_size=5)


@settings(max_examples=300, deadline=None)
@given(TEXTS, TEXTS)
def test_results_must_be_held_as_often_as_they_come(seen, gold):
    def removable(key):
        left = [key(t) for t in seen]
        for text in map(key, gold):
            if text not in left:
                return False
            left.remove(text)
        return True
    counted = collections.Counter(seen)
    assert holds_results(counted, gold, Mode.OFFICIAL) == removable(str)
    value = {"1": 1, "1.0": 1, "true": "t", "x": "x"}
    assert holds_results(counted, gold, Mode.TRAIN) == removable(lambda t: value.get(t, "a"))
    assert counted == collections.Counter(seen)


@pytest.mark.parametrize("rule, passes", [
    (EmptyTurn.ANSWER, {"silent": 0, "said": 1, "called": 0, "changed": 0}),
    (EmptyTurn.SILENCE, {"silent": 1, "said": 1, "called": 0, "changed": 0}),
    (EmptyTurn.STATE, {"silent": 1, "said": 1, "called": 1, "changed": 0}),
    (EmptyTurn.ANY, {"silent": 1, "said": 1, "called": 1, "changed": 1}),
])
def test_what_passes_a_turn_without_gold_is_a_choice(rule, passes):
    cases = {"silent": (0, " ", True), "said": (0, "No.", True), "called": (1, "No.", True),
             "changed": (1, "No.", False)}
    found = {name: int(empty_turn_passes(Scoring(empty_turn=rule), n, said, lambda: same))
             for name, (n, said, same) in cases.items()}
    assert found == passes
    assert all(empty_turn_passes(Scoring(Mode.OFFICIAL), n, said, lambda: same)
               for n, said, same in cases.values())
    assert Scoring() == Scoring(Mode.TRAIN, EmptyTurn.ANSWER, needs_call=True)


def test_official_scoring_has_no_choices():
    with pytest.raises(ValueError, match="leave empty_turn out"):
        Scoring(Mode.OFFICIAL, EmptyTurn.ANY)
    with pytest.raises(ValueError, match="leave needs_call out"):
        Scoring(Mode.OFFICIAL, needs_call=False)


# ------------------------------------------------------------------------- the environment


class Counter:
    """A world with one number: add(n) changes it, get() shows it."""

    def __init__(self):
        self.total = 0

    def call(self, call, visible):
        if call.name not in visible:
            return ToolResult("no such tool", False)
        self.total += call.arguments.get("n", 0)
        return ToolResult(str(self.total), True)

    def same(self, other, mode):
        return same_value(self.total, other.total)

    def snapshot(self):
        return copy.copy(self)


def add(n):
    return ToolCall("add", {"n": n})


GET = ToolCall("get", {})
TASK = Task("t", ("c",), Category.MISS_FUNC, {}, (
    Turn("Add 2.", (add(2),), ("add",)), Turn("Show it.", (), ("add",)),
    Turn("", (GET,), ("add", "get"))), "s")


GOLD = GoldRuns(lambda task: Counter())


def score(*turns, scoring=Scoring(), said="Done."):
    env, found = TwinEnv(TASK, Counter(), GOLD, scoring), []
    for calls in turns:
        env.begin_turn()
        env.execute(calls)
        found.append(env.end_turn(said))
    return [o.passed for o in found]


def test_turns_pass_by_state_and_results():
    assert score([add(2)], [], [GET]) == [True, True, True]
    assert score([add(1), add(1)], [], [GET]) == [True, True, True]  # another way, same state
    assert score([add(3)], [], [GET]) == [False, True, False]
    assert score([], [], [GET]) == [False, True, False]  # the twin went on without the agent
    assert score([add(2.0)], [], [GET]) == [True, True, True]  # numbers as numbers
    assert score([add(2.0)], [], [GET], scoring=Scoring(Mode.OFFICIAL)) == [False, True, False]


def test_withheld_tools_are_refused_but_by_the_official_rules():
    early = [[add(2)], [GET], [add(0)]]
    assert score(*early) == [True, False, True]  # add(0) shows 2 as well
    env = TwinEnv(TASK, Counter(), GOLD, Scoring())
    assert env.begin_turn().tools == ("add",) and not env.execute([GET])[0].ok
    official = TwinEnv(TASK, Counter(), GOLD, Scoring(Mode.OFFICIAL))
    assert official.begin_turn().tools == ("add",) and official.execute([GET])[0].ok


def test_a_turn_with_gold_needs_a_call_unless_said_otherwise():
    early = [[add(2), add(0)], [], []]  # the last turn's result was seen twice before
    assert score(*early) == [True, True, False]
    assert score(*early, scoring=Scoring(needs_call=False)) == [True, True, True]


def test_a_group_shares_one_gold_run_and_tasks_of_one_uid_do_not():
    made = []
    gold = GoldRuns(lambda task: made.append(task.uid) or Counter())
    for n in (2, 2, 5):
        env = TwinEnv(TASK, Counter(), gold, Scoring())
        env.begin_turn()
        env.execute([add(n)])
        assert env.end_turn("").passed is (n == 2)
    assert made == ["t", "t"]  # the first has its own, the others share one
    other = dataclasses.replace(TASK, turns=(Turn("Add 5.", (add(5),), ("add",)),))
    env = TwinEnv(other, Counter(), gold, Scoring())
    env.begin_turn()
    env.execute([add(5)])
    assert env.end_turn("").passed and made == ["t", "t", "t"]
    made.clear()
    tasks = [dataclasses.replace(TASK) for _ in range(GOLD_RUNS)]
    for task in (*tasks, *tasks):
        gold(task)
    assert len(gold._runs) == GOLD_RUNS and len(made) == 2 * GOLD_RUNS
    gold(tasks[-1])
    assert len(made) == 2 * GOLD_RUNS
    gold(TASK)  # was dropped
    assert len(made) == 2 * GOLD_RUNS + 1
    again = pickle.loads(pickle.dumps(GoldRuns(_fresh)))
    for _ in range(3):
        turns = [(turn.texts, turn.world.total) for turn in again(THREE)]
        assert [texts for texts, _ in turns] == [("2",), (), ("5", "5")]
    assert [total for _, total in turns] == [2, 2, 5]  # kept as each turn left them


THREE = dataclasses.replace(TASK, turns=(
    *TASK.turns[:2], Turn("", (add(3), GET), ("add", "get"))))


def _fresh(task):
    return Counter()


def test_new_tools_and_misuse():
    env = TwinEnv(TASK, Counter(), GOLD, Scoring())
    new = []
    for _ in TASK.turns:
        new.append(env.begin_turn().new_tools)
        env.end_turn("")
    assert new == [(), (), ("get",)] and env.begin_turn() is None
    with pytest.raises(ValueError, match="call begin_turn first"):
        env.execute([])
    with pytest.raises(ValueError, match="call begin_turn first"):
        env.end_turn("")
    env = TwinEnv(TASK, Counter(), GOLD, Scoring())
    env.begin_turn()
    with pytest.raises(ValueError, match="call end_turn first"):
        env.begin_turn()


# ------------------------------------------------------------------------- schema, suites


PARAMETERS = {"type": "object", "required": ["s"], "properties": {
    "s": {"type": "string"}, "n": {"type": "integer"}, "x": {"type": "number"},
    "b": {"type": "boolean", "default": None}, "e": {"enum": ["red", 2]},
    "l": {"type": "array", "items": {"type": "integer"}},
    "o": {"type": "object", "properties": {"k": {"type": "string"}}}}}


@pytest.mark.parametrize("arguments, said", [
    ({"s": "a"}, None), ({"s": "a", "n": 2.0, "x": 1, "b": None, "e": 2, "l": [1], "o": {}}, None),
    ([], "not an object"), ({}, "missing argument 's'"), ({"s": "a", "z": 1}, "unknown argument 'z'"),
    ({"s": 1}, "'s' must be of type string"), ({"s": "a", "n": 1.5}, "type integer"),
    ({"s": "a", "n": True}, "type integer"), ({"s": "a", "x": "1"}, "type number"),
    ({"s": "a", "x": None}, "type number"), ({"s": "a", "b": 1}, "type boolean"),
    ({"s": "a", "e": "blue"}, "one of red, 2"), ({"s": "a", "l": [1, "2"]}, "has an item that"),
    ({"s": "a", "l": "12"}, "type array"), ({"s": "a", "o": {"k": 1}}, "a field 'k' that"),
])
def test_complaints_name_the_argument(arguments, said):
    found = schema.complaint(arguments, PARAMETERS)
    assert found is None if said is None else said in found


def test_a_spec_is_plain_data_and_refuses_what_does_not_fit():
    for mode, rule in itertools.product([None, Scoring(), Scoring(Mode.OFFICIAL)], SplitRule):
        spec = SuiteSpec(SuiteName.BFCL, "", ("MathAPI",), mode, rule, 3)
        assert SuiteSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    for wrong, said in ((dict(domains=("MathAPI",)), "suite bfcl only"),
                        (dict(split=SplitRule.PAPER), "suite bfcl only"),
                        (dict(factory="a:b"), "give both or neither"),
                        (dict(name=SuiteName.CUSTOM), "give both or neither")):
        with pytest.raises(ValueError, match=said):
            SuiteSpec(**wrong)
    for factory, said in (("nowhere:f", "'nowhere:f' cannot be imported"),
                          ("nowhere", "is not 'module:function'"),
                          ("os:nothing", "'os:nothing' cannot be imported"),
                          ("os:abort_", "cannot be imported"), ("sys:exit", "raised SystemExit"),
                          ("os:getcwd", "returned a str: return a suite"),
                          ("json:loads", "raised TypeError"),
                          ("types:SimpleNamespace", "returned a SimpleNamespace")):
        with pytest.raises(ValueError, match=said):
            make_suite(SuiteSpec(SuiteName.CUSTOM, factory))
    with pytest.raises(ValueError, match="split_seed is of suite bfcl only"):
        SuiteSpec(split_seed=3)
    with pytest.raises(ValueError, match="no official checker"):
        make_suite(SuiteSpec(scoring=Scoring(Mode.OFFICIAL)))
