"""The bench of synthesis on a tiny run, and its figures from seconds made by hand."""

import os

import pytest
from loop_cases import tiny_config

from experiments.bench import synthesis as bench


def test_figures_are_of_pairs():
    """A step that took long in both arms is no evidence."""
    found = bench.synthesis_figures([1.01, 9.09, 2.02, 3.00], [1.0, 9.0, 2.0, 1.0])
    assert found["step_time_on_over_off"] == pytest.approx(1.01) and found["all_met"]
    assert found["step_s"]["on"] == pytest.approx(2.51) and found["step_s"]["off"] == 1.5
    assert not bench.synthesis_figures([1.03], [1.0])["all_met"]


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_one_run(tmp_path, capsys):
    cores = os.sched_getaffinity(0)
    found = bench.bench_synthesis(bench.SynthesisPlan(tiny_config(), 3, tmp_path))
    assert os.sched_getaffinity(0) == cores
    assert found["attempts"] == 4 * found["attempts_a_step"] == 32 and found["accepted_share"] > 0.5
    assert len(found["seconds"]["on"]) == len(found["seconds"]["off"]) == 3
    assert found["all_met"] == (found["step_time_on_over_off"] <= 1.02)
    assert capsys.readouterr().err.count("s without") == 3
    shown = bench.synthesis_table(found).splitlines()
    assert shown[1].startswith("with synthesis") and "32 attempts" in shown[4]
