"""The trainer's own endpoint, and the loop through it; what writes here is a script."""

import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import re
import socket
import threading
import time
import types

import pytest
from loop_cases import tiny_config
from synthesis_cases import CONFIG, EXPECTED, ServedNotes, ask, header_of, maker_of, uids
from test_synthesis_process import until

from experiments import synthesize as entry
from rods_jax.config import UserError, to_json
from rods_jax.resume import check_config
from rods_jax.run_synthesis import figures
from rods_jax.synthesis import loop
from rods_jax.synthesis.endpoint import Endpoint, EndpointConfig, FailureKind
from rods_jax.synthesis.hosts import Host
from rods_jax.synthesis.loop import LoopConfig, Synthesizer
from rods_jax.synthesis.outcome import Usage
from rods_jax.synthesis.pipeline import OnOutage, SynthesisConfig, make_maker
from rods_jax.synthesis.policy_endpoint import MODEL, PolicyEndpoint
from rods_jax.synthesis.writers import TemplateWriter, WriterKind, writer_messages
from rods_jax.tasks.leakage import HeldOutGuard
from rods_jax.text.free import Asked, Refused, Text, TooLong


@pytest.fixture
def endpoint():
    with contextlib.closing(PolicyEndpoint()) as endpoint:
        yield endpoint


