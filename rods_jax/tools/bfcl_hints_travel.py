"""Hints for TravelAPI."""

from __future__ import annotations

import functools
from collections.abc import Callable

from rods_jax.tools.bfcl_data import tool_class
from rods_jax.tools.bfcl_hints_case import TELL, Failed
from rods_jax.tools.hints import closest

# As the documents name them; rates exist between the first and each other.
CURRENCIES = ("USD", "RMB", "EUR", "JPY", "GBP", "CAD", "AUD", "INR", "RUB", "BRL", "MXN")
CLASSES = ("economy", "business", "first")


def travel_hint(f: Failed) -> str:
    return next((rule(f) for starts, rule in _RULES if f.says(*starts)), "")


def _token(f: Failed) -> str:
    if f.state.access_token is None or f.says("Token"):
        return f.by(("authenticate_travel", "There is no valid token: authenticate_travel gives "
                     "one for the credentials of the user."),
                    otherwise=f"There is no valid token and no tool to get one: {TELL}.")
    returned = f.by(("authenticate_travel", "what authenticate_travel returned last, or "),
                    otherwise="")
    return f"access_token must be {returned}what the user gave."


def _card(f: Failed) -> str:
    numbers = [str(c.get("card_number")) for c in f.state.credit_card_list.values()
               if isinstance(c, dict)]
    is_number = f.text("card_id") in numbers
    what = ("That is the number of a card, card_id is the id it is registered under: "
            if is_number else "This card_id is not registered: ")
    return what + f.by(
        ("get_all_credit_cards", "get_all_credit_cards shows the ids."),
        ("register_credit_card", "register_credit_card gives a new one."),
        otherwise="ask the user for it.")


def _known_card(f: Failed) -> str:
    return "The card is registered: " + f.by(
        ("get_all_credit_cards", "get_all_credit_cards shows its id."), otherwise=f"{TELL}.")


def _balance(f: Failed) -> str:
    """The balance of the card of this call, " of $9.00", where a tool would show it."""
    card = f.state.credit_card_list.get(f.text("card_id"), {})
    shown = not f.visible.isdisjoint(("get_credit_card_balance", "get_all_credit_cards"))
    amount = card.get("balance")
    return f" of ${amount:.2f}" if shown and isinstance(amount, (int, float)) else ""


def _no_balance(f: Failed) -> str:
    return "This card has no balance on record: " + f.by(
        ("get_all_credit_cards", "get_all_credit_cards shows the others."), otherwise=f"{TELL}.")


def _funds(f: Failed) -> str:
    key = "|".join(f.text(a) for a in ("travel_from", "travel_to", "travel_class", "travel_date"))
    cost = f.state._flight_cost_lookup.get(key, {}).get("cost")
    price = f" of ${cost:.2f}" if cost and "get_flight_cost" in f.visible else ""
    return (f"The card's balance{_balance(f)} is below the price{price}: "
            f"use another card or class, or {TELL}.")


def _limit(f: Failed) -> str:
    return (f"The card's balance{_balance(f)} must not be below the budget limit: use another "
            f"card, or {f.by(('set_budget_limit', 'ask to lower it with set_budget_limit'))}.")


def _over_budget(f: Failed) -> str:
    return ("insurance_cost is above the budget limit: " + f.by(
        ("set_budget_limit", "set_budget_limit can raise it if the user agrees."),
        otherwise=f"{TELL}."))


# ------------------------------------------------------------------------------- flights


@functools.cache
def _routes() -> dict[str, tuple[str, ...]]:
    """Departing airport -> the airports it flies to, as get_flight_cost of a blank state says."""
    blank = tool_class("TravelAPI")()
    blank._load_scenario({})
    codes = blank.list_all_airports()

    def flies(a: str, b: str) -> bool:
        try:
            return bool(blank.get_flight_cost(a, b, "2024-01-01", CLASSES[0]))
        except ValueError:
            return False
    return {a: tuple(b for b in codes if flies(a, b)) for a in codes}


