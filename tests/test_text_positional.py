"""The wire form of calls: round trips for whatever fits a schema, reasons for the rest."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rods_jax.text.positional import MAX_DEPTH, Mark, decode_calls, encode_calls
from rods_jax.types import ToolCall, ToolSpec

TEXT = st.text(max_size=12) | st.sampled_from(
    ["", " ", "a b", "a  b", " a", "12", "true", "null", ";", '"', "[", "_", "<go>", "tab\tword"])
NUMBER = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
ANY = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6)
OF_TYPE = {
    "string": TEXT, "integer": st.integers(), "number": NUMBER, "boolean": st.booleans(),
    "null": st.none(), "array": st.lists(ANY, max_size=3),
    "object": st.dictionaries(TEXT, ANY, max_size=3),
}


@st.composite
def specs_and_calls(draw):
    specs, calls = {}, []
    for i in range(draw(st.integers(1, 3))):
        properties, required, arguments = {}, [], {}
        for j in range(draw(st.integers(0, 4))):
            kinds = draw(st.lists(st.sampled_from(sorted(OF_TYPE)), max_size=2, unique=True))
            shape = draw(st.sampled_from(["one", "many", "none"])) if kinds else "none"
            kinds = kinds[:1] if shape == "one" else kinds
            properties[f"p{j}"] = {} if shape == "none" else {
                "type": kinds[0] if shape == "one" else kinds}
            value = draw(ANY if shape == "none" else st.one_of(*(OF_TYPE[k] for k in kinds)))
            if draw(st.booleans()):
                required.append(f"p{j}")
                arguments[f"p{j}"] = value
            elif draw(st.booleans()):
                arguments[f"p{j}"] = value
        name = f"tool{i}"
        specs[name] = ToolSpec(name, "", {"type": "object", "properties": properties,
                                          "required": required}, "d")
        calls.append(ToolCall(name, arguments))
    return specs, tuple(calls)


def same(a, b):
    """Equal in value and in kind: True is not 1, and 1 is not 1.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b


@settings(max_examples=150, deadline=None)
@given(specs_and_calls())
def test_decode_inverts_encode(case):
    specs, calls = case
    read, errors = decode_calls(encode_calls(calls, specs), specs)
    assert errors == ()
    assert [c.name for c in read] == [c.name for c in calls]
    assert all(same(dict(a.arguments), dict(b.arguments))
               for a, b in zip(read, calls, strict=True))


PAY = ToolSpec("pay", "", {"type": "object", "properties": {
    "to": {"type": "string"}, "amount": {"type": "number"}, "times": {"type": "integer"},
    "now": {"type": "boolean"}}, "required": ["to", "amount"]}, "bank")
TOOLS = {"pay": PAY, "stop": ToolSpec("stop", "", {"type": "object", "properties": {}}, "bank")}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(list(Mark)) | st.sampled_from(["pay", "stop", "x", "1", "true"]),
                max_size=20))
def test_any_atoms_are_read_without_an_exception(atoms):
    calls, errors = decode_calls(atoms, TOOLS)
    assert len(calls) + len(errors) == atoms.count(Mark.SEP) + 1


@pytest.mark.parametrize("atoms, arguments", [
    (["ann", "12.50"], {"to": "ann", "amount": 12.5}),
    (["ann", "12"], {"to": "ann", "amount": 12}),
    (["12", "12", "1234567890123456789"],
     {"to": "12", "amount": 12, "times": 1234567890123456789}),
    (["ann", "1", "3.0"], {"to": "ann", "amount": 1, "times": 3}),
    (["ann", "1", "12345678901234567891.0"],
     {"to": "ann", "amount": 1, "times": 12345678901234567891}),
    (["ann", "1", Mark.SKIP, "true"], {"to": "ann", "amount": 1, "now": True}),
    ([Mark.QUOTE, "ann", "lee", Mark.QUOTE, "1"], {"to": "ann lee", "amount": 1}),
])
def test_values_take_the_type_of_the_schema(atoms, arguments):
    (call,), errors = decode_calls(["pay", *atoms], TOOLS)
    assert errors == () and same(dict(call.arguments), arguments)


@pytest.mark.parametrize("atoms, reason", [
    ([], "empty"),
    (["fly", "x"], "'fly' is not a tool"),
    ([Mark.QUOTE], "is not a tool"),
    (["pay"], "lacks a value for to"),
    (["pay", "ann"], "lacks a value for amount"),
    (["pay", Mark.SKIP, "1"], "lacks a value for to"),
    (["pay", "ann", "1", "2", "true", "x"], "at most 4 values"),
    (["stop", "x"], "at most 0 values"),
    (["pay", "ann", "much"], "'much' is not of type number"),
    (["pay", "ann", "1,000"], "not of type number"),
    (["pay", "ann", "1e999"], "not of type number"),
    (["pay", "ann", "007"], "not of type number"),
    (["pay", "ann", "9" * 5000], "not of type number"),
    (["pay", "ann", "1", "2.5"], "not of type integer"),
    (["pay", "ann", "1", "1", "yes"], "not of type boolean"),
    (["pay", Mark.UNK, "1"], "<unk>"),
    (["pay", Mark.QUOTE, "ann", "1"], "not closed"),
    (["pay", Mark.QUOTE, Mark.OPEN, Mark.QUOTE, "1"], "inside a string"),
    (["pay", Mark.OPEN, Mark.CLOSE, "1"], "where string is due"),
])
def test_malformed_calls_say_why(atoms, reason):
    calls, errors = decode_calls(atoms, TOOLS)
    assert calls == () and len(errors) == 1 and reason in errors[0]


def test_a_good_call_beside_a_bad_one_is_kept_apart_from_the_error():
    calls, errors = decode_calls(["stop", Mark.SEP, "pay"], TOOLS)
    assert [c.name for c in calls] == ["stop"] and len(errors) == 1


def test_deep_nesting_is_an_error_not_a_crash():
    free = {"f": ToolSpec("f", "", {"properties": {"v": {}}}, "d")}
    for opener in (Mark.OPEN, Mark.OPEN_OBJECT):
        calls, errors = decode_calls(["f", *[opener] * 50_000], free)
        assert calls == () and len(errors) == 1
    value = 1
    for _ in range(MAX_DEPTH + 2):
        value = [value]
    with pytest.raises(ValueError, match="deeper than"):
        encode_calls([ToolCall("f", {"v": value})], free)


@pytest.mark.parametrize("call, reason", [
    (ToolCall("fly", {}), "no tool 'fly'"),
    (ToolCall("pay", {"to": "a", "amount": 1, "tip": 2}), "no parameter 'tip'"),
    (ToolCall("pay", {"to": "a"}), "lacks 'amount'"),
    (ToolCall("pay", {"to": "a", "amount": float("nan")}), "finite"),
    (ToolCall("pay", {"to": "a", "amount": 10**400}), "digits"),
    (ToolCall("pay", {"to": b"a", "amount": 1}), "bytes is not JSON"),
])
def test_an_expert_call_that_fits_no_tool_is_refused(call, reason):
    with pytest.raises(ValueError, match=reason):
        encode_calls([call], TOOLS)
