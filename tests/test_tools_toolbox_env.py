"""The toolbox's tools and environment: preconditions, refusals, scoring, isolation."""

import copy
import json
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rods_jax.tools.toolbox import ToolboxSuite, split
from rods_jax.tools.toolbox.entities import Maker
from rods_jax.tools.toolbox.graph import DOMAINS, SPECS, TOOLS, chain_room, in_order, tool_names
from rods_jax.tools.toolbox.world import make_world, run_tool
from rods_jax.types import Category, Task, ToolCall, Turn

ALL = tuple(DOMAINS)
VISIBLE = frozenset(TOOLS)
SUITE = ToolboxSuite()


def config():
    maker = Maker(random.Random(5))
    blank = {name: domain.blank(maker).to_config() for name, domain in DOMAINS.items()}
    blank["files"]["folders"] = {
        "/work": {"a.txt": {"text": "pin-1234", "topic": "tax-year"}}, "/home": {}}
    blank["messaging"].update(
        pin="pin-1234", users=["@ana", "@bob"], contacts={"ana-bell": "@ana"},
        messages={"ms-1": ["@ana", "me", "early-news-here"],
                  "ms-2": ["@ana", "me", "late-news-here"]})
    blank["bookings"]["trips"] = {"tr-1": ["rome-city", "may-1", 120]}
    blank["bookings"]["bookings"] = {"bk-1": ["ana-bell", "oslo-city", "may-9", 75]}
    blank["payments"].update(pin="pin-9", balance=100, bills={"bl-1": ["@ana", 60]})
    return blank


def ask(world, tool, /, **arguments):
    result = run_tool(world, tool, arguments, VISIBLE)
    return json.loads(result.text)


def task(*golds, tools=tool_names(ALL)):
    turns = tuple(Turn(f"turn {i}", tuple(gold), tools) for i, gold in enumerate(golds))
    return Task("t", ALL, Category.BASE, config(), turns, "s")


def test_there_are_enough_tools_and_their_schemas_are_complete():
    assert len(DOMAINS) >= 4 and len(TOOLS) >= 28
    for spec in SUITE.tools(ALL):
        assert spec.parameters["type"] == "object" and spec.description
        assert spec.parameters["required"] == list(spec.parameters["properties"])
        assert [p.name for p in TOOLS[spec.name].params] == spec.parameters["required"]
    assert [s.name for s in SUITE.tools(["payments", "files"])] == [
        t.name for d in ("files", "payments") for t in DOMAINS[d].TOOLS]
    with pytest.raises(ValueError, match="unknown domain 'mail'"):
        SUITE.tools(["mail"])
    assert in_order(["payments", "files"]) == ("files", "payments")


def test_files_need_an_open_folder():
    world = make_world(config())
    assert ask(world, "read_file", file="a.txt") == {"error": "no folder open"}
    assert ask(world, "find_file", topic="tax-year") == {"file": "a.txt", "folder": "/work"}
    assert ask(world, "open_folder", folder="/none") == {"error": "no such folder"}
    assert ask(world, "open_folder", folder="/work") == {"opened": "/work"}
    assert ask(world, "read_file", file="a.txt") == {"text": "pin-1234"}
    assert ask(world, "copy_file", file="a.txt", copy="b.txt") == {"copied": "b.txt"}
    assert ask(world, "copy_file", file="a.txt", copy="b.txt") == {"error": "file exists"}
    assert ask(world, "write_file", file="c.txt", text="x") == {"written": "c.txt"}
    assert ask(world, "move_file", file="b.txt", folder="/home") == {"moved": "b.txt"}
    assert ask(world, "move_file", file="c.txt", folder="/none") == {"error": "no such folder"}
    assert ask(world, "write_file", file="b.txt", text="x") == {"written": "b.txt"}
    assert ask(world, "move_file", file="b.txt", folder="/home") == {"error": "file exists"}
    link = ask(world, "share_file", file="a.txt", user="@ana")["link"]
    assert world["files"].links[link] == ["/work", "a.txt", "@ana"]
    assert ask(world, "delete_file", file="a.txt") == {"deleted": "a.txt"}
    assert ask(world, "delete_file", file="a.txt") == {"error": "no such file"}
    assert ask(world, "find_file", topic="tax-year") == {"error": "no such file"}


