"""Figures over seeds, against numpy, and the two ways to call it wrongly."""

import json

import numpy as np
import pytest

from experiments import compare
from rods_jax.config import UserError


def write(folder, seed, scores):
    folder.mkdir()
    arms = {arm: {"evaluations": {when: {
        f"held_in_{how}": {"progress": scores[arm][when], "success": scores[arm][when] / 2}
        for how in ("sampled", "greedy")} for when in ("before", "after")}} for arm in scores}
    (folder / "summary.json").write_text(json.dumps({"seed": seed, **arms}))
    return folder


def test_figures_equal_numpy(tmp_path, capsys):
    rng = np.random.default_rng(0)
    values = rng.random((3, 2, 2))  # seed, arm, before and after
    runs = [write(tmp_path / str(i), i, {
        arm: dict(zip(("before", "after"), map(float, values[i, a])))
        for a, arm in enumerate(compare.ARMS)}) for i in range(3)]
    compare.main([*map(str, runs), "--json", "-"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    after = values[:, 0, 1]
    got = found["rods"]["progress_sampled"]["after"]
    np.testing.assert_allclose([got["mean"], got["sd"], got["min"], got["max"]],
                               [after.mean(), after.std(ddof=1), after.min(), after.max()])
    gain = values[:, :, 1] - values[:, :, 0]
    np.testing.assert_allclose(found["advantage"]["success_greedy"]["mean"],
                               (gain[:, 0] - gain[:, 1]).mean() / 2)
    assert found["seeds"] == [0, 1, 2]
    compare.main([str(runs[0])])
    assert "1 seeds" in capsys.readouterr().out


def test_wrong_folders_are_one_line(tmp_path):
    with pytest.raises(UserError, match="is not there; give folders made by"):
        compare.main([str(tmp_path)])
    run = write(tmp_path / "half", 0, {"rods": {"before": 0.1, "after": 0.2}})
    with pytest.raises(UserError, match="is not the summary of a quickstart .no 'static'"):
        compare.main([str(run)])
    for broken in (b'{"rods": ', b"\xff\xfe", b"5", b'{"rods": {}, "static": {}}'):
        (run / "summary.json").write_bytes(broken)
        with pytest.raises(UserError, match="summary.json: is not .*give folders made by"):
            compare.main([str(run)])
    with pytest.raises(UserError, match="one folder is given twice"):
        compare.main([str(run), str(run / ".." / "half")])
