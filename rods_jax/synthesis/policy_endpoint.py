"""Chat completions of the model being trained, on this machine alone.

    endpoint = PolicyEndpoint()                  # listens at endpoint.url, writes nothing yet
    EndpointConfig(base_url=endpoint.url, model=MODEL)
    endpoint.answer(write, most=8)               # by the trainer, where it has time
    endpoint.close()                             # who waits gets a 503

A request waits until the trainer answers it, and keeps the trainer from nothing meanwhile.
Length and temperature of an answer are the run's, whatever a request says of them.
"""

from __future__ import annotations

import http.server
import json
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence

from rods_jax.text.free import ROLES, Asked, Refused, Reply, TooLong
from rods_jax.types import Json

MODEL = "policy"  # its name
MOST_BYTES = 4 << 20  # of a request
MOST_WAITING = 256  # requests; more get a 503
READ_S = 30.0  # for a request that has begun to come whole
_PATH = "/v1/chat/completions"


class PolicyEndpoint:
    """`answer` and `close` are the trainer's; requests come in threads of their own."""

    def __init__(self):
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.endpoint = self
        self._waiting: queue.Queue[_Question] = queue.Queue(MOST_WAITING)
        self._lock, self._closed = threading.Lock(), False
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="policy-endpoint",
                         daemon=True).start()

    @property
    def url(self) -> str:
        """For EndpointConfig.base_url."""
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    @property
    def waiting(self) -> int:
        """Requests that were not answered yet, as far as they have come."""
        return self._waiting.qsize()

    def answer(self, write: Callable[[Sequence[Asked]], Sequence[Reply]], most: int) -> int:
        """Answers at most `most` of the requests that wait now, oldest first, and returns how
        many; later ones wait for the next call, those whose client has gone are dropped. What
        `write` raises comes through, after a 500 to those that it was asked for."""
        taken: list[_Question] = []
        for _ in range(self._waiting.qsize()):
            if len(taken) == most:
                break
            question = self._waiting.get_nowait()
            if question.gone():
                question.reply.put(None)
            else:
                taken.append(question)
        if not taken:
            return 0
        try:
            replies = write([question.asked for question in taken])
        except BaseException:
            for question in taken:
                question.reply.put(_FAILED)
            raise
        for question, reply in zip(taken, replies, strict=True):
            question.reply.put(_answer(reply))
        return len(taken)

    def close(self) -> None:
        """No more answers. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _ in range(self._waiting.qsize()):
                self._waiting.get_nowait().reply.put(_CLOSED)
        self._server.shutdown()
        self._server.server_close()

    def put(self, question: _Question) -> _Status | None:
        """Queues it; or what to say instead."""
        with self._lock:
            if self._closed:
                return _CLOSED
            try:
                self._waiting.put_nowait(question)
            except queue.Full:
                return 503, _error(f"{MOST_WAITING} requests wait already")
        return None


_Status = tuple[int, Json]  # of a response, and its body


def _error(text: str) -> Json:
    return {"error": {"message": text}}


_CLOSED: _Status = 503, _error("training is over")
_FAILED: _Status = 500, _error("the policy could not write")


class _Question:
    """A request that waits. `reply` takes one thing: the response, None where nobody is there."""

    def __init__(self, asked: Asked, client: socket.socket):
        self.asked, self._client = asked, client
        self.reply: queue.SimpleQueue[_Status | None] = queue.SimpleQueue()

    def gone(self) -> bool:
        """Whether the client has closed its end."""
        poll = select.poll()
        poll.register(self._client, select.POLLIN)
        try:
            return bool(poll.poll(0)) and not self._client.recv(1, socket.MSG_PEEK)
        except OSError:  # reset
            return True


def _answer(reply: Reply) -> _Status:
    if isinstance(reply, TooLong):
        return 413, _error(f"{reply.tokens} tokens in the messages, sampler.max_len leaves "
                           f"{reply.most} for them: raise it, or lower writing.max_new")
    if isinstance(reply, Refused):
        return 400, _error(reply.why)
    return 200, {
        "id": "policy", "object": "chat.completion", "created": int(time.time()), "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": reply.text},
                     "finish_reason": "stop" if reply.whole else "length"}],
        "usage": {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.tokens,
                  "total_tokens": reply.prompt_tokens + reply.tokens}}


def _read(body: bytes) -> Asked:
    """Raises ValueError, one line, for what is no request."""
    row = json.loads(body)
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError("no list of messages")
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES \
                or not isinstance(message.get("content"), str):
            raise ValueError(f"a message is no role of {', '.join(ROLES)} with a text as content")
    options = row.get("chat_template_kwargs")
    thinking = options.get("enable_thinking") if isinstance(options, dict) else None
    return Asked(tuple({"role": message["role"], "content": message["content"]}
                       for message in messages), thinking if type(thinking) is bool else None)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    endpoint: PolicyEndpoint

    def handle_error(self, request, client_address) -> None:
        """A client that has left is no news."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = READ_S
    server: _Server

    def do_POST(self) -> None:
        self.close_connection = True
        if (status := self._status()) is None:
            return
        code, row = status
        body = json.dumps(row).encode("ascii")
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _status(self) -> _Status | None:
        if self.path != _PATH:
            return 404, _error(f"there is {_PATH} alone")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            return 411, _error("give a Content-Length")
        if int(length) > MOST_BYTES:
            return 413, _error(f"more than {MOST_BYTES} bytes")
        try:
            question = _Question(_read(self.rfile.read(int(length))), self.connection)
        except (ValueError, RecursionError) as error:
            return 400, _error(f"no chat completion is asked for: {error}")
        return self.server.endpoint.put(question) or question.reply.get()

    def log_message(self, *args) -> None:
        """Nothing: standard error is the run's."""
