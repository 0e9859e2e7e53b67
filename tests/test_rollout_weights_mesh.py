"""Publishing from the trainer's mesh to the devices of each host. Eight devices and two hosts
are processes of their own (this file run as a script)."""

import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from eight_devices import run_on_eight_devices
from rods_jax import metrics
from rods_jax.models.decoder import Decoder
from rods_jax.models.sharding import make_mesh, param_shardings
from rods_jax.rollout.weights import Precision, local_mesh, make_weights
from weights_cases import TOY, equal, logits, noisy, published


def test_a_mesh_must_be_the_trainers():
    device = jax.devices()[0]

    class Elsewhere:
        process_index = 1

    class Pod:
        size, devices = 4, np.array([device, device, device, Elsewhere()])
    with pytest.raises(ValueError, match="tensor=3 does not divide the trainer's 4 devices"):
        local_mesh(Pod(), 3)
    with pytest.raises(ValueError, match="tensor=2 devices next to each other .* two hosts"):
        local_mesh(Pod(), 2)
    pods_own = local_mesh(Pod(), 1)
    assert pods_own.shape == {"data": 3, "fsdp": 1, "context": 1, "tensor": 1}


def test_eight_devices_publish_what_one_does():
    assert run_on_eight_devices(__file__).stdout.split() == ["published"]


def test_two_hosts_publish_each_to_its_own_devices():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    root = pathlib.Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu", "XLA_FLAGS":
           "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"}
    hosts = [subprocess.Popen([sys.executable, __file__, str(port), str(host)], env=env, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) for host in (0, 1)]
    try:
        for host in hosts:
            out, errors = host.communicate(timeout=120)
            assert host.returncode == 0 and out.splitlines()[-1] == "published", errors[-2000:]
    finally:
        for host in hosts:
            host.kill()


def check_mesh(precision, sizes, tensor):
    """Publishes from a trainer's mesh of these sizes to this process's devices, `tensor` of them
    to a copy, and compares with what one device makes of the same weights."""
    params, here = jax.tree.map(np.asarray, noisy()), set(jax.local_devices())
    want = published(precision, noisy())[1]
    mesh = make_mesh(*sizes)
    trained = jax.tree.map(
        lambda x, to: jax.make_array_from_callback(x.shape, to, lambda at: x[at]),
        params, param_shardings(params, mesh))
    own = local_mesh(mesh, tensor)
    assert set(own.devices.flat) == here and own.shape["tensor"] == tensor
    decoder, weights = make_weights(Decoder(TOY), precision, own)
    got, took = weights.publish(trained)
    with metrics.CompileCounter() as compiles:
        again, _ = weights.publish(trained)
    assert not compiles.total and took > 0
    for tree in (got, again):
        equal(jax.tree.map(np.asarray, tree), want)
    # All of one mesh, also what was right as it lay: programs are made for one.
    assert all(x.sharding.mesh == own for x in jax.tree.leaves(got))
    # From shapes alone it is told beforehand what comes out.
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)  # noqa: E731
    told, _ = weights.lower(jax.tree.map(like, trained))
    assert jax.tree.map(like, told) == jax.tree.map(like, got)
    q, k = got["layers"]["q"], got["layers"]["k"]
    assert set(q.sharding.device_set) == here
    assert q.addressable_shards[0].data.size * tensor == q.size
    # Two K/V heads do not divide over four devices: each holds them whole.
    assert k.addressable_shards[0].data.size * (1 if tensor == 4 else tensor) == k.size
    assert not any(x.is_deleted() for x in jax.tree.leaves(trained))
    if precision is Precision.INT8:
        np.testing.assert_allclose(logits(decoder, got), logits(decoder, want), atol=1e-5)
    return trained


def check_meshes_without_tensor(trained):
    """All of the host's devices hold the whole; not all of them are refused."""
    flat = Mesh(np.array(jax.local_devices()), ("any",))
    got, _ = make_weights(Decoder(TOY), Precision.INT8, flat)[1].publish(trained)
    here = set(jax.local_devices())
    assert all(x.is_fully_replicated and x.sharding.device_set == here
               for x in jax.tree.leaves(got))
    part = Mesh(np.array(jax.local_devices()[:2]), ("any",))
    try:
        make_weights(Decoder(TOY), Precision.INT8, part)[1].publish(trained)
    except ValueError as error:
        assert "make it with local_mesh" in str(error)
    else:
        raise AssertionError("a part of the host's devices was taken")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
        check_mesh(Precision.INT8, (2, 2, 2), 2)
    else:
        check_mesh(Precision.TRAINED, (1, 8, 1), 1)
        check_mesh(Precision.TRAINED, (8, 1, 1), 4)
        check_mesh(Precision.BF16, (4, 2, 1), 4)
        check_meshes_without_tensor(check_mesh(Precision.INT8, (1, 8, 1), 2))
    print("published")
