"""Hints: what names and schemas tell, how they are shown, and that they change no score."""

import ast
import collections
import dataclasses
import functools
import json
import pathlib
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rods_jax.text.compact import CompactFormat
from rods_jax.tools import schema
from rods_jax.tools.bfcl import BFCLSuite
from rods_jax.tools.bfcl_data import DOMAINS, tool_domains
from rods_jax.tools.hints import HintedEnv, closest, generic_hint, schema_hints
from rods_jax.tools.scoring import Mode, Scoring
from rods_jax.tools.toolbox import ToolboxSuite, lexicon, split
from rods_jax.tools.toolbox.entities import KINDS, is_entity
from rods_jax.tools.toolbox.env import ToolboxWorld
from rods_jax.tools.toolbox.graph import SPECS, TOOLS, tool_names
from rods_jax.tools.toolbox.hints import toolbox_hint
from rods_jax.types import Category, Task, ToolCall, ToolResult, ToolSpec, Turn

TOOLBOX = ToolboxSuite()
BFCL = BFCLSuite()


def call(tool, /, **arguments):
    return ToolCall(tool, arguments)


# --------------------------------------------------------------------- names and schemas


def spec(name, required=(), **kinds):
    properties = {k: v if isinstance(v, dict) else {"type": v} for k, v in kinds.items()}
    return ToolSpec(name, "", {"type": "object", "properties": properties,
                               "required": list(required)}, "d")


PAY = spec("pay_bill", ["bill_id", "amount"], bill_id="string", amount="integer",
           tags={"type": "array", "items": {"type": "string"}}, urgent="boolean",
           unit={"type": "string", "enum": ["eur", "usd"]})
PING = spec("ping")
BY_NAME = {s.name: s for s in (PAY, PING, spec("refund", ["bill_id"], bill_id="string"))}
SEEN = frozenset({"pay_bill", "ping"})
SIGNATURE = ("pay_bill(bill_id: str, amount: int, tags: list[str] = None, urgent: bool = None, "
             'unit: "eur" | "usd" = None)')


@pytest.mark.parametrize("made, said", [
    (call("paybill"), "There is no such tool, the nearest name is pay_bill."),
    (call("Pay-Bill"), "There is no such tool, the nearest name is pay_bill."),
    (call("Bank.pay_bill"), "Call the tool by its bare name: pay_bill."),
    (call("refund", bill_id="b"), "refund is not at hand now: if no other tool does it, tell the"),
    (call("zzz"), "No tool for this is at hand now: tell the user."),
    (ToolCall(["ping"], {}), "No tool for this is at hand now: tell the user."),
    (call("pay_bill", bill_id="b"), "Give 'amount' too; ask the user if it is not known. Sig"),
    (call("pay_bill"), "Give 'bill_id' and 'amount' too;"),
    (call("pay_bill", billid="b", amount=1), "Call it 'bill_id', not 'billid'. Signature:"),
    (call("pay_bill", bill_id="b", zzz=1), "Call it 'amount', not 'zzz'."),
    (call("ping", x=1), "Leave out 'x'. Signature: ping()."),
    (call("pay_bill", bill_id="b", amount="7"), "must be of type integer, written without quotes"),
    (call("pay_bill", bill_id="b", amount="x"), "Argument 'amount' must be of type integer. Sig"),
    (call("pay_bill", bill_id="b", amount=1.5), "type integer, without a fraction."),
    (call("pay_bill", bill_id=8, amount=1), "'bill_id' must be of type string, written in quotes."),
    (call("pay_bill", bill_id="b", amount=1, tags="x"), "type array, even for one value."),
    (call("pay_bill", bill_id="b", amount=1, tags=[1]), "'tags' has an item that must be of type"),
    (call("pay_bill", bill_id="b", amount=1, urgent="True"), "boolean, written without quotes."),
    (call("pay_bill", bill_id="b", amount=1, unit="yen"), "'unit' must be one of eur, usd."),
    (ToolCall("pay_bill", [1]), "Give the arguments as an object."),
    (call("pay_bill", bill_id="b", amount=1), ""),
])
def test_generic_hint(made, said):
    hint = generic_hint(made, BY_NAME, SEEN)
    assert hint.startswith(said) or said in hint
    assert bool(hint) == bool(said)
    if made.name == "pay_bill" and hint:
        assert hint.endswith(f"Signature: {SIGNATURE}.")