def _airport(f: Failed, place: str) -> str:
    """What is wrong with an airport code, or ""."""
    codes = f.state.list_all_airports()
    if place in codes:
        return ""
    if f.state.get_nearest_airport_by_city(place)["nearest_airport"] != "Unknown":
        return f"{place!r} is a city, an airport code is needed: " + f.by(
            ("get_nearest_airport_by_city",
             f"get_nearest_airport_by_city(location={place!r}) gives it."),
            ("list_all_airports", "list_all_airports shows the codes."),
            otherwise="ask the user for it.")
    known = f.by(("list_all_airports", f" Known codes: {', '.join(codes)}."),
                 ("get_nearest_airport_by_city",
                  " get_nearest_airport_by_city gives the code of a city."), otherwise="")
    near = [c for c in closest(place, codes) if "list_all_airports" in f.visible]
    return f"{place!r} is no airport code" + (f", {near[0]} is one." if near else ".") + known


def _departure(f: Failed) -> str:
    return _airport(f, f.text("travel_from"))


def _arrival(f: Failed) -> str:
    return _airport(f, f.text("travel_to"))


def _route(f: Failed) -> str:
    wrong = _departure(f) or _arrival(f)
    if wrong:
        return wrong
    a, b = f.text("travel_from"), f.text("travel_to")
    if a == b:
        return "travel_from and travel_to are the same airport."
    none = f"No flight goes from {a} to {b}"
    if "get_flight_cost" not in f.visible:
        return f"{none}: {TELL}."
    stop = next((c for c in _routes()[a] if b in _routes()[c]), None)
    if a in _routes()[b]:
        return f"{none}, only from {b} to {a}: is the direction right?"
    if stop:
        return f"{none}, but {a} to {stop} and {stop} to {b} do: ask the user."
    return f"{none}; from {a} flights go to {', '.join(_routes()[a]) or 'nowhere'}."


def _class(f: Failed) -> str:
    near = closest(f.text("travel_class"), CLASSES)
    meant = f", here perhaps {near[0]!r}" if near else ""
    return f"travel_class is economy, business or first{meant}."


def _date(f: Failed) -> str:
    return "Write travel_date as YYYY-MM-DD, for example 2024-03-09."


# -------------------------------------------------------------------------- bookings, money


def _booking(f: Failed) -> str:
    given = f.text("booking_id")
    records = [r for r in f.state.booking_record.values() if isinstance(r, dict)]
    if given and any(r.get("transaction_id") == given for r in records):
        what = "That is a transaction_id, not a booking_id"
    elif not given:
        what = "A booking_id is needed"
    else:
        what = "There is no booking of this id now"
    return f"{what}: " + f.by(
        ("get_booking_history", "get_booking_history shows those there are."),
        ("book_flight", "book_flight returns that of a new one."),
        otherwise="ask the user for it.")


def _rates(f: Failed) -> str:
    for argument in ("base_currency", "target_currency"):
        given = f.text(argument)
        if given not in CURRENCIES:
            near = closest(given, CURRENCIES)
            meant = f" {given!r} may be {near[0]}." if near else ""
            return f"{argument} is one of {', '.join(CURRENCIES)}.{meant}"
    a, b = f.text("base_currency"), f.text("target_currency")
    if a == b:
        return "Both currencies are the same: no conversion is needed."
    return f"Rates exist from and to USD only: convert {a} to USD, then USD to {b}."


def _record(f: Failed) -> str:
    """A KeyError of cancel_booking: the booking names no card, or one that is not known."""
    if f.name != "cancel_booking":
        return ""
    return "The card of this booking is not on record, so it cannot be cancelled here: " + f.by(
        ("contact_customer_support", "contact_customer_support may help."), otherwise=f"{TELL}.")


_RULES: tuple[tuple[tuple[str, ...], Callable[[Failed], str]], ...] = (
    (("Token not initialized", "Token expired", "Invalid access token"), _token),
    (("Card already registered",), _known_card),
    (("Card not registered", "Credit card not registered"), _card),
    (("Balance not found",), _no_balance),
    (("Insufficient funds",), _funds),
    (("Balance is less than budget limit",), _limit),
    (("Exceeded budget limit",), _over_budget),
    (("Invalid departure airport code",), _departure),
    (("Invalid destination airport code",), _arrival),
    (("No available route",), _route),
    (("Invalid travel class",), _class),
    (("Invalid date format",), _date),
    (("Booking not found",), _booking),
    (("No available exchange rate",), _rates),
    (("'",), _record),
)
