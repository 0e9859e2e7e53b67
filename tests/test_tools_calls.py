"""Parsers of tool calls against reported inputs and their right values."""

import json
import math
import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rods_jax.tools.calls import (
    ParsedText, coerce, format_call_list, format_hermes, parse_call_list, parse_hermes,
    parse_json_calls)
from rods_jax.tools.literals import Limits
from rods_jax.types import ToolCall, ToolSpec

DECLARED = {"A", "f", "ls", "q", "write"}


def spec(name, *keys):
    return ToolSpec(name, "", {"type": "object", "properties": {k: {} for k in keys}}, "d")


TOOLS = (spec("write", "path", "content"), spec("ls"), spec("A"), spec("q", "k"),
         spec("math.mean", "numbers"))


def block(name, arguments_text):
    return '<tool_call>{"name":"%s","arguments":%s}</tool_call>' % (name, arguments_text)


def only(step):
    assert step.errors == () and len(step.calls) == 1, step
    return step.calls[0].name, dict(step.calls[0].arguments)


# ------------------------------------------------------------------------------ reasoning


A = block("A", "{}")


@pytest.mark.parametrize("text, reasoning", [
    (f"<think>maybe {A}</think>{A}", f"maybe {A}"),
    (f"maybe {A}</think>{A}", f"maybe {A}"),  # the prompt opened the block
    (f"Hm. <think>{A} no</think> {A}", f"{A} no"),
    (f"<think>a</think>\n<think>{A}</think>{A}", f"a\n{A}"),
])
def test_a_call_drafted_while_thinking_is_no_call(text, reasoning):
    step = parse_hermes(text)
    assert only(step) == ("A", {}) and step.reasoning == reasoning
    listed = parse_call_list("<think>maybe [A()]</think>[A()]", TOOLS)
    assert only(listed) == ("A", {}) and listed.reasoning == "maybe [A()]"
    assert len(parse_call_list("[A()] no</think>[ls(), ls()]", TOOLS).calls) == 2


def test_reasoning_that_never_ends_is_truncated():
    for step in (parse_hermes(f"<think>{A}"), parse_call_list("<think>[A()]", TOOLS)):
        assert step.calls == () and "truncated" in step.errors[0] and "A" in step.reasoning


def test_a_quoted_end_of_thinking_stays_in_its_argument():
    assert only(parse_hermes(block("q", '{"k":"</think>"}'))) == ("q", {"k": "</think>"})
    assert only(parse_call_list("[q(k='</think>')]", TOOLS)) == ("q", {"k": "</think>"})


# ------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize("bag", [
    r'"arguments":"{\"k\":\"v\"}"', r'"parameters":{"k":"v"}', '"arguments":{"k":"v"}'])
def test_every_kind_of_argument_bag_is_read(bag):
    text = '{"name":"q",%s}' % bag
    assert only(parse_hermes(f"<tool_call>{text}</tool_call>")) == ("q", {"k": "v"})
    assert only(parse_hermes(text, DECLARED)) == ("q", {"k": "v"})


def test_a_name_alone_is_no_call():
    step = parse_hermes('{"name":"Alice"}', {*DECLARED, "Alice"})
    assert (step.calls, step.errors, step.text) == ((), (), '{"name":"Alice"}')
    step = parse_hermes('<tool_call>{"name":"ls"}</tool_call>')
    assert step.calls == () and "needs arguments" in step.errors[0]
    both = '<tool_call>{"name":"ls","arguments":{},"parameters":{"a":1}}</tool_call>'
    assert "given once" in parse_hermes(both).errors[0]


@pytest.mark.parametrize("arguments", [
    '"{\\"a\\": 1,"', '{"a": 1,', r'"{\"p\":\"\\d+\"}"', r'{"p":"\d+"}', "[1,2]", '"[1,2]"', "7",
    '"7"', "null", "true", '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', '{"a":1,"a":2}',
    '{"a": %s}' % ("9" * 5000), '{"a": "\\ud800"}', "{'a': '\\ud83d\\ude00'}", "{'x'}", "{'x': 1j}",
    "{'x': b''}", "{1: 2}", "{**{}}", "{'a': f()}", "{'a': 9**9}", "{'a': 1, 'a': 2}",
    '{"a": %s1%s}' % ("[" * 100, "]" * 100), '{"a": %s}' % ("[" * 20_000)])
