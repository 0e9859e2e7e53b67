"""What has to be right before the first array: flags, processes, platform.

Call `start` before anything touches a device. It returns what the run record says about the
machine, or raises StartError with one line.
"""

from __future__ import annotations

import enum
import importlib.metadata
import os
import platform as python_platform
from collections.abc import Mapping

import jax

from rods_jax.config import UserError
from rods_jax.host_memory import keep_freed_memory
from rods_jax.rollcall import roll_call
from rods_jax.types import Json


class StartError(UserError):
    """The run cannot start as asked; one line."""


class Platform(str, enum.Enum):
    ANY = "any"  # the accelerator if one is installed, else the CPU
    CPU = "cpu"
    GPU = "gpu"
    TPU = "tpu"


class FlagPreset(str, enum.Enum):
    NONE = "none"  # the compiler's own defaults
    OVERLAP = "overlap"  # collectives run beside compute, for sharded training


# TPU flags go to LIBTPU_INIT_ARGS: in XLA_FLAGS they stop a process whose compiler does not
# know them. Kept short, since flags vanish upstream; tests start a process with each.
_PRESETS: Mapping[tuple[Platform, FlagPreset], Mapping[str, str]] = {
    (Platform.GPU, FlagPreset.OVERLAP): {
        "XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=true",
    },
    (Platform.TPU, FlagPreset.OVERLAP): {
        "LIBTPU_INIT_ARGS": "--xla_tpu_enable_async_collective_fusion=true "
                            "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true "
                            "--xla_tpu_overlap_compute_collective_tc=true "
                            "--xla_enable_async_all_gather=true",
    },
}

_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin", "jax-rocm7-plugin", "libtpu")
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", *_PLUGINS)


def start(wanted: Platform | str, preset: FlagPreset = FlagPreset.NONE) -> dict[str, Json]:
    """Sets the compiler flags, keeps freed memory where the run is for the CPU, joins the other
    processes where the launcher announced them, checks the platform and returns the record of
    it."""
    wanted = Platform(wanted)
    flags = compiler_flags(os.environ, wanted, preset)
    os.environ.update(flags)
    if wanted is Platform.CPU:
        keep_freed_memory()
    if os.environ.get("RODS_PROCESSES", "1") != "1":
        join_processes(os.environ)
    record = check_platform(wanted)
    return {**record, **{name: os.environ[name] for name in flags if os.environ[name]}}


# ---------------------------------------------------------------- compiler flags


def compiler_flags(environment: Mapping[str, str], wanted: Platform,
                   preset: FlagPreset = FlagPreset.NONE) -> dict[str, str]:
    """XLA_FLAGS and LIBTPU_INIT_ARGS to set: the user's, with the preset's for what the user
    left open. TPU flags found in XLA_FLAGS move to LIBTPU_INIT_ARGS, and are left out where
    the run is not for a TPU. Variables that stay as they are do not appear."""
    xla = environment.get("XLA_FLAGS", "").split()
    libtpu = environment.get("LIBTPU_INIT_ARGS", "").split()
    stray = [flag for flag in xla if flag.startswith("--xla_tpu_")]
    xla = [flag for flag in xla if flag not in stray]
    if wanted in (Platform.TPU, Platform.ANY):
        libtpu += stray
    extra = _PRESETS.get((wanted, preset), {})
    flags = {
        "XLA_FLAGS": " ".join(_merged(xla, extra.get("XLA_FLAGS", ""))),
        "LIBTPU_INIT_ARGS": " ".join(_merged(libtpu, extra.get("LIBTPU_INIT_ARGS", ""))),
    }
    return {name: text for name, text in flags.items()
            if text.split() != environment.get(name, "").split()}


def _merged(own: list[str], preset: str) -> list[str]:
    named = {flag.partition("=")[0] for flag in own}
    return own + [flag for flag in preset.split() if flag.partition("=")[0] not in named]


# ---------------------------------------------------------------- processes


