"""Writes the user turns of a plan, all at once, from its narrative.

A call becomes a clause of its own or, when it only looks something up for the call right
after it, a noun phrase inside that one's clause ("read the file about X" is three calls).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from rods_jax.tools.toolbox import phrases
from rods_jax.tools.toolbox.graph import TOOLS
from rods_jax.types import Plan, PlannedCall, Ref

INNER_SHARE = 0.65  # of the look-ups that could be said inside another clause


def write_turns(plan: Plan, rng: random.Random, plain: bool = False,
                varied: bool = False) -> tuple[str, ...]:
    """One text a turn. `plain`: every call gets its own clause, values are said again.
    `varied`: more ways to begin, join and end; the splits are written without."""
    calls = [call for turn in plan.turns for call in turn]
    writer = _Writer(calls, plan.narrative["calls"], rng, plain, varied)
    texts, start = [], 0
    for turn in plan.turns:
        texts.append(writer.turn(start, start + len(turn)))
        start += len(turn)
    return tuple(texts)


class _Writer:
    def __init__(self, calls: Sequence[PlannedCall], notes: Sequence[dict],
                 rng: random.Random, plain: bool, varied: bool):
        self.calls, self.notes, self.rng, self.plain = calls, notes, rng, plain
        self.openings = phrases.OPENINGS + (phrases.MORE_OPENINGS if varied else ())
        self.joints = phrases.JOINTS + (phrases.MORE_JOINTS if varied else ())
        self.closings = phrases.CLOSINGS if varied else ()
        self.inner: set[int] = set()  # calls said inside another clause, not said yet

    def turn(self, start: int, stop: int) -> str:
        clauses: list[str] = []
        heads: list[int] = []
        last = stop - 1
        while last >= start:
            heads.append(last)
            block = self._block(last, start)
            self.inner.update(block)
            last = (block[-1] if block else last) - 1
        for head in reversed(heads):
            clauses.append(self._clause(head))
        opening = self.rng.choice(self.openings)
        asks = clauses[0].split()[0] in phrases.QUESTIONS
        text = clauses[0] if asks else opening.format(clauses[0])
        for clause in clauses[1:]:
            text += self.rng.choice(self.joints).format(clause)
        text += self._closing(clauses[-1], text)
        return text + self.rng.choice(("", ".", "."))

    def _closing(self, clause: str, text: str) -> str:
        if not self.closings or clause.split()[0] in phrases.QUESTIONS:
            return ""
        closing = self.rng.choice(self.closings)
        said = {word.rstrip(",.") for word in text.split()}
        return "" if said & set(closing.split()) else closing

    def _block(self, head: int, start: int) -> list[int]:
        """Calls right before `head`, nearest first, that are said inside its clause."""
        block: list[int] = []
        for call in range(head - 1, start - 1, -1):
            if self.plain or self.rng.random() > INNER_SHARE:
                break
            if not self._can_be_inner(call, [*reversed(block), head]):
                break
            block.append(call)
        return block

    def _can_be_inner(self, call: int, users: list[int]) -> bool:
        name = self.calls[call].name
        if name == "open_folder":
            return self._folder_fits(call, users[0])
        for user in users:
            if self.calls[user].name not in phrases.INNER_ONLY.get(name, TOOLS):
                continue
            for arg in self.calls[user].arguments.values():
                if isinstance(arg, Ref) and arg.call == call:
                    return (name, arg.path[0]) in phrases.INNER
        return False

    def _folder_fits(self, call: int, user: int) -> bool:
        """Opening a folder is said with the file that the next call uses there."""
        file = self.calls[user].arguments.get("file")
        if file is None or TOOLS[self.calls[user].name].domain != "files":
            return False
        folder = self.calls[call].arguments["folder"]
        if isinstance(file, Ref):
            return isinstance(folder, Ref) and folder.call == file.call
        return self.notes[user]["args"]["file"]["how"] == "said"

    def _clause(self, call: int) -> str:
        return self._say(call, self.rng.choice(phrases.CLAUSES[self.calls[call].name]))

    def _say(self, call: int, template: str, **more: str) -> str:
        """Fills a template with the words for each argument that it names."""
        said = {p.name: self._value(call, p.name) for p in TOOLS[self.calls[call].name].params
                if "{" + p.name + "}" in template}
        return template.format(**said, **more)

    def _value(self, call: int, param: str) -> str:
        value = self.calls[call].arguments[param]
        note = self.notes[call]["args"][param]
        if isinstance(value, Ref) and value.call in self.inner:
            self.inner.discard(value.call)
            name, key = self.calls[value.call].name, str(value.path[0])
            template = self.rng.choice(phrases.INNER[name, key])
            text = self._say(value.call, template, noun=self.notes[value.call]["holds"])
        elif isinstance(value, Ref):
            pointers = {"mentions": phrases.MENTIONS, "first": phrases.FIRST}
            text = self.rng.choice(pointers.get(note["how"], phrases.LAST))
            text = text.format(noun=note["noun"])
        else:
            text = self._named(value, note)
        if param == "file" and call - 1 in self.inner:
            text = self._in_folder(call - 1, text)
        return text

    def _in_folder(self, call: int, file: str) -> str:
        if self.calls[call].name != "open_folder":
            return file
        self.inner.discard(call)
        if isinstance(self.calls[call].arguments["folder"], Ref) and (
                self.notes[call]["args"]["folder"]["how"] != "mentions"):
            return file  # the folder that the search found
        folder = self._value(call, "folder")
        return self.rng.choice(phrases.IN_FOLDER).format(file, folder)

    def _named(self, value, note: dict) -> str:
        noun = note["noun"]
        pointed = note["how"] in ("last", "first") and not self.plain
        if pointed and note.get("point", True) and (
                "point" in note or self.rng.random() < 0.6):
            pointers = phrases.SAME if note["how"] == "last" else phrases.FIRST
            return self.rng.choice(pointers).format(noun=noun)
        return self.rng.choice(phrases.NAMED.get(noun, ("{0}",))).format(value)
