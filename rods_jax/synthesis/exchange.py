"""What the trainer and the synthesizer write to each other: a folder that both can reach.

    header.json     what all attempts depend on; by the trainer, once
    requests.jsonl  by the trainer: which attempts, numbered from 0
    outcomes.jsonl  by the synthesizer: what became of them, in the same order

A request is `{"n", "g", "step", "index"}` and its seed: `"task"` whole, or `"seed"`, the uid of
one that an earlier request brought. A trainer that takes up a checkpoint made when `r` requests
were asked writes `{"rewind": r, "g": generation}`: requests from number r on are void, those
that follow belong to a new generation, and the file stays append-only. `{"end": true}`: the run
is over. An outcome is `{"n", "g", "outcome"}` with the number and the generation of what it
answers; those of void requests are void. `{"halt": why, "g"}`: the synthesizer gave up.

So both sides know from the files alone where they stand, however either was killed: answered is
what has an outcome, and the next outcome is that of the first request without one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from rods_jax.synthesis.journal import JournalError, Tail
from rods_jax.synthesis.novelty import Known
from rods_jax.synthesis.outcome import Candidate, Outcome, outcome_from_json
from rods_jax.tasks.lock import locked
from rods_jax.types import Json, Task

FOLDER = "synthesis"  # its name in a run's folder
HEADER, REQUESTS, OUTCOMES = "header.json", "requests.jsonl", "outcomes.jsonl"
LOCK, LOG = "server.lock", "log.txt"  # held by the synthesizer; what its process prints
TRAINER_LOCK = "trainer.lock"
VERSION = 1
BUSY_S = 10.0  # for the synthesizer of a trainer that was killed just now to end


@dataclasses.dataclass(frozen=True)
class Header:
    """suite: a SuiteSpec as JSON; config: a SynthesisConfig as JSON; known: fingerprints of all
    tasks that exist already, held-in ones included, as Known.to_json gives them."""

    suite: Json
    config: Json
    run_seed: int
    known: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        """Whole or not at all: the synthesizer may be waiting for it."""
        row = dataclasses.asdict(self) | {"version": VERSION}
        part = folder / f".{HEADER}"
        with open(part, "w", encoding="utf-8") as file:
            json.dump(row, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(folder / HEADER)

    @classmethod
    def read(cls, folder: Path) -> Header:
        """FileNotFoundError where there is none; JournalError where it cannot be used."""
        path = folder / HEADER
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
            if (version := row.pop("version")) != VERSION:
                raise ValueError(f"has version {version}, this code reads {VERSION}")
            Known.from_json(row["known"])
            return cls(**row | {"known": tuple(row["known"])})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise JournalError(f"{path}: is not the header of a run's synthesis ({error}); begin "
                               "the run anew, or go on with the version that wrote it") from error


@contextlib.contextmanager
def serving(folder: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Holds the folder as its one synthesizer. JournalError where another does after `wait_s`
    seconds."""
    with _holding(folder / LOCK, f"{folder}: another synthesizer serves it; end that one first",
                  wait_s):
        yield


@contextlib.contextmanager
def training(folder: Path) -> Iterator[None]:
    """Holds the folder as its one trainer. JournalError where another run does after a while."""
    with _holding(folder / TRAINER_LOCK, f"{folder}: another run uses it; end that one first, or "
                  "give this one a folder of its own", BUSY_S):
        yield


@contextlib.contextmanager
def _holding(path: Path, busy: str, wait_s: float) -> Iterator[None]:
    end = time.monotonic() + wait_s
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(path, busy))
                break
            except ValueError as error:
                if time.monotonic() >= end:
                    raise JournalError(busy) from error
            time.sleep(0.05)
        yield


# ---------------------------------------------------------------- requests


@dataclasses.dataclass(frozen=True)
class Request:
    number: int
    generation: int
    seed: Task
    step: int
    index: int


