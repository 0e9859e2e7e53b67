"""Other functions where the graph allows: one request of a task becomes another of its shape.

A turn with a single call may ask for another function of the same group, whose arguments are
of the same kinds: count the lines of a file instead of printing it, cancel an order instead of
looking it up. The turn is then said anew from clauses; a value that the old text did not say
is pointed at ("that order"). Nothing later may depend on what changed: the results of all
later calls stay the same, no later text leans on the turn or speaks of what the old or the new
function does, and the new call is made nowhere else in the task: an agent that has its answer
already would have no reason to call.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Sequence

from rods_jax.tools.bfcl_sandbox import Sandbox
from rods_jax.tools.bfcl_swaps import mentions, scalars
from rods_jax.types import Json, Task, ToolCall, Turn


@dataclasses.dataclass(frozen=True)
class Doing:
    """A function, its arguments in the order of its group's things, and clauses for it."""

    name: str
    arguments: tuple[str, ...]
    clauses: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Group:
    """Functions that can stand for each other. `things`: how each argument is called when its
    value is said, and when it is pointed at."""

    things: tuple[tuple[str, tuple[str, ...]], ...]
    doings: tuple[Doing, ...]


def _group(things: Sequence[tuple[str, tuple[str, ...]]], **clauses: str) -> Group:
    """`name=` "argument,argument: clause | clause"."""
    doings = []
    for name, row in clauses.items():
        arguments, _, said = row.partition(":")
        doings.append(Doing(name, tuple(a.strip() for a in arguments.split(",") if a.strip()),
                            tuple(clause.strip() for clause in said.split("|"))))
    return Group(tuple(things), tuple(doings))


_FILE = ("'{}'", ("that file", "the same file"))
_ORDER = ("order {}", ("that order", "the same order"))
_TOKEN = ("access token '{}'", ("my access token", "the access token I gave"))
_BOOKING = ("booking '{}'", ("that booking", "the booking in question"))

GROUPS: tuple[Group, ...] = (
    _group([_FILE],
           cat="file_name: show me what {0} holds | print the contents of {0}",
           sort="file_name: sort the lines of {0} | put the lines of {0} into alphabetical order",
           wc="file_name: count the lines of {0} | tell me how many lines {0} has",
           tail="file_name: show me how {0} ends | print the last part of {0}",
           rm="file_name: delete {0} | get rid of {0}"),
    _group([],
           pwd=": tell me which directory we are in | give me the path of the current directory",
           ls=": list what lies in the current directory | show me the names of all entries here"),
    _group([("{}", ("those numbers", "the same numbers"))],
           mean="numbers: work out the mean of {0} | average {0}",
           standard_deviation="numbers: work out the standard deviation of {0}"
                              " | tell me how far {0} spread, as a standard deviation",
           max_value="numbers: find the largest of {0} | tell me the maximum of {0}",
           min_value="numbers: find the smallest of {0} | tell me the minimum of {0}",
           sum_values="numbers: add up {0} | work out the sum of {0}"),
    _group([],
           get_account_info=": show me the details of my trading account"
                            " | look up my trading account's balance and card",
           get_watchlist=": show me what is on my watchlist | list the stocks that I watch",
           get_order_history=": list all the orders that I have placed | show me my order history",
           get_current_time=": tell me what time it is | look up the current time",
           trading_get_login_status=": tell me whether I am logged in to the trading system"
                                    " | check if the trading system has me signed in",
           trading_logout=": log me out of the trading system | sign me off from trading"),
    _group([_ORDER],
           get_order_details="order_id: give me the details of {0} | look up {0}",
           cancel_order="order_id: cancel {0} | call off {0}"),
    _group([("{} stock", ("that stock", "the same stock"))],
           get_stock_info="symbol: give me the price and the other data of {0}"
                          " | look up the current details of {0}",
           add_to_watchlist="stock: put {0} on my watchlist | add {0} to the stocks I watch",
           remove_stock_from_watchlist="symbol: take {0} off my watchlist"
                                       " | remove {0} from the stocks I watch"),
    _group([("{}", ("that amount", "the same amount"))],
           fund_account="amount: pay {0} into my trading account | deposit {0} for trading",
           withdraw_funds="amount: withdraw {0} from my trading account"
                          " | take {0} out of my trading funds"),
    _group([],
           check_tire_pressure=": check the pressure of the tires | tell me how the tires are",
           find_nearest_tire_shop=": find the nearest tire shop | tell me where the closest tire"
                                  " shop is",
           get_current_speed=": tell me how fast the car goes right now | read off the current"
                             " speed",
           get_outside_temperature_from_google=": ask Google how warm it is outside"
                                               " | get the outside temperature by way of Google",
           get_outside_temperature_from_weather_com=": ask weather.com how warm it is outside"
                                                    " | get the outside temperature from"
                                                    " weather.com"),
    _group([("{}", ("that amount", "the same amount"))],
           liter_to_gallon="liter: convert {0} liters to gallons | tell me how many gallons {0}"
                           " liters are",
           gallon_to_liter="gallon: convert {0} gallons to liters | tell me how many liters {0}"
                           " gallons are"),
    _group([_TOKEN, _BOOKING],
           retrieve_invoice="access_token, booking_id: use {0} to fetch the invoice of {1}"
                            " | get me the invoice of {1}, with {0}",
           cancel_booking="access_token, booking_id: use {0} to cancel {1} | cancel {1}, with {0}"),
    _group([],
           view_messages_sent=": show me all the messages I have sent | list what I have sent so"
                              " far",
           get_message_stats=": give me the statistics of my messages | sum up my messaging"
                             " activity",
           list_users=": list everyone in the workspace | show me who is in the workspace"),
    _group([("post {}", ("that post", "the same post"))],
           retweet="tweet_id: retweet {0} | share {0} again with my followers",
           get_tweet="tweet_id: show me {0} | look up {0}",
           get_tweet_comments="tweet_id: show me the comments on {0} | list what people replied"
                              " to {0}"),
    _group([("ticket {}", ("that ticket", "the same ticket"))],
           get_ticket="ticket_id: show me {0} | look up the details of {0}",
           close_ticket="ticket_id: close {0} | mark {0} as closed"),
)
_FRAMES = ("Please {}.", "Could you {}?", "Now {}, please.", "I would like you to {}.", "Can you {}?",
           "Next, {}.", "Would you {}?")