@pytest.fixture
def ask_it(endpoint):
    """Asks in a thread of its own."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        def ask_it(text="hello", **config):
            client = Endpoint(config_of(endpoint, **config))
            return pool.submit(client.ask, ({"role": "user", "content": text},))
        yield ask_it
        endpoint.close()  # or a client might wait for ever


def config_of(endpoint, **changes):
    return EndpointConfig(**{"base_url": endpoint.url, "model": MODEL, "tries": 1} | changes)


def echo(asked):
    return [Text(each.messages[-1]["content"].upper(), True, 7, 5) for each in asked]


def never(asked):
    raise AssertionError(f"asked to write {asked}")


# ---------------------------------------------------------------- the endpoint


def test_a_question_waits_for_the_trainer_and_no_longer(endpoint, ask_it):
    assert endpoint.answer(never, 8) == 0
    asked = ask_it("hello", thinking=False)
    until(lambda: endpoint.waiting)
    assert not asked.done()
    seen = []
    assert endpoint.answer(lambda asked: seen.extend(asked) or echo(asked), 8) == 1
    answer = asked.result(30)
    assert answer.text == "HELLO" and dataclasses.replace(answer.usage, seconds=0) == Usage(
        requests=1, prompt_tokens=7, completion_tokens=5)
    assert seen == [Asked(({"role": "user", "content": "hello"},), False)]
    assert endpoint.answer(never, 8) == 0


def test_a_call_answers_so_many_the_oldest_first(endpoint, ask_it):
    asked = []
    for i in range(5):
        asked.append(ask_it(f"q{i}"))
        until(lambda: endpoint.waiting == i + 1)
    assert endpoint.answer(echo, 2) == 2
    assert [each.result(30).text for each in asked[:2]] == ["Q0", "Q1"]
    assert not any(each.done() for each in asked[2:])
    assert (endpoint.answer(echo, 2), endpoint.answer(echo, 2), endpoint.answer(never, 2)) \
        == (2, 1, 0)
    assert [each.result(30).text for each in asked[2:]] == ["Q2", "Q3", "Q4"]


def test_what_comes_while_it_writes_is_for_the_next_call(endpoint, ask_it):
    first, later = ask_it("first"), []

    def write(asked):
        later.append(ask_it("later"))
        until(lambda: endpoint.waiting)
        return echo(asked)

    until(lambda: endpoint.waiting)
    assert endpoint.answer(write, 8) == 1 and first.result(30).text == "FIRST"
    assert not later[0].done()
    assert endpoint.answer(echo, 8) == 1 and later[0].result(30).text == "LATER"


def test_nothing_is_written_for_a_client_that_has_gone(endpoint, ask_it):
    late = ask_it("late", timeout_s=0.5).result(30)
    assert late.kind is FailureKind.TIMEOUT
    until(lambda: endpoint.waiting == 1)
    here = ask_it("here")
    until(lambda: endpoint.waiting == 2)
    assert endpoint.answer(echo, 1) == 1  # it takes no place of those that are still there
    assert here.result(30).text == "HERE" and endpoint.waiting == 0


def test_a_client_that_goes_while_it_is_written_for_disturbs_nobody(endpoint, ask_it):
    gone, here = ask_it("gone", timeout_s=0.5), ask_it("here")
    until(lambda: endpoint.waiting == 2)

    def write(asked):
        assert gone.result(30).kind is FailureKind.TIMEOUT
        return echo(asked)

    assert endpoint.answer(write, 8) == 2 and here.result(30).text == "HERE"


def test_close_tells_those_that_wait(endpoint, ask_it):
    asked = [ask_it(f"q{i}") for i in range(3)]
    until(lambda: endpoint.waiting == 3)
    endpoint.close()
    for each in asked:
        failure = each.result(30)
        assert failure.kind is FailureKind.SERVER_ERROR and "503" in failure.detail
    endpoint.close()
    assert endpoint.answer(never, 8) == 0
    assert ask_it().result(30).kind is FailureKind.CONNECTION


@pytest.mark.parametrize("reply, kind, words", [
    (TooLong(3000, 2500), FailureKind.PROMPT_TOO_LONG, "3000 tokens .*leaves 2500 .*raise it"),
    (Refused("line 3: no system"), FailureKind.BAD_REQUEST, "line 3: no system"),
    (Text("{\"turns\": [\"so", False, 9, 9), FailureKind.TRUNCATED, "max_tokens"),
    (Text("", True), FailureKind.EMPTY_CONTENT, "nothing in the answer")])
def test_what_is_no_text_is_a_typed_failure(endpoint, ask_it, reply, kind, words):
    asked = ask_it()
    until(lambda: endpoint.waiting)
    endpoint.answer(lambda asked: [reply] * len(asked), 8)
    failure = asked.result(30)
    assert failure.kind is kind and failure.final is (kind is not FailureKind.EMPTY_CONTENT)
    assert re.search(words, failure.detail)


def test_what_breaks_while_it_writes_is_the_trainers(endpoint, ask_it):
    asked = ask_it()
    until(lambda: endpoint.waiting)
    with pytest.raises(AssertionError, match="asked to write"):
        endpoint.answer(never, 8)
    assert asked.result(30).kind is FailureKind.SERVER_ERROR


BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}]})


@pytest.mark.parametrize("path, headers, body, status", [
    ("/v1/models", {}, BODY, 404),
    ("/v1/chat/completions", {"Transfer-Encoding": "chunked"}, "", 411),
    ("/v1/chat/completions", {"Content-Length": str(5 << 20)}, "", 413),
    ("/v1/chat/completions", {}, "{", 400),
    ("/v1/chat/completions", {}, "[" * 100_000, 400),
    ("/v1/chat/completions", {}, "\xff", 400),
    ("/v1/chat/completions", {}, "[]", 400),
    ("/v1/chat/completions", {}, "{}", 400),
    ("/v1/chat/completions", {}, '{"messages": []}', 400),
    ("/v1/chat/completions", {}, '{"messages": ["x"]}', 400),
    ("/v1/chat/completions", {}, '{"messages": [{"role": "tool", "content": "x"}]}', 400),
    ("/v1/chat/completions", {}, '{"messages": [{"role": "user", "content": ["x"]}]}', 400)])
def test_what_is_no_request_never_reaches_the_trainer(endpoint, path, headers, body, status):
    port = int(endpoint.url.rpartition(":")[2].partition("/")[0])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        connection.putrequest("POST", path)
        for name, value in ({"Content-Length": str(len(body))} if not headers else headers).items():
            connection.putheader(name, value)
        connection.endheaders()
        connection.send(body.encode("latin-1"))
        response = connection.getresponse()
        assert response.status == status and json.loads(response.read())["error"]["message"]
    assert endpoint.answer(never, 8) == 0


def test_it_listens_on_the_loopback_alone(endpoint):
    assert endpoint.url.startswith("http://127.0.0.1:")
    port = int(endpoint.url.rpartition(":")[2].partition("/")[0])
    other = "127.0.0.2"  # this machine too, but not where it listens
    with pytest.raises(ConnectionError), socket.create_connection((other, port), 10):
        pass


# ---------------------------------------------------------------- the loop


class Recorder:
    """The template's texts, and for what messages they were written."""

    def __init__(self, texts):
        self.suite, self.texts = ServedNotes(), texts

    def write(self, story, rng, feedback):
        written = TemplateWriter(self.suite).write(story, rng, feedback)
        self.texts[_key(writer_messages(story, feedback))] = written.texts
        return written


