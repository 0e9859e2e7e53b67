"""The peer's end of the line: JSON objects, one a line, in by standard input, out by standard
output. Imported by the peers' own Pythons: nothing here is of rods_jax or beyond the standard
library."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

Commands = Mapping[str, Callable[..., dict[str, Any]]]


def serve(make: Callable[[str], tuple[dict[str, Any], Commands]]) -> None:
    """`make(folder)`, with the last word of the command line, loads the weights and returns a
    greeting, which goes out first, and the commands. Then every {"do": NAME, ...} is answered
    by what the command of that name returns for the rest of the object, or by {"error": one
    line}, until standard input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    greeting, commands = make(sys.argv[-1])
    _say(answers, greeting)
    for line in sys.stdin:
        what = json.loads(line)
        try:
            answer = commands[what.pop("do")](**what)
        except Exception as e:  # out of memory among them; the next case may still fit
            answer = {"error": " ".join(f"{type(e).__name__}: {e}".split())[:500]}
        _say(answers, answer)


def _say(answers, what: dict[str, Any]) -> None:
    print(json.dumps(what), file=answers, flush=True)
