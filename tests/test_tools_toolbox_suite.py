"""The suite's part in synthesis: plans of a seed's structure, texts, repairs, categories."""

import copy
import dataclasses
import json
import random

import pytest

from rods_jax.tools.env import Name
from rods_jax.tools.toolbox import ToolboxSuite, split
from rods_jax.tools.toolbox.entities import is_entity
from rods_jax.tools.toolbox.generator import is_sound, task_of_plan
from rods_jax.tools.toolbox.graph import TOOLS
from rods_jax.tools.toolbox.lexicon import lexicon
from rods_jax.tools.toolbox.structure import call_shapes, gold_results, pointed, words_of
from rods_jax.types import (CATEGORIES, Category, Plan, PlannedCall, Ref, Task, ToolCall, Turn)

SUITE = ToolboxSuite()


def assemble(plan, rng, feedback=""):
    """Runs a plan through the public contract alone: an environment, then the texts."""
    tools = tuple(s.name for s in SUITE.tools(plan.domains))
    shell = Task("plan", plan.domains, Category.BASE, plan.initial_config,
                 (Turn("", (), tools),), "s")
    env = SUITE.make_env(shell)
    env.begin_turn()
    results, turns = [], []
    for planned in plan.turns:
        calls = []
        for call in planned:
            arguments = {}
            for key, value in call.arguments.items():
                if isinstance(value, Ref):
                    found = results[value.call]
                    for step in value.path:
                        found = found[step]
                    value = found
                arguments[key] = value
            calls.append(ToolCall(call.name, arguments))
            (result,) = env.execute(calls[-1:])
            assert result.ok, result.text
            results.append(json.loads(result.text))
        turns.append(tuple(calls))
    texts = SUITE.write(plan, results, rng, feedback)
    return dataclasses.replace(shell, turns=tuple(
        Turn(text, gold, tools) for text, gold in zip(texts, turns, strict=True)))


def flows(task):
    return [(s.turn, s.said, s.again, s.feeds) for s in call_shapes(task)]


def test_a_variant_keeps_the_flows_and_changes_tools_and_world():
    rng = random.Random(1)
    same_tools = calls = 0
    for seed in split("train")[:160]:
        plan = SUITE.plan(seed, rng)
        assert plan.parent == seed.uid and set(plan.initial_config) == set(plan.domains)
        base = assemble(plan, rng)
        assert is_sound(base) and flows(base) == flows(seed)
        assert len(base.domains) == len(seed.domains)
        said = {w for t in seed.turns for w in words_of(t.user) if "-" in w or "@" in w}
        assert not said & {w for t in base.turns for w in words_of(t.user)}
        old = [s.tool for s in call_shapes(seed)]
        new = [s.tool for s in call_shapes(base)]
        same_tools += sum(a == b for a, b in zip(old, new))
        calls += len(old)
        variant = SUITE.augment(base, seed.category.value, rng)
        assert variant is not None and variant.category is seed.category and is_sound(variant)
        if seed.category in (Category.MISS_FUNC, Category.MISS_PARAM):
            assert len(variant.turns) == len(seed.turns)
    assert same_tools < 0.6 * calls


def test_a_variant_points_at_as_many_earlier_values_as_its_seed():
    rng, pointing = random.Random(2), 0
    for seed in split("train")[:80]:
        base = assemble(SUITE.plan(seed, rng), rng)
        assert pointed(base) == pointed(seed), seed.uid
        pointing += sum(pointed(seed))
    assert pointing >= 10
    tools = tuple(TOOLS)
    pay = ToolCall("send_money", {"user": "@ada", "amount": 5})
    again = ToolCall("request_money", {"user": "@ada", "amount": 7})
    turns = (Turn("pay 5 to @ada", (pay,), tools), Turn("charge that person", (), tools),
             Turn("make it 7", (again,), tools), Turn("charge @ada 7", (again,), tools))
    assert pointed(Task("x", ("payments",), Category.BASE, {}, turns, "x")) == (0, 1, 0)


def test_variants_use_no_word_that_a_reader_of_the_splits_does_not_know():
    rng, words = random.Random(3), set(lexicon())
    for seed in split("train")[:60]:
        texts = SUITE.write(SUITE.plan(seed, rng), (), rng)
        for word in (w for text in texts for w in words_of(text)):
            assert word in words or is_entity(word), texts
            assert not is_entity(word) or Name(word) in SUITE.names_in(" ".join(texts))


def test_plans_are_a_function_of_the_generator_and_are_json():
    for seed in split("train")[:20]:
        one, two = (SUITE.plan(seed, random.Random(4)) for _ in range(2))
        assert one == two
        json.dumps([one.initial_config, one.narrative])
        texts = [SUITE.write(one, [], random.Random(s)) for s in range(4)]
        assert len(set(texts)) > 1 and SUITE.write(one, [], random.Random(0)) == texts[0]


def test_a_rewrite_says_every_call_in_a_clause_of_its_own():
    rng = random.Random(2)
    longer = 0
    for seed in split("train")[:60]:
        plan = SUITE.plan(seed, rng)
        plain = assemble(plan, random.Random(5), feedback="say the value")
        assert is_sound(plain) and flows(plain) == flows(seed)
        free = assemble(plan, random.Random(5))
        longer += sum(len(t.user.split()) for t in plain.turns) >= sum(
            len(t.user.split()) for t in free.turns)
    assert longer > 30


