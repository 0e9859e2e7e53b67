"""A client of any OpenAI-compatible chat-completions endpoint, such as vLLM with Qwen3-32B.

    vllm serve Qwen/Qwen3-32B --port 8000
    EndpointConfig(base_url="http://localhost:8000/v1", model="Qwen/Qwen3-32B")

A call never raises for what the endpoint does: it gives an `Answer` with text in it or a
typed `Failure`. The key is read from the environment when the endpoint is made; it stands in
no config, no pickle, no error text, and an answer that repeats it is refused.
"""

from __future__ import annotations

import dataclasses
import datetime
import email.utils
import enum
import http.client
import json
import math
import os
import random
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

from rods_jax.synthesis.http_post import Response, TooLarge, post
from rods_jax.synthesis.outcome import Usage
from rods_jax.types import Json

MOST_BYTES = 4 << 20  # of one answer
FIRST_WAIT_S = 1.0  # before the second try, doubled before each later one
LEAST_KEY = 8  # characters; a shorter key is a placeholder such as EMPTY, no secret
MOST_TOKENS = 10 ** 9  # of one answer; a count above that is no count
_PATH = "/chat/completions"

Messages = Sequence[Mapping[str, str]]  # role and content


class FailureKind(str, enum.Enum):
    # nobody answers
    RATE_LIMITED = "rate_limited"  # 429
    SERVER_ERROR = "server_error"  # 5xx
    BAD_REQUEST = "bad_request"  # any other status that is no success; never tried again
    UNAUTHORIZED = "unauthorized"  # 401, 403; never tried again
    TIMEOUT = "timeout"
    CONNECTION = "connection"  # refused, cut, not HTTP
    DOWN = "down"  # not asked, having failed several times in a row
    # the answer is no use
    EMPTY_CONTENT = "empty_content"  # also one that only reasons
    TRUNCATED = "truncated"  # ended by max_tokens
    NOT_JSON = "not_json"
    WRONG_SHAPE = "wrong_shape"  # JSON that does not hold what was asked for
    BAD_ENCODING = "bad_encoding"
    TOO_LARGE = "too_large"
    KEY_ECHOED = "key_echoed"  # it repeats the API key
    ANSWER_LEAKED = "answer_leaked"  # a text says what the agent has to find
    PROMPT_TOO_LONG = "prompt_too_long"  # 413; never tried again

    @property
    def outage(self) -> bool:
        """Nobody answers, as against an answer that is no use."""
        return self in _OUTAGES


_OUTAGES = frozenset({
    FailureKind.RATE_LIMITED, FailureKind.SERVER_ERROR, FailureKind.BAD_REQUEST,
    FailureKind.UNAUTHORIZED, FailureKind.TIMEOUT, FailureKind.CONNECTION, FailureKind.DOWN})
# Somebody was there, whatever came of it.
_SERVED = frozenset(FailureKind) - _OUTAGES | {FailureKind.BAD_REQUEST}
# Another try would end the same way.
_FINAL = frozenset({FailureKind.BAD_REQUEST, FailureKind.UNAUTHORIZED, FailureKind.TRUNCATED,
                    FailureKind.TOO_LARGE, FailureKind.PROMPT_TOO_LONG})


@dataclasses.dataclass(frozen=True)
class Answer:
    """`text` is never empty and can be written as UTF-8."""

    text: str
    usage: Usage = Usage()


@dataclasses.dataclass(frozen=True)
class Failure:
    """`detail` is one line; `finish_reason` the endpoint's own word, "" where it gave none."""

    kind: FailureKind
    detail: str
    finish_reason: str = ""
    usage: Usage = Usage()

    @property
    def final(self) -> bool:
        """Another try would end the same way."""
        cut = self.kind is FailureKind.EMPTY_CONTENT and self.finish_reason == "length"
        return self.kind in _FINAL or cut


