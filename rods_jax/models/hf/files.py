"""The safetensors files of a folder: which tensor lies where, pieces of it, writing them.

A folder holds model.safetensors, or shards that model.safetensors.index.json lists. Only
headers are read when it is opened; `Weights.read` reads no more than the piece it is asked
for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

# The number formats that are read and written: the file's tag and the name numpy knows.
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_LFS_POINTER = b"version https://git-lfs"


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor as its file's header describes it. dtype: the header's tag ("BF16")."""

    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Weights:
    """Open files. `tensors` by name; a name occurs in one file only."""

    folder: pathlib.Path
    tensors: Mapping[str, Stored]
    handles: Mapping[pathlib.Path, Any]

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """A copy of the part of a tensor that `index` cuts out (without steps; axes that it
        does not mention are whole)."""
        handle = self.handles[self.tensors[name].file]
        return handle.get_slice(name)[index] if index else handle.get_tensor(name)


@contextlib.contextmanager
def open_weights(folder: str | os.PathLike) -> Iterator[Weights]:
    """The checkpoint in `folder`. ValueError in one line, naming the file and the tensor,
    for a folder without weights, a file that is missing, cut short or no safetensors file,
    and an index that does not fit its files."""
    folder = pathlib.Path(folder)
    listed = _listed(folder)
    for file in listed:
        if not file.is_file():
            raise ValueError(f"{file}, which {INDEX} names, is not there: fetch it")
    home = {name: file for file, names in listed.items() for name in names or ()}
    tensors: dict[str, Stored] = {}
    with contextlib.ExitStack() as stack:
        handles = {file: stack.enter_context(_opened(file)) for file in listed}
        for file, names in listed.items():
            found = _header_names(file)
            for name in sorted((names or set()) - found):
                raise ValueError(f"tensor {name} is not in {file}, where {INDEX} puts it: "
                                 "fetch both again")
            for name in sorted(found):
                if names is not None and name not in names:
                    other = f"{home[name].name} too" if name in home else "no file"
                    raise ValueError(f"tensor {name} is in {file}, {INDEX} finds it in {other}"
                                     ": fetch both again")
                part = handles[file].get_slice(name)
                tensors[name] = Stored(file, part.get_dtype(), tuple(part.get_shape()))
        yield Weights(folder, tensors, handles)


def write_weights(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    """One file of C-contiguous arrays. OSError where the disk is full or refuses."""
    save_file = _safetensors().numpy.save_file
    error_type = _safetensors().SafetensorError
    try:
        # Readers that expect PyTorch's tensors ask for this note.
        save_file(dict(tensors), path, metadata={"format": "pt"})
        # The library writes for the user alone; the file shall be as open as its folder.
        os.chmod(path, path.parent.stat().st_mode & 0o666)
    except error_type as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise ValueError(f"{path} could not be written: {_one_line(error)}") from None
        code = int(number.group(1))
        raise OSError(code, os.strerror(code), str(path)) from None


def write_index(path: pathlib.Path, files: Mapping[str, str], total_bytes: int) -> None:
    """files: tensor -> name of the file that holds it."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(files)}
    path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _listed(folder: pathlib.Path) -> dict[pathlib.Path, set[str] | None]:
    """The files to open, each with the tensors that the index expects in it (None: there is
    no index)."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give the folder that holds config.json and "
                         f"{WEIGHTS}")
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: download the model and give the folder "
                         "it is in")
    single, index = folder / WEIGHTS, folder / INDEX
    if not index.exists():
        if single.exists():
            return {single: None}
        raise ValueError(_no_weights(folder))
    listed: dict[pathlib.Path, set[str] | None] = {}
    for name, file in _weight_map(index).items():
        listed.setdefault(folder / file, set()).add(name)
    if single.exists() and single not in listed:
        raise ValueError(f"{folder} holds both {WEIGHTS} and {INDEX}, which does not name it: "
                         "remove the one that is old")
    return listed


def _no_weights(folder: pathlib.Path) -> str:
    if any(folder.glob("*.safetensors")):
        return f"{folder} holds *.safetensors files but no {INDEX}, which lists them: fetch it"
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        return (f"{folder} holds PyTorch weights and no {WEIGHTS}: convert them to safetensors "
                "(save_pretrained of transformers does)")
    return f"{folder} holds neither {WEIGHTS} nor {INDEX}: give the folder of a whole model"


def _weight_map(index: pathlib.Path) -> dict[str, str]:
    try:
        content = json.loads(index.read_bytes(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{index} is not JSON ({_one_line(error)}): fetch it again") from None
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{index} has no weight_map: fetch it again")
    for name, file in found.items():
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", file):
            raise ValueError(f"{index} puts tensor {name} into {file!r}, which is not the name "
                             "of a safetensors file beside it: do not trust this folder")
    return found


def _opened(file: pathlib.Path):
    safetensors = _safetensors()
    try:
        return safetensors.safe_open(file, framework="np")
    except safetensors.SafetensorError as error:
        with open(file, "rb") as f:
            start = f.read(len(_LFS_POINTER))
        if start == _LFS_POINTER:
            raise ValueError(f"{file} is a Git LFS pointer, not the weights: run "
                             "`git lfs pull`") from None
        raise ValueError(f"{file} is not a whole safetensors file ({_one_line(error)}): "
                         "fetch it again") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {_one_line(error)}") from None


def _header_names(file: pathlib.Path) -> set[str]:
    """Names in the header of a file that could be opened. The library takes the last of two
    tensors of one name; here that is an error."""
    with open(file, "rb") as f:
        length, = struct.unpack("<Q", f.read(8))
        header = f.read(length)
    try:
        return set(json.loads(header, object_pairs_hook=_unique)) - {"__metadata__"}
    except ValueError as error:
        raise ValueError(f"{file} has a header in doubt ({_one_line(error)}): "
                         "fetch it again") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON text, whose keys go into messages of one line."""
    found = dict(pairs)
    for name in found:
        if not name.isprintable():
            raise ValueError(f"{name!r} is no name")
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} is there twice")
    return found


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError:
        raise ValueError("the package safetensors is not installed: "
                         "pip install safetensors") from None
    return safetensors
