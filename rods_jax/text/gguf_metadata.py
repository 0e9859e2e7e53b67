"""The key-value block at the start of a GGUF file, read in plain Python.

Layout (little-endian): "GGUF", version u32, number of tensors u64, number of pairs u64, then
each pair as a string key, a type u32 and the value. A string is its length u64 and UTF-8
bytes; an array is an element type u32, a length u64 and the elements. See the GGUF section of
the ggml documentation.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import Any

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


def read_metadata(path: str | os.PathLike) -> dict[str, Any]:
    """All pairs of the file. Raises ValueError where it is no whole GGUF file of version 2
    or 3; the tensors behind the pairs are not looked at."""
    if not os.path.isfile(path):
        raise ValueError(f"{path} is not a file: check the path")
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: check the path")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _pairs(data, path)
            except (struct.error, UnicodeDecodeError, IndexError, RecursionError) as error:
                raise ValueError(f"{path} is cut off or damaged ({error}): "
                                 "fetch it again") from None


def _pairs(data: mmap.mmap, path: str | os.PathLike) -> dict[str, Any]:
    version, _, n_pairs = struct.unpack_from("<IQQ", data, 4)
    if version not in _VERSIONS:
        raise ValueError(f"{path} is GGUF version {version}, this code reads 2 and 3: convert it")
    at = 24
    pairs: dict[str, Any] = {}
    for _ in range(n_pairs):
        key, at = _string(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        pairs[key], at = _value(data, at + 4, kind)
    return pairs


def _string(data: mmap.mmap, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    end = at + 8 + length
    if end > len(data):
        raise IndexError("a string runs past the end")
    return data[at + 8: end].decode(), end


def _value(data: mmap.mmap, at: int, kind: int) -> tuple[Any, int]:
    if kind == _STRING:
        return _string(data, at)
    if kind in _SCALARS:
        form = "<" + _SCALARS[kind]
        return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    if kind != _ARRAY:
        raise IndexError(f"unknown value type {kind}")
    of, length = struct.unpack_from("<IQ", data, at)
    at += 12
    if of in _SCALARS:
        form = f"<{length}{_SCALARS[of]}"
        return list(struct.unpack_from(form, data, at)), at + struct.calcsize(form)
    items = []
    for _ in range(length):
        item, at = _value(data, at, of)
        items.append(item)
    return items, at
