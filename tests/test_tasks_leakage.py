import dataclasses

import pytest

from rods_jax.tasks.leakage import HeldOutGuard, Leak, crossing, root_scenario
from rods_jax.types import Category, Source, Task, ToolCall, Turn
from test_synthesis_suite import notes_task


def flight(user="Book a flight to LAX", uid="multi_turn_base_7", scenario="7", **arguments):
    gold = (ToolCall("book_flight", {"to": "LAX", "seats": 2} | arguments),)
    turn = Turn(user, gold, ("book_flight",))
    return Task(uid, ("travel",), Category.BASE, {}, (turn,), scenario)


def test_case_spacing_id_and_sibling_are_refused():
    guard = HeldOutGuard([flight()])
    assert guard.refuse(flight("book  a FLIGHT to lax ", uid="a", scenario="x")) is Leak.CONTENT
    assert guard.refuse(flight(uid="renamed", scenario="x")) is Leak.CONTENT
    sibling = flight("Book it, please", uid="multi_turn_miss_func_7", to="JFK")
    assert guard.refuse(sibling) is Leak.SCENARIO
    assert guard.counts == {Leak.CONTENT: 2, Leak.SCENARIO: 1}
    assert guard.to_json() == {"same_content": 2, "same_text": 0, "same_gold": 0,
                               "same_masked_text": 0, "same_scenario": 1}


@pytest.mark.parametrize("task, reason", [
    (flight("Book a flight, to LAX!", scenario="8", seats=3), Leak.TEXT),
    (flight("I want to fly to LA", scenario="8", to=" lax", seats=2.0), Leak.GOLD),
    (flight("I want to fly to LA", scenario="7~12.0", to="JFK"), Leak.SCENARIO),
    (flight("Fly me to JFK", scenario="77", to="JFK"), None),
    (flight("Fly me to LAX", scenario="8", seats=True), None),
])
def test_other_disguises(task, reason):
    assert HeldOutGuard([flight()]).leak(task) is reason


@pytest.mark.parametrize("said", [
    "Hello. Book 22 seats to Zürich", "Please now book 22 seats to Zürich. Thanks.",
    "Next: Book 22 seats to Zürich for me please", "Book twenty-two seats to Zurich",
    "Bo\u200bok 22 se\u00adats to Zu\u0308rich", "\uff22ook \uff12\uff12 seats to ZÜRICH",
    "All right. Good. Book twenty two seats to Zürich! Much obliged.",
])
def test_spelling_and_fillers_do_not_hide_a_text(said):
    guard = HeldOutGuard([flight("Book 22 seats to Zürich")])
    assert guard.leak(flight(said, scenario="8", to="ZRH")) is Leak.TEXT
    assert guard.leak(flight(said.replace("Zu", "X").replace("Zü", "X").replace("ZÜ", "X"),
                             scenario="8", to="ZRH")) is None


def test_fillers_inside_a_text_and_other_numbers_count():
    guard = HeldOutGuard([flight("Book twenty seats to LA, then thank Ann. Now")])
    for said in ("Book twenty seats to LA, thank Ann. Now", "Book 21 seats to LA, then thank Ann"):
        assert guard.leak(flight(said, scenario="8", to="X")) is None
    assert guard.leak(flight("Now book 20 seats to LA, then thank Ann", scenario="8", to="X")) is (
        Leak.TEXT)
    assert HeldOutGuard([flight("Thanks.")]).leak(flight("Hello.", scenario="8", to="X")) is None


@pytest.mark.parametrize("seats, reason", [("2", Leak.GOLD), ("2.0", Leak.GOLD), (" 2 ", Leak.GOLD),
                                           ("-2", None), ("2a", None), (True, None)])
def test_a_number_in_a_string_is_the_number(seats, reason):
    assert HeldOutGuard([flight()]).leak(flight("other", scenario="8", seats=seats)) is reason


def test_the_case_of_a_scenario_hides_nothing():
    guard = HeldOutGuard([flight(scenario="Trip-A")])
    assert guard.leak(flight("other", scenario="trip-a~1.0", to="X")) is Leak.SCENARIO


@pytest.mark.parametrize("category", ["miss_func", "miss_param", "long_context"])
def test_a_withheld_form_with_a_wrong_scenario_is_refused(category):
    held_in = notes_task(5)
    disguise = notes_task(5, category, uid="other", scenario="typo")
    assert disguise.content_hash != held_in.content_hash or category == "long_context"
    assert HeldOutGuard([held_in]).leak(disguise) in (Leak.TEXT, Leak.GOLD, Leak.CONTENT)
    assert HeldOutGuard([disguise]).leak(held_in) in (Leak.TEXT, Leak.GOLD, Leak.CONTENT)


def test_where_siblings_cross_only_variants_that_equal_a_held_in_task_are_refused():
    guard = HeldOutGuard([flight()], siblings_cross=True)
    assert guard.leak(flight(uid="its long_context sibling")) is None  # a seed, by the split
    generated = lambda task: dataclasses.replace(task, source=Source.GENERATED)  # noqa: E731
    assert guard.leak(generated(flight("other", scenario="7~1.0", to="JFK"))) is None
    assert guard.leak(generated(flight(scenario="7~1.0"))) is Leak.CONTENT
    assert guard.leak(generated(flight("Fly me to LA", scenario="7~1.0"))) is Leak.GOLD
    assert crossing([flight()], [flight(), flight(scenario="8")]) == 0.5


def test_other_entities_in_a_held_in_tasks_sentences_are_refused():
    guard = HeldOutGuard([flight()])
    variant = flight("Book a flight to JFK", uid="v", scenario="8~1.0", to="JFK")
    assert guard.leak(variant) is None  # a seed of the split: the split is what it is
    variant = dataclasses.replace(variant, source=Source.GENERATED)
    assert guard.refuse(variant) is Leak.MASKED and guard.counts[Leak.MASKED] == 1
    other_words = dataclasses.replace(variant, turns=(
        dataclasses.replace(variant.turns[0], user="Book me a flight to JFK"),))
    assert guard.leak(other_words) is None
    crossing_guard = HeldOutGuard([flight()], siblings_cross=True)
    assert crossing_guard.leak(variant) is Leak.MASKED
    assert crossing_guard.leak(other_words) is None


@pytest.mark.parametrize("category", ["miss_func", "long_context"])
def test_a_withheld_function_does_not_hide_the_wording(category):
    held_in = notes_task(5)
    variant = notes_task(6, category, uid="v", scenario="x~1.0", source=Source.GENERATED)
    assert HeldOutGuard([held_in]).leak(variant) is Leak.MASKED


def test_empty_things_do_not_match():
    assert root_scenario("7~1.0~9.2") == "7"
    empty = dataclasses.replace(flight(), turns=(Turn("", (), ()),))
    other = dataclasses.replace(empty, turns=(Turn("", (ToolCall("f", {}),), ()),), scenario="z")
    assert HeldOutGuard([empty]).leak(other) is None
