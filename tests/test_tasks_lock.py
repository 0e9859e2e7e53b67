"""A lock keeps a second process out, and goes with its holder."""

import signal
import subprocess
import sys

import pytest

from rods_jax.tasks.lock import lock_of, locked

HOLD = ("import sys, time; from rods_jax.tasks.lock import locked\n"
        "with locked(sys.argv[1], 'busy'):\n    print('held', flush=True); time.sleep(60)")


def test_a_second_process_is_told_and_a_killed_one_lets_go(tmp_path):
    path = tmp_path / "new" / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match="run: busy"):
        with locked(path, "run: busy"):
            raise AssertionError("two at once")
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with locked(path, "run: busy"):
        pass
    with locked(path):
        pass


def test_a_folder_has_one_lock_under_all_its_names(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert lock_of(tmp_path / "a") == lock_of(tmp_path / "b" / ".." / "a") == lock_of(tmp_path / "b")
    assert lock_of(tmp_path / "a") != lock_of(tmp_path / "c")
    assert not lock_of(tmp_path / "c").is_relative_to(tmp_path)
