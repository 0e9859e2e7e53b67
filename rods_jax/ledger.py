"""The life of every task, written down: tasks.jsonl in a run's folder, append-only.

One line an operation on the pool that changed something, in order:

    {"step", "epoch", "op", "events", "changes"}

`events` are for people: uids of tasks and names of enums (see Event). `changes` are for
machines: of each array of PoolState the slots that differ from the state before with their
new values, prompts where a slot changed its task, counters whole. Applied in order to an
empty pool they give the exact arrays (`replay`): float32 values are written as the doubles
they are, which JSON gives back. Seeds enter at step -1, before the first step.

    ledger = Ledger(folder / FILE, config.pool, prompt_len, config.boundary, name_of_serial)
    ledger.born(tasks)                                # offered: seeds, or fresh variants
    ledger.rejected(task.uid, TOO_LONG)               # did not reach the pool
    ledger.added(pool, rows, keep_A, placed_A)        # after task_pool.add
    ledger.record(Op.RETIRE, pool)                    # after any other operation
    ledger.flush()                                    # once a step: whole lines on disk
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import os
import pathlib
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np

from rods_jax import boundary, metrics, task_pool
from rods_jax.boundary import N_CATEGORIES, BoundaryConfig, GroupStats, Zone
from rods_jax.config import UserError
from rods_jax.task_pool import Dropped, Origin, PoolConfig, PoolRows, PoolState, Reason, Status
from rods_jax.types import Json, Task

FILE = "tasks.jsonl"  # its name in a run folder
TOO_LONG = "prompt_too_long"  # a reason to reject, beside those of Leak and Dropped
_PROMPTS = "prompt_NxP"
_LIVE = (Status.TRIAL, Status.ACTIVE)


class LedgerError(UserError):
    """Tasks that are not accounted for; one line with the figures."""


class Op(str, enum.Enum):
    """What a line tells of."""

    OFFER = "offer"  # seeds, or variants collected from the synthesizer
    CHECK = "check"  # a task that may not be offered to the pool
    ADD = "add"
    UPDATE = "update_stats"
    RETIRE = "retire"
    REVIVE = "revive"
    PRUNE = "prune"
    CHOOSE = "choose"
    RESTORED = "restored"  # the pool of a checkpoint whose file was gone


class Event(str, enum.Enum):
    BORN = "born"
    ADMITTED = "admitted"
    REJECTED = "rejected"
    SCORED = "scored"  # for the first time
    ZONE = "zone"  # its estimate lies in another boundary.Zone
    RETIRED = "retired"
    REVIVED = "revived"
    CHOSEN = "chosen"  # as a seed of variants
    FORGOTTEN = "forgotten"  # its slot holds another task


# What events of one kind are counted by.
_COUNTED_BY = {Event.BORN: "source", Event.ADMITTED: "source", Event.REJECTED: "reason",
               Event.ZONE: "to", Event.RETIRED: "reason"}


# ---------------------------------------------------------------- reading


def replay(path: str | os.PathLike, config: PoolConfig, max_prompt: int) -> PoolState:
    """The pool that the file tells of, as numpy arrays, bit for bit. Raises UserError for a
    damaged file; a last line that a kill cut short is left out."""
    return _replayed(_read(path), path, _blank(config, max_prompt))


def lives(path: str | os.PathLike) -> dict[str, list[dict[str, Json]]]:
    """Of every task (by uid) its events in order, each with the step and epoch it fell in."""
    found: dict[str, list[dict[str, Json]]] = {}
    for row in _read(path):
        for event in row["events"]:
            told = {key: value for key, value in event.items() if key != "task"}
            found.setdefault(event["task"], []).append(
                {"step": row["step"], "epoch": row["epoch"]} | told)
    return found


def _read(path: str | os.PathLike) -> list[dict[str, Json]]:
    """Every line; UserError for a file that is none of this kind."""
    rows = metrics.read(path)
    for number, row in enumerate(rows, start=1):
        events = row.get("events")
        if not (isinstance(row.get("changes"), dict) and isinstance(row.get("epoch"), int)
                and isinstance(events, list) and all(
                    isinstance(e, dict) and "task" in e and "event" in e for e in events)):
            raise UserError(f"{os.fspath(path)}: line {number} tells of no tasks; give the "
                            f"{FILE} of a run")
    return rows


def _replayed(rows: Sequence[Mapping[str, Json]], path: str | os.PathLike,
              state: PoolState) -> PoolState:
    for number, row in enumerate(rows, start=1):
        try:
            _apply(state, row["changes"])
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise UserError(f"{os.fspath(path)}: line {number} does not fit a pool of "
                            f"{len(state.uid_N)} tasks with prompts of {state.prompt_NxP.shape[1]} "
                            f"({error}); give the settings of its run") from error
    return state


def tally(events: Iterable[Mapping[str, Json]]) -> Counter[str]:
    """How many events of each kind: `scored`, `born_seed`, `retired_mastered`, ..."""
    return Counter(map(_kind, events))


def conservation(counts: Mapping[str, int], pool: PoolState, offered: int, waiting: int) -> None:
    """Raises LedgerError, naming the figures, where a task was lost or counted twice.

    counts: of `tally`. offered: variants that the synthesizer handed over; waiting: those of
    them that no admission has settled."""
    def total(event: Event) -> int:
        return sum(n for kind, n in counts.items() if kind.split("_")[0] == event.value)

    def n(event: Event, kind: enum.Enum) -> int:
        return counts.get(f"{event.value}_{kind.name.lower()}", 0)

    rejected = {kind: count for kind, count in counts.items() if kind.startswith("rejected_")}
    status_N = np.asarray(pool.status_N)
    dropped, retired = np.asarray(pool.dropped), np.asarray(pool.retired)
    born, admitted, forgotten = map(total, (Event.BORN, Event.ADMITTED, Event.FORGOTTEN))
    seeds = n(Event.BORN, Origin.SEED)
    pairs = {
        f"seeds {seeds} + offered {offered} = admitted {admitted} + waiting {waiting} + rejected "
        f"{sum(rejected.values())} {rejected}":
            (seeds + offered, admitted + waiting + sum(rejected.values())),
        "born = seeds + offered": (born, seeds + offered),
        "admitted = in the pool + forgotten":
            (admitted, int((status_N != Status.EMPTY).sum()) + forgotten),
        "retired = revived + still retired + forgotten":
            (total(Event.RETIRED), total(Event.REVIVED) + forgotten
             + int((status_N == Status.RETIRED).sum())),
        "revived = revived by the pool": (total(Event.REVIVED), int(pool.revived)),
        **{f"rejected as {why.name} = dropped by the pool":
           (n(Event.REJECTED, why), int(dropped[why])) for why in Dropped},
        **{f"retired as {why.name} = retired by the pool":
           (n(Event.RETIRED, why), int(retired[why])) for why in Reason},
    }
    broken = [f"{name}: {left} is not {right}" for name, (left, right) in pairs.items()
              if left != right]
    if broken:
        raise LedgerError(f"tasks are not accounted for ({'; '.join(broken)}): a line of {FILE} "
                          "was removed, or an operation on the pool was not recorded")


def _kind(event: Mapping[str, Json]) -> str:
    by = _COUNTED_BY.get(Event(event["event"]))
    return event["event"] if by is None else f"{event['event']}_{event[by]}"


# ---------------------------------------------------------------- writing


@dataclasses.dataclass(frozen=True)
class _View:
    """A pool on the host without its prompts; arrays by their names in PoolState."""

    arrays: Mapping[str, np.ndarray]
    zone_N: np.ndarray  # int8 Zone


@dataclasses.dataclass(frozen=True)
class Mark:
    """How far a file was written: bytes, and their CRC-32. A checkpoint keeps it, so that a
    resumed run knows its own file."""

    size: int = 0
    crc: int = 0

    def then(self, data: bytes) -> Mark:
        return Mark(self.size + len(data), zlib.crc32(data, self.crc))


class Ledger:
    """Compares the pool with what it was after the last operation. Lines wait in memory until
    `flush`; nothing is read from the disk or written to it before."""

    def __init__(self, path: pathlib.Path, config: PoolConfig, max_prompt: int,
                 band: BoundaryConfig, name: Callable[[int], str]):
        """name: the uid of the task that a serial number stands for, asked when the task is
        offered to the pool."""
        self.path = path
        self.counts: Counter[str] = Counter()
        self._name = name
        self._names: dict[int, str] = {}  # of the tasks in the pool
        self._zones = jax.jit(functools.partial(boundary.zones, config=band))
        self._empty = functools.partial(_blank, config, max_prompt)
        self._before = self._look(self._empty())
        self._pending: list[str] = []
        self._begun = False  # the file is this run's
        self.mark = Mark()
        self._step, self._epoch = -1, 0

    def at(self, step: int, epoch: int) -> None:
        """What is recorded from now on falls into this step."""
        self._step, self._epoch = step, epoch

    def born(self, tasks: Sequence[Task]) -> None:
        """Tasks that were offered: seeds, or variants of them."""
        self._write(Op.OFFER, [
            _event(Event.BORN, task.uid, source=task.source.value)
            | ({} if task.parent is None else {"parent": task.parent}) for task in tasks], {})

    def rejected(self, uid: str, reason: str) -> None:
        """A task that may not be offered to the pool: the value of a Leak, or TOO_LONG."""
        self._write(Op.CHECK, [_event(Event.REJECTED, uid, reason=reason)], {})

    def added(self, pool: PoolState, rows: PoolRows, keep_A: np.ndarray, placed_A) -> None:
        """After task_pool.add, with what was offered and where it was placed."""
        old, after = self._before.arrays, self._look(pool)
        reasons = _why_dropped(old, rows, keep_A, np.asarray(placed_A),
                               after.arrays["dropped"] - old["dropped"])
        uid_A = np.asarray(rows.uid_A)
        self._compare(Op.ADD, pool, after, [
            _event(Event.REJECTED, self._name(int(uid_A[a])), reason=why.name.lower())
            for a, why in reasons.items()])

    def chosen(self, pool: PoolState, serials: Sequence[int]) -> None:
        """After task_pool.choose: these became seeds. One that is chosen again in the same
        epoch leaves no other trace."""
        self._compare(Op.CHOOSE, pool, self._look(pool), [
            _event(Event.CHOSEN, self._names[serial]) for serial in serials])

    def record(self, op: Op, pool: PoolState) -> None:
        """After any operation whose events the arrays tell."""
        self._compare(op, pool, self._look(pool), [])

    def flush(self) -> None:
        """Appends what is pending. The first call of a new run begins the file anew. Raises
        UserError where somebody else changed or removed it since the last call."""
        if self._begun and not self._pending:
            return
        if self._begun and (not self.path.exists() or self.path.stat().st_size != self.mark.size):
            raise UserError(f"{self.path}: changed or removed while the run wrote to it; resume "
                            "from the last checkpoint, and leave the run's folder alone")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        data = "".join(self._pending).encode()
        with open(self.path, "ab" if self._begun else "wb") as file:
            file.write(data)
        self._begun, self.mark = True, self.mark.then(data)
        self._pending.clear()

    def resume(self, pool: PoolState, step: int, mark: Mark) -> None:
        """Takes up the file at a checkpoint of `step` with this pool, when it was written up to
        `mark`: what came later goes. Where the file is not that run's, it is put aside as
        FILE.unknown, and one line RESTORED of a new one tells the pool."""
        rows, own = [], self.path.exists() and _begins_with(self.path, mark)
        if own:
            os.truncate(self.path, mark.size)
            rows = _read(self.path)
        elif self.path.exists():
            aside = self.path.with_name(self.path.name + ".unknown")
            self.path.rename(aside)
            print(f"{self.path} is not what the checkpoint's run wrote: put aside as {aside.name}",
                  file=sys.stderr, flush=True)
        state = _replayed(rows, self.path, self._empty())
        self.counts, self._names, self._pending = Counter(), {}, []
        for row in rows:
            self.counts += tally(row["events"])
        self._names = {serial: self._name(serial) for serial in state.uid_N.tolist() if serial >= 0}
        self._before, self._begun, self.mark = self._look(state), own, mark if own else Mark()
        self.at(step - 1, rows[-1]["epoch"] if rows else 0)
        self.record(Op.RESTORED, pool)

    def summary(self, pool: PoolState, offered: int, waiting: int) -> dict[str, Json]:
        """Counts by event, and what `conservation` found wrong, None where all is well."""
        try:
            conservation(self.counts, pool, offered, waiting)
            broken = None
        except LedgerError as error:
            broken = str(error)
        return {"events": dict(sorted(self.counts.items())), "broken": broken}

    def _look(self, pool: PoolState) -> _View:
        arrays = {field.name: getattr(pool, field.name) for field in dataclasses.fields(pool)
                  if field.name != _PROMPTS}
        zone_N = self._zones(GroupStats(pool.mean_N, pool.var_N, pool.rollouts_N))
        # Copies: a view of the buffers would keep the next operation from taking them over.
        return _View(*jax.tree.map(np.array, jax.device_get((arrays, zone_N))))

    def _compare(self, op: Op, pool: PoolState, after: _View, events: list[dict]) -> None:
        before, self._before = self._before, after
        changes = _changes(before.arrays, after.arrays)
        if "uid_N" in changes:
            slots, _ = changes["uid_N"]
            prompt_NxP, length_N = np.asarray(getattr(pool, _PROMPTS)), after.arrays["prompt_len_N"]
            changes[_PROMPTS] = [slots, [prompt_NxP[n, :length_N[n]].tolist() for n in slots]]
        self._write(op, self._told(before, after) + events, changes)

    def _told(self, before: _View, after: _View) -> list[dict]:
        """The events that two states of the pool show, slot by slot."""
        old, new, events = before.arrays, after.arrays, []
        touched_N = (before.zone_N != after.zone_N) | (old["uid_N"] != new["uid_N"])
        for name in ("status_N", "visits_N"):
            touched_N |= old[name] != new[name]
        for slot in np.flatnonzero(touched_N).tolist():
            was, serial = int(old["uid_N"][slot]), int(new["uid_N"][slot])
            if was != serial:
                if was >= 0:
                    events.append(_event(Event.FORGOTTEN, self._names.pop(was), slot=slot))
                if serial >= 0:
                    self._names[serial] = self._name(serial)
                    source = Origin(new["source_N"][slot]).name.lower()
                    events.append(_event(Event.ADMITTED, self._names[serial], slot=slot,
                                         source=source))
                continue
            told = functools.partial(_event, uid=self._names[serial],
                                     mean=round(float(new["mean_N"][slot]), 4))
            if old["visits_N"][slot] == 0 < new["visits_N"][slot]:
                events.append(told(Event.SCORED))
            if before.zone_N[slot] != after.zone_N[slot]:
                left, right = (Zone(int(view.zone_N[slot])) for view in (before, after))
                events.append(told(Event.ZONE, **{"from": left.name.lower(),
                                                  "to": right.name.lower()}))
            was_live, is_live = (arrays["status_N"][slot] in _LIVE for arrays in (old, new))
            if was_live and not is_live:
                reason = Reason(int(new["reason_N"][slot])).name.lower()
                events.append(told(Event.RETIRED, reason=reason))
            elif is_live and not was_live:
                events.append(told(Event.REVIVED))
        return events

    def _write(self, op: Op, events: list[dict], changes: dict[str, Json]) -> None:
        if events or changes:
            self.counts += tally(events)
            self._pending.append(_line({"step": self._step, "epoch": self._epoch, "op": op.value,
                                        "events": events, "changes": changes}))


def _begins_with(path: pathlib.Path, mark: Mark) -> bool:
    with open(path, "rb") as file:
        return Mark().then(file.read(mark.size)) == mark


def _event(event: Event, uid: str, **details: Json) -> dict[str, Json]:
    return {"event": event.value, "task": uid} | details


def _line(row: Mapping[str, Json]) -> str:
    return json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n"


def _why_dropped(old: Mapping[str, np.ndarray], rows: PoolRows, keep_A: np.ndarray,
                 placed_A: np.ndarray, dropped: np.ndarray) -> dict[int, Dropped]:
    """Row -> why it was not placed. dropped: by how much the pool's own counts grew. The rules
    are those of task_pool.add; how many rows P_MAX refuses is read from the counts: it is the
    last generated ones."""
    uid_A, length_A, category_A, source_A = map(
        np.asarray, (rows.uid_A, rows.prompt_len_A, rows.category_A, rows.source_A))
    longest = rows.prompt_AxP.shape[1]
    known, found = set(old["uid_N"].tolist()), {}
    for a in np.flatnonzero(keep_A).tolist():
        uid = int(uid_A[a])
        if (uid < 0 or not 1 <= length_A[a] <= longest or not 0 <= category_A[a] < N_CATEGORIES
                or source_A[a] not in tuple(Origin)):
            found[a] = Dropped.INVALID
        elif placed_A[a] < 0:
            found[a] = Dropped.DUPLICATE if uid in known else Dropped.OVERFLOW
            known.add(uid)
        else:
            known.add(uid)
    variants = [a for a, why in found.items()
                if why is Dropped.OVERFLOW and source_A[a] == Origin.GENERATED]
    refused = int(dropped[Dropped.P_MAX])
    return found | dict.fromkeys(variants[len(variants) - refused:], Dropped.P_MAX)


# ---------------------------------------------------------------- differences


def _blank(config: PoolConfig, max_prompt: int) -> PoolState:
    """An empty pool of numpy arrays that may be written to."""
    return jax.tree.map(np.array, task_pool.init(config, max_prompt))


def _changes(old: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray]) -> dict[str, Json]:
    """Array -> [slots, values] where it has a slot a task, else the whole counter."""
    changes: dict[str, Json] = {}
    for name, values in new.items():
        differs = _bits(old[name]) != _bits(values)
        if not differs.any():
            continue
        if name.endswith("_N"):
            slots = np.flatnonzero(differs)
            changes[name] = [slots.tolist(), values[slots].tolist()]
        else:
            changes[name] = values.tolist()
    return changes


def _bits(values: np.ndarray) -> np.ndarray:
    """0.0 and -0.0 are equal, and are not the same bits."""
    return values.view(np.uint32) if values.dtype == np.float32 else values


def _apply(state: PoolState, changes: Mapping[str, Json]) -> None:
    """Writes a line's changes into numpy arrays, in place."""
    for name, change in changes.items():
        array = getattr(state, name)
        if name == _PROMPTS:
            for slot, ids in zip(*change):
                array[slot] = 0
                array[slot, :len(ids)] = ids
        elif name.endswith("_N"):
            slots, values = change
            array[slots] = values
        else:
            array[...] = change
