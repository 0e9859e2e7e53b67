"""The same tokens sampled from the same weights on every side, in one run.

The weights are made from a fixed seed, written as a Hugging Face folder and loaded by every
peer, whose log-probs of the same tokens must be ours before anything is timed. Then each pass
runs every case on every side, one after the other, another one first each time; who does not
run waits. The first pass compiles and fills caches and is not counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import bounds, machine
from experiments.bench.cases import CASES, Case, make_work
from experiments.bench.ours import Ours, Phases
from experiments.bench.peers import Peer, PeerName
from rods_jax.config import UserError
from rods_jax.models.attention import Segments
from rods_jax.models.config import ModelConfig
from rods_jax.models.decoder import Decoder, count_params, init_params
from rods_jax.models.hf.config import Family
from rods_jax.models.hf.export import export
from rods_jax.startup import installed_versions
from rods_jax.topology import memory_bytes
from rods_jax.types import Json

# rope_theta and norm_eps are the released Qwen3's; tunix's model has that theta built in.
MODEL = ModelConfig(
    vocab_size=8192, d_model=512, n_layers=8, n_heads=8, n_kv_heads=4, head_dim=64, d_ff=1536,
    rope_theta=1e6, norm_eps=1e-6, qk_norm=True, scan_unroll=8)
TOLERANCE = 1e-4  # of log-probs


class Side(enum.Enum):
    OURS = "ours"
    TRANSFORMERS = "transformers"
    TRANSFORMERS_CACHED = "transformers_cached"  # its K/V kept over the messages of a rollout
    TUNIX = "tunix"

    @property
    def peer(self) -> PeerName | None:
        return None if self is Side.OURS else PeerName(self.value.partition("_")[0])


SIDES: Mapping[str, tuple[Side, ...]] = {
    "a": (Side.OURS, Side.TRANSFORMERS, Side.TUNIX),
    "b": (Side.OURS, Side.TRANSFORMERS),
    "b_group_2": (Side.OURS, Side.TUNIX),
    "c": (Side.OURS, Side.TRANSFORMERS, Side.TUNIX, Side.TRANSFORMERS_CACHED),
}


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Seconds of `side` by ours in a case, and the least it should be."""

    case: str
    side: Side
    target: float | None = None


RATIOS: Mapping[str, Ratio] = {
    "a_vs_transformers": Ratio("a", Side.TRANSFORMERS, 5.0),
    "a_vs_tunix": Ratio("a", Side.TUNIX, 6.0),
    "b_vs_transformers": Ratio("b", Side.TRANSFORMERS, 10.0),
    "b_vs_tunix": Ratio("b_group_2", Side.TUNIX),
    "c_vs_transformers": Ratio("c", Side.TRANSFORMERS, 4.0),
    "c_vs_tunix": Ratio("c", Side.TUNIX, 4.0),
    "c_vs_transformers_cached": Ratio("c", Side.TRANSFORMERS_CACHED),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """commands: of each peer, without the folder of the weights, which comes last."""

    cases: tuple[Case, ...] = CASES
    commands: Mapping[PeerName, Sequence[str]] = dataclasses.field(default_factory=dict)
    repeats: int = 5
    model: ModelConfig = MODEL

    def sides(self, case: Case) -> tuple[Side, ...]:
        return tuple(side for side in SIDES[case.name]
                     if side is Side.OURS or side.peer in self.commands)


def command(name: PeerName, python: pathlib.Path) -> tuple[str, ...]:
    return str(python), "-m", f"experiments.bench.peer_{name.value}"


def bench_rollout(plan: Plan) -> dict[str, Json]:
    decoder, params = Decoder(plan.model), make_params(plan.model)
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())) / "weights"
        export(folder, params, plan.model, family=Family.QWEN3, dtype="float32",
               max_length=max(case.length for case in plan.cases))
        peers = {name: stack.enter_context(Peer(name.value, (*command, str(folder))))
                 for name, command in plan.commands.items()}
        gaps = {name.value: check_agreement(decoder, params, peer)
                for name, peer in peers.items()}
        before = machine.peaks()
        others = machine.Others([peer.pid for peer in peers.values()])
        timed = passes(plan, decoder, params, peers)
        busy = others.cores_busy()
        after = machine.peaks()
        peak = {name: max(before[name], after[name]) for name in before}
        need = {case.name: _need(case, peers[PeerName.TUNIX]) for case in plan.cases
                if PeerName.TUNIX in peers and Side.TUNIX not in SIDES[case.name]}
        greetings = {name.value: peer.greeting for name, peer in peers.items()}
    return {
        **figures(timed.seconds),
        "cases": {case.name: case_figures(plan.model, case, timed.seconds[case.name],
                                          timed.phases[case.name], peak)
                  for case in plan.cases},
        "tunix_need": need, "logprob_gap": gaps, "repeats": plan.repeats,
        "parameters": count_params(params),
        "machine": {**peak, "cores": machine.cores(), "memory_bytes": memory_bytes(),
                    "others_cores_busy": busy},
        "peers": greetings, "versions": installed_versions(),
    }


