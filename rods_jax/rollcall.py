"""Waits until every process of a pod is up, and says which are not.

jax's own start-up ends the process from C++ when a worker stays away, without naming it. So
the processes meet first on the coordinator's port, which also proves that the firewall lets
it through, and jax takes the port over afterwards.
"""

from __future__ import annotations

import contextlib
import socket
import time

from rods_jax.config import UserError

_LINE = 4096  # longest message, bytes
_GREETING_S = 5.0  # a client that says nothing for so long is not one of ours


class RollCallError(UserError):
    """Somebody is missing; one line that names who."""


def roll_call(address: str, count: int, index: int, timeout_s: float) -> None:
    """Returns in all of `count` processes once each has called; process 0 listens at
    `address` (host:port). Raises RollCallError in all that came when `timeout_s` seconds
    after the start of process 0 some are missing, naming them."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        raise RollCallError(f"coordinator address {address!r} is not host:port; set "
                            "JAX_COORDINATOR_ADDRESS to one that all workers reach")
    if not 0 <= index < count:
        raise RollCallError(f"process {index} of {count}: RODS_PROCESS_ID must be 0 to {count - 1}")
    deadline = time.monotonic() + timeout_s
    if index == 0:
        _listen(int(port), count, deadline, timeout_s)
    else:
        _report(host, int(port), index, deadline, timeout_s)


def _listen(port: int, count: int, deadline: float, timeout_s: float) -> None:
    present: dict[int, socket.socket] = {}
    try:
        with socket.create_server(("", port)) as server:
            while len(present) < count - 1 and (left := deadline - time.monotonic()) > 0:
                server.settimeout(left)
                try:
                    client, _ = server.accept()
                except TimeoutError:
                    break
                _admit(client, count, present)
        missing = [i for i in range(1, count) if i not in present]
        answer = f"missing {_names(missing)}" if missing else "go"
        for client in present.values():
            _say(client, answer)
    finally:
        for client in present.values():
            client.close()
    if missing:
        raise RollCallError(_missing_line(_names(missing), timeout_s))


def _admit(client: socket.socket, count: int, present: dict[int, socket.socket]) -> None:
    """Takes down who called. A worker that was restarted calls again and replaces itself."""
    client.settimeout(_GREETING_S)
    try:
        name = client.makefile("r").readline(_LINE).strip()
    except (OSError, UnicodeDecodeError):
        name = ""
    if name.isdecimal() and 0 < int(name) < count:
        if int(name) in present:
            present[int(name)].close()
        present[int(name)] = client
    else:
        client.close()


def _say(client: socket.socket, text: str) -> None:
    with contextlib.suppress(OSError):  # it died since; jax's own start-up will report that
        client.sendall(f"{text}\n".encode())


def _report(host: str, port: int, index: int, deadline: float, timeout_s: float) -> None:
    answer = ""
    # Process 0 may start late, so its answer may come as late as its own deadline.
    while not answer and (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=min(left, 10.0)) as server:
                server.sendall(f"{index}\n".encode())
                server.settimeout(max(deadline - time.monotonic(), 0.1) + _GREETING_S)
                answer = server.makefile("r").readline(_LINE).strip()
        except OSError:
            answer = ""
        if not answer:
            time.sleep(0.2)
    if not answer:
        raise RollCallError(
            f"worker {index}: worker 0 did not answer at {host}:{port} within {timeout_s:g} s; "
            "start every worker at once and let the port through the firewall")
    if answer != "go":
        raise RollCallError(_missing_line(answer.removeprefix("missing "), timeout_s))


def _names(missing: list[int]) -> str:
    shown = ", ".join(map(str, missing[:20]))
    return shown if len(missing) <= 20 else f"{shown} and {len(missing) - 20} more"


def _missing_line(names: str, timeout_s: float) -> str:
    return (f"no call from worker {names} within {timeout_s:g} s; start every worker at once "
            "(launch.sh uses --worker=all) or raise RODS_START_TIMEOUT")
