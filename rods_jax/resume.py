"""Whether a checkpoint is of a run with these settings."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable

from rods_jax.config import ConfigError, UserError, to_json, typed
from rods_jax.run_config import RunConfig
from rods_jax.types import Json

# Fields that decide nothing a step computes, so a resumed run may change them; what lies at
# policy.path is compared itself, and a language model answers differently anyway.
FREE_ON_RESUME = ("steps", "platform", "checkpoint_every", "keep_checkpoints", "workers",
                  "mesh", "rollout_tensor", "batch", "policy.path", "synthesis.endpoint", "writing",
                  "synthesizer.host", "synthesizer.timeout_s")
# Fields of a policy that decide nothing of its weights.
FREE_OF_WEIGHTS = ("policy.path", "policy.attention", "policy.remat", "policy.compute_dtype")


def check_config(path: pathlib.Path, host: Json, config: RunConfig,
                 fields: Iterable[str] = (), free: Iterable[str] = FREE_ON_RESUME) -> None:
    """Raises UserError, naming the field, where a checkpoint's config is not `config`; looks
    at these groups of fields, or at all, and passes over those that are `free`. What the
    checkpoint does not name, having been written before there was such a field, is at its
    default."""
    if "config" not in host:
        raise UserError(f"{path}: is not the checkpoint of a training run; give one of those "
                        "that experiments.train wrote")
    theirs = host["config"]
    try:
        theirs = to_json(typed(RunConfig, theirs, "its config")) if not fields else {
            field: to_json(typed(type(getattr(config, field)), theirs.get(field, {}), field))
            for field in fields}
    except ConfigError as e:
        raise UserError(f"{path}: was written by another version of rods_jax, whose settings "
                        f"this one does not read ({e}); go on with that version") from e
    mine, theirs = (_without(values, free) for values in (to_json(config), theirs))
    for field in fields or sorted(mine):
        if theirs.get(field) != mine.get(field):
            raise UserError(f"{path}: was written with another config.{field} "
                            f"({_first_difference(theirs.get(field), mine.get(field))}); give "
                            "the run's own settings, as --config with its config.json does")


def _without(values: dict[str, Json], fields: Iterable[str]) -> dict[str, Json]:
    """A copy that lacks these fields; "a.b" is the field b of the group a."""
    values = {name: dict(value) if isinstance(value, dict) else value
              for name, value in values.items()}
    for field in fields:
        group, _, name = field.rpartition(".")
        (values.get(group, {}) if group else values).pop(name, None)
    return values


def _first_difference(theirs: Json, mine: Json) -> str:
    if isinstance(theirs, dict) and isinstance(mine, dict):
        for name in mine:
            if theirs.get(name) != mine[name]:
                return f"{name}: {_first_difference(theirs.get(name), mine[name])}"
    return f"{theirs!r} then, {mine!r} now"
