"""rods_jax.metrics: the record on disk, the live line, the compile counter."""

import io
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rods_jax import metrics
from rods_jax.config import UserError


def test_each_line_is_on_disk_at_once(tmp_path):
    path = tmp_path / "run" / metrics.FILE
    with metrics.MetricWriter(path, keep_through=-1) as writer:
        writer.write(1, {"a": np.float32(0.5), "b": jnp.int32(3), "c": math.nan, "d": math.inf})
        assert metrics.read(path) == [{"step": 1, "a": 0.5, "b": 3, "c": None, "d": None}]
        writer.write(2, {"list": [1, np.float64(2.0)], "text": "x", "flag": np.bool_(True)})
    assert metrics.read(path)[1] == {"step": 2, "list": [1, 2.0], "text": "x", "flag": True}
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_steps_must_grow(tmp_path):
    writer = metrics.MetricWriter(tmp_path / "m", keep_through=-1)
    writer.write(3, {})
    for step in (3, 2):
        with pytest.raises(ValueError, match="comes after step 3"):
            writer.write(step, {})


@given(steps=st.lists(st.integers(0, 50), min_size=1, unique=True).map(sorted),
       kept=st.integers(-1, 60), torn=st.text("0123456789{}\"steprwa:, ", max_size=12))
def test_resume_keeps_exactly_the_lines_up_to_the_restored_step(tmp_path_factory, steps, kept, torn):
    path = tmp_path_factory.mktemp("m") / metrics.FILE
    with metrics.MetricWriter(path, keep_through=-1) as writer:
        for step in steps:
            writer.write(step, {"value": step * 0.1})
    with open(path, "a") as f:
        f.write('{"step": 99, "x": ' + torn)  # killed in the middle of a line
    with metrics.MetricWriter(path, keep_through=kept) as writer:
        want = [{"step": s, "value": s * 0.1} for s in steps if s <= kept]
        assert metrics.read(path) == want
        writer.write(61, {"value": 1})
    assert metrics.read(path) == [*want, {"step": 61, "value": 1}]


def test_interrupted_file_equals_uninterrupted_byte_for_byte(tmp_path):
    def write(path, first, last, keep):
        with metrics.MetricWriter(path, keep_through=keep) as writer:
            for step in range(first, last):
                writer.write(step, {"value": step / 7, "none": None})

    write(tmp_path / "whole", 0, 10, -1)
    write(tmp_path / "parts", 0, 8, -1)
    write(tmp_path / "parts", 5, 10, 4)
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "parts").read_bytes()


@pytest.mark.parametrize("damage", ["not json", "[1]", '{"a": 1}'])
def test_other_damage_names_the_line(tmp_path, damage):
    path = tmp_path / "m"
    path.write_text(f'{{"step": 1}}\n{damage}\n{{"step": 2}}\n')
    with pytest.raises(UserError, match="line 2 is damaged"):
        metrics.read(path)


# ---------------------------------------------------------------- live line

ROW = {"reward_mean": 0.4321, "zone_hard": 0.25, "zone_boundary": 0.5, "zone_mastered": 0.2,
       "zone_silent": 0.05, "pool_active": 412, "tokens_per_s": 2345.6}


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_plain_lines_now_and_then_and_at_the_end():
    clock, out = Clock(), io.StringIO()
    progress = metrics.Progress(100, stream=out, clock=clock, plain_every_s=10)
    for step in range(1, 101):
        clock.now += 2.0
        progress.update(step, ROW)
    progress.close()
    lines = out.getvalue().splitlines()
    assert lines[0] == ("step 1/100 | reward 0.432 | hard 25% boundary 50% mastered 20% silent 5% "
                        "| pool 412 | 2,346 tok/s | 3 min 18 s left")
    assert len(lines) == 21
    assert lines[-1].startswith("step 100/100 ") and "left" not in lines[-1]


def test_terminal_line_is_rewritten_and_notes_stand_above():
    clock, out = Clock(), Terminal()
    progress = metrics.Progress(3, stream=out, clock=clock)
    clock.now = 1
    progress.update(1, ROW)
    progress.note("saved")
    progress.update(2, {"reward_mean": math.nan, "pool_active": None})
    progress.close()
    text = out.getvalue()
    shown = [part.split("\r")[-1].rstrip() for part in text.split("\n")]
    assert shown == ["saved", "step 2/3 | 1 s left", ""]
    assert "\rstep 1/3 | reward 0.432" in text


def test_time_left_follows_a_change_of_pace_and_starts_at_the_restored_step():
    clock, out = Clock(), io.StringIO()
    progress = metrics.Progress(1000, start=900, stream=out, clock=clock, plain_every_s=0)
    for step in range(901, 1000):
        clock.now += 1.0 if step < 950 else 3.0
        progress.update(step, {})
    lines = out.getvalue().splitlines()
    assert lines[0] == "step 901/1000 | 1 min 39 s left"
    assert lines[-1] == "step 999/1000 | 3 s left"


@pytest.mark.parametrize("seconds, text", [
    (0, "0 s"), (59.4, "59 s"), (60, "1 min 00 s"), (3599.6, "1 h 00 min"),
    (7830, "2 h 10 min"), (-3, "0 s")])
def test_durations(seconds, text):
    assert metrics.duration(seconds) == text


# ---------------------------------------------------------------- compiles


def test_compile_counter_names_what_was_compiled():
    @jax.jit
    def doubled(x):
        return x * 2

    three, four = jnp.ones(3), jnp.ones(4)
    with metrics.CompileCounter() as compiles:
        doubled(three)
        before = compiles.counts()
        assert before["doubled"] == 1
        doubled(three)
        assert compiles.since(before) == {}
        doubled(four)
        assert compiles.since(before) == {"doubled": 1}
        assert compiles.traces()["doubled"] == 2
        assert compiles.total == sum(compiles.counts().values())
        assert compiles.seconds > 0
    doubled(jnp.ones(5))
    assert compiles.since(before) == {"doubled": 1}  # closed: no longer counts
