"""How a turn is scored. One implementation, two modes.

OFFICIAL  what BFCL's checker does turn by turn: states compare with `==`, result texts as
          texts, a turn without gold calls always passes. A task is officially solved iff
          every turn passes.
TRAIN     the reward of training: 65 equals 65.0, true differs from 1, and what passes a turn
          without gold calls is a decision of the config (EmptyTurn).

A turn with gold calls passes iff the agent's state equals the one that the gold calls made, and
this turn's gold results are a sub-multiset of all results the agent has seen so far (paper
section 3, R_P: state_ok and exec_ok). BFCL's checker also wants at least one call in it.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rods_jax.types import Json


class Mode(str, enum.Enum):
    TRAIN = "train"
    OFFICIAL = "official"


class EmptyTurn(str, enum.Enum):
    """What passes a turn whose gold is empty, in TRAIN mode."""

    ANSWER = "answer"  # no call was made and something was said
    SILENCE = "silence"  # no call was made; saying nothing passes too
    STATE = "state"  # calls may be made as long as the state stays the gold's
    ANY = "any"  # everything, as in OFFICIAL


@dataclasses.dataclass(frozen=True)
class Scoring:
    """`needs_call`: a turn with gold calls passes only if some call was made in it, even where
    earlier turns showed every result; always so in OFFICIAL."""

    mode: Mode = Mode.TRAIN
    empty_turn: EmptyTurn = EmptyTurn.ANSWER
    needs_call: bool = True

    def __post_init__(self):
        if self.mode is Mode.OFFICIAL and self.empty_turn is not EmptyTurn.ANSWER:
            raise ValueError("empty_turn is a choice of mode train, mode official passes every "
                             "turn without gold calls: leave empty_turn out")
        if self.mode is Mode.OFFICIAL and not self.needs_call:
            raise ValueError("mode official needs a call in every turn with gold calls: leave "
                             "needs_call out")


def empty_turn_passes(scoring: Scoring, n_calls: int, said: str,
                      same_state: Callable[[], bool]) -> bool:
    """Whether a turn without gold calls passes. States are compared only where it matters."""
    if scoring.mode is Mode.OFFICIAL or scoring.empty_turn is EmptyTurn.ANY:
        return True
    if scoring.empty_turn is EmptyTurn.STATE:
        return same_state()
    return n_calls == 0 and (scoring.empty_turn is EmptyTurn.SILENCE or bool(said.strip()))


def holds_results(seen: collections.Counter[str], gold: Sequence[str], mode: Mode) -> bool:
    """Whether the gold results are a sub-multiset of the results seen so far."""
    wanted = collections.Counter(gold)
    if wanted <= seen or mode is Mode.OFFICIAL:
        return wanted <= seen
    keyed: collections.Counter[str] = collections.Counter()
    for text, count in seen.items():
        keyed[answer_key(text)] += count
    return collections.Counter(map(answer_key, gold)) <= keyed


def answer_key(text: str) -> str:
    """What TRAIN compares a result text by: its JSON value, numbers by value, else the text."""
    try:
        return json.dumps(_plain(json.loads(text)), sort_keys=True)
    except (ValueError, RecursionError, OverflowError):
        return text


def _plain(value: Json) -> Json:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value


def same_value(a: Any, b: Any) -> bool:
    """Equality with numbers as numbers: 65 == 65.0, True != 1. Recurses into containers; an
    object compares as its class says. RecursionError on a cycle."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return a == b
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return _members(a) == _members(b) and all(same_value(v, b[k]) for k, v in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same_value(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, (set, frozenset)):
        return _members(a) == _members(b)
    return bool(a == b)


def _members(keys: Iterable[Any]) -> set[tuple[Any, Any]]:
    """Keys or elements, true apart from 1."""
    return {_member(key) for key in keys}


def _member(key: Any) -> tuple[Any, Any]:
    if isinstance(key, (tuple, frozenset)):
        return type(key), type(key)(map(_member, key))
    return isinstance(key, bool), key
