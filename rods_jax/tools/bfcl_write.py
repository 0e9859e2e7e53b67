"""Stage III for BFCL: the user texts of a plan, with outputs it quotes filled in and a few
phrases worded differently. Quoted passages and dictated values keep every character."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

from rods_jax.tools.bfcl_plan import at
from rods_jax.tools.bfcl_swaps import NUMBER, scalars, write_number
from rods_jax.tools.bfcl_words import CLOSINGS, GREETINGS, OPENINGS
from rods_jax.types import Json, Plan, Ref

# Phrases that say the same. A phrase may become any other of its line.
_PHRASES = tuple(tuple(line.split("|")) for line in """
Could you|Can you|Would you
could you|can you|would you
I want to|I would like to|I'd like to
I need to|I have to
Make sure|Be sure
make sure|be sure
Please|Kindly
Afterwards|After that
Additionally|In addition
Also,|On top of that,
Finally,|Lastly,|At last,
I'm planning|I am planning
Let's|Let us
let's|let us
""".strip().splitlines())
# A text that begins so takes no other opening: "Good. Great!" says one thing twice.
_OPENED = re.compile(
    r"\W*(?:next|now|then|great|good|fine|perfect|excellent|wonderful|fantastic|splendid|amazing"
    r"|awesome|nice|all right|alright|very well|well|okay|ok|moving on|also|additionally"
    r"|in addition|further|furthermore|moreover|besides|on top of|finally|lastly|at last|last"
    r"|afterwards|after that|subsequently|following|once|and|but|oh|hey|hi|hello|greetings|thank"
    r"|thanks|much appreciated|appreciate|actually|unfortunately|alas|first)\b", re.IGNORECASE)


def _protected(text: str, literals: Sequence[str]) -> list[tuple[str, bool]]:
    """The text in pieces, with whether a piece may be worded differently."""
    known = sorted({s for s in literals if len(s) >= 3}, key=len, reverse=True)
    quoted = r"'[^'\n]{2,}'(?![A-Za-z])|\"[^\"\n]+\"|“[^”]+”|`[^`]+`|‘[^’]+’"
    pattern = "|".join([*map(re.escape, known), quoted])
    pieces, end = [], 0
    for match in re.finditer(pattern, text):
        pieces += [(text[end:match.start()], True), (match.group(), False)]
        end = match.end()
    return [*pieces, (text[end:], True)]


def _reworded(piece: str, rng: random.Random) -> str:
    for phrases in _PHRASES:
        known = "|".join(map(re.escape, phrases))
        pattern = rf"(?<!\w)(?:{known})(?!['’\w]| (?:mind|be able)\b)"
        match = re.search(pattern, piece)
        if match and rng.random() < 0.7:
            other = rng.choice([p for p in phrases if p != match.group()])
            piece = piece[:match.start()] + other + piece[match.end():]
    return piece


def _fill(texts: list[str], quoted: Sequence[Json], results: Sequence[Json]) -> None:
    """Puts the outputs that later texts quote in the place of the seed's."""
    for turn, token, call, path in quoted:
        result = results[call]
        if isinstance(result, Mapping) and isinstance(path[0], int):
            result = result["result"]  # a list, wrapped to be an object
        value = at(result, path)
        numeric = isinstance(value, (int, float)) and not token.isdigit()
        new = write_number(float(value), token) if numeric else str(value)
        texts[turn] = NUMBER.sub(lambda m, t=token, n=new: n if m.group() == t else m.group(),
                                 texts[turn])


def write(plan: Plan, results: Sequence[Mapping], rng: random.Random,
          plain: bool = False) -> tuple[str, ...]:
    """All user turns. `results`: JSON results by flat call. `plain`: only fill in values."""
    texts = list(plan.narrative["texts"])
    _fill(texts, plan.narrative["quoted_outputs"], results)
    if plan.narrative["same_texts"]:  # only the hidden state differs from the seed's
        texts[0] = rng.choice(GREETINGS) + texts[0]
    if plain:
        return tuple(texts)
    literals = [leaf for turn in plan.turns for call in turn for value in call.arguments.values()
                if not isinstance(value, Ref) for leaf in scalars(value) if isinstance(leaf, str)]
    first = ("",) if plan.narrative["same_texts"] else ("", "", "", "", *GREETINGS)
    out = []
    for i, text in enumerate(texts):
        pieces = [_reworded(p, rng) if free else p for p, free in _protected(text, literals)]
        opening = rng.choice(OPENINGS if i else first)
        said = "".join(pieces)
        said = said if _OPENED.match(said) else opening + said
        closed = said.endswith((".", "!", "?")) and "thank" not in said.lower()
        out.append(said + (rng.choice(CLOSINGS) if closed else ""))
    return tuple(out)
