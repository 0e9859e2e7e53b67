"""Parsers of tool calls against reported inputs and their right values."""

import json
import math
import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rods_jax.tools.calls import (
    Limits, ParsedText, coerce, format_call, format_call_list, format_hermes, format_llama_json,
    parse_call_list, parse_hermes, parse_json_calls, parse_llama_json, parse_llama_pythonic)
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


@pytest.mark.parametrize("shape, reasoning", [
    ("<think>maybe {0}</think>{1}", "maybe {0}"), ("maybe {0}</think>{1}", "maybe {0}"),
    ("{0} no</think>{1}", "{0} no"), ("Hm. <think>{0} no</think> {1}", "{0} no"),
    ("<think>a</think>\n<think>{0}</think>{1}", "a\n{0}"), ("a</think>{0}</think>{1}", "a\n{0}")])
def test_reasoning_is_cut_off_in_every_form(shape, reasoning):
    bare, listed = '{"name":"%s","parameters":{}}', "[%s()]"
    for parse, call, tools in (
            (parse_json_calls, bare, DECLARED), (parse_hermes, bare, DECLARED),
            (parse_llama_json, bare, DECLARED), (parse_call_list, listed, TOOLS),
            (parse_llama_pythonic, listed, TOOLS)):
        step = parse(shape.format(call % "ls", call % "A"), tools)
        assert only(step) == ("A", {}), parse
        assert step.reasoning == reasoning.format(call % "ls")


def test_reasoning_that_never_ends_is_truncated():
    for step in (parse_hermes(f"<think>{A}"), parse_call_list("<think>[A()]", TOOLS),
                 parse_llama_json('<think>{"name":"A","parameters":{}}', DECLARED)):
        assert step.calls == () and "truncated" in step.errors[0] and "A" in step.reasoning


def test_a_quoted_end_of_thinking_stays_in_its_argument():
    assert only(parse_hermes(block("q", '{"k":"</think>"}'))) == ("q", {"k": "</think>"})
    for text in ("[q(k='</think>')]", "q(k='</think>')", "```\n[q(k='</think>')]\n```"):
        assert only(parse_call_list(text, TOOLS)) == ("q", {"k": "</think>"})
    bare = '{"name":"q","parameters":{"k":"<think></think>"}}'
    for text in (bare, f"```json\n{bare}\n```", f"<|python_tag|>{bare}"):
        assert only(parse_llama_json(text, DECLARED)) == ("q", {"k": "<think></think>"})
    assert only(parse_hermes(bare, DECLARED)) == ("q", {"k": "<think></think>"})


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


@pytest.mark.parametrize("outer", [
    '{"name":"other","parameters":{"a":%s,"b":oops}}', '{"b":oops,"a":%s}', '{"a":[%s',
    "{'name':'other','arguments':{'a':%s,'b':f()}}", '{"a":%s,"a":1}', '{"a":NaN,"b":%s}'])
def test_what_stands_inside_an_unreadable_object_is_no_call(outer):
    inner = '{"name":"ls","arguments":{}}'
    for parse in (parse_json_calls, parse_hermes, parse_llama_json):
        assert parse(outer % inner, DECLARED).calls == ()
        step = parse((outer % "1") + inner, DECLARED)
        assert len(step.calls) == (0 if outer.endswith("%s") else 1)


@pytest.mark.parametrize("bag, reason", [
    ('{"a":NaN}', "NaN"), ('{"a":1,"a":2}', "same key twice"), ('{"a":1e999}', "too large"),
    ('{"a":"\\d"}', "not JSON"), ('{"a":f()}', "Call is not a literal"), ('{"a":', "truncated")])
def test_the_reason_names_what_is_wrong(bag, reason):
    text = '{"type":"function","name":"q","parameters":%s}' % bag
    for parse in (parse_json_calls, parse_hermes, parse_llama_json):
        step = parse(text, DECLARED)
        assert step.calls == () and len(step.errors) == 1 and reason in step.errors[0]


def test_bare_objects_may_be_python_literals():
    text = "{'name': 'q', 'parameters': {'v': None, 's': 'None', 'ok': True}}"
    assert only(parse_json_calls(text, DECLARED)) == ("q", {"v": None, "s": "None", "ok": True})