def test_arguments_that_cannot_be_read_run_nothing(arguments):
    step = parse_hermes(block("q", arguments) + A)
    assert [c.name for c in step.calls] in ([], ["A"]) and len(step.errors) >= 1


def test_empty_argument_text_means_no_arguments():
    assert only(parse_hermes(block("q", '""'))) == ("q", {})
    assert only(parse_hermes(block("q", '" \\n"'))) == ("q", {})


def test_python_literals_keep_their_meaning():
    step = parse_hermes("<tool_call>{'name': 'q', 'arguments': {'v': None, 's': 'None', 'ok': "
                        "True, 't': (1, -2.5), 'x': '</tool_call>'}}</tool_call>")
    assert only(step) == ("q", {"v": None, "s": "None", "ok": True, "t": [1, -2.5],
                                "x": "</tool_call>"})
    text = json.dumps({"name": "q", "arguments": "{'v': None, 's': 'None', 'ok': True}"})
    assert only(parse_hermes(f"<tool_call>{text}</tool_call>")) == (
        "q", {"v": None, "s": "None", "ok": True})
    listed = parse_call_list("[q(k={'v': None, 's': 'None', 'ok': True})]", TOOLS)
    assert only(listed) == ("q", {"k": {"v": None, "s": "None", "ok": True}})


def test_large_integers_stay_exact():
    big = 1234567890123456789
    assert only(parse_hermes(block("q", '{"k":%d}' % big)))[1]["k"] == big
    assert only(parse_call_list(f"[q(k={big})]", TOOLS))[1]["k"] == big
    assert only(parse_hermes(block("q", '{"k":"%d"}' % big)))[1]["k"] == str(big)


def test_coerce_reads_digits_exactly_and_nothing_else():
    schema = {"properties": {"id": {"type": "integer"}, "x": {"type": "number"},
                             "s": {"type": "string"}}}
    given_ = {"id": "1234567890123456789", "x": "2.5", "s": "7", "other": "8"}
    assert coerce(given_, schema) == {
        "id": 1234567890123456789, "x": 2.5, "s": "7", "other": "8"}
    for odd in ("2.5", "1e3", "", "x", " 7", "NaN", "1" * 400):
        assert coerce({"id": odd}, schema) == {"id": odd}
    for odd in ("0.10", "1e999", "NaN", "2.5x", "0.12345678901234567890"):
        assert coerce({"x": odd}, schema) == {"x": odd}


# ------------------------------------------------------------------------------ blocks


def test_tags_quoted_inside_an_argument_end_nothing():
    text = "finish with </tool_call> and <tool_call>{}"
    assert only(parse_hermes(block("write", json.dumps({"text": text})))) == (
        "write", {"text": text})


def test_a_complete_call_without_closer_counts_and_is_flagged():
    step = parse_hermes('<tool_call>{"name":"ls","arguments":{}}')
    assert only(step) == ("ls", {}) and "unclosed" in step.notes[0]
    step = parse_hermes('<tool_call>{"name":"ls","arguments":{}}\n' + A)
    assert [c.name for c in step.calls] == ["ls", "A"] and "unclosed" in step.notes[0]
    step = parse_call_list("[ls()", TOOLS)
    assert only(step) == ("ls", {}) and "unclosed" in step.notes[0]
    assert parse_hermes(A).notes == () == parse_call_list("[A()]", TOOLS).notes


@pytest.mark.parametrize("cut", [
    '<tool_call>{"name":"ls","argu', "<tool_call>", '{"name":"ls","arguments":{"a":'])
def test_a_call_cut_off_is_truncated(cut):
    step = parse_hermes(cut, DECLARED)
    assert step.calls == () and "truncated" in step.errors[0]


@pytest.mark.parametrize("cut", ["[ls(", "[ls(), q(k='a", "[q(k=[1, 2", "[q(k={'a': 1}"])
def test_a_list_cut_off_is_truncated(cut):
    step = parse_call_list(cut, TOOLS)
    assert step.calls == () and "truncated" in step.errors[0]


