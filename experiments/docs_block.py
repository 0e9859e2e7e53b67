"""A page whose tables a command writes: what stands between two marks is replaced. And what the
commands that write such pages check before their work."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable

from rods_jax.config import UserError, check_out, write_text

MOST = 2 ** 31 - 1  # devices and their generators take int32
PICTURES = (".png", ".pdf", ".svg")


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
    write_text(path, _replaced_in(path, name, text))


def _replaced_in(path: str | os.PathLike, name: str, text: str) -> str:
    try:
        return replaced(pathlib.Path(path).read_text(encoding="utf-8"), name, text)
    except FileNotFoundError:
        raise UserError(f"{os.fspath(path)}: no such page; name one that has the marks "
                        f"{' and '.join(marks(name))}") from None
    except ValueError as e:
        raise UserError(f"{os.fspath(path)}: {e}") from e


# ---------------------------------------------------------------- arguments of a command


def check_outputs(name: str, out: str | None = None, plot: str | None = None,
                  json: str | None = None) -> None:
    """Raises UserError, naming the argument, where the page --out has no marks of `name` or
    --out, --plot or --json could not be written. Makes the folder of --plot."""
    for argument, path, check in (("--out", out, lambda path: _check_page(path, name)),
                                  ("--plot", plot, _check_picture),
                                  ("--json", None if json == "-" else json, check_out)):
        if path is not None:
            _check(argument, path, check)


def _check(argument: str, path: str, check: Callable[[str], object]) -> None:
    try:
        if not path:
            raise UserError("no name was given; give one, or leave it out")
        check(path)
    except UserError as e:
        raise UserError(f"{argument} {e}") from e


def _check_page(path: str, name: str) -> None:
    check_out(path)
    _replaced_in(path, name, "")


def _check_picture(path: str) -> None:
    check_out(path)
    if pathlib.Path(path).suffix not in PICTURES:
        raise UserError(f"{path}: is no picture's name; let it end in {', '.join(PICTURES)}")
    pathlib.Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)


def check_number(argument: str, value: int, least: int, most: int = MOST) -> None:
    """Raises UserError, naming the argument, for a number outside least..most."""
    if not least <= value <= most:
        raise UserError(f"{argument} is {value}: give {least} to {most}")
