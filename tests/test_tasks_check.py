import dataclasses

import pytest

from rods_jax.tasks.check import Verdict, faults, verdict
from rods_jax.types import Category, ToolCall, Turn
from test_synthesis_suite import SPECS, TOOLS, NotesSuite, notes_task

SUITE = NotesSuite()


def with_gold(*gold, tools=TOOLS):
    return dataclasses.replace(notes_task(0), turns=(Turn("do it", gold, tools),))


@pytest.mark.parametrize("category", [c.value for c in Category])
def test_sound_tasks_have_no_faults(category):
    task = notes_task(2, category)
    assert faults([task], SPECS) == ()
    assert verdict(task, SUITE) == Verdict("seed2", 1.0, "", (), (), ())


@pytest.mark.parametrize("task, where, what", [
    (with_gold(ToolCall("reed", {"id": 1})), "turns[0].gold[0]",
     "'reed' is not a declared tool; did you mean 'read'?"),
    (with_gold(ToolCall("read", {"id": "1"})), "turns[0].gold[0]",
     "read: argument 'id' must be of type integer; correct the call"),
    (with_gold(ToolCall("read", {"id": 1}), ToolCall("read", {"no": 1})), "turns[0].gold[1]",
     "read: unknown argument 'no', known: id"),
    (with_gold(ToolCall("read", {"id": 1}), tools=("sell",)), "turns[0].gold[0]",
     "'read' is not visible; add it to turns[0].tools"),
    (with_gold(ToolCall("read", {"id": 1}), tools=("read", "write")), "turns[0].tools",
     "'write' is not a declared tool; declare it or correct the name"),
    (with_gold(ToolCall("read", {"id": 1}), tools=("read", "read")), "turns[0].tools",
     "'read' is listed 2 times"),
    (with_gold(), "turns", "no turn has a gold call"),
    (notes_task(0, domains=("note",)), "domains", "of domain 'note'; did you mean 'notes'?"),
    (notes_task(0, category="base", domains=("notes", "disk")), "domains", "of domain 'disk'"),
    (dataclasses.replace(notes_task(0), category=Category.MISS_PARAM), "category",
     "miss_param needs a turn with empty gold"),
    (notes_task(0, turns=(notes_task(0).turns[0], dataclasses.replace(
        notes_task(0).turns[1], tools=TOOLS[1:]))), "turns[1].tools",
     "'add_note' was visible in the turn before"),
])
def test_every_fault_is_named(task, where, what):
    found = faults([task], SPECS)
    assert (where, True) in [(f.where, what in f.what) for f in found], found
    assert all("\n" not in str(f) and str(f).startswith("task seed0, ") for f in found)


def test_a_tool_of_another_domain_and_a_uid_twice():
    elsewhere = dataclasses.replace(SPECS[1], domain="disk")
    (fault,) = faults([with_gold(ToolCall("read", {"id": 1}), tools=("read",))],
                      (*SPECS[:1], elsewhere))[:1]
    assert fault.what == "'read' is a tool of domain 'disk'; add it to domains"
    assert [str(f) for f in faults([notes_task(0), notes_task(0)], SPECS)] == [
        "task seed0, uid: another task has it; give every task its own"]


def test_verdicts_say_why():
    random = verdict(notes_task(0), NotesSuite({"dice"}))
    assert random.progress < 1 and not random.sound
    assert "end in different states" in random.reason and "no random numbers" in random.reason
    wrong = verdict(with_gold(ToolCall("read", {"id": 7})), SUITE)
    assert wrong.errors == ("read: no such note",) and wrong.sound
    missing = verdict(notes_task(0, initial_config={}), _Refusing())
    assert missing.progress == 0.0 and missing.reason == "no environment: give notes"


class _Refusing(NotesSuite):
    def make_env(self, task):
        raise ValueError("give notes")


def test_texts_that_nobody_said_are_suspect_and_codes_are_not():
    gold = ToolCall("add_note", {"title": "kite 9 shop", "body": "it opens at noon on Mondays"})
    found = verdict(with_gold(gold, ToolCall("read", {"id": 100})), SUITE)
    assert found.unsourced == ("add_note.body", "add_note.title")
    assert found.unsaid == ("add_note.body: it opens at noon on Mondays",)


def test_a_document_that_the_tools_do_not_go_by_is_told_apart():
    task = with_gold(ToolCall("read", {"id": "100"}))
    (fault,) = faults([task], SPECS)
    ran = Verdict("seed0", 1.0, "", (), (), ())
    assert fault.accepted_by_tools(ran)
    assert not fault.accepted_by_tools(dataclasses.replace(ran, errors=("read: no such note",)))
    assert not fault.accepted_by_tools(dataclasses.replace(ran, progress=0.5))
    assert not faults([with_gold()], SPECS)[0].accepted_by_tools(ran)
    unknown = faults([with_gold(ToolCall("reed", {"id": 1}))], SPECS)[0]
    assert unknown.where == "turns[0].gold[0]" and not unknown.accepted_by_tools(ran)


def test_tasks_of_the_suites_hold():
    pytest.importorskip("bfcl_eval")
    from rods_jax.tools.bfcl import SUSPECT, BFCLSuite
    from rods_jax.tools.toolbox import ToolboxSuite
    toolbox = ToolboxSuite()
    train = toolbox.split("train")
    assert faults(train, toolbox.tools(toolbox.domains)) == ()
    assert {verdict(t, toolbox) for t in train} == {
        Verdict(t.uid, 1.0, "", (), (), ()) for t in train}
    bfcl = BFCLSuite()
    found = {t.uid: verdict(t, bfcl) for t in bfcl.tasks}
    assert all(v.sound and not v.errors for v in found.values())
    # The documents want an integer where the gold of one scenario gives a text that is accepted.
    wrong = faults(bfcl.tasks, bfcl.tools(bfcl.domains))
    assert {f.uid.rsplit("_", 1)[1] for f in wrong} == {"173"} and len(wrong) == 4
    assert all(f.accepted_by_tools(found[f.uid]) for f in wrong)
    # Text that no tool produced: a sorted post that sort() does not give, invented reports.
    for index in (4, 187):
        assert found[f"multi_turn_base_{index}"].unsaid
        assert f"multi_turn_base_{index}" in SUSPECT
    assert sum(bool(v.unsaid) for v in found.values()) < 100
