"""Curves of one run or of several arms, as a PNG and as one page that needs no network.

A run is a list of metric rows (`metrics.read`). Rows may lack any key and hold null or NaN;
a run may be empty. `born`, `admitted` and `retired` are totals since the start of the run.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import io
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from rods_jax.config import UserError, write_text
from rods_jax.metrics import ZONES, duration
from rods_jax.types import Json

Rows = Sequence[Mapping[str, Any]]

# Arms: hues that stay apart for colour-blind readers and in print.
ARM_COLOURS = ("#0b6fb8", "#e0701a", "#2f9e5b", "#b5438f", "#7a6ad0", "#8a6d3b", "#4d4d4d", "#17a2b8")
ZONE_COLOURS = {"hard": "#d1495b", "boundary": "#3d9970", "mastered": "#5b8fd6", "silent": "#c9ced6"}
ZONE_WORDS = {"hard": "hard", "boundary": "boundary", "mastered": "mastered",
              "silent": "in band, no variance"}
_INK, _FAINT, _GRID = "#24292f", "#6b7280", "#e5e7eb"
_WIDTH = 12.0  # inches
_DPI = 150
_STEPS = (1, 2, 2.5, 5, 10)  # tick distances a person reads at once


@dataclasses.dataclass(frozen=True)
class _Panel:
    title: str
    draw: Callable[[Axes, Mapping[str, Rows], Sequence[str], str], None]


def write_curves(runs: Mapping[str, Rows], path: str | os.PathLike) -> pathlib.Path:
    """Draws all arms over each other, and the zone shares of each arm, to a PNG at `path`.
    Raises UserError where there is no run at all."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_png(runs))
    return path


def write_html(runs: Mapping[str, Rows], path: str | os.PathLike,
               title: str = "RODS training report",
               notes: Mapping[str, Json] | None = None) -> pathlib.Path:
    """One self-contained page: a table of the arms, the curves, `notes` as a second table.
    Raises UserError where there is no run at all."""
    picture = base64.b64encode(_png(runs)).decode()
    path = pathlib.Path(path)
    write_text(path, _PAGE.format(
        title=html.escape(title), style=_STYLE, table=_table(runs), picture=picture,
        alt=html.escape("Training curves of " + ", ".join(runs)), notes=_notes(notes or {})))
    return path


