"""Each rule refuses, with its own reason, a real variant that was spoilt in that one respect."""

import dataclasses
import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rods_jax.synthesis.critique import TEXT_REASONS, CritiqueReason, critique
from rods_jax.synthesis.text_rules import code_in, names_in, unknown_names
from rods_jax.tasks.trace import Origin, normal, scalars, trace
from rods_jax.tasks.replay import replay, result_json
from rods_jax.tools.env import NamesThings
from rods_jax.types import Category, ToolCall, ToolResult, Turn, TurnOutcome
from synthesis_variants import SUITES, score, suite_of, variants, with_turn
from test_synthesis_suite import NotesSuite, notes_task

R = CritiqueReason


def reasons(task, suite, inherited):
    return {remark.reason for remark in critique(task, suite, inherited=inherited).remarks}


def spoilt(name, category, spoil):
    """The verdicts' reasons on all variants that `spoil` could change."""
    found = []
    for task, inherited in variants(name, category):
        bad = spoil(task)
        if bad is not None:
            found.append(reasons(bad, suite_of(name), inherited))
    return found


@pytest.mark.parametrize("name", SUITES)
@pytest.mark.parametrize("category", [c.value for c in Category])
def test_accepted_variants_need_every_call(name, category):
    """By an independent count of the turns that pass."""
    suite, made = suite_of(name), variants(name, category)
    assert len(made) >= 8
    for task, _ in made[:8]:
        assert score(suite, task) == 1.0, task.uid
        for i in range(sum(len(turn.gold) for turn in task.turns)):
            assert score(suite, task, drop=i) < 1.0, (task.uid, i)


# ---------------------------------------------------------------- the text


def without_a_said_value(name, task, inherited):
    """Some value that only the user gives becomes "it", wherever it is said."""
    suite = suite_of(name)
    tools = [call.name for turn in task.turns for call in turn.gold]
    results = [result_json(r) for r in replay(suite, task).results]
    shown = json.dumps(results)
    for value in trace(task, suite.tools(task.domains), results):
        word = value.value
        if value.origin is not Origin.USER or not isinstance(word, str) or word in shown:
            continue
        if (tools[value.call], value.argument) in inherited:
            continue  # the seed leaves it to inference as well
        if not re.fullmatch(r"[@/\w.-]*[\d@/._-][@/\w.-]*", word):
            continue  # a plain word may be said in passing too
        turns = [dataclasses.replace(t, user=re.sub(rf"{re.escape(word)}(?!\w)", "it", t.user))
                 for t in task.turns]
        if tuple(turns) == task.turns or any(
                f" {normal(word)} " in f" {normal(turn.user)} " for turn in turns):
            continue  # said in another form
        return dataclasses.replace(task, turns=tuple(turns))
    return None


@pytest.mark.parametrize("name", SUITES)
def test_a_value_that_nobody_gives(name):
    found = [reasons(bad, suite_of(name), inherited) for task, inherited in variants(name)
             if (bad := without_a_said_value(name, task, inherited)) is not None]
    assert len(found) >= 5 and all(each == {R.NO_SOURCE} for each in found)


CODE = {
    "call": lambda n, a: f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})",
    "positional": lambda n, a: f"{n}({', '.join(map(repr, a.values()))})",
    "bare name": lambda n, a: n,
    "capitals": lambda n, a: n.upper(),
    "hyphens": lambda n, a: n.replace("_", "-"),
    "spaces and bracket": lambda n, a: f"{n.replace('_', ' ')} ({', '.join(map(str, a.values()))})",
    "json": lambda n, a: json.dumps({"name": n, "arguments": a}),
    "json arguments": lambda n, a: json.dumps(a),
    "assignments": lambda n, a: " and ".join(f"{k} = {v}" for k, v in a.items()),
}


