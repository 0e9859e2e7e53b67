"""Which tokens end a message, and which one pads, as the files beside a model's weights say."""

from __future__ import annotations

import dataclasses
import os
import pathlib

from rods_jax.text.json_file import read_optional
from rods_jax.text.template import special_tokens
from rods_jax.text.tokenizer import TextTokenizer
from rods_jax.types import Json


@dataclasses.dataclass(frozen=True)
class Specials:
    """`stop_ids`: all tokens that end a message, at least one."""

    stop_ids: tuple[int, ...]
    pad_id: int


def read_specials(folder: str | os.PathLike, tokenizer: TextTokenizer) -> Specials:
    """End tokens are eos_token_id, a number or a list, of generation_config.json; where it has
    none, eos_token of tokenizer_config.json; else eos_token_id of config.json. The padding
    token is looked for alike, in tokenizer_config.json first, and the first end token where
    there is none. Raises ValueError where a named token is no control token of `tokenizer`."""
    folder = pathlib.Path(folder)
    generation = read_optional(folder / "generation_config.json")
    config = read_optional(folder / "config.json")
    named = special_tokens(read_optional(folder / "tokenizer_config.json"))
    for kind, token in named.items():
        # Qwen names no unknown token, some others name one that is plain text.
        if kind != "unk_token" and token not in tokenizer.control:
            raise ValueError(f"{folder / 'tokenizer_config.json'}: {kind} {token!r} is no added "
                             "token of tokenizer.json: take both from one model")
    by_name = {kind: (tokenizer.control[token],) for kind, token in named.items()
               if token in tokenizer.control}

    def ids(values: dict[str, Json], name: str, key: str) -> tuple[int, ...]:
        return _ids(values.get(key), f"{folder / name}: {key}", tokenizer)

    stop_ids = (ids(generation, "generation_config.json", "eos_token_id")
                or by_name.get("eos_token", ())
                or ids(config, "config.json", "eos_token_id"))
    if not stop_ids:
        raise ValueError(f"{folder} names no end token: set eos_token_id in "
                         "generation_config.json")
    pad = (by_name.get("pad_token", ())
           or ids(generation, "generation_config.json", "pad_token_id")
           or ids(config, "config.json", "pad_token_id") or stop_ids)
    return Specials(stop_ids, pad[0])


def _ids(value: Json, where: str, tokenizer: TextTokenizer) -> tuple[int, ...]:
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    known = set(tokenizer.control.values())
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int) or item not in known:
            raise ValueError(f"{where} {item!r} is no added token of tokenizer.json: "
                             "take both from one model")
    return tuple(dict.fromkeys(values))
