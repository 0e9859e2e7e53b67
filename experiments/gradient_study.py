"""Popoviciu in practice: which tasks the gradient of GRPO comes from.

    python -m experiments.gradient_study --config C [--checkpoint RUN ...] [--out DIR]

A group's reward variance is at most m (1 - m) for a mean m, so tasks near m = 1/2 should teach
most. Here --tasks tasks of the training split are rolled out as in training (group size,
temperature), by the policy before training and by that of each --checkpoint, and the gradient
of the GRPO loss is taken of one task at a time, by the update that trains: the sampler's
log-probs are the policy's own, so every ratio is 1; no KL, no entropy term. Printed are tables
by zone, with advantages divided by the group's standard deviation and not;
variance_and_gradient.png in --out shows every task. Only weights are read, none are changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.docs_block import check_outputs
from rods_jax import boundary, checkpoint, rewards, startup
from rods_jax.boundary import BoundaryConfig, Zone
from rods_jax.config import UserError, check_out, load, run_main, write_json
from rods_jax.grpo.advantage import AdvantageConfig
from rods_jax.grpo.batch import BatchShape, pack
from rods_jax.grpo.update import UpdateConfig, init_state, make_update
from rods_jax.metrics import ZONES
from rods_jax.models.decoder import Decoder
from rods_jax.models.sharding import MeshConfig
from rods_jax.report import ZONE_COLOURS, ZONE_WORDS
from rods_jax.rewards import RewardKind
from rods_jax.run_config import RunConfig, batch_shape
from rods_jax.tools.host import Outage, make_host
from rods_jax.types import Json, Task, Trajectory

KINDS = (RewardKind.PROGRESS, RewardKind.BINARY)
FIGURE = "variance_and_gradient.png"
BEFORE = "before training"
STD_EPS = AdvantageConfig().eps  # what a division by the deviation adds to it

Group = Sequence[Trajectory]
# (trained weights, frozen weights or None, group, rewards_G) -> gradient, float64 [P]
GroupGradient = Callable[[Any, Any, Group, np.ndarray], np.ndarray]


# ---------------------------------------------------------------- one gradient a task


@dataclasses.dataclass(frozen=True)
class Measured:
    """N groups of one policy under one reward; arrays [N], float64 unless said otherwise.

    mean_N, var_N: of the rewards; ddof 0, for which Popoviciu's bound holds. zone_N: int, a
    Zone each. norm_N: L2, of the gradient of the group's own loss, its advantages not divided.
    repeat_N: see `repeated`. total: L2 norm of the sum of all N gradients."""

    mean_N: np.ndarray
    var_N: np.ndarray
    zone_N: np.ndarray
    norm_N: np.ndarray
    repeat_N: np.ndarray
    total: float

    @property
    def live_N(self) -> np.ndarray:
        """bool, groups that have a gradient."""
        return self.norm_N > 0

    @property
    def std_N(self) -> np.ndarray:
        return np.sqrt(self.var_N)

    @property
    def bound_N(self) -> np.ndarray:
        return self.mean_N * (1.0 - self.mean_N)

    @property
    def divided_N(self) -> np.ndarray:
        """norm_N of advantages divided by the group's deviation: the loss is linear in them."""
        return self.norm_N / (self.std_N + STD_EPS)


def studied(config: UpdateConfig) -> UpdateConfig:
    """The run's loss without KL and entropy, advantages around the group's mean, undivided."""
    return dataclasses.replace(
        config, loss=dataclasses.replace(config.loss, kl_coef=0.0, entropy_coef=0.0),
        advantage=AdvantageConfig(scale_by_std=False))


# An optimizer whose state is the last gradient, zeros where a batch carries no loss.
_RECORDER = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params), lambda grads, *_: (grads, grads))


