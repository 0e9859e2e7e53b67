"""A word-level format for small policies: a few hundred ids, a few dozen tokens a task.

Every lexicon word and every tool name is one id. Any other word (a name, an id, a price) is an
entity: the dialogue gives it the next slot id of its kind when it first appears and keeps the
table surface <-> slot. A kind is what the spelling shows ("@*", "bk-*"), so of an entity the policy
sees its kind and whether it came as the first, the second, ... of that kind, and no more. (Slots
dealt at random leave it to learn copying for every slot of every kind, and about a quarter of its
errors are then slots of the right kind that the dialogue never dealt.) Clones start from the same
table and then diverge, each with the entities its own rollout met.

    prompt   travel without pay <user> book a table for e17 <act>
    step     book_table e17 7 ; pay 12 <go>        (calls; see positional.py)
    results  booking e3 ; status ok <act>
    step     done <end>                            (the closing message of a turn)
    user     <user> cancel it with pay <act>       (pay just became visible)

Lossy for reading only: punctuation at the end of a word, case of lexicon words, and JSON
punctuation of results are dropped. Entities keep their surface exactly, and so do arguments.
Once the slots of a kind run out, those of no kind are dealt, and then <unk>, which no call can use.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterator, Sequence

import numpy as np

from rods_jax.text.positional import Atom, Mark, decode_calls, encode_calls
from rods_jax.tools.env import UserTurn
from rods_jax.tools.literals import LIMITS
from rods_jax.types import Json, ParsedStep, Task, ToolCall, ToolResult, ToolSpec

# Words the format itself needs beside the lexicon: visibility and JSON literals.
_OWN_WORDS = ("with", "without", "true", "false", "null")
_TRAILING = ",.?!:"


class CompactFormat:
    """`specs`: every tool of the suite. `lexicon`: words, read in any case and spelled as they
    are given here; of two that differ in case only, the first counts.

    `kinds`: patterns with * ? [seq] as in file names; an entity is of the first kind that its
    whole surface matches, else of no kind. `n_slots`: slots of each kind, and of none.

    Ids: the marks, then the format's own words, domains, tools, lexicon, then the slots, kind
    after kind, those of no kind last. `vocabulary` spells each id below the slots.
    """

    rewrites = False

    def __init__(self, specs: Sequence[ToolSpec], lexicon: Sequence[str], n_slots: int = 48,
                 kinds: Sequence[str] = ()):
        if n_slots < 1:
            raise ValueError(f"n_slots is {n_slots}: give at least one entity slot")
        self.specs = {spec.name: spec for spec in specs}
        if len({name.lower() for name in self.specs}) < len(specs):
            raise ValueError("two tools share a name up to case: rename one")
        for name in self.specs:
            if name.lower() in _OWN_WORDS:
                raise ValueError(f"a tool is called {name!r}, a word of the format: rename it")
        self.domains: dict[str, tuple[str, ...]] = {}
        for spec in specs:
            self.domains[spec.domain] = (*self.domains.get(spec.domain, ()), spec.name)

        marks = tuple(Mark)
        words: dict[str, str] = {}  # lookup form -> spelling
        for word in (*_OWN_WORDS, *self.specs, *self.domains, *lexicon):
            if not word or word.split() != [word]:
                raise ValueError(f"lexicon entry {word!r} is not one word: remove its spaces")
            words.setdefault(word.lower(), word)
        self._atoms: tuple[Atom, ...] = (*marks, *words.values())
        self._mark_id = {mark: i for i, mark in enumerate(marks)}
        self._lookup = {word: len(marks) + i for i, word in enumerate(words)}
        self._exact = {word: len(marks) + i for i, word in enumerate(words.values())}

        self.vocabulary = tuple(a.value if isinstance(a, Mark) else a for a in self._atoms)
        self.first_slot = len(self._atoms)
        self.n_slots = n_slots
        self._kinds = tuple(re.compile(fnmatch.translate(kind)) for kind in kinds)
        self.vocab_size = self.first_slot + n_slots * (len(kinds) + 1)
        self.pad_id = self._mark_id[Mark.PAD]
        self.unk_id = self._mark_id[Mark.UNK]
        self.stop_ids = (self._mark_id[Mark.GO], self._mark_id[Mark.END])

    def is_word(self, ids_L: np.ndarray) -> np.ndarray:
        """bool, the shape of the ids: neither a mark nor a slot."""
        return (ids_L >= len(Mark)) & (ids_L < self.first_slot)

    def start(self, task: Task, tools: Sequence[ToolSpec]) -> CompactDialogue:
        """A dialogue with an empty table."""
        for spec in tools:
            if spec.name not in self.specs:
                raise ValueError(f"tool {spec.name!r} is unknown: build the format with its spec")
        return CompactDialogue(self, [0] * (len(self._kinds) + 1), {}, {})

    def kind(self, surface: str) -> int:
        """Index of the entity's kind; the last one is no kind."""
        matches = (i for i, kind in enumerate(self._kinds) if kind.match(surface))
        return next(matches, len(self._kinds))


