import subprocess
import sys

import pytest

from rods_jax.tasks.tfds_builder import load_tasks, prepare_tasks
from test_synthesis_suite import notes_task

CATEGORIES = ["base", "miss_func", "miss_param", "long_context"]


def many(n):
    return [notes_task(i, CATEGORIES[i % 4]) for i in range(n)]


def test_round_trip_in_order_and_quiet(tmp_path, capfd):
    tasks = many(40)
    prepare_tasks(tmp_path, "notes", {"train": tasks[:30], "held_in": tasks[30:]})
    assert load_tasks(tmp_path, "notes", "train") == tasks[:30]
    assert load_tasks(tmp_path, "notes", "held_in") == tasks[30:]
    prepare_tasks(tmp_path, "notes", {"train": tasks[:30], "held_in": tasks[30:]})
    out, err = capfd.readouterr()
    assert out == "" and err == ""
    assert list(tmp_path.rglob("*.array_record*"))


def test_clear_errors(tmp_path):
    with pytest.raises(ValueError, match="call prepare_tasks first"):
        load_tasks(tmp_path, "notes", "train")
    with pytest.raises(ValueError, match="no tasks for split eval"):
        prepare_tasks(tmp_path, "notes", {"train": many(1), "eval": []})
    prepare_tasks(tmp_path, "notes", {"train": many(2)})
    with pytest.raises(ValueError, match="has no split 'eval', only train"):
        load_tasks(tmp_path, "notes", "eval")
    with pytest.raises(ValueError, match="holds other tasks in split train"):
        prepare_tasks(tmp_path, "notes", {"train": many(3)})


def test_needs_neither_tensorflow_nor_jax(tmp_path):
    prepare_tasks(tmp_path, "notes", {"train": many(2)})
    code = ("import sys; from rods_jax.tasks.tfds_builder import load_tasks;"
            f"assert len(load_tasks({str(tmp_path)!r}, 'notes', 'train')) == 2;"
            "print([m for m in ('tensorflow', 'jax') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
