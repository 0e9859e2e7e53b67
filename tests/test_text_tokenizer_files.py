"""Written tokenizers, read back by this package and by the tokenizers package alone, which is
what transformers and servers read them with."""

import dataclasses
import functools
import json
import pathlib
import re
import tempfile

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from rods_jax.models.gguf import smollm2_path
from rods_jax.text.specials import Specials, read_specials
from rods_jax.text.tokenizer import (
    byte_level_tokenizer, byte_tokenizer, tokenizer_from_gguf, tokenizer_from_json)
from rods_jax.text.tokenizer_files import SpecialTokens, read_gguf, write_tokenizer

CONTROL = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "<tool_call>": 3}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>\n{% endfor %}"
SPECIAL = SpecialTokens(stop_ids=(2,))


# Bytes without a piece: a control character, those that cannot begin a character at all, and
# some that begin characters of two, three and four bytes ("\u0301", U+E0000 and others).
LOST = (0x04, 0x7F, 0xC0, 0xC1, 0xC2, 0xCC, 0xE0, 0xED, 0xEF, 0xF0, 0xF3, 0xF4, 0xF5, 0xFF)


def pieces(lost=LOST):
    """Control tokens first, as in SmolLM2; bytes; merges."""
    spelling = sorted(byte_tokenizer().plain.get_vocab().items(), key=lambda item: item[1])
    single = [c for c, b in spelling if b not in lost]
    return [*CONTROL, *single, "Ġh", "Ġhi", "12", "ĠĠ"], ["Ġ h", "Ġh i", "1 2", "Ġ Ġ"]


def lacking(lost=LOST):
    tokens, merges = pieces(lost)
    return byte_level_tokenizer({token: i for i, token in enumerate(tokens)},
                                [tuple(merge.split(" ")) for merge in merges], CONTROL)


def scattered():
    """Ids that no loader would choose by itself."""
    made = byte_tokenizer()
    return dataclasses.replace(made, control={"<a>": 700, "<|end|>": 300, "<|im_end|>": 299},
                               vocab_size=701)


def composing():
    """Composes accents before it cuts the text, as Qwen's does, and lacks a byte."""
    made = lacking()
    plain = tokenizers.Tokenizer.from_str(made.plain.to_str())
    plain.normalizer = tokenizers.normalizers.NFC()
    return dataclasses.replace(made, plain=plain)


MAKERS = {"behind": byte_tokenizer, "lacking": lacking, "scattered": scattered,
          "composing": composing, "smollm2": lambda: tokenizer_from_gguf(smollm2_path())}


@functools.cache
def written(name):
    """(the tokenizer, read back by us, read back by the tokenizers package)"""
    try:
        made = MAKERS[name]()
    except ValueError as error:
        pytest.skip(str(error))
    special = SpecialTokens(stop_ids=(max(made.control.values()),))
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(folder, made, TEMPLATE, special)
        path = pathlib.Path(folder) / "tokenizer.json"
        return made, tokenizer_from_json(path), tokenizers.Tokenizer.from_file(str(path))


TEXTS = st.text() | st.lists(
    st.sampled_from(["12 ", "  3", " hi", "\n\n\n", "e\u0301", "é", "\x04", "\U000e0001", "©",
                     "日本", "'ll", *CONTROL, "<a>", "<|end|>", "\u00a0", "\t"])
    | st.text(max_size=3)).map("".join)


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=100)
@given(text=TEXTS)
def test_ids_are_the_same_after_the_way_through_files(name, text):
    made, ours, elsewhere = written(name)
    assert ours.control == made.control and ours.vocab_size == made.vocab_size
    ids = made.encode(text)
    assert ours.encode(text) == ids and ours.decode(ids) == made.decode(ids)
    # Elsewhere a control token's spelling is that token; the text between is ours.
    spelled = re.compile("(" + "|".join(map(re.escape, made.control)) + ")")
    want = [i for part in spelled.split(text)
            for i in ([made.control[part]] if part in made.control else made.encode(part))]
    assert elsewhere.encode(text).ids == want


def test_written_twice_is_the_same(tmp_path):
    for name in ("lacking", "scattered", "composing"):
        made = MAKERS[name]()
        for folder, tokenizer in (("once", made), ("twice", None)):
            tokenizer = tokenizer or tokenizer_from_json(tmp_path / "once")
            special = SpecialTokens(stop_ids=(max(made.control.values()),))
            write_tokenizer(tmp_path / folder, tokenizer, None, special)
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            once, twice = (tmp_path / folder / file for folder in ("once", "twice"))
            assert twice.read_bytes() == once.read_bytes()


def test_what_has_no_piece_becomes_a_question_mark_elsewhere_too(tmp_path):
    made = lacking()
    assert made.no_piece == set(LOST)
    write_tokenizer(tmp_path, made, None, SPECIAL)
    elsewhere = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    every = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    want = "".join("?" if made.no_piece & set(c.encode()) else c for c in every)
    assert elsewhere.normalizer.normalize_str("".join(every)) == want
    with pytest.raises(ValueError, match="lacks the byte 0xa9"):
        write_tokenizer(tmp_path, lacking((0x04, 0xA9)), None, SPECIAL)