# A later text that leans on the turn, so that the turn must stay as it is.
_LEANS = re.compile(r"\b(it|its|that|those|these|this|them|they|such|same|result|results|above|based"
                    r"|value|values|figure|output|now that|previous|latter|former)\b", re.IGNORECASE)

# How a later text, or what it dictates, speaks of a call: beginnings of words.
_SPEAKS = {
    "cat": "contents?|read", "sort": "sort|alphabet|arrang", "wc": "count|lines|words",
    "tail": "last line|the end|ending", "rm": "delet|remov|rid of", "pwd": "directory|folder",
    "ls": "list|files|content", "mean": "mean|average", "standard_deviation": "deviation|spread",
    "max_value": "maxim|largest|highest", "min_value": "minim|smallest|lowest",
    "sum_values": "sum|total", "get_account_info": "account|balance",
    "get_watchlist": "watchlist|watch list", "get_order_history": "history|orders",
    "get_current_time": "current time|what time|the time",
    "trading_get_login_status": "log(?:ged|ging)|sign(?:ed|ing)",
    "trading_logout": "log(?:ged|ging)|sign(?:ed|ing)",
    "get_order_details": "details of|status", "cancel_order": "cancel|call off|rescind",
    "get_stock_info": "price|performance|stock's", "add_to_watchlist": "watchlist|watch",
    "remove_stock_from_watchlist": "watchlist|watch|remov", "fund_account": "funds|deposit|balance",
    "withdraw_funds": "withdr|funds|balance", "check_tire_pressure": "tire|pressure",
    "find_nearest_tire_shop": "shop|tire", "get_current_speed": "speed|fast",
    "get_outside_temperature_from_google": "temperature|warm|cold|weather",
    "get_outside_temperature_from_weather_com": "temperature|warm|cold|weather",
    "liter_to_gallon": "gallon|liter", "gallon_to_liter": "gallon|liter",
    "retrieve_invoice": "invoice|bill", "cancel_booking": "cancel|refund",
    "view_messages_sent": "sent|messages", "get_message_stats": "statistic|stats|activity",
    "list_users": "users|everyone|contacts", "retweet": "retweet|shar", "get_tweet": "tweet|post",
    "get_tweet_comments": "comment|repl", "get_ticket": "ticket",
    "close_ticket": "closed|closing|resolv",
}


