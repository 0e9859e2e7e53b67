"""Other functions in a request, other roads and other fuel: the dialogue still holds."""

from __future__ import annotations

import collections
import dataclasses
import random

import pytest

from rods_jax.tasks.profile import distance, profile
from rods_jax.tools import bfcl_entities
from rods_jax.tools.bfcl import BFCLSuite
from rods_jax.tools.bfcl_data import parameter_names, tool_domains
from rods_jax.tools.bfcl_functions import GROUPS, with_other_functions
from rods_jax.tools.bfcl_sandbox import Sandbox
from rods_jax.tools.bfcl_swaps import Swaps, mentions
from rods_jax.tools.bfcl_words import FEMALE_NAMES, MALE_NAMES
from rods_jax.tasks.replay import replay, result_json
from rods_jax.types import Category, Task, ToolCall, Turn
from synthesis_variants import score

SUITE = BFCLSuite()
BASE = {t.scenario: t for t in SUITE.tasks if t.category is Category.BASE}


def outputs(task):
    return [result_json(r) for r in replay(SUITE, task).results]


def small(*turns, config=None):
    tools = tuple(spec.name for spec in SUITE.tools(["TradingBot"]))
    return Task("x", ("TradingBot",), Category.BASE, config or {"TradingBot": {
        "authenticated": True}}, tuple(Turn(user, gold, tools) for user, *gold in turns), "x")


def test_groups_name_real_functions_once_with_one_clause_for_each_thing():
    names = collections.Counter(doing.name for group in GROUPS for doing in group.doings)
    assert set(names.values()) == {1} and set(names) <= set(tool_domains())
    for group in GROUPS:
        assert len(group.doings) > 1
        for doing in group.doings:
            assert len(doing.arguments) == len(group.things)
            known = parameter_names(tool_domains()[doing.name], doing.name)
            assert set(doing.arguments) <= set(known)
            for clause in doing.clauses:
                assert all("{%d}" % i in clause for i in range(len(group.things))), clause
                assert clause.format(*"ab"[:len(group.things)])


def test_every_change_keeps_structure_and_all_that_comes_later():
    changed = 0
    for i, task in enumerate(BASE.values()):
        before = outputs(task)
        other = with_other_functions(task, before, random.Random(i))
        if other is None:
            continue
        changed += 1
        (t,) = [t for t, (a, b) in enumerate(zip(task.turns, other.turns)) if a != b]
        at = sum(len(turn.gold) for turn in task.turns[:t])
        assert other.turns[t].gold[0].name != task.turns[t].gold[0].name
        assert list(other.turns[t].gold[0].arguments.values()) == list(
            task.turns[t].gold[0].arguments.values())
        assert outputs(other)[at + 1:] == before[at + 1:] and score(SUITE, other) == 1.0
        assert distance(profile(task, SUITE), profile(other, SUITE)) < 0.1
    assert changed >= 50


ORDER = ToolCall("get_order_details", {"order_id": 12446})
LOOK = ("Look at order 12446.", ORDER)


@pytest.mark.parametrize("task, changes", [
    (small(LOOK), True),
    (small(LOOK, ("Thanks. Now my balance?", ToolCall("get_account_info", {}))), True),
    # Order 12446 is cancelled by then, so the second look would show another state.
    (small(LOOK, ("And order 12446 again?", ORDER)), False),
])
def test_an_order_is_looked_up_or_cancelled(task, changes):
    found = set()
    for i in range(30):
        other = with_other_functions(task, outputs(task), random.Random(i))
        found.add(other and other.turns[0].gold[0].name)
    assert ("cancel_order" in found) is changes


def test_a_text_that_leans_on_the_turn_keeps_it():
    task = small(("My balance, please.", ToolCall("get_account_info", {})),
                 ("Given that, look at order 12446.", ORDER))
    for i in range(20):
        other = with_other_functions(task, outputs(task), random.Random(i))
        assert other is None or other.turns[0] == task.turns[0]


BOUGHT = ("Buy.", ToolCall("place_order", {
    "order_type": "Buy", "symbol": "AAPL", "price": 10.0, "amount": 1}))
CANCEL = ("Now cancel it.", ToolCall("cancel_order", {"order_id": 12446}))


def test_a_value_is_pointed_at_only_where_it_is_the_last_of_its_kind():
    one = small(BOUGHT, CANCEL)
    texts = {with_other_functions(one, outputs(one), random.Random(i)).turns[1].user
             for i in range(20)}
    assert all("order" in text and "12446" not in text for text in texts)
    two = small(LOOK, ("And order 12345.", dataclasses.replace(
        ORDER, arguments={"order_id": 12345})), ("Now the first again.", ORDER),
        config={"TradingBot": {"authenticated": True, "orders": {
            n: {"id": n, "status": "Open"} for n in (12345, 12446)}}})
    for i in range(20):
        other = with_other_functions(two, outputs(two), random.Random(i))
        assert other is None or other.turns[2] == two.turns[2]


