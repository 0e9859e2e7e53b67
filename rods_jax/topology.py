"""Devices that programs are compiled for, whether or not they are here, and their memory."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rods_jax.config import UserError

# The TPU compiler looks at the machine it is on, unless it is told of one. Several processes
# may load it at once, since none of them touches a TPU.
_COMPILER_ALONE = {
    "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_WORKER_HOSTNAMES": "localhost"}

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)"
# In the words of the TPU compiler, what a program needs and what there is.
_NEED = (re.compile(rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
         re.compile(rf"Used {_SIZE} of {_SIZE} hbm"))
_TOO_LARGE = (2**24, 2**16)  # float32 numbers, 4 TiB


@dataclasses.dataclass(frozen=True)
class Topology:
    """name: as asked for. kind: of the devices. memory_bytes: what programs may take of a
    device."""

    name: str
    kind: str
    devices: tuple
    memory_bytes: int


def find(name: str) -> Topology:
    """`cpu`, `gpu`: the devices of this machine. Else a TPU's, such as v5e:2x4, for which
    libtpu is needed and no TPU. Call it before anything touches a device. UserError for what
    is not known or not here."""
    if name == "gpu":
        return _gpu()
    jax.config.update("jax_platforms", "cpu")
    if name == "cpu":
        devices = jax.devices()
        return Topology(name, "the CPU", tuple(devices), memory_bytes() // len(devices))
    return _tpu(name)


def memory_bytes() -> int:
    """Of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def exhausted(error: Exception) -> tuple[int, int] | None:
    """(bytes a program needs, bytes there are) of a device, in the compiler's words; None for
    an error of another kind."""
    for pattern in _NEED:
        if found := pattern.search(str(error)):
            need, unit, limit, limit_unit = found.groups()
            return (int(float(need) * _UNITS[unit]), int(float(limit) * _UNITS[limit_unit]))
    return None


def _gpu() -> Topology:
    try:
        devices = jax.devices("gpu")
    except RuntimeError:
        raise UserError("topology gpu: jax sees no GPU here; run it where there is one, or give "
                        "a TPU's topology, such as v5e:2x4, which need not be there") from None
    limit = devices[0].memory_stats()["bytes_limit"]
    return Topology("gpu", devices[0].device_kind, tuple(devices), limit)


def _tpu(name: str) -> Topology:
    if not re.fullmatch(r"\w+:\d+(x\d+)*", name):
        raise UserError(f"topology {name!r} is not known: give cpu, gpu, or a TPU's kind and "
                        "shape, such as v5e:2x4, v6e:2x4 or v5p:2x2x2")
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(f"topology {name} needs the TPU's compiler: run `pip install "
                        f"'{_libtpu()}'`, which fits jax {jax.__version__}")
    for variable, value in _COMPILER_ALONE.items():
        os.environ.setdefault(variable, value)
    try:
        devices = topologies.get_topology_desc(name, platform="tpu").devices
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split()).removeprefix("INVALID_ARGUMENT: ")
        raise UserError(f"topology {name}: {reason}; give a TPU's kind and shape, such as "
                        "v5e:2x4, v6e:2x4 or v5p:2x2x2") from error
    return Topology(name, devices[0].device_kind, tuple(devices), _usable(name, devices))


def _libtpu() -> str:
    """What the installed jax asks for."""
    wanted = (text.partition(";")[0].strip() for text in importlib.metadata.requires("jax") or ())
    return next((text for text in wanted if text.startswith("libtpu")), "libtpu")


def _usable(name: str, devices: Sequence) -> int:
    """Bytes of a device that the compiler gives to programs; the runtime keeps the rest. Read
    from its refusal of a program that fits nowhere."""
    everywhere = NamedSharding(Mesh(np.asarray(devices), ("all",)), PartitionSpec())
    large = jax.ShapeDtypeStruct(_TOO_LARGE, jnp.float32, sharding=everywhere)
    try:
        jax.jit(lambda x: x + 1).lower(large).compile()
    except jax.errors.JaxRuntimeError as error:
        if found := exhausted(error):
            return found[1]
        raise UserError(f"topology {name}: the compiler does not say how much memory a device "
                        f"has, only {' '.join(str(error).split())[:200]}; install "
                        f"'{_libtpu()}'") from error
    raise UserError(f"topology {name}: the compiler does not say how much memory a device has; "
                    f"install '{_libtpu()}'")