def test_tasks_of_another_suite_are_refused():
    foreign = Task("x", ("files",), Category.BASE, split("train")[0].initial_config,
                   (Turn("fly", (ToolCall("fly", {}),), ("fly",)),), "s")
    with pytest.raises(ValueError, match="not a tool of the toolbox"):
        SUITE.plan(dataclasses.replace(foreign, initial_config={}), random.Random(0))


def test_augment_covers_all_categories_and_only_from_base():
    rng = random.Random(3)
    done = dict.fromkeys(CATEGORIES, 0)
    for seed in split("train")[:80]:
        base = task_of_plan(SUITE.plan(seed, rng), rng)
        for category in CATEGORIES:
            variant = SUITE.augment(base, category.value, rng)
            if variant is None:
                continue
            done[category] += 1
            assert is_sound(variant) and variant.category is category
            gold = [c for t in base.turns for c in t.gold]
            assert [c for t in variant.turns for c in t.gold] == gold
    # A single call often has nothing to list, so no long_context form.
    assert min(done.values()) > 50 and done[Category.BASE] == 80
    with pytest.raises(ValueError, match="needs a base task"):
        SUITE.augment(split("train")[1], "long_context", rng)
    with pytest.raises(ValueError):
        SUITE.augment(base, "longer", rng)


def test_a_cluttered_world_hides_nothing_and_changes_no_answer():
    rng = random.Random(6)
    for seed in split("train")[3:100:4]:
        assert seed.category is Category.LONG_CONTEXT
        base = task_of_plan(SUITE.plan(seed, rng), rng)
        cluttered = SUITE.augment(base, "long_context", rng)
        for (_, plain, _), (_, long, ok) in zip(gold_results(base), gold_results(cluttered)):
            assert ok and {k: v for k, v in long.items() if k != "others"} == plain
        extra = {x for _, r, _ in gold_results(cluttered) for x in r.get("others", ())}
        assert 6 <= len(extra) <= 12


def test_gold_replies_are_one_word():
    expected = {Category.MISS_FUNC: "unavailable", Category.MISS_PARAM: "clarify"}
    for task in split("train")[:100]:
        replies = {SUITE.gold_reply(task, i) for i, t in enumerate(task.turns) if not t.gold}
        assert replies == ({expected[task.category]} if task.category in expected else set())
        assert all(SUITE.gold_reply(task, i) == "done" for i, t in enumerate(task.turns) if t.gold)


BREAKS = {
    "files": lambda c: c["folders"].clear() or c.update(open=""),
    "messaging": lambda c: (c["messages"].clear(), c["users"].clear(), c["contacts"].clear()),
    "bookings": lambda c: (c["trips"].clear(), c["holds"].clear(), c["bookings"].clear()),
    "payments": lambda c: (c["bills"].clear(), c["payments"].clear(),
                           c.update(balance=0, unlocked=False)),
}


def first_failure(plan):
    """(flat index, error text) of the first call that fails, or None."""
    try:
        assemble(plan, random.Random(0))
    except (AssertionError, KeyError) as error:
        done = str(error)
    else:
        return None
    shell = [c for turn in plan.turns for c in turn]
    for count in range(1, len(shell) + 1):
        cut = dataclasses.replace(plan, turns=(tuple(shell[:count]),), narrative={
            "calls": plan.narrative["calls"][:count]})
        try:
            assemble(cut, random.Random(0))
        except (AssertionError, KeyError):
            return count - 1, done
    return None


def test_repair_mends_a_world_that_lacks_things():
    rng = random.Random(8)
    broken = mended = 0
    for seed in split("train")[:120]:
        plan = SUITE.plan(seed, rng)
        config = copy.deepcopy(plan.initial_config)
        for domain in config:
            BREAKS[domain](config[domain])
        plan = dataclasses.replace(plan, initial_config=config)
        failure = first_failure(plan)
        if failure is None:
            continue
        broken += 1
        for _ in range(10):
            fixed = SUITE.repair(plan, *failure, rng)
            if fixed is None:
                break
            following = first_failure(fixed)
            assert following is None or following[0] > failure[0]
            plan, failure = fixed, following
            if failure is None:
                mended += 1
                assert is_sound(assemble(plan, rng))
                break
    assert broken > 60 and mended > 0.5 * broken


def test_repair_gives_up_where_no_world_helps():
    rng = random.Random(9)
    seed = next(t for t in split("train") if t.domains == ("files",))
    plan = SUITE.plan(seed, rng)
    assert SUITE.repair(plan, 0, '{"error": "missing argument"}', rng) is None
    assert SUITE.repair(plan, 0, '{"error": "limit reached"}', rng) is None
    elsewhere = Plan(("files",), plan.initial_config,
                     ((PlannedCall("check_balance", {}),),), None, {"calls": []})
    assert SUITE.repair(elsewhere, 0, '{"error": "unknown tool"}', rng) is None
    assert SUITE.repair(elsewhere, 0, '{"error": "wallet locked"}', rng) is None
    twice = Plan(("files",), plan.initial_config, ((
        PlannedCall("open_folder", {"folder": "/zz"}),
        PlannedCall("read_file", {"file": Ref(0, ("file",))})),), None, {"calls": []})
    assert SUITE.repair(twice, 1, '{"error": "no such file"}', rng) is None
    assert set(TOOLS) >= {"open_folder", "read_file"}
