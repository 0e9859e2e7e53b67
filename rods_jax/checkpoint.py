"""One atomic checkpoint a step: arrays and host state together, or not at all.

    root/step_000000120/
        manifest.json   step, name, shape and dtype of every array
        host.json       everything that is not an array
        arrays/         written by Orbax

A step is written into a hidden temporary directory, flushed to disk and then renamed, so a
run killed while saving finds the previous step whole. Arrays are stored under their leaf
names, not as the pytree that held them, and are read to the shardings of the run that
restores: nothing depends on the mesh that wrote them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from rods_jax.config import UserError, no_room
from rods_jax.types import Json

FORMAT = 1
_STEP = re.compile(r"step_(\d{9,})")
_TEMPORARY = ".tmp-"  # unfinished, or half deleted: never read
_REPLACED = ".old-"  # the previous version of a step that is being written again


class CheckpointError(UserError):
    """A checkpoint that cannot be saved or read; one line naming path and leaf."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """`arrays` has the structure, dtypes and shardings that `like` asked for."""

    step: int
    arrays: Any
    host: Json
    path: pathlib.Path


def step_dir(root: str | os.PathLike, step: int) -> pathlib.Path:
    return pathlib.Path(root).absolute() / f"step_{step:09d}"


def steps(root: str | os.PathLike) -> list[int]:
    """Steps with a finished checkpoint, ascending; empty where there is no such folder."""
    root = pathlib.Path(root)
    if not root.is_dir():
        return []
    found = (_STEP.fullmatch(p.name) for p in root.iterdir())
    return sorted(int(m.group(1)) for m in found if m)


def latest(root: str | os.PathLike) -> pathlib.Path | None:
    """The newest finished checkpoint below `root`, or None."""
    found = steps(root)
    return step_dir(root, found[-1]) if found else None


def clean(root: str | os.PathLike) -> tuple[str, ...]:
    """Removes what a killed save left behind and returns its names. Only the process that
    writes to `root` may call it, at its start: a reader would remove a save in progress."""
    root = pathlib.Path(root)
    left = []
    if root.is_dir() and jax.process_index() == 0:
        for path in sorted(root.iterdir()):
            if path.name.startswith(_REPLACED):
                # Killed between the two renames of a rewrite: the old version is the valid one.
                final = root / path.name.removeprefix(_REPLACED)
                left.append(path.name)
                shutil.rmtree(path) if final.exists() else path.rename(final)
            elif path.name.startswith(_TEMPORARY):
                left.append(path.name)
                shutil.rmtree(path)
    _barrier("checkpoint_clean")
    return tuple(left)


def rewind(root: str | os.PathLike, step: int) -> tuple[int, ...]:
    """Moves the checkpoints after `step` to `root/abandoned/` and returns their steps; to
    be called by a run that goes on from an older step."""
    later = tuple(s for s in steps(root) if s > step)
    if jax.process_index() == 0:
        for s in later:
            target = pathlib.Path(root) / "abandoned" / step_dir(root, s).name
            target.parent.mkdir(exist_ok=True)
            if target.exists():
                shutil.rmtree(target)
            step_dir(root, s).rename(target)
    _barrier("checkpoint_rewind")
    return later


# ---------------------------------------------------------------- save


def save(root: str | os.PathLike, step: int, arrays: Any, host: Json, keep: int = 2) -> pathlib.Path:
    """Writes the checkpoint of `step` and then deletes all but the newest `keep`.

    `arrays`: pytree of jax or numpy arrays, typed PRNG keys and Python numbers. `host`: JSON.
    On several processes all call it with the same step on a shared folder; process 0's
    `host` is the one kept. Raises CheckpointError, also where there is no room, the disk's
    other OSErrors, or ValueError for a host state that JSON would change; each leaves earlier
    checkpoints as they were.
    """
    if keep < 1:
        raise CheckpointError(f"keep is {keep}: at least one checkpoint must stay")
    root = pathlib.Path(root).absolute()
    if later := [s for s in steps(root) if s > step]:
        raise CheckpointError(
            f"{root}: holds step {later[-1]}, later than step {step} that is to be saved; "
            f"resume from step {later[-1]} or move it away with checkpoint.rewind")
    _check_json(host, "host")
    leaves, manifest = _to_storage(arrays)
    final = step_dir(root, step)
    temporary = root / (_TEMPORARY + final.name)
    primary = jax.process_index() == 0
    try:
        if primary:
            root.mkdir(parents=True, exist_ok=True)
            if temporary.exists():
                shutil.rmtree(temporary)
            temporary.mkdir()
        _barrier("checkpoint_begin")
        if leaves:
            _write_arrays(temporary / "arrays", leaves)
        _barrier("checkpoint_arrays")
        if primary:
            (temporary / "host.json").write_text(json.dumps(host), encoding="utf-8")
            (temporary / "manifest.json").write_text(
                json.dumps({"format": FORMAT, "step": step, "leaves": manifest}, indent=1),
                encoding="utf-8")
            _flush(temporary)
            _publish(temporary, final)
    except (OSError, ValueError) as e:
        if not (why := no_room(e)):
            raise
        shutil.rmtree(temporary, ignore_errors=True)  # what is left of the room
        whole = latest(root)
        raise CheckpointError(
            f"{root}: step {step} could not be saved, {why}"
            + (f", and go on from {whole.name} with --resume" if whole else "")) from e
    if primary:
        for old in steps(root)[:-keep]:
            _remove(step_dir(root, old))
    _barrier("checkpoint_end")
    return final


def _write_arrays(folder: pathlib.Path, leaves: Mapping[str, Any]) -> None:
    with _no_write_left_behind(), ocp.StandardCheckpointer() as writer:
        writer.save(folder, leaves)


class _PatientLoop(asyncio.SelectorEventLoop):
    """Closes after its tasks have ended. Orbax closes a loop when its first write fails; each of
    the others would then have a traceback printed when it ends, by threads out of reach."""

    def close(self) -> None:
        if not self.is_closed() and (left := asyncio.all_tasks(self)):
            self.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        super().close()


class _PatientPolicy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return _PatientLoop()


@contextlib.contextmanager
def _no_write_left_behind() -> Iterator[None]:
    """Inside, loops are patient, and an error that is raised is not also logged by Orbax."""
    logger, policy = logging.getLogger("absl"), asyncio.get_event_loop_policy()

    def news(record: logging.LogRecord) -> bool:
        return record.exc_info is None

    logger.addFilter(news)
    asyncio.set_event_loop_policy(_PatientPolicy())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(policy)
        logger.removeFilter(news)


def _to_storage(arrays: Any) -> tuple[dict[str, Any], dict[str, Json]]:
    """Leaves by name as plain arrays, and what the manifest says of them. Orbax takes no
    array without elements; of those the manifest says all there is to say."""
    stored, manifest = {}, {}
    for name, leaf in _named_leaves(arrays):
        if _is_key(leaf):
            manifest[name] = {"shape": list(leaf.shape), "dtype": str(leaf.dtype),
                              "key_impl": str(jax.random.key_impl(leaf))}
            stored[name] = jax.random.key_data(leaf)
            continue
        leaf = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
        if leaf.dtype == object:
            raise CheckpointError(f"leaf {name} is not an array; move it to the host state")
        manifest[name] = {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
        stored |= {name: leaf} if leaf.size else {}
    if not manifest:
        raise CheckpointError("there is no array to save; pass at least one")
    return stored, manifest


def _publish(temporary: pathlib.Path, final: pathlib.Path) -> None:
    """Renames into place. A step that is written again is set aside first, since a rename
    cannot replace a folder that has files; `clean` undoes a kill in between."""
    old = final.parent / (_REPLACED + final.name)
    if final.exists():
        final.rename(old)
    temporary.rename(final)
    _flush_dir(final.parent)
    if old.exists():
        shutil.rmtree(old)


def _remove(path: pathlib.Path) -> None:
    hidden = path.parent / (_TEMPORARY + "delete-" + path.name)
    path.rename(hidden)  # so that a kill leaves no half-deleted step that looks whole
    shutil.rmtree(hidden)


def _flush(folder: pathlib.Path) -> None:
    for parent, _, files in os.walk(folder):
        for name in files:
            with open(os.path.join(parent, name), "rb") as f:
                os.fsync(f.fileno())
        _flush_dir(pathlib.Path(parent))


def _flush_dir(folder: pathlib.Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---------------------------------------------------------------- restore


def restore(path: str | os.PathLike, like: Any, partial: bool = False) -> Restored:
    """Reads a step's folder, or the newest step below a root or in a run's folder.

    `like`: pytree whose leaves say shape and dtype and where the array goes: to the sharding
    of a ShapeDtypeStruct or committed jax array, to the default device without one, to host
    memory for a numpy array, to a Python number for a Python number. The checkpoint must
    hold exactly the leaves of `like`, or with `partial` at least those; the others are then
    not read. Raises CheckpointError.
    """
    folder = _find(pathlib.Path(path).absolute())
    manifest = _read_manifest(folder)
    host = _read_json(folder / "host.json")
    wanted = dict(_named_leaves(like))
    _check_leaves(folder, manifest["leaves"], wanted, partial)
    stored = _read_arrays(folder, {n: _storage_like(leaf) for n, leaf in wanted.items()
                                   if 0 not in np.shape(leaf)})
    arrays = jax.tree_util.tree_unflatten(
        jax.tree_util.tree_structure(like),
        [_from_storage(stored[n], leaf, manifest["leaves"][n]) if n in stored else _empty(leaf)
         for n, leaf in wanted.items()])
    return Restored(manifest["step"], arrays, host, folder)


def read_host(path: str | os.PathLike) -> tuple[int, Json]:
    """(step, host state) of a checkpoint, without its arrays. Raises CheckpointError."""
    folder = _find(pathlib.Path(path).absolute())
    return _read_manifest(folder)["step"], _read_json(folder / "host.json")


def fingerprint(arrays: Any) -> str:
    """Eight hex digits that tell one pytree of arrays from another, bit for bit and wherever
    they lie: so much is kept of weights that a checkpoint leaves out because no step changes
    them."""
    kinds = [[name, list(leaf.shape), str(leaf.dtype)] for name, leaf in _named_leaves(arrays)]
    sums = np.asarray(jax.tree.leaves(jax.device_get(_sums(arrays))), np.uint32)
    return f"{zlib.crc32(json.dumps(kinds).encode() + sums.tobytes()):08x}"


@jax.jit
def _sums(arrays: Any) -> Any:
    """uint32 a leaf: the sum of its numbers' bits, each scrambled with the place it has. The
    scrambling must not be linear: a sum of bits does not see two signs that changed."""
    def scrambled(x):  # the finalizer of MurmurHash3, one to one
        x = (x ^ x >> 16) * jnp.uint32(0x85EBCA6B)
        x = (x ^ x >> 13) * jnp.uint32(0xC2B2AE35)
        return x ^ x >> 16

    def one(leaf):
        bits = leaf.view(f"uint{8 * leaf.dtype.itemsize}").astype(jnp.uint32).reshape(-1)
        place = scrambled(jax.lax.iota(jnp.uint32, bits.size))
        return scrambled(bits + place).sum(dtype=jnp.uint32)
    return jax.tree.map(lambda leaf: one(jnp.asarray(leaf)), arrays)


def _find(path: pathlib.Path) -> pathlib.Path:
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint folder")
    if (path / "manifest.json").is_file():
        return path
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    found = latest(path)
    if found is None:
        raise CheckpointError(f"{path}: holds no finished checkpoint (step_NNNNNNNNN)")
    return found


def _read_manifest(folder: pathlib.Path) -> dict[str, Json]:
    manifest = _read_json(folder / "manifest.json")
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{folder}: its format is not {FORMAT}, which this code reads")
    if missing := {"step", "leaves"} - manifest.keys():
        raise CheckpointError(f"{folder}/manifest.json: damaged (no {min(missing)}); restore an "
                              "older step")
    return manifest


def _read_json(path: pathlib.Path) -> Json:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; this is not a finished checkpoint") from None
    except ValueError as e:
        raise CheckpointError(f"{path}: damaged ({e}); restore an older step") from e


def _check_leaves(folder: pathlib.Path, saved: Mapping[str, Json], wanted: Mapping[str, Any],
                  partial: bool) -> None:
    for name, leaf in wanted.items():
        if name not in saved:
            raise CheckpointError(f"{folder}: leaf {name} is missing; was it saved with "
                                  "another model or config?")
        shape = list(np.shape(leaf))
        if saved[name]["shape"] != shape:
            raise CheckpointError(f"{folder}: leaf {name} has shape {saved[name]['shape']}, "
                                  f"expected {shape}; restore with the config it was saved with")
        if hasattr(leaf, "dtype") and saved[name]["dtype"] != str(leaf.dtype):
            raise CheckpointError(f"{folder}: leaf {name} has dtype {saved[name]['dtype']}, "
                                  f"expected {leaf.dtype}; restore with the config it was saved with")
    for name in saved:
        if name not in wanted and not partial:
            raise CheckpointError(f"{folder}: holds leaf {name}, which this run does not have; "
                                  "restore with the config it was saved with")


def _storage_like(leaf: Any) -> Any:
    """What Orbax is asked for: numpy where no device placement was given, so that it never
    looks at the sharding that the writer had."""
    sharding = _sharding(leaf)
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    shape, dtype = leaf.shape, leaf.dtype
    if _is_key(leaf):  # stored as its uint32 words, on every device of the sharding
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        shape, dtype = words.shape, words.dtype
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=shape, dtype=dtype)


def _read_arrays(folder: pathlib.Path, args: dict[str, Any]) -> dict[str, Any]:
    if not args:
        return {}
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            item = {n: 0 for n in args}
            return reader.restore(folder / "arrays", args=ocp.args.PyTreeRestore(
                item=item, restore_args=args, partial_restore=True))
    except (OSError, ValueError, KeyError) as e:
        reason = " ".join(str(e).split())[:200]
        raise CheckpointError(f"{folder}: its arrays cannot be read ({reason}); "
                              "restore an older step") from e


def _from_storage(value: Any, like: Any, saved: Mapping[str, Json]) -> Any:
    if "key_impl" in saved:
        return jax.random.wrap_key_data(jnp.asarray(value), impl=saved["key_impl"])
    if isinstance(like, (bool, int, float, complex)):
        return type(like)(np.asarray(value).item())
    if isinstance(like, (np.ndarray, np.generic)):
        return np.asarray(value)
    return jnp.asarray(value)


def _empty(like: Any) -> Any:
    """The array without elements that `like` describes, where `like` wants it."""
    if isinstance(like, np.ndarray):
        return np.zeros(like.shape, like.dtype)
    return jax.device_put(jnp.zeros(like.shape, like.dtype), _sharding(like))


def _sharding(leaf: Any) -> jax.sharding.Sharding | None:
    if isinstance(leaf, jax.Array):
        return leaf.sharding if leaf.committed else None
    return getattr(leaf, "sharding", None)


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Leaves with dotted names, in the tree's order."""
    named = [(jax.tree_util.keystr(path, simple=True, separator=".") or "value", leaf)
             for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]
    names = [n for n, _ in named]
    if len(set(names)) != len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise CheckpointError(f"two leaves are called {twice}; rename one of them")
    return named


def _check_json(value: Json, where: str) -> None:
    """Refuses what would come back changed: non-text keys, tuples, arrays, enums."""
    if value is None or type(value) in (bool, int, float, str):
        return
    if type(value) is dict:
        for key, inner in value.items():
            if type(key) is not str:
                raise ValueError(f"{where} has the key {key!r}; JSON keys are text, use str()")
            _check_json(inner, f"{where}.{key}")
    elif type(value) is list:
        for i, inner in enumerate(value):
            _check_json(inner, f"{where}[{i}]")
    else:
        raise ValueError(f"{where} is a {type(value).__name__}, which JSON does not give back; "
                         "convert it to null, bool, int, float, text, list or dict")


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