def test_signature_and_closest():
    assert schema.signature(PAY) == SIGNATURE and schema.signature(PING) == "ping()"
    assert closest("reprot.txt", ["a.txt", "report.txt"]) == ["report.txt"]
    assert closest("summary", ["summary_2024_final_version.doc"]) == [
        "summary_2024_final_version.doc"]
    assert closest("summary", ["summary_2024_final_version.doc"], alike=0.7) == []
    assert closest("", ["a"]) == [] and closest("x", []) == []


class Counting:
    """A user's own environment: one tool, which fails above 3. Its own world, too."""

    task = "the task"

    def __init__(self):
        self.count, self.world = 0, self

    def visible(self):
        return frozenset(["add"])

    def begin_turn(self):
        return "the turn"

    def execute(self, calls):
        return tuple(self._one(made) for made in calls)

    def _one(self, made):
        if made.name != "add" or "by" not in made.arguments or self.count > 3:
            return ToolResult("no", False)
        self.count += made.arguments["by"]
        return ToolResult("yes", True)

    def end_turn(self, said):
        return f"scored {said}"


def test_a_suite_of_ones_own_is_hinted_by_its_schemas():
    env = HintedEnv(Counting(), schema_hints([spec("add", ["by"], by="integer")]))
    assert (env.task, env.begin_turn(), env.end_turn("x")) == ("the task", "the turn", "scored x")
    results = env.execute([call("ad"), call("add"), call("add", by=4), call("add", by=1)])
    assert [r.ok for r in results] == [False, False, True, False]
    assert results[0].text == "no\nHint: There is no such tool, the nearest name is add."
    assert results[1].text.startswith("no\nHint: Give 'by' too;")
    assert [r.text for r in results[2:]] == ["yes", "no"]


def test_each_hint_speaks_of_the_state_its_call_met():
    env = HintedEnv(Counting(), lambda world, made, result, visible: f"at {world.count}")
    env.begin_turn()
    texts = [r.text for r in env.execute([call("add"), call("add", by=4), call("add", by=1)])]
    assert texts == ["at 0", "yes", "at 4"]


# ------------------------------------------------------------------------- damaged calls


def misspelt(rng, word):
    i = rng.randrange(max(len(word), 1))
    return word[:i] + word[i + 1:] if len(word) > 1 else word + "x"


@functools.cache
def given_values():
    """Argument name -> values that gold calls of BFCL give it."""
    found = collections.defaultdict(list)
    for task in BFCL.tasks:
        for made in (c for turn in task.turns for c in turn.gold):
            for name, value in made.arguments.items():
                found[name].append(value)
    return found


def damaged(rng, made):
    """The call with its name misspelt, or an argument dropped, misnamed, replaced, misspelt or
    of another type."""
    args = dict(made.arguments)
    kind = rng.choice(("name", "drop", "misname", "replace", "misspell", "retype"))
    if kind == "name" or not args:
        return ToolCall(misspelt(rng, made.name), args)
    name = rng.choice(sorted(args))
    value = args[name]
    if kind == "drop":
        del args[name]
    elif kind == "misname":
        args = {misspelt(rng, n) if n == name else n: v for n, v in args.items()}
    elif kind == "replace":
        args[name] = rng.choice(given_values()[name] or [value])
    elif kind == "retype":
        args[name] = str(value) if not isinstance(value, str) else [value]
    elif isinstance(value, str):
        args[name] = misspelt(rng, value)
    elif isinstance(value, list):
        args[name] = [misspelt(rng, v) if isinstance(v, str) else v for v in value]
    elif isinstance(value, dict):
        args[name] = {misspelt(rng, key): v for key, v in value.items()}
    else:
        args[name] = not value if isinstance(value, bool) else -value - 7
    return ToolCall(made.name, args)