def make_params(model: ModelConfig) -> dict:
    """Weights from a fixed seed. The scales of the norms, ones at first, differ too: two
    models that mix them up must not agree."""
    rng = np.random.default_rng(2)

    def moved(path, leaf):
        if "norm" not in jax.tree_util.keystr(path):
            return leaf
        return leaf * rng.normal(1.0, 0.1, leaf.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(moved, init_params(model, jax.random.key(0)))


# ---------------------------------------------------------------- the same model


def check_agreement(decoder: Decoder, params, peer: Peer) -> float:
    """The largest difference between the log-probs that a peer gives to the same tokens and
    ours. Raises UserError where it exceeds TOLERANCE."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(decoder.config.vocab_size, size=(4, 48), dtype=np.int32)
    ours = logprobs(decoder, params, tokens)
    found = peer.ask("score", tokens=tokens.tolist()).get("logprobs")
    try:
        theirs = np.asarray(found, np.float64)
    except (TypeError, ValueError):
        theirs = np.zeros(0)
    gap = np.max(np.abs(theirs - ours)) if theirs.shape == ours.shape else np.inf
    if not gap <= TOLERANCE:
        raise UserError(f"{peer.name} gives other log-probs to the same tokens, by up to "
                        f"{gap:.2g}: it is not the same model; install the known version with "
                        "`make bench-peers`")
    return float(gap)


def logprobs(decoder: Decoder, params, tokens_BxL: np.ndarray) -> np.ndarray:
    """Ours, of each token but the first, given those before it."""
    positions = jnp.broadcast_to(jnp.arange(tokens_BxL.shape[1]), tokens_BxL.shape)

    @jax.jit
    def score(params):
        hidden, _ = decoder.apply({"params": params}, tokens_BxL, positions,
                                  Segments(jnp.ones(tokens_BxL.shape, jnp.int32)))
        logits = decoder.apply({"params": params}, hidden[:, :-1], method="logits")
        chosen = tokens_BxL[:, 1:, None]
        return jnp.take_along_axis(jax.nn.log_softmax(logits), chosen, axis=-1)[..., 0]

    return np.asarray(score(params))


def _need(case: Case, tunix: Peer) -> dict[str, Json]:
    """Memory that tunix's sampler asks for in a case that it does not run."""
    asked = tunix.number(
        tunix.ask("need", prompt=case.prompt, group=case.group, new=case.new), "bytes")
    return {"bytes": int(asked), "memory_bytes": memory_bytes()}


# ---------------------------------------------------------------- the passes


@dataclasses.dataclass(frozen=True)
class Timed:
    """Of the counted passes. seconds: by case and side. phases: ours, by case."""

    seconds: dict[str, dict[str, list[float]]]
    phases: dict[str, list[Phases]]


def passes(plan: Plan, decoder: Decoder, params, peers: Mapping[PeerName, Peer]) -> Timed:
    runs: dict[str, dict[Side, Callable[[], float | Phases]]] = {
        case.name: {side: _runner(side, case, decoder, params, peers)
                    for side in plan.sides(case)} for case in plan.cases}
    timed = Timed({name: {side.value: [] for side in sides} for name, sides in runs.items()},
                  {name: [] for name in runs})
    for number in range(plan.repeats + 1):
        for name, sides in runs.items():
            told = []
            for side in rotated(tuple(sides), number):
                found = sides[side]()
                seconds = found.total_s if isinstance(found, Phases) else found
                told.append(f"{side.value} {seconds:.2f} s")
                if not number:
                    continue
                timed.seconds[name][side.value].append(seconds)
                if isinstance(found, Phases):
                    timed.phases[name].append(found)
            part = f"pass {number} of {plan.repeats}" if number else "warm-up"
            print(f"{part}, {name}: {', '.join(told)}", file=sys.stderr, flush=True)
    return timed


def rotated(sides: tuple, by: int) -> tuple:
    """Another side first each time."""
    by %= len(sides)
    return sides[by:] + sides[:by]


def _runner(side: Side, case: Case, decoder: Decoder, params,
            peers: Mapping[PeerName, Peer]) -> Callable[[], float | Phases]:
    """One pass of a side over a case: seconds, or ours in phases."""
    if side is Side.OURS:
        ours = Ours(decoder, params, case)

        def run_ours() -> Phases:
            found = ours.run()
            if found.tokens != case.sampled:
                raise UserError(f"our side sampled {found.tokens} tokens in case {case.name}, "
                                f"{case.sampled} were to be: mend experiments/bench/ours.py")
            return found
        return run_ours
    peer, work = peers[side.peer], make_work(case, decoder.config.vocab_size)
    do = "run_cached" if side is Side.TRANSFORMERS_CACHED else "run"
    what = {"prompt": work.prompt_P.tolist(), "tools": work.tools_MxGxK.tolist(),
            "group": case.group, "new": case.new}

    def run_peer() -> float:
        answer = peer.ask(do, **what)
        sampled, distinct = (peer.number(answer, key) for key in ("sampled", "distinct"))
        if sampled != case.sampled or (distinct == 1 and case.group > 1):
            raise UserError(f"{peer.name} sampled {sampled} tokens in {distinct} different "
                            f"rollouts of case {case.name}, {case.sampled} in {case.group} were "
                            "to be; install the known version with `make bench-peers`")
        return peer.number(answer, "seconds")
    return run_peer


# ---------------------------------------------------------------- figures


def figures(seconds: Mapping[str, Mapping[str, Sequence[float]]],
            asked: Mapping[str, Ratio] = RATIOS) -> dict[str, Json]:
    """From the seconds of the passes by case and side. NAME_vs_PEER: the peer's median by
    ours, null where one of them did not run. ranges: the least and the largest of a pass.
    all_met: every target was met, so each was measured."""
    ratios: dict[str, float | None] = dict.fromkeys(asked)
    ranges = {}
    for key, ratio in asked.items():
        sides = seconds.get(ratio.case, {})
        theirs, ours = sides.get(ratio.side.value), sides.get(Side.OURS.value)
        if theirs and ours:
            ratios[key] = statistics.median(theirs) / statistics.median(ours)
            each = [t / o for t, o in zip(theirs, ours, strict=True)]
            ranges[key] = [min(each), max(each)]
    targets = {key: ratio.target for key, ratio in asked.items() if ratio.target is not None}
    return {**ratios, "ranges": ranges, "targets": targets,
            "all_met": all(ratios[key] is not None and ratios[key] >= least
                           for key, least in targets.items())}


def case_figures(model: ModelConfig, case: Case, seconds: Mapping[str, Sequence[float]],
                 phases: Sequence[Phases], peak: Mapping[str, float]) -> dict[str, Json]:
    """The shape of a case; of each side the seconds of every pass, their median and sampled
    tokens a second; of ours the phases."""
    sides: dict[str, dict[str, Json]] = {}
    for side, passes_ in seconds.items():
        median = statistics.median(passes_)
        sides[side] = {"seconds": list(passes_), "median_s": median,
                       "tokens_per_s": case.sampled / median}
    sides[Side.OURS.value] |= phase_figures(model, case, phases, peak)
    shape = dataclasses.asdict(case)
    del shape["name"]
    return {**shape, "sampled": case.sampled, "sides": sides}


def phase_figures(model: ModelConfig, case: Case, phases: Sequence[Phases],
                  peak: Mapping[str, float]) -> dict[str, Json]:
    """Median seconds of our phases, and how near they come to the machine's peaks (1 is as
    fast as it goes): operations to its matmuls, weights read in decoding to its bandwidth,
    weights and keys and values to the same."""
    seconds = {name: statistics.median(getattr(each, name) for each in phases)
               for name in ("prefill_s", "extend_s", "decode_s")}

    def share(amount: float, phase: str, of: str) -> float | None:
        return 1e-9 * amount / seconds[phase] / peak[of] if amount else None

    weights = bounds.decode_weight_bytes(model, case)
    return {
        **seconds,
        "prefill_fraction_of_matmul_peak":
            share(bounds.prefill_flops(model, case), "prefill_s", "matmul_gflops"),
        "extend_fraction_of_matmul_peak":
            share(bounds.extend_flops(model, case), "extend_s", "matmul_gflops"),
        "decode_fraction_of_matmul_peak":
            share(bounds.decode_flops(model, case), "decode_s", "matmul_gflops"),
        "decode_fraction_of_bandwidth": share(weights, "decode_s", "bandwidth_gbs"),
        "decode_fraction_of_bandwidth_with_kv":
            share(weights + bounds.decode_kv_bytes(model, case), "decode_s", "bandwidth_gbs"),
    }
