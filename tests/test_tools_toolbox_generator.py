"""Generated tasks: sound, within budget, of the asked profile, and endless in number."""

import dataclasses
import functools
import random

import pytest

from rods_jax.tools.toolbox import RequestedProfile, ToolboxSuite, generate, lexicon, split
from rods_jax.tools.toolbox import phrases
from rods_jax.tools.toolbox.entities import Maker, is_entity
from rods_jax.tools.toolbox.generator import BANDS, draw_profile, task_words
from rods_jax.tools.toolbox.graph import TOOLS
from rods_jax.tools.toolbox.structure import (base_key, call_shapes, flatten, gold_results,
                                              structure_key, words_of)
from rods_jax.types import CATEGORIES, Category

SUITE = ToolboxSuite()


@functools.cache
def tasks():
    """1,000 tasks over all bands and categories."""
    rng, found, i = random.Random(11), [], 0
    while len(found) < 1000:
        i += 1
        band = list(BANDS.values())[i % len(BANDS)]
        try:
            found.append(generate(draw_profile(band, rng, CATEGORIES[i % 4]), rng))
        except ValueError:
            continue
    return tuple(found)


def play(task, drop=None):
    """Progress of a replay, gold call `drop` (flat) left out; one call a step."""
    env, passed, flat = SUITE.make_env(task), 0, 0
    while (turn := env.begin_turn()) is not None:
        for call in task.turns[turn.index].gold:
            if flat != drop:
                env.execute((call,))
            flat += 1
        passed += env.end_turn(SUITE.gold_reply(task, turn.index)).passed
    return passed / len(task.turns)


def longest_chain(task):
    """Independent reference: recursion over values found in earlier results only."""
    calls = [c for t in task.turns for c in t.gold]
    turn_of = [i for i, t in enumerate(task.turns) for _ in t.gold]
    results = [flatten(r) for _, r, _ in gold_results(task)]
    said = [set().union(*(words_of(t.user) for t in task.turns[:i + 1]))
            for i in range(len(task.turns))]

    def level(j):
        best = 0
        for value in map(str, calls[j].arguments.values()):
            sources = [i for i in range(j) if value in results[i]]
            if sources and value not in said[turn_of[j]]:
                best = max(best, 1 + level(sources[0]))
        return best
    return max(map(level, range(len(calls))))


@pytest.mark.parametrize("category", CATEGORIES)
@pytest.mark.parametrize("domains, calls, depth", [
    (("files",), (1,), 0),
    (("files",), (3,), 1),
    (("messaging",), (2, 1), 2),
    (("bookings", "payments"), (3, 2), 3),
    (("files", "messaging", "payments"), (2, 2, 2, 1), 4),
    (("files", "messaging", "bookings", "payments"), (1, 4, 1, 2, 1), 5),
])
def test_a_task_has_the_asked_profile(domains, calls, depth, category):
    task = generate(RequestedProfile(domains, calls, depth, category), random.Random(1))
    assert task.domains == domains and task.category is category
    assert tuple(len(t.gold) for t in task.turns if t.gold) == calls
    assert longest_chain(task) == depth
    assert {TOOLS[c.name].domain for t in task.turns for c in t.gold} == set(domains)
    empty = [i for i, t in enumerate(task.turns) if not t.gold]
    assert len(empty) == (category in (Category.MISS_FUNC, Category.MISS_PARAM))
    if category is Category.MISS_FUNC:
        asked, brought = task.turns[empty[0]:empty[0] + 2]
        (name,) = set(brought.tools) - set(asked.tools)
        assert brought.user == "" and name in {c.name for c in brought.gold}
        assert all(name not in t.tools for t in task.turns[:empty[0]])
        assert all(name in t.tools for t in task.turns[empty[0] + 1:])
    else:
        assert len({t.tools for t in task.turns}) == 1


def test_the_same_rng_gives_the_same_task():
    profile = RequestedProfile(("messaging", "payments"), (2, 2), 2)
    one, two = (generate(profile, random.Random(3)) for _ in range(2))
    assert one == two and one != generate(profile, random.Random(4))


def test_impossible_profiles_are_refused():
    for bad in (((), (1,), 0), (("files",), (), 0), (("files",), (5,), 0),
                (("files",), (1, 1), 2), (("files", "payments"), (1,), 0),
                (("mail",), (1,), 0), (("files",), (1,) * 7, 0)):
        with pytest.raises(ValueError):
            RequestedProfile(*bad)
    with pytest.raises(ValueError, match="turns"):
        RequestedProfile(("files",), (1,) * 6, 0, Category.MISS_FUNC)
    with pytest.raises(ValueError, match="no task found"):
        generate(RequestedProfile(("payments",), (4, 4), 5), random.Random(0), tries=1)


def test_gold_scores_one_and_no_gold_call_can_be_left_out():
    for task in tasks()[:300]:
        assert play(task) == 1.0
        for drop in range(sum(len(t.gold) for t in task.turns)):
            assert play(task, drop) < 1.0, (task.uid, structure_key(task), drop)


def test_every_argument_has_a_source_before_it_is_needed():
    """Independent of `call_shapes`: said so far, or in an earlier result."""
    for task in tasks():
        rows = gold_results(task)
        said, seen, flat = set(), set(), 0
        for turn in task.turns:
            said |= set(words_of(turn.user))
            for call in turn.gold:
                for value in map(str, call.arguments.values()):
                    assert value in said or value in seen, (turn.user, call)
                _, result, ok = rows[flat]
                assert ok
                seen |= set(flatten(result))
                flat += 1
        assert call_shapes(task, strict=True)


