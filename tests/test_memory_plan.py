"""The plan of a run's memory on this machine, against the arrays of a real run."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from eight_devices import run_on_eight_devices
from loop_cases import tiny_config, write_config

from experiments import memory_plan
from rods_jax import plan, policy, task_pool, topology
from rods_jax.config import UserError, load
from rods_jax.grpo.batch import pack
from rods_jax.grpo.update import init_state, make_optimizer
from rods_jax.models.decoder import count_params, init_params
from rods_jax.rollout.engine import Engine
from rods_jax.run_config import RunConfig, batch_shape

CONFIGS = pathlib.Path(__file__).resolve().parents[1] / "configs"
TINY = dict(warm_start=None, update=dict(loss=dict(kl_coef=0.1)), batch=dict(rows=8))


def arguments(folder, *more):
    """Of the command, for a tiny run."""
    return ["--config", str(write_config(folder / "tiny.py", **TINY)), "--topology", "cpu",
            "--json", str(folder / "plan.json"), *more]


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """JSON of the command. Not optimized, which arguments and results do not depend on,
    programs compile in half the time."""
    folder = tmp_path_factory.mktemp("plan")
    done = subprocess.run(
        [sys.executable, "-m", "experiments.memory_plan", *arguments(folder)], cwd=CONFIGS.parent,
        env={**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"}, text=True,
        capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((folder / "plan.json").read_text())


def size(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def test_a_plan_counts_the_arrays_of_a_run(planned):
    found = planned
    config = tiny_config(**TINY)
    parts = policy.build(config)
    assert policy.model_of(config) == (parts.decoder.config, "float32")
    state = init_state(parts.params, make_optimizer(config.optimizer), keep_reference=True)
    engine = Engine(parts.decoder, config.sampler, config.engine, parts.chat, parts.suite)
    programs = engine.slots.programs
    pool = task_pool.init(config.pool, config.sampler.prompt_len)
    shape = batch_shape(config)
    batch = pack([], np.zeros((shape.tasks, shape.group)), shape, drop_dead=False)

    update = found["programs"]["update"]
    # Of arguments that it does not read a program has none: a constant rate asks for no count.
    assert 0 <= size((state, batch)) - update["arguments"] <= 16
    assert update["beside"] == size(programs.cache) + size(pool)
    assert 0 <= update["outputs"] < 2000  # the metrics; the state takes the place of the old one
    # Layers are unrolled here, so rollouts have the trainer's weights and a copy of the layers.
    layers, rest = parts.params["layers"], {**parts.params, "layers": {}}
    unstack, wave = found["programs"]["unstack"], found["programs"]["wave_16"]
    assert unstack["arguments"] == size(layers)
    assert unstack["beside"] == size((state, programs.cache, pool)) - size(layers)
    assert wave["beside"] == size((state, pool)) - size(rest)
    plan_of_wave = wave["arguments"] - size((layers, rest, programs.cache))
    assert 0 < plan_of_wave < 0.02 * size(programs.cache)
    assert set(found["programs"]) == {
        "unstack", "prefill_2x32", "extend_8x16", "wave_16", "update"}


def test_a_run_that_fits_says_so(planned):
    found = planned
    assert found["fits"]
    assert found["memory_bytes"] == topology.memory_bytes() and found["devices"] == 1
    assert found["peak_bytes"] == found["code_bytes"] + max(
        p["peak"] for p in found["programs"].values())
    assert found["free_fraction"] == 1 - found["peak_bytes"] / found["memory_bytes"]
    for program in found["programs"].values():
        assert program["peak"] == sum(
            program[part] for part in ("arguments", "temporaries", "outputs", "beside"))
    assert found["flops"]["needed"] == sum(
        found["flops"][part] for part in ("forward", "backward", "reference"))
    assert found["flops"]["reference"] == found["flops"]["forward"] > 0


def test_a_run_that_does_not_fit_exits_1_with_the_figures(planned, monkeypatch, tmp_path, capsys):
    fields = [field.name for field in dataclasses.fields(plan.Account)]
    accounts = {name: plan.Account(**{field: found[field] for field in fields})
                for name, found in planned["programs"].items()}
    monkeypatch.setattr(plan, "compiled", lambda program: accounts[program.name])
    monkeypatch.setattr(topology, "memory_bytes", lambda: int(planned["peak_bytes"] * 1.05))
    assert memory_plan.main(arguments(tmp_path)) == 1
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["peak_bytes"] == planned["peak_bytes"] and not found["fits"]
    assert found["free_fraction"] == pytest.approx(1 - 1 / 1.05, abs=1e-5)
    assert "4.8% free: does not fit; a run fits where 10% stay free" in capsys.readouterr().out


def test_a_tenth_must_stay_free():
    account = plan.Account(arguments=500, temporaries=300, outputs=50, beside=40, code=10)
    for memory, fits in ((1001, True), (999, False)):
        found = plan.Plan(topology.Topology("cpu", "the CPU", (None,), memory),
                          {"update": account}, plan.UpdateFlops(*[0] * 6))
        assert found.peak_bytes == 900 and found.fits is fits


@pytest.mark.parametrize("words, need, limit", [
    ("RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
     "(244.14G) exceeds available HBM (95.74G).", 244.14 * 2**30, 95.74 * 2**30),
    ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 512.50M of 15.75G hbm. "
     "Exceeded hbm capacity by 1.0G.", 512.5 * 2**20, 15.75 * 2**30),
])
def test_what_the_compiler_refuses_is_told_with_its_figures(words, need, limit):
    class Refused:
        def compile(self):
            raise jax.errors.JaxRuntimeError(words + "\nLargest buffers: ...")
    account = plan.compiled(plan.Program("update", Refused(), beside=7))
    assert account.refused == words and account.peak == int(need) + 7
    assert topology.exhausted(ValueError(words)) == (int(need), int(limit))
    assert memory_plan.row("update", account).endswith(words)
    found = plan.Plan(topology.Topology("v5e:2x4", "TPU", (None,), int(1e15)),
                      {"update": account}, plan.UpdateFlops(*[0] * 6))
    assert found.free_fraction > 0.9 and not found.fits
    assert "does not fit" in memory_plan.verdict(found)[0]

    class Broken:
        def compile(self):
            raise jax.errors.JaxRuntimeError("INTERNAL: a fault of its own")
    with pytest.raises(jax.errors.JaxRuntimeError, match="a fault of its own"):
        plan.compiled(plan.Program("update", Broken(), 0))


@pytest.mark.parametrize("name, words", [
    ("v5e", "topology 'v5e' is not known: give cpu, gpu, or a TPU's kind and shape"),
    ("8 of them", "is not known"),
    ("gpu", "topology gpu: jax sees no GPU here; run it where there is one"),
])
def test_topologies_that_are_not_there_are_one_line(name, words, tmp_path):
    with pytest.raises(UserError, match=words) as error:
        memory_plan.main(arguments(tmp_path, "--topology", name))
    assert "\n" not in str(error.value)


def test_without_the_tpus_compiler_its_package_is_named(monkeypatch, tmp_path):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec",
                        lambda name, *more: None if name == "libtpu" else found(name, *more))
    with pytest.raises(UserError, match=r"run `pip install 'libtpu==[\d.*]+'`, which fits jax"):
        memory_plan.main(arguments(tmp_path, "--topology", "v5e:2x4"))


def test_a_mesh_must_have_the_topologys_devices(tmp_path):
    with pytest.raises(UserError, match="topology cpu has 1 devices, the mesh data=1 fsdp=2 "
                                        "context=1 tensor=2 needs 4: set mesh"):
        memory_plan.main(arguments(tmp_path, "--set", "mesh.fsdp=2", "--set", "mesh.tensor=2"))


@pytest.mark.parametrize("name, trained, frozen", [
    ("qwen3_4b", 4_022_468_096, 0), ("qwen25_7b", 7_615_616_512, 0),
    ("qwen3_4b_lora", 33_030_144, 4_022_468_096),
])
def test_models_of_the_configs_have_their_published_size(name, trained, frozen, monkeypatch):
    """4.0 and 7.6 billion, and adapters of rank 16 on all projections."""
    monkeypatch.chdir(CONFIGS.parent)
    model, dtype = policy.model_of(load(str(CONFIGS / f"{name}.py"), [], RunConfig))
    params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    assert count_params(params) == trained + frozen and dtype == "bfloat16"
    assert (model.lora is not None) == (frozen > 0)


# ---------------------------------------------------------------- several devices


def on_eight_devices():
    """A run whose rollouts have rounded weights, halves of them on a device."""
    return tiny_config(**TINY | dict(
        rollout_weights="bf16", update=dict(loss=dict(truncated_importance=2.0))),
        mesh=dict(data=2, fsdp=2, context=2), rollout_tensor=2)


@pytest.mark.slow
def test_eight_devices_each_hold_their_part():
    found = json.loads(run_on_eight_devices(__file__).stdout.splitlines()[-1])
    config = on_eight_devices()
    params = jax.eval_shape(lambda: init_params(policy.model_of(config)[0], jax.random.key(0)))
    whole = sum(4 * x.size for x in jax.tree.leaves(params))
    update, publish = found["programs"]["update"], found["programs"]["publish"]
    shape = batch_shape(config)
    batch = size(pack([], np.zeros((shape.tasks, shape.group)), shape, drop_dead=False))
    # Split over fsdp and context: weights and two moments, whose norms are whole. Over all three
    # axes: the batch's rows.
    assert 3 * whole / 4 <= update["arguments"] - batch / 8 < 3 * whole / 4 + batch / 8 + 2000
    # Half the bytes, and half of the heads and of the MLP on a device; an odd vocabulary whole.
    assert whole / 4 < publish["outputs"] < whole / 2
    assert publish["beside"] > update["beside"] > 0
    assert found["memory_bytes"] == pytest.approx(topology.memory_bytes() / 8, abs=1)


if __name__ == "__main__":
    print(json.dumps(memory_plan.as_json(plan.make_plan(on_eight_devices(),
                                                        topology.find("cpu")))))
