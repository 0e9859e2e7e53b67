"""The pool against a model of it in plain Python, and the same under jit, eager, replicated."""

import dataclasses
import functools
import hashlib
import os
import pathlib
import subprocess
import sys
import warnings

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from rods_jax import task_pool as tp
from rods_jax.boundary import BoundaryConfig, GroupStats
from rods_jax.task_pool import Dropped, Origin, PoolConfig, Priority, Reason, Status

P, A, T = 3, 6, 5
PUBLIC = BoundaryConfig(budget=3, quota=2)
TRACES: dict = {}
STATIC = {"sample": ("n_tasks", "config"), "choose": ("config", "rule", "from_generated"),
          "unseen": ()}


@functools.cache
def jitted(name):
    """The function under jit, donated, counting its traces by what is static in the call."""
    fn = getattr(tp, name)

    @functools.wraps(fn)
    def counted(*args, **kw):
        mark = (name, args[0].uid_N.shape, kw.get("config"), kw.get("n_tasks"), "allowed_C" in kw)
        TRACES[mark] = TRACES.get(mark, 0) + 1
        return fn(*args, **kw)

    return jax.jit(counted, static_argnames=STATIC.get(name, "config"),
                   donate_argnums=(0,) if name not in ("sample", "unseen", "stats") else ())


def live(slot):
    return slot["status"] in (Status.TRIAL, Status.ACTIVE)


def phi(slot):
    m = np.float32(slot["mean"])
    return np.float32(4) * m * (np.float32(1) - m)