def cancel_changes(*turns):
    """Whether the cancelled order of the turn that says CANCEL becomes another call."""
    task = small(*turns)
    at = turns.index(CANCEL)
    others = [with_other_functions(task, outputs(task), random.Random(i)) for i in range(30)]
    return any(other is not None and other.turns[at] != task.turns[at] for other in others)


@pytest.mark.parametrize("later", [
    ("Tweet 'I initiated and then canceled an order!'", ToolCall("get_account_info", {})),
    ("Show my orders, that cancellation too.", ToolCall("get_order_history", {})),
])
def test_what_a_later_text_speaks_of_is_done(later):
    assert cancel_changes(BOUGHT, CANCEL)
    assert not cancel_changes(BOUGHT, CANCEL, later)


def test_no_call_is_made_twice():
    assert not cancel_changes(LOOK, CANCEL)
    for task in BASE.values():
        made = [call for turn in task.turns for call in turn.gold]
        other = with_other_functions(task, outputs(task), random.Random(0))
        fresh = [] if other is None else [c for turn in other.turns for c in turn.gold]
        assert all(a == b or b not in made for a, b in zip(made, fresh))


# ---------------------------------------------------------------- roads and fuel


def test_a_drive_leads_elsewhere_by_a_road_with_a_known_length():
    ends = set()
    for i in range(12):
        plan = SUITE.plan(BASE["bfcl-71"], random.Random(i))
        texts = " ".join(plan.narrative["texts"])
        cities = [call.arguments["city"] for turn in plan.turns for call in turn
                  if call.name == "get_zipcode_based_on_city"]
        assert len(cities) == 2 and all(mentions(texts, city) for city in cities)
        ends.add(tuple(cities))
    assert len(ends) > 3
    assert bfcl_entities.towns(BASE["bfcl-58"], random.Random(0)) == {}  # "a thousand kilometers"


@pytest.mark.parametrize("scenario", ["bfcl-68", "bfcl-71", "bfcl-93", "bfcl-97"])
def test_a_tank_is_filled_to_the_brim_from_another_level(scenario):
    amounts = set()
    for i in range(10):
        plan = SUITE.plan(BASE[scenario], random.Random(i))
        level = plan.initial_config["VehicleControlAPI"]["fuelLevel"]
        (amount,) = [call.arguments["fuelAmount"] for turn in plan.turns for call in turn
                     if call.name == "fillFuelTank"]
        assert level + amount == bfcl_entities.TANK
        box = Sandbox(plan.domains, plan.initial_config, False)
        assert box.call(ToolCall("fillFuelTank", {"fuelAmount": amount})).ok
        amounts.add(amount)
    assert len(amounts) > 2


def test_fuel_that_is_shown_or_said_stays():
    for scenario in ("bfcl-59", "bfcl-94"):  # shown by the car; said by the user
        task = BASE[scenario]
        assert bfcl_entities.fuel(task, outputs(task), random.Random(0)) is None


# ---------------------------------------------------------------- people and codes


def people(said, **travel):
    task = Task("x", ("TravelAPI",), Category.BASE, {"TravelAPI": travel}, (Turn(said, (), ()),), "x")
    return [bfcl_entities.names(task, random.Random(i)) for i in range(12)]


def test_a_name_stays_where_a_handle_is_made_of_it():
    for swaps in people("I am cmartinez, and Emily is my boss.", user_first_name="Carla",
                        user_last_name="Martinez"):
        assert set(swaps) == {"emily"}
    for said in ("Ask Michael, that is MichaelTpss.", "Ask Michael, who is trav3lMicID20.",
                 "Ask Emily, whose id is '3milyTr@vel'."):
        assert all(swaps == {} for swaps in people(said)), said


def test_a_person_keeps_the_pronoun():
    female = {s["simona"] for s in people("Before Simona signs off, she wants to look.")}
    male = {s["david"] for s in people("Tell David that his file is there.")}
    assert len(female) > 3 and female <= set(FEMALE_NAMES)
    assert len(male) > 3 and male <= set(MALE_NAMES)
    assert all(swaps == {} for swaps in people("Ask Alex whether he comes."))
    assert all(set(swaps) == {"alex"} for swaps in people("Ask Alex."))


def flight_and(said, *calls):
    flight = ToolCall("get_flight_cost", {"travel_from": "RMS", "travel_to": "JFK",
                                          "travel_date": "2026-01-01", "travel_class": "economy"})
    return Task("x", ("TravelAPI",), Category.BASE, {}, (Turn(said, (flight, *calls), ()),), "x")


def test_a_code_that_may_be_a_currency_stays():
    rate = ToolCall("compute_exchange_rate", {"base_currency": "USD", "target_currency": "RMB"})
    task = flight_and("Fly from Rivermist to New York City, in RMS please.", rate)
    assert bfcl_entities.places(task, random.Random(0)) == {}
    task = flight_and("Fly from Rivermist to New York City.")
    for i in range(6):
        swaps = Swaps(exact=bfcl_entities.places(task, random.Random(i)))
        assert not any(f"{city} City" in swaps.text(task.turns[0].user) for city in
                       bfcl_entities.CITIES.values())
        assert swaps.text("New York City") != "New York City"