def make_gradient(decoder: Decoder, config: UpdateConfig, shape: BatchShape,
                  jit: Callable = jax.jit) -> GroupGradient:
    """Traced once for all groups. shape: of a batch of one task."""
    update = make_update(decoder, config, _RECORDER, shape)

    @jit
    def flat(own, frozen, batch):
        state, _ = update(init_state(own, _RECORDER, frozen=frozen), batch)
        return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(state.opt_state)])

    def gradient(own, frozen, group, rewards_G):
        rewards_1xG = np.zeros((1, shape.group), np.float32)
        rewards_1xG[0, :len(group)] = rewards_G
        batch = pack([group], rewards_1xG, shape, True, config.advantage.var_floor)
        return np.asarray(flat(own, frozen, batch), np.float64)

    return gradient


def repeated(first_P: np.ndarray, second_P: np.ndarray, sizes: tuple[int, int]) -> float:
    """What of the whole group's squared norm comes again with other rollouts of the task, in
    expectation: the product of the gradients of two halves that share no rollout.

    sizes: their usable rollouts. A mean taken among n members shrinks the expected gradient by
    (n - 1) / n, which is made up for. 0 where a half has fewer than two; single products
    may be negative."""
    if min(sizes) < 2:
        return 0.0
    shrunk = lambda n: (n - 1) / n  # noqa: E731
    return float(first_P @ second_P) * shrunk(sum(sizes)) ** 2 / (
        shrunk(sizes[0]) * shrunk(sizes[1]))


def measure(gradient: GroupGradient, own: Any, frozen: Any, groups: Sequence[Group],
            tasks: Sequence[Task], kind: RewardKind, band: BoundaryConfig) -> Measured:
    """own, frozen: the policy's trained and frozen weights."""
    rewards_NxG = np.asarray([[rewards.reward(kind, one, task) for one in group]
                              for group, task in zip(groups, tasks)], np.float32)
    valid_NxG = np.isfinite(rewards_NxG)
    stats = boundary.group_stats(np.where(valid_NxG, rewards_NxG, 0.0), valid_NxG)
    half, total, norms, repeats = rewards_NxG.shape[1] // 2, 0.0, [], []
    for group, rewards_G, valid_G in zip(groups, rewards_NxG, valid_NxG):
        whole, first, second = (gradient(own, frozen, group[part], rewards_G[part])
                                for part in (slice(None), slice(half), slice(half, None)))
        total = total + whole
        norms.append(np.linalg.norm(whole))
        repeats.append(repeated(first, second,
                                (int(valid_G[:half].sum()), int(valid_G[half:].sum()))))
    wide = lambda x: np.asarray(x, np.float64)  # noqa: E731
    return Measured(
        mean_N=wide(stats.mean_T), var_N=wide(boundary.population_variance(stats)),
        zone_N=np.asarray(boundary.zones(stats, band)), norm_N=wide(norms),
        repeat_N=wide(repeats), total=float(np.linalg.norm(total)))


# ---------------------------------------------------------------- figures


def by_zone(found: Measured) -> dict[str, dict[str, float | None]]:
    """By zone, and "all": number of tasks and of those with a gradient (live); means over the
    tasks of variance, bound m (1 - m) and norms; of the live ones' variance and norms; shares
    of all tasks and of all squared norms; repeats: the share of the zone's squared norm that
    comes again with other rollouts. None where there is nothing to take it of."""
    zones = {zone: found.zone_N == int(Zone[zone.upper()]) for zone in ZONES}
    plain_N, divided_N = found.norm_N ** 2, found.divided_N ** 2
    rows = {}
    for name, in_N in (zones | {"all": np.ones(len(found.zone_N), bool)}).items():
        live_N = in_N & found.live_N
        rows[name] = {
            "tasks": int(in_N.sum()), "live": int(live_N.sum()),
            "variance": _mean(found.var_N[in_N]), "bound": _mean(found.bound_N[in_N]),
            "norm": _mean(found.norm_N[in_N]), "norm_divided": _mean(found.divided_N[in_N]),
            "variance_live": _mean(found.var_N[live_N]),
            "norm_live": _mean(found.norm_N[live_N]),
            "norm_divided_live": _mean(found.divided_N[live_N]),
            "share_of_tasks": _mean(in_N.astype(float)),
            "share_of_squares": _ratio(plain_N[in_N].sum(), plain_N.sum()),
            "share_of_squares_divided": _ratio(divided_N[in_N].sum(), divided_N.sum()),
            "repeats": _ratio(found.repeat_N[in_N].sum(), plain_N[in_N].sum()),
        }
    return rows


