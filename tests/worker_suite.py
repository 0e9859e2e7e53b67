"""A suite whose tools misbehave in every way a worker must survive. One state: a total."""

import copy
import ctypes
import json
import os
import sys
import time

from rods_jax.tools.scoring import Scoring
from rods_jax.tools.twin import GoldRuns, TwinEnv
from rods_jax.types import Category, Task, ToolCall, ToolResult, Turn

TOOLS = ("add", "sleep", "spin", "allocate", "write", "exit", "segfault", "show", "leave",
         "interrupt", "recurse", "boom", "modules", "where", "orphan")


def add(n: int) -> ToolCall:
    return ToolCall("add", {"n": n})


def task(uid: str, turns: int = 3, making: str = "") -> Task:
    """Turn i wants add(i). `making`: the tool that runs while the environment is made."""
    return Task(uid, ("odd",), Category.BASE, {"making": making}, tuple(
        Turn(f"add {i}", (add(i),), TOOLS) for i in range(turns)), scenario=uid)


class OddWorld:
    def __init__(self, making: str):
        self.total = 0
        if making:
            getattr(self, making)()

    def call(self, call, visible):
        assert call.name in visible
        return ToolResult(str(getattr(self, call.name)(**call.arguments)), True)

    def same(self, other, mode):
        return self.total == other.total

    def snapshot(self):
        return copy.copy(self)

    def add(self, n):
        self.total += n
        return json.dumps({"total": self.total})

    def sleep(self, s=60):
        time.sleep(s)

    def spin(self):
        """Minutes in C with the interpreter's lock held, deaf to Python's signal handlers."""
        return 3 ** (3 ** 20) % 7

    def allocate(self, mb):
        return len(bytearray(mb * 2**20))

    def write(self, chars):
        return "x" * chars

    def exit(self, code=3):
        os._exit(code)

    def segfault(self):
        ctypes.string_at(0)

    def show(self, text):
        print(text, flush=True)
        os.write(1, text.encode())
        return sys.stdin.read()

    def leave(self):
        sys.exit(4)

    def interrupt(self):
        raise KeyboardInterrupt("not really")

    def recurse(self):
        return self.recurse()

    def boom(self):
        raise LookupError("the simulator broke")

    def modules(self):
        return sorted({name.split(".")[0] for name in sys.modules})

    def where(self):
        return os.getpid()

    def orphan(self):
        """A process that outlives its parent and holds all its pipes."""
        if os.fork() == 0:
            time.sleep(600)
        os._exit(5)


class Marked:
    """What an environment with hints looks like here."""

    def __init__(self, env):
        self.env, self.task = env, env.task
        self.begin_turn, self.end_turn = env.begin_turn, env.end_turn

    def execute(self, calls):
        return tuple(ToolResult(f"{r.text}!", r.ok) for r in self.env.execute(calls))


def odd_world(task):
    return OddWorld(task.initial_config["making"])


class OddSuite:
    name = "odd"
    domains = ("odd",)

    def __init__(self, scoring=Scoring()):
        self.scoring = scoring

    def make_env(self, task, hints=False):
        env = TwinEnv(task, odd_world(task), GoldRuns(odd_world), self.scoring)
        return Marked(env) if hints else env

    def gold_reply(self, task, turn):
        return "done"


def make(**given) -> OddSuite:
    return OddSuite(**given)


def make_refused():
    raise ValueError("odd tools are not installed: pip install odd-tools")


def make_broken():
    return {}["missing"]


def make_dead():
    os._exit(9)
