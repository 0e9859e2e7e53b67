"""Synthesize beside a training run, on any machine that reaches its folder:
`python -m experiments.synthesizer RUN/synthesis`.

For a run with `synthesizer.host="elsewhere"`, which asks for variants in that folder and reads
there what became of them. May be started before the run, waits for it then; ends when the run
does. Killed and started again it goes on where it was. The key of an endpoint is read from the
environment here, not on the trainer's machine.

Exit codes: 0 the run is over, 2 a mistake that the line says how to mend, 3 the endpoint is down
and the run is to stop then, 130 on Ctrl-C, 143 on SIGTERM.
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Sequence

from rods_jax.config import UserError, check_out, run_main, typed, write_json
from rods_jax.synthesis.exchange import HEADER, Header
from rods_jax.synthesis.hosts import LOCK_WAIT_S, STOPPED_EXIT
from rods_jax.synthesis.pipeline import Maker, SynthesisConfig, make_maker
from rods_jax.synthesis.worker import Bell, OutageStop, Progress, guard_of, serve
from rods_jax.tools.suites import SuiteSpec, make_suite

GRACE_S = 1.0  # for the attempts in flight when the trainer has gone


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="python -m experiments.synthesizer", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", type=pathlib.Path, help="the folder synthesis/ of the run")
    arguments.add_argument("--json", metavar="FILE", help="result as JSON; - prints it last")
    # Of a process that the trainer starts: standard input ends when the trainer does.
    arguments.add_argument("--lifeline", action="store_true", help=argparse.SUPPRESS)
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.json and args.json != "-":
        check_out(args.json)
    bell, caught = Bell(), []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda which, frame: (caught.append(which), bell.stop()))
    if args.lifeline:
        threading.Thread(target=_watch, args=(bell,), daemon=True).start()
    if not _await_header(args.folder, bell):
        return _code(caught)
    try:
        with _Line() as line:
            progress = serve(args.folder, bell, functools.partial(_maker, args.folder),
                             report=line.show,
                             lock_wait_s=LOCK_WAIT_S if args.lifeline else 0.0)
    except OutageStop as error:
        print(f"error: {error}", file=sys.stderr)
        return STOPPED_EXIT
    if args.json:
        write_json(args.json, {
            "done": progress.done, "accepted": progress.accepted, "waiting": progress.waiting,
            "accepted_share": progress.accepted / max(progress.done, 1),
            "per_s": progress.done / line.seconds})
    return _code(caught)


def _code(caught: list[int]) -> int:
    """Of the signal that ended this, if one did, as a shell would have it."""
    return 128 + caught[0] if caught else 0


def _watch(bell: Bell) -> None:
    """Rings for each line on standard input; its end is the trainer's."""
    while os.read(0, 4096):
        bell.ring()
    bell.stop()
    time.sleep(GRACE_S)
    os._exit(0)  # an attempt hangs; what it would bring is made again


def _await_header(folder: pathlib.Path, bell: Bell) -> bool:
    """Whether there is one, and not a signal to end before."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: not a folder; give the folder synthesis/ of a run")
    if not folder.absolute().parent.is_dir():
        raise UserError(f"{folder}: there is no folder {folder.absolute().parent}; give the "
                        "folder synthesis/ of a run")
    said = False
    while not bell.stopped:
        if (folder / HEADER).exists():
            return True
        if not said:
            print(f"waiting for {folder / HEADER}, which the run writes", file=sys.stderr,
                  flush=True)
            said = True
        bell.wait(1.0)
    return False


def _maker(folder: pathlib.Path, header: Header) -> Maker:
    path = folder / HEADER
    try:
        suite = make_suite(SuiteSpec.from_json(header.suite))
        config = typed(SynthesisConfig, header.config, HEADER)
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path}: names no suite that this version can make "
                        f"({type(error).__name__}: {error}); begin the run anew") from error
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    return make_maker(suite, config, guard_of(suite), header.run_seed)


class _Line:
    """How far it is: rewritten in place on a terminal, else a line every 10 s if one was done."""

    def __init__(self):
        self._began = self._shown = time.monotonic()
        self._told, self._text, self._done = (0, 0), "", 0

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self._began, 1e-9)

    def show(self, progress: Progress) -> None:
        if (progress.done, progress.waiting) == self._told:
            return  # idle
        now, self._done = time.monotonic(), progress.done
        share = progress.accepted / max(progress.done, 1)
        self._text = (f"{progress.done} attempts done, {share:.0%} accepted, "
                      f"{progress.done / self.seconds:.1f} a second, {progress.waiting} waiting")
        if now - self._shown > (0.2 if sys.stderr.isatty() else 10.0):
            self._shown, self._told = now, (progress.done, progress.waiting)
            self._print(end="" if sys.stderr.isatty() else "\n")

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *exc_info) -> None:
        if self._done:
            self._print(end="\n")

    def _print(self, end: str) -> None:
        start = "\r" if sys.stderr.isatty() else ""
        print(f"{start}{self._text}", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_main(main, user_errors=(ValueError,))
