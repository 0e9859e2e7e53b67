"""A test file run as a script of its own, in a process that sees eight CPU devices."""

import os
import pathlib
import subprocess
import sys


def run_on_eight_devices(file: str, optimize: bool = False) -> subprocess.CompletedProcess:
    """What `python file` printed; fails with its last words unless it ended well. Not optimized,
    programs compile in half the time."""
    root = pathlib.Path(__file__).parents[1]
    flags = "--xla_force_host_platform_device_count=8"
    if not optimize:
        flags += " --xla_backend_optimization_level=0"
    done = subprocess.run(
        [sys.executable, file], cwd=root, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags})
    assert done.returncode == 0, done.stderr[-2000:]
    return done