class Model:
    """The same pool as a list of dicts, one rule after the other, no arrays."""

    EMPTY = dict(prompt=(), uid=-1, parent=-1, category=-1, source=0, status=Status.EMPTY,
                 reason=Reason.NONE, mean=0.0, var=0.0, rollouts=0.0, visits=0, failures=0, probed=False,
                 added_step=-1, last_seen=-1, last_chosen_epoch=-1)

    def __init__(self, config):
        self.config = config
        self.slots = [dict(self.EMPTY) for _ in range(config.capacity)]
        self.dropped, self.retired = [0] * len(Dropped), [0] * len(Reason)
        self.revived = self.mismatched = self.nonfinite = 0

    def alive_generated(self):
        return [s for s in self.slots if live(s) and s["source"] == Origin.GENERATED]

    def add(self, rows, step):
        known = {s["uid"] for s in self.slots}
        waiting = sum(s["visits"] == 0 for s in self.alive_generated())
        placed = []
        for row in rows:
            placed.append(-1)
            if row is None:
                continue
            generated = row["source"] == Origin.GENERATED
            if row["uid"] < 0 or not 1 <= len(row["prompt"]) <= P or not 0 <= row["category"] < 4:
                self.dropped[Dropped.INVALID] += 1
                continue
            if row["uid"] in known:
                self.dropped[Dropped.DUPLICATE] += 1
                continue
            known.add(row["uid"])
            if generated and waiting >= self.config.p_max:
                self.dropped[Dropped.P_MAX] += 1
                continue
            waiting += generated
            empty = [s for s in self.slots if s["status"] == Status.EMPTY]
            gone = [s for s in self.slots if s["status"] == Status.RETIRED
                    and s["source"] == Origin.GENERATED]
            if not empty and not gone:
                self.dropped[Dropped.OVERFLOW] += 1
                continue
            slot = empty[0] if empty else min(gone, key=lambda s: s["added_step"])
            trial = generated and self.config.burn_in > 0
            slot.update(self.EMPTY)
            slot.update(row, status=Status.TRIAL if trial else Status.ACTIVE, added_step=step)
            placed[-1] = next(i for i, s in enumerate(self.slots) if s is slot)
        return placed

    def sample(self, noise, u, start, allowed):
        config, picks = self.config, []

        def order(i):
            slot, score, turn = self.slots[i], noise[i], 0
            if config.priority is Priority.PHI:
                score += np.log(max(phi(slot), np.float32(config.phi_floor)))
                turn += slot["last_seen"] >= 0
            if config.sweep:
                turn += 2 * (slot["last_seen"] >= start)
            return turn, -score, i

        ranked = sorted((i for i, s in enumerate(self.slots) if allowed[s["category"]]), key=order)
        in_play = [i for i in ranked if live(self.slots[i])]
        for i in in_play:
            c = self.slots[i]["category"]
            if sum(self.slots[j]["category"] == c for j in picks) < config.batch_floor:
                picks.append(i)
        gone = [i for i in ranked if self.slots[i]["status"] == Status.RETIRED]
        picks += gone[: int(np.floor(np.float32(config.probe_rate * T) + u))]
        picks += [i for i in in_play if i not in picks]
        return picks[:T]

    def update(self, indices, uids, groups, step):
        done = set()
        for index, uid, (mean, var, count) in zip(indices, uids, groups):
            slot = self.slots[index] if 0 <= index < len(self.slots) else None
            if uid < 0:
                continue
            if slot is None or slot["uid"] != uid:
                self.mismatched += 1
            if uid in done:
                continue
            done.add(uid)
            if slot is None or slot["uid"] != uid:
                continue
            slot["last_seen"] = max(slot["last_seen"], step)
            finite = np.isfinite(mean) and np.isfinite(var)
            self.nonfinite += count > 0 and not finite
            if not finite or count == 0:
                slot["failures"] += 1
                continue
            kept = np.float32(self.config.ema_keep * slot["rollouts"])
            slot["rollouts"] = kept + np.float32(count)
            share = np.float32(count) / slot["rollouts"]  # in the pool's precision: phi decides
            for name, new in (("mean", mean), ("var", var)):
                slot[name] = (np.float32(1) - share) * np.float32(slot[name]) + share * np.float32(new)
            slot["visits"] += 1
            slot["failures"] = 0
            slot["probed"] |= slot["status"] == Status.RETIRED
        ripe = [s for s in self.slots
                if s["status"] == Status.TRIAL and s["visits"] >= self.config.burn_in]
        self.take_out([(s, Reason.BURN_IN) for s in ripe if s["mean"] < self.config.retire_hard])
        for s in ripe:
            if s["status"] == Status.TRIAL:
                s["status"] = Status.ACTIVE

    def take_out(self, wishes, limit=10**9):
        """One after the other, lowest phi first, asking the guards each time."""
        taken = []
        for slot, reason in sorted(wishes, key=lambda w: (w[0]["visits"] == 0, phi(w[0]))):
            alike = [s for s in self.slots if live(s) and s["category"] == slot["category"]]
            if (len(taken) < limit and len(alike) > self.config.category_floor
                    and sum(map(live, self.slots)) > self.config.min_live):
                slot.update(status=Status.RETIRED, reason=reason, probed=False)
                self.retired[reason] += 1
                taken.append(slot)
        return taken

    def retire(self, step):
        c, wishes = self.config, []
        for s in self.alive_generated():
            judged = s["status"] == Status.ACTIVE and s["visits"] > 0
            if judged and s["mean"] > c.retire_mastered:
                wishes.append((s, Reason.MASTERED))
            elif judged and s["mean"] < c.retire_hard:
                wishes.append((s, Reason.HARD))
            elif c.retire_silent and judged and s["var"] <= 1e-6:
                wishes.append((s, Reason.SILENT))
            elif c.max_failures and s["failures"] >= c.max_failures:
                wishes.append((s, Reason.FAILED))
            elif c.stale_after and step - max(s["last_seen"], s["added_step"]) > c.stale_after:
                wishes.append((s, Reason.STALE))
        wishes += [(s, Reason.FAILED) for s in self.slots if live(s)
                   and s["source"] == Origin.SEED and 0 < c.max_failures <= s["failures"]]
        return self.take_out(wishes)

    def revive(self):
        c = self.config
        back = [s for s in self.slots if s["status"] == Status.RETIRED and (
            s["reason"] == Reason.FAILED
            or s["probed"] and c.retire_hard <= s["mean"] <= c.revive_mastered)]
        room = max(0, c.p_max - len(self.alive_generated()))
        variants = [s for s in back if s["source"] == Origin.GENERATED]
        late = [id(s) for s in sorted(variants, key=lambda s: -phi(s))[room:]]
        back = [s for s in back if id(s) not in late]
        for s in back:
            if s["reason"] == Reason.FAILED and not s["probed"]:
                s["failures"] = max(c.max_failures - 1, 0)
            young = s["source"] == Origin.GENERATED and s["visits"] < c.burn_in
            s.update(status=Status.TRIAL if young else Status.ACTIVE, reason=Reason.NONE,
                     probed=False)
        self.revived += len(back)
        return back

    def prune(self):
        alive = self.alive_generated()
        wishes = [(s, Reason.PRUNED) for s in alive if s["visits"]]
        return self.take_out(wishes, limit=len(alive) - self.config.p_max)

    def choose(self, epoch):
        c, taken = PUBLIC, []
        for i in sorted(range(len(self.slots)), key=lambda i: (-phi(self.slots[i]), i)):
            s = self.slots[i]
            alike = sum(self.slots[j]["category"] == s["category"] for j in taken)
            rested = s["last_chosen_epoch"] < 0 or epoch - s["last_chosen_epoch"] >= 1
            if (s["status"] == Status.ACTIVE and s["source"] == Origin.SEED and s["visits"]
                    and c.alpha_minus <= s["mean"] <= c.alpha_plus and s["var"] > c.var_floor
                    and rested and alike < c.quota and len(taken) < c.budget):
                taken.append(i)
        for i in taken:
            self.slots[i]["last_chosen_epoch"] = epoch
        return taken

    def check(self, state):
        for name in self.EMPTY:
            if name == "prompt":
                got = [tuple(row[:n]) for row, n in zip(
                    np.asarray(state.prompt_NxP).tolist(), np.asarray(state.prompt_len_N))]
                assert got == [s["prompt"] for s in self.slots]
                continue
            got = np.asarray(getattr(state, f"{name}_N"))
            want = np.array([s[name] for s in self.slots])
            np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=name)
        for name in ("dropped", "retired", "revived", "mismatched", "nonfinite"):
            np.testing.assert_array_equal(getattr(state, name), getattr(self, name), name)