def _spoken_of(task: Task, t: int, *doings: Doing) -> bool:
    """Whether a later text, or what a later call dictates, speaks of what the functions do."""
    later = [turn.user for turn in task.turns[t + 1:]]
    later += [leaf for turn in task.turns[t + 1:] for call in turn.gold
              for leaf in scalars(call.arguments) if isinstance(leaf, str)]
    stems = "|".join(_SPEAKS[doing.name] for doing in doings)
    return re.search(rf"\b(?:{stems})", "\n".join(later), re.IGNORECASE) is not None


def with_other_functions(task: Task, outputs: Sequence[Json], rng: random.Random) -> Task | None:
    """The task, in BASE form, with one request changed; None where nothing can change.
    `outputs`: results of its gold calls, by flat index."""
    options = [(t, group, old, new) for t, turn in enumerate(task.turns) if len(turn.gold) == 1
               for group in GROUPS for old in group.doings
               if old.name == turn.gold[0].name
               and set(old.arguments) == set(turn.gold[0].arguments)
               for new in group.doings if new is not old and new.name in turn.tools]
    rng.shuffle(options)
    for t, group, old, new in options:
        if t + 1 < len(task.turns) and _LEANS.search(task.turns[t + 1].user):
            continue
        call = task.turns[t].gold[0]
        values = [call.arguments[name] for name in old.arguments]
        other = ToolCall(new.name, dict(zip(new.arguments, values)))
        if _spoken_of(task, t, old, new) or any(other == made for turn in task.turns
                                                for made in turn.gold):
            continue
        text = _text(task, t, outputs, group, new, values, rng)
        changed = None if text is None else _changed(task, t, other, text)
        if changed is not None and _still_holds(task, changed, t, outputs):
            return changed
    return None


def _changed(task: Task, t: int, call: ToolCall, text: str) -> Task:
    turn = Turn(text, (call,), task.turns[t].tools)
    return dataclasses.replace(task, turns=(*task.turns[:t], turn, *task.turns[t + 1:]))


def _text(task: Task, t: int, outputs: Sequence[Json], group: Group, doing: Doing,
          values: Sequence[Json], rng: random.Random) -> str | None:
    """None where some value is neither said in the turn nor what words can point at."""
    things = []
    for i, (value, (said, pointers)) in enumerate(zip(values, group.things)):
        parts = scalars(value)
        if parts and all(mentions(task.turns[t].user, part) for part in parts):
            things.append(said.format(_spoken(value)))
        elif _singled_out(task, t, outputs, value, {d.arguments[i] for d in group.doings}):
            things.append(rng.choice(pointers))
        else:
            return None
    return rng.choice(_FRAMES).format(rng.choice(doing.clauses).format(*things))


def _singled_out(task: Task, t: int, outputs: Sequence[Json], value: Json,
                 arguments: set[str]) -> bool:
    """Whether the value is what the dialogue last dealt with of its kind: the latest that was
    given as one of the arguments, or returned under such a name."""
    latest: Json = None
    calls = [call for turn in task.turns[:t] for call in turn.gold]
    for call, output in zip(calls, outputs):
        for holder in (call.arguments, output if isinstance(output, dict) else {}):
            for name in sorted(arguments & set(holder)):
                latest = holder[name]
    return latest is not None and str(latest) == str(value)


def _spoken(value: Json) -> str:
    if isinstance(value, (list, tuple)):
        spoken = [_spoken(item) for item in value]
        return " and ".join([", ".join(spoken[:-1]), spoken[-1]]) if len(spoken) > 1 else spoken[0]
    return f"{value:g}" if isinstance(value, float) and abs(value) < 1e6 else str(value)


def _still_holds(task: Task, changed: Task, t: int, outputs: Sequence[Json]) -> bool:
    """The other call works, all later results are the same, and no later call needs what only
    the old text or the old result told."""
    at = sum(len(turn.gold) for turn in task.turns[:t])
    sandbox = Sandbox(changed.domains, changed.initial_config, False)
    fresh = []
    for turn in changed.turns:
        for call in turn.gold:
            result = sandbox.call(call)
            if not result.ok:
                return False
            fresh.append(result.text)
    if [_value(text) for text in fresh[at + 1:]] != list(outputs[at + 1:]):
        return False
    later = [v for turn in task.turns[t + 1:] for call in turn.gold
             for v in scalars(call.arguments)]
    old_text, new_text = task.turns[t].user, changed.turns[t].user
    told = json.dumps(outputs[at])
    return not any((mentions(old_text, v) and not mentions(new_text, v)) or mentions(told, v)
                   for v in later)


def _value(text: str) -> Json:
    try:
        return json.loads(text)
    except ValueError:
        return None
