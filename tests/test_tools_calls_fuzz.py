"""Hostile messages in every wire format, dispatched to real tools that note what is run."""

import dataclasses
import json
import random
import sys

import pytest

from rods_jax.text.compact import CompactFormat
from rods_jax.tools.bfcl_env import BFCLEnv
from rods_jax.tools.calls import (
    LIMITS, format_call_list, format_hermes, format_llama_json, parse_call_list, parse_hermes,
    parse_json_calls, parse_llama_json, parse_llama_pythonic)
from rods_jax.tools.env import UserTurn
from rods_jax.tools.schema import complaint
from rods_jax.tools.scoring import Mode, Scoring
from rods_jax.tools.toolbox import ToolboxSuite, lexicon
from rods_jax.types import Category, ParsedStep, Task, ToolCall, ToolResult, Turn

SUITE = ToolboxSuite()
TASK = next(t for t in SUITE.split("train") if t.category is Category.MISS_FUNC
            and set(t.domains) == {"bookings", "payments"})
TOOLS = SUITE.tools(TASK.domains)
DECLARED = {spec.name: tuple(spec.parameters["properties"]) for spec in TOOLS}
VISIBLE = TASK.turns[0].tools
HIDDEN = tuple(name for name in DECLARED if name not in VISIBLE)  # released in a later turn


class Spy:
    """Stands before a domain. Whatever method is taken from it and run is noted."""

    def __init__(self, domain, ran):
        object.__setattr__(self, "_held", (domain, ran))

    def __getattribute__(self, name):
        domain, ran = object.__getattribute__(self, "_held")
        value = getattr(domain, name)
        if not callable(value):
            return value

        def run(*args, **arguments):
            ran.append((name, args, arguments))
            return value(*args, **arguments)

        return run


class Watched:
    """The first turn of a task, and what its tools were made to do."""

    def __init__(self):
        self.env, self.ran = SUITE.make_env(TASK), []
        self.env.begin_turn()
        domains = self.env.world.domains
        for name in domains:
            domains[name] = Spy(domains[name], self.ran)

    def run(self, step):
        """Names of what was run, all of it asked for, visible and called as declared."""
        self.ran.clear()
        results = self.env.execute(step.calls)
        assert len(results) == len(step.calls)
        calls = iter(step.calls)
        for name, args, arguments in self.ran:
            assert name in VISIBLE and args == () and tuple(arguments) == DECLARED[name]
            assert any(c.name == name and c.arguments.keys() == arguments.keys() for c in calls)
        return [name for name, _, _ in self.ran]


PARSERS = {
    "hermes": parse_hermes,
    "hermes or bare": lambda text: parse_hermes(text, DECLARED),
    "bare": lambda text: parse_json_calls(text, DECLARED),
    "llama json": lambda text: parse_llama_json(text, DECLARED),
    "llama pythonic": lambda text: parse_llama_pythonic(text, TOOLS),
    "bfcl list": lambda text: parse_call_list(text, TOOLS),
}
WRITERS = {
    "hermes": format_hermes, "hermes or bare": format_hermes, "bare": format_llama_json,
    "llama json": format_llama_json, "llama pythonic": format_call_list,
    "bfcl list": format_call_list}

# ------------------------------------------------------------------------------ must reject

# `check_balance` is declared and takes nothing, `find_bill` is declared and takes a user.
CODE = (
    "__import__('os').system('x')", "importlib.import_module('os')", "open('x')", "globals()",
    "copy.copy(1)", "json.loads('1')", "(exit)()", "exit()", "quit.__call__()", "[exit][0]()",
    "ｅｘｉｔ()", "ｏｐｅｎ('x')", "().__class__.__bases__[0].__subclasses__()", "lambda: check_balance()",
    "(lambda: check_balance())()", "[check_balance() for x in (1,)]", "{x for x in (1,)}",
    "(x := check_balance())", "f'{check_balance()}'", "check_balance() if 1 else 2",
    "not check_balance()", "find_bill(*['x'])", "find_bill(**{'user': 'x'})", "9**9**9",
    "'a'*10**9", "check_balance", "check_balance.x", "check_balance()()",
    "check_balance();check_balance()", "check_balance()\ncheck_balance()", "b'x'", "1j", "...",
    "1e999", "-1e999", "9" * 5000, "0x" + "f" * 5000, "[" * 40 + "]" * 40,
    "[" * 3000 + "]" * 3000, "find_bill('\0')", "find_bill(user='x', user='y')",
    "find_bill(user='x', ｕser='y')", "_load_scenario({})", "find_bill(check_balance())",
    "find_bill(user=sort(ls()))", "payments.check_balance()", "Payments.check_balance()",
    "check_balance.__call__()", "getattr(check_balance, '__self__')", "find_bill(user=b'x')")