def test_messages_need_a_sign_in():
    world = make_world(config())
    assert ask(world, "send_message", user="@ana", text="x") == {"error": "not signed in"}
    assert ask(world, "sign_in", pin="pin-0") == {"error": "wrong pin"}
    assert ask(world, "sign_in", pin="pin-1234") == {"signed": "in"}
    assert ask(world, "find_contact", name="ana-bell") == {"user": "@ana"}
    assert ask(world, "find_contact", name="bob-bell") == {"error": "no such person"}
    assert ask(world, "last_message", user="@ana") == {"message": "ms-2"}
    assert ask(world, "last_message", user="@bob") == {"error": "no such message"}
    assert ask(world, "read_message", message="ms-2") == {"text": "late-news-here"}
    assert ask(world, "send_message", user="@eve", text="x") == {"error": "no such person"}
    sent = ask(world, "send_message", user="@bob", text="hi-to-you")["message"]
    replied = ask(world, "reply_message", message=sent, text="more")["replied"]
    assert world["messaging"].messages[replied] == ["me", "@bob", "more"]
    forwarded = ask(world, "forward_message", message="ms-2", user="@bob")["forwarded"]
    assert world["messaging"].messages[forwarded] == ["me", "@bob", "late-news-here"]
    assert ask(world, "delete_message", message="ms-2") == {"deleted": "ms-2"}
    assert ask(world, "last_message", user="@ana") == {"message": "ms-1"}


def test_a_seat_is_held_before_it_is_booked():
    world = make_world(config())
    assert ask(world, "confirm_hold", hold="hd-0") == {"error": "no such hold"}
    assert ask(world, "search_trips", city="rome-city", date="may-1") == {
        "trip": "tr-1", "price": 120}
    assert ask(world, "search_trips", city="rome-city", date="may-2") == {
        "error": "no such trip"}
    hold = ask(world, "hold_seat", trip="tr-1")["hold"]
    booking = ask(world, "confirm_hold", hold=hold)["booking"]
    assert ask(world, "release_hold", hold=hold) == {"error": "no such hold"}
    assert ask(world, "show_booking", booking=booking) == {"city": "rome-city", "date": "may-1"}
    assert ask(world, "change_date", booking=booking, date="may-1") == {"error": "same date"}
    assert "fee" in ask(world, "change_date", booking=booking, date="may-3")
    assert ask(world, "cancel_booking", booking=booking) == {"refund": 120}
    assert ask(world, "find_booking", name="ana-bell") == {"booking": "bk-1"}
    other = ask(world, "hold_seat", trip="tr-1")["hold"]
    assert ask(world, "release_hold", hold=other) == {"released": other}


def test_money_needs_an_unlocked_wallet_and_a_balance():
    world = make_world(config())
    assert ask(world, "send_money", user="@ana", amount=5) == {"error": "wallet locked"}
    assert ask(world, "unlock_wallet", pin="pin-9") == {"wallet": "open"}
    assert ask(world, "send_money", user="@ana", amount=101) == {"error": "low balance"}
    assert ask(world, "send_money", user="@ana", amount=0) == {"error": "wrong amount"}
    assert ask(world, "find_bill", user="@ana") == {"bill": "bl-1", "amount": 60}
    payment = ask(world, "pay_bill", bill="bl-1")["payment"]
    assert ask(world, "pay_bill", bill="bl-1") == {"error": "no such bill"}
    assert ask(world, "check_balance") == {"balance": 40}
    assert ask(world, "refund_payment", payment=payment) == {"credit": 60}
    assert ask(world, "refund_payment", payment=payment) == {"error": "no such payment"}
    assert "receipt" in ask(world, "pay_booking", booking="bk-1", amount=30)
    assert "request" in ask(world, "request_money", user="@bob", amount=10)
    rate = world["payments"].rates["eur"]
    assert ask(world, "convert_money", amount=7, currency="eur") == {"sum": 7 * rate}
    assert ask(world, "check_balance") == {"balance": 70}


