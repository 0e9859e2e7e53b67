"""A user's own classes as a suite: specs read off them, isolation, errors, scores."""

import asyncio
import dataclasses
import json
import random
import sys
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rods_jax.tasks.jsonl import write_tasks, write_tools
from rods_jax.tasks.replay import gold_transcript, play, replay
from rods_jax.tools.class_specs import class_specs
from rods_jax.tools.classes import ClassSuite
from rods_jax.tools.scoring import EmptyTurn, Mode, Scoring
from rods_jax.types import Category, Task, ToolCall, ToolSpec, Turn


class Shelf:
    """State in public attributes, a mutable default everywhere one can be."""

    labels = []
    _cache = {}

    def __init__(self, books: dict = {}, owner: str = "", secret: int = 0):
        self.books = books
        self.owner = owner
        self._secret = secret

    def add(self, title: str, tags: list[str] = [], pages: int = 100) -> dict:
        """Put a book on the shelf,
        at its end.

        title: as printed
        tags: a few words
        """
        tags.append("new")
        self.books[title] = {"tags": tags, "pages": pages}
        self._log(title)
        return {"title": title, "tags": tags}

    def _log(self, title, seen=[]):
        seen.append(title)
        self._cache[title] = len(seen)

    def logged(self, title: str) -> str:
        """How many titles one call has logged."""
        return f"{self._cache[title]} in {len(self._cache)}"

    def label(self, text: str) -> list:
        """Add a label."""
        self.labels.append(text)
        return self.labels

    def keep(self, parts: list) -> str:
        """Keep a list and change it."""
        self.parts = parts
        parts.append("kept")
        return "kept"

    def weigh(self, title: str, unit: typing.Literal["kg", "lb"] = "kg",
              share: float = 1.0, exact: bool = False, extra: dict | None = None) -> float:
        """Weight of a book."""
        pages = self.books[title]["pages"]
        return pages * share / (2 if unit == "kg" else 1)

    def page(self, number: int) -> str:
        """The type of a page number."""
        return type(number).__name__

    def fail(self, how: str) -> dict:
        """Fail in some way."""
        if how == "deep":
            return self.fail(how)
        if how == "memory":
            raise MemoryError
        if how == "cancel":
            raise asyncio.CancelledError
        if how == "exit":
            sys.exit("bye")
        if how == "mute":
            raise _Mute
        if how == "object":
            return {"shelf": self}
        if how == "key":
            return {("a", 1): 2}
        if how == "error":
            return {"error": "no such book"}
        raise KeyError(how)

    def reset(self, secret: int) -> None:
        """Set what no comparison sees."""
        self._secret = secret


class _Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")


ALL = ("add", "logged", "label", "keep", "weigh", "page", "fail", "reset")


def task(*golds, uid="t", config=None, category=Category.BASE, domains=("shelf",), tools=ALL):
    turns = tuple(Turn(f"turn {i}", tuple(ToolCall(*call) for call in gold), tools)
                  for i, gold in enumerate(golds))
    config = {"shelf": {}} if config is None else config
    return Task(uid, domains, category, config, turns, f"scenario-{uid}")


ADD = task([("add", {"title": "Emma"})])


def suite(train=(ADD,), **options):
    return ClassSuite("mine", {"shelf": Shelf}, {"train": train}, **{"held_out": (), **options})


def run(env, *calls):
    return [(r.text, r.ok) for r in env.execute([ToolCall(*call) for call in calls])]


def started(some_task=ADD, made=None):
    env = (made or suite()).make_env(some_task)
    env.begin_turn()
    return env


# ------------------------------------------------------------------- specs


def test_specs_follow_signature_annotations_and_docstring():
    specs = {s.name: s for s in suite().tools(["shelf"])}
    assert tuple(specs) == ALL
    assert specs["add"] == ToolSpec("add", "Put a book on the shelf, at its end.", {
        "type": "object", "properties": {
            "title": {"type": "string", "description": "as printed"},
            "tags": {"type": "array", "items": {"type": "string"},
                     "description": "a few words", "default": []},
            "pages": {"type": "integer", "default": 100}},
        "required": ["title"], "additionalProperties": False}, "shelf")
    assert specs["weigh"].parameters["properties"] == {
        "title": {"type": "string"},
        "unit": {"type": "string", "enum": ["kg", "lb"], "default": "kg"},
        "share": {"type": "number", "default": 1.0},
        "exact": {"type": "boolean", "default": False},
        "extra": {"type": ["object", "null"], "default": None}}


