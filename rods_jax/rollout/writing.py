"""Free text from the rollout engine: the policy writes between two steps.

A text is a row in the engine's own slots, which are empty then: so writing takes no memory and
no program beside those of the rollouts, and a text may have what their rows may have, max_len
tokens with all that was asked.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Sequence

import jax

from rods_jax.models.decoder import unstacked
from rods_jax.rollout.engine import Engine, task_key
from rods_jax.rollout.slots import Row, Sampled
from rods_jax.text.free import Asked, FreeText, Refused, Reply, Text, TooLong, written


@dataclasses.dataclass(frozen=True)
class WritingConfig:
    """max_new: tokens of a text, thoughts included. at_once: texts written between two steps,
    at most, where training does not wait for them."""

    max_new: int = 512
    temperature: float = 0.8
    at_once: int = 8

    def __post_init__(self):
        for name in ("max_new", "at_once"):
            if getattr(self, name) < 1:
                raise ValueError(f"writing.{name} is {getattr(self, name)}: give 1 or more")
        if not 0 <= self.temperature <= 2:
            raise ValueError(f"writing.temperature is {self.temperature}: give 0 to 2")


class Writing:
    """Not to be called while the engine plays. ValueError where its rows hold no text."""

    def __init__(self, engine: Engine, chat: FreeText, config: WritingConfig):
        self.engine, self.chat, self.config = engine, chat, config
        self.most = engine.sampler.max_len - config.max_new  # tokens of a dialogue
        if self.most < 1:
            raise ValueError(f"writing.max_new {config.max_new} leaves nothing of sampler.max_len "
                             f"{engine.sampler.max_len} for what is asked: raise max_len")
        self._times: Counter[int] = Counter()  # that a dialogue was asked for, by its key

    def write(self, params, asked: Sequence[Asked], key: jax.Array) -> list[Reply]:
        """An answer to each dialogue. The draw is a function of `key`, the dialogue, and how
        often that one was asked for before."""
        params = unstacked(self.engine.decoder.config, params)
        found: list[Reply | list[int]] = [self._prompt(each) for each in asked]
        prompts = {at: ids for at, ids in enumerate(found) if isinstance(ids, list)}
        queue = deque(prompts)
        slots, live = self.engine.slots, dict[int, tuple[int, Row]]()  # by the row's id
        try:
            while queue or live:
                while queue and slots.free(device := self._emptiest()):
                    at = queue.popleft()
                    row = slots.take(device, prompts[at])
                    row.who = self._who(asked[at])
                    live[id(row)] = at, row
                rows = [row for _, row in live.values()]
                left = {id(row): self.config.max_new + len(prompts[at]) - len(row.ids)
                        for at, row in live.values()}
                ready = slots.prepare(params, rows, [left[id(row)] for row in rows])
                for row, sampled in slots.sample(
                        params, ready, [left[id(row)] for row in ready], key,
                        self.config.temperature, self.engine.sampler.wave, 0.0):
                    at, _ = live[id(row)]
                    if sampled.stopped or not sampled.intact or len(sampled.ids) == left[id(row)]:
                        found[at] = self._text(row.ids[len(prompts[at]):], sampled,
                                               len(prompts[at]))
                        del live[id(row)]
                        slots.release(row)
        finally:
            for _, row in live.values():
                slots.release(row)
        return found

    def _prompt(self, asked: Asked) -> list[int] | TooLong | Refused:
        try:
            ids = self.chat.plain(asked)
        except ValueError as error:
            return Refused(str(error))
        return ids if len(ids) <= self.most else TooLong(len(ids), self.most)

    def _emptiest(self) -> int:
        return max(range(self.engine.slots.devices), key=self.engine.slots.free)

    def _who(self, asked: Asked) -> tuple[int, int]:
        name = task_key(str(asked))
        self._times[name] += 1
        return name, self._times[name] - 1

    def _text(self, ids: Sequence[int], sampled: Sampled, prompt_tokens: int) -> Text:
        # What was drawn from another row's cache is no answer.
        text = written(self.chat, ids) if sampled.intact else ""
        return Text(text, sampled.stopped, prompt_tokens, len(ids))
