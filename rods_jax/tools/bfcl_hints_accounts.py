"""Hints for the classes with a login: MessageAPI, TwitterAPI, TicketAPI, TradingBot.

What another account holds is never said: names only where list_users shows them, ids of the
user's own tickets alone.
"""

from __future__ import annotations

from typing import Any

from rods_jax.tools.bfcl_hints_case import TELL, Failed, listed
from rods_jax.tools.hints import closest

FIELDS = ("title", "description", "status", "priority")  # that edit_ticket takes
_NO_LOGIN = f"No tool to log in is at hand now: {TELL}."


def _login(f: Failed, tool: str, needs: str) -> str:
    return f.by((tool, f"Log in first: {tool} with {needs}."), otherwise=_NO_LOGIN)


# ------------------------------------------------------------------------------ MessageAPI


def message_hint(f: Failed) -> str:
    if f.says("No user is currently logged in"):
        return _login(f, "message_login", "the id of the user")
    if f.says("User name '") and f.name == "add_contact":
        return "This contact exists already: " + f.by(
            ("get_user_id", "get_user_id gives its id."), otherwise="use it.")
    if f.says("User ID '") and f.name == "add_contact":
        taken = f"USR{f.state.user_count + 1:03d}" in f.state.user_map.values()
        return "" if taken else "The next id is free: call add_contact again."
    if f.says("User '"):
        return _user(f, f.text("user"))
    if f.says("Receiver ID") and f.name == "delete_message":
        return "Nothing was sent to this id: " + f.by(
            ("view_messages_sent", "view_messages_sent shows who got messages."),
            ("get_user_id", "get_user_id gives the id of a name."), otherwise=f"{TELL}.")
    return _receiver(f, f.text("receiver_id")) if f.says("Receiver ID") else ""


def _user(f: Failed, name: str) -> str:
    if name in f.state.user_map.values():
        return f"{name!r} is a user id already: it can be used as it is."
    if "list_users" not in f.visible:
        return "There is no user of this name: ask for the right name, or " + f.by(
            ("add_contact", "add_contact makes it a contact."))
    names = [str(n) for n in f.state.user_map]
    near = closest(name, names)
    return f"The nearest name is {near[0]!r}." if near else f"The users are {listed(names)}."


def _receiver(f: Failed, given: str) -> str:
    what = "receiver_id is a user id"
    if given in f.state.user_map:
        what = f"{given!r} is a name, {what}"
    return f"{what}: " + f.by(
        ("get_user_id", "get_user_id gives it for a name."),
        ("add_contact", "add_contact gives one to a new contact."), otherwise="ask for it.")


# ------------------------------------------------------------------------------ TwitterAPI


def twitter_hint(f: Failed) -> str:
    if f.says("User not authenticated"):
        return _login(f, "authenticate_twitter", "the user's name and password")
    if f.says("Tweet with ID"):
        return "No tweet has this id: " + f.by(
            ("get_user_tweets", "get_user_tweets shows the tweets of a user with their ids."),
            ("search_tweets", "search_tweets finds tweets by a word, with their ids."),
            ("post_tweet", "post_tweet returns the id of a new one."),
            otherwise="ask the user for it.")
    return ""


# ------------------------------------------------------------------------------- TicketAPI


def ticket_hint(f: Failed) -> str:
    if f.says("User not authenticated"):
        return _login(f, "ticket_login", "username and password of the user")
    if f.says("Invalid priority"):
        return "priority is a whole number from 1 to 5, 5 the most urgent."
    if f.says("Invalid fields"):
        return _fields(f)
    if f.says("Ticket with ID") and f.error.endswith("not found."):
        return _ticket(f)
    if f.says("Ticket with ID"):  # closed, resolved
        return "Nothing is left to do for this ticket: go on without this call."
    if f.says("'id'"):
        return f"A stored ticket has no id, so tickets cannot be found by id now: {TELL}."
    return ""


