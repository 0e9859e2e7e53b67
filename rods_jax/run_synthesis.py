"""The synthesizer of a run: made from its config, and what the run tells of it."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping

from rods_jax.config import to_json
from rods_jax.run_config import RunConfig
from rods_jax.synthesis.exchange import FOLDER, Header
from rods_jax.synthesis.loop import Synthesizer
from rods_jax.synthesis.novelty import Known
from rods_jax.synthesis.pipeline import make_maker
from rods_jax.tasks.leakage import HeldOutGuard
from rods_jax.tools.env import Suite
from rods_jax.types import Json, Task


def make_synthesizer(config: RunConfig, folder: pathlib.Path, suite: Suite, guard: HeldOutGuard,
                     tasks: Iterable[Task], state: Mapping[str, Json] | None = None) -> Synthesizer:
    """Of the run in `folder`; with the state of a checkpoint one that goes on from there.
    tasks: that exist already, held-in ones included."""
    header = Header(config.tasks.spec().to_json(), to_json(config.synthesis), config.seed,
                    tuple(Known(tasks).to_json()))
    arguments = (folder / FOLDER, header, config.synthesis,
                 lambda header: make_maker(suite, config.synthesis, guard, config.seed),
                 config.synthesizer)
    return (Synthesizer(*arguments) if state is None
            else Synthesizer.restore(state, *arguments))


def figures(synthesizer: Synthesizer) -> dict[str, Json]:
    """Of the attempts collected so far; seconds and tokens are the endpoint's, latency_s those of
    a request on average. restarts, outages: since this process began."""
    funnel = synthesizer.funnel
    usage = funnel.usage
    return {
        "no_room": synthesizer.refused, "restarts": synthesizer.restarts,
        "outages": synthesizer.outages, "fallbacks": sum(funnel.fallbacks.values()),
        "unjudged": sum(funnel.unjudged.values()), "requests": usage.requests,
        "retries": usage.retries, "failures": dict(usage.failures),
        "prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens,
        "seconds": usage.seconds,
        "latency_s": usage.seconds / usage.requests if usage.requests else None,
    }
