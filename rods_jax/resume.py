"""Whether a checkpoint is of a run with these settings."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable

from rods_jax.config import UserError, to_json
from rods_jax.run_config import RunConfig
from rods_jax.types import Json

# Fields that decide nothing a step computes, so a resumed run may change them; what lies at
# policy.path is compared itself.
FREE_ON_RESUME = ("steps", "platform", "checkpoint_every", "keep_checkpoints", "workers",
                  "mesh", "rollout_tensor", "batch", "policy.path")
# Fields of a policy that decide nothing of its weights.
FREE_OF_WEIGHTS = ("policy.path", "policy.attention", "policy.remat", "policy.compute_dtype")


def check_config(path: pathlib.Path, host: Json, config: RunConfig,
                 fields: Iterable[str] = (), free: Iterable[str] = FREE_ON_RESUME) -> None:
    """Raises UserError, naming the field, where a checkpoint's config is not `config`; looks
    at these fields, or at all, and passes over those that are `free`."""
    if "config" not in host:
        raise UserError(f"{path}: is not the checkpoint of a training run; give one of those "
                        "that experiments.train wrote")
    mine, theirs = (_without(values, free) for values in (to_json(config), host["config"]))
    for field in fields or sorted(mine.keys() | theirs.keys()):
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
