"""Which pages are free: the host's half of the paged K/V. No jax."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class FreePages:
    """Page numbers 0 .. n - 1 of one region of one device. The lowest are taken first, so that
    what is in use stays together at the front and the cache small (Programs.fit)."""

    def __init__(self, n: int):
        self._free = list(range(n))

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` pages, or None and nothing taken."""
        if count > len(self._free):
            return None
        return [heapq.heappop(self._free) for _ in range(count)]

    def give(self, pages: Iterable[int]) -> None:
        for page in pages:
            heapq.heappush(self._free, page)


def pages_for(tokens: int, page: int) -> int:
    return -(-tokens // page)
