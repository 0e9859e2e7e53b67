"""On a CPU, memory that a program freed stays with the process.

Every run of a compiled program allocates its temporaries anew. The C library gives blocks of
that size back to the kernel when they are freed, and the next run has each of their pages
faulted in and zeroed again: a tenth of an update's time, and a third on virtual machines
that give free pages back to their host. What is kept is what the largest program takes.
"""

from __future__ import annotations

import ctypes
import os

# glibc's parameters (man 3 mallopt): no block is mapped on its own, all threads take from one
# heap (those of single threads are unmapped when they are empty), and its end is never cut off.
_PARAMETERS = {-4: 0, -8: 1, -1: -1}  # M_MMAP_MAX, M_ARENA_MAX, M_TRIM_THRESHOLD: never
_VARIABLES = ("MALLOC_MMAP_MAX_", "MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_")  # the user's


def keep_freed_memory() -> bool:
    """Whether it is kept from now on: not where the C library is another than glibc, and not
    against an environment that sets one of these parameters itself. Call it before jax starts
    its threads: those that are there keep their heaps."""
    if any(name in os.environ for name in _VARIABLES):
        return False
    try:
        library = ctypes.CDLL(None)
        mallopt, _ = library.mallopt, library.gnu_get_libc_version  # musl has neither
    except (AttributeError, OSError, TypeError):  # TypeError: Windows has no library None
        return False
    return all([mallopt(name, value) for name, value in _PARAMETERS.items()])
