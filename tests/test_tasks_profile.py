import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rods_jax.tasks.profile import Edge, Profile, base_form, distance, profile
from rods_jax.tasks.replay import replay, result_json
from rods_jax.tasks.trace import Origin, normal, trace, words
from rods_jax.types import Category, Task, ToolCall, ToolResult, ToolSpec, Turn
from test_synthesis_suite import NotesSuite, notes_task

SUITE = NotesSuite()


def test_profile_of_a_known_task():
    p = profile(notes_task(0), SUITE)
    assert p.calls == ("add_note", "read", "pin_note") and p.calls_per_turn == (1, 2)
    assert p.edges == (Edge(0, 1, "id"), Edge(0, 2, "id"))
    assert p.depth == 1 and p.cross_turn == 2
    assert p.flow == ((0, "title", Origin.USER), (0, "body", Origin.USER),
                      (1, "id", Origin.RESULT), (2, "id", Origin.RESULT),
                      (2, "colour", Origin.USER))
    assert json.loads(json.dumps(p.to_json()))["edges"] == [[0, 1, "id"], [0, 2, "id"]]
    assert "turn 1  #2 pin_note  (id <- #0 add_note)" in str(p)


@pytest.mark.parametrize("category", ["miss_func", "miss_param", "long_context"])
def test_base_form_undoes_what_is_withheld(category):
    seed, other = notes_task(0), notes_task(0, category)
    form = base_form(other)
    assert form.category is Category.BASE
    assert [t.gold for t in form.turns] == [t.gold for t in seed.turns]
    assert all(t.tools == seed.turns[0].tools for t in form.turns)
    assert replay(SUITE, form).progress == 1.0
    assert distance(profile(form, SUITE), profile(seed, SUITE)) == 0.0
    assert distance(profile(other, SUITE), profile(seed, SUITE)) > 0.0
    assert base_form(seed) is seed


def _trace_one(value, texts, results=(), config=None, argument="x", schema=None):
    """Origin of the value in the last turn; each result came from one call of turn 0."""
    turns = [Turn(text, (), ("f",)) for text in texts]
    turns[0] = Turn(texts[0], (ToolCall("g", {}),) * len(results), ("f",))
    last = Turn(texts[-1], (*turns[-1].gold, ToolCall("f", {argument: value})), ("f",))
    task = Task("u", ("d",), Category.BASE, config or {}, (*turns[:-1], last), "s")
    spec = ToolSpec("f", "", {"properties": {argument: schema or {}}}, "d")
    (found,) = trace(task, [spec], list(results))
    return found


@pytest.mark.parametrize("value, text", [
    ("Garden plan", "the garden  PLAN, please"), (1200.5, "pay 1,200.50 now"), (2, "take two"),
    (3.0, "3 of them"), ("2024-05-01", "on May 1, 2024"), ("14:30", "at 2:30 pm"),
    ("notes/todo.txt", "todo.txt in notes"), (-5, "minus 5"), ("naïve", "so Naïve!"),
    (1234567890123456789, "order 1234567890123456789"), ("a_b", "the a b"),
    ("hello (x)", "write 'hello (x)'"),
])
def test_said_by_the_user(value, text):
    assert _trace_one(value, [text]).origin is Origin.USER


@pytest.mark.parametrize("value, text", [
    ("plan", "planning"), (12, "120"), (1234567890123456789, "order 1234567890123456788"),
    ("garden plan", "garden"), ("14:30", "at 2:30 am"), (7, "nothing")])
def test_not_said(value, text):
    assert _trace_one(value, [text]).origin is Origin.UNKNOWN


def test_order_of_origins():
    both = _trace_one("abc", ["x", "use abc"], [{"id": "abc"}])
    assert (both.origin, both.said_in) == (Origin.USER, 1)
    old = _trace_one("abc", ["use abc", "again"])
    assert (old.origin, old.said_in) == (Origin.USER, 0)
    earlier = _trace_one("abc", ["use abc", "again"], [{}, {"id": "abc"}, {"id": "abc"}])
    assert (earlier.origin, earlier.producer) == (Origin.RESULT, 1)
    assert _trace_one("abc", ["x"], config={"k": ["abc"]}).origin is Origin.CONFIG
    assert _trace_one("abc", ["x"], schema={"default": "abc"}).origin is Origin.DEFAULT
    assert _trace_one("abc", ["x"], schema={"enum": ["abc", "d"]}).origin is Origin.DEFAULT
    assert _trace_one(True, ["x"]).origin is Origin.DEFAULT


def test_results_keys_text_and_weak_values():
    assert _trace_one("milk", ["x"], [{"milk": 3}]).origin is Origin.RESULT
    assert _trace_one(4711, ["x"], ["order 4711 was placed"]).origin is Origin.RESULT
    assert _trace_one(float("inf"), ["x"], [{"x": float("nan")}]).origin is Origin.UNKNOWN
    assert _trace_one(3, ["x"], [{"milk": 3}], argument="row").origin is Origin.UNKNOWN
    assert _trace_one(3, ["x"], [{"row_id": 3}], argument="row").origin is Origin.RESULT


