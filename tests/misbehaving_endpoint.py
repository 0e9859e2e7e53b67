"""A chat-completions endpoint on the loopback that does what its script says.

    with Served(status(429, {"Retry-After": "3"}), says("hello")) as server:
        Endpoint(server.config()).ask(...)

An act is called with the handler and the request; the last one serves all later requests.
"""

from __future__ import annotations

import http.server
import itertools
import json
import socket
import struct
import sys
import threading

from rods_jax.synthesis.endpoint import Endpoint, EndpointConfig


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        served = self.server.served
        with served.lock:
            act = served.acts[min(len(served.requests), len(served.acts) - 1)]
            served.requests.append(body)
            served.headers.append(dict(self.headers))
            served.paths.append(self.path)
            served.at_work += 1
            served.most_at_work = max(served.most_at_work, served.at_work)
        try:
            act(self, body)
        except OSError:  # the client has left
            self.close_connection = True
        finally:
            with served.lock:
                served.at_work -= 1

    def log_message(self, *args):
        pass


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), OSError):  # the client has left
            super().handle_error(request, client_address)


class Served:
    """`requests` holds the bodies that came, `headers` and `paths` what came with them."""

    def __init__(self, *acts):
        self.acts, self.requests, self.headers, self.paths = list(acts), [], [], []
        self.lock, self.at_work, self.most_at_work = threading.Lock(), 0, 0
        self.over = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.served = self
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,),
                                        daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc_info):
        self.over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def config(self, **changes) -> EndpointConfig:
        return EndpointConfig(**{"base_url": self.url, "model": "m", "down_after": 100} | changes)


class Clock:
    """Time that passes by sleeping alone, and by `tick` at each look. `waits`: the sleeps."""

    def __init__(self, tick=0.0):
        self.time, self.tick, self.waits = 1000.0, tick, []

    def __call__(self):
        self.time += self.tick
        return self.time

    def sleep(self, seconds):
        self.waits.append(seconds)
        self.time += seconds

    def endpoint(self, config, key="", rng=None) -> Endpoint:
        return Endpoint(config, key, rng=rng, sleep=self.sleep, clock=self,
                        now=lambda: self.time + 10 ** 9)


def unused_url():
    """An address where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/v1"


# ---------------------------------------------------------------- acts


def status(code, headers=None, body=b'{"error": {"message": "no"}}'):
    def act(handler, request):
        handler.send_response(code)
        for name, value in (headers or {}).items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)
    return act


def raw(body):
    """A success with these bytes as its body."""
    return status(200, {"Content-Type": "application/json"}, body)


def row(value):
    return raw(json.dumps(value).encode())


def completion(message, finish="stop"):
    return {"choices": [{"index": 0, "message": {"role": "assistant"} | message,
                         "finish_reason": finish}],
            "usage": {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}}


def says(text, finish="stop", **more):
    """A whole answer with this text, which may be None; `more` are fields of its message."""
    return row(completion({"content": text} | more, finish))


def reply(function):
    """An answer whose text is a function of the request's messages."""
    def act(handler, request):
        says(function(request["messages"]))(handler, request)
    return act


def cut(handler, request):
    """The connection is reset in the middle of the body."""
    body = json.dumps(completion({"content": "hello"})).encode()
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body[:len(body) // 2])
    handler.wfile.flush()
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.close_connection = True


def short(handler, request):
    """The connection is closed in the middle of the body, as if that were its end."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.close_connection = True


def garbage(handler, request):
    handler.wfile.write(b"220 mail.example.org ESMTP\r\n")
    handler.close_connection = True


def drips(prefix):
    """These bytes, then one more now and then for ever."""
    def act(handler, request):
        handler.wfile.write(prefix)
        while not handler.server.served.over.wait(0.001):
            handler.wfile.write(b" ")
            handler.wfile.flush()
        handler.close_connection = True
    return act


DRIPPING_HEADER = drips(b"HTTP/1.1 200 OK\r\nX-Slow:")
DRIPPING_BODY = drips(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")


def silent(handler, request):
    handler.server.served.over.wait()
    handler.close_connection = True


def huge(handler, request):
    """A chunked body that never ends."""
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    for _ in itertools.takewhile(lambda _: not handler.server.served.over.is_set(),
                                 itertools.repeat(0)):
        handler.wfile.write(chunk)
