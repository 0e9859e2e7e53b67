"""The closed loop, wired: the only module that knows all the others.

One step: draw tasks from the pool, roll each out K times, reward, update the policy, write
what the rewards showed back to the pool, choose boundary tasks as seeds. The synthesizer
works beside it. At the end of an epoch (every live task seen once): retire, admit, prune.

Every random draw is a function of (run seed, step), so a run that was stopped and resumed
goes on as if it had not been.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rods_jax import boundary, checkpoint, curriculum, ledger, rewards, task_pool
from rods_jax.config import UserError, naming, to_json, write_json
from rods_jax.evaluate import EvalResult, evaluate_ways
from rods_jax.grpo import tally
from rods_jax.ledger import Ledger, Op
from rods_jax.learner import Learner, trainer_mesh
from rods_jax.metrics import CompileCounter, MetricWriter, Progress, read
from rods_jax.policy import build, check_model, model_files, model_shape, split
from rods_jax.pool_programs import pool_programs
from rods_jax.resume import BEFORE, SUMMARY, take_up
from rods_jax.rollout.engine import Engine, RolloutStats, make_prompt
from rods_jax.rollout.weights import local_mesh, make_weights
from rods_jax.run_config import RunConfig, batch_shape
from rods_jax.run_synthesis import figures, make_synthesizer
from rods_jax.synthesis.journal import Stopped
from rods_jax.synthesis.loop import Synthesizer
from rods_jax.synthesis.outcome import Candidate
from rods_jax.synthesis.worker import guard_of
from rods_jax.task_pool import Origin
from rods_jax.task_table import TaskTable
from rods_jax.tasks.leakage import Leak, crossing
from rods_jax.tools.host import make_host
from rods_jax.types import CATEGORIES, Json, Source, Task, Trajectory
from rods_jax.warm_start import warm_start

ADMIT_ROWS = 32  # rows offered to the pool at once: one shape for the life of a run


@dataclasses.dataclass
class Counters:
    """Of the whole run."""

    rollouts: int = 0
    admitted: int = 0
    refused_at_admission: int = 0  # held-in leak, prompt too long, no room
    env_errors: int = 0
    tool_crashes: int = 0  # rollouts scored as failed because a call took its worker down
    drifts: int = 0


class Run:
    """State of a run between steps: device trees of the learner and the pool, host tables
    beside."""

    def __init__(self, config: RunConfig, folder: pathlib.Path, cache: pathlib.Path):
        config.check_training()
        self.config, self.folder = config, folder
        mesh = trainer_mesh(config.mesh)
        self.parts = build(config, mesh)
        suite = self.parts.suite
        self.host = make_host(suite, config.tasks.spec(), config.workers)
        mesh = mesh and local_mesh(mesh, config.rollout_tensor)
        decoder, self.weights = make_weights(self.parts.decoder, config.rollout_weights, mesh)
        self.engine = Engine(decoder, config.sampler, config.engine, self.parts.chat,
                             suite, self.host, mesh)
        self.table = TaskTable(lambda task: make_prompt(task, suite, self.parts.chat))
        self.held_in = split(suite, "held_in", config.tasks.held_in)
        self.new_structures = split(suite, "new_structures", config.tasks.held_in // 2) \
            if config.eval.transfer else []
        self.guard = guard_of(suite)
        if config.synthesis_on and not suite.plans:
            raise UserError(f"suite {suite.name} brings no planner, so it cannot make variants: "
                            "set synthesis_on=False")
        self.seeds = split(suite, "train", config.tasks.seeds)
        if config.tasks.hints:
            print("hints: failed calls are told what would help, in training only", flush=True)
        if suite.siblings_cross:
            print(f"split {config.tasks.split.value}: {crossing(self.seeds, self.held_in):.0%} of "
                  "the held-in tasks have a sibling among the seeds", flush=True)
        # What cannot be played is to be found before hours went into a warm start.
        self.engine.check([make_prompt(task, suite, self.parts.chat)
                           for task in [*self.seeds, *self.held_in, *self.new_structures]])

        # Where the chat format rewrites earlier turns, each turn is a row of its own.
        # A variant may have a turn more than its seed.
        rows_each = max(len(t.turns) for t in self.seeds) + 1 if self.parts.chat.rewrites else 1
        shape = batch_shape(config, rows_each)
        params = self.parts.params
        if config.warm_start is not None:
            params, _ = warm_start(config, self.parts, cache, report_warm_start)
        self.parts = dataclasses.replace(self.parts, params=None)  # the state owns them now
        self.learner = Learner(config, self.parts.decoder, params, shape)
        frozen = self.learner.state.frozen
        self.frozen = None if frozen is None else checkpoint.fingerprint(frozen)

        self.programs = pool_programs(config)
        self.pool = task_pool.init(config.pool, config.sampler.prompt_len)
        self.step = self.epoch = self.epoch_start = 0
        self.last_admission = 0
        self.counters = Counters()
        self.ledger = Ledger(
            folder / ledger.FILE, config.pool, config.sampler.prompt_len, config.boundary,
            lambda serial: self.table.prompt(serial).task.uid)
        self.ledger.born(self.seeds)
        self.key = jax.random.key(config.seed)
        self._admit(self.seeds)
        self.synthesizer = self._synthesizer()

    def _synthesizer(self, state: Json = None) -> Synthesizer:
        return make_synthesizer(self.config, self.folder, self.parts.suite, self.guard,
                                [*self.seeds, *self.held_in], state, self.engine, self._published)

    def _published(self) -> tuple[Any, float]:
        """The weights to play with, and the seconds that it took to make them."""
        return self.weights.publish(self.learner.state.params, self.learner.state.frozen)

    def warm_up(self) -> int:
        """Compiles what later steps may be the first to use; how many are the rollouts'."""
        self.programs.unseen(self.pool, self.epoch_start, np.ones(len(CATEGORIES), bool))
        pool = jax.tree.map(jnp.copy, self.pool)  # the programs take it along
        pool, _ = self.programs.retire(pool, self.step)
        pool, _ = self.programs.revive(pool)
        pool, _ = self.programs.prune(pool)
        self.programs.choose(pool, self.key, self.epoch, from_generated=False)
        return self.engine.warm_up(self._published()[0])

    # ------------------------------------------------------------------ the pool's tasks

    def _admit(self, tasks: list[Task]) -> int:
        """Offers tasks to the pool; returns how many it took. The rest is counted."""
        serials = [serial for task in tasks if (serial := self._enrol(task)) is not None]
        taken = 0
        for start in range(0, len(serials), ADMIT_ROWS):
            part = serials[start:start + ADMIT_ROWS]
            found = [self.table.prompt(serial) for serial in part]
            rows, keep_A = task_pool.make_rows(
                [p.ids for p in found], part, [self.table.serial(p.task.parent) for p in found],
                [CATEGORIES.index(p.task.category) for p in found],
                [Origin.SEED if p.task.source is Source.SEED else Origin.GENERATED for p in found],
                ADMIT_ROWS, self.config.sampler.prompt_len)
            self.pool, placed_A = self.programs.add(self.pool, rows, keep_A, self.step)
            self.ledger.added(self.pool, rows, keep_A, placed_A)
            taken += int((np.asarray(placed_A)[:len(part)] >= 0).sum())
        self.counters.refused_at_admission += len(serials) - taken
        held = set(np.asarray(self.pool.uid_N).tolist())
        self.table.forget([serial for serial in self.table.serials() if serial not in held])
        return taken

    def _enrol(self, task: Task) -> int | None:
        """A serial number for the task, or None (counted) if it may not enter the pool."""
        limit = self.config.sampler.prompt_len
        serial = self.table.add(task)
        leak, length = self.guard.refuse(task), len(self.table.prompt(serial).ids)
        if leak is None and length <= limit:
            return serial
        if task.source is Source.SEED:
            reason = leak.value if leak else f"{length} tokens in its prompt"
            raise UserError(f"seed {task.uid} may not enter the pool ({reason}): choose other "
                            "splits")
        self.table.forget([serial])
        self.ledger.rejected(task.uid, leak.value if leak else ledger.TOO_LONG)
        self.counters.refused_at_admission += 1
        return None

    def boundary_of_epoch(self, fresh: list[Candidate]) -> None:
        """Paper section 3: retire, revive, admit at most a share beta, prune. fresh: variants
        that have been collected for it."""
        self.pool, _ = self.programs.retire(self.pool, self.step)
        self.ledger.record(Op.RETIRE, self.pool)
        self.pool, _ = self.programs.revive(self.pool)
        self.ledger.record(Op.REVIVE, self.pool)
        if self._synthesizes():
            self.ledger.born([candidate.task for candidate in fresh])
            waiting = [candidate.task for candidate in self.synthesizer.waiting]
            chosen = waiting[:self._admission_limit()]
            self.counters.admitted += self._admit(chosen)
            self.synthesizer.settle([task.uid for task in chosen])
            self.pool, _ = self.programs.prune(self.pool)
            self.ledger.record(Op.PRUNE, self.pool)
        self.last_admission = self.step

    def _synthesizes(self) -> bool:
        stage = curriculum.stage_at(self.config.curriculum, self.step)
        return self.config.synthesis_on and stage.synthesis

    def _admission_limit(self) -> int:
        live, at_boundary = _live(jax.device_get(self.programs.stats(self.pool)))
        return task_pool.admissible(live, self.config.pool, at_boundary)

    def _ask_for_variants(self, key: jax.Array, pool: task_pool.PoolStats) -> None:
        """Boundary tasks of this epoch become seeds, unless enough variants wait already; where
        the boundary runs dry, variants become seeds as well."""
        backlog = self.synthesizer.outstanding + len(self.synthesizer.waiting)
        live, at_boundary = _live(pool)
        most = task_pool.admissible(live, self.config.pool, at_boundary)
        if backlog >= self.config.queue * max(1, most):
            return
        self.pool, _, uid_M, valid_M = self.programs.choose(
            self.pool, key, self.epoch,
            from_generated=task_pool.runs_dry(live, at_boundary, self.config.pool))
        chosen = np.asarray(uid_M)[np.asarray(valid_M)].tolist()
        self.ledger.chosen(self.pool, chosen)
        if chosen:
            self.synthesizer.request(
                self.step, [(self.table.prompt(serial).task, 1) for serial in chosen])

    # ------------------------------------------------------------------ one step

    def train_step(self) -> dict[str, Any]:
        """Trains one step and returns its metrics."""
        config, began = self.config, time.perf_counter()
        stage = curriculum.stage_at(config.curriculum, self.step)
        allowed_C = np.asarray(curriculum.category_mask(stage))
        self._turn_epoch(allowed_C)
        draw_key, rollout_key, seed_key = jax.random.split(
            jax.random.fold_in(self.key, self.step), 3)
        draw = jax.device_get(self.programs.sample(
            self.pool, draw_key, n_tasks=config.tasks_per_step,
            epoch_start_step=self.epoch_start, allowed_C=allowed_C, step=self.step))
        prompts = [self.table.prompt(uid) for uid in draw.uids_T[draw.filled_T].tolist()]
        if not prompts:
            raise UserError(f"step {self.step}: no live task belongs to the categories of its "
                            "stage: raise tasks.seeds or change the stage")
        params, publish_s = self._published()
        groups, rolled = self.engine.run(params, prompts, config.group_size, rollout_key,
                                         config.update.temperature, config.tasks.hints)
        del params  # the update needs the room
        rewards_TxG, valid_TxG = self._rewards(groups, prompts, stage.reward)
        updates = self.learner.step(groups, rewards_TxG)
        stats = self.programs.group_stats(rewards_TxG, valid_TxG)
        self.pool = self.programs.update_stats(
            self.pool, draw.indices_T, draw.uids_T, stats, self.step)
        self.ledger.record(Op.UPDATE, self.pool)
        signal = jax.device_get(self.programs.signal(stats))
        pool = jax.device_get(self.programs.stats(self.pool))
        if self._synthesizes():
            self._ask_for_variants(seed_key, pool)
        zones_T = np.asarray(self.programs.zones(stats))[draw.filled_T]
        self.counters.rollouts += rolled.rollouts
        self.counters.env_errors += sum(rolled.env_errors.values())
        self.counters.tool_crashes += sum(rolled.crashes.values())
        self.counters.drifts += rolled.ends.get("drift", 0)
        self.step += 1
        self.ledger.flush()
        return self._metrics(groups, prompts, rewards_TxG, valid_TxG, zones_T, updates, rolled,
                             pool, time.perf_counter() - began) | {
            "publish_s": publish_s, "variance_of_quarter": float(signal.of_quarter),
            "variance_of_bound": float(signal.of_bound)}

    def _turn_epoch(self, allowed_C: np.ndarray) -> None:
        """Raises Stopped before anything has changed, so that the run can still be saved."""
        self.synthesizer.poll()
        over = self.step > self.epoch_start and not int(
            self.programs.unseen(self.pool, self.epoch_start, allowed_C))
        every = self.config.admit_every
        due = self.step and (self.step - self.last_admission >= every if every else over)
        try:
            fresh = self.synthesizer.collect(self.step - 1) if due and self._synthesizes() else []
        except TimeoutError as error:
            raise Stopped(str(error)) from error
        if over:
            self.epoch += 1
            self.epoch_start = self.step
        self.ledger.at(self.step, self.epoch)
        if due:
            self.boundary_of_epoch(fresh)

    def _rewards(self, groups, prompts, kind) -> tuple[np.ndarray, np.ndarray]:
        """rewards_TxG float32 (0 where dropped) and which samples are usable."""
        shape = (self.config.tasks_per_step, self.config.group_size)
        rewards_TxG, valid_TxG = np.zeros(shape, np.float32), np.zeros(shape, bool)
        for t, (group, prompt) in enumerate(zip(groups, prompts)):
            for g, trajectory in enumerate(group):
                valid_TxG[t, g] = trajectory.end.usable
                if trajectory.end.usable:
                    rewards_TxG[t, g] = rewards.reward(kind, trajectory, prompt.task)
        return rewards_TxG, valid_TxG

    def _metrics(self, groups, prompts, rewards_TxG, valid_TxG, zones_T, updates,
                 rolled: RolloutStats, pool: task_pool.PoolStats, wall_s: float,
                 ) -> dict[str, Any]:
        usable = [(t, p.task) for group, p in zip(groups, prompts) for t in group if t.end.usable]
        average = lambda values: float(np.mean(values)) if len(values) else None  # noqa: E731
        tokens = rolled.sampled_tokens + rolled.inserted_tokens
        return {
            "rollouts": self.counters.rollouts, "epoch": self.epoch,
            "reward_mean": average(rewards_TxG[valid_TxG]),
            "progress_mean": average([rewards.progress(t) for t, _ in usable]),
            "success_mean": average([rewards.binary(t) for t, _ in usable]),
            "format_mean": average([rewards.format_reward(t, task) for t, task in usable]),
            "call_error_share": rewards.call_error_share([t for t, _ in usable]),
            **{f"zone_{zone.name.lower()}": average(zones_T == int(zone))
               for zone in boundary.Zone if zone is not boundary.Zone.UNSEEN},
            **tally.logged(updates),
            "pool_active": int(pool.live), "pool_generated": int(pool.live_by_source[1]),
            "pool_mean_reward": float(pool.mean_reward), "wall_s": wall_s,
            "born": self.synthesizer.funnel.accepted, "waiting": len(self.synthesizer.waiting),
            "admitted": self.counters.admitted, "retired": self.retired(),
            "drawn_generated": sum(p.task.source is Source.GENERATED for p in prompts),
            "env_errors": self.counters.env_errors, "drifts": self.counters.drifts,
            "tool_crashes": self.counters.tool_crashes, "workers_replaced": self.host.replaced,
            "ends": dict(rolled.ends), "tokens_per_s": tokens / rolled.total_s,
            "evicted": rolled.evicted, "synthesis": figures(self.synthesizer),
            "rollout_s": rolled.total_s, "device_s": rolled.device_s, "idle_s": rolled.idle_s,
        }

    def __enter__(self) -> Run:
        return self

    def __exit__(self, failed: type | None, *_: object) -> None:
        self.close(failed is not None)

    def close(self, failed: bool = False) -> None:
        """What the synthesizer has begun is not waited for long where the run failed."""
        with contextlib.suppress(*[TimeoutError] if failed else ()), \
                contextlib.closing(self.host):
            self.synthesizer.close(2.0 if failed else 30.0, ended=not failed)

    def retired(self) -> int:
        return int(np.asarray(self.pool.retired).sum())

    # ------------------------------------------------------------------ evaluation, restart

    def evaluate(self, greedy: bool) -> dict[str, EvalResult]:
        """Held-in tasks; with `transfer` in the config those of unseen structures too."""
        sets = {"held_in": self.held_in, "new_structures": self.new_structures}
        params, _ = self._published()
        return {f"{name}_{way}": result for name, tasks in sets.items() if tasks
                for way, result in evaluate_ways(self.engine, params, tasks,
                                                 self.config.seed, greedy).items()}

    def save(self) -> None:
        self.ledger.flush()  # a checkpoint is never ahead of it
        host = {
            "step": self.step, "epoch": self.epoch, "epoch_start": self.epoch_start,
            "last_admission": self.last_admission, "counters": dataclasses.asdict(self.counters),
            "table": self.table.state(), "synthesizer": self.synthesizer.state(),
            "leaks_refused": self.guard.to_json(), "config": to_json(self.config),
            "ledger": dataclasses.asdict(self.ledger.mark),
            "frozen": self.frozen, "model": model_shape(self.parts.decoder.config),
            "model_files": model_files(self.config.policy),
        }
        checkpoint.save(self.folder / "checkpoints", self.step, self._arrays(), host,
                        keep=self.config.keep_checkpoints)

    def _arrays(self) -> dict[str, Any]:
        """What steps change. Frozen weights are read from where they came from."""
        return {"train": self.learner.state.replace(frozen=None), "pool": self.pool}

    def resume(self, path: pathlib.Path) -> None:
        """Takes up a checkpoint of the same config (see `take_up`). Raises CheckpointError."""
        restored = checkpoint.restore(path, self._arrays())
        host, frozen = restored.host, self.learner.state.frozen
        check_model(self.config.policy, self.parts.decoder.config, frozen, host, path)
        self.learner.state = restored.arrays["train"].replace(frozen=frozen)
        self.pool = restored.arrays["pool"]
        self.step, self.epoch = host["step"], host["epoch"]
        self.epoch_start, self.last_admission = host["epoch_start"], host["last_admission"]
        self.counters = Counters(**host["counters"])
        self.table.restore(host["table"])
        self.ledger.resume(self.pool, self.step, ledger.Mark(**host.get("ledger", {})))
        self.guard.counts.update({Leak(k): n for k, n in host["leaks_refused"].items()})
        self.synthesizer.close()
        self.synthesizer = self._synthesizer(host["synthesizer"])