@pytest.mark.parametrize("name", SUITES)
@pytest.mark.parametrize("form", CODE)
def test_a_gold_call_in_code_form(name, form):
    def spoil(task):
        options = [(t, call) for t, turn in enumerate(task.turns) for call in turn.gold
                   if call.arguments and ("_" in call.name or form not in ("bare name", "capitals",
                                                                         "hyphens"))]
        if not options:
            return None
        t, call = options[0]
        user = f"{task.turns[t].user} {CODE[form](call.name, dict(call.arguments))}"
        return with_turn(task, t, user=user)

    found = spoilt(name, "base", spoil)
    also = {R.UNKNOWN_NAME} if form == "hyphens" else set()  # "find-file" may be a name
    assert len(found) >= 5
    assert all(each - also == {R.CODE_IN_TEXT} for each in found)


@pytest.mark.parametrize("name", SUITES)
def test_a_turn_that_says_nothing(name):
    def spoil(task):
        for t in range(1, len(task.turns)):
            bad = with_turn(task, t, user=" ")
            rest = reasons(with_turn(task, t, user="Go on."), suite_of(name), {})
            if R.NO_SOURCE not in rest:
                return bad
        return None

    found = spoilt(name, "base", spoil)
    assert found and all(R.EMPTY_TEXT in each and each <= {R.EMPTY_TEXT} for each in found)


GHOSTS = {
    "toolbox": ("copy ghostly.doc too", "and tell @nobodyhere", "as in bk-10017", "from /nowhere",
                "near zugzu-city", "about 8181818"),
    "bfcl": ("It is like phantom_17.txt.", "Tell Xenia so.", "As with order 98989898.",
             "I saw it in Willowbend.", "Look at the stock QQZZ.", "Ask @nobody_here.",
             "Mind booking id 77001177.", "My key is ZZ-90817."),
}


@pytest.mark.parametrize("name, ghost", [(n, g) for n in SUITES for g in GHOSTS[n]])
def test_a_name_of_nothing(name, ghost):
    def spoil(task):
        known = str([task.to_json(), replay(suite_of(name), task).results])
        if any(word in known for word in ("Willowbend", "WLB", "Xenia")):
            return None
        return with_turn(task, len(task.turns) - 1, user=f"{task.turns[-1].user} {ghost}")

    found = spoilt(name, "base", spoil)
    assert len(found) >= 5 and all(each == {R.UNKNOWN_NAME} for each in found)


@pytest.mark.parametrize("name", SUITES)
def test_names_of_the_state_results_and_gold_are_no_ghosts(name):
    """What any gold call is given may be named in every turn, what it returned from then on."""
    suite = suite_of(name)
    for task, inherited in variants(name):
        said = [str(v) for turn in task.turns for call in turn.gold
                for v in scalars(dict(call.arguments)) if isinstance(v, str)]
        bad = with_turn(task, 0, user=" ".join([task.turns[0].user, *said]))
        assert R.UNKNOWN_NAME not in reasons(bad, suite, inherited)


def test_a_result_cannot_be_named_before_it_is_there():
    task, suite = notes_task(), NotesSuite()
    config = {"notes": {}, "next": 8812}
    turns = (task.turns[0], Turn("Read 'note8812' and pin it in blue.", (
        ToolCall("read", {"id": 8812}), ToolCall("pin_note", {"id": 8812, "colour": "blue"})),
        task.turns[0].tools))
    task = dataclasses.replace(task, initial_config=config, turns=turns)
    results = [{"id": 8812, "name": "note8812"}, {}, {}]
    assert unknown_names(task, suite, results) == []
    early = with_turn(task, 0, user=f"{task.turns[0].user} As note8812.")
    assert unknown_names(early, suite, results) == [(0, "note8812")]
    assert unknown_names(early, suite, ['{"name": "note8812"}', {}, {}]) == [(0, "note8812")]
    assert unknown_names(task, suite, ['{"name": "note8812"}', {}, {}]) == []


def test_a_suite_without_names_of_its_own_gets_files_handles_and_ids():
    assert not isinstance(NotesSuite(), NamesThings)
    found = names_in("Mail report-2.PDF and notes.txt to @ada_l at me@home.de, see USR007, not 12.")
    assert [name.said for name in found] == ["notes.txt", "@ada_l", "USR007"]
    bad = with_turn(notes_task(), 0, user=f"{notes_task().turns[0].user} See plan.txt.")
    assert reasons(bad, NotesSuite(), {}) == {R.UNKNOWN_NAME}


