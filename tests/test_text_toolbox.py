"""Both formats over the embedded suite: experts' messages come back as the calls they were,
drive the real tools through every turn, and name nothing the dialogue did not show before."""

from rods_jax.text.compact import CompactFormat
from rods_jax.text.hermes import HermesFormat, Schemas
from rods_jax.text.tokenizer import byte_tokenizer
from rods_jax.tools.toolbox import ToolboxSuite, lexicon, split

SUITE = ToolboxSuite()
SPECS = {spec.name: spec for spec in SUITE.tools(SUITE.domains)}


def typed(call):
    """Arguments as the schema types them."""
    properties = SPECS[call.name].parameters["properties"]
    return {key: str(value) if properties[key].get("type") == "string" else value
            for key, value in call.arguments.items()}


def play(form, task):
    """An expert's whole dialogue over the real tools; returns its ids and, for each, whether the
    expert wrote it."""
    dialogue = form.start(task, SUITE.tools(task.domains))
    env = SUITE.make_env(task)
    turn = env.begin_turn()
    ids: list[int] = []
    written: list[bool] = []

    def append(new, by_expert):
        ids.extend(new)
        written.extend([by_expert] * len(new))

    append(dialogue.prompt(turn), False)
    for index, expected in enumerate(task.turns):
        for call in expected.gold:
            message = dialogue.step([call])
            step = dialogue.parse(message)
            assert step.errors == () and [c.name for c in step.calls] == [call.name]
            assert typed(step.calls[0]) == typed(call)
            append(message, True)
            append(dialogue.results(step.calls, env.execute(step.calls)), False)
        message = dialogue.step((), SUITE.gold_reply(task, index))
        said = dialogue.parse(message)
        assert said.errors == () and said.calls == ()
        assert env.end_turn(said.text).passed
        append(message, True)
        turn = env.begin_turn()
        if turn is not None:
            append(dialogue.user(turn), False)
    assert turn is None
    return ids, written


def test_compact_gold_passes_and_every_entity_was_seen_before_it_is_used():
    form = CompactFormat(tuple(SPECS.values()), lexicon())
    for task in split("train")[:100]:
        ids, written = play(form, task)
        assert form.unk_id not in ids
        shown = set()
        for i, by_expert in zip(ids, written, strict=True):
            assert not by_expert or i < form.first_slot or i in shown, task.uid
            if not by_expert:
                shown.add(i)


def test_hermes_gold_passes():
    form = HermesFormat(byte_tokenizer(), Schemas.SIGNATURES)
    for task in split("train")[:20]:
        ids, _ = play(form, task)
        start, end = form.tokenizer.control["<|im_start|>"], form.stop_ids[0]
        assert ids.count(start) == ids.count(end)
