"""A page whose tables a command writes: what stands between two marks is replaced."""

from __future__ import annotations

import os
import pathlib

from rods_jax.config import UserError, write_text


def marks(name: str) -> tuple[str, str]:
    return f"<!-- begin {name} -->", f"<!-- end {name} -->"


def replaced(page: str, name: str, text: str) -> str:
    """`page` with `text` between the marks of `name`. Raises ValueError without them."""
    begin, end = marks(name)
    head, found, rest = page.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not (found and found_end):
        raise ValueError(f"no marks {begin} and {end}: put them where the table shall stand")
    return f"{head}{begin}\n{text.strip()}\n{end}{tail}"


def write_block(path: str | os.PathLike, name: str, text: str) -> None:
    """The same in a file. Raises UserError where it has no such marks."""
    page = pathlib.Path(path).read_text(encoding="utf-8")
    try:
        write_text(path, replaced(page, name, text))
    except ValueError as e:
        raise UserError(f"{os.fspath(path)}: {e}") from e