def replay(env, task, seed, spoil=1.0):
    """(call, result) of every gold call, each after a damaged copy of itself by chance; outcomes
    of the turns."""
    rng, seen, outcomes = random.Random(seed), [], []
    while (turn := env.begin_turn()) is not None:
        for made in task.turns[turn.index].gold:
            calls = [damaged(rng, made)] if rng.random() < spoil else []
            calls += [made]
            seen += zip(calls, env.execute(calls), strict=True)
        outcomes.append(env.end_turn(rng.choice(("done", ""))))
    return seen, outcomes


def hint_of(text):
    return text.partition("\nHint: ")[2]


SECRET = ("password", "access_token", "client_secret", "refresh_token", "client_id",
          "card_number", "passport_number", "card_verification_number")


def secrets(task):
    """What only the user or the account holds."""
    values = {str(made.arguments[n]) for turn in task.turns for made in turn.gold
              for n in SECRET if n in made.arguments}
    config = task.initial_config
    values.add(config.get("TwitterAPI", {}).get("password", "john123"))
    values.add(str(config.get("TradingBot", {}).get("account_info", {}).get("binding_card", "")))
    travel = config.get("TravelAPI", {})
    values.add(str(travel.get("access_token", "")))
    for card in travel.get("credit_card_list", {}).values():
        values |= {str(card.get(n, "")) for n in ("card_number", "cvv")}
    return {v for v in values if len(v) > 2}


def test_damaged_calls_of_all_bfcl_tasks_get_hints_without_secrets():
    """Coverage by class, of what schemas refuse and of what the classes refuse."""
    failures, hints = collections.Counter(), collections.Counter()
    for i, task in enumerate(BFCL.tasks):
        seen, _ = replay(BFCL.make_env(task, hints=True), task, i)
        private = re.compile("|".join(map(re.escape, sorted(secrets(task)))) or "$^")
        for made, result in seen:
            hint = hint_of(result.text)
            assert not (result.ok and hint)
            if result.ok or made.name not in tool_domains():
                continue
            own = not result.text.startswith(f"Error during execution: {made.name}: ")
            failures[tool_domains()[made.name], own] += 1
            hints[tool_domains()[made.name], own] += bool(hint)
            assert not private.search(hint), (made, hint)
            assert len(hint) < 400 and "\n" not in hint
    assert {domain for domain, _ in failures} == set(DOMAINS)
    assert sum(n for (_, own), n in failures.items() if own) > 300
    for key, count in failures.items():
        assert hints[key] >= 0.95 * count, (key, hints[key], count)


@pytest.mark.parametrize("mode", Mode)
def test_hints_change_no_score(mode):
    suite = BFCLSuite(Scoring(mode=mode))
    n_hints = 0
    for i, task in enumerate(suite.tasks[::16]):
        for spoil in (0.0, 0.3, 1.0):
            plain, without = replay(suite.make_env(task), task, i, spoil)
            hinted, with_hints = replay(suite.make_env(task, hints=True), task, i, spoil)
            assert with_hints == without
            assert [c for c, _ in hinted] == [c for c, _ in plain]
            assert [r.text.partition("\nHint: ")[0] for _, r in hinted] == [
                r.text for _, r in plain]
            n_hints += sum("\nHint: " in r.text for _, r in hinted)
            if not spoil:
                assert not any("\nHint: " in r.text for _, r in hinted)
    assert n_hints > 100