def test_one_bad_block_does_not_hide_the_others():
    step = parse_hermes(f"Look: {A}<tool_call>oops</tool_call> and {A} <tool_call>{{")
    assert [c.name for c in step.calls] == ["A", "A"] and len(step.errors) == 2
    assert step.text.startswith("Look:") and "oops" not in step.text
    step = parse_hermes('<tool_call>{"name":"A","arguments":{}}}</tool_call>')
    assert step.calls == () and "text follows" in step.errors[0]


# ------------------------------------------------------------------------------ bare JSON


def test_nested_objects_and_prose_around_them():
    text = '{"name":"f","parameters":{"a":{"b":{"c":1}}}}'
    assert only(parse_json_calls(text, DECLARED)) == ("f", {"a": {"b": {"c": 1}}})
    step = parse_json_calls('{"name":"f","parameters":{"q":"x"}} I used {tool} here', DECLARED)
    assert only(step) == ("f", {"q": "x"}) and step.text == "I used {tool} here"


@pytest.mark.parametrize("separator", [";", "\n", "; ", "", " and "])
def test_several_objects_keep_their_order(separator):
    one, two = ('{"name":"%s","parameters":{"q":"x"}}' % n for n in ("f", "q"))
    assert [c.name for c in parse_json_calls(one + separator + two, DECLARED).calls] == ["f", "q"]


def test_untagged_json_counts_only_for_declared_tools_and_only_when_asked():
    text = '```json\n{"name":"ls","arguments":{}}\n```'
    for _ in range(3):
        assert only(parse_hermes(text, DECLARED)) == ("ls", {})
        assert parse_hermes(text, DECLARED).text == ""
        for step in (parse_hermes(text), parse_hermes(text, {"other"})):
            assert (step.calls, step.errors, step.text) == ((), (), text)
    assert parse_hermes('{"name":"ls","arguments":7}', DECLARED).errors


def test_tagged_calls_leave_json_in_prose_alone():
    step = parse_hermes('{"name":"ls","arguments":{}} ' + A, DECLARED)
    assert [c.name for c in step.calls] == ["A"]


# ------------------------------------------------------------------------------ call list


def test_commas_brackets_and_quotes_inside_strings():
    text = "[write(path='a/h.py', content='# Hi, world (a=1)')]"
    assert only(parse_call_list(text, TOOLS)) == (
        "write", {"path": "a/h.py", "content": "# Hi, world (a=1)"})
    text = r"""[write('it\'s ]', content="say \"hi\" [(")]"""
    assert only(parse_call_list(text, TOOLS)) == (
        "write", {"path": "it's ]", "content": 'say "hi" [('})
    assert only(parse_call_list(r"[q('\d+')]", TOOLS)) == ("q", {"k": r"\d+"})


def test_forms_of_a_list():
    assert only(parse_call_list("ls()", TOOLS)) == ("ls", {})
    assert only(parse_call_list("```python\n[ls()]\n```", TOOLS)) == ("ls", {})
    assert only(parse_call_list("[math.mean(numbers=[1, -2, +3.5])]", TOOLS)) == (
        "math.mean", {"numbers": [1, -2, 3.5]})
    step = parse_call_list("[ls()] I listed {it}", TOOLS)
    assert only(step) == ("ls", {}) and step.text == "I listed {it}"
    assert [c.name for c in parse_call_list("[ls(), q('a')]", TOOLS).calls] == ["ls", "q"]
    for text in ("", "All done.", "[note] done", "I called [ls()]"):
        assert parse_call_list(text, TOOLS) == ParsedText(text=text)
    assert parse_call_list("[]", TOOLS) == ParsedText()
    # Python folds wide letters; the name is checked after that.
    assert only(parse_call_list("[ｌｓ()]", TOOLS)) == ("ls", {})


