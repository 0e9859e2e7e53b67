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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rods_jax.text.gguf_metadata import read_metadata

# What a GGUF file says of each token (its own numbering).
_GGUF_CONTROL, _GGUF_USER_DEFINED = 3, 4
# Pre-tokenizers of GGUF files that are built here: digits apart, then GPT-2's byte level.
_GGUF_PRE = ("smollm",)


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
    no_piece = frozenset(b for b, c in enumerate(_byte_spelling()) if c not in vocab)
    lost = [chr(b) for b in (9, 10, *range(32, 127)) if b in no_piece]
    if lost:
        raise ValueError(f"the vocabulary lacks {lost[:8]}: is it byte-level BPE?")
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
    """From a Hugging Face tokenizer.json. All its added tokens become control tokens, also
    those it does not call special, such as Qwen2.5's <tool_call>."""
    tokenizers = _tokenizers()
    with open(path, encoding="utf-8") as file:
        state = json.load(file)
    control = {token["content"]: token["id"] for token in state.get("added_tokens", ())}
    # No added tokens: nothing to match in text. No post-processor: nothing to add around it.
    plain = tokenizers.Tokenizer.from_str(
        json.dumps({**state, "added_tokens": [], "post_processor": None}))
    size = 1 + max([*plain.get_vocab().values(), *control.values()])
    return TextTokenizer(plain, control, size)


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
