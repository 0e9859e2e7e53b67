"""Memory that a program freed stays with the process: in a process of its own."""

import platform
import subprocess
import sys

import pytest

from rods_jax import host_memory

# Touches a large block, frees it and takes another: how many pages were faulted in for that one?
PROGRAM = """
import resource, sys
import numpy as np
if sys.argv[1] == "keep":
    from rods_jax.host_memory import keep_freed_memory
    print(keep_freed_memory())
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def touch():
    before = faults()
    np.empty(1 << 28, np.uint8).fill(1)
    return faults() - before
print(touch(), touch())
"""


def run(*words, **environment):
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True,
                          check=True, env={"PATH": "/usr/bin:/bin", **environment})
    return done.stdout.split()


needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's parameters")


@needs_glibc
def test_a_second_block_takes_the_pages_of_the_first():
    said, first, second = run("keep")
    assert said == "True"
    # numpy asks for huge pages, of 2 MiB where it gets them.
    assert int(first) >= 100 and int(second) < int(first) / 10


@needs_glibc
def test_without_it_they_are_faulted_in_again():
    first, second = map(int, run("leave"))
    assert second > first / 2


@needs_glibc
def test_what_the_user_has_set_is_left_alone():
    said, first, second = run("keep", MALLOC_MMAP_MAX_="1000")
    assert said == "False" and int(second) > int(first) / 2


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name: object())
    assert not host_memory.keep_freed_memory()
