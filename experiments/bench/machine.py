"""The machine: what it can do at best, measured the way our own programs run, through jax, and
how much of it other programs take meanwhile."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

ROWS, INNER, OUTER = 2048, 512, 1536  # a prompt's tokens, model width, width of the MLP
READ_BYTES = 2 ** 30


def peaks(tries: int = 20) -> dict[str, float]:
    """matmul_gflops: 10^9 operations a second of a float32 product; bandwidth_gbs: 10^9 bytes
    a second of a sum over a gigabyte. Each the best of `tries`."""
    key = jax.random.key(0)
    x, w = jax.random.normal(key, (ROWS, INNER)), jax.random.normal(key, (INNER, OUTER))
    product = _best(lambda: _matmul(x, w), tries)
    numbers = jnp.ones((READ_BYTES // 4096, 1024), jnp.float32)
    read = _best(lambda: _sum(numbers), tries)
    return {"matmul_gflops": 2e-9 * ROWS * INNER * OUTER / product,
            "bandwidth_gbs": 1e-9 * numbers.nbytes / read}


_matmul = jax.jit(jnp.matmul)
_sum = jax.jit(jnp.sum)


def _best(run: Callable[[], jax.Array], tries: int) -> float:
    jax.block_until_ready(run())
    seconds = []
    for _ in range(tries):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def cores() -> int:
    return len(os.sched_getaffinity(0))


# ---------------------------------------------------------------- who else is busy


class Others:
    """Cores that programs other than ours keep busy, on average since this was made. pids: of
    our other processes, which live on. Linux only; elsewhere `cores_busy` is None."""

    def __init__(self, pids: Sequence[int], proc: pathlib.Path = pathlib.Path("/proc")):
        self._pids, self._proc = (os.getpid(), *pids), proc
        self._begin = time.perf_counter(), self._busy_s()

    def cores_busy(self) -> float | None:
        start, busy = self._begin
        now = self._busy_s()
        if busy is None or now is None:
            return None
        return max(0.0, (now - busy) / (time.perf_counter() - start))

    def _busy_s(self) -> float | None:
        """CPU seconds of all processes since the machine started, less those of ours."""
        try:
            stat = (self._proc / "stat").read_text(encoding="utf-8").splitlines()[0]
            own = [(self._proc / str(pid) / "stat").read_text(encoding="utf-8")
                   for pid in self._pids]
        except OSError:
            return None
        user, nice, system = map(int, stat.split()[1:4])
        # Behind the name, which may hold blanks: fields 14 and 15 of the whole line.
        ours = sum(sum(map(int, text.rpartition(")")[2].split()[11:13])) for text in own)
        return (user + nice + system - ours) / os.sysconf("SC_CLK_TCK")