def _key(messages):
    return json.dumps([dict(message) for message in messages])


@pytest.fixture(scope="module")
def by_template(tmp_path_factory):
    """What the template makes of the requests, and its texts by the messages asking for them."""
    texts = {}
    with Synthesizer(
            tmp_path_factory.mktemp("template"), header_of(), CONFIG,
            lambda header: dataclasses.replace(maker_of()(header), writer=Recorder(texts)),
            LoopConfig()) as synthesizer:
        ask(synthesizer)
        return synthesizer.collect(9, 30), texts


class Scripted:
    """The trainer's side: writes with a function of the messages. `rounds`: how many it wrote
    at a time."""

    def __init__(self, write):
        self.endpoint, self.write, self.rounds = PolicyEndpoint(), write, []

    def answer(self):
        if n := self.endpoint.answer(lambda asked: [self.write(a.messages) for a in asked], 2):
            self.rounds.append(n)

    def close(self):
        self.endpoint.close()


def policy(writer, **changes):
    return SynthesisConfig(writer=WriterKind.POLICY, **{
        "endpoint": config_of(writer.endpoint, timeout_s=60.0), "max_rewrites": 0} | changes)


def beside(folder, writer, config, said=print, **where):
    return Synthesizer(folder, header_of(config=config), config, maker_of(config=config),
                       LoopConfig(**where), say=said, writer=writer)


@pytest.mark.parametrize("host", [Host.THREAD, Host.PROCESS])
def test_good_texts_become_the_policys_own_variants(tmp_path, by_template, host):
    """While the trainer waits it writes, or both would wait for ever."""
    candidates, texts = by_template
    writer = Scripted(lambda messages: Text(json.dumps({"turns": texts[_key(messages)]}), True,
                                            11, 3))
    with beside(tmp_path, writer, policy(writer), host=host) as synthesizer:
        ask(synthesizer)
        found = synthesizer.collect(9, 60)
        told, funnel = figures(synthesizer), synthesizer.funnel
    assert uids(found) == EXPECTED and [c.task for c in found] == [c.task for c in candidates]
    assert {c.writer for c in found} == {"policy"} and funnel.writers == {"policy": 9}
    assert told["requests"] == 9 and told["fallbacks"] == 0 and told["outages"] == 0
    assert (told["prompt_tokens"], told["completion_tokens"]) == (99, 27)
    assert sum(writer.rounds) == 9 and max(writer.rounds) <= 2
    assert 0 < told["writing_s"] < told["seconds"]


def test_where_training_does_not_wait_each_look_writes_a_few(tmp_path, by_template):
    candidates, texts = by_template
    writer = Scripted(lambda messages: Text(json.dumps({"turns": texts[_key(messages)]}), True))
    found = []
    with beside(tmp_path, writer, policy(writer), wait=False) as synthesizer:
        ask(synthesizer)
        until(lambda: writer.endpoint.waiting >= 3)
        assert synthesizer.collect(9) == [] and writer.rounds == []  # collecting is no time for it
        synthesizer.poll()
        assert writer.rounds == [2]
        until(lambda: synthesizer.poll() or found.extend(synthesizer.collect(9))
              or len(found) == len(EXPECTED))
    assert [c.task for c in found] == [c.task for c in candidates]


def test_writing_is_no_waiting(tmp_path, by_template, monkeypatch):
    """An admission may wait for a minute; here each text takes the trainer longer than that."""
    candidates, texts = by_template
    spent = [0.0]

    def write(messages):
        spent[0] += 100
        return Text(json.dumps({"turns": texts[_key(messages)]}), True)

    monkeypatch.setattr(loop, "time", types.SimpleNamespace(
        monotonic=lambda: time.monotonic() + spent[0], sleep=time.sleep))
    writer = Scripted(write)
    with beside(tmp_path, writer, policy(writer)) as synthesizer:
        ask(synthesizer)
        assert len(synthesizer.collect(9, 60.0)) == len(candidates)
        assert 900 <= synthesizer.writing_s < 960