LIKE_NAMES = ("check_balance", "check_balance.x")
NAMES = (
    "check_balance.x",
    "exit", "open", "globals", "__import__", "quit.__call__", "_load_scenario", "__class__", "",
    "payments.check_balance", "Payments.check_balance", "ｃheck_balance", "check_balance ",
    "check_balance()", "check_balance\0", "check-balance", "Check_Balance", "run_tool", "prepare")
KEYS = ("a b", "user ", "user=1, x", "ｕser", "__class__", "self", "domain", "", "user\0", "class")


def json_texts(name, arguments_text):
    """A call as every format spells it that is JSON, where only the values may be broken."""
    for bag in ("arguments", "parameters"):
        text = f'{{"name":{json.dumps(name)},"{bag}":{arguments_text}}}'
        yield from (text, f"<tool_call>{text}</tool_call>", f"<|python_tag|>{text}<|eom_id|>",
                    f"```json\n{text}\n```")


def assert_rejected(text, allowed=()):
    """No parser finds more than the allowed calls, and no tool runs beside those. Hermes takes
    undeclared names for calls, which the environment then refuses."""
    for label, parse in PARSERS.items():
        step = parse(text)
        assert set(Watched().run(step)) <= set(allowed), (label, text)
        if not label.startswith("hermes"):
            assert {c.name for c in step.calls} <= set(allowed), (label, text)
        assert step.calls or step.errors or step.text, (label, text)


@pytest.mark.parametrize("code", CODE, ids=range(len(CODE)))
def test_code_is_rejected_wherever_it_stands(code):
    for text in (code, f"[{code}]", f"[{code}, {code}]", f"<|python_tag|>{code}<|eom_id|>",
                 f"<|python_tag|>[{code}]", f"<tool_call>{code}</tool_call>",
                 f"```python\n{code}\n```", f"[find_bill(user={code})]", f"[find_bill({code})]"):
        assert_rejected(text)
    assert_rejected(f"[check_balance(), {code}]", allowed=("check_balance",))
    for text in json_texts(code, "{}") if code not in LIKE_NAMES else ():
        assert_rejected(text)
        assert not any(parse(text).calls for parse in PARSERS.values())  # no name of a tool
    for arguments in (f'{{"user":{code}}}', code, json.dumps(code)):
        for text in json_texts("find_bill", arguments):
            assert_rejected(text)
            assert not any(parse(text).calls for parse in PARSERS.values())


@pytest.mark.parametrize("name", NAMES)
def test_names_that_are_no_declared_tool_run_nothing(name):
    for text in json_texts(name, "{}"):
        assert_rejected(text)
    # Python itself folds the wide letter of a name; what then runs is the declared tool.
    allowed = ("check_balance",) if name == "ｃheck_balance" else ()
    for text in (f"[{name}()]", f"<|python_tag|>[{name}()]"):
        if name not in ("check_balance ", "check_balance\0"):  # spaces are no part of it there
            assert_rejected(text, allowed)


@pytest.mark.parametrize("key", (*KEYS, *CODE), ids=range(len(KEYS) + len(CODE)))
def test_argument_names_that_are_not_declared_reach_no_tool(key):
    """The parsers take any key of a JSON object for data; the tool's schema refuses it."""
    parameters = next(s.parameters for s in TOOLS if s.name == "find_bill")
    for arguments in ({key: "@x"}, {"user": "@x", key: 1}):
        assert "unknown argument" in complaint(arguments, parameters)
        for text in json_texts("find_bill", json.dumps(arguments)):
            assert_rejected(text, allowed=("find_bill",))
            for parse in PARSERS.values():
                watched = Watched()
                assert watched.run(parse(text)) == []
    for text in (f"[find_bill({key}='@x')]", f"[find_bill(user='@x', {key}=1)]"):
        if key not in ("user ", "ｕser", "user=1, x"):  # what Python reads as declared keywords
            assert all(Watched().run(parse(text)) == [] for parse in PARSERS.values())


