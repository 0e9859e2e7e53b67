"""Stage V for BFCL: a base task as a task that withholds a function, withholds a value, or
answers at length. None where the story does not lend itself."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Sequence

from rods_jax.tools.bfcl_entities import strings_of
from rods_jax.tools.bfcl_sandbox import replay
from rods_jax.tools.bfcl_plan import distinctive, leaves, parse_result
from rods_jax.tools.bfcl_swaps import NUMBER, mentions, scalars, token_value
from rods_jax.types import Category, Json, Task, Turn

# Functions an agent gets around without: other tools show the same.
_REPLACEABLE = frozenset({
    "ls", "find", "pwd", "cat", "tail", "sort", "grep", "wc", "displayCarStatus",
    "get_booking_history", "get_order_history", "list_users", "view_messages_sent",
})


def _as(task: Task, category: Category, turns: Sequence[Turn]) -> Task:
    return dataclasses.replace(task, uid=f"{task.uid}-{category.value}", category=category,
                               turns=tuple(turns))


def _miss_func(task: Task, rng: random.Random) -> Task | None:
    """One function is hidden until after the turn that first needs it; that turn's gold moves
    to a new turn which says nothing and brings the function."""
    options, used = [], set()
    for t, turn in enumerate(task.turns):
        fresh = {call.name for call in turn.gold} - used - _REPLACEABLE
        options += [(t, name) for name in sorted(fresh)]
        used |= {call.name for call in turn.gold}
    if not options:
        return None
    at, name = rng.choice(options)
    turns = []
    for t, turn in enumerate(task.turns):
        hidden = tuple(tool for tool in turn.tools if tool != name)
        if t < at:
            turns.append(dataclasses.replace(turn, tools=hidden))
        elif t == at:
            turns.append(Turn(turn.user, (), hidden))
            turns.append(Turn("", turn.gold, turn.tools))
        else:
            turns.append(turn)
    return _as(task, Category.MISS_FUNC, turns)


_CLASS = ""  # a travel class is left out, not made vague
# Argument -> (what stands for it in the request, how the user supplies it).
_VAGUE = {
    "file_name": ("a certain file", "The file I mean is '{}'."),
    "dir_name": ("a certain directory", "The directory is '{}'."),
    "folder": ("a certain folder", "The folder I mean is '{}'."),
    "destination": ("a certain name", "The name is '{}'."),
    "content": ("something", "The exact text is '{}'."),
    "message": ("something", "The exact message is '{}'."),
    "comment_content": ("something", "The exact comment is '{}'."),
    "pattern": ("a certain word", "The word is '{}'."),
    "symbol": ("a certain stock", "The stock is {}."),
    "stock": ("a certain stock", "The stock is {}."),
    "title": ("some title", "The title is '{}'."),
    "description": ("some description", "The description is '{}'."),
    "resolution": ("some resolution", "The resolution is '{}'."),
    "amount": ("some", "The amount is {}."),
    "fuelAmount": ("some", "The amount is {}."),
    "liter": ("some", "It is {} liters."),
    "gallon": ("some", "It is {} gallons."),
    "budget_limit": ("a certain amount", "The amount is {}."),
    "insurance_cost": ("a certain amount", "The cost is {}."),
    "card_id": ("one of my cards", "The card is '{}'."),
    "travel_date": ("some day", "The date is {}."),
    "travel_class": (_CLASS, "The class is {}."),
    "location": ("a certain city", "The city is {}."),
    "city": ("a certain city", "The city is {}."),
    "value": ("some", "The value is {}."),
    "distance": ("some distance", "The distance is {}."),
    "temperature": ("a certain temperature", "The temperature is {}."),
    "speed": ("a certain speed", "The speed is {}."),
    "priority": ("some level", "The level is {}."),
    "precision": ("some", "The number is {}."),
    "base": ("some", "The base is {}."),
    "passport_number": ("my passport number", "The number is '{}'."),
    "user_name": ("a certain person", "The person is {}."),
    "username_to_follow": ("a certain user", "The user is '{}'."),
}


# Before a name or a wording: the whole clause goes, "a file named 'a.txt'" becomes "a file".
_CLAUSE = re.compile(
    r",? ?(?:\b(?:and )?(?:(?:which|that) (?:is|should be|will be) )?(?:named|called|titled"
    r"|that (?:says|states|reads)|entitled|labeled|labelled|saying|stating|expressing|reading|as"
    r"|(?:and )?(?:name|call|title) it"
    r"|with (?:the|a) (?:name|title|content|text|message|caption)(?: of)?))[:,]? ?$", re.IGNORECASE)
_SUBJECT = re.compile(
    r"\b(?:name|title|content|text|message|date|class)\b[^.,;]*\b(?:is|be)\b[:,]? ?$"
    r"|\b(?:or|and|like|that|date|day|base|around|about|exactly|of)[:,]? ?$",
    re.IGNORECASE)  # a sentence about the value alone, a list of values, a measure
_NOUN_FOLLOWS = re.compile(r" (?!(?:for|in|to|of|on|and|or|with|from|into|as|at|by|before|after"
                           r"|while|so|using|during|if|then|that|which|is|per|right)\b)[A-Za-z]")


def _blurred(text: str, value: Json, vague: str) -> str | None:
    """The text with its only mention of a value made vague, or without it; None where there is
    not one, or where the rest would read like a value."""
    if isinstance(value, str):
        body = re.escape(value)
        found = list(re.finditer(
            rf"[\"'`‘“](?:{body})[\"'`’”]|(?<![A-Za-z0-9_])(?:{body})(?![A-Za-z0-9_])",
            text))
    else:
        found = [m for m in NUMBER.finditer(text) if token_value(m) == float(value)]
    if len(found) != 1:
        return None
    before, after = text[:found[0].start()], text[found[0].end():]
    if _SUBJECT.search(before) or re.match(" or |-", after):
        return None
    clause = _CLAUSE.search(before) or vague == "something" and (
        re.search(r"(?:(?<=message)|(?<=comment))[:,]? ?$|: ?$", before))
    if clause and isinstance(value, str):
        return before[:clause.start()] + after
    if vague == _CLASS:
        return _without_class(before, after)
    measured = vague.endswith((" amount", " level", "distance", "temperature", "speed"))
    if (measured or vague == "some") and (vague == "some") != bool(_NOUN_FOLLOWS.match(after)):
        return None  # "a certain amount coverage", "to the base some"
    # "the file 'a.txt'" must not become "the file a certain file".
    head = vague.split()[-1]
    before = re.sub(rf"(?:\b(?:the|a|an|my|our) )?(?:\b(?:new )?{head}s? )?$", "", before,
                    flags=re.IGNORECASE)
    after = re.sub(rf"^ {head}\b", "", after, flags=re.IGNORECASE)
    if before and not before.endswith((" ", "\n", "(")):
        before += " "
    return before + vague + (" " if after[:1].isalnum() else "") + after


def _without_class(before: str, after: str) -> str:
    """Without a travel class: "an economy class ticket" becomes "a ticket", "fly in business
    class" becomes "fly"."""
    after = re.sub(r"^[ -]class\b", "", after, flags=re.IGNORECASE)
    if re.match(r" (?:ticket|seat|flight|trip|fare|booking|travel)s?\b", after):
        before = re.sub(r"\b([Aa])n $", r"\1 ", before)
        return before.rstrip() + after
    return re.sub(r",?(?: (?:in|by|via|for|as|with|on))?(?: (?:the|an?))? ?$", "", before) + after