def _live(pool: task_pool.PoolStats) -> tuple[int, int]:
    """Live tasks, and how many of them are at the boundary."""
    return int(pool.live), int(pool.live_by_zone[boundary.Zone.BOUNDARY])


def report_warm_start(done: int, passes: int, loss: float) -> None:
    if done == passes or done % 10 == 0:
        print(f"warm start: pass {done}/{passes}, loss {loss:.4f} nats a token", flush=True)


def train(config: RunConfig, folder: pathlib.Path, cache: pathlib.Path,
          resume: pathlib.Path | None = None) -> dict[str, Any]:
    """Runs to `config.steps`, writes metrics.jsonl, checkpoints and summary.json into
    `folder`, and returns the summary."""
    began = time.perf_counter()
    checkpoint.clean(folder / "checkpoints")
    taken = None if resume is None else take_up(resume, folder, config)
    if taken and taken.summary:
        return taken.summary
    with naming(folder), Run(config, folder, cache) as run:
        return _train(run, resume, taken and taken.before, began)


def _train(run: Run, resume: pathlib.Path | None, before: Json, began: float) -> dict[str, Any]:
    config, folder = run.config, run.folder
    if resume is not None:
        run.resume(resume)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", to_json(config))
    if config.synthesis_on:
        run.synthesizer.open()
    print(f"{run.warm_up()} programs of the rollouts compiled, their K/V takes up to "
          f"{run.engine.slots.most_bytes / 1e6:,.1f} MB", flush=True)
    if before is None:
        print(f"evaluating {len(run.held_in + run.new_structures)} tasks first", flush=True)
        before = _as_json(run.evaluate(config.eval.greedy))
        write_json(folder / BEFORE, before)
    _steps(run, resume is not None)
    after = _as_json(run.evaluate(config.eval.greedy))
    run.save()
    summary = _summary(run, before, after, time.perf_counter() - began)
    summary |= curriculum.trained(config.curriculum, read(folder / "metrics.jsonl"))
    write_json(folder / SUMMARY, summary)
    return summary


