"""Free text: a dialogue without tools, and one message in answer to it.

Of the chat formats those of pretrained models can say anything; the compact one has words for
its own suite alone.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Protocol

from rods_jax.text.tokenizer import TextTokenizer

ROLES = ("system", "user", "assistant")


@dataclasses.dataclass(frozen=True)
class Asked:
    """messages: `role`, one of ROLES, and `content`. thinking: whether the model shall think
    first, where its template can be told; None: as it is spoken to otherwise."""

    messages: tuple[Mapping[str, str], ...]
    thinking: bool | None = None

    def __str__(self) -> str:
        """One line that tells it from others."""
        return json.dumps([list(map(dict, self.messages)), self.thinking])


@dataclasses.dataclass(frozen=True)
class Text:
    """whole: it was ended by the model, not by the limit. Both counts in tokens."""

    text: str
    whole: bool
    prompt_tokens: int = 0
    tokens: int = 0


@dataclasses.dataclass(frozen=True)
class TooLong:
    """The dialogue has more tokens than there is room for."""

    tokens: int
    most: int


@dataclasses.dataclass(frozen=True)
class Refused:
    """The chat template has no place for such a dialogue; one line."""

    why: str


Reply = Text | TooLong | Refused


class FreeText(Protocol):
    """A chat format that can say anything."""

    tokenizer: TextTokenizer
    vocab_size: int
    stop_ids: tuple[int, ...]

    def plain(self, asked: Asked) -> list[int]:
        """Ids of a dialogue without tools, up to where the assistant's message begins. Raises
        ValueError, one line, for one that the template refuses."""


def written(chat: FreeText, ids: Sequence[int]) -> str:
    """The text of a sampled message. Ids beyond the tokenizer's, which a model's head may
    have, say nothing."""
    return chat.tokenizer.decode(
        i for i in ids if i < chat.vocab_size and i not in chat.stop_ids)
