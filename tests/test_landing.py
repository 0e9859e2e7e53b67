"""Where variants land, from a run's ledger."""

import json
import math

import pytest

from experiments import landing
from rods_jax import ledger
from rods_jax.boundary import Zone
from rods_jax.config import UserError


def write(folder, rows):
    folder.mkdir()
    (folder / ledger.FILE).write_text("".join(
        json.dumps({"step": step, "epoch": 0, "op": "update_stats", "changes": {},
                    "events": [{"event": event, "task": uid} | more]}) + "\n"
        for step, event, uid, more in rows))
    return folder


@pytest.fixture
def run(tmp_path):
    """`a` is a boundary task when it is chosen first, and mastered the second time; `b` is hard.
    Three of four variants were observed."""
    return write(tmp_path / "run", [
        (0, "zone", "a", {"from": "unseen", "to": "boundary", "mean": 0.5}),
        (0, "chosen", "a", {}),
        (0, "zone", "b", {"from": "unseen", "to": "hard", "mean": 0.1}),
        (1, "chosen", "b", {}),
        (2, "scored", "a~0.0", {"mean": 0.2}),
        (2, "zone", "a", {"from": "boundary", "to": "mastered", "mean": 0.9}),
        (3, "chosen", "a", {}),
        (4, "scored", "a~3.0", {"mean": 1.0}),
        (5, "admitted", "a~3.1", {"slot": 3}),
        (5, "scored", "b~1.0", {"mean": 0.125}),
        (6, "scored", "b", {"mean": 0.5}),
    ])


def test_zones_are_those_of_the_moment_of_choice(run):
    found = {x.variant: (x.zone, x.mean) for x in landing.landings(run / ledger.FILE)}
    assert found == {"a~0.0": (Zone.BOUNDARY, 0.2), "a~3.0": (Zone.MASTERED, 1.0),
                     "b~1.0": (Zone.HARD, 0.125)}


def test_shares(run, tmp_path, capsys):
    landing.main([str(run), "--json", str(tmp_path / "f.json"), "--plot", str(tmp_path / "p.png")])
    rows = {row["parents"]: row for row in json.loads((tmp_path / "f.json").read_text())["run"]}
    anything = rows[landing.ANY]
    assert anything["variants"] == 3
    for name in ("below", "within", "above"):
        assert anything[name] == pytest.approx(1 / 3)
    assert anything["error"] == pytest.approx(math.sqrt(2 / 27))
    assert rows["boundary tasks"]["within"] == 1.0 and rows["mastered tasks"]["above"] == 1.0
    assert rows[landing.OTHERS]["variants"] == 2 and "silent tasks" not in rows
    assert "| run | boundary tasks | 1 |" in capsys.readouterr().out
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_files_that_tell_nothing(tmp_path):
    for folder, rows in (("none", [(0, "born", "a", {"source": "seed"})]),
                         ("torn", [(0, "born", "a", {}), (4, "scored", "a~3.0", {"mean": 0.5})])):
        with pytest.raises(UserError, match="no (variant|task) was"):
            landing.main([str(write(tmp_path / folder, rows))])
    with pytest.raises(UserError, match="missing"):
        landing.main([str(tmp_path / "nowhere")])
