"""The synthesizer of a run: made from its config, and what the run tells of it."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from rods_jax.config import to_json
from rods_jax.rollout.engine import Engine
from rods_jax.rollout.writing import Writing
from rods_jax.run_config import RunConfig
from rods_jax.synthesis.exchange import FOLDER, Header
from rods_jax.synthesis.loop import Synthesizer
from rods_jax.synthesis.novelty import Known
from rods_jax.synthesis.pipeline import SynthesisConfig, make_maker
from rods_jax.synthesis.policy_endpoint import MODEL, PolicyEndpoint
from rods_jax.synthesis.writers import WriterKind
from rods_jax.tasks.leakage import HeldOutGuard
from rods_jax.text.free import Asked, Reply
from rods_jax.tools.env import Suite
from rods_jax.types import Json, Task

_WRITES = 0x77726974  # folded into the run's key, as steps are into that of the rollouts

Published = Callable[[], tuple[Any, float]]  # the weights to play with, and seconds


class PolicyWriter:
    """The policy as the writer of its own variants: answers with the weights of the step."""

    def __init__(self, config: RunConfig, engine: Engine, published: Published):
        self._most, self._published = config.writing.at_once, published
        self._writing = Writing(engine, engine.chat, config.writing)
        self._key = jax.random.fold_in(jax.random.key(config.seed), _WRITES)
        self._endpoint = PolicyEndpoint()

    def answer(self) -> None:
        self._endpoint.answer(self._write, self._most)

    def close(self) -> None:
        self._endpoint.close()

    def served(self, config: RunConfig) -> SynthesisConfig:
        """The config's, with the endpoint that this answers."""
        endpoint = config.synthesis.endpoint
        return dataclasses.replace(config.synthesis, endpoint=dataclasses.replace(
            endpoint, base_url=self._endpoint.url, model=MODEL,
            temperature=config.writing.temperature, max_tokens=config.writing.max_new,
            concurrency=max(2, config.writing.at_once),  # see Synthesizer
            # An answer has to wait for a step, and may as long as the trainer waits for one.
            timeout_s=max(endpoint.timeout_s, config.synthesizer.timeout_s)))

    def _write(self, asked: Sequence[Asked]) -> list[Reply]:
        params, _ = self._published()
        return self._writing.write(params, asked, self._key)


def make_synthesizer(config: RunConfig, folder: pathlib.Path, suite: Suite, guard: HeldOutGuard,
                     tasks: Iterable[Task], state: Mapping[str, Json] | None, engine: Engine,
                     published: Published) -> Synthesizer:
    """Of the run in `folder`; with the state of a checkpoint one that goes on from there.
    tasks: that exist already, held-in ones included. engine, published: of the policy, should
    it write."""
    synthesis, writer = config.synthesis, None
    if config.synthesis_on and synthesis.writer is WriterKind.POLICY:
        writer = PolicyWriter(config, engine, published)
        synthesis = writer.served(config)
    header = Header(config.tasks.spec().to_json(), to_json(synthesis), config.seed,
                    tuple(Known(tasks).to_json()))
    arguments = (folder / FOLDER, header, synthesis,
                 lambda header: make_maker(suite, synthesis, guard, config.seed),
                 config.synthesizer)
    return (Synthesizer(*arguments, writer=writer) if state is None
            else Synthesizer.restore(state, *arguments, writer=writer))


def figures(synthesizer: Synthesizer) -> dict[str, Json]:
    """Of the attempts collected so far; seconds and tokens are the endpoint's, latency_s those of
    a request on average. restarts, outages and writing_s, what the policy took to write: since
    this process began."""
    funnel = synthesizer.funnel
    usage = funnel.usage
    return {
        "no_room": synthesizer.refused, "restarts": synthesizer.restarts,
        "outages": synthesizer.outages, "fallbacks": sum(funnel.fallbacks.values()),
        "unjudged": sum(funnel.unjudged.values()), "requests": usage.requests,
        "retries": usage.retries, "failures": dict(usage.failures),
        "prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens,
        "seconds": usage.seconds, "writing_s": synthesizer.writing_s,
        "latency_s": usage.seconds / usage.requests if usage.requests else None,
    }