class Pair:
    """The pool and its model, driven by the same operations and compared after each."""

    def __init__(self, config):
        self.config, self.model, self.state = config, Model(config), tp.init(config, P)
        self.shape = shape_of(self.state)
        self.step = self.next_uid = self.epoch = self.epoch_start = 0
        self.draws = []

    def run(self, op, seed):
        getattr(self, op)(np.random.default_rng(seed))
        assert shape_of(self.state) == self.shape  # dtypes and weak types stay as init made them
        self.model.check(self.state)
        self.step += 1

    def call(self, name, *args, **kw):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a donated buffer that could not be used warns
            return jitted(name)(self.state, *args, config=self.config, **kw)

    def add(self, rng):
        rows, keep = [], rng.random(A) < 0.8
        for _ in range(A):
            uid = self.next_uid if rng.random() < 0.85 else rng.integers(-1, self.next_uid + 1)
            self.next_uid += 1
            rows.append(dict(
                uid=int(uid), parent=int(rng.integers(-1, 3)),
                prompt=tuple(rng.integers(1, 9, rng.integers(1, P + 1)).tolist()),
                category=int(rng.integers(0, 4) if rng.random() < 0.95 else 4),
                source=Origin.SEED if rng.random() < 0.2 else Origin.GENERATED))
        packed, _ = tp.make_rows(
            *[[r[k] for r in rows] for k in ("prompt", "uid", "parent", "category", "source")],
            n_rows=A, max_prompt=P)
        self.state, placed = self.call("add", packed, keep, np.int32(self.step))
        want = self.model.add([r if k else None for r, k in zip(rows, keep)], self.step)
        np.testing.assert_array_equal(placed, want)

    def sample(self, rng):
        key = jax.random.key(int(rng.integers(2**31)))
        allowed = rng.random(4) < 0.9
        draw = self.call("sample", key, epoch_start_step=np.int32(self.epoch_start), n_tasks=T,
                         allowed_C=allowed)
        a, b = jax.random.split(key)
        noise = np.asarray(jax.random.gumbel(a, (self.config.capacity,)))
        u = np.asarray(jax.random.uniform(b))
        want = self.model.sample(noise, u, self.epoch_start, allowed)
        fill = [-1] * (T - len(want))
        np.testing.assert_array_equal(draw.indices_T, want + fill)
        np.testing.assert_array_equal(
            draw.uids_T, [self.model.slots[i]["uid"] for i in want] + fill)
        np.testing.assert_array_equal(draw.filled_T, np.arange(T) < len(want))
        self.draws.append((np.asarray(draw.indices_T), np.asarray(draw.uids_T)))

    def update(self, rng):
        """Reports one of the last draws, maybe twice, late, after its tasks have gone."""
        if not self.draws:
            return
        indices, uids = (x.copy() for x in self.draws[-1 - rng.integers(min(4, len(self.draws)))])
        if rng.random() < 0.1:
            indices[0], uids[0] = indices[1], uids[1]
        if rng.random() < 0.1:
            indices[2] = rng.integers(-5, 2 * self.config.capacity)
        mean = (rng.integers(0, 17, T) / 16).astype(np.float32)
        if rng.random() < 0.3:
            mean[:] = rng.choice([0.0, 1.0])
        var = (rng.integers(0, 5, T) / 16).astype(np.float32)
        count = np.where(rng.random(T) < 0.15, 0, 16).astype(np.int32)
        mean[rng.random(T) < 0.05] = rng.choice([np.nan, np.inf])
        step = self.step - int(rng.integers(0, 3))
        self.state = self.call("update_stats", indices, uids, GroupStats(mean, var, count),
                               np.int32(step))
        self.model.update(indices.tolist(), uids.tolist(),
                          list(zip(mean.tolist(), var.tolist(), count.tolist())), step)

    def end_epoch(self, rng):
        for op in rng.permutation(["retire", "revive", "prune"]):
            getattr(self, op)(rng)
        self.epoch, self.epoch_start = self.epoch + 1, self.step

    def retire(self, rng):
        self.state, reason = self.call("retire", np.int32(self.step))
        gone = self.model.retire(self.step)
        want = [s["reason"] if any(s is g for g in gone) else 0 for s in self.model.slots]
        np.testing.assert_array_equal(reason, want)

    def revive(self, rng):
        self.state, back = self.call("revive")
        want = self.model.revive()
        np.testing.assert_array_equal(back, [any(s is b for b in want) for s in self.model.slots])

    def prune(self, rng):
        self.state, gone = self.call("prune")
        want = self.model.prune()
        np.testing.assert_array_equal(gone, [any(s is g for g in want) for s in self.model.slots])

    def restore(self, rng):
        """Killed and taken up again: what was drawn before is reported after."""
        self.state = jax.tree.map(jax.numpy.asarray, jax.device_get(self.state))

    def choose(self, rng):
        self.state, index, uid, valid = jitted("choose")(
            self.state, jax.random.key(0), np.int32(self.epoch), config=PUBLIC)
        want = self.model.choose(self.epoch)
        np.testing.assert_array_equal(np.asarray(index)[np.asarray(valid)], want)
        np.testing.assert_array_equal(
            np.asarray(uid)[np.asarray(valid)], [self.model.slots[i]["uid"] for i in want])


