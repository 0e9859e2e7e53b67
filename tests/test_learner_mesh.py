"""A whole run on a mesh: the rewards and the training of one device. In a process of its own,
for the number of devices is fixed when jax starts."""

import json
import pathlib
import tempfile

import pytest

from eight_devices import run_on_eight_devices
from loop_cases import tiny_config
from rods_jax.learner import trainer_mesh
from rods_jax.metrics import read
from rods_jax.models.sharding import MeshConfig
from rods_jax.train import train

MESH = dict(fsdp=2, context=2, tensor=2)


def metrics_of(folder, **changes):
    """Of every step of a run."""
    config = tiny_config(steps=2, batch=dict(rows=8, prompts=2), **changes)
    train(config, folder / "run", folder / "cache")
    return [{name: row[name] for name in ("reward_mean", "loss", "grad_norm", "entropy",
                                          "tokens_sampled", "tokens_prompt")}
            for row in read(folder / "run" / "metrics.jsonl")]


def run_both():
    with tempfile.TemporaryDirectory() as folder:
        one = metrics_of(pathlib.Path(folder) / "one")
        many = metrics_of(pathlib.Path(folder) / "many", mesh=MESH, rollout_tensor=2)
    print(json.dumps([one, many]))


@pytest.mark.slow
def test_a_run_on_a_mesh_trains_as_one_on_a_device():
    one, many = json.loads(run_on_eight_devices(__file__).stdout.splitlines()[-1])
    assert len(one) == 2 and one[0]["grad_norm"] > 0 and one[0]["reward_mean"] > 0
    for a, b in zip(one, many, strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5)


def test_one_device_needs_no_mesh():
    assert trainer_mesh(MeshConfig()) is None
    with pytest.raises(ValueError, match="mesh data=1 fsdp=3 context=1 tensor=1 needs 3 devices"):
        trainer_mesh(MeshConfig(fsdp=3))


if __name__ == "__main__":
    run_both()
