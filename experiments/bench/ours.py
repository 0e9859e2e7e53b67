"""Our side of the rollout bench."""

from __future__ import annotations

import dataclasses
import time

import jax

from experiments.bench.cases import Case, make_work
from rods_jax.models.decoder import Decoder, unstacked
from rods_jax.rollout.shapes import SamplerConfig
from rods_jax.rollout.slots import Row, Slots

CHUNK = 512  # tokens of a prompt run at once, and in a page of it
CACHE_SIZES = (0.05, 0.28, 0.455, 0.64)  # what case c has in use in each message


@dataclasses.dataclass(frozen=True)
class Phases:
    """Seconds of one pass over a case, and the tokens sampled in it.

    prefill_s: the prompt. extend_s: the tool results. decode_s: drawing tokens. total_s: all,
    with what lies between the three.
    """

    prefill_s: float
    extend_s: float
    decode_s: float
    total_s: float
    tokens: int


class Ours:
    """A case on our sampler. The first `run` compiles."""

    def __init__(self, decoder: Decoder, params, case: Case):
        self._params, self._case, self._runs = unstacked(decoder.config, params), case, 0
        self._work = make_work(case, decoder.config.vocab_size)
        self._slots = Slots(decoder, SamplerConfig(
            slots=case.group, sharers=case.group, prompts=1, max_len=case.length,
            prompt_len=case.prompt, max_new=case.new, steps=case.new, page=64,
            prompt_page=min(case.prompt, CHUNK), prefill=((1, min(case.prompt, CHUNK)),),
            extend=((case.group, max(1, case.tool)),), cache_sizes=CACHE_SIZES), stop_ids=())

    def run(self) -> Phases:
        case, slots = self._case, self._slots
        key = jax.random.fold_in(jax.random.key(0), self._runs)
        self._runs += 1
        start = time.perf_counter()
        ids = self._work.prompt_P.tolist()
        prompt = slots.share(ids, 0)
        rows = [slots.take(0, ids, prompt) for _ in range(case.group)]
        for sample, row in enumerate(rows):
            row.who = (0, sample)
        prepare_s, decode_s, tokens = [], 0.0, 0
        for message in range(case.messages):
            if message:
                for row, result in zip(rows, self._work.tools_MxGxK[message - 1], strict=True):
                    row.ids += result.tolist()
            begin = time.perf_counter()
            self._prepare(rows)
            ready = time.perf_counter()
            found = slots.sample(self._params, rows, [case.new] * case.group, key, 1.0,
                                 most=case.new, leave=0.0)
            tokens += sum(len(sampled.ids) for _, sampled in found)
            prepare_s.append(ready - begin)
            decode_s += time.perf_counter() - ready
        for row in rows:
            slots.release(row)
        slots.let_go(prompt)
        return Phases(prepare_s[0], sum(prepare_s[1:]), decode_s,
                      time.perf_counter() - start, tokens)

    def _prepare(self, rows: list[Row]) -> None:
        """The prompt the first time, tool results from then on."""
        self._slots.prepare(self._params, rows, [self._case.new] * len(rows))
        self._slots.programs.wait()  # to tell this phase's time from the next's