def shape_of(state):
    return jax.tree.map(lambda x: (x.shape, str(x.dtype), x.weak_type), state)


CONFIGS = [
    PoolConfig(capacity=12, p_max=6, min_live=3),
    PoolConfig(capacity=32, p_max=10, retire_silent=True, burn_in=2, stale_after=12,
               max_failures=2, ema_keep=0.5, min_live=0, category_floor=2, batch_floor=1, probe_rate=0.3,
               priority=Priority.PHI),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_pool_equals_its_model(config):
    ops = ["add", "sample", "update", "end_epoch", "choose", "restore"]

    @hypothesis.settings(max_examples=15, deadline=None)
    @hypothesis.given(st.lists(
        st.tuples(st.sampled_from([*ops, "sample", "update", "update"]), st.integers(0, 2**31)),
        min_size=10, max_size=40))
    def check(steps):
        pair = Pair(config)
        pair.run("add", 0)
        for op, seed in steps:
            pair.run(op, seed)

    check()
    traces = {mark: n for mark, n in TRACES.items() if mark[1] == (config.capacity,)}
    assert len(traces) == 7 and set(traces.values()) == {1}


def test_the_random_walk_reaches_every_rule():
    """What the comparison above is worth: each counter moved in a walk of the same kind."""
    moved = np.zeros(len(Dropped) + len(Reason) + 3, np.int64)
    for config in CONFIGS:
        pair = Pair(config)
        rng = np.random.default_rng(1)
        for _ in range(250):
            op = rng.choice(["add", "sample", "update", "update", "end_epoch", "choose"])
            pair.run(op, int(rng.integers(2**31)))
        s = pair.state
        moved += np.concatenate([s.dropped, s.retired, [s.revived, s.mismatched, s.nonfinite]])
    missing = [i for i, n in enumerate(moved) if n == 0]
    assert missing == [len(Dropped) + Reason.NONE]


# ---------------------------------------------------------------- the same on every path


def scenario(run, put=lambda x: x):
    """A short life of a pool; returns a digest of everything it yields."""
    # Without memory, since the last bit of an estimate that has some is the compiler's.
    config, digest = dataclasses.replace(CONFIGS[1], ema_keep=0.0), hashlib.sha256()
    state = put(tp.init(config, P))
    rng = np.random.default_rng(0)
    for step in range(8):
        n = 2 * (step % 4)  # two seeds, then generated tasks
        uids = range(10 * step, 10 * step + A)
        rows, keep = tp.make_rows([[1 + i] * (1 + i % P) for i in range(A)], uids, [-1] * A,
                                  [i % 4 for i in range(A)], [i >= 2 for i in range(A)], A, P)
        state, placed = run("add", state, put(rows), put(keep), put(np.int32(step)), config=config)
        draw = run("sample", state, put(jax.random.key(step)), epoch_start_step=put(np.int32(n)),
                   n_tasks=T, allowed_C=put(np.ones(4, bool)), config=config)
        groups = GroupStats(*(x.astype(d) for x, d in zip(
            (rng.integers(0, 17, T) / 16, rng.integers(0, 3, T) / 16, rng.integers(0, 4, T)),
            (np.float32, np.float32, np.int32))))
        state = run("update_stats", state, draw.indices_T, draw.uids_T, put(groups),
                    put(np.int32(step)), config=config)
        state, reason = run("retire", state, put(np.int32(step)), config=config)
        state, back = run("revive", state, config=config)
        state, gone = run("prune", state, config=config)
        for leaf in jax.tree.leaves(jax.device_get((placed, draw, reason, back, gone, state))):
            digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def test_jit_and_eager_agree_and_nothing_is_transferred_by_stealth():
    eager = scenario(lambda name, *args, **kw: getattr(tp, name)(*args, **kw))
    scenario(lambda name, *args, **kw: jitted(name)(*args, **kw), jax.device_put)  # warm

    def guarded(name, *args, **kw):
        with jax.transfer_guard("disallow"):
            return jitted(name)(*args, **kw)

    assert scenario(guarded, jax.device_put) == eager


def test_eight_devices_hold_the_same_pool():
    code = """
import jax, test_task_pool_model as t
from jax.sharding import Mesh, NamedSharding, PartitionSpec
assert jax.device_count() == 8
everywhere = NamedSharding(Mesh(jax.devices(), ("d",)), PartitionSpec())
def run(name, *args, **kw):
    out = t.jitted(name)(*args, **kw)
    for leaf in jax.tree.leaves(out):
        assert leaf.sharding.is_fully_replicated and len(leaf.addressable_shards) == 8
    return out
print(t.scenario(run, lambda x: jax.device_put(x, everywhere)))
"""
    here = pathlib.Path(__file__).parent
    env = {**os.environ, "JAX_PLATFORMS": "cpu",
           "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
           "PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == scenario(
        lambda name, *args, **kw: jitted(name)(*args, **kw), jax.device_put)
