"""The BFCL suite: data, isolation, safety and scoring, against the package itself."""

from __future__ import annotations

import collections
import importlib
import importlib.util
import inspect
import json
import pathlib
import random
import subprocess
import sys

import pytest
from rods_jax.tasks.leakage import crossing
from rods_jax.tools import bfcl_data
from rods_jax.tools.bfcl import SUSPECT, BFCLSuite
from rods_jax.tools.bfcl_env import BFCLEnv
from rods_jax.tools.bfcl_sandbox import replay
from rods_jax.tools.scoring import Mode, Scoring
from rods_jax.tools.suites import SplitRule
from rods_jax.types import CATEGORIES, Category, Task, ToolCall, Turn

SUITE = BFCLSuite()
BY_UID = {task.uid: task for task in SUITE.tasks}
PACKAGE = pathlib.Path(importlib.util.find_spec("bfcl_eval").submodule_search_locations[0])


def play(task, edit=lambda turn, calls: calls, said=None, scoring=Scoring()):
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
    whole = BFCLSuite(split_seed=seed, keep_suspect=True)
    train, held = (whole.split(name) for name in ("train", "held_in"))
    assert len({t.uid for t in (*train, *held)}) == len(train) + len(held) == 800
    assert not {t.scenario for t in train} & {t.scenario for t in held}
    assert whole.split("train") == train and crossing(train, held) == 0
    for tasks in (train, held):
        assert [t.category for t in tasks] == list(CATEGORIES) * 100
        assert len({t.scenario for t in tasks[:100]}) == 100
    kept = [t for t in train if t.uid not in SUSPECT]
    fit = BFCLSuite(split_seed=seed).split("train")
    assert {t.uid for t in fit} == {t.uid for t in kept} and len(fit) == len(kept) < 400
    assert [t.category for t in fit[:320]] == list(CATEGORIES) * 80
    assert BFCLSuite(split_seed=seed).split("held_in") == held
    with pytest.raises(ValueError, match="test"):
        SUITE.split("test")


def test_the_papers_split_draws_each_category_on_its_own():
    suites = [BFCLSuite(split_rule=SplitRule.PAPER, split_seed=seed, keep_suspect=True)
              for seed in range(4)]
    assert all(suite.siblings_cross for suite in suites) and not SUITE.siblings_cross
    shares = []
    for suite in suites:
        train, held = suite.split("train"), suite.split("held_in")
        assert len({t.uid for t in (*train, *held)}) == len(train) + len(held) == 800
        for tasks in (train, held):
            assert collections.Counter(t.category for t in tasks) == dict.fromkeys(CATEGORIES, 100)
        shares.append(crossing(train, held))
    # A sibling trains unless all three others fell on the held-in side: 1 - 1/8.
    assert 0.83 < sum(shares) / 4 < 0.92 and len(set(shares)) > 1
    fit = BFCLSuite(split_rule=SplitRule.PAPER).split("train")
    assert not {t.uid for t in fit} & SUSPECT and len(fit) < 400


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


@pytest.mark.parametrize("scoring", [Scoring(mode) for mode in Mode])
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
    assert not play(task, lambda i, c: float_call, scoring=Scoring(Mode.OFFICIAL))[0][0].passed
    silent = BY_UID["multi_turn_miss_param_1"]
    outcomes, _ = play(silent, said="", scoring=Scoring(Mode.OFFICIAL))
    assert score(outcomes) == 1
