"""The byte-level tokenizer against plain Python, and its ways in from files."""

import builtins
import json

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rods_jax.text.gguf_metadata import read_metadata
from rods_jax.text.tokenizer import (
    byte_level_tokenizer, byte_tokenizer, tokenizer_from_gguf, tokenizer_from_json)

BYTES = byte_tokenizer()
CONTROL = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}


@settings(max_examples=100, deadline=None)
@given(st.text() | st.sampled_from([*CONTROL, "<|im_end|>\n<|im_start|>system\n"]))
def test_without_merges_ids_are_the_bytes(text):
    ids = BYTES.encode(text)
    assert ids == list(text.encode()) and BYTES.decode(ids) == text


def test_half_a_surrogate_pair_becomes_a_question_mark():
    assert BYTES.decode(BYTES.encode("a\ud800b")) == "a?b"


def test_control_ids_are_spelled_between_runs_of_text():
    assert BYTES.decode([72, 105, 258, 10, 257, 0xC3, 258, 0xA9]) == (
        "Hi<|im_end|>\n<|im_start|>\ufffd<|im_end|>\ufffd")


def vocabulary():
    """Control tokens first, as in SmolLM2, then bytes but for 0x04 and 0xF1, then merges."""
    spelling = sorted(BYTES.plain.get_vocab().items(), key=lambda item: item[1])
    tokens = [*CONTROL, *(c for c, b in spelling if b not in (0x04, 0xF1)), "Ġh", "Ġhi", "12"]
    return tokens, ["Ġ h", "Ġh i", "1 2"]


def write_gguf(path, pre="smollm", model="gpt2", leave_out=()):
    tokens, merges = vocabulary()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if "pre" not in leave_out:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)))
    writer.add_token_merges(merges)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_gguf_metadata_makes_the_tokenizer(tmp_path):
    tokenizer = tokenizer_from_gguf(write_gguf(tmp_path / "m.gguf"))
    tokens, _ = vocabulary()
    assert tokenizer.control == CONTROL and tokenizer.vocab_size == len(tokens)
    spell = lambda text: [tokens[i] for i in tokenizer.encode(text)]
    assert spell("hi hi") == ["h", "i", "Ġhi"]
    assert spell("a12") == ["a", "1", "2"]  # digits are cut apart before merges
    assert not set(tokenizer.encode("<|im_end|><|endoftext|>")) & {0, 1, 2}
    text = "<|im_end|> hi 日本 12\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    # A byte without a piece must not vanish.
    assert tokenizer.decode(tokenizer.encode("x\x04y\U00040000z")) == "x?y?z"


def test_gguf_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match="pre-tokenizer llama-bpe"):
        tokenizer_from_gguf(write_gguf(tmp_path / "a.gguf", pre="llama-bpe"))
    with pytest.raises(ValueError, match="has a llama tokenizer"):
        tokenizer_from_gguf(write_gguf(tmp_path / "b.gguf", model="llama"))
    with pytest.raises(ValueError, match="no tokenizer.ggml.pre"):
        tokenizer_from_gguf(write_gguf(tmp_path / "c.gguf", leave_out=("pre",)))
    with pytest.raises(ValueError, match="lacks"):
        byte_level_tokenizer({"a": 0}, [], CONTROL)


def test_metadata_matches_the_gguf_package(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values = {"u8": 255, "i8": -1, "u16": 65535, "i16": -5, "u32": 2**32 - 1, "i32": -7,
              "u64": 2**64 - 1, "i64": -(2**63), "f32": 0.5, "f64": 0.1, "b": True, "s": "é\n"}
    for key, value in values.items():
        name = {"u": "uint", "i": "int", "f": "float"}.get(key[0], "")
        method = {"b": "bool", "s": "string"}.get(key, name + key[1:])
        getattr(writer, f"add_{method}")(key, value)
    writer.add_array("ints", [1, -2])
    writer.add_array("words", ["a", "", "日"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    read = read_metadata(path)
    reader = gguf.GGUFReader(path)
    assert read == {key: reader.get_field(key).contents() for key in read}
    assert read | values == read and read["words"] == ["a", "", "日"]

    whole = path.read_bytes()
    for size in (5, 30, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="cut off"):
            read_metadata(path)
    path.write_bytes(whole[:4] + b"\x01" + whole[5:])
    with pytest.raises(ValueError, match="version 1"):
        read_metadata(path)
    path.write_bytes(b"PK" + whole)
    with pytest.raises(ValueError, match="not a GGUF"):
        read_metadata(path)


def test_hugging_face_file_loses_its_added_tokens_to_control(tmp_path):
    state = json.loads(BYTES.plain.to_str())
    state["added_tokens"] = [
        {"id": 300 + i, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": special}
        for i, (name, special) in enumerate([("<|im_end|>", True), ("<tool_call>", False)])]
    state["post_processor"] = {
        "type": "TemplateProcessing", "pair": [], "special_tokens": {
            "<|im_end|>": {"id": "<|im_end|>", "ids": [300], "tokens": ["<|im_end|>"]}},
        "single": [{"SpecialToken": {"id": "<|im_end|>", "type_id": 0}},
                   {"Sequence": {"id": "A", "type_id": 0}}]}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(state))
    tokenizer = tokenizer_from_json(path)
    assert tokenizer.control == {"<|im_end|>": 300, "<tool_call>": 301}
    assert tokenizer.vocab_size == 302
    text = "hi <tool_call><|im_end|>"
    assert tokenizer.encode(text) == list(text.encode())  # nothing added, nothing matched
    assert tokenizer.decode([104, 301, 300]) == "h<tool_call><|im_end|>"


def test_a_missing_package_is_named_with_its_remedy(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "tokenizers":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match="pip install tokenizers"):
        byte_tokenizer()
