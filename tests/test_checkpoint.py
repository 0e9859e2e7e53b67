"""rods_jax.checkpoint: atomic, strict, independent of the mesh that wrote."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rods_jax import checkpoint

ROOT = pathlib.Path(__file__).resolve().parents[1]


@flax.struct.dataclass
class State:
    params: dict
    opt: optax.OptState
    key: jax.Array
    step: jax.Array


def make_state(seed: int = 0) -> State:
    key = jax.random.key(seed)
    params = {"w": jax.random.normal(key, (3, 4)).astype(jnp.bfloat16), "b": jnp.arange(4.0) / 3}
    return State(params, optax.adamw(1e-3).init(params), jax.random.split(key, 2),
                 jnp.int32(seed))


def bits(tree) -> list[tuple[str, bytes]]:
    def one(x):
        x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        return str(x.dtype), np.asarray(x).tobytes()
    return [one(jnp.asarray(x)) for x in jax.tree.leaves(tree)]


def test_round_trip_keeps_bits_dtypes_structure_and_host(tmp_path):
    state, host = make_state(), {"cursor": 7, "pool": ["a", None], "mean": 0.1}
    arrays = {"state": state, "numpy": np.arange(3, dtype=np.int64), "plain": 5, "share": 0.25}
    path = checkpoint.save(tmp_path, 12, arrays, host)
    assert path.name == "step_000000012" and checkpoint.latest(tmp_path) == path
    for source in (tmp_path, path):
        got = checkpoint.restore(source, arrays)
        assert (got.step, got.host, got.path) == (12, host, path)
        assert jax.tree.structure(got.arrays) == jax.tree.structure(arrays)
        assert bits(got.arrays["state"]) == bits(state)
        assert got.arrays["state"].params["w"].dtype == jnp.bfloat16
        assert isinstance(got.arrays["numpy"], np.ndarray) and got.arrays["numpy"].dtype == np.int64
        assert got.arrays["plain"] == 5 and type(got.arrays["plain"]) is int
        assert got.arrays["share"] == 0.25
    assert checkpoint.read_host(tmp_path) == (12, host)


def test_restored_keys_draw_the_same_numbers(tmp_path):
    state = make_state(3)
    checkpoint.save(tmp_path, 1, state, {})
    like = jax.eval_shape(lambda: make_state(0))
    got = checkpoint.restore(tmp_path, like).arrays
    assert got.key.dtype == state.key.dtype
    np.testing.assert_array_equal(jax.random.normal(got.key[1], (5,)),
                                  jax.random.normal(state.key[1], (5,)))


def test_restore_adds_no_compile(tmp_path):
    """Shapes, dtypes, weak types and placement come back as the update step left them."""
    from rods_jax.metrics import CompileCounter

    @jax.jit
    def advance(state):
        return state.replace(step=state.step + 1,
                             params=jax.tree.map(lambda x: x * 2, state.params))

    state = advance(make_state())
    checkpoint.save(tmp_path, 1, state, {})
    restored = checkpoint.restore(tmp_path, state).arrays
    with CompileCounter() as compiles:
        after = advance(restored)
    assert "advance" not in compiles.traces()
    assert bits(after) == bits(advance(state))


@settings(max_examples=8)
@given(st.dictionaries(
    st.text("abc.[]'/ é", min_size=1, max_size=6),
    st.sampled_from(["float32", "bfloat16", "int8", "bool", "uint32"])
    .flatmap(lambda d: st.tuples(st.just(d), st.lists(st.integers(0, 3), max_size=2))),
    min_size=1, max_size=4))
def test_any_names_shapes_and_dtypes(tmp_path_factory, leaves):
    root = tmp_path_factory.mktemp("any")
    rng = np.random.default_rng(0)
    arrays = {name: jnp.asarray(rng.integers(0, 2, shape)).astype(dtype)
              for name, (dtype, shape) in leaves.items()}
    checkpoint.save(root, 1, arrays, {})
    assert bits(checkpoint.restore(root, arrays).arrays) == bits(arrays)
    shutil.rmtree(root)


# ---------------------------------------------------------------- retention and rewriting


def test_keeps_the_newest_and_none_half_deleted(tmp_path):
    for step in range(1, 6):
        checkpoint.save(tmp_path, step, {"x": jnp.int32(step)}, {"step": step}, keep=3)
    assert checkpoint.steps(tmp_path) == [3, 4, 5]
    assert sorted(os.listdir(tmp_path)) == [f"step_{s:09d}" for s in (3, 4, 5)]
    older = checkpoint.restore(checkpoint.step_dir(tmp_path, 3), {"x": jnp.int32(0)})
    assert int(older.arrays["x"]) == 3 and older.host == {"step": 3}


def test_saving_a_step_again_replaces_it(tmp_path):
    for value in (1, 2):
        checkpoint.save(tmp_path, 4, {"x": jnp.int32(value)}, {"v": value})
    got = checkpoint.restore(tmp_path, {"x": jnp.int32(0)})
    assert int(got.arrays["x"]) == 2 and got.host == {"v": 2}
    assert os.listdir(tmp_path) == ["step_000000004"]


def test_going_on_from_an_older_step_sets_later_ones_aside(tmp_path):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, {"x": jnp.int32(step)}, {}, keep=3)
    with pytest.raises(checkpoint.CheckpointError, match="holds step 3, later than step 2"):
        checkpoint.save(tmp_path, 2, {"x": jnp.int32(0)}, {})
    assert checkpoint.rewind(tmp_path, 1) == (2, 3)
    assert checkpoint.steps(tmp_path) == [1]
    assert checkpoint.steps(tmp_path / "abandoned") == [2, 3]
    checkpoint.save(tmp_path, 2, {"x": jnp.int32(0)}, {})


# ---------------------------------------------------------------- killed while saving

KILLED = textwrap.dedent("""
    import os, signal, sys
    import jax.numpy as jnp
    from rods_jax import checkpoint
    root, where = sys.argv[1:]
    checkpoint.save(root, 1, {"x": jnp.arange(4)}, {"n": 1})
    checkpoint.save(root, 2, {"x": jnp.arange(4) + 2}, {"n": 2})
    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)
    step = 3
    if where == "flush":       # arrays and host state are there, the rename is not
        checkpoint._flush = die
    elif where == "remove":    # half way through the deletion of the oldest
        checkpoint.shutil.rmtree = lambda p: (os.remove(os.path.join(p, "host.json")), die())
    elif where == "replace":   # between the two renames of a rewrite
        step = 2
        checkpoint.pathlib.Path.rename = (
            lambda self, to, real=checkpoint.pathlib.Path.rename:
            die() if self.name.startswith(".tmp-") else real(self, to))
    checkpoint.save(root, step, {"x": jnp.arange(4) + 9}, {"n": 9})