# ---------------------------------------------------------------- what is withheld


def asking(task):
    return next(t for t, turn in enumerate(task.turns) if not turn.gold)


@pytest.mark.parametrize("name", SUITES)
def test_nothing_is_withheld(name):
    def shown(task):
        turns = [dataclasses.replace(turn, tools=task.turns[-1].tools) for turn in task.turns]
        turns[asking(task) + 1] = dataclasses.replace(turns[asking(task) + 1], user="Now do it.")
        return dataclasses.replace(task, turns=tuple(turns))

    def told(task):
        t = asking(task)
        both = f"{task.turns[t].user} {task.turns[t + 1].user}"
        return with_turn(with_turn(task, t, user=both), t + 1, user="Now do it.")

    for category, spoil in (("miss_func", shown), ("miss_param", told)):
        found = spoilt(name, category, spoil)
        assert len(found) >= 5 and all(each == {R.NOTHING_WITHHELD} for each in found)


@pytest.mark.parametrize("name", SUITES)
@pytest.mark.parametrize("category", [c.value for c in Category])
def test_an_absence_that_the_category_does_not_explain(name, category):
    def never_comes(task):
        return dataclasses.replace(task, turns=(*task.turns, Turn(
            "And then do it all again.", (), task.turns[-1].tools)))

    def tools_come_late(task):
        """A function that nobody needs before the last turn is hidden until then."""
        used = {call.name for turn in task.turns[:-1] for call in turn.gold}
        if len(task.turns) < 2 or set(task.turns[0].tools) <= used:
            return None
        hidden = sorted(set(task.turns[0].tools) - used)[0]
        early = [dataclasses.replace(turn, tools=tuple(t for t in turn.tools if t != hidden))
                 for turn in task.turns[:-1]]
        return dataclasses.replace(task, turns=(*early, task.turns[-1]))

    spoil = never_comes if category == "miss_func" else tools_come_late
    found = spoilt(name, category, spoil)
    assert len(found) >= 5 and all(each == {R.UNEXPLAINED} for each in found)
    if category == "miss_param":
        found = spoilt(name, category, never_comes)
        assert found and all(each == {R.UNEXPLAINED} for each in found)


# ---------------------------------------------------------------- the ground truth


def first_call(task):
    t = next(t for t, turn in enumerate(task.turns) if turn.gold)
    return t, task.turns[t].gold[0]


class Other:
    """The suite with another environment."""

    def __init__(self, suite, env):
        self._suite, self._env = suite, env

    def __getattr__(self, name):
        return getattr(self._suite, name)

    def make_env(self, task):
        return self._env(self._suite.make_env(task))


class Lenient:
    """Every turn passes."""

    def __init__(self, env):
        self._env = env

    def __getattr__(self, name):
        return getattr(self._env, name)

    def end_turn(self, said):
        return dataclasses.replace(self._env.end_turn(said), state_ok=True, exec_ok=True)


class Dice(Lenient):
    """No two results are equal."""

    rolls = itertools.count()

    def execute(self, calls):
        return tuple(ToolResult(json.dumps({"roll": next(self.rolls)}), r.ok)
                     for r in self._env.execute(calls))

    def end_turn(self, said) -> TurnOutcome:
        return super().end_turn(said)