def test_text_that_no_tool_produced_has_no_source():
    """A gold answer that posts sorted words although the tool left the line as it was."""
    line = "the quick brown fox jumps over it"
    assert _trace_one(line, ["post it"], [{"sorted_content": line}]).origin is Origin.RESULT
    unreachable = " ".join(sorted(line.split()))
    found = _trace_one(unreachable, ["post it"], [{"sorted_content": line}])
    assert found.origin is Origin.UNKNOWN
    p = Profile(Category.BASE, ("post",), (1,), (), 0, ((0, "text", Origin.UNKNOWN),), 0)
    assert p.unsourced == {("post", "text"): 1}


def test_values_inside_lists_are_traced_one_by_one():
    turn = Turn("add abc", (ToolCall("f", {"x": ["abc", {"k": "zzz"}]}),), ("f",))
    task = Task("u", ("d",), Category.BASE, {}, (turn,), "s")
    assert [(v.value, v.origin) for v in trace(task, [], [])] == [
        ("abc", Origin.USER), ("zzz", Origin.UNKNOWN)]


@settings(max_examples=50, deadline=None)
@given(st.floats(0, 1e9).map(lambda v: round(v, 2)))
def test_a_number_is_found_however_it_is_written(value):
    for text in (str(value), f"{value:,.2f}", f"it costs ${value:.2f}."):
        assert normal(value) in words(text)


origins = st.sampled_from(Origin)


@st.composite
def profiles(draw):
    per_turn = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)))
    n = sum(per_turn)
    pairs = st.tuples(st.integers(0, max(n - 1, 0)), st.integers(0, max(n - 1, 0)))
    edges = {Edge(a, b, "x") for a, b in draw(st.lists(pairs, max_size=4)) if a < b}
    flow = tuple((0, "x", o) for o in draw(st.lists(origins, max_size=5))) if n else ()
    return Profile(draw(st.sampled_from(Category)), ("f",) * n, per_turn, tuple(sorted(edges)),
                   draw(st.integers(0, 4)), flow, draw(st.integers(0, 4)))


@settings(max_examples=80, deadline=None)
@given(profiles(), profiles())
def test_distance_is_a_bounded_symmetric_gap(a, b):
    assert distance(a, a) == 0.0
    assert 0.0 <= distance(a, b) <= 1.0
    assert distance(a, b) == distance(b, a)
    renamed = dataclasses.replace(a, calls=tuple(name + "2" for name in a.calls))
    assert distance(a, renamed) == 0.0


@settings(max_examples=50, deadline=None)
@given(profiles())
def test_a_profile_survives_a_file(p):
    assert Profile.from_json(json.loads(json.dumps(p.to_json()))) == p


@pytest.mark.parametrize("change, needle", [
    (lambda r: r.pop("depth"), "lacks the field 'depth'"),
    (lambda r: r.update(colour=1), "do not fit together"),
    (lambda r: r.update(category="hard"), "'hard' is not a valid Category"),
    (lambda r: r.update(calls_per_turn=[9]), "do not fit together"),
    (lambda r: r["flow"][0].pop(), "not enough values"),
    (lambda r: r["flow"][0].__setitem__(2, "heaven"), "'heaven' is not a valid Origin"),
    (lambda r: r["edges"][0].pop(), "argument"),
])
def test_what_is_no_profile_is_one_clear_error(change, needle):
    row = json.loads(json.dumps(profile(notes_task(0), SUITE).to_json()))
    change(row)
    with pytest.raises(ValueError) as error:
        Profile.from_json(row)
    text = str(error.value)
    assert text.startswith("not a profile: ") and needle in text and "\n" not in text


def test_distance_by_hand():
    a = Profile(Category.BASE, ("f",) * 4, (2, 2), (Edge(0, 2, "x"),), 1,
                ((0, "x", Origin.USER), (2, "x", Origin.RESULT)), 1)
    b = Profile(Category.BASE, ("f",) * 3, (2, 1), (Edge(0, 1, "x"), Edge(1, 2, "x")), 2,
                ((0, "x", Origin.USER),), 1)
    # category 0, turns 0, calls 1 - 3/4, depth 1/2, links {01} vs {00, 01}: 1/2, origins 1/2
    assert distance(a, b) == pytest.approx((0.25 + 0.5 + 0.5 + 0.5) / 7)


def test_replay_leaves_things_out():
    task = notes_task(0)
    assert replay(SUITE, task).progress == 1.0
    assert replay(SUITE, task, silent=True).progress == 0.0
    assert replay(SUITE, task, drop=2).progress == 0.5
    assert len(replay(SUITE, task, drop=0, stop_at_failure=True).outcomes) == 1
    assert result_json(ToolResult('{"a": 1}', True)) == {"a": 1}
    assert result_json(ToolResult("plain words", True)) == "plain words"
