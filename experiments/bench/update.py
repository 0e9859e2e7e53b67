"""The same GRPO update on every side, in one run.

The weights are made from a fixed seed and written as a Hugging Face folder, which every peer
loads. A case is one group of rollouts of random tokens; the sampler's log-probs are the
model's own plus noise, so that the ratio is near 1 and some tokens are clipped. Every side
takes the first step from the same weights: its log-probs, loss and norm of the gradient must
be ours. That step also compiles and is not counted. Then in each pass every side takes two
steps, one side after the other, another one first each time; who does not step waits. Of the
two the second is counted: the first finds what it last touched long gone from the caches, and
some of its memory taken back by the machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import machine, update_bounds
from experiments.bench.ours_update import OursUpdate
from experiments.bench.peers import Peer, PeerName
from experiments.bench.rollout import MODEL, figures, make_params, rotated
from experiments.bench.update_cases import (
    UPDATE_CASES, UpdateCase, UpdateWork, make_update_work)
from rods_jax import topology
from rods_jax.config import UserError
from rods_jax.grpo.update import OptimizerConfig, UpdateConfig
from rods_jax.models.attention import Segments
from rods_jax.models.config import ModelConfig
from rods_jax.models.decoder import Decoder, count_params
from rods_jax.models.hf.config import Family
from rods_jax.models.hf.export import export
from rods_jax.startup import installed_versions
from rods_jax.types import Json

TOLERANCE = 1e-4  # of log-probs
RELATIVE_TOLERANCE = 1e-3  # of the loss and of the gradient's norm


class UpdateSide(enum.Enum):
    OURS = "ours"
    TORCH = "torch"  # transformers' model in TRL's step
    TUNIX = "tunix"

    @property
    def peer(self) -> PeerName | None:
        return {UpdateSide.TORCH: PeerName.TRANSFORMERS,
                UpdateSide.TUNIX: PeerName.TUNIX}.get(self)

    def rows(self, case: UpdateCase) -> int | None:
        """Rows in a peer's micro-batch; None where it is not run."""
        return {UpdateSide.TORCH: case.torch_rows, UpdateSide.TUNIX: case.tunix_rows}.get(self)


MODULES: Mapping[PeerName, str] = {PeerName.TRANSFORMERS: "peer_trl",
                                   PeerName.TUNIX: "peer_tunix_update"}


@dataclasses.dataclass(frozen=True)
class UpdateRatio:
    """Seconds of `side` by ours in a case, and the least it should be."""

    case: str
    side: UpdateSide
    target: float


UPDATE_RATIOS: Mapping[str, UpdateRatio] = {
    "small_vs_torch": UpdateRatio("small", UpdateSide.TORCH, 2.8),
    "small_vs_tunix": UpdateRatio("small", UpdateSide.TUNIX, 5.5),
    "long_vs_torch": UpdateRatio("long", UpdateSide.TORCH, 2.8),
}


@dataclasses.dataclass(frozen=True)
class UpdatePlan:
    """commands: of each peer, without the folder of the weights, which comes last."""

    cases: tuple[UpdateCase, ...] = UPDATE_CASES
    commands: Mapping[PeerName, Sequence[str]] = dataclasses.field(default_factory=dict)
    repeats: int = 3
    model: ModelConfig = MODEL

    def sides(self, case: UpdateCase) -> tuple[UpdateSide, ...]:
        return tuple(side for side in UpdateSide if side is UpdateSide.OURS
                     or side.peer in self.commands and side.rows(case) is not None)


def update_command(name: PeerName, python: pathlib.Path) -> tuple[str, ...]:
    return str(python), "-m", f"experiments.bench.{MODULES[name]}"


