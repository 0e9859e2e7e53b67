"""The client of chat-completions endpoints, against one that misbehaves by script."""

import concurrent.futures
import datetime
import email.utils
import json
import pickle
import random
import threading

import pytest

from misbehaving_endpoint import (DRIPPING_BODY, DRIPPING_HEADER, Clock, Served, completion, cut,
                                  garbage, huge, raw, row, says, short, silent, status, unused_url)
from rods_jax.config import ConfigError, load, to_json, typed
from rods_jax.synthesis.endpoint import (Answer, Endpoint, EndpointConfig, Failure, FailureKind,
                                         open_endpoint)
from rods_jax.synthesis.json_answer import find_json
from rods_jax.synthesis.outcome import Usage
from rods_jax.synthesis.pipeline import OnOutage, SynthesisConfig
from rods_jax.synthesis.writers import WriterKind

ASKED = ({"role": "user", "content": "say hello"},)
KEY = "sk-very-secret-1234"


def ask(*acts, clock=None, key="", check=None, **config):
    """What comes of one question, the server's record and the waits."""
    clock = clock or Clock()
    with Served(*acts) as server:
        endpoint = clock.endpoint(server.config(**config), key, random.Random(1))
        got = endpoint.ask(ASKED, *([check] if check else []))
    return got, server, clock.waits


def test_a_good_answer_and_the_request_it_took():
    got, server, waits = ask(says(" hello "), key=KEY, temperature=0.5, max_tokens=9,
                             thinking=False)
    assert got == Answer("hello", Usage(1, 0, {}, 7, 5, 0.0)) and waits == []
    assert server.paths == ["/v1/chat/completions"]
    assert server.requests == [{
        "model": "m", "messages": list(ASKED), "temperature": 0.5, "max_tokens": 9,
        "chat_template_kwargs": {"enable_thinking": False}}]
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    got, server, _ = ask(says("hello"))
    assert "Authorization" not in server.headers[0]
    assert "chat_template_kwargs" not in server.requests[0]


@pytest.mark.parametrize("content, text", [
    ("<think>\nI say {this}.\n</think>\n\nhello", "hello"), ("so be it</think>hello", "hello"),
    ([{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}], "hello")])
def test_reasoning_in_the_text_and_texts_in_parts(content, text):
    assert ask(says(content))[0].text == text


# ---------------------------------------------------------------- waits


def date_in(seconds, clock):
    moment = datetime.datetime.fromtimestamp(clock.time + 10 ** 9 + seconds, datetime.UTC)
    return email.utils.format_datetime(moment, usegmt=True)


@pytest.mark.parametrize("as_date", [False, True])
def test_retry_after_is_waited_for(as_date):
    clock = Clock()
    value = date_in(6, clock) if as_date else "3"
    limited = status(429, {"Retry-After": value})
    got, server, waits = ask(limited, limited, says("hello"), clock=clock)
    assert got.text == "hello" and len(server.requests) == 3
    assert got.usage == Usage(3, 2, {"rate_limited": 2}, 7, 5, pytest.approx(sum(waits)))
    if as_date:  # to the second of the header; then that moment is over
        assert len(waits) == 2 and 5 <= waits[0] <= 7 and waits[1] <= 4
    else:
        assert len(waits) == 2 and all(3 <= wait <= 4 for wait in waits)


