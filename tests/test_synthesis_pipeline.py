import dataclasses
import random

import pytest

from rods_jax.synthesis.critique import CritiqueReason, critique
from rods_jax.synthesis.execute import (Executed, ExecuteFailure, ExecuteReason, execute, resolve,
                                        run_plan)
from rods_jax.synthesis.novelty import Known
from rods_jax.synthesis.outcome import Candidate, Funnel, Stage, Usage, outcome_from_json
from rods_jax.synthesis.pipeline import (SynthesisConfig, candidate_rng, make_maker,
                                         seed_profile_of)
from rods_jax.tasks.leakage import HeldOutGuard
from rods_jax.tasks.profile import base_form, distance, profile
from rods_jax.tasks.replay import replay
from rods_jax.types import Category, Plan, PlannedCall, Ref, Source, ToolCall
from test_synthesis_suite import NotesSuite, notes_task

CONFIG = SynthesisConfig()


def make(faults=(), category="base", config=CONFIG, guard=None, known=(), seed=0):
    maker = make_maker(NotesSuite(faults), config, guard or HeldOutGuard(), 1)
    return maker.attempt(notes_task(seed, category), 4, 2, Known(known))


# ---------------------------------------------------------------- stage II


def test_references_are_resolved_deeply():
    results = [{"a": [{"b": 5}]}, "x"]
    assert resolve({"k": [Ref(0, ("a", 0, "b")), {"z": Ref(1, ())}], "n": 1}, results) == {
        "k": [5, {"z": "x"}], "n": 1}
    for ref in (Ref(2, ()), Ref(-1, ()), Ref(0, ("b",)), Ref(0, ("a", 3)), Ref(1, ("q",))):
        with pytest.raises(LookupError, match="reference to call|returned nothing"):
            resolve(ref, results)


def test_execution_runs_the_real_environment_on_one_state():
    suite, seed = NotesSuite(), notes_task()
    plan = suite.plan(seed, random.Random(0))
    run = run_plan(plan, suite)
    number = plan.initial_config["next"]
    assert run.calls[1][0] == ToolCall("read", {"id": number})
    assert run.results[0] == {"id": number} and run.result_objects() == run.results
    assert plan.initial_config["notes"] == {}  # the plan's state is not touched


@pytest.mark.parametrize("fault, reason, call", [
    ("bad_path", ExecuteReason.BAD_REFERENCE, 1), ("no_room", ExecuteReason.CALL_FAILED, 0),
    ("empty", ExecuteReason.NO_CALLS, -1)])
def test_execution_failures_are_typed_and_tries_bounded(fault, reason, call):
    suite, seed, rng, plans = NotesSuite([fault]), notes_task(), random.Random(0), []

    def replan():
        plans.append(suite.plan(seed, rng))
        return plans[-1]

    failure = execute(replan(), suite, rng, replan, k_max=3)
    assert isinstance(failure, ExecuteFailure)
    assert (failure.reason, failure.call, failure.tries) == (reason, call, 3)
    assert len(plans) == 3


def test_repair_is_tried_before_a_new_plan():
    suite, seed = NotesSuite(["no_room", "repairs"]), notes_task()
    rng = random.Random(0)
    run = execute(suite.plan(seed, rng), suite, rng, lambda: pytest.fail("planned again"))
    assert isinstance(run, Executed)
    assert (run.tries, run.repairs, run.plan.initial_config["room"]) == (2, 1, 9)


def test_results_that_are_no_objects_are_wrapped_for_the_writer():
    calls = (PlannedCall("add_note", {"title": "a", "body": "b"}),
             PlannedCall("sell", {"id": Ref(0, ("id",)), "price": 2.5}))
    run = run_plan(Plan(("notes",), {"notes": {}, "next": 11}, (calls,), None, {}), NotesSuite())
    assert run.result_objects() == ({"id": 11}, {"result": "sold"})


# ---------------------------------------------------------------- stage IV


@pytest.mark.parametrize("category", [c.value for c in Category])
def test_good_tasks_pass_and_carry_their_profile(category):
    task = notes_task(0, category)
    verdict = critique(task, NotesSuite())
    assert verdict.accepted and verdict.profile == profile(task, NotesSuite())