def test_ids_run_out_with_an_error():
    world = make_world(config())
    results = [ask(world, "hold_seat", trip="tr-1") for _ in range(10)]
    assert results[-1] == {"error": "limit reached"} and "hold" in results[8]


def test_arguments_are_checked_and_lossless_numbers_accepted():
    world = make_world(config())
    ask(world, "unlock_wallet", pin="pin-9")
    assert "payment" in ask(world, "send_money", user="@ana", amount="5")
    assert "payment" in ask(world, "send_money", user="@ana", amount=5.0)
    for wrong in ("five", "5.5", 5.5, True, None, [5], {"a": 1}, 10**12, "9" * 5000, "٣",
                  float("nan"), float("inf")):
        assert ask(world, "send_money", user="@ana", amount=wrong) == {
            "error": "wrong argument"}
    assert ask(world, "convert_money", amount=1, currency="xxx") == {"error": "wrong argument"}
    assert ask(world, "write_file", file="a.txt") == {"error": "missing argument"}
    assert ask(world, "check_balance", user="@ana") == {"error": "unknown argument"}
    ask(world, "open_folder", folder="/work")
    assert ask(world, "write_file", file="n.txt", text=418) == {"written": "n.txt"}
    assert world["files"].folders["/work"]["n.txt"]["text"] == "418"
    assert ask(world, "write_file", file="n" * 201, text="x") == {"error": "wrong argument"}


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner,
                                                                max_size=2), max_leaves=4)


@given(st.lists(st.tuples(
    st.sampled_from(sorted(TOOLS)) | JUNK,
    st.fixed_dictionaries({}, optional={p: JUNK for p in ("file", "user", "amount", "text")})
    | JUNK), max_size=4))
def test_nothing_a_model_writes_raises(calls):
    env = SUITE.make_env(task(()))
    env.begin_turn()
    results = env.execute([ToolCall(name, arguments) for name, arguments in calls])
    assert all(isinstance(json.loads(r.text), dict) for r in results)
    assert [("error" in json.loads(r.text)) for r in results] == [not r.ok for r in results]
    env.end_turn("")


def test_only_visible_tools_run():
    env = SUITE.make_env(task((), (), tools=("check_balance",)))
    assert env.begin_turn().tools == ("check_balance",)
    assert json.loads(env.execute([ToolCall("find_file", {"topic": "tax-year"})])[0].text) == {
        "error": "unknown tool"}
    for attribute in ("to_config", "__init__", "prepare", "open_door", "pin"):
        assert not env.execute([ToolCall(attribute, {})])[0].ok


FIND = ToolCall("find_file", {"topic": "tax-year"})
OPEN = ToolCall("open_folder", {"folder": "/work"})
HOLD = ToolCall("hold_seat", {"trip": "tr-1"})


def score(task_, *calls_by_turn, said="done"):
    env, flags = SUITE.make_env(task_), []
    for calls in calls_by_turn:
        env.begin_turn()
        env.execute(calls)
        outcome = env.end_turn(said)
        flags.append((outcome.state_ok, outcome.exec_ok))
    return flags


