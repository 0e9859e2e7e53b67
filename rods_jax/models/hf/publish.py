"""A folder that appears under its name whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator


def free_target(folder: str | os.PathLike) -> pathlib.Path:
    """The absolute path; ValueError unless it is an empty folder or not there yet."""
    target = pathlib.Path(os.path.abspath(folder))
    if target.is_symlink():
        raise ValueError(f"{target} is a link: name a new folder")
    if os.path.ismount(target):
        raise ValueError(f"{target} is where a disk is mounted: name a folder inside it")
    if target.is_dir():
        if any(target.iterdir()):
            raise ValueError(f"{target} is not empty: name a new folder or empty this one")
    elif target.exists():
        raise ValueError(f"{target} exists and is not a folder: name a new folder")
    return target


@contextlib.contextmanager
def published(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder to fill, next to `target` and on the same disk; at the end it is flushed and
    renamed to `target`, in place of an empty folder there. Whatever goes wrong, nothing of it
    stays, nor of parents of `target` that had to be made; only a killed process leaves a
    hidden folder, .NAME.*, beside the place."""
    made = [p for p in target.parents if not p.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        hidden = pathlib.Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
        try:
            draft = hidden / target.name
            draft.mkdir()  # mkdtemp's own is closed to other users
            yield draft
            for parent, _, names in os.walk(draft):
                for path in [os.path.join(parent, name) for name in names] + [parent]:
                    _flush(path)
            draft.rename(target)
            _flush(target.parent)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
    finally:
        if not target.exists():
            for parent in made:
                with contextlib.suppress(OSError):  # someone else's by now
                    parent.rmdir()


def _flush(path: str | os.PathLike) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