def _method(signature, doc="Does it."):
    """A class whose only tool has the given function as a method."""
    signature.__doc__, signature.__name__ = doc, "tool"
    return type("Own", (), {"tool": signature})


def _bare(self, x): ...
def _star(self, *words: str): ...
def _object(self, x: object): ...
def _keys(self, x: dict[int, str]): ...
def _unknown(self, x: "Nothing"): ...  # noqa: F821
def _wrong_default(self, x: int = "three"): ...
def _odd_default(self, x: str = object()): ...
def _fine(self, x: int | str | None = None, *, y: dict[str, typing.Any]): ...


@pytest.mark.parametrize("function, needle", [
    (_bare, "tool Own.tool: parameter 'x' has no annotation: use str"),
    (_star, "parameter 'words' cannot be given by name"),
    (_object, "parameter 'x' is annotated object: use str"),
    (_keys, "parameter 'x' is annotated dict[int, str]"),
    (_unknown, "annotation that cannot be read (name 'Nothing' is not defined)"),
    (_wrong_default, "has the default 'three', but argument 'x' must be of type integer"),
    (_odd_default, "has a default of type object"),
])
def test_a_method_that_is_no_tool_is_one_clear_line(function, needle):
    with pytest.raises(ValueError) as error:
        class_specs(_method(function), "own")
    assert needle in str(error.value) and "\n" not in str(error.value)


def test_docstring_and_unions():
    (spec,) = class_specs(_method(_fine), "own")
    assert spec.parameters["properties"] == {
        "x": {"type": ["integer", "string", "null"], "default": None}, "y": {"type": "object"}}
    assert spec.parameters["required"] == ["y"]
    with pytest.raises(ValueError, match="no docstring: say in one line what it does"):
        class_specs(_method(_fine, doc=""), "own")
    with pytest.raises(ValueError, match="class Bare has no public method"):
        class_specs(type("Bare", (), {}), "own")


# ------------------------------------------------------------------- isolation


def test_nothing_leaks_between_instances():
    """Defaults of tools, of the constructor and of private helpers, and class containers."""
    texts = []
    for _ in range(3):
        env = started(task([], uid="x"))
        texts.append(run(env, ("add", {"title": "Emma"}), ("add", {"title": "Mansfield"}),
                         ("logged", {"title": "Mansfield"}), ("label", {"text": "new"})))
    assert texts[0] == texts[1] == texts[2] == [
        ('{"title": "Emma", "tags": ["new"]}', True),
        ('{"title": "Mansfield", "tags": ["new"]}', True),  # not ["new", "new"]
        ("1 in 2", True), ('["new"]', True)]
    assert Shelf.labels == [] and Shelf._cache == {} and Shelf().books == {}
    assert Shelf.add.__defaults__ == ([], 100)


def test_config_and_arguments_are_copied():
    some = task([("keep", {"parts": ["a"]})], config={"shelf": {"books": {"Emma": {"pages": 9}}}})
    before = json.dumps(some.to_json())
    first, second = started(some), started(some)
    run(first, ("add", {"title": "Persuasion"}), ("keep", {"parts": ["b"]}))
    assert run(second, ("weigh", {"title": "Persuasion"}))[0][1] is False
    assert replay(suite(), some).valid and json.dumps(some.to_json()) == before


# ------------------------------------------------------------------- calls


def test_results_as_text():
    env = started(task([], config={"shelf": {"books": {"Emma": {"pages": 9}}}}))
    assert run(env, ("weigh", {"title": "Emma", "unit": "lb", "share": 2}),
               ("label", {"text": "é"}), ("reset", {"secret": 1}), ("page", {"number": 3.0})) == [
        ("18.0", True), ('["é"]', True), ("null", True), ("int", True)]


@pytest.mark.parametrize("how, text", [
    ("deep", "maximum recursion depth exceeded"), ("exit", "bye"),
    ("cancel", "CancelledError"),
    ("mute", "_Mute"), ("object", "the tool's answer is not JSON data"), ("other", "'other'"),
    ("key", "the tool's answer is not JSON data"),
])
def test_any_failure_of_a_tool_is_a_result(how, text):
    ((said, ok),) = run(started(), ("fail", {"how": how}))
    assert not ok and said.startswith(f"Error: {text}") and "\n" not in said


def test_no_memory_is_the_processes_affair():
    """As a result it could be taken for what the gold calls answer."""
    with pytest.raises(MemoryError):
        run(started(), ("fail", {"how": "memory"}))