def _with_turn(task, t, **changes):
    turns = list(task.turns)
    turns[t] = dataclasses.replace(turns[t], **changes)
    return dataclasses.replace(task, turns=tuple(turns))


@pytest.mark.parametrize("change, reason, curable", [
    (dict(user="Write a note about it."), CritiqueReason.NO_SOURCE, True),
    (dict(user="Write 'kite 0 shop', open at noon, via add_note."), CritiqueReason.CODE_IN_TEXT,
     True),
    (dict(user="sell(3) and write 'kite 0 shop', open at noon"), CritiqueReason.CODE_IN_TEXT, True),
    (dict(tools=("read",)), CritiqueReason.UNKNOWN_TOOL, False),
    (dict(gold=(ToolCall("add_note", {"title": "kite 0 shop"}),)), CritiqueReason.GOLD_FAILS,
     False),
])
def test_bad_first_turns(change, reason, curable):
    suite = NotesSuite()
    task = _with_turn(notes_task(), 0, **change)
    if reason is CritiqueReason.GOLD_FAILS:  # an argument that the tool cannot do without
        task = _with_turn(notes_task(), 1, gold=(ToolCall("read", {"id": 9}),))
    verdict = critique(task, suite)
    assert verdict.remarks[0].reason is reason and verdict.curable is curable
    assert verdict.feedback and "\n" not in verdict.feedback


def test_what_the_user_dictates_may_look_like_code():
    body = "first sell(3) then add_note (x)"
    task = _with_turn(notes_task(), 0, user=f"Write 'kite 0 shop' that says {body}",
                      gold=(ToolCall("add_note", {"title": "kite 0 shop", "body": body}),))
    assert critique(task, NotesSuite()).accepted


def test_silent_turn_is_refused():
    task = _with_turn(notes_task(), 1, user=" ",
                      gold=(ToolCall("read", {"id": 100}),))
    assert [r.reason for r in critique(task, NotesSuite()).remarks] == [CritiqueReason.EMPTY_TEXT]


def test_hidden_state_is_no_source_unless_the_seed_did_the_same():
    task = dataclasses.replace(
        _with_turn(notes_task(), 0, user="Read the old one.",
                   gold=(ToolCall("read", {"id": 55}),)),
        initial_config={"notes": {"55": {"title": "a", "body": "b", "colour": ""}}, "next": 100})
    task = dataclasses.replace(task, turns=task.turns[:1])
    assert critique(task, NotesSuite()).remarks[0].reason is CritiqueReason.NO_SOURCE
    verdict = critique(task, NotesSuite(), inherited={("read", "id"): 1})
    assert verdict.accepted and verdict.profile.unsourced == {("read", "id"): 1}
    assert not critique(task, NotesSuite(), inherited={("pin_note", "id"): 1}).accepted


def test_ground_truth_defects():
    read = ToolCall("read", {"id": 100})
    twice = _with_turn(notes_task(), 1, gold=(read, read))
    assert critique(twice, NotesSuite()).remarks[0].reason is CritiqueReason.CALL_NOT_NEEDED
    task = dataclasses.replace(notes_task(), turns=notes_task().turns[:1])
    assert critique(task, NotesSuite(["dice"])).remarks[0].reason in (
        CritiqueReason.GOLD_FAILS, CritiqueReason.NOT_REPRODUCIBLE)
    config = {"notes": {"55": {"title": "a", "body": "b", "colour": "red"}}, "next": 100}
    pin = _with_turn(task, 0, user="Pin 55", gold=(ToolCall("pin_note", {"id": 55}),))
    pin = dataclasses.replace(pin, initial_config=config)
    verdict = critique(pin, NotesSuite(["state_only"]))
    assert verdict.remarks[0].reason is CritiqueReason.ALREADY_SATISFIED
    assert not verdict.curable


# ---------------------------------------------------------------- the whole


@pytest.mark.parametrize("category", [c.value for c in Category])
def test_a_variant_keeps_the_structure_and_changes_the_story(category):
    seed, suite = notes_task(7, category), NotesSuite()
    made = make(category=category, seed=7)
    task = made.task
    assert isinstance(made, Candidate) and made.distance <= CONFIG.max_profile_distance
    assert (task.uid, task.scenario) == ("seed7~4.2", "notes-7~4.2")
    assert (task.source, task.parent, task.generation) == (Source.GENERATED, "seed7", 1)
    assert task.category is seed.category and task.content_hash != seed.content_hash
    assert replay(suite, task).progress == 1.0
    assert distance(profile(base_form(task), suite), seed_profile_of(seed, suite)) == made.distance
    assert make(category=category, seed=7) == made  # same name, same variant


