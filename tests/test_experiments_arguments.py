"""Arguments of the studies that cannot be used: one line that names the argument, before any
work begins."""

import pytest
from loop_cases import write_config

from experiments import (boundary_study, docs_block, evaluate, gradient_study, landing, pool_study,
                         quickstart, train)
from experiments.pool_study import Arm
from rods_jax import startup
from rods_jax.config import UserError


@pytest.fixture(autouse=True)
def no_work(monkeypatch):
    def begin(*_):
        raise AssertionError("the work began")

    for module, name in ((boundary_study, "study"), (pool_study, "simulate"),
                         (landing, "landings"), (startup, "start")):
        monkeypatch.setattr(module, name, begin)


def told(main, *arguments):
    with pytest.raises(UserError) as error:
        main([str(a) for a in arguments])
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("main, arguments, words", [
    (pool_study.main, ["--seeds", 0], "--seeds is 0: give 1 to 1000000"),
    (pool_study.main, ["--seeds", -4], "--seeds is -4: give 1 to"),
    (pool_study.main, ["--seeds", 10 ** 12], "--seeds is 1000000000000: give 1 to"),
    (pool_study.main, ["--epochs", 0], "--epochs is 0: give 21 to"),
    (pool_study.main, ["--epochs", -1, "--arms", "static"], "--epochs is -1: give 1 to"),
    (pool_study.main, ["--epochs", 1, "--arms", "forget_paper"], "--epochs is 1: give 21 to"),
    (pool_study.main, ["--epochs", 9, "--arms", "dry", "outage"], "--epochs is 9: give 10 to"),
    (pool_study.main, ["--seed", -1], "--seed is -1: give 0 to 2147483647"),
    (pool_study.main, ["--seed", 2 ** 31], "--seed is 2147483648: give 0 to"),
    (boundary_study.main, ["--seed", -1], "--seed is -1: give 0 to"),
])
def test_numbers(main, arguments, words):
    assert told(main, *arguments).startswith(words)


@pytest.mark.parametrize("module, before", [
    (pool_study, ()), (boundary_study, ()), (landing, ("RUN",))])
def test_places_of_results(module, before, tmp_path):
    page, missing = tmp_path / "page.md", tmp_path / "missing.md"
    page.write_text("no marks")
    assert told(module.main, *before, "--out", missing).startswith(f"--out {missing}: no such page")
    assert told(module.main, *before, "--out", page).startswith(f"--out {page}: no marks <!-- beg")
    assert told(module.main, *before, "--out", "").startswith("--out no name was given")
    assert told(module.main, *before, "--json", tmp_path) == (
        f"--json {tmp_path}: is a folder; give the name of a file")
    if module is not boundary_study:
        plot = tmp_path / "x.notaformat"
        assert told(module.main, *before, "--plot", plot) == (
            f"--plot {plot}: is no picture's name; let it end in .png, .pdf, .svg")
        assert told(module.main, *before, "--plot", tmp_path).endswith("give the name of a file")
    assert page.read_text() == "no marks" and list(tmp_path.iterdir()) == [page]


def test_the_json_of_a_run_is_checked_first(tmp_path):
    config = "--config", write_config(tmp_path / "tiny.py"), "--json", tmp_path
    for main in (train.main, evaluate.main, gradient_study.main):
        assert f"{tmp_path}: is a folder; give the name of a file" in told(main, *config)
    assert "is a folder" in told(quickstart.main, "--json", tmp_path)


def test_arguments_that_can_be_used_let_the_work_begin(tmp_path):
    page, plot = tmp_path / "page.md", tmp_path / "new" / "plot.png"
    page.write_text("\n".join(docs_block.marks("pool_study")))
    for more in (["--out", str(page), "--plot", str(plot), "--epochs", "21"],
                 ["--epochs", "1", "--seeds", "1", "--arms", "wide", "--json", "-"]):
        with pytest.raises(AssertionError, match="the work began"):
            pool_study.main(more)
    assert plot.parent.is_dir()


def test_the_fewest_epochs_give_figures(monkeypatch):
    monkeypatch.undo()
    cases = pool_study.scenarios(pool_study.base_of(8, pool_study.LEAST_EPOCHS[Arm.FORGET_PAPER]))
    case = cases[Arm.FORGET_PAPER]
    text = pool_study.tables(cases, {Arm.FORGET_PAPER: pool_study.simulate(case)})
    assert "nan" not in text and "forgetting: the paper's rules" in text