class CompactDialogue:
    """The table of one rollout and the codec over it. `dealt`: by kind, how many of its slots
    are taken."""

    def __init__(self, form: CompactFormat, dealt: list[int], slot_of: dict[str, int],
                 surface_of: dict[int, str]):
        self._form, self._dealt = form, dealt
        self._slot_of, self._surface_of = slot_of, surface_of

    def clone(self) -> CompactDialogue:
        return CompactDialogue(
            self._form, list(self._dealt), dict(self._slot_of), dict(self._surface_of))

    # ------------------------------------------------------------------------ text to ids

    def prompt(self, turn: UserTurn) -> list[int]:
        ids: list[int] = []
        visible = set(turn.tools)
        self._check_known(turn.tools)
        for domain, names in self._form.domains.items():
            if visible.isdisjoint(names):
                continue
            ids.append(self._word_id(domain))
            for name in names:
                if name not in visible:
                    ids += self._ids(["without", name])
        return [*ids, *self.user(UserTurn(turn.index, turn.text, turn.tools))]

    def user(self, turn: UserTurn) -> list[int]:
        self._check_known(turn.new_tools)
        ids = [self._mark(Mark.USER), *self._read(turn.text)]
        for name in turn.new_tools:
            ids += self._ids(["with", name])
        return [*ids, self._mark(Mark.ACT)]

    def results(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[int]:
        """The step's <go> already says that results follow, so they need no mark of their own;
        SEP stands between the results of several calls."""
        if len(calls) != len(results):
            raise ValueError(f"{len(calls)} calls but {len(results)} results: give one each")
        ids: list[int] = []
        for i, result in enumerate(results):
            if i:
                ids.append(self._mark(Mark.SEP))
            ids += self._read_json(result.text)
        return [*ids, self._mark(Mark.ACT)]

    def errors(self, errors: Sequence[str]) -> list[int]:
        """One mark whatever went wrong: a small policy learns nothing from prose."""
        return [self._mark(Mark.BAD), self._mark(Mark.ACT)]

    def step(self, calls: Sequence[ToolCall], text: str = "") -> list[int]:
        """A message has calls or text; beside calls, `text` has no place on the wire and is
        left out. Raises ValueError for a call that fits no declared tool."""
        if not calls:
            return [*self._read(text), self._mark(Mark.END)]
        atoms = encode_calls(calls, self._form.specs)
        return [*self._ids(atoms), self._mark(Mark.GO)]

    # ------------------------------------------------------------------------ ids to calls

    def parse(self, ids: Sequence[int]) -> ParsedStep:
        form = self._form
        ids = [int(i) for i in ids]
        if not ids or ids[-1] not in form.stop_ids:
            return ParsedStep(errors=("truncated: no stop token",))
        body = ids[:-1]
        if any(i in form.stop_ids for i in body):
            return ParsedStep(errors=("tokens after the stop token",))
        atoms = [self._atom(i) for i in body]
        if ids[-1] == self._mark(Mark.GO):
            calls, errors = decode_calls(atoms, form.specs)
            if len(calls) + len(errors) > LIMITS.max_calls:
                return ParsedStep(errors=(f"over {LIMITS.max_calls} calls in one message",))
            return ParsedStep(calls=calls, errors=errors)
        for atom in atoms:
            if isinstance(atom, Mark) and atom is not Mark.UNK:
                return ParsedStep(errors=(f"{atom.value} inside a closing message",))
        return ParsedStep(text=self.text(body))

    def text(self, ids: Sequence[int]) -> str:
        atoms = [self._atom(int(i)) for i in ids]
        return " ".join(a.value if isinstance(a, Mark) else a for a in atoms)

    # ------------------------------------------------------------------------ words

    def _mark(self, mark: Mark) -> int:
        return self._form._mark_id[mark]

    def _atom(self, i: int) -> Atom:
        """What an id stands for here. A slot not dealt yet, or no id at all, is UNK."""
        if 0 <= i < self._form.first_slot:
            return self._form._atoms[i]
        return self._surface_of.get(i, Mark.UNK)

    def _ids(self, atoms: Sequence[Atom]) -> list[int]:
        """Ids of marks and of words whose spelling must survive."""
        return [self._mark(a) if isinstance(a, Mark) else self._exact_id(a) for a in atoms]

    def _exact_id(self, word: str) -> int:
        known = self._form._exact.get(word)
        return self._entity_id(word) if known is None else known

    def _entity_id(self, surface: str) -> int:
        slot = self._slot_of.get(surface)
        if slot is not None:
            return slot
        form = self._form
        for kind in (form.kind(surface), len(self._dealt) - 1):
            if self._dealt[kind] < form.n_slots:
                slot = form.first_slot + kind * form.n_slots + self._dealt[kind]
                self._dealt[kind] += 1
                self._slot_of[surface], self._surface_of[slot] = slot, surface
                return slot
        return self._form.unk_id

    def _word_id(self, word: str) -> int:
        known = self._form._lookup.get(word.lower())
        return self._entity_id(word) if known is None else known

    def _knows(self, word: str) -> bool:
        return word.lower() in self._form._lookup or word in self._slot_of

    def _read(self, text: str) -> list[int]:
        """Ids of running text: words at white space, less the punctuation that ends them
        unless only the form with it is known ("Inc." after an entity "Inc." was met)."""
        ids = []
        for word in text.split():
            bare = word.rstrip(_TRAILING)
            if self._knows(word) and not self._knows(bare):
                bare = word
            if bare:
                ids.append(self._word_id(bare))
        return ids

    def _read_json(self, text: str) -> list[int]:
        """Keys and scalars in order. Text that is not JSON is read as words."""
        try:
            # Numbers stay text: the policy copies digits, and 12.50 must not become 12.5.
            value = json.loads(text, parse_int=str, parse_float=str, parse_constant=str)
            scalars = list(_flatten(value))
        except (ValueError, RecursionError):
            return self._read(text)
        ids: list[int] = []
        for scalar in scalars:
            one_word = scalar.split() == [scalar]  # such a value is copied whole, with its dot
            ids += [self._word_id(scalar)] if one_word else self._read(scalar)
        return ids

    def _check_known(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._form.specs:
                raise ValueError(f"tool {name!r} is unknown: build the format with its spec")


def _flatten(value: Json) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _flatten(item)
    elif isinstance(value, list):
        for item in value:
            yield from _flatten(item)
    elif isinstance(value, str):
        yield value
    else:
        yield {True: "true", False: "false", None: "null"}[value]