@pytest.mark.parametrize("faults, category, stage, reason", [
    (["crash"], "base", Stage.CRASH, "RuntimeError"),
    (["exit"], "base", Stage.CRASH, "SystemExit"),
    (["refuse"], "base", Stage.PLAN, "no_plan"),
    (["bad_path"], "base", Stage.EXECUTE, "bad_reference"),
    (["one_text"], "base", Stage.WRITE, "wrong_number_of_turns"),
    (["mute"], "base", Stage.CRITIQUE, "argument_without_source"),
    (["code"], "base", Stage.CRITIQUE, "code_in_text"),
    (["idle"], "base", Stage.PROFILE, "profile_too_far"),
    (["no_augment"], "miss_func", Stage.AUGMENT, "not_suited"),
    (["lazy"], "miss_param", Stage.AUGMENT_CRITIQUE, "nothing_withheld"),
])
def test_rejections_are_typed(faults, category, stage, reason):
    config = SynthesisConfig(max_profile_distance=0.0)
    made = make(faults, category, config)
    assert (made.stage, made.reason) == (stage, reason)
    assert made.detail and (made.seed, made.step, made.index) == ("seed0", 4, 2)


def test_one_rewrite_with_feedback():
    made = make(["mute_once"])
    assert isinstance(made, Candidate) and made.rewrites == 1
    refused = make(["mute_once"], config=SynthesisConfig(max_rewrites=0))
    assert refused.stage is Stage.CRITIQUE


def test_held_in_and_known_tasks_are_refused():
    made = make()
    held_in = dataclasses.replace(made.task, uid="eval", scenario="elsewhere")
    refused = make(guard=HeldOutGuard([held_in]))
    assert (refused.stage, refused.reason) == (Stage.HELD_OUT, "same_content")
    assert make(guard=HeldOutGuard([notes_task(0)])).reason == "same_scenario"
    refused = make(known=[made.task])
    assert (refused.stage, refused.reason) == (Stage.NOVELTY, "same_content")


def test_generators_are_named():
    draws = {candidate_rng(s, t, u, i).random()
             for s in (0, 1) for t in (0, 1) for u in ("a", "b") for i in range(3)}
    assert len(draws) == 24
    assert candidate_rng(1, 2, "a", 3).random() == candidate_rng(1, 2, "a", 3).random()


def test_funnel_counts_merge_and_survive_json():
    outcomes = [make(), make(["crash"]), make(["mute"]), make(["mute_once"]), make(["mute"])]
    whole, parts = Funnel(), [Funnel(), Funnel()]
    for i, outcome in enumerate(outcomes):
        assert outcome_from_json(outcome.to_json()) == outcome
        whole.add(outcome)
        parts[i % 2].add(outcome)
    parts[0].merge(parts[1])
    assert parts[0].to_json() == whole.to_json() == {
        "attempts": 5, "accepted": 2, "rewritten": 1, "repaired": 0,
        "rejected": {"crash": {"RuntimeError": 1}, "critique": {"argument_without_source": 2}},
        "writers": {"template": 4}, "fallbacks": {}, "unjudged": {}, "usage": Usage().to_json()}
    assert Funnel.from_json(whole.to_json()).to_json() == whole.to_json()
    assert whole.accepted_share == 0.4 and Funnel().accepted_share == 0.0
    assert "lost: argument_without_source 2" in str(whole)


@pytest.mark.parametrize("wrong", [
    dict(k_max=0), dict(max_rewrites=-1), dict(variants_per_seed=0), dict(max_profile_distance=2)])
def test_config_is_checked(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        SynthesisConfig(**wrong)


def test_another_run_seed_tells_another_story():
    made = [make_maker(NotesSuite(), CONFIG, HeldOutGuard(), run_seed).attempt(
        notes_task(), 0, 0, Known()) for run_seed in (3, 4)]
    assert [m.task.uid for m in made] == ["seed0~0.0"] * 2
    assert made[0].task.content_hash != made[1].task.content_hash
