"""The ledger of tasks: the pool replayed from it, lives in order, nobody lost, kills."""

import dataclasses
import functools
import itertools
import json

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from experiments import tasks as cli
from rods_jax import ledger as lg
from rods_jax import metrics
from rods_jax import task_pool as tp
from rods_jax.boundary import BoundaryConfig, GroupStats
from rods_jax.config import UserError
from rods_jax.ledger import Event, Ledger, LedgerError, Op
from rods_jax.task_pool import Dropped, Origin, PoolConfig, Reason, Status
from rods_jax.types import Category, Source, Task, Turn

P, A, T = 3, 5, 4
BAND = BoundaryConfig(budget=3, quota=2, cooldown_epochs=0)
WALK = PoolConfig(capacity=8, p_max=4, burn_in=2, stale_after=9, max_failures=2, ema_keep=0.5,
                  retire_silent=True, min_live=0, category_floor=0)
LIFE = PoolConfig(capacity=2, min_live=0, category_floor=0)


def task(serial, source=Source.GENERATED, parent=None):
    return Task(f"t{serial}", ("files",), Category.BASE, {}, (Turn("Go.", (), ()),), "story",
                source=source, parent=parent)


def new_ledger(path, config=WALK):
    return Ledger(path / lg.FILE, config, P, BAND, lambda serial: f"t{serial}")


@functools.cache
def jitted(name, config):
    """Compiled for a quick start, not for speed."""
    given = {"update_stats": dict(config=config, band=BAND), "choose": dict(config=BAND),
             "retire": dict(config=config, band=BAND)}.get(name, dict(config=config))
    return jax.jit(functools.partial(getattr(tp, name), **given),
                   compiler_options={"xla_backend_optimization_level": 0})


def bits(state):
    return {field.name: (np.asarray(value).dtype, np.asarray(value).tobytes())
            for field in dataclasses.fields(state) for value in [getattr(state, field.name)]}


def rows_of(serials, rng=None, sources=None):
    sources = sources or [Origin.GENERATED] * len(serials)
    prompts = [[1 + i] * (1 + i % P) for i in range(len(serials))]
    if rng is not None:
        prompts = [rng.integers(1, 9, rng.integers(1, P + 1)).tolist() for _ in serials]
    return tp.make_rows(prompts, serials, [-1] * len(serials), [0] * len(serials), sources, A, P)


# ---------------------------------------------------------------- a random walk of the pool