def join_processes(environment: Mapping[str, str]) -> None:
    """Joins the RODS_PROCESSES processes of a pod, one a host, all started at once.

    JAX_COORDINATOR_ADDRESS: host:port of process 0. RODS_PROCESS_ID: which one this is.
    RODS_START_TIMEOUT: seconds to wait for the last one (default 900: cold hosts of a big
    pod come minutes apart). Raises UserError that names the missing ones.
    """
    count = _whole(environment, "RODS_PROCESSES", None)
    index = _whole(environment, "RODS_PROCESS_ID", None)
    timeout = _whole(environment, "RODS_START_TIMEOUT", 900)
    address = environment.get("JAX_COORDINATOR_ADDRESS", "")
    roll_call(address, count, index, timeout)
    jax.distributed.initialize(coordinator_address=address, num_processes=count,
                               process_id=index, initialization_timeout=timeout)


def _whole(environment: Mapping[str, str], name: str, default: int | None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise StartError(f"{name}={text!r} is not a whole number; launch.sh sets it")
    return int(text)


# ---------------------------------------------------------------- platform


def check_platform(wanted: Platform | str) -> dict[str, Json]:
    """The platform that runs, for the run record and the first log line.

    Raises StartError naming the versions of jax, jaxlib and the plugin when the wanted
    platform is not the one that runs. A plugin that fails to load leaves only a log line in
    jax and the run goes on using the CPU, for days; that is why this asks.
    """
    wanted = Platform(wanted)
    versions = installed_versions()
    # Before any backend starts: some mismatched pairs end in a segmentation fault.
    if problem := version_problem(wanted, versions):
        raise StartError(problem)
    try:
        backend, cause = jax.default_backend(), ""
    except (RuntimeError, AssertionError) as e:  # JAX_PLATFORMS names what does not start
        backend, cause = "none", " ".join(str(e).split())[:300]
    if problem := platform_problem(wanted, backend, versions, cause):
        raise StartError(problem)
    device = jax.devices()[0]
    return {
        "platform": backend, "device_kind": device.device_kind,
        "device_count": jax.device_count(), "local_device_count": jax.local_device_count(),
        "process_count": jax.process_count(), "python": python_platform.python_version(),
        "versions": versions,
    }


def installed_versions() -> dict[str, str]:
    """Package -> version, of those installed."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def version_problem(wanted: Platform, versions: Mapping[str, str]) -> str | None:
    """What is wrong with a GPU plugin made for another jaxlib, or None."""
    if wanted not in (Platform.GPU, Platform.ANY):
        return None
    for plugin in (p for p in _PLUGINS if p != "libtpu" and p in versions):
        if _release(versions[plugin]) != _release(versions.get("jaxlib", "")):
            return (f"{plugin} {versions[plugin]} was made for another jaxlib than "
                    f"{versions.get('jaxlib', 'none')} (jax {versions.get('jax', 'none')}); "
                    f"install one version of all: pip install -U '{_extra(plugin)}'")
    return None


def platform_problem(wanted: Platform, backend: str, versions: Mapping[str, str],
                     cause: str = "") -> str | None:
    """Why `backend` is not what was wanted, or None."""
    plugins = [p for p in _PLUGINS if p in versions]
    if backend == wanted.value or (wanted is Platform.ANY and (backend not in ("cpu", "none")
                                                              or backend == "cpu" and not plugins)):
        return None
    names = ["jax", "jaxlib", *plugins]
    listed = ", ".join(f"{n} {versions.get(n, 'not installed')}" for n in names)
    if not plugins and wanted is not Platform.CPU:
        listed += ", no accelerator plugin"
    remedy = {
        Platform.CPU: "unset JAX_PLATFORMS or set JAX_PLATFORMS=cpu",
        Platform.GPU: "install one version of all with pip install -U 'jax[cuda13]' and see "
                      "nvidia-smi, or ask for platform cpu",
        Platform.TPU: "install with pip install -U 'jax[tpu]' and see that no other process "
                      "holds the TPU, or ask for platform cpu",
        Platform.ANY: "mend the accelerator, or ask for platform cpu",
    }[wanted]
    shown = "an accelerator" if wanted is Platform.ANY else wanted.value
    because = f" ({cause})" if cause else ""
    return f"wanted platform {shown}, jax runs on {backend}{because}: {listed}; {remedy}"


def _release(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:3])


def _extra(plugin: str) -> str:
    return "jax[" + plugin.removeprefix("jax-").removesuffix("-plugin") + "]"
