"""A tiny real suite that the tests of tasks/ and synthesis/ share: notes and a counter.

It can be told to misbehave (the `faults` set), since the pipeline's business is faults.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random

import pytest

from rods_jax.tools.env import UserTurn
from rods_jax.types import (Category, Plan, PlannedCall, Ref, Task, ToolCall, ToolResult,
                            ToolSpec, Turn, TurnOutcome)

TITLES = [f"{a} {b}" for a in ("garden", "garage", "roof", "office", "harbour", "library")
          for b in ("plan", "budget", "list", "report", "visit", "repair")]


def _spec(name, **properties):
    return ToolSpec(name, name, {"type": "object", "properties": {
        k: {"type": v} if isinstance(v, str) else v for k, v in properties.items()}}, "notes")


SPECS = (
    _spec("add_note", title="string", body="string"),
    _spec("read", id="integer"),
    _spec("pin_note", id="integer", colour={"type": "string", "enum": ["red", "blue"],
                                            "default": "red"}),
    _spec("sell", id="integer", price="number"),
)
TOOLS = tuple(s.name for s in SPECS)


class NotesEnv:
    def __init__(self, task, faults):
        self.task, self.faults, self.turn = task, faults, -1
        self.mine, self.gold = (copy.deepcopy(dict(task.initial_config)) for _ in range(2))
        self.seen, self.n_calls, self.n_errors = [], 0, 0

    def begin_turn(self):
        self.turn += 1
        if self.turn >= len(self.task.turns):
            return None
        self.n_calls = self.n_errors = 0
        turn = self.task.turns[self.turn]
        before = self.task.turns[self.turn - 1].tools if self.turn else turn.tools
        return UserTurn(self.turn, turn.user, turn.tools,
                        tuple(t for t in turn.tools if t not in before))

    def execute(self, calls):
        results = []
        for call in calls:
            self.n_calls += 1
            visible = call.name in self.task.turns[self.turn].tools
            result = (self._run(self.mine, call) if visible
                      else ToolResult(f"no tool {call.name}", False))
            self.n_errors += not result.ok
            self.seen.append(result.text)
            results.append(result)
        return tuple(results)

    def end_turn(self, said):
        turn = self.task.turns[self.turn]
        wanted = [self._run(self.gold, call).text for call in turn.gold]
        if not turn.gold:
            fine = self.n_calls == 0 and bool(said)
            return TurnOutcome(fine, fine, self.n_calls, self.n_errors)
        exec_ok = "state_only" in self.faults or all(text in self.seen for text in wanted)
        return TurnOutcome(self.mine == self.gold, exec_ok, self.n_calls, self.n_errors)

    def _run(self, state, call):
        a = dict(call.arguments)
        if call.name == "add_note":
            if len(state["notes"]) >= state.get("room", 99):
                return ToolResult("no room for a note", False)
            number = state["next"]
            if "dice" in self.faults:
                number += random.randrange(10 ** 6)
            state["notes"][str(number)] = {"title": a["title"], "body": a["body"], "colour": ""}
            state["next"] = number + 37
            return ToolResult(json.dumps({"id": number}), True)
        note = state["notes"].get(str(a.get("id")))
        if note is None:
            return ToolResult("no such note", False)
        if call.name == "pin_note":
            note["colour"] = a.get("colour", "red")
            return ToolResult(json.dumps({"pinned": True}), True)
        if call.name == "sell":
            note["price"] = a["price"]
            return ToolResult("sold", True)
        return ToolResult(json.dumps({"title": note["title"], "body": note["body"]}), True)


class NotesSuite:
    """Every variant: write a note, read it back in the next turn and pin it."""

    name = "notes"

    def __init__(self, faults=()):
        self.faults = frozenset(faults)

    def tools(self, domains):
        return SPECS

    def make_env(self, task):
        return NotesEnv(task, self.faults)

    def gold_reply(self, task, turn):
        return "Done." if task.turns[turn].gold else "Which one?"

    def plan(self, seed, rng):
        if "crash" in self.faults:
            raise RuntimeError("the planner broke")
        if "exit" in self.faults:
            raise SystemExit(3)
        if "refuse" in self.faults:
            raise ValueError("no variant of this seed")
        title, body = rng.sample(TITLES, 2)
        if "same" in self.faults:
            title, body = TITLES[:2]
        path = ("ident",) if "bad_path" in self.faults else ("id",)
        first = (PlannedCall("add_note", {"title": title, "body": body}),)
        second = (PlannedCall("read", {"id": Ref(0, path)}),
                  PlannedCall("pin_note", {"id": Ref(0, path), "colour": "blue"}))
        if "empty" in self.faults:
            first = second = ()
        if "idle" in self.faults:
            first = (*first, first[0])
        config = {"notes": {}, "next": rng.randrange(1000, 9000)}
        if "same" in self.faults:
            config["next"] = 1000
        if "no_room" in self.faults:
            config["room"] = 0
        return Plan(("notes",), config, (first, second), seed.uid, {"title": title, "body": body})

    def repair(self, plan, call, error, rng):
        if "room" in error and "repairs" in self.faults:
            return dataclasses.replace(plan, initial_config={**plan.initial_config, "room": 9})
        return None

    def write(self, plan, results, rng, feedback=""):
        t, b = plan.narrative["title"], plan.narrative["body"]
        if "one_text" in self.faults:
            return ("too few",)
        if "mute" in self.faults or ("mute_once" in self.faults and not feedback):
            return (f"Write a note about the {t}.", "Read it and pin it in blue.")
        if "code" in self.faults:
            return (f"Do add_note for {t} with {b}.", "Read it and pin it in blue.")
        return (f"Write a note '{t}' that says {b}.", "Now read it to me and pin it in blue.")

    def augment(self, task, category, rng):
        if "no_augment" in self.faults:
            return None
        a, b = task.turns
        text = a.user.split(" that says ")
        if category == "miss_param":
            if "lazy" in self.faults:
                turns = (Turn(a.user, (), a.tools), Turn("Go on.", a.gold, a.tools), b)
            else:
                turns = (Turn(text[0] + ".", (), a.tools),
                         Turn("It says " + text[1], a.gold, a.tools), b)
        elif category == "miss_func":
            few = tuple(t for t in a.tools if t != "add_note")
            turns = (Turn(a.user, (), few), Turn("", a.gold, a.tools), b)
        else:
            notes = {str(i): {"title": f"old {i}", "body": "", "colour": ""} for i in range(50)}
            config = {**task.initial_config, "notes": notes}
            return dataclasses.replace(task, category=Category(category), initial_config=config)
        return dataclasses.replace(task, category=Category(category), turns=turns)


def notes_task(i=0, category="base", suite=NotesSuite(), **changes):
    """A hand-written seed; other categories through the suite's own augmentation."""
    task = Task(
        uid=f"seed{i}", domains=("notes",), category=Category.BASE,
        initial_config={"notes": {}, "next": 100 + i}, scenario=f"notes-{i}", turns=(
            Turn(f"Write a note 'kite {i} shop' that says open at noon.",
                 (ToolCall("add_note", {"title": f"kite {i} shop", "body": "open at noon"}),),
                 TOOLS),
            Turn("Now read it to me and pin it in blue.",
                 (ToolCall("read", {"id": 100 + i}),
                  ToolCall("pin_note", {"id": 100 + i, "colour": "blue"})), TOOLS)))
    if category != "base":
        task = suite.augment(task, category, random.Random(0))
    return dataclasses.replace(task, **changes)


@pytest.mark.parametrize("category", [c.value for c in Category])
def test_expert_passes_every_category(category):
    task = notes_task(3, category)
    suite = NotesSuite()
    env = suite.make_env(task)
    passed = []
    while (turn := env.begin_turn()) is not None:
        env.execute(task.turns[turn.index].gold)
        passed.append(env.end_turn(suite.gold_reply(task, turn.index)).passed)
    assert passed == [True] * len(task.turns)