def bench_update(plan: UpdatePlan) -> dict[str, Json]:
    decoder, params = Decoder(plan.model), make_params(plan.model)
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())) / "weights"
        export(folder, params, plan.model, family=Family.QWEN3, dtype="float32",
               max_length=max(case.length for case in plan.cases))
        peers = {name: stack.enter_context(Peer(name.value, (*command, str(folder))))
                 for name, command in plan.commands.items()}
        before = machine.peaks()
        others = machine.Others([peer.pid for peer in peers.values()])
        timed = {case.name: time_case(plan, case, decoder, params, peers)
                 for case in plan.cases}
        busy = others.cores_busy()
        after = machine.peaks()
        greetings = {name.value: peer.greeting for name, peer in peers.items()}
    peak = {name: max(before[name], after[name]) for name in before}
    return {
        **update_figures({name: found.seconds for name, found in timed.items()}),
        "cases": {case.name: case_figures(plan.model, case, timed[case.name], peak)
                  for case in plan.cases},
        "repeats": plan.repeats, "parameters": count_params(params),
        "machine": {**peak, "cores": machine.cores(), "memory_bytes": topology.memory_bytes(),
                    "others_cores_busy": busy},
        "peers": greetings, "versions": installed_versions(),
    }


# ---------------------------------------------------------------- the same step


@dataclasses.dataclass(frozen=True)
class First:
    """What a side found in its first step, before it moved the weights."""

    loss: float
    grad_norm: float
    logprobs_GxS: np.ndarray


@dataclasses.dataclass(frozen=True)
class Gap:
    """From our first step. logprob: the largest difference. loss, grad_norm: relative."""

    logprob: float
    loss: float
    grad_norm: float


def check_first(case: UpdateCase, name: str, theirs: First, ours: First) -> Gap:
    """Raises UserError where another side does not learn the same from the same rollouts."""
    same_shape = theirs.logprobs_GxS.shape == ours.logprobs_GxS.shape
    gap = Gap(
        float(np.max(np.abs(theirs.logprobs_GxS - ours.logprobs_GxS))) if same_shape else np.inf,
        abs(theirs.loss - ours.loss) / abs(ours.loss),
        abs(theirs.grad_norm - ours.grad_norm) / abs(ours.grad_norm))
    for what, found, most in (("log-probs of the same tokens", gap.logprob, TOLERANCE),
                              ("loss", gap.loss, RELATIVE_TOLERANCE),
                              ("norm of the gradient", gap.grad_norm, RELATIVE_TOLERANCE)):
        if not found <= most:
            raise UserError(
                f"{name} and ours differ in the {what} by {found:.2g} in case {case.name}, "
                f"{most:g} is allowed: it is not the same update; install the known version with "
                f"`make bench-peers`, or leave it out with --without {name}")
    return gap


def suffix_logprobs(decoder: Decoder, params, case: UpdateCase, work: UpdateWork) -> np.ndarray:
    """float32 [G, S]: log-prob of every sampled token, by a plain pass over one whole rollout
    at a time."""
    positions = jnp.arange(case.length)[None]

    @jax.jit
    def score(params, tokens_1xL):
        hidden, _ = decoder.apply({"params": params}, tokens_1xL, positions,
                                  Segments(jnp.ones(tokens_1xL.shape, jnp.int32)))
        logits = decoder.apply({"params": params}, hidden[:, case.prompt - 1:-1],
                               method="logits")
        chosen = tokens_1xL[:, case.prompt:, None]
        return jnp.take_along_axis(jax.nn.log_softmax(logits), chosen, axis=-1)[0, :, 0]

    return np.stack([np.asarray(score(params, row[None])) for row in work.tokens_GxL])


# ---------------------------------------------------------------- the passes


@dataclasses.dataclass(frozen=True)
class Timed:
    """One case. seconds: of the counted passes, by side. gaps: of each peer."""

    seconds: dict[str, list[float]]
    gaps: dict[str, Gap]