@pytest.mark.parametrize("label", PARSERS)
def test_code_in_a_string_argument_is_left_alone(label):
    for code in (*CODE, *NAMES, *KEYS, "run cd (x) then touch(y)", "hello (world)"):
        call = ToolCall("find_bill", {"user": code})
        assert PARSERS[label](WRITERS[label]([call])).calls == (call,)
    # And the watch does see a call that is run.
    text = WRITERS[label]([ToolCall("check_balance", {}), ToolCall("find_bill", {"user": "@x"})])
    assert Watched().run(PARSERS[label](text)) == ["check_balance", "find_bill"]


@pytest.mark.parametrize("mode", Mode)
def test_bfcl_tools_see_declared_arguments_only(mode):
    root = {"root": {"alex": {"type": "directory", "contents": {}}}}
    task = Task("multi_turn_base_900", ("GorillaFileSystem",), Category.BASE,
                {"GorillaFileSystem": root}, (Turn("", (), ("ls", "touch", "echo")),), "s")
    env = BFCLEnv(task, Scoring(mode))
    env.begin_turn()
    for key in (*KEYS, *CODE[:20]):
        text = format_hermes([ToolCall("touch", {"file_name": "x", key: 1})])
        result, = env.execute(parse_hermes(text).calls)
        assert not result.ok and "x" not in env.execute([ToolCall("ls", {})])[0].text
    content = "run cd (x) then touch(y); hello (world)"
    calls = [ToolCall("touch", {"file_name": "a"}),
             ToolCall("echo", {"content": content, "file_name": "a"})]
    env.execute(parse_hermes(format_hermes(calls)).calls)
    directory = env.world.sandbox.instance("GorillaFileSystem").root
    assert directory.contents["a"].content == content


# ------------------------------------------------------------------------------ generators

SURFACES = ("hd-2043", "bk-3781", "tr-2281", "@x", "pin-3314", "bl-1", "godu-city", "aug-23")
VALUES = (  # as JSON and as Python
    *((json.dumps(s), repr(s)) for s in SURFACES),
    ("12", "12"), ("355", "+355"), ("-7.5", "-7.5"), ('"gbp"', "'gbp'"), ("null", "None"),
    ("true", "True"), ('["a",{"b":1}]', "['a', {'b': 1}]"), ('"it\'s, \\"]}\\n"', "'it\\'s, \"]}'"))
FITTING = {"amount": (("12", "12"), ("355", "+355"), ('"7"', "'7'")),
           "currency": (('"gbp"', "'gbp'"), ('"eur"', '"eur"'), ('"x"', "'x'"))}
BROKEN = (
    "1e999", "NaN", "-Infinity", "9" * 400, "[" * 40 + "]" * 40, '"\\ud800"', "'\\ud800'", "f()",
    "{'x'}", "1j", "b''", '"\\d"', "[1,", "{", '{"a":1,"a":2}', "check_balance()", "x", "'\0'",
    '"</think>"', '"</tool_call>"', "'<tool_call>'", '"<|eot_id|>"', *CODE[:24])
PIECES = (
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "<|eot_id|>", "```",
    "<|eom_id|>", '{"name":"check_balance","arguments":{}}', "[check_balance()]", "{", "}", "[",
    "]", "(", ")", "'", '"', "'''", "\\", "\\u", "\0", "\ud800", "\n", ";", ",", "=", "*", "**",
    "#", "é", "ｅ", "None", "1e999", " ", '"name":"check_balance",', "lambda:", "exit()", *CODE[:24])
OTHER_NAMES = ("delete_file", "open_folder", *NAMES)
OTHER_KEYS = ("user", "amount", *KEYS)


