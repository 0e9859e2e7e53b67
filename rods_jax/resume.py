"""Whether a checkpoint is of a run with these settings, and its folder is whole."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable

from rods_jax import checkpoint, metrics
from rods_jax.config import ConfigError, UserError, read_json, to_json, typed
from rods_jax.run_config import RunConfig
from rods_jax.types import Json

BEFORE, SUMMARY = "before.json", "summary.json"  # their names in a run folder
_REMEDY = "restore it, or begin the run anew in another folder"

# Fields that decide nothing a step computes, so a resumed run may change them; what lies at
# policy.path is compared itself, and a language model answers differently anyway.
FREE_ON_RESUME = ("steps", "platform", "checkpoint_every", "keep_checkpoints", "workers",
                  "mesh", "rollout_tensor", "batch", "policy.path", "synthesis.endpoint", "writing",
                  "synthesizer.host", "synthesizer.timeout_s")
# Fields of a policy that decide nothing of its weights.
FREE_OF_WEIGHTS = ("policy.path", "policy.attention", "policy.remat", "policy.compute_dtype")


@dataclasses.dataclass(frozen=True)
class Taken:
    """What a run that goes on finds in its folder. summary: where no step is left to train."""

    before: Json
    summary: Json = None


def take_up(path: pathlib.Path, folder: pathlib.Path, config: RunConfig) -> Taken:
    """Looks into the run folder of the checkpoint at `path` before anything is computed. Raises
    UserError where what the end of the run needs is missing or damaged, or the checkpoint is not
    of this config (see `check_config`) or past its steps."""
    step, host = checkpoint.read_host(path)
    check_config(path, host, config)
    if config.steps < step:
        raise UserError(f"steps is {config.steps}, but {path} is at step {step} already: nothing "
                        "to train; give more steps")
    before = _read(folder / BEFORE)
    try:
        float(before["held_in_sampled"]["progress"])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{folder / BEFORE}: holds no score of held-in tasks; {_REMEDY}") from None
    rows = folder / metrics.FILE
    if step and not (rows.is_file() and any(row["step"] < step for row in metrics.read(rows))):
        raise UserError(f"{rows}: holds none of the {step} steps before {path.name}; {_REMEDY}")
    if config.steps == step and (folder / SUMMARY).is_file():
        summary = _read(folder / SUMMARY)
        if isinstance(summary, dict) and summary.get("steps") == step:
            print(f"{path} is at step {step} already: nothing to train", flush=True)
            return Taken(before, summary)
    return Taken(before)


def _read(path: pathlib.Path) -> Json:
    if not path.is_file():
        raise UserError(f"{path}: missing; {_REMEDY}")
    return read_json(path, _REMEDY)


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
