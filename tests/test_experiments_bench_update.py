"""The update bench: its formulas and figures, what it refuses, and one whole run on a tiny
model. What the peers themselves do is seen only where they are installed."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import __main__ as cli
from experiments.bench import bounds, machine, update, update_bounds
from experiments.bench.peers import Peer, PeerName
from experiments.bench.rollout import MODEL, make_params
from experiments.bench.update import First, Gap, Timed, UpdatePlan, UpdateSide
from experiments.bench.update_cases import UPDATE_CASES, UpdateCase, make_update_work
from experiments.bench.update_table import update_table
from rods_jax.config import UserError
from rods_jax.models.attention import Segments
from rods_jax.models.config import ModelConfig
from rods_jax.models.decoder import Decoder

FAKE = pathlib.Path(__file__).with_name("bench_update_peer.py")
TINY = ModelConfig(vocab_size=31, d_model=16, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=6,
                   d_ff=24, rope_theta=1e6, norm_eps=1e-6, qk_norm=True)
DEEP = dataclasses.replace(TINY, n_layers=3)
SMALL = UpdateCase("small", group=4, prompt=9, suffix=7, torch_rows=2, tunix_rows=4)
LONG = UpdateCase("long", group=3, prompt=20, suffix=5, torch_rows=1)


# ---------------------------------------------------------------- formulas


def matmuls(fn, *shapes):
    """Operations of all matmuls in what `fn` traces to: 2 for each number of each product."""
    total = 0
    for equation in jax.make_jaxpr(fn)(*(jnp.zeros(shape) for shape in shapes)).eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            inner = np.prod([left[i] for i in contracted])
            total += 2 * int(inner * np.prod(equation.outvars[0].aval.shape))
    return total


def test_a_step_is_three_forward_passes_of_matmuls():
    """What autodiff makes of a matmul with a weight, and of attention, before it is compiled."""
    linear = lambda w, x: jnp.tanh(jnp.tanh(x) @ w).sum()  # noqa: E731
    attend = lambda q, k, v: ((jnp.tanh(q @ k.T)) @ v).sum()  # noqa: E731
    for fn, shapes in ((linear, ((8, 6), (5, 8))), (attend, ((5, 6), (7, 6), (7, 6)))):
        every = tuple(range(len(shapes)))
        forward = matmuls(fn, *shapes)
        assert matmuls(jax.grad(fn, argnums=every), *shapes) == update_bounds.STEP * forward
    assert forward == 4 * 5 * 7 * 6


@pytest.mark.parametrize("case", [SMALL, LONG])
def test_bounds_equal_a_count_token_by_token(case):
    """Each token that is run, with each key it sees, in each layer; forward and backward."""
    weights = 6 * bounds.layer_parameters(DEEP)
    head = 6 * DEEP.d_model * DEEP.vocab_size
    pair = DEEP.n_layers * DEEP.n_heads * DEEP.head_dim
    shared, whole, scores, logits = 0, 0, 0, 0
    for rollout in range(case.group):
        for position in range(case.length):
            keys = sum(other <= position for other in range(case.length))
            cost = weights + (4 + 8) * pair * keys
            whole += cost
            if position >= case.prompt or rollout == 0:
                shared += cost
                scores += 2 * pair * keys
            if position >= case.prompt:
                whole, shared, logits = whole + head, shared + head, logits + head // 3
    assert shared == update_bounds.shared_flops(DEEP, case)
    assert whole == update_bounds.whole_flops(DEEP, case)
    assert scores == update_bounds.shared_scores_flops(DEEP, case)
    assert logits == update_bounds.head_flops(DEEP, case)


def test_the_cases_are_those_promised():
    small, long = UPDATE_CASES
    assert (small.group, small.prompt, small.suffix, small.scored) == (16, 512, 128, 2048)
    assert (long.group, long.prompt, long.suffix, long.length) == (16, 4096, 512, 4608)
    for case in UPDATE_CASES:
        flops = [f(MODEL, case) for f in (update_bounds.whole_flops, update_bounds.shared_flops)]
        assert flops[0] / flops[1] > 2.8
        work, again = make_update_work(case, 8192), make_update_work(case, 8192)
        assert work.tokens_GxL.shape == (16, case.length)
        assert np.array_equal(work.tokens_GxL, again.tokens_GxL)
        assert (work.tokens_GxL[:, :case.prompt] == work.prompt_P).all()
        assert np.array_equal(work.tokens_GxL[:, case.prompt:], work.suffix_GxS)
        assert len({tuple(row) for row in work.suffix_GxS}) == 16
        assert work.rewards_G.std() > 0.2 and 0 <= work.rewards_G.min() <= work.rewards_G.max() <= 1
        outside = (work.noise_GxS > -np.log(0.8)) | (work.noise_GxS < -np.log(1.28))
        assert 0.05 < outside.mean() < 0.2


# ---------------------------------------------------------------- figures


def test_ratios_are_of_medians_and_all_targets_must_be_met():
    seconds = {"small": {"ours": [1.0, 2.0, 9.0], "torch": [30.0, 5.6, 4.0],
                         "tunix": [11.0, 12.0, 1.0]},
               "long": {"ours": [1.0], "torch": [2.8]}}
    found = update.update_figures(seconds)
    assert (found["small_vs_torch"], found["small_vs_tunix"], found["long_vs_torch"]) == (
        2.8, 5.5, 2.8)
    assert found["ranges"]["small_vs_torch"] == [4 / 9, 30.0]
    assert found["targets"] == {"small_vs_torch": 2.8, "small_vs_tunix": 5.5,
                                "long_vs_torch": 2.8}
    assert found["all_met"] is True
    assert update.update_figures(seconds | {"long": {"ours": [1.0], "torch": [2.7]}})[
        "all_met"] is False
    del seconds["small"]["tunix"]
    found = update.update_figures(seconds)
    assert found["small_vs_tunix"] is None and found["all_met"] is False
    assert update.update_figures({})["long_vs_torch"] is None


def test_shares_and_limits_are_of_the_operations_each_side_needs():
    timed = Timed({"ours": [4.0, 2.0, 3.0], "torch": [9.0], "tunix": [6.0]},
                  {"torch": Gap(1e-5, 0.0, 0.0), "tunix": Gap(2e-5, 0.0, 0.0)})
    found = update.case_figures(TINY, SMALL, timed, {"matmul_gflops": 100.0})
    shared = update_bounds.shared_flops(TINY, SMALL)
    whole = update_bounds.whole_flops(TINY, SMALL)
    ours, torch, tunix = (found["sides"][side] for side in ("ours", "torch", "tunix"))
    assert ours["median_s"] == 3.0 and ours["seconds"] == [4.0, 2.0, 3.0]
    assert ours["flops"] == shared and torch["flops"] == tunix["flops"] == whole
    assert ours["fraction_of_matmul_peak"] == pytest.approx(shared / 3.0 / 100e9)
    assert torch["fraction_of_matmul_peak"] == pytest.approx(whole / 9.0 / 100e9)
    assert "flops_limit" not in ours and torch["flops_limit"] == whole / shared > 1
    assert torch["gap"] == {"logprob": 1e-5, "loss": 0.0, "grad_norm": 0.0}
    assert found["scored"] == 28 and found["prompt"] == 9


# ---------------------------------------------------------------- the same step


def plain_norm(decoder, params, case, work, sampler_GxS):
    """Of the gradient, by the loss written down over whole rows, without packing or chunks."""
    tokens = jnp.asarray(work.tokens_GxL)
    positions = jnp.broadcast_to(jnp.arange(case.length), tokens.shape)
    rewards = work.rewards_G.astype(np.float64)
    advantage = ((rewards - rewards.mean()) / (rewards.std() + 1e-6))[:, None].astype(np.float32)

    def loss(params):
        hidden, _ = decoder.apply({"params": params}, tokens, positions,
                                  Segments(jnp.ones(tokens.shape, jnp.int32)))
        logits = decoder.apply({"params": params}, hidden[:, case.prompt - 1:-1], method="logits")
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), work.suffix_GxS[..., None], -1)
        ratio = jnp.exp(logp[..., 0] - sampler_GxS)
        return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.28) * advantage).mean()

    grads = jax.jit(jax.grad(loss))(params)
    return float(np.sqrt(sum(np.square(np.asarray(leaf, np.float64)).sum()
                             for leaf in jax.tree.leaves(grads))))


def commands(seconds, norm, names=tuple(PeerName)):
    return {name: (sys.executable, str(FAKE), str(seconds), str(norm)) for name in names}


@pytest.fixture(autouse=True)
def small_peaks(monkeypatch):
    monkeypatch.setattr(machine, "READ_BYTES", 2 ** 20)


@pytest.mark.slow
def test_one_run_with_our_update_on_a_tiny_model():
    """Its first step has the loss and the norm that numpy and plain autodiff find."""
    decoder, params = Decoder(TINY), make_params(TINY)
    work = make_update_work(SMALL, TINY.vocab_size)
    sampler = update.suffix_logprobs(decoder, params, SMALL, work) + work.noise_GxS
    norm = plain_norm(decoder, params, SMALL, work, sampler)
    found = update.bench_update(UpdatePlan((SMALL,), commands(3.0, norm), repeats=2, model=TINY))
    assert json.loads(json.dumps(found)) == found
    sides = found["cases"]["small"]["sides"]
    assert set(sides) == {"ours", "torch", "tunix"}
    ours = sides["ours"]["seconds"]
    assert len(ours) == 2 and min(ours) > 0 and sides["tunix"]["seconds"] == [3.0, 3.0]
    assert found["small_vs_tunix"] == pytest.approx(3.0 / np.median(ours))
    assert found["long_vs_torch"] is None and found["all_met"] is False
    gap = sides["torch"]["gap"]
    assert 0 < gap["logprob"] < 1e-4 and max(gap["loss"], gap["grad_norm"]) < 1e-4
    table = update_table(found)
    assert table.endswith("2 of 3 targets measured, 2 met") and "5.5" in table


def test_a_first_step_must_be_ours_in_all_it_says():
    logprobs = np.array([[-1.0, -2.0]])
    ours = First(0.05, 3.0, logprobs)
    close = First(0.05 * 1.0009, 3.0 * 0.9991, logprobs + 9e-5)
    assert update.check_first(SMALL, "tunix", close, ours).logprob == pytest.approx(9e-5)
    right = {"loss": 0.05, "grad_norm": 3.0, "logprobs": [[-1.0, -2.0]]}
    assert update.check_first(SMALL, "tunix", update._first(right), ours) == Gap(0, 0, 0)
    for key, values in (("loss", (-0.05, 0.0501, None, "x", [0.05], np.nan)),
                        ("grad_norm", (2.99, None, [[3.0]])),
                        ("logprobs", ([[-1.0, -2.0002]], [[-1.0]], None, "x", [["x", "y"]],
                                      [[-1.0, np.nan]]))):
        for value in values:
            with pytest.raises(UserError, match="tunix and ours differ in the .* not the same"):
                update.check_first(SMALL, "tunix", update._first(right | {key: value}), ours)


class Recorder:
    """Stands in for a peer, and notes who ran."""

    def __init__(self, name, order, grad_norm=2.0):
        self.name, self._order, self._norm = name, order, grad_norm

    def ask(self, do, **what):
        self._order.append(f"{self.name}.{do}" + (f".{what['rows']}" if what else ""))
        return {"seconds": 5.0, "loss": 0.1, "grad_norm": self._norm,
                "logprobs": np.zeros((4, 7))}

    number = Peer.number


@pytest.fixture
def order(monkeypatch):
    """Who steps, once ours is stood in for."""
    names = []

    def stand_in(*_):
        return types.SimpleNamespace(loss=0.1, grad_norm=2.0,
                                     run=lambda: names.append("ours") or float(len(names)))

    monkeypatch.setattr(update, "OursUpdate", stand_in)
    monkeypatch.setattr(update, "suffix_logprobs", lambda *_: np.zeros((4, 7), np.float32))
    return names


def test_another_gradient_is_not_compared_with(order):
    peers = {name: Recorder(name.value, order, grad_norm=2.02) for name in PeerName}
    plan = UpdatePlan((SMALL,), commands(0, 0), repeats=3, model=TINY)
    with pytest.raises(UserError, match="transformers and ours differ in the norm of the gradient "
                                        "by 0.01 in case small, 0.001 is allowed: .* "
                                        "--without transformers") as error:
        update.time_case(plan, SMALL, None, None, peers)
    assert "\n" not in str(error.value)
    assert order == ["ours", "transformers.prepare.2", "transformers.step"]  # and nothing timed


def test_sides_take_turns_and_no_first_step_after_a_wait_is_counted(order):
    peers = {name: Recorder(name.value, order) for name in PeerName}
    plan = UpdatePlan((SMALL, LONG), commands(0, 0), repeats=3, model=TINY)
    timed = update.time_case(plan, SMALL, None, None, peers)
    first, rest = order[:5], order[5:]
    assert first == ["ours", "transformers.prepare.2", "transformers.step", "tunix.prepare.4",
                     "tunix.step"]
    sides = ["ours", "transformers.step", "tunix.step"]
    for i in range(3):  # everyone twice
        turn = sides[(i + 1) % 3:] + sides[:(i + 1) % 3]
        assert rest[6 * i:6 * i + 6] == [side for side in turn for _ in range(2)]
    assert timed.seconds == {"ours": [11.0, 15.0, 19.0], "torch": [5.0] * 3, "tunix": [5.0] * 3}
    assert plan.sides(LONG) == (UpdateSide.OURS, UpdateSide.TORCH)


# ---------------------------------------------------------------- the command line


def test_the_peers_files_import_nothing_of_ours():
    for name in PeerName:
        module = update.update_command(name, pathlib.Path("python"))[-1]
        source = (FAKE.parents[1] / f"{module.replace('.', '/')}.py").read_text()
        assert "rods_jax" not in source and "def make(folder: str)" in source


def test_a_peer_that_is_not_installed_is_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "experiments.bench", "update", "--peers", str(tmp_path)],
        capture_output=True, text=True, cwd=FAKE.parents[1])
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        f"error: transformers has no Python at {tmp_path}/transformers/bin/python: install it "
        "with `make bench-peers`, or leave it out with --without transformers\n")


def test_wrong_input_is_one_line():
    with pytest.raises(UserError, match="--repeats is 0: give at least 1"):
        cli.main(["update", "--repeats", "0"])
    for wrong in (["--without", "trl"], ["--cases", "a"]):
        with pytest.raises(SystemExit) as end:
            cli.main(["update", *wrong])
        assert end.value.code == 2
    assert cli.parser().parse_args(["update"]).repeats == 3
