"""What turns a dialogue into token ids and sampled ids back into calls.

Two promises hold for every format. Ids are append-only: what `prompt`, the sampler, `results`,
`errors` and `user` produced is concatenated and never encoded again, so the log-prob of a
sampled id always belongs to that id. And no text of a user or a tool can become a control id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rods_jax.tools.env import UserTurn
from rods_jax.types import ParsedStep, Task, ToolCall, ToolResult, ToolSpec


class Dialogue(Protocol):
    """The codec of one rollout. It may hold state (names met so far, how the last message
    ended), so the rollouts of a group each take a clone after the shared prompt was made, and
    every message goes through `parse` or `step` before what follows it is asked for."""

    def clone(self) -> Dialogue: ...

    def prompt(self, turn: UserTurn) -> list[int]:
        """System text, visible tools, the first user turn, the assistant header."""

    def user(self, turn: UserTurn) -> list[int]:
        """What follows the end of a turn: the next user turn, tools that became visible with
        it, the assistant header. Where the format `rewrites`: the whole prompt of that turn
        instead, what was said before included, which begins a row of its own."""

    def results(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[int]:
        """What follows a step with calls: one result a call, the assistant header."""

    def errors(self, errors: Sequence[str]) -> list[int]:
        """What follows a malformed step: a fixed error text, the assistant header."""

    def parse(self, ids: Sequence[int]) -> ParsedStep:
        """Reads one sampled message, stop id included if it was sampled. Never raises."""

    def step(self, calls: Sequence[ToolCall], text: str = "") -> list[int]:
        """The ids an expert would sample for this message, stop id included."""

    def text(self, ids: Sequence[int]) -> str:
        """The ids spelled out for people; not meant to be encoded again."""


class ChatFormat(Protocol):
    """`stop_ids`: any of them ends an assistant message. `rewrites`: earlier turns look
    otherwise once a new one begins (thoughts are dropped), so a rollout has a row of ids a
    turn, each append-only, instead of one."""

    vocab_size: int
    stop_ids: tuple[int, ...]
    pad_id: int
    rewrites: bool

    def start(self, task: Task, tools: Sequence[ToolSpec]) -> Dialogue:
        """A fresh dialogue for one rollout (or for the prompt its group shares)."""