@pytest.mark.parametrize("on_outage", [OnOutage.FALL_BACK, OnOutage.GO_ON])
def test_nonsense_is_counted_and_falls_back_or_is_rejected(tmp_path, by_template, on_outage):
    candidates, _ = by_template
    replies = [Text("no JSON", True), Text("{\"turns\"", False), TooLong(9, 8),
               Text("{\"turns\": [\"one\", \"two\", \"three\"]}", True), Text("", True)]
    kinds = ["not_json", "truncated", "prompt_too_long", "wrong_shape", "empty_content"]
    numbers, said = iter(range(99)), []
    writer = Scripted(lambda messages: replies[next(numbers) % 5])
    config = policy(writer, on_outage=on_outage)
    with beside(tmp_path, writer, config, said.append) as synthesizer:
        ask(synthesizer)
        found, funnel = synthesizer.collect(9, 60), synthesizer.funnel
    counts = {kind: 1 + (i < 4) for i, kind in enumerate(kinds)}
    assert funnel.usage.failures == counts and said == []  # somebody was there
    if on_outage is OnOutage.FALL_BACK:
        assert funnel.fallbacks == counts and funnel.writers == {"template": 9}
        assert [c.task for c in found] == [c.task for c in candidates]
    else:
        assert found == [] and funnel.to_json()["rejected"] == {"write": counts}


def test_closing_does_not_wait_for_an_answer_that_cannot_come(tmp_path):
    writer = Scripted(never)
    endpoint = config_of(writer.endpoint, timeout_s=600.0, concurrency=2)
    synthesizer = beside(tmp_path, writer, policy(writer, endpoint=endpoint))
    ask(synthesizer)
    until(lambda: writer.endpoint.waiting == 2)
    synthesizer.close(20)  # raises TimeoutError where the attempt hangs
    assert not any(t.name == "synthesizer" and t.is_alive() for t in threading.enumerate())
    synthesizer.poll()
    assert synthesizer.answered == 0  # what was not written is not lost: it is asked for again
    with pytest.raises(OSError), socket.create_connection(
            ("127.0.0.1", int(endpoint.base_url.split(":")[2].removesuffix("/v1"))), 10):
        pass


# ---------------------------------------------------------------- where there is no policy


def test_without_a_training_run_it_is_refused_with_a_remedy(tmp_path, capsys):
    config = SynthesisConfig(writer=WriterKind.POLICY)
    with pytest.raises(ValueError, match="none here: export .* serve it.* writer llm") as error:
        make_maker(ServedNotes(), config, HeldOutGuard(), 1)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="--writer policy .* export .*--writer llm") as error:
        entry.main(["--writer", "policy", "--out", str(tmp_path / "t.jsonl"), "--base-url",
                    "http://localhost:1/v1", "--model", "m"])
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_nobody_judges_its_own_text():
    with pytest.raises(ValueError, match="judge is True, but with writer policy .*leave judge out"):
        SynthesisConfig(writer=WriterKind.POLICY, judge=True)


@pytest.mark.parametrize("changes, words", [
    ({}, "source compact has words for tools alone, .*policy.source to hf or smollm2"),
    ({"synthesizer": {"host": "elsewhere"}},
     "host is elsewhere, .*on this machine alone: .*vLLM and set synthesis.writer to llm"),
    ({"synthesis": {"writer": "policy", "endpoint": {"base_url": "http://localhost:8000/v1"}}},
     "endpoint.base_url has no effect with synthesis.writer policy.* leave it out"),
    ({"synthesis": {"writer": "policy", "endpoint": {"max_tokens": 64}}},
     "endpoint.max_tokens has no effect .*writing has length"),
    ({"synthesis": {}, "writing": {"max_new": 64}},
     "writing is set, but synthesis.writer is template: set it to policy"),
    ({"writing": {"max_new": 0}}, "writing.max_new is 0")])
def test_what_cannot_be_is_named_before_anything_is_loaded(changes, words):
    plain = {"warm_start": None, "synthesis": {"writer": "policy"}}
    if changes:
        plain["policy"] = {"source": "hf", "path": "model"}
    with pytest.raises(ValueError, match=words) as error:
        tiny_config(**plain | changes)
    assert "\n" not in str(error.value)


def test_how_it_writes_may_change_in_a_resumed_run(tmp_path):
    mine = tiny_config(warm_start=None, synthesis={"writer": "policy"},
                       policy={"source": "hf", "path": "model"})
    theirs = dataclasses.replace(mine, writing=dataclasses.replace(mine.writing, max_new=64))
    check_config(tmp_path, {"config": to_json(theirs)}, mine)
