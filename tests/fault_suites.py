"""Suites for worker processes in which one tool does harm. Nothing here imports jax."""

import json
import os
import pathlib
import signal
import time

from rollout_world import SmallSuite

from rods_jax.tools.toolbox import ToolboxSuite

FAULT = "TESTS_FAULT"  # of the toolbox: {"uid": task, "call": [name, arguments], "harm": HARMS}
PID_FILE = "TESTS_PID_FILE"


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    time.sleep(600)


def eat():
    return bytearray(2**42)


def fail():
    raise LookupError("the simulator broke")


def say_pid_and_hang():
    """Somebody else then knows that the tool runs, and where."""
    file = pathlib.Path(os.environ[PID_FILE])
    made = file.with_suffix(f".{os.getpid()}")
    made.write_text(str(os.getpid()), encoding="ascii")
    made.rename(file)
    time.sleep(600)


def nothing():
    pass


HARMS = {harm.__name__: harm for harm in (die, hang, eat, fail, say_pid_and_hang)}


def make_die():
    return SmallSuite(die)


def make_hang():
    return SmallSuite(hang)


def make_eat():
    return SmallSuite(eat)


def make_fail():
    return SmallSuite(fail)


def make_say_pid_and_hang():
    return SmallSuite(say_pid_and_hang)


def make_small():
    return SmallSuite(nothing)


class Stillborn(SmallSuite):
    def make_env(self, task, hints=False):
        die()


def make_stillborn():
    return Stillborn(die)


class FaultyToolbox(ToolboxSuite):
    """The first call of a rollout does harm where it is the one that the environment variable
    names."""

    def make_env(self, task, hints=False):
        env, fault = super().make_env(task, hints), json.loads(os.environ[FAULT])
        plain, begun = env.execute, []

        def execute(calls):
            first, = ([c.name, dict(c.arguments)] for c in calls[:1])
            if not begun and task.uid == fault["uid"] and first == fault["call"]:
                HARMS[fault["harm"]]()
            begun.append(first)
            return plain(calls)
        env.execute = execute
        return env


def make_toolbox():
    return FaultyToolbox()
