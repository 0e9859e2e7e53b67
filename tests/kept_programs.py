"""Compiled programs on disk: what several runs of a test file share is compiled once."""

import contextlib

import jax
from jax.experimental.compilation_cache import compilation_cache

SETTINGS = {"jax_persistent_cache_min_compile_time_secs": 0.0,
            "jax_persistent_cache_min_entry_size_bytes": -1}


@contextlib.contextmanager
def kept_in(folder, quick: bool = False):
    """quick: they are not compiled for speed, which takes a fraction of the time."""
    changes = SETTINGS | {"jax_compilation_cache_dir": str(folder)}
    before = {name: getattr(jax.config, name) for name in changes}
    try:
        _update(changes, quick)
        yield folder
    finally:
        _update(before, False)


def _update(values, quick):
    jax.config.update("jax_disable_most_optimizations", quick)
    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # it looks at its settings once