class Maker:
    """Messages of a seed: valid ones, broken ones, rubbish. A third of them is left intact."""

    def __init__(self, seed):
        self.draw = random.Random(seed).random

    def pick(self, items):
        return items[int(self.draw() * len(items))]

    def name(self):
        chance = self.draw()
        return self.pick(VISIBLE if chance < 0.85 else HIDDEN if chance < 0.9 else OTHER_NAMES)

    def call(self, column):
        """(name, [(key, value text)]); column 0: values as JSON, 1: as Python."""
        name = self.name()
        pairs = [(key, self.pick(FITTING.get(key, VALUES))[column] if self.draw() < 0.93
                  else self.pick(BROKEN))
                 for key in DECLARED.get(name, ("user",)) if self.draw() < 0.97]
        if self.draw() < 0.06:
            pairs.append((self.pick(OTHER_KEYS), self.pick(VALUES)[column]))
        return name, pairs

    def json_object(self):
        name, pairs = self.call(0)
        bag = "arguments" if self.draw() < 0.5 else "parameters"
        inner = ",".join([f'"{key}":{value}' for key, value in pairs])
        return f'{{"name":"{name}","{bag}":{{{inner}}}}}'

    def python_call(self):
        name, pairs = self.call(1)
        if self.draw() < 0.2:
            return f"{name}({', '.join([value for _, value in pairs])})"
        return f"{name}({', '.join([f'{key}={value}' for key, value in pairs])})"

    def several(self, one, separator):
        return separator.join([one() for _ in range(1 + int(self.draw() * 2.5))])

    def hermes(self):
        blocks = self.several(self.json_object, "</tool_call>\n<tool_call>")
        return f"<tool_call>{blocks}</tool_call>"

    def llama_json(self):
        tag = "<|python_tag|>" if self.draw() < 0.3 else ""
        return tag + self.several(self.json_object, self.pick((";", "\n", "; "))) + self.ending()

    def llama_pythonic(self):
        tag = "<|python_tag|>" if self.draw() < 0.3 else ""
        return tag + self.bfcl_list() + self.ending()

    def bfcl_list(self):
        return f"[{self.several(self.python_call, ', ')}]"

    def ending(self):
        return self.pick(("", "", "<|eot_id|>", "<|eom_id|>", " OK."))

    def message(self, make):
        """At most some 60,000 characters, which is over the limit; one in 3000 is that long."""
        chance = self.draw()
        if chance < 0.05:
            return "".join([self.pick(PIECES) for _ in range(int(self.draw() * 20))])
        text = make(self)
        if chance < 0.37:
            return text
        for _ in range(1 + int(self.draw() * 2)):
            text = self.broken(text)
        if chance > 1 - 1 / 3000:
            text = text * (1 + int(self.draw() * 80_000 / (len(text) + 1)))
        return text[:60_000]

    def broken(self, text):
        at, way = int(self.draw() * len(text)), int(self.draw() * 8)
        if way == 0:
            return text[:at] + text[at + int(self.draw() * 20):]
        if way == 1:
            return text[:at]
        if way == 2:
            return text[:at] + text[at // 2:]
        if way == 3:
            return text[:at] + self.pick("{}[]()\"'\\,:;=*\0é1") + text[at + 1:]
        if way == 4:
            return text.replace('"', "'")
        if way == 5:
            return self.pick(("<think>{0}</think>{0}", "{0}</think>{0}", "Well. {0} Done.",
                              "```json\n{0}\n```", "<think>{0}")).replace("{0}", text)
        return text[:at] + self.pick(PIECES) + text[at:]


FORM = CompactFormat(SUITE.tools(SUITE.domains), lexicon(), n_slots=16)
N_WORDS = FORM.vocab_size


def compact_dialogue():
    """A dialogue in which the surfaces and two numbers have been seen."""
    dialogue = FORM.start(TASK, TOOLS)
    dialogue.prompt(UserTurn(0, " ".join((*SURFACES, "355", "12", "-7.5")), VISIBLE))
    return dialogue


class IdMaker(Maker):
    def __init__(self, seed):
        super().__init__(seed)
        first = FORM.first_slot
        self.values = [*range(first, first + len(SURFACES) + 3), FORM.vocabulary.index("gbp")]
        self.tools = {name: FORM.vocabulary.index(name) for name in FORM.specs}
        self.go, self.end = FORM.stop_ids
        self.separator = FORM.vocabulary.index(";")

    def ids(self):
        ids = []
        for _ in range(1 + int(self.draw() * 2.5)):
            name = self.name()
            name = name if name in self.tools else "open_folder"
            ids += [self.separator] * bool(ids) + [self.tools[name]]
            ids += [self.pick(self.values) for _ in FORM.specs[name].parameters["properties"]]
        for _ in range(int(self.draw() * 3.2)):
            at = int(self.draw() * (len(ids) + 1))
            other = int(self.draw() * (N_WORDS + 8)) - 4 if self.draw() < 0.9 else 10**9
            ids[at: at + int(self.draw() * 3)] = [other] * int(self.draw() * 3)
        chance = self.draw()
        if chance < 0.03:
            ids = [int(self.draw() * N_WORDS) for _ in range(int(self.draw() * 300))]
        return [*ids, *([self.go] if chance < 0.88 else [self.end] if chance < 0.95 else [])]


# ------------------------------------------------------------------------------ the property


@dataclasses.dataclass
class Tally:
    texts: int = 0
    with_calls: int = 0
    with_errors: int = 0
    plain: int = 0
    ran: int = 0
    longest: int = 0
    most_work: float = 0.0  # interpreter calls for each character or id


def work_of(parse, text):
    """Calls of Python and C functions while it parses: what no clock can disturb."""
    count = 0

    def tick(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(tick)
    try:
        parse(text)
    finally:
        sys.setprofile(None)
    return count


ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def examine(step, names):
    """The step is typed, its reasons are short, and what it holds can be stored and sent."""
    assert isinstance(step, ParsedStep) and type(step.text) is type(step.reasoning) is str
    assert len(step.calls) <= LIMITS.max_calls
    for reason in step.errors:
        assert reason and len(reason) <= 200
        reason.encode()
    for call in step.calls:
        assert names is None or call.name in names
        ENCODE([call.name, call.arguments]).encode()


def fuzz(make, parse, names, count):
    """Parses and runs `count` messages. `names`: the only ones a call may have."""
    tally = Tally()
    for i in range(count):
        if i % 500 == 0:
            watched = Watched()
        message = make()
        step = parse(message)
        examine(step, names)
        tally.ran += bool(step.calls) and bool(watched.run(step))
        tally.with_calls += bool(step.calls)
        tally.with_errors += bool(step.errors)
        tally.plain += not step.calls and not step.errors
        tally.longest = max(tally.longest, len(message))
        if i % 100 == 0:
            work = work_of(parse, message) / (len(message) + 20)
            tally.most_work = max(tally.most_work, work)
    tally.texts = count
    return tally


TEXT_FORMATS = {
    "hermes": (Maker.hermes, None), "llama json": (Maker.llama_json, DECLARED),
    "llama pythonic": (Maker.llama_pythonic, DECLARED), "bfcl list": (Maker.bfcl_list, DECLARED)}


def tally_of(label, count, seed):
    if label == "compact":
        return fuzz(IdMaker(seed).ids, compact_dialogue().parse, FORM.specs, count)
    make, names = TEXT_FORMATS[label]
    maker = Maker(seed)
    return fuzz(lambda: maker.message(make), PARSERS[label], names, count)


@pytest.mark.parametrize("label", [*TEXT_FORMATS, "compact"])
@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_messages_raise_nothing_and_run_declared_tools_only(label, count):
    tally = tally_of(label, count, seed=2)
    share = {f.name: getattr(tally, f.name) / tally.texts for f in dataclasses.fields(tally)}
    # All three outcomes are frequent, and tools do run.
    assert share["with_calls"] > 0.35 and share["with_errors"] > 0.25, tally
    assert share["plain"] > 0.01 and share["ran"] > 0.25, tally
    assert tally.longest <= 60_000 and tally.most_work < 12, tally
    if count == 100_000 and label != "compact":
        assert tally.longest > LIMITS.max_chars  # also some that are too long


def test_the_watch_notices_what_was_not_asked_for():
    watched = Watched()
    payments = watched.env.world.domains["payments"]
    for run in (payments.is_open, payments.check_balance):
        watched.env.world.call = lambda call, visible, run=run: ToolResult(str(run()), True)
        with pytest.raises(AssertionError):
            watched.run(ParsedStep(calls=(ToolCall("find_bill", {"user": "@x"}),)))