def time_case(plan: UpdatePlan, case: UpdateCase, decoder: Decoder, params,
              peers: Mapping[PeerName, Peer]) -> Timed:
    work = make_update_work(case, plan.model.vocab_size)
    logprobs_GxS = suffix_logprobs(decoder, params, case, work)
    sampler_GxS = logprobs_GxS + work.noise_GxS
    ours = OursUpdate(decoder, params, case, work, sampler_GxS)
    steps: dict[UpdateSide, Callable[[], float]] = {UpdateSide.OURS: ours.run}
    told = [f"ours {ours.run():.2f} s"]
    first = First(ours.loss, ours.grad_norm, logprobs_GxS)
    gaps = {}
    for side in plan.sides(case)[1:]:
        peer = peers[side.peer]
        peer.ask("prepare", rows=side.rows(case), **_given(work, sampler_GxS))
        answer = peer.ask("step")
        told.append(f"{side.value} {peer.number(answer, 'seconds'):.2f} s")
        gaps[side.value] = check_first(case, peer.name, _first(answer), first)
        steps[side] = functools.partial(_step, peer)
    _tell(f"first step, {case.name}", told)
    seconds: dict[str, list[float]] = {side.value: [] for side in steps}
    for number in range(1, plan.repeats + 1):
        told = []
        for side in rotated(tuple(steps), number):
            steps[side]()
            seconds[side.value].append(steps[side]())
            told.append(f"{side.value} {seconds[side.value][-1]:.2f} s")
        _tell(f"pass {number} of {plan.repeats}, {case.name}", told)
    return Timed(seconds, gaps)


def _given(work: UpdateWork, sampler_GxS: np.ndarray) -> dict[str, Json]:
    """What `prepare` gets: the rollouts, and what a run of ours learns with by default."""
    loss, advantage, optimizer = UpdateConfig().loss, UpdateConfig().advantage, OptimizerConfig()
    return {"prompt": work.prompt_P.tolist(), "completions": work.suffix_GxS.tolist(),
            "sampler": sampler_GxS.tolist(), "rewards": work.rewards_G.tolist(),
            "eps": advantage.eps, "lr": optimizer.lr, "clip_low": loss.clip_low,
            "clip_high": loss.clip_high, "clip_norm": optimizer.clip_norm}


def _first(answer: Mapping[str, Json]) -> First:
    """Of a peer's answer; what is no number of the right form agrees with nothing."""
    def numbers(key: str) -> np.ndarray:
        try:
            return np.asarray(answer.get(key), np.float64)
        except (TypeError, ValueError):
            return np.asarray(np.nan)

    loss, norm = (numbers(key) for key in ("loss", "grad_norm"))
    return First(float(loss) if loss.ndim == 0 else np.nan,
                 float(norm) if norm.ndim == 0 else np.nan, numbers("logprobs"))


def _step(peer: Peer) -> float:
    return peer.number(peer.ask("step"), "seconds")


def _tell(what: str, sides: Sequence[str]) -> None:
    print(f"{what}: {', '.join(sides)}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- figures


def update_figures(seconds: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, Json]:
    """See rollout.figures; CASE_vs_SIDE in place of its names."""
    return figures(seconds, UPDATE_RATIOS)


def case_figures(model: ModelConfig, case: UpdateCase, timed: Timed,
                 peak: Mapping[str, float]) -> dict[str, Json]:
    """The shape of a case; of each side the seconds of every pass, their median, the
    operations that its step cannot do without, and their share of the machine's matmul peak
    (1 is as fast as it goes). flops_limit: theirs by ours, of those operations: the ratio of
    seconds were both as near to the peak. again_flops: what is computed again in a backward
    pass that keeps neither logits nor scores, in none of the above."""
    flops = {side: update_bounds.shared_flops(model, case) if side == UpdateSide.OURS.value
             else update_bounds.whole_flops(model, case) for side in timed.seconds}
    sides: dict[str, dict[str, Json]] = {}
    for side, seconds in timed.seconds.items():
        median = statistics.median(seconds)
        sides[side] = {
            "seconds": list(seconds), "median_s": median, "flops": flops[side],
            "fraction_of_matmul_peak": 1e-9 * flops[side] / median / peak["matmul_gflops"]}
        if side in timed.gaps:
            sides[side] |= {"flops_limit": flops[side] / flops[UpdateSide.OURS.value],
                            "gap": dataclasses.asdict(timed.gaps[side])}
    shape = dataclasses.asdict(case)
    del shape["name"]
    again = {"head": update_bounds.head_flops(model, case),
             "attention": update_bounds.shared_scores_flops(model, case)}
    return {**shape, "scored": case.scored, "again_flops": again, "sides": sides}