def test_scoring_needs_the_state_and_every_gold_result():
    assert score(task((FIND, OPEN)), (FIND, OPEN)) == [(True, True)]
    assert score(task((FIND, OPEN)), (OPEN,)) == [(True, False)]
    assert score(task((FIND, OPEN)), (FIND,)) == [(False, False)]
    # Extra reading and failed calls are free, extra changes are not.
    failed = ToolCall("read_file", {"file": "zz.txt"})
    assert score(task((OPEN,)), (failed, FIND, OPEN, failed)) == [(True, True)]
    assert score(task((OPEN,)), (OPEN, HOLD)) == [(False, True)]
    # A wrong state stays wrong in later turns.
    assert score(task((OPEN,), (FIND,)), (OPEN, HOLD), (FIND,))[1] == (False, True)
    # A result seen in an earlier turn counts.
    assert score(task((OPEN,), (FIND,)), (FIND, OPEN), ()) == [(True, True), (True, True)]
    # Results count as often as gold yields them.
    assert score(task((FIND, FIND)), (FIND,)) == [(True, False)]
    assert score(task((FIND, FIND)), (FIND, FIND)) == [(True, True)]


def test_turns_without_gold_pass_with_words_alone():
    assert score(task(()), ()) == [(True, True)]
    assert score(task(()), (), said="  ") == [(False, False)]
    assert score(task(()), (FIND,)) == [(False, False)]
    assert score(task(()), (ToolCall("nothing", {}),)) == [(False, False)]


def test_outcomes_count_calls_and_errors():
    env = SUITE.make_env(task((OPEN,), (OPEN,)))
    env.begin_turn()
    env.execute([OPEN, ToolCall("read_file", {"file": "zz.txt"})])
    outcome = env.end_turn("done")
    assert (outcome.n_calls, outcome.n_errors) == (2, 1)
    env.begin_turn()
    assert env.end_turn("done").n_calls == 0
    assert env.begin_turn() is None and env.begin_turn() is None


def test_rollouts_share_nothing_and_leave_the_task_alone():
    example = task((HOLD,))
    before = copy.deepcopy(example.initial_config)
    first, second = SUITE.make_env(example), SUITE.make_env(example)
    first.begin_turn(), second.begin_turn()
    a = first.execute([HOLD, HOLD])
    b = second.execute([HOLD])
    assert a[0] == b[0] and a[0] != a[1]
    assert example.initial_config == before
    assert second.end_turn("done").passed and not first.end_turn("done").passed


def test_new_tools_are_named_when_they_appear():
    turns = (Turn("a", (), ("find_file",)), Turn("", (FIND,), ("find_file", "open_folder")))
    env = SUITE.make_env(Task("t", ALL, Category.MISS_FUNC, config(), turns, "s"))
    assert env.begin_turn().new_tools == ()
    env.end_turn("no")
    assert env.begin_turn().new_tools == ("open_folder",)


def test_misuse_by_the_caller_is_a_value_error():
    env = SUITE.make_env(task((OPEN,)))
    for wrong in (lambda: env.execute([OPEN]), lambda: env.end_turn("x")):
        with pytest.raises(ValueError, match="begin_turn"):
            wrong()
    env.begin_turn()
    with pytest.raises(ValueError, match="end_turn"):
        env.begin_turn()
    with pytest.raises(ValueError, match="unknown domain 'mail'"):
        make_world({"mail": {}})
    with pytest.raises(ValueError, match="config of files"):
        make_world({"files": {"folders": {}}})


def test_listing_tools_show_the_clutter_only_in_cluttered_worlds():
    for example in split("train")[:40]:
        env = SUITE.make_env(example)
        texts = []
        while (turn := env.begin_turn()) is not None:
            texts += [r.text for r in env.execute(example.turns[turn.index].gold)]
            env.end_turn("done")
        listed = [t for t in texts if "others" in json.loads(t)]
        assert bool(listed) == (example.category is Category.LONG_CONTEXT)
        assert all(0 < len(json.loads(t)["others"]) <= 12 for t in listed)


def test_chain_room_agrees_with_a_plain_search():
    """Longest walk along kinds, counted by brute force, for one domain set."""
    room = chain_room(("bookings",), 3)
    assert room["confirm_hold"] == 3 and room["release_hold"] == 0
    assert room["show_booking"] == 3  # its date feeds change_date or a new search
    assert room["change_date"] == 0 and room["cancel_booking"] == 0
    assert set(room) == {t.name for t in DOMAINS["bookings"].TOOLS} <= set(SPECS)