@dataclasses.dataclass(frozen=True)
class EndpointConfig:
    """base_url: up to and with /v1. model: as the endpoint calls it. api_key_env: NAME of the
    environment variable that holds the key; "" sends none.
    temperature, max_tokens: of each answer, reasoning included. thinking: sent to the chat
    template as enable_thinking; None sends nothing, since not every endpoint takes it.
    use_reasoning: an answer that has reasoning alone is read from there.
    connect_s: to connect; timeout_s: one whole answer, to its last byte. tries: requests a
    question, each after a wait that doubles, at most max_wait_s, also where the endpoint asks
    for longer. concurrency: requests at a time, of each process. After down_after failures
    in a row the endpoint counts as down and is asked nothing for down_s. All _s in seconds."""

    base_url: str = ""
    model: str = ""
    api_key_env: str = ""
    temperature: float = 0.8
    max_tokens: int = 4096
    thinking: bool | None = None
    use_reasoning: bool = False
    connect_s: float = 10.0
    timeout_s: float = 120.0
    tries: int = 3
    max_wait_s: float = 30.0
    concurrency: int = 4
    down_after: int = 6
    down_s: float = 60.0

    def __post_init__(self):
        for name in ("max_tokens", "tries", "concurrency", "down_after"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give 1 or more")
        for name in ("connect_s", "timeout_s", "down_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}: give seconds above 0")
        if not 0 <= self.max_wait_s < math.inf:
            raise ValueError(f"max_wait_s is {self.max_wait_s}: give 0 or more seconds")
        if not 0 <= self.temperature <= 2:
            raise ValueError(f"temperature is {self.temperature}: give 0 to 2")
        # What is no name of a variable may be the key itself, so it is not repeated.
        if self.api_key_env and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.api_key_env):
            raise ValueError("api_key_env is no name of an environment variable in capitals: give "
                             "the name, such as OPENAI_API_KEY, never the key itself")
        if self.base_url:
            _check_url(self.base_url)


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        (parts.hostname or "").encode("idna")  # no label is empty or longer than 63
    except ValueError:
        good = False
    if good and (parts.username is not None or parts.query or parts.fragment):
        raise ValueError("base_url holds a user, a query or a fragment: give scheme, host, port "
                         "and path alone, and a key by api_key_env")
    if not good or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError(f"base_url {url!r} is no address: write for instance "
                         "http://localhost:8000/v1")
    if parts.path.rstrip("/").endswith(_PATH):
        raise ValueError(f"base_url {url!r} names the call too: leave {_PATH} out")


def open_endpoint(config: EndpointConfig, environ: Mapping[str, str] = os.environ) -> Endpoint:
    """The endpoint with its key. ValueError, one line, where the key is not there."""
    if not config.api_key_env:
        return Endpoint(config)
    key = environ.get(config.api_key_env, "").strip()
    if not key:
        raise ValueError(f"environment variable {config.api_key_env}, named by api_key_env, is "
                         "not set: export it, or leave api_key_env empty")
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"environment variable {config.api_key_env} holds what no header can: "
                         "export the key alone, one line")
    return Endpoint(config, key)