def _steps(run: Run, resumed: bool) -> None:
    config = run.config
    progress, learned = Progress(config.steps, start=run.step), True
    with MetricWriter(run.folder / "metrics.jsonl", run.step - 1 if resumed else -1) as writer, \
            CompileCounter() as compiles:
        while run.step < config.steps:
            step, seen = run.step, compiles.counts()
            try:
                metrics = run.train_step()
            except Stopped:
                run.save()
                raise
            metrics |= {"compiles": compiles.total, "compiled": compiles.since(seen)}
            every = config.eval.every
            if every and run.step % every == 0 and run.step < config.steps:
                found = run.evaluate(greedy=False)["held_in_sampled"]
                metrics |= {"held_in_progress": found.progress, "held_in_success": found.success}
            writer.write(step, metrics)
            progress.update(run.step, metrics)
            if learned and metrics["dead_share"] == 1:
                print(f"step {run.step}: the rollouts of every task got equal rewards, so nothing "
                      "was learned; if that goes on: more rollouts a task (group_size), longer "
                      "messages (sampler.max_new), worked examples (policy.shots)", flush=True)
                learned = False
            if config.checkpoint_every and run.step % config.checkpoint_every == 0 \
                    and run.step < config.steps:
                run.save()
    progress.close()


def _as_json(found: dict[str, EvalResult]) -> dict[str, Any]:
    return {name: dataclasses.asdict(result) for name, result in found.items()}


def _summary(run: Run, before: dict, after: dict, wall_s: float) -> dict[str, Any]:
    return {
        "seed": run.config.seed, "steps": run.step, "epochs": run.epoch,
        "rollouts": run.counters.rollouts,
        "before": before["held_in_sampled"]["progress"],
        "after": after["held_in_sampled"]["progress"],
        "evaluations": {"before": before, "after": after},
        "synthesized": run.synthesizer.funnel.accepted,
        "admitted": run.counters.admitted, "retired": run.retired(),
        "refused_at_admission": run.counters.refused_at_admission,
        "env_errors": run.counters.env_errors, "tool_crashes": run.counters.tool_crashes,
        "drifts": run.counters.drifts, "funnel": run.synthesizer.funnel.to_json(),
        "leaks_refused": run.guard.to_json(), "wall_s": wall_s,
        "synthesis": figures(run.synthesizer),
        "ledger": run.ledger.summary(run.pool, run.synthesizer.funnel.accepted,
                                     len(run.synthesizer.waiting)),
    }
