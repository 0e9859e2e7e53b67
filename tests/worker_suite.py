"""A suite whose tools misbehave in every way a worker must survive. One state: a total.
Below it, what tests do with rollouts and workers."""

import copy
import ctypes
import json
import os
import pathlib
import signal
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


# ----------------------------------------------------------------- what tests do with it


def call(name, **arguments):
    return ToolCall(name, arguments)


def kill(pid):
    """Kills a worker from outside, and waits until it is dead (its parent has to reap it)."""
    os.kill(pid, signal.SIGKILL)
    while pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
        time.sleep(0.001)


def first_row(pool, pending):
    """Waits until the first of several calls is answered, so that the second runs."""
    while not pending._operation.rows:
        assert not pending._operation.settled
        pool.pump()


def damaged(transcript, rng):
    """Turns of steps of calls, something left out, repeated, misspelt or in another order."""
    turns = [[list(step) for step in turn] for turn in transcript]
    for turn in turns:
        kind = rng.randrange(6)
        if kind == 0 and turn:
            turn.pop(rng.randrange(len(turn)))
        elif kind == 1 and turn:
            turn.append(rng.choice(turn))
        elif kind == 2:
            turn.append([call("no_such_tool", x=[1.5, None, {"é\n": True}]), call("find_file")])
        elif kind == 3:
            turn.reverse()
        elif kind == 4:
            turn[:] = [[c for step in turn for c in step]]
    return turns


def bystanders(pool, n=3):
    """Rollouts in the middle of a turn, each with a total of its own."""
    rollouts = [pool.start(task(f"by{i}"), False) for i in range(n)]
    for i, rollout in enumerate(rollouts):
        pool.execute(rollout, [add(0)]).result()
        pool.end_turn(rollout, "done").result()
        pool.execute(rollout, [add(10 * i)]).result()
    return rollouts


def go_on(pool, rollouts):
    """Their states are as they were: the total, and that the first turn is over."""
    pending = [pool.execute(rollout, [add(1)]) for rollout in rollouts]
    assert [p.result()[0].text for p in pending] == [
        f'{{"total": {10 * i + 1}}}' for i in range(len(rollouts))]
    ends = [pool.end_turn(rollout, "done").result() for rollout in rollouts]
    assert [e[1].index for e in ends] == [2] * len(rollouts)
    assert [e[0].passed for e in ends] == [i == 0 for i in range(len(rollouts))]