class Endpoint:
    """Thread-safe. `rng`, `sleep`, `clock` and `now` (Unix time) are for tests."""

    def __init__(self, config: EndpointConfig, key: str = "", *,
                 rng: random.Random | None = None, sleep: Callable[[float], None] = time.sleep,
                 clock: Callable[[], float] = time.monotonic,
                 now: Callable[[], float] = time.time):
        for name, example in (("base_url", "http://localhost:8000/v1"),
                              ("model", "Qwen/Qwen3-32B")):
            if not getattr(config, name):
                raise ValueError(f"endpoint.{name} is empty: set it, for instance to {example}")
        self.config, self._key = config, key
        self._secret = _secret(key) if len(key) >= LEAST_KEY else None
        self._rng, self._sleep, self._clock, self._now = rng or random.Random(), sleep, clock, now
        self._room = threading.BoundedSemaphore(config.concurrency)
        self._breaker = _Breaker(config.down_after, config.down_s, clock)

    def __reduce__(self):  # another process reads the key from its own environment
        return open_endpoint, (self.config,)

    def ask(self, messages: Messages, check: Callable[[str], Failure | None] = lambda text: None
            ) -> Answer | Failure:
        """The answer to a dialogue, asked again up to `tries` times in all where that may help.
        `check` says why a text is no use; a text that it refuses is asked for again."""
        began, usage, reply = self._clock(), Usage(), None
        body = self._body(messages)
        for attempt in range(self.config.tries):
            with self._room:
                if not self._breaker.admit():
                    if reply is None:
                        reply = Failure(FailureKind.DOWN, "failed several times in a row, is asked "
                                        f"again within {self.config.down_s:g} s")
                        usage += Usage(failures={reply.kind.value: 1})
                    break
                reply, retry_after = self._once(body, check)
            usage += reply.usage + Usage(requests=1, retries=int(attempt > 0))
            if isinstance(reply, Answer):
                break
            usage += Usage(failures={reply.kind.value: 1})
            if reply.final or attempt + 1 == self.config.tries:
                break
            if reply.kind.outage:
                self._sleep(self._wait(attempt, retry_after))
        usage += Usage(seconds=self._clock() - began)
        return dataclasses.replace(reply, usage=usage)

    def _body(self, messages: Messages) -> bytes:
        config = self.config
        request = {"model": config.model, "messages": [dict(m) for m in messages],
                   "temperature": config.temperature, "max_tokens": config.max_tokens}
        if config.thinking is not None:
            request["chat_template_kwargs"] = {"enable_thinking": config.thinking}
        return json.dumps(request).encode("ascii")

    def _wait(self, attempt: int, retry_after: float) -> float:
        """Seconds before the next try; jitter keeps many clients from coming at once."""
        wait = FIRST_WAIT_S * 2 ** attempt * (0.5 + self._rng.random())
        if retry_after:
            wait = max(wait, retry_after + FIRST_WAIT_S * self._rng.random())
        return min(wait, self.config.max_wait_s)

    def _once(self, body: bytes, check) -> tuple[Answer | Failure, float]:
        """One request, and the seconds that the endpoint wants us to wait."""
        served, retry_after = False, 0.0
        try:
            reply = self._send(body)
            if isinstance(reply, Response):
                retry_after = _retry_after(reply.headers.get("retry-after", ""), self._now())
                reply = self._understood(reply)
            served = isinstance(reply, Answer) or reply.kind in _SERVED
            if isinstance(reply, Answer) and (refused := check(reply.text)) is not None:
                reply = dataclasses.replace(refused, usage=reply.usage)
        finally:  # also where a check raises: no probe may be left open
            self._breaker.report(served)
        if isinstance(reply, Failure):
            reply = dataclasses.replace(reply, detail=self._clean(reply.detail))
        return reply, retry_after

    def _understood(self, response: Response) -> Answer | Failure:
        """Without the key, which goes before anything is shortened: a part of it is one too."""
        body, echoes = self._secret.subn(b"***", response.body) if self._secret else (
            response.body, 0)
        reply = _read(dataclasses.replace(response, body=body), self.config.use_reasoning)
        if isinstance(reply, Answer) and echoes:
            return Failure(FailureKind.KEY_ECHOED, "the answer repeats the API key",
                           usage=reply.usage)
        return reply

    def _send(self, body: bytes) -> Response | Failure:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            return post(self.config.base_url.rstrip("/") + _PATH, body, headers,
                        connect_s=self.config.connect_s, timeout_s=self.config.timeout_s,
                        most_bytes=MOST_BYTES, clock=self._clock)
        except TimeoutError as error:
            return Failure(FailureKind.TIMEOUT, str(error))
        except TooLarge as error:
            return Failure(FailureKind.TOO_LARGE, str(error))
        except (OSError, ValueError, http.client.HTTPException) as error:
            return Failure(FailureKind.CONNECTION, f"{type(error).__name__}: {error}")

    def _clean(self, detail: str) -> str:
        """One line; an endpoint that echoes the key does not bring it into a log."""
        if self._secret:
            raw = detail.encode("utf-8", "backslashreplace")
            detail = self._secret.sub(b"***", raw).decode("utf-8")
        return one_line(detail)


def _secret(key: str) -> re.Pattern[bytes]:
    """The key, also as JSON or a URL would escape any of its characters, however often."""
    forms = (rf"(?:\\*{re.escape(c)}|(?i:\\+u{ord(c):04x}|%{ord(c):02x}))" for c in key)
    return re.compile("".join(forms).encode("utf-8"))