def test_hints_do_not_depend_on_gold():
    """The same calls on a task whose gold is another's, read only to score."""
    for i, task in enumerate(BFCL.tasks[::40]):
        blind = dataclasses.replace(task, turns=tuple(
            dataclasses.replace(turn, gold=(), user="") for turn in task.turns))
        seen, _ = replay(BFCL.make_env(task, hints=True), task, i)
        again, _ = replay(BFCL.make_env(blind, hints=True), task, i)
        assert seen == again


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-10**6, 10**20), st.floats(allow_nan=True),
              st.text(max_size=8), st.sampled_from([
                  "..", "/", "a/b", "USD", "SFO", "LAX", "START", "notes", "1", "true", "\0"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3),
                            st.dictionaries(st.text(max_size=4), inner, max_size=2)),
    max_leaves=4)


@functools.cache
def stories():
    """Tasks that between them use every class."""
    return BFCL.tasks[0:200:17] + BFCL.tasks[600:800:23]


@st.composite
def wrong_calls(draw, task):
    """A tool of the task or a name like one, with arguments drawn or taken from its gold."""
    names = sorted({name for turn in task.turns for name in turn.tools})
    gold = [c for turn in task.turns for c in turn.gold]
    name = draw(st.one_of(st.sampled_from(names), st.text(max_size=6),
                          st.sampled_from(names).map(lambda n: n[1:])))
    known = [s.parameters["properties"] for s in BFCL.tools(task.domains) if s.name == name]
    keys = st.sampled_from(sorted(known[0])) if known and known[0] else st.text(max_size=4)
    args = draw(st.one_of(st.dictionaries(keys, JSON, max_size=4),
                          st.sampled_from([dict(c.arguments) for c in gold])))
    for key in list(args):
        if draw(st.integers(0, 9)) == 0:
            args[key] = draw(JSON)
    return ToolCall(name, args)


@settings(max_examples=60)
@given(st.data(), st.sampled_from(Mode))
def test_whatever_is_called_no_hint_fails(data, mode):
    task = data.draw(st.sampled_from(stories()))
    env = BFCLSuite(Scoring(mode=mode)).make_env(task, hints=True)
    while env.begin_turn() is not None:
        for made in data.draw(st.lists(wrong_calls(task), max_size=8)):
            result, = env.execute((made,))
            assert isinstance(result.text, str)
            assert not (result.ok and "\nHint: " in result.text)
        env.end_turn("")


# ------------------------------------------------------------------------------- toolbox

VISIBLE = frozenset(TOOLS)
WORDS = frozenset(lexicon())


def world(*domains):
    config = {
        "files": {"folders": {"/work": {"a.txt": {"text": "x-y", "topic": "tax-year"},
                                        "b.txt": {"text": "x-y", "topic": ""}},
                              "/home": {"b.txt": {"text": "x-y", "topic": ""}}},
                  "open": "", "links": {}, "next_links": [], "clutter": []},
        "messaging": {"pin": "pin-1234", "signed_in": False, "users": ["@anna"], "contacts": {},
                      "messages": {}, "next_messages": [], "clutter": []},
        "bookings": {"trips": {"tr-100": ["rome-city", "may-1", 120]}, "holds": {},
                     "bookings": {"bk-100": ["ana-bell", "oslo-city", "may-9", 75]},
                     "next_holds": [], "next_bookings": [], "next_fees": [], "clutter": []},
        "payments": {"pin": "pin-9999", "unlocked": False, "balance": 100, "bills": {},
                     "payments": {}, "requests": {}, "receipts": {},
                     "rates": {"eur": 2, "usd": 3, "gbp": 4, "jpy": 5}, "next_payments": [],
                     "next_requests": [], "next_receipts": [], "clutter": []}}
    config = {d: config[d] for d in domains or config}
    turn = Turn("", (), tool_names(tuple(config)))
    return ToolboxWorld(Task("t", tuple(config), Category.BASE, config, (turn,), "s"))