def test_tagged_calls_leave_json_in_prose_alone():
    step = parse_hermes('{"name":"ls","arguments":{}} ' + A, DECLARED)
    assert [c.name for c in step.calls] == ["A"]


# ------------------------------------------------------------------------------ Llama

F = '{"name":"f","parameters":{"q":"x"}}'
Q = '{"name":"q","parameters":{"k":"<|eot_id|>"}}'


@pytest.mark.parametrize("start", ["", "<|python_tag|>", " <|python_tag|>\n"])
@pytest.mark.parametrize("end", ["", "<|eot_id|>", "<|eom_id|>", "\n<|eom_id|> <|eot_id|>\n"])
def test_llama_forms_with_and_without_their_tokens(start, end):
    quoted = ToolCall("q", {"k": "<|eot_id|>"})
    for separator in (";", "\n", "; ", ";\n;"):
        step = parse_llama_json(start + F + separator + Q + end, DECLARED)
        assert step == ParsedText(calls=(ToolCall("f", {"q": "x"}), quoted))
    step = parse_llama_pythonic(start + "[ls(), q(k='<|eot_id|>')]" + end, TOOLS)
    assert step == ParsedText(calls=(ToolCall("ls", {}), quoted))
    for parse, tools in ((parse_llama_json, DECLARED), (parse_llama_pythonic, TOOLS)):
        assert parse("All done." + end, tools) == ParsedText(text="All done.")


def test_llama_calls_of_other_tools_are_errors_where_a_call_is_meant():
    other = '{"name":"rm","parameters":{}}'
    for text in (other, f"{F};{other}", f"<|python_tag|>{other}", f"[{other}]",
                 f"<|python_tag|>Well: {other}"):
        step = parse_llama_json(text, DECLARED)
        assert step.errors == ("'rm' is not a declared tool",)
        assert [c.name for c in step.calls] == (["f"] if F in text else [])
    assert parse_llama_json(f"Sure: {other}", DECLARED) == ParsedText(text=f"Sure: {other}")
    assert parse_llama_json('{"name":"rm"}', DECLARED) == ParsedText(text='{"name":"rm"}')


def test_llama_tag_without_a_call_is_an_error():
    for text in ("<|python_tag|>", "<|python_tag|>import os", "<|python_tag|>[]<|eom_id|>"):
        for step in (parse_llama_json(text, DECLARED), parse_llama_pythonic(text, TOOLS)):
            assert step.calls == () and "no call follows" in step.errors[0]
    step = parse_llama_pythonic('<|python_tag|>brave_search.call(query="x")', TOOLS)
    assert step.errors == ("'brave_search.call' is not a declared tool",)


# ------------------------------------------------------------------------------ call list


def test_text_that_looks_like_calls_inside_a_string_is_left_alone():
    content = "run cd (x) then touch(y); hello (world)"
    for text in (f"[write(content='{content}', path='a.txt')]", f"write('a.txt', '{content}')"):
        assert only(parse_call_list(text, TOOLS)) == (
            "write", {"content": content, "path": "a.txt"})


def test_a_fenced_list_keeps_odd_line_ends_in_its_strings():
    text = "```python\n[q(k='''a\u2028b\x0cc''')]\n```"
    assert only(parse_call_list(text, TOOLS)) == ("q", {"k": "a\u2028b\x0cc"})


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
    assert "'k' twice" in parse_call_list("[q(k=1, ｋ=2)]", TOOLS).errors[0]


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
    many = '{"name":"ls","parameters":{}}\n' * 65
    for step in (parse_llama_json(many, DECLARED), parse_llama_json(many[:-2], DECLARED),
                 parse_call_list("[" + "ls()," * 65 + "]", TOOLS)):
        assert step.calls == () and step.errors == ("over 64 calls in one message",)


