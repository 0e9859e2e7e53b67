"""One process at a time where several would write over each other."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # no such locks on this system
    fcntl = None


def lock_of(folder: str | os.PathLike) -> Path:
    """A lock file for a folder that may not exist yet: on this machine, outside the folder."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()[:24]
    return Path(tempfile.gettempdir()) / f"rods_jax-{name}.lock"


@contextlib.contextmanager
def locked(path: str | os.PathLike, busy: str = "") -> Iterator[None]:
    """Holds the lock file `path` (made if need be, with its folder); the system frees it when
    this process ends. Where another process holds it: ValueError(busy), or waits without one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
            except BlockingIOError:
                raise ValueError(busy) from None
        yield