def one_line(text: str, most: int = 300) -> str:
    """Short, and without what a terminal would take for an order. most: characters."""
    text = " ".join(text.split())[:most]
    return "".join(c if c.isprintable() else "?" for c in text)


class _Breaker:
    """Open after `down_after` failures in a row; then one probe every `down_s` seconds."""

    def __init__(self, down_after: int, down_s: float, clock: Callable[[], float]):
        self._down_after, self._down_s, self._clock = down_after, down_s, clock
        self._lock = threading.Lock()
        self._failures, self._opens_at, self._probing = 0, 0.0, False

    def admit(self) -> bool:
        with self._lock:
            if self._failures < self._down_after:
                return True
            if self._probing or self._clock() < self._opens_at:
                return False
            self._probing = True
            return True

    def report(self, served: bool) -> None:
        with self._lock:
            self._probing = False
            self._failures = 0 if served else self._failures + 1
            if not served:
                self._opens_at = self._clock() + self._down_s


def _retry_after(text: str, now: float) -> float:
    """Seconds of a Retry-After header, which may be a date; 0 where it says nothing."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            date = email.utils.parsedate_to_datetime(text)
            seconds = date.replace(tzinfo=date.tzinfo or datetime.UTC).timestamp() - now
        except (ValueError, OverflowError):
            return 0.0
    return max(seconds, 0.0) if math.isfinite(seconds) else 0.0


_BY_STATUS = {429: FailureKind.RATE_LIMITED, 401: FailureKind.UNAUTHORIZED,
              403: FailureKind.UNAUTHORIZED, 408: FailureKind.TIMEOUT,
              413: FailureKind.PROMPT_TOO_LONG}


def _read(response: Response, use_reasoning: bool) -> Answer | Failure:
    status = response.status
    if not 200 <= status < 300:
        kind = _BY_STATUS.get(status, FailureKind.SERVER_ERROR if status >= 500
                              else FailureKind.BAD_REQUEST)
        return Failure(kind, f"status {status}: {response.body[:1000].decode('utf-8', 'replace')}")
    try:
        row = json.loads(response.body.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Failure(FailureKind.BAD_ENCODING, f"the body is not UTF-8: {error.reason}")
    except (ValueError, RecursionError) as error:
        return Failure(FailureKind.NOT_JSON, f"the body is no JSON: {error}")
    try:
        choices, counted = row["choices"], row.get("usage")
        choice = choices[0] if choices else {}
        message, finish = choice.get("message") or {}, choice.get("finish_reason") or ""
        text = _said(message.get("content"))
        if not text and use_reasoning:
            text = _said(message.get("reasoning_content") or message.get("reasoning"))
    except (KeyError, TypeError, AttributeError, IndexError):
        return Failure(FailureKind.WRONG_SHAPE, f"no chat completion: {json.dumps(row)[:200]}")
    usage, finish = _tokens(counted), one_line(str(finish))
    if not text:
        reasons = bool(message.get("reasoning_content") or message.get("reasoning"))
        what = ("only reasoning" if reasons else "nothing") if choices else "no choice"
        return Failure(FailureKind.EMPTY_CONTENT, f"{what} in the answer, finish {finish!r}",
                       finish, usage)
    if finish == "length":
        return Failure(FailureKind.TRUNCATED, "max_tokens was reached", finish, usage)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return Failure(FailureKind.BAD_ENCODING, "half a character in the text", finish, usage)
    return Answer(text, usage)


def _said(content: Json) -> str:
    """The text of a message without the reasoning that some servers leave in it."""
    if isinstance(content, list):  # parts
        content = "".join(part["text"] for part in content if part.get("type") == "text")
    text = (content or "").strip()
    if text.startswith("<think>") or "</think>" in text:
        return text.rpartition("</think>")[2].strip() if "</think>" in text else ""
    return text


def _tokens(counted: Json) -> Usage:
    counted = counted if isinstance(counted, Mapping) else {}
    numbers = {name: n for name in ("prompt_tokens", "completion_tokens")
               if type(n := counted.get(name)) is int and 0 <= n <= MOST_TOKENS}
    return Usage(**numbers)