class Asked:
    """The requests that are not void, as the lines tell them, and by number and generation
    those that are. `ended`: the run is over."""

    def __init__(self):
        self.requests: list[Request] = []
        self.void: dict[tuple[int, int], Request] = {}
        self.generation = 0
        self.ended = False
        self._brought: dict[str, Request] = {}  # by uid of the seed: who brought it whole
        self._digest = hashlib.sha256()

    def apply(self, row: Mapping[str, Json]) -> None:
        """Reads a line of the file."""
        if "end" in row:
            self.ended = True
        elif "rewind" in row:
            if not 0 <= row["rewind"] <= len(self.requests) or row["g"] <= self.generation:
                raise ValueError(f"rewinds to {row['rewind']}, generation {row['g']}, after "
                                 f"{len(self.requests)} requests of {self.generation}")
            self.rewind(row["rewind"], row["g"])
        else:
            seed = (Task.from_json(row["task"]) if "task" in row
                    else self._brought[row["seed"]].seed)
            if (row["n"], row["g"]) != (len(self.requests), self.generation):
                raise ValueError(f"is request {row['n']} of generation {row['g']}, after "
                                 f"{len(self.requests)} requests of {self.generation}")
            self._add(seed, row["step"], row["index"])

    def ask(self, seed: Task, step: int, index: int) -> dict[str, Json]:
        """Adds a request and returns its line."""
        brought = self._brought.get(seed.uid)
        known = brought is not None and brought.seed == seed
        request = self._add(seed, step, index)
        return {"n": request.number, "g": request.generation, "step": step, "index": index} | (
            {"seed": seed.uid} if known else {"task": seed.to_json()})

    def rewind(self, number: int, generation: int) -> dict[str, Json]:
        """Makes the requests from `number` on void and returns the line that says so."""
        kept, dropped = self.requests[:number], self.requests[number:]
        self.void |= {(request.number, request.generation): request for request in dropped}
        self.requests, self._brought = [], {}
        self._digest, self.generation, self.ended = hashlib.sha256(), generation, False
        for request in kept:
            self._enter(request)
        return {"rewind": number, "g": generation}

    @property
    def digest(self) -> str:
        """Tells these requests from others; the generation is no part of it."""
        return self._digest.hexdigest()[:16]

    def _add(self, seed: Task, step: int, index: int) -> Request:
        request = Request(len(self.requests), self.generation, seed, step, index)
        self._enter(request)
        return request

    def _enter(self, request: Request) -> None:
        self.requests.append(request)
        brought = self._brought.get(request.seed.uid)
        if brought is None or brought.seed != request.seed:
            self._brought[request.seed.uid] = request
        self._digest.update(f"{request.seed.uid} {request.seed.content_hash} {request.step} "
                            f"{request.index}\n".encode())


# ---------------------------------------------------------------- outcomes


def outcome_row(request: Request, outcome: Outcome) -> dict[str, Json]:
    return {"n": request.number, "g": request.generation, "outcome": outcome.to_json()}


def answer(row: Mapping[str, Json], asked: Asked, answered: int) -> Outcome | None:
    """The outcome in a line of outcomes.jsonl, None where what it answers is void. `answered`:
    requests that have theirs."""
    number, generation = row["n"], row["g"]
    if number >= len(asked.requests) or asked.requests[number].generation != generation:
        return None
    if number != answered:
        raise ValueError(f"answers request {number} where {answered} is next")
    return outcome_from_json(row["outcome"])


class Digest:
    """Tells outcomes from others, whatever they took."""

    def __init__(self):
        self._sum = hashlib.sha256()

    def add(self, outcome: Outcome) -> None:
        told = (outcome.task.content_hash if isinstance(outcome, Candidate)
                else f"{outcome.stage.value} {outcome.reason}")
        self._sum.update(f"{outcome.seed} {outcome.step} {outcome.index} {told}\n".encode())

    def __str__(self) -> str:
        return self._sum.hexdigest()[:16]


# ---------------------------------------------------------------- beginning


def begin(folder: Path, header: Header) -> int:
    """Empties the folder for a new run and returns its generation: 0, or a higher one where a
    synthesizer with the same header serves it still, which then just goes on with the new run.
    JournalError where one with another header does, also after a while."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with serving(folder, BUSY_S):
            for name in (HEADER, REQUESTS, OUTCOMES):
                (folder / name).unlink(missing_ok=True)
            header.write(folder)
            return 0
    except JournalError:
        if not (folder / HEADER).exists() or Header.read(folder) != header:
            raise
        return newest_generation(folder) + 1


def newest_generation(folder: Path) -> int:
    """The highest in either file: a power cut may have taken the end of one."""
    newest = 0

    def take(row: Mapping[str, Json]) -> None:
        nonlocal newest
        newest = max(newest, row.get("g", 0))

    for name in (REQUESTS, OUTCOMES):
        Tail(folder / name).feed(take)
    return newest