def correlations(found: Measured) -> dict[str, float | None]:
    """Spearman's, of norms with the deviation and with the bound; over all tasks or live ones."""
    live = found.live_N
    return {
        "norm_std": spearman(found.norm_N, found.std_N),
        "norm_std_live": spearman(found.norm_N[live], found.std_N[live]),
        "norm_bound_live": spearman(found.norm_N[live], found.bound_N[live]),
        "divided_std_live": spearman(found.divided_N[live], found.std_N[live]),
        "divided_bound_live": spearman(found.divided_N[live], found.bound_N[live]),
    }


def variance_ratios(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Mean reward variance of the boundary zone by that of the others. rows: see by_zone."""
    return {f"{of}_to_{zone}": _ratio(rows["boundary"][of], rows[zone][of])
            for of in ("variance", "variance_live") for zone in ("hard", "mastered")}


def sum_to_squares(found: Measured) -> float | None:
    """|sum of the gradients|^2 by the sum of their squared norms: 1 where those of different tasks
    are orthogonal, the number of tasks with a gradient where they are alike."""
    return _ratio(found.total ** 2, (found.norm_N ** 2).sum())


def spearman(x_N: np.ndarray, y_N: np.ndarray) -> float | None:
    """Rank correlation, equal values at their mean rank; None where one of them is constant."""
    ranks = [_ranks(np.asarray(x)) for x in (x_N, y_N)]
    if any(len(r) < 2 or np.ptp(r) == 0 for r in ranks):
        return None
    return float(np.corrcoef(*ranks)[0, 1])


def _ranks(x_N: np.ndarray) -> np.ndarray:
    _, where_N, count = np.unique(x_N, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[where_N]


def _mean(x: np.ndarray) -> float | None:
    return float(x.mean()) if x.size else None


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else float(a / b)


def as_json(found: Measured) -> dict[str, Json]:
    rows = by_zone(found)
    return {
        "zones": rows, "spearman": correlations(found),
        "variance_ratios": variance_ratios(rows),
        "sum_to_squares": sum_to_squares(found),
        "per_task": {name: getattr(found, f"{name}_N").tolist()
                     for name in ("mean", "var", "zone", "norm", "repeat")},
    }


_COLUMNS = (
    ("tasks", "tasks", "{:.0f}"), ("with variance", "live", "{:.0f}"),
    ("variance", "variance", "{:.3f}"), ("m (1 - m)", "bound", "{:.3f}"),
    ("norm", "norm", "{:.3f}"), ("norm / std", "norm_divided", "{:.3f}"),
    ("norm, live", "norm_live", "{:.3f}"), ("norm / std, live", "norm_divided_live", "{:.3f}"),
    ("tasks (%)", "share_of_tasks", "{:.0%}"), ("squares (%)", "share_of_squares", "{:.0%}"),
    ("squares / var (%)", "share_of_squares_divided", "{:.0%}"),
    ("repeats (%)", "repeats", "{:.0%}"),
)


def table(found: Measured) -> str:
    """by_zone and what goes with it, in Markdown."""
    def show(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value).rstrip("%")

    rows = by_zone(found)
    lines = ["| zone | " + " | ".join(title for title, _, _ in _COLUMNS) + " |",
             "|---" * (len(_COLUMNS) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(show(row[key], form) for _, key, form in _COLUMNS) + " |"
              for name, row in rows.items()]
    words = {"Spearman": correlations(found), "variance, boundary by": variance_ratios(rows),
             "|sum|^2 by sum of squares": {"all": sum_to_squares(found)}}
    lines += [""] + [f"{title}: " + ", ".join(f"{name} {show(value, '{:.2f}')}"
                                              for name, value in figures.items())
                     for title, figures in words.items()]
    return "\n".join(lines)


# ---------------------------------------------------------------- the picture


def write_figure(found: Mapping[str, Measured], path: pathlib.Path) -> None:
    """A row of panels for each policy."""
    figure = Figure(figsize=(14.0, 0.7 + 3.3 * len(found)), dpi=130, facecolor="white",
                    layout="constrained")
    grid = figure.subplots(len(found), 4, squeeze=False)
    for axes_4, (name, one) in zip(grid, found.items()):
        live = one.live_N
        slope = _ratio((one.norm_N * one.std_N)[live].sum(), one.var_N[live].sum()) or 0.0
        level = _mean(one.divided_N[live]) or 0.0
        _scatter(axes_4[0], one, one.var_N, one.norm_N, "variance of the rewards",
                 "gradient norm", lambda v: slope * np.sqrt(v))
        axes_4[0].set_title(name, loc="left", fontsize=11, fontweight="bold")
        _scatter(axes_4[1], one, one.bound_N, one.norm_N, "m (1 - m)", "gradient norm",
                 lambda b: slope * np.sqrt(b))
        _scatter(axes_4[2], one, one.var_N, one.divided_N, "variance of the rewards",
                 "norm, divided by the deviation", lambda v: np.full_like(v, level))
        _bars(axes_4[3], by_zone(one))
    figure.legend([Patch(color=ZONE_COLOURS[z]) for z in ZONES],
                  [f"zone: {ZONE_WORDS[z]}" for z in ZONES], loc="outside lower left",
                  ncols=len(ZONES), frameon=False, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _scatter(axes: Axes, found: Measured, x_N: np.ndarray, y_N: np.ndarray, x_word: str,
             y_word: str, curve: Callable[[np.ndarray], np.ndarray]) -> None:
    for zone in ZONES:
        in_N = found.zone_N == int(Zone[zone.upper()])
        axes.scatter(x_N[in_N], y_N[in_N], s=16, alpha=0.65, linewidths=0,
                     color=ZONE_COLOURS[zone])
    x = np.linspace(0.0, 0.25, 101)
    axes.plot(x, curve(x), color="#24292f", linewidth=1.0, linestyle=(0, (4, 3)))
    axes.set_xlim(-0.006, 0.256)
    _dress(axes, x_word, y_word)


def _bars(axes: Axes, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Shares by zone, stacked: of the tasks, and of their squared norms."""
    parts = {"tasks": "share_of_tasks", "squared\nnorms": "share_of_squares",
             "squared\nnorms / var": "share_of_squares_divided"}
    bottom = np.zeros(len(parts))
    for zone in ZONES:
        height = np.array([rows[zone][key] or 0.0 for key in parts.values()])
        axes.bar(list(parts), height, bottom=bottom, color=ZONE_COLOURS[zone], width=0.65)
        for x, (h, b) in enumerate(zip(height, bottom)):
            if h >= 0.04:
                axes.text(x, b + h / 2, f"{h:.0%}", ha="center", va="center", fontsize=9)
        bottom += height
    axes.set_ylim(0, 1)
    _dress(axes, "", "share of each zone")


def _dress(axes: Axes, x_word: str, y_word: str) -> None:
    axes.set_xlabel(x_word, fontsize=9.5)
    axes.set_ylabel(y_word, fontsize=9.5)
    axes.set_ylim(bottom=0)
    axes.grid(True, color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


# ---------------------------------------------------------------- the command


def one_task(config: RunConfig) -> RunConfig:
    """The run with updates of one task, on one device, in micro-batches that half a group fills."""
    return dataclasses.replace(
        config, tasks_per_step=1, minibatches=1, mesh=MeshConfig(), rollout_tensor=1,
        batch=dataclasses.replace(config.batch, rows=min(config.batch.rows, 2)),
        pool=dataclasses.replace(config.pool, batch_floor=0))


def study(config: RunConfig, paths: Sequence[pathlib.Path], n_tasks: int, cache: pathlib.Path,
          ) -> Iterator[tuple[str, dict[RewardKind, Measured]]]:
    """What was measured by reward, of BEFORE and then of each checkpoint."""
    from rods_jax.learner import trained  # after the platform is settled
    from rods_jax.policy import build, restored, split
    from rods_jax.resume import FREE_OF_WEIGHTS, check_config
    from rods_jax.rollout.engine import Engine, make_prompt
    from rods_jax.rollout.weights import make_weights
    from rods_jax.train import report_warm_start
    from rods_jax.warm_start import warm_start
    steps = {}
    for path in paths:
        steps[path], saved = checkpoint.read_host(path)
        check_config(path, saved, config, ("policy",), FREE_OF_WEIGHTS)
    parts = build(config)
    tasks = split(parts.suite, "train", n_tasks)
    prompts = [make_prompt(task, parts.suite, parts.chat) for task in tasks]
    decoder, weights = make_weights(parts.decoder, config.rollout_weights)
    rows_each = max(len(task.turns) for task in tasks) if parts.chat.rewrites else 1
    gradient = make_gradient(parts.decoder, studied(config.update), batch_shape(
        one_task(config), rows_each))
    first = parts.params if config.warm_start is None else warm_start(
        config, parts, cache, report_warm_start)[0]
    policies = {BEFORE: lambda: first} | {
        f"{path}, step {step}": lambda path=path: restored(parts, config.policy, path)
        for path, step in steps.items()}
    host = make_host(parts.suite, config.tasks.spec(), config.workers)
    engine = Engine(decoder, config.sampler, config.engine, parts.chat, parts.suite, host)
    try:
        for name, read in policies.items():
            params, began = read(), time.monotonic()
            groups, _ = engine.run(weights.publish(params)[0], prompts, config.group_size,
                                   jax.random.key(config.seed), config.update.temperature)
            played, (frozen, own) = time.monotonic(), trained(parts.decoder, params)
            found = {kind: measure(gradient, own, frozen, groups, tasks, kind, config.boundary)
                     for kind in KINDS}
            print(f"{name}: {len(tasks)} x {config.group_size} rollouts in {played - began:.0f} s, "
                  f"gradients in {time.monotonic() - played:.0f} s", flush=True)
            yield name, found
    finally:
        host.close()


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="python -m experiments.gradient_study",
                                        description=__doc__)
    arguments.add_argument("--config", required=True, help="the config of the run")
    arguments.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    arguments.add_argument("--checkpoint", action="append", type=pathlib.Path, default=[],
                           metavar="RUN", help="also the policy of this run; may be repeated")
    arguments.add_argument("--tasks", type=int, default=200, help="of the training split")
    arguments.add_argument("--cache", type=pathlib.Path, default=pathlib.Path("runs/cache"),
                           help="warm starts shared between runs")
    arguments.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/gradient_study"),
                           metavar="DIR", help=f"folder for {FIGURE}")
    arguments.add_argument("--json", metavar="FILE", help="figures as JSON; - prints them last")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    config = load(args.config, args.set, RunConfig)
    if args.tasks < 1:
        raise UserError(f"--tasks is {args.tasks}: give 1 or more")
    if config.group_size < 4:
        raise UserError(f"group_size is {config.group_size}: a group is compared with itself by "
                        "halves, give 4 or more")
    check_out(args.out, folder=True)
    check_outputs("gradient_study", json=args.json)
    print(json.dumps(startup.start(config.platform)), flush=True)
    results = {}
    for name, found in study(config, args.checkpoint, args.tasks, args.cache):
        results[name] = found
        if args.json != "-":
            for kind, measured in found.items():
                print(f"\n{name}, reward: {kind.value}\n\n{table(measured)}\n", flush=True)
    write_figure({name: found[RewardKind.PROGRESS] for name, found in results.items()},
                 args.out / FIGURE)
    if args.json != "-":
        print(f"wrote {args.out / FIGURE}")
    if args.json:
        write_json(args.json, {
            "tasks": args.tasks, "rollouts": config.group_size,
            "temperature": config.update.temperature, "policies": {
                name: {kind.value: as_json(one) for kind, one in found.items()}
                for name, found in results.items()}})


if __name__ == "__main__":
    run_main(main, user_errors=(ValueError, Outage))
