"""A byte-level BPE tokenizer that keeps control tokens and text apart.

`encode` knows no control tokens at all: "<|im_end|>" in a tool's output becomes the plain
characters it is made of, and decodes back unchanged. Control tokens are written by id, from
`control`. No begin-of-text token is ever added.

Needs the `tokenizers` package.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rods_jax.text.gguf_metadata import read_metadata
from rods_jax.text.json_file import read_object, read_optional

# What a GGUF file says of each token (its own numbering).
_GGUF_CONTROL, _GGUF_USER_DEFINED = 3, 4
# Pre-tokenizers of GGUF files that are built here: digits apart, then GPT-2's byte level.
_GGUF_PRE = ("smollm",)
_SAMPLE = 'A b  c, 12345:\n\n\t{"d-e": [1.5]} '  # text that every tokenizer must give back


@dataclasses.dataclass(frozen=True)
class TextTokenizer:
    """`plain` is a tokenizers.Tokenizer without added tokens; `control` maps the spelling of
    each control token to its id; ids lie in [0, vocab_size). `no_piece` holds the byte values
    that the vocabulary cannot spell: SmolLM2's lacks some control characters and the first
    bytes of unassigned planes."""

    plain: Any
    control: Mapping[str, int]
    vocab_size: int
    no_piece: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        """Ids of text, never a control id. What cannot be spelled (half surrogate pairs,
        characters with a byte in `no_piece`) becomes "?", not nothing."""
        data = text.encode("utf-8", "replace")
        text = data.decode()
        if not self.no_piece.isdisjoint(data):
            text = "".join(
                c if self.no_piece.isdisjoint(c.encode()) else "?" for c in text)
        return self.plain.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, control tokens spelled out. For reading; it may not encode back."""
        spelled = {i: name for name, i in self.control.items()}
        parts: list[str] = []
        run: list[int] = []
        for i in ids:
            if i not in spelled:
                run.append(i)
                continue
            parts += [self.plain.decode(run, skip_special_tokens=False), spelled[i]]
            run = []
        parts.append(self.plain.decode(run, skip_special_tokens=False))
        return "".join(parts)


def byte_level_tokenizer(
    vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], control: Mapping[str, int]
) -> TextTokenizer:
    """From BPE pieces (in byte-level spelling) and merges in order of rank. Digits stand
    alone, the rest is cut as GPT-2 does. Raises ValueError if a plain ASCII character has no
    piece."""
    tokenizers = _tokenizers()
    model = tokenizers.models.BPE(vocab=dict(vocab), merges=list(merges))
    plain = tokenizers.Tokenizer(model)
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Digits(individual_digits=True),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])
    plain.decoder = tokenizers.decoders.ByteLevel()
    no_piece = _no_piece(vocab, "the vocabulary")
    size = 1 + max([*vocab.values(), *control.values()])
    return TextTokenizer(plain, dict(control), size, no_piece)


def byte_tokenizer() -> TextTokenizer:
    """One id a byte and ChatML's control tokens: small, whole, and enough to try a format."""
    control = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
    return byte_level_tokenizer({c: b for b, c in enumerate(_byte_spelling())}, [], control)


def tokenizer_from_gguf(path: str | os.PathLike) -> TextTokenizer:
    """The tokenizer in a GGUF file's metadata. Raises ValueError for another kind than
    byte-level BPE with a pre-tokenizer known here."""
    metadata = read_metadata(path)

    def value(key: str) -> Any:
        key = f"tokenizer.ggml.{key}"
        if key not in metadata:
            raise ValueError(f"{path} has no {key}: take a file with a tokenizer")
        return metadata[key]

    if value("model") != "gpt2" or value("pre") not in _GGUF_PRE:
        raise ValueError(f"{path} has a {value('model')} tokenizer with pre-tokenizer "
                         f"{value('pre')}: only gpt2 with {', '.join(_GGUF_PRE)} is built here")
    tokens, kinds = value("tokens"), value("token_type")
    vocab = {token: i for i, token in enumerate(tokens)}
    control = {tokens[i]: i for i, kind in enumerate(kinds)
               if kind in (_GGUF_CONTROL, _GGUF_USER_DEFINED)}
    merges = [tuple(merge.split(" ")) for merge in value("merges")]
    return byte_level_tokenizer(vocab, merges, control)


def tokenizer_from_json(path: str | os.PathLike) -> TextTokenizer:
    """From a Hugging Face tokenizer.json, or the folder it lies in. All its added tokens become
    control tokens, also those it does not call special, such as Qwen2.5's <tool_call>.

    Raises ValueError, one line, for another kind than byte-level BPE, and for added tokens that
    are more than a spelling and an id, or that the tokenizers package would number otherwise:
    they would give other ids here than elsewhere."""
    path = pathlib.Path(path)
    path = path / "tokenizer.json" if path.is_dir() else path
    state = read_object(path)
    model = state.get("model")
    _check_kind(model, path)
    control = _added_tokens(state, path)
    _check_listed(control, path)
    made = {"".join(merge) if isinstance(merge, list) else str(merge).replace(" ", "", 1)
            for merge in model["merges"]}
    for token in control:
        if token in made:
            raise ValueError(f"{path}: added token {token!r} is also what plain text is made "
                             "into: no text could spell it without being it")
    # No added tokens: nothing to match in text. No post-processor: nothing to add around it.
    # No vocabulary entry either: no text can become a control token.
    vocab = {piece: i for piece, i in model["vocab"].items() if piece not in control}
    plain = _loaded({
        **state, "added_tokens": [], "post_processor": None, "truncation": None,
        "padding": None, "model": {**model, "vocab": vocab, "unk_token": None}}, path)
    _check_text(plain, state, path)
    _check_ids(control, vocab, _loaded(state, path), path)
    size = 1 + max([*vocab.values(), *control.values()])
    return TextTokenizer(plain, control, size, _no_piece(vocab, f"{path}: the vocabulary"))