def test_an_error_object_is_not_ok_and_keeps_its_text():
    assert run(started(), ("fail", {"how": "error"})) == [('{"error": "no such book"}', False)]


@pytest.mark.parametrize("call, text", [
    (("_log", {"title": "x"}), "Error: there is no tool '_log'"),
    (("__init__", {}), "Error: there is no tool '__init__'"),
    (("books", {}), "Error: there is no tool 'books'"),
    ((None, {}), "Error: there is no tool 'NoneType'"),
    (("add", {"titel": "x"}), "Error: add: unknown argument 'titel', known: title, tags, pages"),
    (("add", {}), "Error: add: missing argument 'title'"),
    (("add", {"title": 3}), "Error: add: argument 'title' must be of type string"),
    (("add", {"title": "x", "pages": True}),
     "Error: add: argument 'pages' must be of type integer"),
    (("add", [1]), "Error: add: the arguments are not an object"),
])
def test_what_is_not_declared_does_not_run(call, text):
    env = started()
    assert run(env, call) == [(text, False)]
    assert env.world.state() == started().world.state()


def test_a_tool_that_is_not_visible_does_not_run():
    env = started(task([], tools=("label",)))
    assert run(env, ("add", {"title": "x"})) == [("Error: there is no tool 'add'", False)]


values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
                      lambda v: st.lists(v, max_size=3)
                      | st.dictionaries(st.text(max_size=5), v, max_size=3), max_leaves=8)


@given(st.sampled_from((*ALL, "", "__class__")),
       st.dictionaries(st.sampled_from(("title", "tags", "text", "parts", "how", "number", "unit")),
                       values, max_size=3))
def test_execute_never_raises(name, arguments):
    env = started()
    before = json.dumps(arguments)
    (result,) = env.execute([ToolCall(name, arguments)])
    assert isinstance(result.text, str) and json.dumps(arguments) == before


# ------------------------------------------------------------------- state and scores


def test_gold_passes_and_damage_does_not():
    some = task([("add", {"title": "Emma"}), ("label", {"text": "old"})],
                [("label", {"text": "b"})])
    made = suite((some,))
    assert replay(made, some).valid
    assert replay(made, some, silent=True).progress == 0.0
    assert [replay(made, some, drop=i).progress for i in range(3)] == [0.0, 0.0, 0.5]
    changed = [[[ToolCall("add", {"title": "Emma", "pages": 101})]], [[]]]
    assert play(made, some, changed).progress == 0.0
    assert play(made, some, gold_transcript(some)[:1]).valid is False


def test_numbers_compare_as_numbers_and_private_state_does_not_count():
    some = task([("reset", {"secret": 1}), ("add", {"title": "x", "pages": 65})])
    other = [[[ToolCall("reset", {"secret": 2}),
               ToolCall("add", {"title": "x", "pages": 65.0})]]]
    assert play(suite((some,)), some, other).valid


class Box:
    def __init__(self, size):
        self.size = size


class Boxes:
    def __init__(self):
        self.boxes, self.ring = [Box(1)], None

    def grow(self, by: int) -> str:
        """Grow the box."""
        self.boxes[0].size += by
        return "grown"

    def tie(self) -> str:
        """Make the state endless."""
        self.ring = self.boxes
        self.boxes.append(self.boxes)
        return "tied"


def test_objects_in_the_state_compare_by_their_attributes():
    made = ClassSuite("b", {"b": Boxes}, {"train": [ADD]}, held_out=())
    some = task([("grow", {"by": 1})], domains=("b",), config={}, tools=("grow", "tie"))
    assert replay(made, some).valid
    assert play(made, some, [[[ToolCall("grow", {"by": 2})]]]).outcomes[0].state_ok is False
    endless = dataclasses.replace(some, turns=(Turn("x", (ToolCall("tie", {}),), ("tie",)),))
    assert replay(made, endless).outcomes[0].state_ok is False  # and no RecursionError


def test_hints_and_scoring_options():
    made = suite(scoring=Scoring(empty_turn=EmptyTurn.ANY))
    hinted = made.make_env(ADD, hints=True)
    hinted.begin_turn()
    (result,) = hinted.execute([ToolCall("add", {"titel": "Emma"})])
    assert result.text.startswith("Error: add: unknown argument") and "'title'" in (
        result.text.partition("\nHint: ")[2])
    env = started(task([]), made)
    run(env, ("add", {"title": "x"}))
    assert env.end_turn("").passed


# ------------------------------------------------------------------- the suite