def _fields(f: Failed) -> str:
    updates = f.args.get("updates")
    wrong = sorted(str(k) for k in updates if k not in FIELDS) if isinstance(updates, dict) else []
    near = closest(wrong[0], FIELDS) if wrong else []
    meant = f", {wrong[0]!r} may be {near[0]!r}" if near else ""
    extra = ""
    if "resolution" in wrong:
        extra = f.by(("resolve_ticket", " resolve_ticket takes a resolution."), otherwise="")
    return f"updates takes {', '.join(FIELDS)}{meant}.{extra}"


def _ticket(f: Failed) -> str:
    state, given = f.state, f.args.get("ticket_id")
    if isinstance(given, str) and not any(
            isinstance(t, dict) and isinstance(t.get("id"), str) for t in state.ticket_queue):
        return "ticket_id is a whole number, written without quotes."
    if "get_user_tickets" not in f.visible:
        return "No ticket has this id: " + f.by(
            ("create_ticket", "create_ticket returns the id of a new one."),
            otherwise="ask the user for it.")
    if not state.current_user:
        return "No ticket has this id: after a login get_user_tickets shows the user's tickets."
    own = [t.get("id") for t in state.ticket_queue
           if isinstance(t, dict) and t.get("created_by") == state.current_user]
    return f"No ticket has this id; ids of the user's own tickets: {listed(own)}."


# ------------------------------------------------------------------------------ TradingBot


def trading_hint(f: Failed) -> str:
    state = f.state
    if f.says("User not authenticated"):
        return _login(f, "trading_login", "username and password of the user")
    if f.says("Stock with symbol", "Invalid stock symbol"):
        return _symbol(f, f.text("symbol"))
    if f.says("Stock "):
        return ("Only a stock of the watchlist can be removed"
                + f.by(("get_watchlist", f": {listed(state.watch_list)}"), otherwise="") + ".")
    if f.says("Order with ID"):
        return "No order has this id: " + f.by(
            ("get_order_history", "get_order_history shows the ids."),
            ("place_order", "place_order returns the id of a new one."),
            otherwise="ask the user for it.")
    if f.says("Can't cancel order"):
        return f"A completed order stays as it is: {TELL}."
    if f.says("Price and amount", "Transaction amount", "Funding amount"):
        low = [n for n in ("price", "amount")
               if isinstance(f.args.get(n), (int, float)) and f.args[n] <= 0]
        return f"Give {' and '.join(low) or 'an amount'} above 0."
    if f.says("Insufficient funds"):
        return _funds(f)
    if f.says("Market is closed"):
        return f"Funds can be withdrawn only while the market is open: {TELL}."
    if f.says("time data", "unconverted data"):
        return "Write dates as YYYY-MM-DD, for example 2024-03-09."
    return ""


def _symbol(f: Failed, given: str) -> str:
    by_name = f.state.get_symbol_by_name(given)["symbol"]
    if by_name in f.state.stocks:
        return f"{given!r} is a company, its symbol is needed: " + f.by(
            ("get_symbol_by_name", "get_symbol_by_name gives it."), otherwise="ask for it.")
    near = closest(given, map(str, f.state.stocks))
    if near and not f.visible.isdisjoint(("get_available_stocks", "get_stock_info")):
        return f"The nearest symbol is {near[0]!r}."
    return "No stock has this symbol: " + f.by(
        ("get_symbol_by_name", "get_symbol_by_name gives the symbol of a company."),
        ("get_available_stocks", "get_available_stocks shows the symbols of a sector."),
        otherwise=f"{TELL}.")


def _funds(f: Failed) -> str:
    balance = f.state.account_info.get("balance", 0)
    more = f.by(("fund_account", ", or fund_account adds money if the user agrees"), otherwise="")
    if f.name == "place_order":  # the error itself says what there is
        return f"At most {_shares(balance, f.args.get('price'))} shares can be paid for{more}."
    shown = f" of ${balance:.2f}" if "get_account_info" in f.visible else ""
    return f"The amount must not exceed the balance{shown}{more}."


def _shares(balance: Any, price: Any) -> int:
    return int(max(balance, 0) // price)