""")


@pytest.mark.parametrize("where, step, value", [("flush", 2, 2), ("remove", 3, 9), ("replace", 2, 2)])
def test_killed_while_saving_leaves_a_whole_checkpoint(tmp_path, where, step, value):
    root = tmp_path / "run"
    done = subprocess.run([sys.executable, "-c", KILLED, str(root), where], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = checkpoint.clean(root)
    assert len(left) == (2 if where == "replace" else 1)
    assert all(name.startswith("step_") for name in os.listdir(root))
    got = checkpoint.restore(root, {"x": jnp.arange(4)})
    assert got.step == step
    np.testing.assert_array_equal(got.arrays["x"], np.arange(4) + value)
    checkpoint.save(root, 4, {"x": jnp.arange(4)}, {})
    assert checkpoint.latest(root) == checkpoint.step_dir(root, 4)
    assert checkpoint.clean(root) == ()


def test_disk_full_keeps_earlier_checkpoints(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, {"x": jnp.arange(3)}, {})

    def full(_):
        raise OSError(28, "No space left on device", "x")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_flush", full)
        with pytest.raises(checkpoint.CheckpointError) as error:
            checkpoint.save(tmp_path, 2, {"x": jnp.arange(3)}, {})
    assert str(error.value) == (
        f"{tmp_path}: step 2 could not be saved, No space left on device: make room there, and go "
        "on from step_000000001 with --resume")
    assert os.listdir(tmp_path) == ["step_000000001"]
    assert checkpoint.restore(tmp_path, {"x": jnp.arange(3)}).step == 1
    checkpoint.save(tmp_path, 2, {"x": jnp.arange(3)}, {})
    assert checkpoint.steps(tmp_path) == [1, 2]


FULL = textwrap.dedent("""
    import resource, sys
    import numpy as np
    from rods_jax import checkpoint, config
    def main():
        rng = np.random.default_rng(0)
        arrays = {f"w{i}": rng.normal(size=(50, 100)) for i in range(20)}
        arrays["small"] = np.zeros(3)
        checkpoint.save(sys.argv[1], 1, arrays, {})
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        checkpoint.save(sys.argv[1], 2, arrays, {})
    config.run_main(main)
