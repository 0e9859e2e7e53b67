"""The byte-level tokenizer against plain Python, and its ways in from files."""

import builtins
import json
import re

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rods_jax.text.gguf_metadata import read_metadata
from rods_jax.text.specials import read_specials
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


# ------------------------------------------------------------------------------ Hugging Face


def added(token, i, special=True, **flags):
    return {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": special} | flags


def tokenizer_state(**changes):
    """A tokenizer.json with SmolLM2's layout: control tokens are vocabulary entries too."""
    tokens, merges = vocabulary()
    vocab = {token: i for i, token in enumerate(tokens)}
    plain = byte_level_tokenizer(vocab, [tuple(m.split(" ")) for m in merges], {}).plain
    state = json.loads(plain.to_str())
    state["added_tokens"] = [added(token, i) for token, i in CONTROL.items()]
    state["added_tokens"].append(added("<tool_call>", len(tokens), special=False))
    state["post_processor"] = {
        "type": "TemplateProcessing", "pair": [], "special_tokens": {
            "<|im_end|>": {"id": "<|im_end|>", "ids": [2], "tokens": ["<|im_end|>"]}},
        "single": [{"SpecialToken": {"id": "<|im_end|>", "type_id": 0}},
                   {"Sequence": {"id": "A", "type_id": 0}}]}
    state["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 0,
                           "direction": "Right"}
    model = state["model"] | changes.pop("model", {})
    return state | {"model": model} | changes


def write_json(folder, **files):
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_hugging_face_file_loses_its_added_tokens_to_control(tmp_path):
    write_json(tmp_path, tokenizer=tokenizer_state())
    tokens, _ = vocabulary()
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = tokenizer_from_json(path)
        assert tokenizer.control == {**CONTROL, "<tool_call>": NEXT}
        assert tokenizer.vocab_size == NEXT + 1
        # Nothing added, nothing matched, nothing cut off.
        spell = [tokens[i] for i in tokenizer.encode("hi hi<|im_end|>")]
        assert spell == ["h", "i", "Ġhi", *"<|im_end|>"]
        assert tokenizer.decode([tokens.index("Ġh"), NEXT, 2]) == " h<tool_call><|im_end|>"
        # Bytes without a piece do not vanish.
        assert tokenizer.decode(tokenizer.encode("x\x04y\U00040000z")) == "x?y?z"


def test_ids_of_whole_texts_are_those_of_the_file(tmp_path):
    """Control tokens by id and the text between them on its own give what the package gives
    for the whole text."""
    state = tokenizer_state(post_processor=None, truncation=None)
    whole = Tokenizer.from_str(json.dumps(state))
    tokenizer = tokenizer_from_json(write_json(tmp_path, tokenizer=state))
    text = "hi 12<|im_start|> hi\n<tool_call>é hi hi<|im_end|>"
    parts = re.split(r"(<\|?\w+\|?>)", text)
    ids = [i for part in parts for i in (
        [tokenizer.control[part]] if part in tokenizer.control else tokenizer.encode(part))]
    known = whole.encode(text, add_special_tokens=False).ids
    assert ids == [tokenizer.control["<tool_call>"] if whole.id_to_token(i) == "<tool_call>" else i
                   for i in known]


@pytest.mark.parametrize("changes, reason", [
    ({"model": {"type": "Unigram"}}, "type Unigram: only byte-level BPE"),
    ({"model": {"merges": None}}, "lacks the vocabulary or merges"),
    ({"model": {"dropout": 0.1}}, "at random"),
    ({"model": {"merges": [["z", "nope"]]}}, "is no tokenizer .*nope"),
    ({"decoder": None, "pre_tokenizer": None}, "BPE that is not byte-level"),
    ({"normalizer": {"type": "Lowercase"}}, "gives 'A b.* back as 'a b"),
    ({"added_tokens": [added("<pad>", 5, lstrip=True)]}, "'<pad>' is lstrip"),
    ({"added_tokens": [added("<pad>", 5, rstrip=True)]}, "'<pad>' is rstrip"),
    ({"added_tokens": [added("pad", 5, single_word=True)]}, "'pad' is single_word"),
    ({"added_tokens": [added("  ", 5, special=False)]}, "'  ' is plain white space"),
    ({"added_tokens": [added("Ġhi", 5)]}, "'Ġhi' is also what plain text is made into"),
    ({"added_tokens": [added("a", vocabulary()[0].index("a"))]}, r"lacks \['a'\]"),
    ({"added_tokens": [added("①", 5, normalized=True)], "normalizer": {"type": "NFKC"}},
     "'①' is looked for in changed text"),
])
def test_a_tokenizer_that_would_give_other_ids_is_refused(tmp_path, changes, reason):
    tokenizer_from_json(write_json(tmp_path, tokenizer=tokenizer_state()))
    with pytest.raises(ValueError, match=f"tokenizer.json.*{reason}") as caught:
        tokenizer_from_json(write_json(tmp_path, tokenizer=tokenizer_state(**changes)))
    assert "\n" not in str(caught.value)


IM_END = added("<|im_end|>", 2)
NEXT = len(vocabulary()[0])  # the id that a new added token gets


@pytest.mark.parametrize("tokens, reason", [
    ([added("<new>", NEXT + 1)],
     f"added token '<new>' has the id {NEXT + 1}, but the tokenizers package gives it {NEXT}:"),
    ([added("<new>", NEXT), added("<b>", NEXT)], f"'<new>' and '<b>' both have the id {NEXT}:"),
    ([IM_END, added("<|im_end|>", NEXT)], f"'<.im_end.>' has two ids, 2 and {NEXT}:"),
    ([added("<|im_end|>", NEXT)],
     f"'<.im_end.>' has the id {NEXT}, but the tokenizers package gives it 2:"),
    ([added("<new>", vocabulary()[0].index("a"))], r"'a' and '<new>' both have the id \d+:"),
    ([added("<new>", 2)], "'<.im_end.>' and '<new>' both have the id 2:"),
    *(([added("<new>", i)], f"'<new>' has the id {i!r}, which is no whole number")
      for i in (-1, 260.0, True, "260", None)),
    ([{"content": "<new>"}], "'<new>' has the id None, which is no whole number"),
    (["<new>"], "added token '<new>' is no object"),
    ([None], "added token None is no object"),
    ([{"id": NEXT}], "added token {.*} is no object with a content"),
    ([added(7, NEXT)], "added token {.*} is no object with a content"),
    ({"<new>": NEXT}, "added_tokens is no list"),
])
def test_ids_are_those_of_the_tokenizers_package_or_refused(tmp_path, tokens, reason):
    right = [IM_END, added("<new>", NEXT), added("<b>", NEXT + 1)]
    for state in (tokenizer_state(added_tokens=right), tokenizer_state()):
        whole = Tokenizer.from_str(json.dumps(state))
        control = tokenizer_from_json(write_json(tmp_path, tokenizer=state)).control
        assert len(control) > 2
        assert control == {name: whole.token_to_id(name) for name in control}
    with pytest.raises(ValueError, match=f"tokenizer.json: .*{reason}") as caught:
        tokenizer_from_json(
            write_json(tmp_path, tokenizer=tokenizer_state(added_tokens=tokens)))
    assert "\n" not in str(caught.value)


def test_two_pieces_with_one_id_are_refused(tmp_path):
    state = tokenizer_state()
    state["model"]["vocab"]["Ġhi"] = state["model"]["vocab"]["12"]
    with pytest.raises(ValueError, match="'Ġhi' and '12' both have the id"):
        tokenizer_from_json(write_json(tmp_path, tokenizer=state))


@pytest.mark.parametrize("listed, reason", [
    ([], None), (None, None), (["<|im_end|>"], "added_tokens_decoder is no object"),
    ({"x": {"content": "<|im_end|>"}}, "no added token '<.im_end.>' with id x"),
    ({"2": {"content": ["<|im_end|>"]}}, "no added token .* with id 2"),
])
def test_a_list_of_added_tokens_that_is_none_is_named(tmp_path, listed, reason):
    write_json(tmp_path, tokenizer=tokenizer_state(),
               tokenizer_config={"added_tokens_decoder": listed})
    if reason is None:
        assert tokenizer_from_json(tmp_path).control
        return
    with pytest.raises(ValueError, match=reason) as caught:
        tokenizer_from_json(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_none_is_named(tmp_path):
    with pytest.raises(ValueError, match="tokenizer.json cannot be read"):
        tokenizer_from_json(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer.json is not JSON"):
        tokenizer_from_json(tmp_path)
    write_json(tmp_path, tokenizer={})
    with pytest.raises(ValueError, match="of type None"):
        tokenizer_from_json(tmp_path)
    config = {"added_tokens_decoder": {"2": {"content": "<|im_end|>"}, "9": {"content": "<new>"}}}
    write_json(tmp_path, tokenizer=tokenizer_state(), tokenizer_config=config)
    with pytest.raises(ValueError, match="no added token '<new>' with id 9"):
        tokenizer_from_json(tmp_path)


def test_end_tokens_come_from_the_first_file_that_names_them(tmp_path):
    tokenizer = tokenizer_from_json(write_json(tmp_path, tokenizer=tokenizer_state()))

    def read():
        specials = read_specials(tmp_path, tokenizer)
        return specials.stop_ids, specials.pad_id

    with pytest.raises(ValueError, match="names no end token"):
        read()
    write_json(tmp_path, config={"eos_token_id": 0})
    assert read() == ((0,), 0)
    write_json(tmp_path, tokenizer_config={"eos_token": {"content": "<|im_end|>"}})
    assert read() == ((2,), 2)
    write_json(tmp_path, generation_config={"eos_token_id": [1, 2, 1], "pad_token_id": 0})
    assert read() == ((1, 2), 0)
    write_json(tmp_path, generation_config={"eos_token_id": 0}, tokenizer_config={
        "eos_token": "<|im_end|>", "pad_token": "<|im_start|>", "unk_token": "a"})
    assert read() == ((0,), 1)
    for wrong in (77, [0, 77], "a", True, -1):
        write_json(tmp_path, generation_config={"eos_token_id": wrong})
        with pytest.raises(ValueError, match="generation_config.json: eos_token_id .* no added"):
            read()
    write_json(tmp_path, tokenizer_config={"eos_token": "</s>"})
    with pytest.raises(ValueError, match="tokenizer_config.json: eos_token '</s>' is no added"):
        read()


def test_a_missing_package_is_named_with_its_remedy(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "tokenizers":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match="pip install tokenizers"):
        byte_tokenizer()