def _loaded(state: Mapping[str, Any], path: pathlib.Path) -> Any:
    tokenizers = _tokenizers()
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(state))
    except Exception as error:  # the package raises nothing narrower
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is no tokenizer ({reason}): fetch it again") from None


def _check_kind(model: Any, path: pathlib.Path) -> None:
    kind = model.get("type", "BPE") if isinstance(model, dict) else None
    if kind != "BPE":
        raise ValueError(f"{path} has a tokenizer of type {kind}: only byte-level BPE is read, "
                         "as Qwen, Llama 3 and SmolLM2 have it")
    if not isinstance(model.get("vocab"), dict) or not isinstance(model.get("merges"), list):
        raise ValueError(f"{path} lacks the vocabulary or merges of its model: fetch it again")
    if model.get("dropout"):
        raise ValueError(f"{path} drops merges at random: set model.dropout to null")


def _added_tokens(state: Mapping[str, Any], path: pathlib.Path) -> dict[str, int]:
    control: dict[str, int] = {}
    tokens = state.get("added_tokens") or []
    if not isinstance(tokens, list):
        raise ValueError(f"{path}: added_tokens is no list: fetch it again")
    for token in tokens:
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise ValueError(f"{path}: added token {token!r} is no object with a content: "
                             "fetch it again")
        name, odd = token["content"], [flag for flag in ("lstrip", "rstrip", "single_word")
                                       if token.get(flag)]
        if odd:
            raise ValueError(f"{path}: added token {name!r} is {odd[0]}, so it depends on the "
                             "text beside it: set that to false, or take another model")
        if not name.strip():
            raise ValueError(f"{path}: added token {name!r} is plain white space and would have "
                             "to be found in all text: take another model")
        i = token.get("id")
        if isinstance(i, bool) or not isinstance(i, int) or i < 0:
            raise ValueError(f"{path}: added token {name!r} has the id {i!r}, which is no whole "
                             "number from 0 on: fetch it again")
        if control.setdefault(name, i) != i:
            raise ValueError(f"{path}: added token {name!r} has two ids, {control[name]} and "
                             f"{i}: leave one of them")
    return control


def _check_ids(control: Mapping[str, int], vocab: Mapping[str, int], whole: Any,
               path: pathlib.Path) -> None:
    """That each id stands for one thing, and that `whole`, the unchanged file as the package
    loads it, has the same. It counts on from the vocabulary and reads no ids."""
    owner: dict[int, str] = {}
    for name, i in (*vocab.items(), *control.items()):
        if owner.setdefault(i, name) != name:
            raise ValueError(f"{path}: {owner[i]!r} and {name!r} both have the id {i}: "
                             "give each its own")
    for name, i in control.items():
        if whole.token_to_id(name) != i:
            raise ValueError(f"{path}: added token {name!r} has the id {i}, but the tokenizers "
                             f"package gives it {whole.token_to_id(name)}: leave no gaps "
                             "between ids, and have vocabulary and added_tokens agree")


def _check_listed(control: Mapping[str, int], path: pathlib.Path) -> None:
    """tokenizer_config.json may list added tokens too, and transformers adds what is new."""
    listed = read_optional(path.parent / "tokenizer_config.json").get("added_tokens_decoder")
    if not isinstance(listed or {}, dict):
        raise ValueError(f"{path.parent / 'tokenizer_config.json'}: added_tokens_decoder is no "
                         "object: fetch it again")
    for i, token in (listed or {}).items():
        name = token.get("content") if isinstance(token, dict) else token
        if not isinstance(name, str) or str(control.get(name)) != i:
            raise ValueError(f"{path} has no added token {name!r} with id {i}, which "
                             "tokenizer_config.json lists: take both from one model")


def _check_text(plain: Any, state: Mapping[str, Any], path: pathlib.Path) -> None:
    """That text comes back as it was, and that names of added tokens are left as they are."""
    if "ByteLevel" not in json.dumps([state.get("decoder"), state.get("pre_tokenizer")]):
        raise ValueError(f"{path} has BPE that is not byte-level: only byte-level BPE is read, "
                         "as Qwen, Llama 3 and SmolLM2 have it")
    back = plain.decode(plain.encode(_SAMPLE, add_special_tokens=False).ids,
                        skip_special_tokens=False)
    if back != _SAMPLE:
        raise ValueError(f"{path} gives {_SAMPLE!r} back as {back!r}: take a tokenizer that "
                         "changes no text")
    for token in state.get("added_tokens") or ():
        name = token["content"]
        if token.get("normalized") and plain.normalizer is not None \
                and plain.normalizer.normalize_str(name) != name:
            raise ValueError(f"{path}: added token {name!r} is looked for in changed text: set "
                             "its normalized to false")


def _no_piece(vocab: Mapping[str, int], whose: str) -> frozenset[int]:
    """The byte values that the vocabulary cannot spell. Raises ValueError if one of them is a
    plain ASCII character."""
    no_piece = frozenset(b for b, c in enumerate(_byte_spelling()) if c not in vocab)
    lost = [chr(b) for b in (9, 10, *range(32, 127)) if b in no_piece]
    if lost:
        raise ValueError(f"{whose} lacks {lost[:8]}: is it byte-level BPE?")
    return no_piece


def _byte_spelling() -> list[str]:
    """How the byte-level alphabet spells each byte: printable Latin-1 as itself, the others
    from U+0100 on in order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [b for b in range(256) if b not in printable]
    return [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ValueError(
            "the package tokenizers is not installed: pip install tokenizers") from None
    return tokenizers