WORK, IN = call("open_folder", folder="/work"), call("sign_in", pin="pin-1234")
PIN = call("unlock_wallet", pin="pin-9999")
TOOLBOX_CASES = [
    (call("read_file", file="a.txt"), "no folder open folder /work use open_folder", (), ()),
    (call("read_file", file="b.txt"), "no folder open use open_folder", (), ()),
    (call("read_file", file="a.txt"), "no folder open use open_folder", (), ("find_file",)),
    (call("read_file", file="a.txt"), "no folder open folder /work open_folder unavailable", (),
     ("open_folder",)),
    (call("read_file", file="zz.txt"), "no such file file unknown use find_file", (WORK,), ()),
    (call("read_file", file="zz.txt"), "no such file file unknown", (WORK,), ("find_file",)),
    (call("delete_file", file="a.txt"), "no such file folder /work use open_folder",
     (call("open_folder", folder="/home"),), ()),
    (call("find_file", topic="war-peace"), "no such file topic unknown", (), ()),
    (call("open_folder", folder="/zz"), "no such folder folder unknown use find_file", (), ()),
    (call("copy_file", file="a.txt", copy="b.txt"),
     "file exists copy some file not in folder", (WORK,), ()),
    (call("move_file", file="b.txt", folder="/home"), "file exists in /home", (WORK,), ()),
    (call("share_file", file="b.txt", user="@anna"), "limit reached tell user", (WORK,), ()),
    (call("read_message", message="ms-1"), "not signed in use sign_in", (), ()),
    (call("read_message", message="ms-1"), "not signed in sign_in unavailable", (), ("sign_in",)),
    (call("sign_in", pin="pin-9999"), "wrong pin use pin for messaging", (), ()),
    (call("find_contact", name="bob-bell"), "no such person name unknown", (IN,), ()),
    (call("send_message", user="@bobo", text="hi-there"),
     "no such person user unknown use find_contact", (IN,), ()),
    (call("last_message", user="@anna"), "no such message from @anna", (IN,), ()),
    (call("last_message", user="@bobo"), "no such message user unknown use find_contact", (IN,),
     ()),
    (call("read_message", message="ms-1"), "no such message message unknown use last_message",
     (IN,), ()),
    (call("search_trips", city="rome-city", date="may-2"), "no such trip on may-2", (), ()),
    (call("search_trips", city="bonn-city", date="may-2"), "no such trip to bonn-city", (), ()),
    (call("hold_seat", trip="tr-1"), "no such trip trip unknown use search_trips", (), ()),
    (call("confirm_hold", hold="hd-1"), "no such hold hold unknown use hold_seat", (), ()),
    (call("find_booking", name="bob-bell"), "no such booking name unknown", (), ()),
    (call("show_booking", booking="bk-1"), "no such booking booking unknown use find_booking",
     (), ()),
    (call("change_date", booking="bk-100", date="may-9"), "same date it is on may-9", (), ()),
    (call("check_balance"), "wallet locked use unlock_wallet", (), ()),
    (call("unlock_wallet", pin="pin-1234"), "wrong pin use pin for wallet", (), ()),
    (call("find_bill", user="@anna"), "no such bill from @anna", (PIN,), ()),
    (call("pay_bill", bill="bl-1"), "no such bill bill unknown use find_bill", (PIN,), ()),
    (call("refund_payment", payment="py-1"), "no such payment payment unknown", (PIN,), ()),
    (call("send_money", user="@anna", amount=0), "wrong amount amount some money", (PIN,), ()),
    (call("send_money", user="@anna", amount=101), "low balance balance 100", (PIN,), ()),
    (call("send_money", user="@anna", amount=101), "low balance amount over balance", (PIN,),
     ("check_balance",)),
    (call("send_money", user="@anna"), "missing argument use send_money user amount", (), ()),
    (call("check_balance", to=1), "unknown argument use check_balance", (), ()),
    (ToolCall("send_money", []), "wrong argument use send_money user amount", (), ()),
    (call("send_money", user="@anna", amount="a lot"), "wrong argument amount some money", (), ()),
    (call("convert_money", amount=1, currency="yen"), "wrong argument currency eur usd gbp jpy",
     (), ()),
    (call("read_fil", file="a.txt"), "unknown tool use read_file", (), ()),
    (call("read_file", file="a.txt"), "unknown tool tool unavailable tell user", (),
     ("read_file",)),
    (call("fly"), "unknown tool tool unavailable tell user", (), ()),
]


