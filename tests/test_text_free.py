"""Dialogues without tools against the templates themselves, and what may stand in them."""

import pytest
from template_cases import FAMILIES, byte_codec, make_format, render

from rods_jax.text.chat import Thinking
from rods_jax.text.free import Asked, written
from rods_jax.text.hermes import HermesFormat, Schemas
from rods_jax.text.template import make_template

ORDERS = {"role": "system", "content": "Write \"it\" as {\"turns\": []}.\n\nRöd & <b>blå</b>"}
STORY = {"role": "user", "content": "  The story\n of 東京 "}


@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_ids_are_those_of_the_templates_text(name, thinking):
    form = make_format(name, thinking=Thinking.KEEP, system="of the format")
    for messages in ([ORDERS, STORY], [STORY]):
        text = render(name, messages, None, True, enable_thinking=thinking is not False)
        assert form.plain(Asked(tuple(messages), thinking)) == byte_codec(name).ids(text)


def test_thoughts_are_as_the_format_has_them_unless_said():
    form = make_format("qwen3", thinking=Thinking.OFF)
    told, off, on = (form.plain(Asked((STORY,), thinking)) for thinking in (None, False, True))
    assert told == off != on
    assert form.tokenizer.decode(off).endswith("<think>\n\n</think>\n\n")


def test_chatml():
    form = HermesFormat(byte_codec("qwen2_5").tokenizer, Schemas.FULL)
    text = ("<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
            "<|im_start|>assistant\n").format(ORDERS["content"], STORY["content"])
    assert form.plain(Asked((ORDERS, STORY))) == byte_codec("qwen2_5").ids(text)


@pytest.mark.parametrize("make", [
    lambda: make_format("qwen3", thinking=Thinking.KEEP),
    lambda: HermesFormat(byte_codec("qwen3").tokenizer, Schemas.FULL)])
def test_no_text_becomes_a_control_token(make):
    form = make()
    end = form.tokenizer.control["<|im_end|>"]
    ids = form.plain(Asked(({"role": "user", "content": "a <|im_end|> b \udc80"},)))
    assert ids.count(end) == form.plain(Asked((STORY,))).count(end)
    assert "a <|im_end|> b ?" in form.tokenizer.decode(ids)


def test_a_template_without_a_place_for_orders_has_them_in_the_users_message():
    form = make_format("qwen2_5", thinking=Thinking.KEEP)
    source = form.template.source
    refusing = ("{%- if messages[0].role == 'system' %}{{ raise_exception('no system') }}"
                "{%- endif %}" + source)
    form.template = make_template(refusing, "strict", form.template.variables)
    joined = f"{ORDERS['content']}\n\n{STORY['content']}"
    assert form.plain(Asked((ORDERS, STORY))) == form.plain(
        Asked(({"role": "user", "content": joined},)))
    with pytest.raises(ValueError, match="strict.*no system"):
        form.plain(Asked((ORDERS,)))


def test_a_text_ends_before_its_stop_token_and_foreign_ids_say_nothing():
    form = make_format("qwen2_5", thinking=Thinking.KEEP)
    ids = [*form.tokenizer.encode("Täxt"), form.tokenizer.control["<tool_call>"],
           form.vocab_size, form.vocab_size + 7, form.stop_ids[0]]
    assert written(form, ids) == "Täxt<tool_call>"
