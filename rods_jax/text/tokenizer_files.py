"""A tokenizer as the files of a Hugging Face folder, for one that did not come out of such.

    tokenizer.json          pieces, merges, control tokens as its added tokens
    tokenizer_config.json   which of them begin, end and pad; the chat template
    generation_config.json  which of them end a message

Loaded elsewhere, they give the ids that the policy was trained on. One thing differs by
intent: there, the spelling of a control token in text is that token.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from rods_jax.text.gguf_metadata import read_metadata
from rods_jax.text.tokenizer import TextTokenizer
from rods_jax.types import Json

_USER_DEFINED = 4  # a GGUF token type: written by id, and part of the text


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """What is known of control tokens beside their ids; all are ids of control tokens.

    stop_ids: any of them ends a message; the first is the end token, if only one may be.
    pad_id, begin_id, unknown_id: None where there is none.
    visible: those that stay in a text when special tokens are left out of it (<tool_call>).
    max_length: tokens that the model was made for.
    """

    stop_ids: tuple[int, ...]
    pad_id: int | None = None
    begin_id: int | None = None
    unknown_id: int | None = None
    visible: frozenset[int] = frozenset()
    max_length: int | None = None

    def __post_init__(self):
        if not self.stop_ids:
            raise ValueError("stop_ids is empty: name the token that ends a message")


def write_tokenizer(folder: str | os.PathLike, tokenizer: TextTokenizer,
                    chat_template: str | None, special: SpecialTokens) -> None:
    """Writes the three files, in place of any that are there; the folder is made if need be.
    Raises ValueError, one line and before anything is written, for special tokens that are
    no control tokens of the tokenizer and for control tokens whose ids cannot be kept."""
    names = _spelled(tokenizer)
    files = {"tokenizer.json": _tokenizer(tokenizer, names, special),
             "tokenizer_config.json": _tokenizer_config(names, chat_template, special),
             "generation_config.json": _generation_config(names, special)}
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8")


def read_gguf(path: str | os.PathLike, tokenizer: TextTokenizer
              ) -> tuple[str | None, SpecialTokens]:
    """Chat template and special tokens of a GGUF file, for `write_tokenizer`. tokenizer: the
    file's own. Raises ValueError, one line with the path, where it names no end token or one
    that is no control token."""
    metadata = read_metadata(path)
    known = set(tokenizer.control.values())

    def token(key: str) -> int | None:
        found = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if found is not None and found not in known:
            raise ValueError(f"{path}: tokenizer.ggml.{key}_token_id {found!r} is no control "
                             "token: convert it anew")
        return found

    stop_ids = dict.fromkeys(i for i in map(token, ("eos", "eot", "eom")) if i is not None)
    if not stop_ids:
        raise ValueError(f"{path} names no end token (tokenizer.ggml.eos_token_id): "
                         "convert it anew")
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return metadata.get("tokenizer.chat_template"), SpecialTokens(
        stop_ids=tuple(stop_ids), pad_id=token("padding"), begin_id=token("bos"),
        unknown_id=token("unknown"), max_length=length,
        visible=frozenset(i for i, kind in enumerate(kinds) if kind == _USER_DEFINED))


def _spelled(tokenizer: TextTokenizer) -> dict[int, str]:
    """Control tokens by id, in order of ids."""
    names = {i: name for name, i in sorted(tokenizer.control.items(), key=lambda item: item[1])}
    if len(names) < len(tokenizer.control):
        raise ValueError("two control tokens share an id: give each its own")
    return names


def _flags(i: int, special: SpecialTokens) -> dict[str, Json]:
    return {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": i not in special.visible}


def _tokenizer(tokenizer: TextTokenizer, names: Mapping[int, str], special: SpecialTokens
               ) -> dict[str, Json]:
    state = json.loads(tokenizer.plain.to_str())
    # Added tokens that are not in the vocabulary would be numbered anew behind it.
    vocab = state["model"]["vocab"]
    by_id = {i: piece for piece, i in vocab.items()}
    for i, name in names.items():
        if by_id.get(i, name) != name:
            raise ValueError(f"control token {name!r} has the id {i} of the piece {by_id[i]!r}: "
                             "give it an id of its own")
        if vocab.setdefault(name, i) != i:
            raise ValueError(f"control token {name!r} has id {i}, in the vocabulary "
                             f"{vocab[name]}: give it one id")
    state["model"]["vocab"] = dict(sorted(vocab.items(), key=lambda item: item[1]))
    state["normalizer"] = _normalizer(state["normalizer"], tokenizer.no_piece)
    state["added_tokens"] = [{"id": i, "content": name, **_flags(i, special)}
                             for i, name in names.items()]
    _check(type(tokenizer.plain), state, names)
    return state


def _normalizer(own: Json, no_piece: frozenset[int]) -> Json:
    """The tokenizer's own behind one that writes "?" where TextTokenizer.encode does: BPE
    alone would leave out what it has no piece for."""
    # Literal characters, which every regex engine reads alike; printable ASCII, which would
    # have to be escaped, always has pieces.
    spans = [f"{chr(first)}-{chr(last)}" for first, last in map(_begun, sorted(no_piece))
             if first <= last]
    if not spans:
        return own
    mark = {"type": "Replace", "pattern": {"Regex": f"[{''.join(spans)}]"}, "content": "?"}
    if own is None or own == mark:
        return mark
    before = own["normalizers"] if own["type"] == "Sequence" else [own]
    if before[0] == mark:
        return own
    return {"type": "Sequence", "normalizers": [mark, *before]}


def _begun(byte: int) -> tuple[int, int]:
    """First and last of the characters whose UTF-8 begins with a byte; last < first: none."""
    if byte < 0x80:
        return byte, byte
    if byte < 0xC0:
        raise ValueError(f"the vocabulary lacks the byte {byte:#x}, within characters of all "
                         "kinds: take one that has it")
    if byte < 0xE0:
        return max(0x80, (byte & 31) << 6), (byte & 31) << 6 | 0x3F
    if byte < 0xF0:  # 0xED stops short of the surrogates
        return (max(0x800, (byte & 15) << 12),
                0xD7FF if byte == 0xED else (byte & 15) << 12 | 0xFFF)
    return max(0x10000, (byte & 15) << 18), min(0x10FFFF, (byte & 15) << 18 | 0x3FFFF)


def _check(loader: Any, state: Mapping[str, Any], names: Mapping[int, str]) -> None:
    """That tokenizers.Tokenizer, the loader, finds each control token in text, under its id."""
    loaded = loader.from_str(json.dumps(state))
    for i, name in names.items():
        ids = loaded.encode(name, add_special_tokens=False).ids
        if ids != [i]:
            raise ValueError(f"control token {name!r} has id {i} and would be read as {ids}: "
                             "give it another spelling")


def _tokenizer_config(names: Mapping[int, str], chat_template: str | None,
                      special: SpecialTokens) -> dict[str, Json]:
    config: dict[str, Json] = {
        "added_tokens_decoder": {str(i): {"content": name, **_flags(i, special)}
                                 for i, name in names.items()},
        # Text comes back as it was, and nothing is put in front of it.
        "add_bos_token": False, "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        # A class that takes tokenizer.json as it is; those of one model put parts of their own.
        "tokenizer_class": "PreTrainedTokenizerFast"}
    for key, i in (("bos_token", special.begin_id), ("eos_token", special.stop_ids[0]),
                   ("pad_token", special.pad_id), ("unk_token", special.unknown_id)):
        if i is not None:
            config[key] = _name(names, i, key)
    if special.max_length is not None:
        config["model_max_length"] = special.max_length
    if chat_template is not None:
        config["chat_template"] = chat_template
    return config


def _name(names: Mapping[int, str], i: int, key: str) -> str:
    if i not in names:
        raise ValueError(f"{key} has id {i}, which is no control token: name one of "
                         + ", ".join(map(repr, itertools.islice(names.values(), 8))))
    return names[i]


def _generation_config(names: Mapping[int, str], special: SpecialTokens) -> dict[str, Json]:
    stop = special.stop_ids
    for i in stop:
        _name(names, i, "stop_ids")
    config = {"bos_token_id": special.begin_id, "pad_token_id": special.pad_id,
              "eos_token_id": stop[0] if len(stop) == 1 else list(stop)}
    return {key: value for key, value in config.items() if value is not None}
