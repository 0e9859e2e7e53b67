"""The rollout bench: its formulas and figures, the line to its peers, and one whole run on a
tiny model. What the peers themselves do is seen only where they are installed."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from experiments.bench import __main__ as cli
from experiments.bench import bounds, machine, rollout
from experiments.bench.cases import CASES, Case, make_work
from experiments.bench.ours import Phases
from experiments.bench.peers import Peer, PeerName
from experiments.bench.rollout import Plan, Side
from experiments.bench.rollout_table import rollout_table
from rods_jax.config import UserError
from rods_jax.models.config import ModelConfig
from rods_jax.models.decoder import Decoder, init_params
from rods_jax.models.flops import layer_parameters

FAKE = pathlib.Path(__file__).with_name("bench_peer.py")
TINY = ModelConfig(vocab_size=31, d_model=16, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=6,
                   d_ff=24, rope_theta=1e6, norm_eps=1e-6, qk_norm=True)
DEEP = dataclasses.replace(TINY, n_layers=3)
TINY_CASES = (Case("a", 3, 9, 4), Case("b", 3, 20, 4), Case("b_group_2", 2, 20, 4),
              Case("c", 3, 9, 4, messages=3, tool=5))
PEAK = {"matmul_gflops": 100.0, "bandwidth_gbs": 20.0}


# ---------------------------------------------------------------- formulas


@pytest.mark.parametrize("case", TINY_CASES)
def test_bounds_equal_a_count_token_by_token(case):
    """Each token of each rollout in turn: what it costs, and in which phase."""
    weights = 2 * layer_parameters(DEEP)
    key = 2 * 2 * DEEP.n_layers * DEEP.n_heads * DEEP.head_dim  # a score and a weighted value
    entry = 2 * DEEP.n_layers * DEEP.n_kv_heads * DEEP.head_dim * 4
    flops, read, kv = dict.fromkeys(("prefill", "extend", "decode"), 0), 0, 0
    for position in range(case.prompt):
        flops["prefill"] += weights + key * (position + 1)
    position = case.prompt
    for message in range(case.messages):
        for token in range(case.new):
            flops["decode"] += case.group * 2 * DEEP.d_model * DEEP.vocab_size
            read += 4 * DEEP.d_model * DEEP.vocab_size
            if token < case.new - 1:
                flops["decode"] += case.group * (weights + key * (position + 1))
                read += 2 * weights
                kv += entry * (case.prompt + case.group * (position + 1 - case.prompt))
                position += 1
        if message < case.messages - 1:
            for _ in range(1 + case.tool):
                flops["extend"] += case.group * (weights + key * (position + 1))
                position += 1
    assert position == case.length - 1
    assert flops == {"prefill": bounds.prefill_flops(DEEP, case),
                     "extend": bounds.extend_flops(DEEP, case),
                     "decode": bounds.decode_flops(DEEP, case)}
    assert (read, kv) == (bounds.decode_weight_bytes(DEEP, case),
                          bounds.decode_kv_bytes(DEEP, case))


def test_the_cases_are_those_promised():
    a, b, b2, c = CASES
    assert (a.group, a.prompt, a.new, a.sampled, a.length) == (16, 512, 64, 1024, 576)
    assert (b.group, b.prompt, b.new) == (16, 4096, 64)
    assert (b2.group, b2.prompt, b2.new) == (2, 4096, 64)
    assert (c.group, c.length, c.sampled) == (16, 512 + 4 * 64 + 3 * 200, 4096)
    work = make_work(c, 8192)
    assert work.prompt_P.shape == (512,) and work.tools_MxGxK.shape == (3, 16, 200)
    assert len({tuple(row) for row in work.tools_MxGxK.reshape(-1, 200)}) == 48
    assert np.array_equal(work.prompt_P, make_work(c, 8192).prompt_P)


# ---------------------------------------------------------------- figures


def seconds_of(ours, **theirs):
    return {name: {"ours": ours, **{side: theirs[side] for side in rest}}
            for name, rest in (("a", ("transformers", "tunix")), ("b", ("transformers",)),
                               ("b_group_2", ("tunix",)),
                               ("c", ("transformers", "tunix", "transformers_cached")))}


def test_ratios_are_of_medians_and_all_targets_must_be_met():
    seconds = seconds_of([1.0, 2.0, 9.0], transformers=[30.0, 8.0, 20.0],
                         tunix=[16.0, 12.0, 1.0], transformers_cached=[2.0, 3.0, 1.0])
    found = rollout.figures(seconds)
    assert found["a_vs_transformers"] == found["b_vs_transformers"] == 10.0
    assert found["a_vs_tunix"] == found["b_vs_tunix"] == found["c_vs_tunix"] == 6.0
    assert found["c_vs_transformers_cached"] == 1.0
    assert found["ranges"]["a_vs_transformers"] == [20 / 9, 30.0]
    assert found["targets"] == {"a_vs_transformers": 5, "a_vs_tunix": 6, "b_vs_transformers": 10,
                                "c_vs_transformers": 4, "c_vs_tunix": 4}
    assert found["all_met"] is True
    seconds["b"]["transformers"] = [19.9, 19.9, 30.0]
    assert rollout.figures(seconds)["all_met"] is False


def test_a_peer_or_case_left_out_is_null_and_meets_nothing():
    seconds = seconds_of([1.0], transformers=[50.0], tunix=[50.0], transformers_cached=[1.0])
    assert rollout.figures(seconds)["all_met"] is True
    for sides in seconds.values():
        sides.pop("tunix", None)
    found = rollout.figures(seconds)
    assert found["a_vs_tunix"] is found["b_vs_tunix"] is found["c_vs_tunix"] is None
    assert found["a_vs_transformers"] == 50.0 and found["all_met"] is False
    assert "a_vs_tunix" not in found["ranges"]
    found = rollout.figures({"a": seconds["a"]})
    assert found["b_vs_transformers"] is None and found["all_met"] is False


def test_phases_are_medians_and_shares_of_the_peaks():
    case = TINY_CASES[3]
    phases = [Phases(1.0, 4.0, 2.0, 7.5, 36), Phases(3.0, 2.0, 4.0, 9.5, 36),
              Phases(2.0, 9.0, 9.0, 20.5, 36)]
    found = rollout.case_figures(TINY, case, {"ours": [7.5, 9.5, 20.5], "tunix": [18.0, 9.0, 36.0]},
                                 phases, PEAK)
    ours = found["sides"]["ours"]
    assert (ours["prefill_s"], ours["extend_s"], ours["decode_s"]) == (2.0, 4.0, 4.0)
    assert ours["prefill_fraction_of_matmul_peak"] == pytest.approx(
        bounds.prefill_flops(TINY, case) / 2.0 / 100e9)
    assert ours["extend_fraction_of_matmul_peak"] == pytest.approx(
        bounds.extend_flops(TINY, case) / 4.0 / 100e9)
    assert ours["decode_fraction_of_bandwidth"] == pytest.approx(
        bounds.decode_weight_bytes(TINY, case) / 4.0 / 20e9)
    assert ours["decode_fraction_of_bandwidth_with_kv"] > ours["decode_fraction_of_bandwidth"]
    assert found["sides"]["tunix"] == {"seconds": [18.0, 9.0, 36.0], "median_s": 18.0,
                                       "tokens_per_s": 2.0}
    assert (found["group"], found["messages"], found["sampled"]) == (3, 3, 36)
    alone = rollout.phase_figures(TINY, TINY_CASES[0], phases, PEAK)
    assert alone["extend_fraction_of_matmul_peak"] is None


def test_other_programs_on_the_machine_are_seen(tmp_path, monkeypatch):
    tick = machine.os.sysconf("SC_CLK_TCK")
    now = types.SimpleNamespace(perf_counter=lambda: now.s, s=0.0)
    monkeypatch.setattr(machine, "time", now)

    def at(seconds, total, mine, peers):
        now.s = seconds
        (tmp_path / "stat").write_text(f"cpu  {total * tick} 0 {tick} 99999 5 0\ncpu0 1 2 3\n")
        for pid, own in ((machine.os.getpid(), mine), (7, peers)):
            (tmp_path / str(pid)).mkdir(exist_ok=True)
            fields = ["x"] * 11 + [str(own * tick), str(tick), "1", "2"]
            (tmp_path / str(pid) / "stat").write_text(f"{pid} (a name) {' '.join(fields)}\n")

    at(100.0, 50, 10, 20)
    others, too_few = (machine.Others(pids, tmp_path) for pids in ([7], []))
    at(110.0, 69, 15, 30)
    assert others.cores_busy() == pytest.approx((19 - 5 - 10) / 10)
    assert too_few.cores_busy() == pytest.approx((19 - 5) / 10)
    assert machine.Others([8], tmp_path).cores_busy() is None


# ---------------------------------------------------------------- the line to a peer


def script(tmp_path, text):
    path = tmp_path / "peer.py"
    path.write_text(text)
    return sys.executable, str(path)


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_peer_that_dies_says_its_last_words(tmp_path):
    command = script(tmp_path, "import sys; print('more', file=sys.stderr); sys.exit('no torch')")
    with pytest.raises(UserError) as error:
        Peer("transformers", command)
    assert one_line(error).startswith("transformers ended with exit code 1 at start (no torch); ")
    assert "make bench-peers" in str(error.value) and "--without transformers" in str(error.value)
    command = script(tmp_path, "import os; print('{}', flush=True); input(); os.abort()")
    with Peer("tunix", command) as peer, pytest.raises(UserError) as error:
        peer.ask("run", new=3)
    assert one_line(error).startswith("tunix ended with exit code -6 at run; ")


def test_a_peer_that_is_gone_before_it_is_asked(tmp_path):
    with Peer("tunix", script(tmp_path, "print('{}')")) as peer:
        peer._process.wait()
        for _ in range(2):
            with pytest.raises(UserError, match="tunix ended with exit code 0 at run"):
                peer.ask("run", filler="x" * 100_000)


@pytest.mark.parametrize("answer", ["hello", "3", "[1]", '{"seconds"'])
def test_a_peer_that_answers_nonsense(tmp_path, answer):
    command = script(tmp_path, f"print({answer!r}, flush=True); input()")
    with pytest.raises(UserError, match="tunix answered start with .* which is no JSON object"):
        Peer("tunix", command)


def test_a_peer_that_hangs_or_cannot(tmp_path):
    command = script(tmp_path, "print('{}', flush=True); input(); input()")
    with Peer("tunix", command, limit_s=5) as peer:
        peer._limit_s = 0.05
        with pytest.raises(UserError, match="tunix has not answered run in 0 s"):
            peer.ask("run")
    with pytest.raises(UserError, match="exit code 1 at start .*No such file.*/none/config.json"):
        Peer("tunix", (sys.executable, str(FAKE), "1", str(tmp_path / "none")))


def test_commands_that_fail_are_answered_and_the_peer_lives_on(tmp_path):
    command = script(tmp_path, "import sys\n"
                     f"sys.path.insert(0, {str(FAKE.parents[1])!r})\n"
                     "from experiments.bench.serve import serve\n"
                     "def run(new):\n"
                     "    print('from a library')\n"
                     "    if new > 9: raise MemoryError('27 GB\\nasked for')\n"
                     "    return {'seconds': new}\n"
                     "serve(lambda folder: ({'folder': folder}, {'run': run}))\n")
    with Peer("tunix", (*command, "weights")) as peer:
        assert peer.greeting == {"folder": "weights"}
        with pytest.raises(UserError, match="tunix could not run: MemoryError: 27 GB asked for; "):
            peer.ask("run", new=10)
        with pytest.raises(UserError, match="tunix could not fly: KeyError: 'fly'"):
            peer.ask("fly")
        answer = peer.ask("run", new=2)
        assert peer.number(answer, "seconds") == 2
        for wrong in ({}, {"seconds": 0}, {"seconds": "3"}, {"seconds": True},
                      {"seconds": float("nan")}):
            with pytest.raises(UserError, match="as seconds, which is no positive number"):
                peer.number(wrong, "seconds")


def test_the_peers_files_import_nothing_of_ours():
    code = ("import sys; import experiments.bench.serve; "
            "assert not [m for m in sys.modules if m.startswith(('rods_jax', 'jax', 'numpy'))]")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=FAKE.parents[1])
    for name in PeerName:
        source = (FAKE.parents[1] / f"experiments/bench/peer_{name.value}.py").read_text()
        assert "rods_jax" not in source and "def make(folder: str)" in source


# ---------------------------------------------------------------- whole runs


def commands(seconds, names=tuple(PeerName)):
    return {name: (sys.executable, str(FAKE), str(seconds)) for name in names}


@pytest.fixture(autouse=True)
def small_peaks(monkeypatch):
    monkeypatch.setattr(machine, "READ_BYTES", 2 ** 20)


def still(case, total=0.5):
    """Stands in for ours, which takes a while to compile."""
    return types.SimpleNamespace(run=lambda: Phases(0.1, 0.1, 0.2, total, case.sampled))


@pytest.mark.slow
def test_one_run_with_our_sampler_on_a_tiny_model():
    case = TINY_CASES[3]
    found = rollout.bench_rollout(Plan((case,), commands(3.0), repeats=2, model=TINY))
    assert json.loads(json.dumps(found)) == found
    sides = found["cases"]["c"]["sides"]
    ours = sides["ours"]
    assert len(ours["seconds"]) == 2 and min(ours["seconds"]) > 0
    assert min(ours[f"{phase}_s"] for phase in ("prefill", "extend", "decode")) > 0
    assert ours["prefill_s"] + ours["extend_s"] + ours["decode_s"] < 1.01 * max(ours["seconds"])
    assert sides["tunix"]["seconds"] == [3.0, 3.0]
    assert found["c_vs_tunix"] == pytest.approx(3.0 / np.median(ours["seconds"]))
    assert found["c_vs_transformers_cached"] == pytest.approx(found["c_vs_tunix"] / 2)
    assert found["a_vs_tunix"] is None and found["all_met"] is False
    assert found["machine"]["matmul_gflops"] > 0 and found["machine"]["bandwidth_gbs"] > 0


def test_one_run_of_all_cases(monkeypatch):
    monkeypatch.setattr(rollout, "Ours", lambda decoder, params, case: still(case))
    found = rollout.bench_rollout(Plan(TINY_CASES, commands(5.0), repeats=2, model=TINY))
    for key, ratio in rollout.RATIOS.items():
        assert found[key] == (5.0 if ratio.side is Side.TRANSFORMERS_CACHED else 10.0)
    assert found["all_met"] is True and found["repeats"] == 2
    assert set(found["logprob_gap"]) == {"transformers", "tunix"}
    assert 0 < max(found["logprob_gap"].values()) < 1e-4
    assert found["tunix_need"]["b"]["bytes"] == 20 * 3 * 4 and set(found["tunix_need"]) == {"b"}
    table = rollout_table(found)
    assert table.count(" 10.00 ") + table.count(" 10.00\n") == 6 and table.count(" 5.00") > 1
    assert "transformers_cached" in table and "tunix's sampler asks for 0.0 GB" in table
    assert table.endswith("5 of 6 targets measured, 5 met")
    slow = found | {"slow_tools": {"met": False}}
    assert rollout_table(slow).endswith("6 of 6 targets measured, 5 met")


def test_a_run_without_a_peer(monkeypatch):
    monkeypatch.setattr(rollout, "Ours", lambda decoder, params, case: still(case))
    found = rollout.bench_rollout(Plan(
        TINY_CASES[:2], commands(1.0, [PeerName.TRANSFORMERS]), repeats=1, model=TINY))
    assert found["a_vs_transformers"] == found["b_vs_transformers"] == 2.0
    assert found["a_vs_tunix"] is None and found["c_vs_transformers"] is None
    assert found["all_met"] is False and found["tunix_need"] == {}
    assert set(found["cases"]["a"]["sides"]) == {"ours", "transformers"}
    assert rollout_table(found).endswith("2 of 6 targets measured, 0 met")


class Recorder:
    """Stands in for a peer and for ours, and notes who ran."""

    def __init__(self, name, order, **answer):
        self.name, self._order, self._answer = name, order, answer

    def ask(self, do, **what):
        self._order.append(f"{self.name}.{do}")
        return self._answer

    number = Peer.number

    def _fault(self, what):
        return UserError(f"{self.name} {what}")


def test_sides_take_turns_and_the_first_pass_is_not_counted(monkeypatch):
    order = []
    monkeypatch.setattr(rollout, "Ours", lambda decoder, params, case: types.SimpleNamespace(
        run=lambda: order.append("ours") or Phases(1, 2, 3, float(len(order)), case.sampled)))
    case = TINY_CASES[3]
    peers = {name: Recorder(name.value, order, seconds=5.0, sampled=case.sampled, distinct=3)
             for name in PeerName}
    plan = Plan((case,), commands(0), repeats=4, model=TINY)
    timed = rollout.passes(plan, Decoder(TINY), None, peers)
    sides = ["ours", "transformers.run", "tunix.run", "transformers.run_cached"]
    for i in range(5):
        turn = order[4 * i:4 * i + 4]
        assert turn == sides[i % 4:] + sides[:i % 4]
    assert [len(s) for s in timed.seconds["c"].values()] == [4] * 4
    totals = [phases.total_s for phases in timed.phases["c"]]
    assert timed.seconds["c"]["ours"] == totals == [8.0, 11.0, 14.0, 17.0]


@pytest.mark.parametrize("wrong", [{"sampled": 11}, {"distinct": 1}])
def test_a_side_that_does_other_work_ends_the_run(monkeypatch, wrong):
    case = TINY_CASES[0]
    answer = {"seconds": 1.0, "sampled": case.sampled, "distinct": 3} | wrong
    peer = Recorder("tunix", [], **answer)
    run = rollout._runner(Side.TUNIX, case, Decoder(TINY), None, {PeerName.TUNIX: peer})
    with pytest.raises(UserError, match="tunix sampled .* were to be"):
        run()
    monkeypatch.setattr(rollout, "Ours", lambda *args: types.SimpleNamespace(
        run=lambda: Phases(1, 1, 1, 1, case.sampled - 1)))
    with pytest.raises(UserError, match="our side sampled 11 tokens in case a, 12 were to be"):
        rollout._runner(Side.OURS, case, Decoder(TINY), None, {})()


@pytest.mark.slow
def test_another_model_is_not_compared_with():
    params = rollout.make_params(TINY)
    decoder = Decoder(TINY)
    tokens = np.random.default_rng(1).integers(31, size=(4, 48), dtype=np.int32)
    right = rollout.logprobs(decoder, params, tokens)
    off = right.copy()
    off[2, 7] += 2e-4
    assert rollout.check_agreement(decoder, params, Recorder(
        "tunix", [], logprobs=right.tolist())) == 0
    for wrong in (off.tolist(), right[:3].tolist(), None, "x", [["x"]], (right * np.nan).tolist()):
        with pytest.raises(UserError, match="not the same model") as error:
            rollout.check_agreement(decoder, params, Recorder("tunix", [], logprobs=wrong))
        one_line(error)
    # Scales of norms count: were they all ones, a mix-up would not show.
    plain = init_params(TINY, jax.random.key(0))
    assert np.abs(rollout.logprobs(decoder, plain, tokens) - right).max() > 1e-3


# ---------------------------------------------------------------- the command line


def test_a_peer_that_is_not_installed_is_one_line(tmp_path):
    run = lambda *args: subprocess.run(  # noqa: E731
        [sys.executable, "-m", "experiments.bench", "rollout", *map(str, args)],
        capture_output=True, text=True, cwd=FAKE.parents[1])
    done = run("--peers", tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        f"error: transformers has no Python at {tmp_path}/transformers/bin/python: install it "
        "with `make bench-peers`, or leave it out with --without transformers\n")
    done = run("--without", "transformers", "--tunix-python", tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: tunix has no Python at ")


def test_wrong_input_is_one_line(capsys):
    with pytest.raises(UserError, match="--repeats is 0: give at least 1"):
        cli.main(["rollout", "--repeats", "0"])
    for wrong in (["--without", "vllm"], ["--cases", "d"]):
        with pytest.raises(SystemExit) as end:
            cli.main(["rollout", *wrong])
        assert end.value.code == 2
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    told = capsys.readouterr().out
    assert "python -m experiments.bench" in told and "--json FILE" in told


def test_the_makefile_installs_every_pin_once():
    root = FAKE.parents[1]
    pins = [line for line in (root / "requirements-bench.txt").read_text().splitlines()
            if line and not line.startswith("#")]
    told = subprocess.run(["make", "-n", "bench-peers", "-W", "requirements-bench.txt"], cwd=root,
                          capture_output=True, text=True, check=True).stdout
    patterns = [line.split("'")[1] for line in told.splitlines() if "grep -E" in line]
    assert len(patterns) == 2
    found = [subprocess.run(["grep", "-E", pattern, "requirements-bench.txt"], cwd=root,
                            capture_output=True, text=True).stdout.split() for pattern in patterns]
    assert sorted(found[0] + found[1]) == sorted(pins)
    assert {pin.split("==")[0] for pin in found[0]} == {"torch", "transformers"}
    assert "google-tunix" in {pin.split("==")[0] for pin in found[1]}