""")


def test_arrays_that_find_no_room_are_one_line_and_the_last_step_stays(tmp_path):
    """Many writes fail at once: none of them says so of its own."""
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.stderr == (
        f"error: {tmp_path}: step 2 could not be saved, File too large: raise the limit of a "
        "file's size (ulimit -f), and go on from step_000000001 with --resume\n")
    assert done.returncode == 2 and os.listdir(tmp_path) == ["step_000000001"]
    got = checkpoint.restore(tmp_path, {"small": np.ones(3)}, partial=True)
    np.testing.assert_array_equal(got.arrays["small"], np.zeros(3))
    checkpoint.save(tmp_path, 2, {"x": jnp.arange(3)}, {})
    assert checkpoint.steps(tmp_path) == [1, 2]


# ---------------------------------------------------------------- errors


def one_line(error) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("like, words", [
    ({"a": {"w": jnp.zeros((2, 3))}, "b": jnp.zeros(1)}, "leaf b is missing"),
    ({"a": {"w": jnp.zeros((3, 2))}}, "leaf a.w has shape [2, 3], expected [3, 2]"),
    ({"a": {"w": jnp.zeros((2, 3), jnp.bfloat16)}}, "leaf a.w has dtype float32, expected bfloat16"),
    ({"a": {}, "c": 1}, "leaf c is missing"),
    ({}, "holds leaf a.w, which this run does not have"),
])
def test_errors_name_path_and_leaf(tmp_path, like, words):
    path = checkpoint.save(tmp_path, 1, {"a": {"w": jnp.ones((2, 3))}}, {})
    with pytest.raises(checkpoint.CheckpointError) as error:
        checkpoint.restore(tmp_path, like)
    assert one_line(error).startswith(f"{path}: ") and words in one_line(error)


def test_missing_and_damaged_paths(tmp_path):
    like = {"x": jnp.arange(3)}
    with pytest.raises(checkpoint.CheckpointError) as error:
        checkpoint.restore(tmp_path / "none", like)
    assert one_line(error) == f"{tmp_path / 'none'}: no such checkpoint folder"
    with pytest.raises(checkpoint.CheckpointError, match="holds no finished checkpoint"):
        checkpoint.restore(tmp_path, like)
    assert checkpoint.latest(tmp_path) is None and checkpoint.steps(tmp_path / "none") == []

    path = checkpoint.save(tmp_path, 1, like, {})
    for file in sorted(p for p in (path / "arrays").rglob("*") if p.is_file()):
        file.write_bytes(b"")
    with pytest.raises(checkpoint.CheckpointError) as error:
        checkpoint.restore(tmp_path, like)
    assert "its arrays cannot be read" in one_line(error)
    (path / "host.json").write_text("{")
    with pytest.raises(checkpoint.CheckpointError, match="host.json: damaged"):
        checkpoint.restore(tmp_path, like)
    (path / "host.json").unlink()
    with pytest.raises(checkpoint.CheckpointError, match="host.json: missing"):
        checkpoint.restore(tmp_path, like)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(checkpoint.CheckpointError, match="its format is not"):
        checkpoint.restore(tmp_path, like)
    for lost in ("step", "leaves"):
        (path / "manifest.json").write_text(json.dumps(
            {name: value for name, value in manifest.items() if name != lost}))
        for read in (lambda: checkpoint.restore(tmp_path, like),
                     lambda: checkpoint.read_host(tmp_path)):
            with pytest.raises(checkpoint.CheckpointError, match=f"damaged .no {lost}."):
                read()


@pytest.mark.parametrize("host, words", [
    ({1: "a"}, "host has the key 1"), ({"a": (1, 2)}, "host.a is a tuple"),
    ({"a": [np.float32(1)]}, r"host.a\[0\] is a float32"),
])
def test_host_state_that_json_would_change_is_refused(tmp_path, host, words):
    with pytest.raises(ValueError, match=words):
        checkpoint.save(tmp_path, 1, {"x": jnp.arange(3)}, host)
    assert os.listdir(tmp_path) == []


def test_arrays_that_cannot_be_saved(tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match="leaf a is not an array"):
        checkpoint.save(tmp_path, 1, {"a": object()}, {})
    with pytest.raises(checkpoint.CheckpointError, match="no array to save"):
        checkpoint.save(tmp_path, 1, {}, {})
    with pytest.raises(checkpoint.CheckpointError, match="two leaves are called a.b"):
        checkpoint.save(tmp_path, 1, {"a": {"b": 1}, "a.b": 2}, {})
    with pytest.raises(checkpoint.CheckpointError, match="keep is 0"):
        checkpoint.save(tmp_path, 1, {"a": 1}, {}, keep=0)


# ---------------------------------------------------------------- other meshes

MESH = textwrap.dedent("""
    import sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from rods_jax import checkpoint
    root, n, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    assert jax.device_count() == n
    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    def want():
        x = jnp.sin(jnp.arange(64.0)).reshape(16, 4)
        return {"x": x, "half": x.astype(jnp.bfloat16), "key": jax.random.key(5),
                "keys": jax.random.split(jax.random.key(6), 8)}
    places = {"x": rows, "half": NamedSharding(mesh, P(None)), "key": whole, "keys": rows}
    if mode == "save":
        checkpoint.save(root, 1, jax.device_put(want(), places), {"n": n})
    like = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
                        jax.eval_shape(want), places)
    got = checkpoint.restore(root, like)
    assert got.host == {"n": 8}
    for name, value in want().items():
        have = got.arrays[name]
        assert have.sharding.is_equivalent_to(places[name], have.ndim), (name, have.sharding)
        if name.startswith("key"):
            value, have = jax.random.key_data(value), jax.random.key_data(have)
        assert have.dtype == value.dtype
        assert np.asarray(have).tobytes() == np.asarray(value).tobytes(), name
    plain = checkpoint.restore(root, jax.eval_shape(want)).arrays["x"]
    assert np.asarray(plain).tobytes() == np.asarray(want()["x"]).tobytes()
    assert len(plain.devices()) == 1
    print("ok")
