"""An endpoint that is down or slow, seen from the trainer."""

import json
import random
import time

import pytest

from experiments import synthesizer as entry
from misbehaving_endpoint import Served, says, status, unused_url
from rods_jax.config import to_json
from rods_jax.run_synthesis import figures
from rods_jax.synthesis.endpoint import EndpointConfig
from rods_jax.synthesis.exchange import OUTCOMES
from rods_jax.synthesis.outcome import Stage
from rods_jax.synthesis.pipeline import OnOutage, SynthesisConfig
from rods_jax.synthesis.worker import OutageStop
from rods_jax.synthesis.writers import WriterKind
from synthesis_cases import EXPECTED, ask, header_of, restore, start, uids

USELESS = says(json.dumps({"turns": ["Do it.", "And that."]}))  # the rules refuse these texts


def config_of(endpoint, on_outage, **changes):
    return SynthesisConfig(writer=WriterKind.LLM, endpoint=endpoint, on_outage=on_outage,
                           max_rewrites=0, **changes)


def test_without_an_endpoint_what_works_offline_stands_in_and_it_is_said_once(tmp_path):
    said = []
    with Served(status(503), status(503), status(503), USELESS) as server:
        config = config_of(server.config(tries=1, concurrency=1), OnOutage.FALL_BACK)
        with start(tmp_path, config=config, say=said.append) as synthesizer:
            ask(synthesizer)
            found = synthesizer.collect(9, 20)
            told = figures(synthesizer)
    assert uids(found) == EXPECTED[:3] and {c.writer for c in found} == {"template"}
    assert said == [
        "synthesis: the endpoint does not answer (server_error): what works offline stands in",
        "synthesis: the endpoint answers again; attempts without it: 3"]
    assert told["outages"] == 1 and told["fallbacks"] == 3 and told["requests"] == 9
    assert told["failures"] == {"server_error": 3} and told["retries"] == 0
    assert told["prompt_tokens"] == 6 * 7 and told["completion_tokens"] == 6 * 5
    assert told["latency_s"] == pytest.approx(told["seconds"] / 9) and told["seconds"] > 0


def test_attempts_are_rejected_and_training_goes_on(tmp_path):
    said = []
    config = config_of(EndpointConfig(unused_url(), "m", tries=1, down_after=2), OnOutage.GO_ON)
    with start(tmp_path, config=config, say=said.append) as synthesizer:
        ask(synthesizer)
        assert synthesizer.collect(9, 20) == []
        rejected = synthesizer.funnel.to_json()["rejected"]
    assert set(rejected) == {Stage.WRITE.value} and sum(rejected["write"].values()) == 9
    assert rejected["write"]["down"] >= 1  # it was not asked each time
    assert len(said) == 1 and "its attempts are rejected, training goes on" in said[0]


@pytest.mark.parametrize("host", ["thread", "process"])
def test_the_run_stops_and_goes_on_where_it_was(tmp_path, host):
    """What could not be asked has no outcome; a resumed run asks for it, and another endpoint
    may answer."""
    config = config_of(EndpointConfig(unused_url(), "m", tries=1), OnOutage.STOP)
    synthesizer = start(tmp_path, config=config, say=lambda line: None, host=host)
    ask(synthesizer)
    with pytest.raises(OutageStop, match="gave no answer .connection:") as error:
        synthesizer.collect(9, 30)
    assert "\n" not in str(error.value) and synthesizer.restarts == 0
    state = synthesizer.state()
    synthesizer.close()
    assert [set(json.loads(line)) for line in (tmp_path / OUTCOMES).read_text().splitlines()] == [
        {"halt", "g"}]
    with Served(USELESS) as server:
        config = config_of(server.config(), OnOutage.STOP)
        with restore(state, tmp_path, config=config, host=host) as again:
            assert again.collect(9, 30) == [] and again.funnel.attempts == 9
        assert len(server.requests) == 9


def test_the_entry_point_has_an_exit_code_for_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("signal.signal", lambda *_: None)
    config = config_of(EndpointConfig(unused_url(), "m", tries=1), OnOutage.STOP)
    synthesizer = start(tmp_path, config=config, say=lambda line: None, host="elsewhere")
    ask(synthesizer)
    assert entry.main([str(tmp_path)]) == 3
    err = capsys.readouterr().err
    assert err.startswith("error: the endpoint") and err.count("\n") == 1
    with pytest.raises(OutageStop):
        synthesizer.poll()
    synthesizer.close()


def test_attempts_in_flight_side_by_side_are_told_in_order(tmp_path):
    """Each answer takes another while; novelty is decided in the order asked all the same."""
    rng = random.Random(0)

    def slow(handler, body):
        time.sleep(rng.uniform(0.01, 0.1))
        USELESS(handler, body)

    with Served(slow) as server:
        config = config_of(server.config(concurrency=3), OnOutage.GO_ON)
        with start(tmp_path, config=config) as synthesizer:
            ask(synthesizer)
            synthesizer.collect(9, 30)
        assert server.most_at_work == 3 and len(server.requests) == 9
    rows = [json.loads(line) for line in (tmp_path / OUTCOMES).read_text().splitlines()]
    assert [row["n"] for row in rows] == list(range(9))
    assert header_of(config=config).config == to_json(config)


def test_an_endpoint_that_hangs_does_not_keep_the_trainer(tmp_path):
    """Nothing waits for it: not a request, a look or the close."""
    def hang(handler, body):
        handler.server.served.over.wait(30)

    with Served(hang) as server:
        config = config_of(server.config(timeout_s=30.0, concurrency=2), OnOutage.FALL_BACK)
        synthesizer = start(tmp_path, config=config, wait=False)
        ask(synthesizer)
        end = time.monotonic() + 20
        while server.at_work < 2:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert synthesizer.collect(9) == [] and synthesizer.outstanding == 9
        synthesizer.close(10.0)
        assert not synthesizer._host.thread.is_alive()
