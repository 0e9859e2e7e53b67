"""What counts as the same task: fingerprints against an independent masking, and Known."""

import dataclasses
import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rods_jax.synthesis.novelty import Known, Novelty
from rods_jax.tasks.fingerprint import MASK, Fingerprint, fingerprint, masked_words
from rods_jax.tools.toolbox import ToolboxSuite
from rods_jax.tools.toolbox.entities import is_entity
from rods_jax.types import Category, Task, ToolCall, Turn
from test_synthesis_suite import notes_task

SUITE = ToolboxSuite()
IDS = r"@[a-z]+|\b(?:ms|tr|hd|bk|bl|py|pin)-\d+"


def task(*texts, config=None, calls=(), uid="a"):
    turns = [Turn(text, (), ("f",)) for text in texts]
    turns[0] = dataclasses.replace(turns[0], gold=tuple(calls))
    return Task(uid, ("d",), Category.BASE, config or {}, tuple(turns), uid)


MAIL = ToolCall("send", {"to": "USR-77", "body": "See you at noon", "copies": 2})


@pytest.mark.parametrize("text, config, calls, masked", [
    ("Send 'see you at Noon!' to usr 77.", {}, [MAIL], "send _ to _"),
    ("Pay two of 1,250.50 dollars", {}, (), "pay _ of _ dollars"),
    ("Ask Ada Lovelace, not Ada", {"people": {"Ada Lovelace": "x1"}}, (), "ask _ not ada"),
    ("open report.txt in the folder", {"root": {"report.txt": {"type": "folder"}}}, (),
     "open _ in the folder"),
    ("what do the stocks in fuelLevel say", {"stocks": {}, "fuelLevel": 3}, (),
     "what do the stocks in fuellevel say"),
    ("go to Rivermist 83214", {"city": "Rivermist"}, (), "go to _"),
    ("mark it as done for me", {"rows": [["Ada", "me"]], "state": "done"}, (),
     "mark it as done for me"),
])
def test_masked_words(text, config, calls, masked):
    assert " ".join(masked_words(task(text, config=config, calls=calls))) == masked


def test_masking_joins_turns_and_ignores_everything_but_words():
    whole, split = task("Read ms-12, then stop."), task("read", "MS 99 then", "stop")
    assert fingerprint(whole).masked == fingerprint(split).masked
    assert fingerprint(whole).text != fingerprint(split).text
    assert fingerprint(task("12 13", "7")).masked is None
    assert fingerprint(task("")) == Fingerprint(task("").content_hash, None, None, None)


def test_masks_agree_with_the_suites_own_idea_of_an_entity():
    """The toolbox spells its entities so that they can be told from words without a task."""
    for seed in SUITE.split("train")[:120]:
        said = " ".join(turn.user for turn in seed.turns).split()
        expected = []
        for word in (w.rstrip(",.?") for w in said):
            known = is_entity(word) or any(word == c.arguments.get("currency") for t in seed.turns
                                           for c in t.gold)
            new = [MASK] if known else re.findall("[a-z]+", word)
            expected += new if new != [MASK] or expected[-1:] != [MASK] else []
        assert masked_words(seed) == expected, seed.uid


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 399), st.integers(0, 10**6))
def test_other_entities_in_the_same_sentences_have_the_same_masked_text(index, salt):
    seed = SUITE.split("train")[index]
    rng, new = random.Random(salt), {}

    def swap(match):
        word = match.group()
        head = re.match(r"@|[a-z]+-", word).group()
        tail = ("".join(rng.choices("bcd", k=7)) + "o" if head == "@"
                else str(rng.randint(10**5, 10**6)))
        return new.setdefault(word, head + tail)

    renamed = Task.from_json(json.loads(re.sub(IDS, swap, json.dumps(seed.to_json()))))
    assert fingerprint(renamed).masked == fingerprint(seed).masked
    said = " ".join(turn.user for turn in seed.turns)
    if any(word in said for word in new):
        assert fingerprint(renamed).text != fingerprint(seed).text


# ---------------------------------------------------------------- known tasks


def variants():
    """A known task, and others that share just one thing with it."""
    base = notes_task(3)
    first, second = base.turns
    other_gold = ToolCall("add_note", {"title": "kite 3 shop", "body": "open at nine"})
    said = dataclasses.replace
    return base, {
        Novelty.CONTENT: said(base, uid="b", turns=(said(first, user=first.user.upper()), second)),
        Novelty.TEXT: said(base, uid="c", turns=(said(first, gold=(other_gold,)), second)),
        Novelty.GOLD: said(base, uid="d", turns=(said(first, user="New words."), second)),
        None: said(base, uid="e", turns=(said(first, user="New words.", gold=(other_gold,)),
                                         second)),
    }


@pytest.mark.parametrize("reason", [*Novelty, None])
def test_each_form_refuses_and_says_which(reason):
    base, others = variants()
    known = Known([base])
    before = known.to_json()
    assert known.refuse(others[reason]) is reason
    assert known.refuse(fingerprint(others[reason])) is reason
    assert known.to_json() == before  # refusing changes nothing
    assert Known().refuse(base) is None


def test_equal_wording_is_counted_and_not_refused():
    known = Known([notes_task(0)])  # what it begins with is no repetition
    for i in (1, 2):
        assert known.refuse(notes_task(i)) is None
        known.add(notes_task(i))
    assert known.repeats == 2
    known.update([task("Something else.", calls=[ToolCall("g", {"x": 1})])])
    assert known.repeats == 2


def test_empty_things_are_no_reason():
    known = Known([task("", uid="x")])
    assert known.refuse(dataclasses.replace(task("", "", uid="y"))) is None
    assert known.refuse(task("", uid="z")) is Novelty.CONTENT


def test_json_round_trip():
    known = Known(notes_task(i) for i in range(3))
    known.add(notes_task(7))
    rows = json.loads(json.dumps(known.to_json()))
    again = Known.from_json(rows)
    assert again == known and again.repeats == known.repeats == 1
    assert again.refuse(notes_task(7)) is known.refuse(notes_task(7)) is Novelty.CONTENT
    again.add(notes_task(9))
    assert again != known and again != rows
    for wrong in ([3], ["masked"], ["colour:ab"], ["text:"], ["repeats:x"]):
        with pytest.raises(ValueError, match="not a record of known tasks"):
            Known.from_json(wrong)


def test_toolbox_seeds_differ_from_each_other_in_every_form_that_refuses():
    known = Known()
    for seed in SUITE.split("train"):
        assert known.refuse(seed) is None, seed.uid
        known.add(seed)
    assert len(known.to_json()) > 3 * len(SUITE.split("train"))
