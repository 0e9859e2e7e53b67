"""rods_jax.report and experiments.report: pictures and pages from metric rows."""

import base64
import html.parser
import io
import json
import math
import pathlib
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import report as command
from rods_jax import metrics, report
from rods_jax.config import UserError

ROOT = pathlib.Path(__file__).resolve().parents[1]


def rows(n, seed=0, synthesis=True):
    rng = np.random.default_rng(seed)
    out, total = [], 0
    for step in range(n):
        hard, mastered = 0.5 * math.exp(-step / 30) + 0.1, 0.2
        total += int(rng.poisson(2)) if synthesis else 0
        out.append({
            "step": step + 1, "rollouts": 64 * (step + 1), "reward_mean": float(rng.random()),
            "zone_hard": hard, "zone_mastered": mastered, "zone_silent": 0.05,
            "zone_boundary": 0.95 - hard - mastered, "dead_share": 0.4, "pool_active": 100 + step,
            "pool_generated": step, "born": total, "admitted": total // 2, "retired": step,
            "tokens_per_s": 1000.0, "wall_s": 2.0 * step,
            **({"held_in_progress": 0.2 + step / 200} if step % 10 == 0 else {})})
    return out


def pixels(path):
    return matplotlib.image.imread(path)


def close_to(image, colour):
    want = np.array([int(colour[i:i + 2], 16) for i in (1, 3, 5)]) / 255
    return int((np.abs(image[..., :3] - want).max(-1) < 0.02).sum())


def test_curves_show_each_arm_in_its_colour_and_all_zones(tmp_path):
    path = report.write_curves({"rods": rows(60), "static": rows(60, 1, False)}, tmp_path / "d" / "c.png")
    image = pixels(path)
    assert image.shape[1] == 1800 and image.shape[0] > 1000
    for colour in (*report.ARM_COLOURS[:2], *report.ZONE_COLOURS.values()):
        assert close_to(image, colour) > 500, colour
    assert close_to(image, report.ARM_COLOURS[2]) < 50


def test_arms_keep_their_colours_when_one_is_empty(tmp_path):
    image = pixels(report.write_curves({"empty": [], "b": rows(20)}, tmp_path / "c.png"))
    assert close_to(image, report.ARM_COLOURS[1]) > 500


@settings(max_examples=3)
@given(st.lists(st.lists(st.fixed_dictionaries(
    {"step": st.integers(0, 40)},
    optional={key: st.none() | st.floats(0, 1) | st.just(math.nan) | st.just(math.inf)
              for key in ("rollouts", "reward_mean", "zone_hard", "zone_silent", "dead_share",
                          "held_in_progress", "pool_active", "born")}), max_size=40),
    min_size=1, max_size=2))
def test_any_gaps_still_give_a_page(tmp_path_factory, runs):
    folder = tmp_path_factory.mktemp("r")
    named = {f"arm{i}": r for i, r in enumerate(runs)}
    report.write_html(named, folder / "r.html")
    for r in runs:
        for value in report.summary(r).values():
            assert value is None or math.isfinite(value)


class Page(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.sources, self.text, self.tags = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.sources += [v for k, v in attributes if k in ("src", "href")]

    def handle_data(self, data):
        self.text.append(data)


def test_page_is_self_contained_and_escapes_names(tmp_path):
    path = report.write_html({"<script>a": rows(40), "b & c": []}, tmp_path / "r.html",
                             title="x < y", notes={"seed": 3, "tag": "<i>"})
    page = Page()
    page.feed(path.read_text())
    assert "script" not in page.tags and "i" not in page.tags
    assert {"<script>a", "b & c", "x < y", "<i>"} <= set(page.text)
    (source,) = page.sources
    assert source.startswith("data:image/png;base64,")
    image = matplotlib.image.imread(io.BytesIO(base64.b64decode(source.partition(",")[2])))
    assert image.shape[1] == 1800
    assert "http:" not in path.read_text() and "https:" not in path.read_text()


def test_summary_against_plain_python():
    data = rows(50)
    data[49]["dead_share"] = math.nan
    got = report.summary(data)
    last = data[-5:]
    assert got["reward_mean"] == pytest.approx(sum(r["reward_mean"] for r in last) / 5)
    assert got["dead_share"] == pytest.approx(0.4)
    assert (got["held_in_first"], got["held_in_last"], got["held_in_best"]) == pytest.approx((0.2, 0.4, 0.4))
    assert got["born"] == data[-1]["born"] and got["retired"] == 49
    assert (got["steps"], got["rollouts"], got["wall_s"]) == (50, 3200, 98)
    assert set(report.summary([]).values()) == {None}


def test_smoothing_against_plain_python():
    y = np.random.default_rng(0).random(97)
    half = 3
    want = [np.mean(y[max(0, i - half):i + half + 1]) for i in range(97)]
    np.testing.assert_allclose(report._smooth(y), want)


def test_no_run_at_all_is_one_line(tmp_path):
    with pytest.raises(UserError, match="there is no run to draw"):
        report.write_curves({}, tmp_path / "c.png")
    assert not (tmp_path / "c.png").exists()


# ---------------------------------------------------------------- the command


def write_run(folder, data, config=None):
    with metrics.MetricWriter(folder / metrics.FILE, keep_through=-1) as writer:
        for row in data:
            writer.write(row["step"], {k: v for k, v in row.items() if k != "step"})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))


def test_command_finds_arms_below_a_folder(tmp_path, capsys):
    write_run(tmp_path / "cmp" / "rods", rows(12), {"seed": 1, "synthesis": {"on": True}})
    write_run(tmp_path / "cmp" / "static", rows(12, 1), {"seed": 1, "synthesis": {"on": False}})
    command.main([str(tmp_path / "cmp"), "--json", "-"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert set(json.loads(last)) == {"rods", "static"}
    assert (tmp_path / "cmp" / "curves.png").exists()
    page = Page()
    page.feed((tmp_path / "cmp" / "report.html").read_text())
    assert "synthesis.on: true" in page.text and "synthesis.on: false" in page.text


def test_one_run_shows_its_whole_config(tmp_path):
    write_run(tmp_path / "a", rows(3), {"seed": 1, "grpo": {"lr": 0.1}})
    command.main([str(tmp_path / "a"), "--out", str(tmp_path / "out")])
    page = Page()
    page.feed((tmp_path / "out" / "report.html").read_text())
    assert "grpo.lr: 0.1, seed: 1" in page.text


def test_names_are_told_apart(tmp_path):
    paths = [tmp_path / "x" / "run", tmp_path / "y" / "run"]
    assert command.short_names(paths) == ["x/run", "y/run"]
    with pytest.raises(UserError, match="named twice"):
        command.short_names([paths[0], paths[0]])


def test_command_errors_are_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    for folder, words in ((tmp_path / "none", "no such run folder"),
                          (tmp_path / "empty", "holds no metrics.jsonl")):
        done = subprocess.run([sys.executable, "-m", "experiments.report", str(folder)],
                              cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2 and done.stdout == ""
        assert words in done.stderr and done.stderr.count("\n") == 1