""")


def test_other_device_counts_read_the_same_bits(tmp_path):
    """google/orbax#648, #678, #1110: what a large mesh saved could not be opened with fewer
    devices. Written by 8; read by 2 and by 1, in processes of their own."""
    for devices, mode in ((8, "save"), (2, "read"), (1, "read")):
        environment = {**os.environ, "JAX_PLATFORMS": "cpu",
                       "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
        done = subprocess.run(
            [sys.executable, "-c", MESH, str(tmp_path), str(devices), mode],
            cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.stdout == "ok\n", done.stderr[-2000:]


CHANGES = {
    "one bit": lambda x: x.at[1, 2, 3].set(np.nextafter(np.float32(x[1, 2, 3]), 9)),
    "two signs": lambda x: x.at[0, 0, 0].multiply(-1).at[2, 1, 5].multiply(-1),
    "all signs": lambda x: -x, "doubled": lambda x: 2 * x, "halved": lambda x: x / 2,
    "two layers swapped": lambda x: x[jnp.array([1, 0, 2, 3])],
    "two rows swapped": lambda x: x[:, jnp.array([1, 0, *range(2, 16)])],
    "another shape": lambda x: x.reshape(4, 64, 16), "another dtype": lambda x: x.view(jnp.int32),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_fingerprint_tells_changed_weights(change, dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 16, 64)), jnp.float32)
    if change not in ("one bit", "another dtype"):
        x = x.astype(dtype)
    tree = {"layers": {"q": x}, "final_norm": jnp.ones(64, dtype)}
    other = tree | {"layers": {"q": CHANGES[change](x)}}
    assert checkpoint.fingerprint(tree) == checkpoint.fingerprint(jax.tree.map(np.asarray, tree))
    assert checkpoint.fingerprint(tree) != checkpoint.fingerprint(other)


def test_a_fingerprint_tells_where_an_array_stands():
    a, b = jnp.ones(3), jnp.arange(3.0)
    assert checkpoint.fingerprint({"k": a, "v": b}) != checkpoint.fingerprint({"k": b, "v": a})
    assert checkpoint.fingerprint({"k": a}) != checkpoint.fingerprint({"v": a})