def test_a_withheld_value_is_unknown_and_its_place_is_marked():
    marks = {w for text in phrases.VAGUE.values() for w in text.split() if w.startswith("some")}
    for task in tasks():
        vague = [bool(marks & set(words_of(t.user))) for t in task.turns]
        if task.category is not Category.MISS_PARAM:
            assert not any(vague)
            continue
        assert sum(vague) == 1
        asked = vague.index(True)
        assert not task.turns[asked].gold and task.turns[asked + 1].gold
        known = {w for t in task.turns[:asked + 1] for w in words_of(t.user)}
        known |= {w for turn, r, _ in gold_results(task) if turn <= asked for w in flatten(r)}
        (given,) = [w for w in words_of(task.turns[asked + 1].user) if is_entity(w)]
        assert given not in known
        assert given in {str(v) for c in task.turns[asked + 1].gold
                         for v in c.arguments.values()}


def test_every_word_is_fixed_or_an_entity():
    fixed = set(lexicon())
    assert len(fixed) == len(lexicon()) < 450
    assert not any(is_entity(w) for w in fixed)
    assert {"done", "clarify", "unavailable", "error", *TOOLS} <= fixed
    for task in tasks():
        for word in task_words(task):
            assert (word in fixed) != is_entity(word), word
        for turn in task.turns:
            assert turn.user == turn.user.lower() and turn.user == " ".join(turn.user.split())


def test_error_texts_are_made_of_fixed_words():
    fixed = set(lexicon())
    rng = random.Random(2)
    for task in tasks()[:200]:
        env = SUITE.make_env(task)
        calls = [c for t in task.turns for c in t.gold]
        while (turn := env.begin_turn()) is not None:
            for call in rng.sample(calls, len(calls)):
                arguments = {k: rng.choice(("zz-9", 7)) for k in call.arguments}
                (result,) = env.execute((dataclasses.replace(call, arguments=arguments),))
                if not result.ok:
                    assert set(result.text.replace('"', " ").strip("{} ").replace(":", " ")
                               .split()) <= fixed
            env.end_turn("done")


def test_dialogues_are_short():
    lengths = sorted(len(task_words(t)) for t in tasks())
    assert lengths[-1] <= 230 and 35 <= lengths[len(lengths) // 2] <= 75
    for task in tasks():
        assert len({w for w in task_words(task) if is_entity(w)}) <= 40
        for turn in task.turns:
            if turn.gold:
                assert len(words_of(turn.user)) <= 14 + 10 * (len(turn.gold) - 1)


def test_texts_refer_back_to_earlier_turns():
    texts = " ".join(t.user for task in tasks() for t in task.turns[1:])
    for words in ("that file", "the same person", "the same amount", "that booking",
                  "the first message", "it mentions"):
        assert words in texts


def test_wordings_are_several_for_every_tool_and_none_serves_two():
    assert set(phrases.CLAUSES) == set(TOOLS)
    owners = {}
    for name, clauses in phrases.CLAUSES.items():
        assert len(set(clauses)) >= 3
        params = {p.name for p in TOOLS[name].params}
        for clause in clauses:
            assert all("{" + p + "}" in clause for p in params)
            owners.setdefault(clause, name)
            assert owners[clause] == name
    for (name, key), forms in phrases.INNER.items():
        assert key in dict(TOOLS[name].outputs)
        for form in forms:
            form.format(noun="x", **{p.name: "x" for p in TOOLS[name].params})


def test_entities_are_one_word_each_and_never_come_twice():
    maker = Maker(random.Random(0))
    kinds = ("file folder user topic name note city date amount fee pin message trip hold "
             "booking bill payment link request receipt").split()
    drawn = [str(maker.new(kind)) for kind in kinds for _ in range(60)]
    assert len(set(drawn)) == len(drawn) and all(map(is_entity, drawn))
    assert not any(set(w) & set(" ?") or w[-1] in ",." for w in drawn)
    with pytest.raises(ValueError, match="unknown entity kind"):
        maker.new("colour")


def test_the_tasks_are_more_than_a_million():
    """A lower bound by counting: one structure alone, "send a note to a contact", has a
    choice of 70^4 and more notes, of as many names, and of wordings. And no two meet."""
    notes = len({Maker(random.Random(i)).new("note") for i in range(5000)})
    assert notes > 4990  # birthday bound: fewer than 1.2 million notes would collide more
    assert notes ** 2 > 1e6
    hashes = {t.content_hash for t in tasks()}
    # Two tasks of a single call without arguments ("what is my balance") may coincide.
    assert len(hashes) >= len(tasks()) - 3
    assert len({base_key(call_shapes(t)) for t in tasks()}) > 600


def test_hardness_is_spread_over_the_seeds():
    train = split("train")
    calls = [sum(len(t.gold) for t in task.turns) for task in train]
    assert min(calls) == 1 and max(calls) == 9
    assert {len(t.turns) for t in train} == set(range(1, 7))
    assert {longest_chain(t) for t in train} == set(range(6))
    tools = {c.name for task in train for t in task.turns for c in t.gold}
    assert tools == set(TOOLS)