def words_of(form, text):
    dialogue = form.start(None, ())
    ids = dialogue.results([call("x")], [ToolResult(text, False)])
    return ids, dialogue.text(ids)


@pytest.mark.parametrize("made, said, before, hidden", TOOLBOX_CASES)
def test_toolbox_hints_read_well_in_the_closed_vocabulary(made, said, before, hidden):
    here, visible = world(), VISIBLE - set(hidden)
    assert all(here.call(earlier, VISIBLE).ok for earlier in before)
    result = here.call(made, visible)
    assert not result.ok
    text = toolbox_hint(here, made, result, visible)
    assert json.loads(text)["error"] == json.loads(result.text)["error"]
    assert "pin-" not in text
    form = CompactFormat(tuple(SPECS.values()), lexicon(), kinds=KINDS)
    ids, shown = words_of(form, text)
    assert shown.removesuffix(" <act>") == f"error {said}"
    assert all(w in WORDS or is_entity(w) for w in shown.split()[:-1]), shown
    assert form.unk_id not in ids


def test_a_tool_of_an_absent_domain_is_answered_with_those_at_hand():
    here = world("files", "payments")
    visible = frozenset(tool_names(("files", "payments")))
    made = call("show_booking", booking="bk-1")
    text = toolbox_hint(here, made, here.call(made, visible), visible)
    assert json.loads(text) == {"error": "unknown tool", "use": ["files", "payments"]}


def test_every_toolbox_refusal_is_among_the_cases():
    folder = pathlib.Path(__file__).resolve().parents[1] / "rods_jax" / "tools" / "toolbox"
    raised = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ToolError"
                    and node.args):
                raised.add(node.args[0].value)
    assert len(raised) > 15
    lacking = {e for e in raised if not any(said.startswith(e) for _, said, _, _ in TOOLBOX_CASES)}
    assert not lacking


def test_toolbox_hints_change_no_score_and_reach_every_failure():
    n_failed = 0
    for i, task in enumerate(split("train")[::3]):
        for spoil in (0.0, 1.0):
            plain, without = replay(TOOLBOX.make_env(task), task, i, spoil)
            hinted, with_hints = replay(TOOLBOX.make_env(task, hints=True), task, i, spoil)
            assert with_hints == without
            for (_, bare), (_, shown) in zip(plain, hinted, strict=True):
                assert shown.ok == bare.ok and (shown == bare) == bare.ok
                assert json.loads(bare.text).items() <= json.loads(shown.text).items()
                n_failed += not bare.ok
    assert n_failed > 200


def test_toolbox_hints_do_not_depend_on_gold():
    for i, task in enumerate(split("train")[::10]):
        blind = dataclasses.replace(task, turns=tuple(
            dataclasses.replace(turn, gold=(), user="") for turn in task.turns))
        seen, _ = replay(TOOLBOX.make_env(task, hints=True), task, i)
        again, _ = replay(TOOLBOX.make_env(blind, hints=True), task, i)
        assert seen == again


@given(st.data())
def test_whatever_is_called_in_the_toolbox_no_hint_fails(data):
    task = data.draw(st.sampled_from(split("train")[:40]))
    env = TOOLBOX.make_env(task, hints=True)
    names = st.one_of(st.sampled_from(sorted(TOOLS)), st.text(max_size=6))
    gold = [dict(c.arguments) for turn in task.turns for c in turn.gold]
    while env.begin_turn() is not None:
        for _ in range(data.draw(st.integers(0, 6))):
            name = data.draw(names)
            keys = [p.name for p in TOOLS[name].params] if name in TOOLS else []
            args = {k: data.draw(st.one_of(JSON, st.sampled_from(
                [str(v) for g in gold for v in g.values()]))) for k in keys}
            result, = env.execute((ToolCall(name, args),))
            assert "error" in json.loads(result.text) or result.ok
        env.end_turn("")