def read(folder, name):
    return json.loads((folder / name).read_text(encoding="utf-8"))


def test_the_files_say_which_tokens_end_pad_and_stay_in_text(tmp_path):
    folder = tmp_path / "new" / "folder"
    special = SpecialTokens(stop_ids=(2, 0), pad_id=0, begin_id=1, unknown_id=0,
                            visible=frozenset({3}), max_length=8192)
    write_tokenizer(folder, lacking(), TEMPLATE, special)
    assert read(folder, "generation_config.json") == {
        "eos_token_id": [2, 0], "pad_token_id": 0, "bos_token_id": 1}
    config = read(folder, "tokenizer_config.json")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    listed = config.pop("added_tokens_decoder")
    assert listed == {str(i): {"content": name, "special": i != 3, **flags}
                      for name, i in CONTROL.items()}
    assert config == {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
        "add_bos_token": False, "add_prefix_space": False, "model_max_length": 8192,
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>", "chat_template": TEMPLATE}
    assert read(folder, "tokenizer.json")["added_tokens"] == [
        {"id": int(i), **token} for i, token in listed.items()]
    elsewhere = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = elsewhere.encode("<tool_call> hi<|im_end|>").ids
    assert elsewhere.decode(ids, skip_special_tokens=True) == "<tool_call> hi"
    assert read_specials(folder, tokenizer_from_json(folder)) == Specials((2, 0), 0)


def test_what_is_not_known_is_left_out(tmp_path):
    write_tokenizer(tmp_path, lacking(), None, SPECIAL)
    assert read(tmp_path, "generation_config.json") == {"eos_token_id": 2}
    left = {"bos_token", "pad_token", "unk_token", "chat_template", "model_max_length"}
    assert not left & read(tmp_path, "tokenizer_config.json").keys()


@pytest.mark.parametrize("change, special, words", [
    ({}, SpecialTokens((9,)), "eos_token has id 9, which is no control token"),
    ({}, SpecialTokens((2,), pad_id=77), "pad_token has id 77, which is no control token"),
    ({}, SpecialTokens((2, 9)), "stop_ids has id 9, which is no control token"),
    ({"control": {**CONTROL, "<x>": 2}}, SPECIAL, "two control tokens share an id"),
    ({"control": {**CONTROL, "<x>": 40}}, SPECIAL, "'<x>' has the id 40 of the piece '%'"),
    ({"control": {**CONTROL, "12": 900}}, SPECIAL, "'12' has id 900, in the vocabulary 2"),
    ({"control": {**CONTROL, "": 900}}, SPECIAL, "control token '' has id 900"),
])
def test_tokens_that_cannot_be_written_are_named(tmp_path, change, special, words):
    with pytest.raises(ValueError, match=words) as error:
        write_tokenizer(tmp_path / "out", dataclasses.replace(lacking(), **change), None, special)
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="stop_ids is empty"):
        SpecialTokens(stop_ids=())


def gguf_file(path, **more):
    writer = gguf.GGUFWriter(path, "llama")
    tokens, merges = pieces()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, 4] + [1] * (len(tokens) - 4))
    writer.add_token_merges(merges)
    writer.add_context_length(8192)
    for key, value in more.items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", value)
    writer.add_chat_template(TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_a_gguf_files_metadata_become_the_folder(tmp_path):
    path = gguf_file(tmp_path / "m.gguf", eos=2, eot=0, bos=1, padding=0)
    made = tokenizer_from_gguf(path)
    template, special = read_gguf(path, made)
    assert template == TEMPLATE and special == SpecialTokens(
        stop_ids=(2, 0), pad_id=0, begin_id=1, visible=frozenset({3}), max_length=8192)
    write_tokenizer(tmp_path / "out", made, template, special)
    back = tokenizer_from_json(tmp_path / "out")
    assert back.control == made.control == CONTROL
    assert read_specials(tmp_path / "out", back) == Specials((2, 0), 0)
    assert read_gguf(gguf_file(tmp_path / "n.gguf", eos=2, eot=2), made)[1].stop_ids == (2,)


def test_gguf_files_without_end_tokens_are_named(tmp_path):
    made = lacking()
    with pytest.raises(ValueError, match="a.gguf names no end token"):
        read_gguf(gguf_file(tmp_path / "a.gguf", bos=1), made)
    with pytest.raises(ValueError, match="b.gguf: .*eos_token_id 50 is no control token"):
        read_gguf(gguf_file(tmp_path / "b.gguf", eos=50), made)
    with pytest.raises(ValueError, match="absent.gguf is not a file"):
        read_gguf(tmp_path / "absent.gguf", made)


def test_smollm2s_own_metadata():
    try:
        path = smollm2_path()
    except ValueError as error:
        pytest.skip(str(error))
    template, special = read_gguf(path, tokenizer_from_gguf(path))
    assert special == SpecialTokens(stop_ids=(2,), pad_id=2, begin_id=1, unknown_id=0,
                                    max_length=8192)
    assert template.startswith("{% for message in messages %}") and "SmolLM" in template