@pytest.mark.parametrize("text", [
    "[__import__('os').system('x')]", "[importlib.import_module('os')]", "[open('x')]",
    "[globals()]", "[copy.copy(1)]", "[json.loads('1')]", "[(exit)()]", "[quit.__call__()]",
    "[exit][0]()", "[().__class__]", "[ls.__class__()]", "[lambda: ls()]",
    "[ls() for x in y]", "[q(x := 1)]", "[q(f'{ls()}')]", "[q(1 if 2 else 3)]", "[q(not 1)]",
    "[q(*[1])]", "[q(**{'k': 1})]", "[q(9**9**9)]", "[q('a'*10**9)]", "[q(k)]", "[q(ls.x)]",
    "[q(ls())]", "[ls()()]", "[ls();ls()]", "[ls()\nls()]", "[q(b'x')]", "[q(1j)]", "[q(...)]",
    "[q(1e999)]", "[q(-1e999)]", "[q(%s)]" % ("9" * 5000), "[q(%s)]" % ("9" * 400),
    "[q(%s)]" % ("[" * 3000 + "]" * 3000), "[q(%s1)]" % ("-" * 9000),
    "[q(a%s)]" % (".b" * 9000), "[q('\0')]", "[q(k=1, k=2)]", "[q(1, k=2)]", "[q(1, 2)]",
    "[_load_scenario({})]", "[q({'x'})]", "[q({1: 2})]", "[q(-True)]", "[q('\\ud800')]",
    "[d.ls()]", "[q(%s)]" % ("[" * 40 + "]" * 40)])
def test_what_is_no_declared_call_with_literals_is_refused(text):
    step = parse_call_list(text, TOOLS)
    assert step.calls == () and (step.errors or step.text)


def test_int_and_text_limits():
    assert "characters" in parse_hermes("x" * 60_000).errors[0]
    assert "characters" in parse_call_list("x" * 60_000, TOOLS).errors[0]
    step = parse_hermes(A * 65)
    assert step.calls == () and "over 64 calls" in step.errors[-1]
    assert len(parse_hermes(A * 64).calls) == 64
    assert parse_hermes(A * 3, limits=Limits(max_calls=2)).calls == ()


# ------------------------------------------------------------------------------ properties

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8) | st.sampled_from(["</tool_call>", "<think>", "</think>", "]", "'"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=8)
CALLS = st.lists(
    st.builds(ToolCall, st.sampled_from(["write", "math.mean", "ls"]),
              st.dictionaries(st.sampled_from(["path", "content", "x_1"]), JSON, max_size=3)),
    min_size=1, max_size=3)


@settings(max_examples=100, deadline=None)
@given(CALLS)
def test_written_calls_read_back(calls):
    for step in (parse_hermes(format_hermes(calls)),
                 parse_call_list(format_call_list(calls), TOOLS)):
        assert step.errors == () and step.calls == tuple(calls)
        assert json.dumps([c.arguments for c in step.calls]) == json.dumps(
            [c.arguments for c in calls])  # 1, 1.0 and True apart


def test_writing_refuses_what_cannot_be_read_back():
    with pytest.raises(ValueError, match="no keyword name"):
        format_call_list([ToolCall("ls", {"a b": 1})])
    with pytest.raises(ValueError, match="no keyword name"):
        format_call_list([ToolCall("ls", {"class": 1})])
    with pytest.raises(ValueError, match="JSON compliant"):
        format_hermes([ToolCall("ls", {"a": math.inf})])
    with pytest.raises(ValueError, match="JSON compliant"):
        format_call_list([ToolCall("ls", {"a": math.nan})])


PIECES = ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name":"ls","arguments":', "{",
          "}", "[", "]", "(", ")", "'", '"', "\\", "\\u", "ls", "q(k=", ",", "1", "-", "None", "```",
          "\n", ";", "é", "\ud800", "\0", "*", "**", ":", "lambda", "1e999", " "]


def test_random_garbage_never_raises():
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(25)))
        for head in ("", "[ls(", "<tool_call>"):
            for step in (parse_hermes(head + text, DECLARED),
                         parse_call_list(head + text, TOOLS)):
                assert isinstance(step, ParsedText)


def test_hostile_texts_cost_little_work():
    """Work is bounded by counting interpreter calls, not by a clock."""
    hostile = ["<tool_call>" * 4500, "{" * 50_000, '{"a":' * 9000, "</think>" * 6000,
               "<tool_call>{'a':" * 3000 + "</tool_call>" * 500, "[q('" + "\\" * 49_000,
               "[q(" * 15_000, "['''" * 9000, '{"name":"q","arguments":"' * 1700]
    for text in hostile:
        count = 0

        def tick(frame, event, arg):
            nonlocal count
            count += 1

        sys.setprofile(tick)
        try:
            parse_hermes(text, DECLARED)
            parse_call_list(text, TOOLS)
        finally:
            sys.setprofile(None)
        assert count < 200_000, text[:20]