def summary(rows: Rows) -> dict[str, Json]:
    """The figures of the table. Means are over the last tenth of the steps, at least five;
    None where the run has no such number."""
    last = rows[-max(5, len(rows) // 10):] if rows else []
    held_in = _points(rows, "held_in_progress")[1]
    return {
        "steps": int(rows[-1]["step"] - rows[0]["step"]) + 1 if rows else None,
        "rollouts": _last(rows, "rollouts"),
        "reward_mean": _mean(last, "reward_mean"),
        "held_in_first": float(held_in[0]) if held_in.size else None,
        "held_in_last": float(held_in[-1]) if held_in.size else None,
        "held_in_best": float(held_in.max()) if held_in.size else None,
        **{f"zone_{zone}": _mean(last, f"zone_{zone}") for zone in ZONES},
        "dead_share": _mean(last, "dead_share"),
        "pool_active": _last(rows, "pool_active"),
        "pool_generated": _last(rows, "pool_generated"),
        "born": _last(rows, "born"), "admitted": _last(rows, "admitted"),
        "retired": _last(rows, "retired"),
        "tokens_per_s": _mean(rows, "tokens_per_s"),
        "wall_s": _last(rows, "wall_s"),
    }


# ---------------------------------------------------------------- the picture


def _png(runs: Mapping[str, Rows]) -> bytes:
    if not runs:
        raise UserError("there is no run to draw; name at least one run folder")
    names = list(runs)
    axis = "rollouts" if all(_points(r, "rollouts")[1].size or not r for r in runs.values()) else "step"
    if not any(len(r) for r in runs.values()):
        axis = "step"
    panels, shelves = _panels(), _shelves(names)
    panel_rows = math.ceil(len(panels) / 3)
    figure = Figure(figsize=(_WIDTH, 1.1 + 2.75 * (panel_rows + len(shelves))), dpi=_DPI,
                    facecolor="white", layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
    grid = figure.add_gridspec(panel_rows + len(shelves), 6)
    for i, panel in enumerate(panels):
        axes = figure.add_subplot(grid[i // 3, 2 * (i % 3):2 * (i % 3) + 2])
        _dress(axes, panel.title, axis)
        panel.draw(axes, runs, names, axis)
        _say_if_empty(axes)
    for row, shelf in enumerate(shelves, start=panel_rows):
        width = 6 // len(shelf)
        for column, name in enumerate(shelf):
            axes = figure.add_subplot(grid[row, width * column:width * (column + 1)])
            _dress(axes, f"zones: {name}", axis)
            _draw_zones(axes, runs[name], axis)
            _say_if_empty(axes)
    _legends(figure, names)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _shelves(names: Sequence[str]) -> list[Sequence[str]]:
    """The arms by rows of zone panels: three a row, four as two and two."""
    a_row = 2 if len(names) == 4 else 3
    return [names[i:i + a_row] for i in range(0, len(names), a_row)]


def _panels() -> list[_Panel]:
    return [
        _Panel("training reward", _draw_reward),
        _Panel("held-in progress", _draw_held_in),
        _Panel("dead groups (no variance)", _draw_dead),
        _Panel("task pool (dashed: generated)", _draw_pool),
        _Panel("born (dashed: admitted)", _draw_births),
        _Panel("retired", _draw_retired),
    ]


def _dress(axes: Axes, title: str, axis: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=_INK, fontweight="bold")
    axes.set_xlabel("rollouts of the policy" if axis == "rollouts" else "training step",
                    fontsize=9.5, color=_FAINT)
    axes.grid(True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9.5, colors=_FAINT, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#c3c8cf")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=_STEPS, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(_short))


def _say_if_empty(axes: Axes) -> None:
    if not axes.lines and not axes.collections:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center",
                  color=_FAINT, fontsize=10)
        axes.set_xticks([])
        axes.set_yticks([])


def _unit(axes: Axes, text: str) -> None:
    axes.set_ylabel(text, fontsize=9.5, color=_FAINT)


def _percent(axes: Axes, low: float = 0.0, high: float = 1.0) -> None:
    axes.set_ylim(low, high)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=_STEPS))


def _counts(axes: Axes) -> None:
    axes.set_ylim(bottom=0, top=None if axes.dataLim.ymax > 0 else 1)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True, steps=_STEPS))
    axes.yaxis.set_major_formatter(FuncFormatter(_short))


def _draw_reward(axes: Axes, runs: Mapping[str, Rows], names: Sequence[str], axis: str) -> None:
    _unit(axes, "mean progress reward")
    for i, name in enumerate(names):
        x, y = _points(runs[name], "reward_mean", axis)
        if x.size > 30:  # the noise stays visible behind the trend
            axes.plot(x, y, color=_colour(i), alpha=0.18, linewidth=0.8)
            y = _smooth(y)
        _line(axes, x, y, i)
    axes.set_ylim(0, 1)


def _draw_held_in(axes: Axes, runs: Mapping[str, Rows], names: Sequence[str], axis: str) -> None:
    _unit(axes, "turns passed")
    top = 0.0
    for i, name in enumerate(names):
        x, y = _points(runs[name], "held_in_progress", axis)
        _line(axes, x, y, i, marker="o", markersize=3.5)
        top = max([top, *y])
    _percent(axes, high=min(1.0, max(0.1, math.ceil(top * 11) / 10)))


def _draw_dead(axes: Axes, runs: Mapping[str, Rows], names: Sequence[str], axis: str) -> None:
    _unit(axes, "share of groups")
    for i, name in enumerate(names):
        x, y = _points(runs[name], "dead_share", axis)
        _line(axes, x, _smooth(y) if x.size > 30 else y, i)
    _percent(axes)


def _draw_pool(axes: Axes, runs: Mapping[str, Rows], names: Sequence[str], axis: str) -> None:
    _unit(axes, "tasks")
    for i, name in enumerate(names):
        _line(axes, *_points(runs[name], "pool_active", axis), i)
        _line(axes, *_points(runs[name], "pool_generated", axis), i, linestyle=(0, (3, 2)))
    _counts(axes)


def _draw_births(axes: Axes, runs: Mapping[str, Rows], names: Sequence[str], axis: str) -> None:
    _unit(axes, "tasks, total")
    for i, name in enumerate(names):
        _line(axes, *_points(runs[name], "born", axis), i)
        _line(axes, *_points(runs[name], "admitted", axis), i, linestyle=(0, (3, 2)))
    _counts(axes)


def _draw_retired(axes: Axes, runs: Mapping[str, Rows], names: Sequence[str], axis: str) -> None:
    _unit(axes, "tasks, total")
    for i, name in enumerate(names):
        _line(axes, *_points(runs[name], "retired", axis), i)
    _counts(axes)


def _draw_zones(axes: Axes, rows: Rows, axis: str) -> None:
    shares = [_points(rows, f"zone_{zone}", axis, fill=0.0) for zone in ZONES]
    if not any(_points(rows, f"zone_{zone}")[1].size for zone in ZONES):
        return
    _unit(axes, "share of groups")
    x = shares[0][0]
    layers = [_smooth(y) if x.size > 30 else y for _, y in shares]
    if x.size == 1:  # a single step is drawn as a bar
        x, layers = np.array([x[0] - 0.5, x[0] + 0.5]), [np.repeat(y, 2) for y in layers]
    axes.stackplot(x, *layers, colors=[ZONE_COLOURS[z] for z in ZONES], linewidth=0.6,
                   edgecolor="white")
    axes.set_xlim(x[0], x[-1])
    _percent(axes)


def _legends(figure: Figure, names: Sequence[str]) -> None:
    style = {"frameon": False, "fontsize": 10, "labelcolor": _INK, "handlelength": 1.6,
             "columnspacing": 1.6}
    arms = [Line2D([], [], color=_colour(i), linewidth=2.5) for i in range(len(names))]
    figure.legend(arms, names, loc="outside upper left", ncols=min(6, len(names)), **style)
    zones = [Patch(color=ZONE_COLOURS[z]) for z in ZONES]
    figure.legend(zones, [f"zone: {ZONE_WORDS[z]}" for z in ZONES], loc="outside lower left",
                  ncols=len(ZONES), **style)


def _line(axes: Axes, x: np.ndarray, y: np.ndarray, arm: int, **style: Any) -> None:
    if x.size:
        if x.size == 1:
            style.setdefault("marker", "o")
        axes.plot(x, y, color=_colour(arm), **{"linewidth": 1.8, **style})


def _colour(arm: int) -> str:
    return ARM_COLOURS[arm % len(ARM_COLOURS)]


def _short(value: float, _position: int | None = None) -> str:
    """12000 as 12k."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


# ---------------------------------------------------------------- numbers


def _number(value: Any) -> float:
    if value is None or isinstance(value, (str, list, dict)):
        return math.nan
    return float(value)


def _points(rows: Rows, key: str, axis: str = "step",
            fill: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """x and y [K] of the rows where both are finite; `fill` stands for a missing y."""
    x = np.array([_number(row.get(axis)) for row in rows], dtype=float)
    y = np.array([_number(row.get(key)) for row in rows], dtype=float)
    if fill is not None:
        y = np.where(np.isfinite(y), y, fill)
    keep = np.isfinite(x) & np.isfinite(y)
    return x[keep], y[keep]


def _smooth(y: np.ndarray) -> np.ndarray:
    """Centred mean over a fifteenth of the run, cut off at the ends."""
    half = max(1, len(y) // 30)
    total = np.concatenate([[0.0], np.cumsum(y)])
    first = np.maximum(np.arange(len(y)) - half, 0)
    last = np.minimum(np.arange(len(y)) + half + 1, len(y))
    return (total[last] - total[first]) / (last - first)


def _mean(rows: Rows, key: str) -> float | None:
    y = _points(rows, key)[1]
    return float(y.mean()) if y.size else None


def _last(rows: Rows, key: str) -> float | None:
    y = _points(rows, key)[1]
    return float(y[-1]) if y.size else None


# ---------------------------------------------------------------- the page


def _table(runs: Mapping[str, Rows]) -> str:
    share = "{:.1%}".format
    columns: list[tuple[str, str, Callable[[float], str]]] = [
        ("steps", "steps", "{:,.0f}".format), ("rollouts", "rollouts", "{:,.0f}".format),
        ("held\u2011in first", "held_in_first", share), ("held\u2011in last", "held_in_last", share),
        ("held\u2011in best", "held_in_best", share), ("reward", "reward_mean", "{:.3f}".format),
        *((ZONE_WORDS[z], f"zone_{z}", share) for z in ZONES),
        ("dead groups", "dead_share", share), ("pool", "pool_active", "{:,.0f}".format),
        ("generated", "pool_generated", "{:,.0f}".format), ("born", "born", "{:,.0f}".format),
        ("admitted", "admitted", "{:,.0f}".format), ("retired", "retired", "{:,.0f}".format),
        ("tokens/s", "tokens_per_s", "{:,.0f}".format), ("time", "wall_s", duration),
    ]
    head = "".join(f"<th>{html.escape(title)}</th>" for title, _, _ in columns)
    body = []
    for i, (name, rows) in enumerate(runs.items()):
        figures = summary(rows)
        cells = "".join(f"<td>{'–' if figures[key] is None else shown(figures[key])}</td>"
                        for _, key, shown in columns)
        body.append(f'<tr><th><span class="dot" style="background:{_colour(i)}"></span>'
                    f"{html.escape(name)}</th>{cells}</tr>")
    return ("<table><thead><tr><th></th>" + head + "</tr></thead><tbody>"
            + "".join(body) + "</tbody></table>")


def _notes(notes: Mapping[str, Json]) -> str:
    if not notes:
        return ""
    rows = "".join(f"<tr><th>{html.escape(str(k))}</th><td>{html.escape(str(v))}</td></tr>"
                   for k, v in notes.items())
    return f'<h2>Record</h2><table class="notes">{rows}</table>'


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #24292f; background: #f6f7f9; margin: 0; }
main { max-width: 1280px; margin: 0 auto; padding: 24px 20px 48px; }
h1 { font-size: 24px; margin: 0 0 16px; } h2 { font-size: 17px; margin: 28px 0 10px; }
.card { background: white; border: 1px solid #e5e7eb; border-radius: 8px; padding: 12px 16px;
  overflow-x: auto; }
img { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; min-width: 60%; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 0 6px 10px; text-align: right; font-size: 13px; border-bottom: 1px solid #eef0f3; }
thead th { font-weight: 400; color: #6b7280; vertical-align: bottom; }
tbody th { text-align: left; white-space: nowrap; padding-left: 0; }
tbody td { white-space: nowrap; }
tr:last-child > * { border-bottom: 0; }
.notes td, .notes th { text-align: left; overflow-wrap: anywhere; vertical-align: top; }
.notes th { font-weight: 400; color: #6b7280; white-space: nowrap; }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 5px; margin-right: 7px; }
.hint { color: #6b7280; font-size: 13px; margin: 6px 0 0; }
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body><main><h1>{title}</h1>
<div class="card">{table}</div>
<p class="hint">Reward, zones and dead groups are means over the last tenth of the steps.</p>
<h2>Curves</h2>
<div class="card"><img alt="{alt}" src="data:image/png;base64,{picture}"></div>
{notes}</main></body></html>
"""