@pytest.mark.parametrize("value", ["3600", "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_no_wait_is_longer_than_the_cap(value):
    got, server, waits = ask(status(503, {"Retry-After": value}), max_wait_s=20)
    assert got.kind is FailureKind.SERVER_ERROR and waits == [20, 20]
    assert len(server.requests) == 3


@pytest.mark.parametrize("value", ["soon", "", "nan", "-5", "1e999",
                                   "Thu, 01 Jan 1970 00:00:00 GMT"])
def test_without_a_sound_retry_after_the_wait_doubles(value):
    _, server, waits = ask(status(429, {"Retry-After": value}), tries=5, max_wait_s=7)
    assert len(server.requests) == 5 and len(waits) == 4
    for attempt, wait in enumerate(waits):
        assert min(0.5 * 2 ** attempt, 7) <= wait <= min(1.5 * 2 ** attempt, 7)


def test_jitter_is_the_given_generators():
    def waits(seed):
        clock = Clock()
        with Served(status(500)) as server:
            clock.endpoint(server.config(), "", random.Random(seed)).ask(ASKED)
        return clock.waits
    assert waits(1) == waits(1) != waits(2)


# ---------------------------------------------------------------- each fault, its type


HALF = json.dumps(completion({"content": "caf\u00e9"}), ensure_ascii=False).encode()
HALF = HALF.replace("\u00e9".encode(), "\u00e9".encode()[:1])
REASONING = {"reasoning_content": "I should say hello."}


@pytest.mark.parametrize("act, kind, finish, requests, waits", [
    (status(500), "server_error", "", 3, 2),
    (status(503, body=b"\x1b[31mred\x00\xff\n" * 99), "server_error", "", 3, 2),
    (status(400), "bad_request", "", 1, 0),
    (status(404), "bad_request", "", 1, 0),
    (status(307, {"Location": "http://127.0.0.1:9/v1"}), "bad_request", "", 1, 0),
    (status(401), "unauthorized", "", 1, 0),
    (status(403), "unauthorized", "", 1, 0),
    (status(408), "timeout", "", 3, 2),
    (cut, "connection", "", 3, 2),
    (short, "connection", "", 3, 2),
    (garbage, "connection", "", 3, 2),
    (says(""), "empty_content", "stop", 3, 0),
    (says(" \n"), "empty_content", "stop", 3, 0),
    (says(None), "empty_content", "stop", 3, 0),
    (says(None, **REASONING), "empty_content", "stop", 3, 0),
    (says(None, "length", **REASONING), "empty_content", "length", 1, 0),
    (says(None, reasoning="hm"), "empty_content", "stop", 3, 0),
    (says("<think>I should say"), "empty_content", "stop", 3, 0),
    (says(None, "tool_calls", tool_calls=[]), "empty_content", "tool_calls", 3, 0),
    (says("", "\x1b[2J"), "empty_content", "?[2J", 3, 0),
    (row({"choices": []}), "empty_content", "", 3, 0),
    (row({"choices": [{"message": None, "finish_reason": None}]}), "empty_content", "", 3, 0),
    (says("hello, I am", "length"), "truncated", "length", 1, 0),
    (raw(json.dumps(completion({"content": "hello"})).encode()[:-9]), "not_json", "", 3, 0),
    (raw(b"<html>busy</html>"), "not_json", "", 3, 0),
    (raw(b"[" * 100000), "not_json", "", 3, 0),
    (raw(b""), "not_json", "", 3, 0),
    (row([1, 2]), "wrong_shape", "", 3, 0),
    (row({"error": {"message": "overloaded"}}), "wrong_shape", "", 3, 0),
    (row({"choices": [{"text": "hello"}, 1]}), "empty_content", "", 3, 0),
    (row({"choices": ["hello"]}), "wrong_shape", "", 3, 0),
    (says(5), "wrong_shape", "", 3, 0),
    (raw(HALF), "bad_encoding", "", 3, 0),
    (says("half an emoji \ud83d"), "bad_encoding", "stop", 3, 0),
    (huge, "too_large", "", 1, 0),
])
def test_each_fault_has_its_type(act, kind, finish, requests, waits):
    got, server, slept = ask(act)
    assert isinstance(got, Failure) and got.kind.value == kind and got.finish_reason == finish
    assert len(server.requests) == requests and len(slept) == waits
    assert (got.usage.requests, got.usage.retries) == (requests, requests - 1)
    assert got.usage.failures == {kind: requests}
    assert got.detail and got.detail.isprintable() and len(got.detail) <= 300


@pytest.mark.parametrize("act, text", [
    (says(None, **REASONING), "I should say hello."), (says("hello", **REASONING), "hello")])
def test_reasoning_is_an_answer_only_where_the_config_says_so(act, text):
    assert ask(act, use_reasoning=True)[0].text == text
    assert ask(says(None, "length", **REASONING), use_reasoning=True)[0].kind.value == "truncated"


@pytest.mark.parametrize("act", [DRIPPING_HEADER, DRIPPING_BODY])
def test_a_server_that_drips_does_not_hold_the_reader(act):
    got, server, waits = ask(act, clock=Clock(tick=1.0), timeout_s=30, tries=2)
    assert got.kind is FailureKind.TIMEOUT and "30 s" in got.detail
    assert len(server.requests) == 2 and len(waits) == 1


def test_a_silent_server_times_out():
    with Served(silent) as server:
        got = Endpoint(server.config(timeout_s=0.05, tries=1)).ask(ASKED)
    assert got.kind is FailureKind.TIMEOUT and got.usage.requests == 1


def test_nobody_listens():
    clock = Clock()
    got = clock.endpoint(EndpointConfig(unused_url(), "m")).ask(ASKED)
    assert got.kind is FailureKind.CONNECTION and len(clock.waits) == 2


def test_a_text_that_the_caller_cannot_use_is_asked_for_again():
    def check(text):
        return None if text == "yes" else Failure(FailureKind.WRONG_SHAPE, f"not yes: {text}")
    got, server, waits = ask(says("no"), says("yes"), check=check)
    assert got.text == "yes" and len(server.requests) == 2 and waits == []
    assert got.usage == Usage(2, 1, {"wrong_shape": 1}, 14, 10, 0.0)
    got, server, _ = ask(says("no"), check=check)
    assert got.kind is FailureKind.WRONG_SHAPE and len(server.requests) == 3


@pytest.mark.parametrize("counted", [None, 3, {"prompt_tokens": None, "completion_tokens": "9"},
                                     {"prompt_tokens": -4, "completion_tokens": True},
                                     {"prompt_tokens": int("9" * 4300),
                                      "completion_tokens": 10 ** 9 + 1}])
def test_odd_token_counts_count_nothing(counted):
    got, *_ = ask(row(completion({"content": "hello"}) | {"usage": counted}))
    assert got == Answer("hello", Usage(requests=1))


# ---------------------------------------------------------------- down, and at the same time


def test_a_dead_endpoint_is_left_alone_for_a_while():
    clock = Clock()
    with Served(*[status(500)] * 7, says("hello")) as server:
        endpoint = clock.endpoint(server.config(down_after=6, down_s=60))
        kinds = [endpoint.ask(ASKED).kind.value for _ in range(4)]
        assert kinds == ["server_error", "server_error", "down", "down"]
        assert len(server.requests) == 6 and len(clock.waits) == 4
        down = endpoint.ask(ASKED)
        assert down.usage == Usage(failures={"down": 1}) and "60 s" in down.detail
        clock.time += 61
        assert endpoint.ask(ASKED).kind.value == "server_error"  # one probe, no second try
        assert len(server.requests) == 7 and endpoint.ask(ASKED).kind is FailureKind.DOWN
        clock.time += 61
        assert endpoint.ask(ASKED).text == endpoint.ask(ASKED).text == "hello"
        assert len(server.requests) == 9


def test_one_request_alone_finds_out_whether_it_is_back():
    clock, asked, go_on = Clock(), threading.Event(), threading.Event()

    def probe(handler, request):
        asked.set()
        go_on.wait(20)
        says("hello")(handler, request)
    with Served(status(500), probe) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        endpoint = clock.endpoint(server.config(down_after=1, tries=1))
        assert endpoint.ask(ASKED).kind is FailureKind.SERVER_ERROR
        clock.time += 61
        first = pool.submit(endpoint.ask, ASKED)
        assert asked.wait(20)
        others = [endpoint.ask(ASKED).kind for _ in range(3)]
        go_on.set()
        assert first.result(20).text == endpoint.ask(ASKED).text == "hello"
    assert others == [FailureKind.DOWN] * 3 and len(server.requests) == 3


def test_only_failures_in_a_row_count():
    with Served(*[status(500), says("hello")] * 4) as server:
        endpoint = Clock().endpoint(server.config(down_after=2, tries=1))
        kinds = [type(endpoint.ask(ASKED)) for _ in range(8)]
    assert kinds == [Failure, Answer] * 4 and len(server.requests) == 8


@pytest.mark.parametrize("act", [status(400), says("")])
def test_who_answers_at_all_is_not_down(act):
    with Served(act) as server:
        endpoint = Clock().endpoint(server.config(down_after=2, tries=1))
        assert FailureKind.DOWN not in [endpoint.ask(ASKED).kind for _ in range(5)]


def test_requests_at_a_time_are_bounded():
    pair = threading.Barrier(2)

    def act(handler, request):
        pair.wait(20)
        says("hello")(handler, request)
    with Served(act) as server, concurrent.futures.ThreadPoolExecutor(12) as pool:
        endpoint = Endpoint(server.config(concurrency=2))
        answers = list(pool.map(lambda _: endpoint.ask(ASKED), range(12)))
    assert all(isinstance(answer, Answer) for answer in answers)
    assert server.most_at_work == 2 and len(server.requests) == 12


# ---------------------------------------------------------------- the key and the config


@pytest.mark.parametrize("act", [
    status(401, body=f"bad key {KEY}".encode()), status(500, body=f"Bearer {KEY}".encode()),
    row({"error": f"key {KEY} has no quota"})])
def test_an_echoed_key_stays_out_of_errors(act):
    got, *_ = ask(act, key=KEY)
    assert KEY not in repr(got) and "***" in got.detail


@pytest.mark.parametrize("ahead", range(150, 200, 7))
@pytest.mark.parametrize("wrap", [
    lambda text: status(500, body=text.encode()), lambda text: status(400, body=4 * text.encode()),
    lambda text: row({"error": text}), lambda text: raw(text.encode())])
def test_what_is_shortened_holds_no_part_of_the_key(wrap, ahead):
    got, *_ = ask(wrap("x" * ahead + KEY + "y" * 2000), key=KEY, tries=1)
    assert isinstance(got, Failure) and KEY[:4] not in got.detail


def spelled(key):
    """As JSON may spell it."""
    return "".join(rf"\u{ord(c):04X}" if i % 3 == 0 else c for i, c in enumerate(key))


@pytest.mark.parametrize("act", [
    says(f"take {KEY} please"), says(json.dumps({"turns": [KEY]})),
    says('{"turns": ["%s"]}' % spelled(KEY)),
    raw(json.dumps(completion({"content": "at KEY"})).replace("KEY", spelled(KEY)).encode())])
def test_a_text_that_repeats_the_key_is_refused(act):
    got, server, _ = ask(act, key=KEY)
    assert got.kind is FailureKind.KEY_ECHOED and KEY not in repr(got)
    assert len(server.requests) == 3 and got.usage.failures == {"key_echoed": 3}


def test_a_placeholder_of_a_key_is_no_secret():
    assert ask(says("the list is EMPTY"), key="EMPTY")[0].text == "the list is EMPTY"


def bad_chunk(size):
    def act(handler, request):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
                            + size + b"\r\nfoo\r\n0\r\n\r\n")
        handler.close_connection = True
    return act


@pytest.mark.parametrize("size", [b"-5", b"zz", b"9" * 30])
def test_chunks_that_are_no_http_are_a_failed_connection(size):
    got, server, _ = ask(bad_chunk(size))
    assert got.kind is FailureKind.CONNECTION and len(server.requests) == 3


def test_the_key_is_read_where_it_is_needed_and_goes_nowhere_else(monkeypatch):
    config = EndpointConfig("http://127.0.0.1:1/v1", "m", api_key_env="TEACHER_KEY")
    endpoint = open_endpoint(config, {"TEACHER_KEY": f" {KEY}\n"})
    monkeypatch.setenv("TEACHER_KEY", "another")
    sent = pickle.dumps(endpoint)
    assert KEY.encode() not in sent and b"another" not in sent
    assert pickle.loads(sent)._key == "another" and endpoint._key == KEY
    assert KEY not in repr(endpoint) + json.dumps(to_json(config))
    for environ, said in (({}, "not set"), ({"TEACHER_KEY": " "}, "not set"),
                          ({"TEACHER_KEY": f"{KEY}\nX"}, "one line")):
        with pytest.raises(ValueError, match=f"TEACHER_KEY.*{said}") as error:
            open_endpoint(config, environ)
        assert KEY not in str(error.value)


@pytest.mark.parametrize("wrong, said", [
    (dict(base_url="localhost:8000"), "base_url"), (dict(base_url="ftp://a/v1"), "base_url"),
    (dict(base_url="http://"), "base_url"), (dict(base_url="http://a:port/v1"), "base_url"),
    (dict(base_url="http://a/v1/chat/completions"), "leave /chat/completions out"),
    (dict(base_url="http://a..b/v1"), "base_url"), (dict(base_url="http://.../v1"), "base_url"),
    (dict(base_url=f"http://{'a' * 64}.b/v1"), "base_url"),
    (dict(base_url="http://a b/v1"), "base_url"), (dict(base_url="http://a/v1\n"), "base_url"),
    (dict(base_url=f"http://me:{KEY}@a/v1"), "api_key_env"),
    (dict(base_url=f"http://a/v1?key={KEY}"), "api_key_env"),
    (dict(api_key_env=KEY), "never the key itself"), (dict(tries=0), "tries"),
    (dict(api_key_env="hf_token"), "in capitals"),
    (dict(concurrency=0), "concurrency"), (dict(timeout_s=0), "timeout_s"),
    (dict(timeout_s=float("nan")), "timeout_s"), (dict(max_wait_s=-1), "max_wait_s"),
    (dict(temperature=3), "temperature"), (dict(max_tokens=0), "max_tokens"),
    (dict(down_after=0), "down_after"), (dict(connect_s=float("inf")), "connect_s")])
def test_the_config_is_checked(wrong, said):
    with pytest.raises(ValueError, match=said) as error:
        EndpointConfig(**wrong)
    assert KEY not in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("wrong, said", [
    (dict(writer="llm"), r"endpoint.base_url is empty, but writer llm needs it"),
    (dict(judge=True), r"endpoint.base_url is empty, but judge needs it"),
    (dict(writer="llm", endpoint=dict(base_url="http://a/v1")), "endpoint.model is empty"),
    (dict(endpoint=dict(base_url="http://a/v1", model="m")), "set writer to llm or judge"),
    (dict(on_outage="stop"), "on_outage has no effect"),
    (dict(writer="gpt"), "expected one of 'template', 'llm'"),
    (dict(writer="llm", endpoint=dict(base_ur="http://a/v1")), "did you mean base_url"),
])
def test_settings_that_do_not_fit_together(wrong, said):
    with pytest.raises(ConfigError, match=said) as error:
        typed(SynthesisConfig, wrong, "file.py")
    assert "\n" not in str(error.value)


def test_a_run_is_told_by_set_and_old_configs_load(tmp_path):
    from rods_jax.run_config import RunConfig
    old = tmp_path / "old.py"
    old.write_text("def get_config():\n    return dict(seed=0, steps=1, synthesis=dict(k_max=2))\n")
    synthesis = load(old, [], RunConfig).synthesis
    assert synthesis == SynthesisConfig(k_max=2) and synthesis.writer is WriterKind.TEMPLATE
    told = load(old, ["synthesis.writer=llm", "synthesis.endpoint.base_url=http://a:8000/v1",
                      "synthesis.endpoint.model=Qwen/Qwen3-32B", "synthesis.on_outage=go_on",
                      "synthesis.endpoint.timeout_s=300", "synthesis.judge=True"], RunConfig)
    assert told.synthesis == SynthesisConfig(
        k_max=2, writer=WriterKind.LLM, judge=True, on_outage=OnOutage.GO_ON,
        endpoint=EndpointConfig("http://a:8000/v1", "Qwen/Qwen3-32B", timeout_s=300.0))
    assert typed(RunConfig, to_json(told), "again") == told
    with pytest.raises(ConfigError, match=r"^--set synthesis.writer=llm: .*endpoint.base_url"):
        load(old, ["synthesis.writer=llm"], RunConfig)


# ---------------------------------------------------------------- JSON in a text


@pytest.mark.parametrize("text, value", [
    ('{"code":"use `print` now"}', {"code": "use `print` now"}),
    ('I use the `json` form:\n{"a":1} as asked', {"a": 1}),
    ('```json\n{"a": "three ``` here"}\n```', {"a": "three ``` here"}),
    ('Here ``` it is: {"a": "x ``` y"}', {"a": "x ``` y"}),
    ('Sure.\n```\n{"a": 1}\n```\nDone.', {"a": 1}),
    ('```python\nprint({})\n```\n```json\n{"a": {"b": [1]}}\n```', {"a": {"b": [1]}}),
    ('use {curly} and {"a": {"b": "}"}} here {"c": 2}', {"a": {"b": "}"}}),
    ('  {"a": 1}\n', {"a": 1}), ('["a"]', ["a"]), ('"text"', "text"),
    ('{"a": 123456789012345678901}', {"a": 123456789012345678901}),
    ('{"turns": ["a", {"b": 1}', None), ('{"a": "cut of', None), ('{"a": {"b": 1}, "c"', None),
    ("no object at all", None), ("", None), ("{}{", {}), ('{"a": NaN}', None),
    ('{"a":' * 3000, None), ("{" * 100000, None)])
def test_json_is_found_among_other_words(text, value):
    assert find_json(text) == value
