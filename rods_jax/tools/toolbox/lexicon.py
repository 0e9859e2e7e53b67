"""Every fixed word of the suite: what is not here is an entity."""

from __future__ import annotations

import functools
import re

from rods_jax.tools.toolbox import phrases
from rods_jax.tools.toolbox.graph import TOOLS
from rods_jax.tools.toolbox.planner import noun_of
from rods_jax.tools.toolbox.signature import CURRENCIES

_RESULT_WORDS = (
    "opened replied forwarded written copied moved deleted released signed in wallet open "
    "others error limit reached no folder open no such file folder exists person message trip hold "
    "booking bill payment not signed in wrong pin wallet locked wrong amount low balance same date "
    "unknown tool wrong missing argument"
).split()


@functools.cache
def lexicon() -> tuple[str, ...]:
    """Tool names, argument names, template words, result keys and fixed values, error
    words, enum values and closing replies; sorted, each once."""
    words = {*_RESULT_WORDS, *CURRENCIES, phrases.DONE, phrases.CLARIFY, phrases.UNAVAILABLE}
    for tool in TOOLS.values():
        words.update((tool.name, tool.domain))
        words.update(p.name for p in tool.params)
        words.update(key for key, _ in tool.outputs)
        words.update(noun_of(p.kind) for p in tool.params)
        words.update(noun_of(kind, key) for key, kind in tool.outputs if kind != "content")
    templates = [
        *(t for group in (phrases.CLAUSES, phrases.INNER, phrases.NAMED)
          for ts in group.values() for t in ts),
        *phrases.LAST, *phrases.SAME, *phrases.FIRST, *phrases.MENTIONS, *phrases.IN_FOLDER,
        *phrases.JOINTS, *phrases.OPENINGS, *phrases.SUPPLIES, *phrases.VAGUE.values(),
    ]
    for template in templates:
        words.update(re.findall(r"[a-z_]+", re.sub(r"\{\w*\}", " ", template)))
    return tuple(sorted(words))