def test_names_are_names_and_reasons_are_short():
    for name in ("ls()", "a b", "", ".ls", "a..b", "ls\n", "l\0s", "\ud800", "x" * 201, "7"):
        step = parse_hermes('<tool_call>%s</tool_call>' % json.dumps(
            {"name": name, "arguments": {}}))
        assert step.calls == () and 0 < len(step.errors[0].encode()) <= 250
    for name in ("ls", "Files.ls", "get-weather", "_x"):
        assert only(parse_hermes(block(name, "{}"))) == (name, {})
    assert "name of over 200" in parse_hermes(block("q", '{"%s":1}' % ("k" * 201))).errors[0]
    for text in ("[%s()]" % ("x" * 40_000), "[q(%s=1, %s=1)]" % (("x" * 20_000,) * 2),
                 "[q({'%s': 1, '%s': 1})]" % (("x" * 20_000,) * 2)):
        assert len(parse_call_list(text, TOOLS).errors[0]) <= 200


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
    names = {spec.name for spec in TOOLS}
    bare, listed = format_llama_json(calls), format_call_list(calls)
    for step in (parse_hermes(format_hermes(calls)),
                 parse_hermes("\n".join(map(format_call, calls)), names),
                 parse_llama_json(bare, names),
                 parse_llama_json(f"<|python_tag|>{bare}<|eom_id|>", names),
                 parse_call_list(listed, TOOLS), parse_llama_pythonic(listed, TOOLS),
                 parse_llama_pythonic(f"<|python_tag|>{listed}<|eot_id|>", TOOLS)):
        assert step.errors == () and step.calls == tuple(calls)
        assert json.dumps([c.arguments for c in step.calls]) == json.dumps(
            [c.arguments for c in calls])  # 1, 1.0 and True apart


def test_writing_refuses_what_cannot_be_read_back():
    with pytest.raises(ValueError, match="no keyword name"):
        format_call_list([ToolCall("ls", {"a b": 1})])
    with pytest.raises(ValueError, match="no keyword name"):
        format_call_list([ToolCall("ls", {"class": 1})])
    with pytest.raises(ValueError, match="no keyword name"):
        format_call_list([ToolCall("ls", {"ｋ": 1})])  # would come back as k
    for name in ("ｌｓ", "get-weather", "class", "a.if"):
        with pytest.raises(ValueError, match="no name in Python"):
            format_call_list([ToolCall(name, {})])
    deep = json.loads("[" * 40 + "]" * 40)
    for write in (format_hermes, format_call_list, format_llama_json):
        for value in (math.inf, math.nan):
            with pytest.raises(ValueError, match="JSON compliant"):
                write([ToolCall("ls", {"a": value})])
        for name, value in (("ls", {1}), ("ls", deep), ("ls", "\ud800"), ("a b", 1)):
            with pytest.raises(ValueError, match="cannot be written"):
                write([ToolCall(name, {"a": value})])


PIECES = ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name":"ls","arguments":', "{",
          "}", "[", "]", "(", ")", "'", '"', "\\", "\\u", "ls", "q(k=", ",", "1", "-", "None",
          "```", "\n", ";", "é", "\ud800", "\0", "*", "**", ":", "lambda", "1e999", " "]


def test_random_garbage_never_raises():
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(25)))
        for head in ("", "[ls(", "<tool_call>"):
            for step in (parse_hermes(head + text, DECLARED),
                         parse_call_list(head + text, TOOLS)):
                assert isinstance(step, ParsedText)


def test_a_string_that_never_ends_ends_the_scan():
    """Read as '' and a lone quote, each of many would be looked for up to the end of the text."""
    for text in ("[q('''x'\\)]", '[q("""x"\\)]', "[q('x)]", '[q("x)]'):
        assert parse_call_list(text, TOOLS).errors == ("truncated: a call is cut off",)


def test_hostile_texts_cost_little_work():
    """Work is bounded by counting interpreter calls, not by a clock."""
    hostile = ["<tool_call>" * 4500, "{" * 50_000, '{"a":' * 9000, "</think>" * 6000,
               "<tool_call>{'a':" * 3000 + "</tool_call>" * 500, "[q('" + "\\" * 49_000,
               "[q(" * 15_000, "['''" * 9000, '{"]' * 16_000, "<|eot_id|>" * 5000,
               '{"name":"q","parameters":' * 1900, "</think>{'" * 5000,
               '{"name":"q","arguments":"' * 1700]
    for text in hostile:
        count = 0

        def tick(frame, event, arg):
            nonlocal count
            count += 1

        sys.setprofile(tick)
        try:
            parse_hermes(text, DECLARED)
            parse_llama_json(text, DECLARED)
            parse_call_list(text, TOOLS)
            parse_llama_pythonic(text, TOOLS)
        finally:
            sys.setprofile(None)
        assert count < 10 * len(text), text[:20]  # of four parsers together