@pytest.mark.parametrize("name", SUITES)
def test_ground_truth_that_does_not_hold(name):
    suite = suite_of(name)

    def hidden(task):
        t, call = first_call(task)
        return with_turn(task, t, tools=tuple(x for x in task.turns[t].tools if x != call.name))

    def wrong(task):
        t, call = first_call(task)
        bad = ToolCall(call.name, {**call.arguments, "no_such_argument": 1})
        return with_turn(task, t, gold=(bad, *task.turns[t].gold[1:]))

    def again(task):
        """A look-up of an early turn once more in a later one, which it does nothing for."""
        for t, turn in enumerate(task.turns[:-1]):
            for call in turn.gold:
                bad = with_turn(task, len(task.turns) - 1, gold=(*task.turns[-1].gold, call))
                last = sum(len(turn.gold) for turn in bad.turns) - 1
                if score(suite, bad) == score(suite, bad, drop=last) == 1.0:
                    return bad
        return None

    for spoil, reason in ((hidden, R.UNKNOWN_TOOL), (wrong, R.GOLD_FAILS),
                          (again, R.CALL_NOT_NEEDED)):
        found = spoilt(name, "base", spoil)
        # A value that the seed leaves to inference once is one too many the second time.
        also = {R.NO_SOURCE} if spoil is again else set()
        assert len(found) >= 5 and all(each - also == {reason} for each in found), reason
    for env, reason in ((Lenient, R.ALREADY_SATISFIED), (Dice, R.NOT_REPRODUCIBLE)):
        for task, inherited in variants(name)[:6]:
            assert reasons(task, Other(suite, env), inherited) == {reason}


def test_only_remarks_on_the_text_can_be_cured():
    assert TEXT_REASONS == {R.NO_SOURCE, R.CODE_IN_TEXT, R.EMPTY_TEXT, R.UNKNOWN_NAME}


# ---------------------------------------------------------------- code, more widely

WORDS = st.text(alphabet="abcdefghij ,.!?'-", max_size=40)
VALUES = st.one_of(st.integers(-999, 999), st.text(alphabet="abc xyz", max_size=9), st.booleans())


@settings(max_examples=150, deadline=None)
@given(st.data(), WORDS, WORDS)
def test_every_call_in_every_form_is_code_anywhere_in_a_text(data, before, after):
    name = data.draw(st.sampled_from(SUITES))
    specs = suite_of(name).tools(suite_of(name).domains)
    spec = data.draw(st.sampled_from([s for s in specs if s.parameters["properties"]]))
    arguments = {key: data.draw(VALUES) for key in spec.parameters["properties"]}
    form = data.draw(st.sampled_from([f for f in CODE if "_" in spec.name or f not in (
        "bare name", "capitals", "hyphens")]))
    text = f"{before} {CODE[form](spec.name, arguments)} {after}"
    spelled, plain = code_in([text, before], specs, ())
    assert spelled is not None and plain is None


@pytest.mark.parametrize("text, code", [
    ("Please sort the list (by size)", None),
    ("Lock all doors (please)", None), ("then lock doors (all four)", "lock doors ("),
    ("use startEngine", "startEngine"), ("lockdoors(all)", "lockdoors("),
    ("Lock Doors(all)", "Lock Doors("), ("send message (hi)", "send message ("),
    ("set file_name= a", "file_name="), ('with "symbol": X', '"symbol":'),
    ("the amount == 3", None), ("pick [1, 2]", None), ('give ["a", "b"]', '["a",'),
    ("Write 'cat(x)' there", None), ("cat(y)", "cat("), ("Pick it. Date is May 4.", None),
    *((f"Please {said} it", found) for said, found in (
        ("ｓｅｎｄ＿ｍｅｓｓａｇｅ", "send_message"), ("send\u200b_mess\u00adage", "send_message"),
        ("send\u2011message", "send-message"), ("send__message", "send__message"),
        ("send.message", "send.message"), ("SendMessage", "SendMessage"), ("send\u2028message", None),
        ("ｓｏｒｔ（", "sort("), ("sort\u2060(", "sort("), ("STARTENGINE", None),
        ("start_engine", "start_engine"), ('{"a b": 1}', '{"a b":'))),
])
def test_code_and_what_only_looks_like_it(text, code):
    suite = suite_of("bfcl")
    specs = suite.tools(suite.domains)
    calls = [ToolCall("echo", {"content": "cat(x)"}), ToolCall("grep", {"pattern": "cat"})]
    assert code_in([text], specs, calls) == [code]
