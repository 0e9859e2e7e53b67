"""Worked examples: the right ones, never of the task's own story, and where they stand."""

import dataclasses

import pytest

from rods_jax.text.hermes import HermesFormat, Schemas, signature
from rods_jax.text.shots import nearest, shots_of
from rods_jax.text.tokenizer import byte_tokenizer
from rods_jax.tools.bfcl import BFCLSuite
from rods_jax.tools.env import UserTurn
from rods_jax.types import Category, Task, ToolCall, ToolSpec, Turn

TOOLS = ("ls", "touch", "post")


def a_task(scenario, *turns, category=Category.BASE):
    made = tuple(Turn(user, tuple(ToolCall(name, {}) for name in names), TOOLS)
                 for user, names in turns)
    return Task(f"{category.value}-{scenario}", ("files",), category, {}, made, scenario)


TRAIN = (
    a_task("a", ("list all the files here", ["ls"]), ("post the note to all", ["post"])),
    a_task("b", ("create the note here", ["touch"]), ("list all and post it", ["ls", "post"])),
    a_task("c", ("show the hidden files of all", ["ls"]), ("x" * 300, ["touch"])),
    a_task("d", ("list files", ["ls"]), category=Category.MISS_PARAM),
)
SHOTS = shots_of(TRAIN)


def test_shots_are_short_turns_of_one_call_in_base_tasks():
    assert [(s.user, s.call.name, s.scenario) for s in SHOTS] == [
        ("list all the files here", "ls", "a"), ("post the note to all", "post", "a"),
        ("create the note here", "touch", "b"), ("show the hidden files of all", "ls", "c")]


def test_the_nearest_come_last_and_from_other_stories():
    task = a_task("new", ("Show the hidden files!", ["ls"]))
    assert [s.user for s in nearest(SHOTS, task, 1)] == ["show the hidden files of all"]
    two = nearest(SHOTS, task, 9)
    assert len({s.call.name for s in two}) == len(two) == 3 and two[-1].call.name == "ls"
    own = dataclasses.replace(task, scenario="c~4.0")  # a variant of story c
    assert [s.user for s in nearest(SHOTS, own, 1)] == ["list all the files here"]
    hidden = dataclasses.replace(task, turns=(Turn("Show the hidden files", (), ("post",)),))
    assert [s.call.name for s in nearest(SHOTS, hidden, 3)] == ["post"]
    assert nearest(SHOTS, task, 0) == () == nearest((), task, 2)


def test_shots_stand_as_messages_before_the_users_own():
    form = HermesFormat(byte_tokenizer(), Schemas.SIGNATURES, shots=SHOTS, n_shots=1)
    specs = [ToolSpec(name, "", {"type": "object", "properties": {}}, "files") for name in TOOLS]
    task = a_task("new", ("Show the hidden files!", ["ls"]))
    dialogue = form.start(task, specs)
    text = dialogue.text(dialogue.prompt(UserTurn(0, task.turns[0].user, TOOLS)))
    assert text.endswith(
        "<|im_start|>user\nshow the hidden files of all<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nShow the hidden files!<|im_end|>\n<|im_start|>assistant\n")
    later = dialogue.text(dialogue.user(UserTurn(1, "More", TOOLS)))
    assert "hidden" not in later


@pytest.mark.parametrize("name", ["train", "held_in"])
def test_on_bfcl_no_prompt_shows_its_own_story(name):
    suite = BFCLSuite()
    shots = shots_of(suite.split("train"))
    for task in suite.split(name)[::8]:
        found = nearest(shots, task, 2)
        assert found and all(s.scenario != task.scenario for s in found)
        assert {s.call.name for s in found} <= set(task.turns[0].tools)


def test_bfcl_signatures_say_what_each_tool_does():
    suite = BFCLSuite()
    lines = [signature(spec) for spec in suite.tools(suite.domains)]
    assert not any("belongs to" in line for line in lines)
    assert ("cd(folder: str)  # Change the current working directory to the specified folder"
            in lines)