def test_files_or_lists_and_categories_take_turns(tmp_path):
    some = [task([("add", {"title": str(i)})], uid=str(i), category=category)
            for i, category in enumerate([Category.BASE, Category.BASE, Category.MISS_PARAM])]
    write_tasks(tmp_path / "train.jsonl", some)
    write_tools(tmp_path / "tools.jsonl", suite().tools(["shelf"])[:1])
    made = suite(tmp_path / "train.jsonl", tools=tmp_path / "tools.jsonl")
    assert [t.uid for t in made.split("train")] == ["0", "2", "1"]
    assert made.split_names == ("train",)
    assert [s.name for s in made.tools(["shelf"])] == ["add"]
    env = started(ADD, made)  # declared tools alone, whatever the class can do
    assert run(env, ("label", {"text": "x"})) == [("Error: there is no tool 'label'", False)]


def _tool(name="add", domain="shelf", required=("title",), **properties):
    return ToolSpec(name, "Adds.", {"type": "object", "required": list(required), "properties": {
        k: {"type": v} for k, v in ({"title": "string"} | properties).items()}}, domain)


@pytest.mark.parametrize("options, needle", [
    (dict(scoring=Scoring(mode=Mode.OFFICIAL)), "no official checker: use scoring mode train"),
    (dict(tools=[_tool("sub")]), "class Shelf has no such public method: add it or drop"),
    (dict(tools=[_tool("_log")]), "class Shelf has no such public method"),
    (dict(tools=[_tool(domain="attic")]), "domain 'attic', which suite mine has no class for"),
    (dict(tools=[_tool(colour="string")]), "parameter 'colour', which the method does not take"),
    (dict(tools=[_tool(required=())]), "needs parameter 'title', which its declaration does not"),
    (dict(tools=[_tool(colour="colour")]), "type 'colour' is not one of string"),
    (dict(tools=[_tool(), _tool()]), "tool 'add' is in domains shelf and shelf"),
    (dict(train=()), "split 'train' is empty"),
    (dict(held_out=("held_in",)), "no split 'held_in', which held_out names"),
    (dict(classes={}), "no tool class"),
    (dict(classes={"shelf": Shelf()}), "domain shelf has a Shelf in place of a class"),
    (dict(classes={"shelf": Shelf, "other": Shelf}), "tool 'add' is in domains shelf and other"),
    (dict(splits={"train": [ADD], "held_in": [ADD]}), "uid 't' is in split train and again in held_in"),
    (dict(train=[ADD, ADD]), "uid 't' is in split train and again in train"),
    (dict(splits={"train": [ADD], "held_in": [dataclasses.replace(ADD, uid="u")]},
          held_out=("held_in",)), "100% of held_in share a scenario with train"),
])
def test_a_suite_that_does_not_fit_is_one_clear_line(options, needle):
    classes = options.pop("classes", {"shelf": Shelf})
    splits = options.pop("splits", {"train": options.pop("train", [ADD])})
    with pytest.raises(ValueError) as error:
        ClassSuite("mine", classes, splits, **{"held_out": (), **options})
    assert needle in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("config, needle", [
    ({"shelf": {"boks": 1}}, "task t: Shelf(**initial_config['shelf']) raised TypeError"),
    ({"shelf": [1]}, "that is no object"),
    ({"attic": {}}, "unknown domain 'attic': suite mine has"),
])
def test_a_bad_initial_config_is_one_clear_line(config, needle):
    with pytest.raises(ValueError) as error:
        suite().make_env(task([], config=config))
    assert needle in str(error.value) and "\n" not in str(error.value)


def test_synthesis_says_what_to_do():
    made, rng = suite(), random.Random(0)
    for method, arguments in (("plan", (ADD, rng)), ("repair", (None, 0, "", rng)),
                              ("write", (None, (), rng)), ("augment", (ADD, "base", rng))):
        with pytest.raises(ValueError) as error:
            getattr(made, method)(*arguments)
        assert str(error.value) == "suite mine brings no planner: set synthesis_on=False"
    with pytest.raises(ValueError, match="unknown split 'warm': use one of train"):
        made.split("warm")
    assert made.wordings(ADD, 5) == (ADD,)


@pytest.mark.parametrize("category", list(Category))
def test_the_expert_passes_every_category(category):
    empty = Turn("something", (), ("label",))
    turns = (empty, Turn("", (ToolCall("add", {"title": "x"}),), ALL))
    some = dataclasses.replace(ADD, category=category, turns=turns)
    assert replay(suite(), some).valid
    assert replay(suite(), dataclasses.replace(some, turns=turns[:1])).valid
