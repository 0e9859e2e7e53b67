"""Curves and a page for finished or running runs.

    python -m experiments.report RUN_DIR [RUN_DIR ...] [--out DIR] [--json FILE]

A RUN_DIR holds metrics.jsonl; a folder whose subfolders do stands for all of them, which is
how the arms of a comparison are drawn side by side. Writes curves.png and report.html to
--out (default: the one RUN_DIR given, or runs/report), and the summary as JSON to --json.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Sequence

from rods_jax import metrics, report
from rods_jax.config import UserError, run_main, write_json


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.report", description=__doc__.partition("\n")[0])
    parser.add_argument("run_dirs", nargs="+", type=pathlib.Path, metavar="RUN_DIR")
    parser.add_argument("--out", type=pathlib.Path, help="folder for curves.png and report.html")
    parser.add_argument("--title", default="RODS training report")
    parser.add_argument("--json", metavar="FILE", help="summary of each arm, - for standard output")
    arguments = parser.parse_args(argv)
    folders = [arm for given in arguments.run_dirs for arm in arms(given)]
    names = short_names(folders)
    runs = {name: metrics.read(folder / metrics.FILE) for name, folder in zip(names, folders)}
    out = arguments.out
    if out is None:
        out = arguments.run_dirs[0] if len(arguments.run_dirs) == 1 else pathlib.Path("runs/report")
    curves = report.write_curves(runs, out / "curves.png")
    page = report.write_html(runs, out / "report.html", title=arguments.title,
                             notes=_record(folders, names))
    print(f"wrote {curves} and {page}")
    if arguments.json:
        write_json(arguments.json, {name: report.summary(rows) for name, rows in runs.items()})


def arms(folder: pathlib.Path) -> list[pathlib.Path]:
    """`folder` if it is a run, else those of its subfolders that are. Raises UserError."""
    if (folder / metrics.FILE).is_file():
        return [folder]
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run folder")
    found = sorted(p.parent for p in folder.glob(f"*/{metrics.FILE}"))
    if not found:
        raise UserError(f"{folder}: holds no {metrics.FILE}, nor does any folder in it; name a "
                        "folder that experiments.train wrote")
    return found


def short_names(folders: Sequence[pathlib.Path]) -> list[str]:
    """The last parts of each path, as many as tell all of them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    raise UserError(f"{folders[0]}: a run folder is named twice; name each once")


def _record(folders: Sequence[pathlib.Path], names: Sequence[str]) -> dict[str, str]:
    """The config of one run; of several, the settings in which they differ."""
    settings = [_settings(folder / "config.json") for folder in folders]
    differing = {key for s in settings for key in s
                 if len(settings) == 1 or any(t.get(key) != s[key] for t in settings)}
    return {f"settings of {name}": ", ".join(f"{k}: {s[k]}" for k in sorted(s) if k in differing)
            for name, s in zip(names, settings) if differing & set(s)}


def _settings(path: pathlib.Path) -> dict[str, str]:
    """Dotted field -> value as JSON text; empty where the run left no config."""
    if not path.is_file():
        return {}
    try:
        rest = [("", json.loads(path.read_text(encoding="utf-8")))]
    except ValueError as e:
        raise UserError(f"{path}: damaged ({e}); remove it") from e
    flat = {}
    while rest:
        name, value = rest.pop()
        if isinstance(value, dict):
            rest += [(f"{name}.{key}".lstrip("."), inner) for key, inner in value.items()]
        else:
            flat[name] = json.dumps(value)
    return flat


if __name__ == "__main__":
    run_main(main)