class Walk:
    """Random operations on the pool, kept as what the ledger is to be told of each step: the
    name of a method of Ledger and its arguments, the pool after it among them."""

    def __init__(self, seed, n_steps):
        self.rng, self.state = np.random.default_rng(seed), tp.init(WALK, P)
        self.serial = self.seeds = self.offered = 0
        self.steps, self.pools = [], []  # of step -1 first; the pool after each
        for step in range(-1, n_steps):
            self.step, self.calls = step, []
            self.add() if step < 0 else self.act()
            self.steps.append(self.calls)
            self.pools.append(self.state)

    def act(self):
        for op in self.rng.choice(["add", "update", "update", "end_epoch", "choose"], 2):
            getattr(self, str(op))()

    def do(self, name, *args):
        found = jitted(name, WALK)(self.state, *args)
        self.state, *rest = found if isinstance(found, tuple) else (found,)
        return rest

    def add(self):
        rng, serials, sources = self.rng, [], []
        for _ in range(A):
            again = rng.random() < 0.15
            serials.append(int(rng.integers(-1, self.serial + 1)) if again else self.serial)
            self.serial += 1
            fresh_seed = self.seeds < 3 and rng.random() < 0.5
            self.seeds += fresh_seed
            sources.append(Origin.SEED if fresh_seed else Origin.GENERATED)
        rows, keep = rows_of(serials, rng, sources)
        keep &= rng.random(A) < 0.8
        kept = [task(s, Source.SEED if source is Origin.SEED else Source.GENERATED)
                for s, source, k in zip(serials, sources, keep) if k]
        self.offered += sum(t.source is Source.GENERATED for t in kept)
        self.calls.append(("born", kept))
        placed_A, = self.do("add", rows, keep, np.int32(self.step))
        self.calls.append(("added", self.state, rows, keep, placed_A))

    def update(self):
        rng, uid_N = self.rng, np.asarray(self.state.uid_N)
        slots = rng.choice(WALK.capacity, T, replace=False).astype(np.int32)
        serials = np.where(rng.random(T) < 0.1, 7, uid_N[slots]).astype(np.int32)
        mean = np.where(rng.random(T) < 0.4, rng.choice([0.0, 1.0]), rng.random(T))
        mean[rng.random(T) < 0.05] = np.nan
        var = np.where(rng.random(T) < 0.3, 0.0, rng.random(T) / 4)
        count = np.where(rng.random(T) < 0.3, 0, rng.integers(1, 9, T))
        self.do("update_stats", slots, serials, GroupStats(
            mean.astype(np.float32), var.astype(np.float32), count.astype(np.int32)),
            np.int32(self.step))
        self.calls.append(("record", Op.UPDATE, self.state))

    def end_epoch(self):
        for op, given in ((Op.RETIRE, [np.int32(self.step)]), (Op.REVIVE, []), (Op.PRUNE, [])):
            self.do(op.value, *given)
            self.calls.append(("record", op, self.state))

    def choose(self):
        _, uid_M, valid_M = self.do("choose", jax.random.key(0), np.int32(self.step // 4))
        self.calls.append(("chosen", self.state, np.asarray(uid_M)[np.asarray(valid_M)].tolist()))


def play(ledger, walk, start=-1, after=lambda call: None):
    """Tells the ledger of the steps from `start` on."""
    for step, calls in enumerate(walk.steps[start + 1:], start):
        if step >= 0:
            ledger.at(step, step // 4)
        for call in calls:
            getattr(ledger, call[0])(*call[1:])
            after(call)
        ledger.flush()


WALKS = dict(seed=st.integers(0, 2**31), n_steps=st.integers(1, 14))


@hypothesis.settings(max_examples=8, deadline=None)
@hypothesis.given(**WALKS)
def test_the_file_gives_back_the_pool_after_every_operation(tmp_path_factory, seed, n_steps):
    path = tmp_path_factory.mktemp("walk")
    ledger, walk = new_ledger(path), Walk(seed, n_steps)

    def after(call):
        pools = [arg for arg in call[1:] if isinstance(arg, tp.PoolState)]
        if pools:
            ledger.flush()
            assert bits(lg.replay(ledger.path, WALK, P)) == bits(pools[0])

    play(ledger, walk, after=after)
    lg.conservation(ledger.counts, walk.state, walk.offered, 0)
    told = lg.lives(ledger.path)
    assert lg.tally(itertools.chain(*told.values())) == ledger.counts
    assert_lives_end_as_the_pool_shows(told, walk.state)


def assert_lives_end_as_the_pool_shows(told, pool):
    """By the paper's band, said once more in plain Python."""
    for slot in np.flatnonzero(np.asarray(pool.uid_N) >= 0):
        life = told[f"t{pool.uid_N[slot]}"]
        entered = max(i for i, event in enumerate(life) if event["event"] == "admitted")
        assert life[entered]["slot"] == slot
        last = {event["event"]: event for event in life[entered:]}
        mean, var = float(pool.mean_N[slot]), float(pool.var_N[slot])
        zone = ("unseen" if pool.visits_N[slot] == 0 else
                "hard" if mean < 0.2 - 1e-6 else "mastered" if mean > 0.85 + 1e-6 else
                "boundary" if var > 1e-6 else "silent")
        assert last.get("zone", {"to": "unseen"})["to"] == zone
        assert ("scored" in last) == (pool.visits_N[slot] > 0)
        moves = [event for event in life[entered:] if event["event"] in ("retired", "revived")]
        retired = bool(moves) and moves[-1]["event"] == "retired"
        assert retired == (pool.status_N[slot] == Status.RETIRED)
        if retired:
            assert moves[-1]["reason"] == Reason(int(pool.reason_N[slot])).name.lower()


def test_the_walk_reaches_every_event():
    """What the comparisons of walks are worth."""
    seen = set()
    for seed in range(3):
        walk = Walk(seed, 60)
        ledger = Ledger("nowhere", WALK, P, BAND, lambda serial: f"t{serial}")
        ledger.flush = lambda: None
        play(ledger, walk)
        lg.conservation(ledger.counts, walk.state, walk.offered, 0)
        seen |= set(ledger.counts)
    assert {kind.split("_")[0] for kind in seen} == {event.value for event in Event}
    assert {f"rejected_{why.name.lower()}" for why in Dropped} <= seen
    assert {f"retired_{why.name.lower()}" for why in Reason if why is not Reason.NONE} <= seen


# ---------------------------------------------------------------- kills


@hypothesis.settings(max_examples=10, deadline=None)
@hypothesis.given(data=st.data(), **WALKS)
def test_a_run_killed_at_any_byte_goes_on_to_the_same_file(tmp_path_factory, data, seed, n_steps):
    path = tmp_path_factory.mktemp("kill")
    whole, walk = new_ledger(path), Walk(seed, n_steps)
    play(whole, walk)
    written = whole.path.read_bytes()
    # Where a checkpoint of step c stands, the lines of the steps before it were flushed.
    c = data.draw(st.integers(0, n_steps), label="checkpoint")
    safe = sum(len(line) for line in written.splitlines(keepends=True)
               if json.loads(line)["step"] < c)
    whole.path.write_bytes(written[:data.draw(st.integers(safe, len(written)), label="bytes")])

    resumed = new_ledger(path)
    resumed.born([task(0)])  # what a run does before it looks for a checkpoint
    resumed.resume(walk.pools[c], c, lg.Mark().then(written[:safe]))
    play(resumed, walk, start=c)
    assert resumed.path.read_bytes() == written and resumed.counts == whole.counts


def test_a_new_run_begins_the_file_anew(tmp_path):
    (tmp_path / lg.FILE).write_text("of a run that left no checkpoint\n")
    ledger = new_ledger(tmp_path)
    ledger.born([task(0)])
    ledger.flush()
    assert list(lg.lives(ledger.path)) == ["t0"]


def test_a_damaged_line_is_named(tmp_path):
    ledger = new_ledger(tmp_path)
    play(ledger, Walk(0, 4))
    lines = ledger.path.read_text().splitlines(keepends=True)
    ledger.path.write_text("".join([lines[0], lines[1][:30] + "\n", *lines[2:]]))
    with pytest.raises(UserError, match="tasks.jsonl: line 2 is damaged"):
        lg.replay(ledger.path, WALK, P)


# ---------------------------------------------------------------- one life, made by hand


@pytest.fixture
def told(tmp_path):
    """A seed t0; a variant t1 that is mastered, comes back, turns hard and is forgotten; t2
    whose prompt is too long; t3 in the place of t1; t4 without a place. Ledger and pool."""
    ledger, state = new_ledger(tmp_path, LIFE), tp.init(LIFE, P)

    def add(step, *serials, source=Origin.GENERATED):
        nonlocal state
        rows, keep = rows_of(serials, sources=[source] * len(serials))
        state, placed_A = jitted("add", LIFE)(state, rows, keep, np.int32(step))
        ledger.added(state, rows, keep, placed_A)

    def update(step, slot, mean, var):
        nonlocal state
        one = lambda x, dtype: np.asarray([x], dtype)  # noqa: E731
        state = jitted("update_stats", LIFE)(
            state, one(slot, np.int32), np.asarray(state.uid_N)[slot:slot + 1],
            GroupStats(one(mean, np.float32), one(var, np.float32), one(4, np.int32)),
            np.int32(step))
        ledger.record(Op.UPDATE, state)

    def then(op, *args):
        nonlocal state
        state, *rest = jitted(op.value, LIFE)(state, *args)
        return rest

    ledger.born([task(0, Source.SEED)])
    add(0, 0, source=Origin.SEED)
    ledger.at(0, 0)
    update(0, 0, 0.5, 0.25)
    _, uid_M, valid_M = then(Op.CHOOSE, jax.random.key(0), np.int32(0))
    ledger.chosen(state, np.asarray(uid_M)[np.asarray(valid_M)].tolist())
    ledger.at(1, 0)
    ledger.born([task(1, parent="t0"), task(2, parent="t0")])
    ledger.rejected("t2", lg.TOO_LONG)
    add(1, 1)
    update(1, 1, 0.5, 0.25)
    ledger.at(2, 1)
    update(2, 1, 1.0, 0.0)
    then(Op.RETIRE, np.int32(2))
    ledger.record(Op.RETIRE, state)
    ledger.at(3, 1)
    update(3, 1, 0.5, 0.25)
    then(Op.REVIVE)
    ledger.record(Op.REVIVE, state)
    ledger.at(4, 2)
    update(4, 1, 0.0, 0.0)
    then(Op.RETIRE, np.int32(4))
    ledger.record(Op.RETIRE, state)
    ledger.at(5, 2)
    ledger.born([task(3, parent="t0"), task(4, parent="t0")])
    add(5, 3, 4)
    ledger.flush()
    return ledger, state


def test_a_life_in_its_order(told):
    found = lg.lives(told[0].path)
    assert found["t1"] == [
        dict(step=1, epoch=0, event="born", source="generated", parent="t0"),
        dict(step=1, epoch=0, event="admitted", slot=1, source="generated"),
        dict(step=1, epoch=0, event="scored", mean=0.5),
        {"step": 1, "epoch": 0, "event": "zone", "mean": 0.5, "from": "unseen", "to": "boundary"},
        {"step": 2, "epoch": 1, "event": "zone", "mean": 1.0, "from": "boundary",
         "to": "mastered"},
        dict(step=2, epoch=1, event="retired", mean=1.0, reason="mastered"),
        {"step": 3, "epoch": 1, "event": "zone", "mean": 0.5, "from": "mastered",
         "to": "boundary"},
        dict(step=3, epoch=1, event="revived", mean=0.5),
        {"step": 4, "epoch": 2, "event": "zone", "mean": 0.0, "from": "boundary", "to": "hard"},
        dict(step=4, epoch=2, event="retired", mean=0.0, reason="hard"),
        dict(step=5, epoch=2, event="forgotten", slot=1)]
    assert [(e["step"], e["event"]) for e in found["t0"]] == [
        (-1, "born"), (-1, "admitted"), (0, "scored"), (0, "zone"), (0, "chosen")]
    assert [e["event"] for e in found["t3"]] == ["born", "admitted"]
    assert {uid: found[uid][-1]["reason"] for uid in ("t2", "t4")} == {
        "t2": "prompt_too_long", "t4": "overflow"}


def test_each_row_that_found_no_place_has_its_own_reason(tmp_path):
    config = PoolConfig(capacity=1, p_max=2)
    ledger = new_ledger(tmp_path, config)
    rows, keep = rows_of([1, 2, 3, 2])
    state, placed_A = jitted("add", config)(tp.init(config, P), rows, keep, np.int32(0))
    ledger.added(state, rows, keep, placed_A)
    ledger.flush()
    assert [(uid, event.get("reason")) for uid, life in lg.lives(ledger.path).items()
            for event in life] == [
        ("t1", None), ("t2", "overflow"), ("t2", "duplicate"), ("t3", "p_max")]


def test_what_is_not_accounted_for_is_named_with_its_figures(told):
    ledger, pool = told
    lg.conservation(ledger.counts, pool, offered=4, waiting=0)
    assert ledger.summary(pool, 4, 0) == {"events": dict(ledger.counts), "broken": None}
    with pytest.raises(LedgerError, match=(
            r"seeds 1 \+ offered 5 = admitted 3 \+ waiting 0 \+ rejected 2 "
            r"\{'rejected_prompt_too_long': 1, 'rejected_overflow': 1\}: 6 is not 5")):
        lg.conservation(ledger.counts, pool, offered=5, waiting=0)
    assert "born = seeds + offered: 5 is not 6" in ledger.summary(pool, 5, 1)["broken"]
    for kind, figures in (("revived", "revived by the pool: 0 is not 1"),
                          ("rejected_overflow", "dropped by the pool: 0 is not 1"),
                          ("retired_hard", "retired by the pool: 0 is not 1"),
                          ("forgotten", "in the pool + forgotten: 3 is not 2"),
                          ("admitted_generated", "in the pool + forgotten: 1 is not 3")):
        lost = {name: n for name, n in ledger.counts.items() if name != kind}
        with pytest.raises(LedgerError) as caught:
            lg.conservation(lost, pool, offered=4, waiting=0)
        assert figures in str(caught.value), kind


def test_a_checkpoint_whose_file_is_gone_is_written_down_whole(told, tmp_path):
    ledger, pool = told
    ledger.path.unlink()
    other = new_ledger(tmp_path, LIFE)
    other.resume(pool, 6, ledger.mark)
    other.flush()
    row, = metrics.read(other.path)
    assert (row["op"], row["step"]) == ("restored", 5)
    assert bits(lg.replay(other.path, LIFE, P)) == bits(pool)
    assert "born = seeds + offered: 0 is not 4" in other.summary(pool, 4, 0)["broken"]


@pytest.mark.parametrize("change", [
    lambda lines: [*lines[:2], *lines[3:]], lambda lines: [*lines[:2], *lines[1:]],
    lambda lines: lines[::-1], lambda lines: [line.replace("t1", "t9") for line in lines],
    lambda lines: ["{}\n"], lambda lines: []])
def test_a_file_that_the_run_did_not_write_is_put_aside(told, tmp_path, change, capsys):
    ledger, pool = told
    changed = "".join(change(ledger.path.read_text().splitlines(keepends=True)))
    ledger.path.write_text(changed)
    other = new_ledger(tmp_path, LIFE)
    other.resume(pool, 6, ledger.mark)
    other.flush()
    assert (tmp_path / "tasks.jsonl.unknown").read_text() == changed
    assert "put aside" in capsys.readouterr().err
    assert [row["op"] for row in metrics.read(other.path)] == ["restored"]
    assert bits(lg.replay(other.path, LIFE, P)) == bits(pool)
    assert other.summary(pool, 4, 0)["broken"] is not None


def test_a_file_that_others_touch_stops_the_run(told):
    ledger, pool = told
    with open(ledger.path, "a") as file:
        file.write("\n")
    ledger.born([task(7, parent="t0")])
    with pytest.raises(UserError, match="changed or removed"):
        ledger.flush()
    ledger.path.unlink()
    with pytest.raises(UserError, match="changed or removed"):
        ledger.flush()


@pytest.mark.parametrize("line, message", [
    ('{"step": 0, "loss": 1.0}', "line 2 tells of no tasks"),
    ('{"step": 0, "epoch": 0, "events": [{}], "changes": {}}', "line 2 tells of no tasks"),
    ('{"step": 0, "epoch": 0, "events": [], "changes": {"mean_N": [[99], [0.5]]}}', "not fit"),
    ('{"step": 0, "epoch": 0, "events": [], "changes": {"size_N": [[0], [1]]}}', "not fit")])
def test_files_of_another_kind_are_told_in_one_line(told, line, message):
    ledger, _ = told
    first = ledger.path.read_text().splitlines(keepends=True)[0]
    ledger.path.write_text(first + line + "\n")
    with pytest.raises(UserError, match=message) as caught:
        lg.replay(ledger.path, LIFE, P)
    assert "\n" not in str(caught.value)


def test_a_zero_keeps_its_sign(told):
    ledger, pool = told
    mean_N = np.asarray([-0.0, 1 / 3], np.float32)
    pool = pool.replace(mean_N=mean_N)
    ledger.record(Op.UPDATE, pool)
    ledger.record(Op.UPDATE, pool.replace(mean_N=mean_N * np.float32([-1, 1])))
    ledger.flush()
    assert np.signbit(metrics.read(ledger.path)[-2]["changes"]["mean_N"][1][0])
    assert not np.signbit(lg.replay(ledger.path, LIFE, P).mean_N[0])


def test_the_command_shows_counts_and_one_life(told, capsys):
    folder = told[0].path.parent
    assert cli.main(["life", str(folder), "--json", str(folder / "found.json")]) == 0
    assert "5 tasks" in capsys.readouterr().out
    found = json.loads((folder / "found.json").read_text())
    assert found == {"tasks": 5, "events": dict(told[0].counts)}
    assert cli.main(["life", str(folder), "t1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12 and lines[0] == "t1: 11 events"
    assert lines[5].split() == ["step", "2", "epoch", "1", "zone", "mean", "1.0,", "from",
                                "boundary,", "to", "mastered"]
    with pytest.raises(UserError, match="no task 't9': 5 are known, such as t0, t1, t2"):
        cli.main(["life", str(folder), "t9"])
    with pytest.raises(UserError, match=r"nowhere.tasks\.jsonl: missing; name the folder of a"):
        cli.main(["life", "nowhere"])
