"""One HTTP POST under one deadline, whatever the server does.

A time-out of a socket is for a single read, so a server that sends a byte now and then can
hold its reader for ever. Here every read gets only the time that is left of the whole.
"""

from __future__ import annotations

import dataclasses
import http.client
import io
import socket
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit


class TooLarge(Exception):
    """The body is larger than asked for."""


@dataclasses.dataclass(frozen=True)
class Response:
    """`headers` with lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def post(url: str, body: bytes, headers: Mapping[str, str], *, connect_s: float, timeout_s: float,
         most_bytes: int, clock: Callable[[], float]) -> Response:
    """Sends and reads within `timeout_s` seconds by `clock`. No redirect is followed, so that
    headers reach no other host, and no proxy is asked.

    Raises TimeoutError, TooLarge, ConnectionError (also for a body that was cut), another
    OSError (no such host, no route), http.client.HTTPException or ValueError (no HTTP)."""
    deadline = clock() + timeout_s

    def left() -> float:
        if (seconds := deadline - clock()) <= 0:
            raise TimeoutError(f"no whole answer within {timeout_s:g} s")
        return seconds

    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=min(connect_s, timeout_s))
    connection.response_class = lambda sock, *args, **options: http.client.HTTPResponse(
        _Timed(sock, left), *args, **options)
    try:
        connection.connect()
        connection.sock.settimeout(left())
        connection.request("POST", parts.path, body, dict(headers))
        with connection.getresponse() as response:
            read = response.read(most_bytes + 1)
            if len(read) > most_bytes:
                raise TooLarge(f"more than {most_bytes} bytes")
            if response.length:  # the reader leaves this to us
                raise ConnectionError(f"cut, {response.length} bytes before its end")
            return Response(response.status,
                            {name.lower(): value for name, value in response.getheaders()}, read)
    finally:
        connection.close()


class _Timed:
    """What HTTPResponse asks of a socket: a file of it. Closed as the socket's own would be."""

    def __init__(self, sock: socket.socket, left: Callable[[], float]):
        self._sock, self._left = sock, left

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Reader(self._sock, self._left))


class _Reader(io.RawIOBase):
    def __init__(self, sock: socket.socket, left: Callable[[], float]):
        self._sock, self._left = sock, left
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int | None:
        self._sock.settimeout(self._left())
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