def _known_before(task: Task, turn: int, outputs: Sequence[Json], value: Json) -> bool:
    """Whether an agent could find the value without being told in this turn."""
    if any(mentions(t.user, value) for i, t in enumerate(task.turns) if i != turn):
        return True
    if isinstance(value, str):
        hidden = [*strings_of(task.initial_config), *strings_of(outputs)]
        return any(value in text for text in hidden)
    return any(leaf == value for leaf in scalars([outputs, dict(task.initial_config)]))


def _miss_param(task: Task, rng: random.Random) -> Task | None:
    """One dictated value is left out of a request, and given in a turn of its own."""
    results = [parse_result(r.text) for r in replay(task)]
    options, flat = [], 0
    for t, turn in enumerate(task.turns):
        earlier, flat = results[:flat], flat + len(turn.gold)
        for call in turn.gold:
            for name, value in call.arguments.items():
                if name not in _VAGUE or isinstance(value, (bool, list, dict)) or value is None:
                    continue
                vague, supply = _VAGUE[name]
                if call.name == "set_navigation":
                    vague, supply = "a certain place", "The place is '{}'."
                text = _blurred(turn.user, value, vague)
                if text is not None and not _known_before(task, t, earlier, value):
                    options.append((t, text, supply.format(value)))
    if not options:
        return None
    at, text, supply = rng.choice(options)
    turn = task.turns[at]
    split = (Turn(text, (), turn.tools), Turn(supply, turn.gold, turn.tools))
    return _as(task, Category.MISS_PARAM, (*task.turns[:at], *split, *task.turns[at + 1:]))


def _long_context(task: Task) -> Task | None:
    """The same calls against the classes' inflated states. None where a call fails there or
    an argument was read off an output that no longer holds it."""
    long = _as(task, Category.LONG_CONTEXT, task.turns)
    before, after = replay(task), replay(long)
    if any(a.ok != b.ok for a, b in zip(before, after, strict=True)):
        return None
    flat = 0
    for t, turn in enumerate(task.turns):
        said = "\n".join(u.user for u in task.turns[:t + 1])
        for call in turn.gold:
            for value in scalars(call.arguments):
                if not distinctive(value) or mentions(said, value):
                    continue
                shown = [any(leaf == value for r in side[:flat]
                             for _, leaf in leaves(parse_result(r.text)))
                         for side in (before, after)]
                if shown[0] and not shown[1]:
                    return None
            flat += 1
    return long


def augment(task: Task, category: Category, rng: random.Random) -> Task | None:
    """`task` must be in BASE form; its uid gains the category as a suffix."""
    if task.category is not Category.BASE:
        raise ValueError(f"task {task.uid} is already {task.category.value}, augment a base task")
    if category is Category.MISS_FUNC:
        return _miss_func(task, rng)
    if category is Category.MISS_PARAM:
        return _miss_param(task, rng)
    if category is Category.LONG_CONTEXT:
        return _long_context(task)
    return task
