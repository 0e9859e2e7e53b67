"""States of a user's classes that are odd to compare or cannot be copied."""

import dataclasses
import threading

import pytest
from test_tools_classes import ADD, task

from rods_jax.tasks.replay import play, replay
from rods_jax.tools.classes import ClassSuite
from rods_jax.types import ToolCall


class Lockers:
    def __init__(self, guarded: bool = False):
        self.open = set()
        self.guard = threading.Lock() if guarded else None

    def unlock(self, number: int) -> str:
        """Open a locker."""
        self.open.add(number)
        return "open"


@pytest.mark.parametrize("guarded", [False, True])
def test_each_turn_is_compared_with_the_state_of_its_own_time(guarded):
    made = ClassSuite("l", {"l": Lockers}, {"train": [ADD]}, held_out=())
    some = task([("unlock", {"number": 1})], [("unlock", {"number": 2})], domains=("l",),
                config={"l": {"guarded": guarded}}, tools=("unlock",))
    # Two locks are never equal: the gold fails, which a check shows.
    assert [o.state_ok for o in replay(made, some).outcomes] == [not guarded] * 2
    early = [[[ToolCall("unlock", {"number": 1}), ToolCall("unlock", {"number": 2})]], [[]]]
    assert [o.state_ok for o in play(made, some, early).outcomes] == [False, not guarded]


@dataclasses.dataclass
class Counter:
    """Equal to another of its count; not to be copied."""

    count: int = 0
    guard: object = dataclasses.field(default_factory=threading.Lock, compare=False)


class Turnstile:
    def __init__(self):
        self.counter, self.seen = Counter(), {}

    def enter(self, people: int) -> str:
        """Let people in."""
        self.counter.count += people
        return "in"


class Gate(Turnstile):
    def __init__(self):
        super().__init__()
        self.counter, self.keys = None, self.seen.keys()

    def enter(self, people: int) -> str:
        """Let people in."""
        self.seen[people] = True
        return "in"


@pytest.mark.parametrize("cls", [Turnstile, Gate])
def test_every_rollout_scores_alike_where_a_state_cannot_be_copied(cls):
    made = ClassSuite("t", {"t": cls}, {"train": [ADD]}, held_out=())
    some = task([("enter", {"people": 1})], [("enter", {"people": 2})], domains=("t",),
                config={}, tools=("enter",))
    for _ in range(4):
        assert replay(made, some).valid
        other = play(made, some, [[[ToolCall("enter", {"people": 3})]]])
        assert other.outcomes[0].state_ok is False


def test_an_object_of_the_state_compares_as_its_class_says():
    @dataclasses.dataclass
    class File:
        name: str
        contents: str
        owner: str = "amy"

    @dataclasses.dataclass
    class Box:
        contents: str

    class Disk:
        def __init__(self):
            self.file, self.box = File("a", "x"), Box("y")

        def chown(self, owner: str) -> str:
            """Give the file to somebody."""
            self.file.owner = owner
            return "done"

    made = ClassSuite("d", {"d": Disk}, {"train": [ADD]}, held_out=())
    some = task([("chown", {"owner": "bob"})], domains=("d",), config={}, tools=("chown",))
    for _ in range(3):
        assert replay(made, some).valid
        assert not play(made, some, [[[ToolCall("chown", {"owner": "eve"})]]]).valid
