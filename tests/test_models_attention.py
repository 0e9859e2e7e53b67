"""Attention by kernels against `attend`, who is chosen where, and what is kept for the
backward pass."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eight_devices import run_on_eight_devices
from memory_cases import empty_pages, page_a_row
from rods_jax.models import attention, blockwise
from rods_jax.models.attention import (
    Segments, attend, attend_segments, causal_mask, choose, cudnn, segment_mask, splash)
from rods_jax.models.config import Attention, ModelConfig, Remat
from rods_jax.models.decoder import Decoder, init_params
from rods_jax.models.sharding import batch_sharding, make_mesh

TOY = ModelConfig(vocab_size=20, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8,
                  d_ff=24)
LENGTH = 128  # the least that splash takes


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def quick_jit(f):
    """These tests compile far more than they compute."""
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})


def packed(length):
    """Two packed rows: segments of several lengths and padding at the end; one segment that
    fills the row."""
    ids = np.zeros((2, length), np.int32)
    ids[0, :length * 3 // 4] = np.sort(np.random.default_rng(0).integers(1, 5, length * 3 // 4))
    ids[1] = 3
    return ids


def value_and_gradients(function, arrays, ids):
    """Output at real tokens, and the gradients by q, k and v of a random sum of it, in which
    padding takes no part."""
    real = (ids > 0)[:, :, None, None]
    toward = draw(9, *arrays[0].shape) * real

    @quick_jit
    def both(arrays):
        out, pull = jax.vjp(lambda *a: function(*a, ids), *arrays)
        return jnp.where(real, out, 0), pull(toward), jnp.isfinite(out).all()
    out, gradients, finite = both(arrays)
    assert finite and all(np.isfinite(g).all() for g in gradients)
    return out, gradients


def by_attend(q, k, v, ids):
    return attend(q, k, v, segment_mask(ids))


KERNELS = {"splash": functools.partial(splash, interpret=True),
           "cudnn": functools.partial(cudnn, implementation="xla"), "blocks": blockwise.attend}


def alone(kernel):
    """The kernel on rows without a prompt."""
    def attention(q, k, v, ids):
        nothing = jnp.zeros((1, k.shape[1], 0, k.shape[3]))
        return kernel(q, k, v, nothing, nothing, blockwise.Rows(
            jnp.asarray(ids), jnp.zeros(len(ids), jnp.int32), jnp.zeros(1, jnp.int32)))
    return attention


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("heads, kv, length", [(2, 2, 128), (4, 2, 256), (3, 1, 128)],
                         ids=["mha", "gqa", "mqa"])
def test_kernels_equal_attend_on_packed_rows(kernel, heads, kv, length):
    ids = packed(length)
    arrays = (draw(1, 2, length, heads, 16), draw(2, 2, kv, length, 16),
              draw(3, 2, kv, length, 16))
    got, want = (value_and_gradients(f, arrays, ids) for f in (alone(KERNELS[kernel]), by_attend))
    assert np.abs(want[0]).max() > 0.1 and all(np.abs(g).max() > 0.1 for g in want[1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)


def test_kernels_on_a_mesh_equal_attend():
    """In a process of its own, with eight devices: the device count is fixed when jax starts."""
    done = run_on_eight_devices(__file__, optimize=True)
    assert done.stdout.split() == [f"{k}-{h}-{kv}" for k, h, kv, _ in ON_MESH]


# Over the tensor axis heads and K/V heads divide, K/V heads are too few, nothing divides.
ON_MESH = [("splash", 4, 2, (2, 2, 2)), ("cudnn", 4, 2, (1, 4, 2)), ("cudnn", 4, 2, (2, 1, 4)),
           ("cudnn", 3, 3, (2, 2, 2))]


def compare_on_eight_devices():
    attention.splash, attention.cudnn = KERNELS["splash"], KERNELS["cudnn"]
    ids = np.concatenate([packed(LENGTH), packed(LENGTH)[::-1]])
    for name, heads, kv, sizes in ON_MESH:
        rows = batch_sharding(make_mesh(*sizes))
        arrays = (draw(1, 4, LENGTH, heads, 4), draw(2, 4, kv, LENGTH, 4),
                  draw(3, 4, kv, LENGTH, 4))

        def on_mesh(q, k, v, ids):
            return attend_segments(q, k, v, Segments(jnp.asarray(ids)), Attention(name), rows)
        got, want = (value_and_gradients(f, arrays, ids) for f in (on_mesh, by_attend))
        part = (4 // sizes[0] // sizes[1], LENGTH, heads // (sizes[2] if heads == 4 else 1), 4)
        assert got[0].addressable_shards[0].data.shape == part
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)
        print(f"{name}-{heads}-{kv}")


# ---------------------------------------------------------------- the choice

TPU = SimpleNamespace(platform="tpu")
GPU = SimpleNamespace(platform="gpu", compute_capability="9.0")
OLD_GPU = SimpleNamespace(platform="gpu", compute_capability="7.5")
AMD_GPU = SimpleNamespace(platform="gpu", compute_capability="gfx90a")
CPU = SimpleNamespace(platform="cpu")


def chosen(device, length=256, **fields):
    """With a mesh of that device."""
    config = dataclasses.replace(TOY, **{"compute_dtype": "bfloat16", **fields})
    on = SimpleNamespace(mesh=SimpleNamespace(devices=np.array([[device]], object)), spec=("data",))
    return choose(config, length, on)


@pytest.mark.parametrize("device, fields, want", [
    (TPU, {}, "splash"), (TPU, {"compute_dtype": "float32"}, "splash"),
    (TPU, {"length": 200}, "xla"),
    (GPU, {}, "cudnn"), (GPU, {"length": 200}, "cudnn"), (GPU, {"length": 201}, "xla"),
    (GPU, {"compute_dtype": "float32"}, "xla"), (GPU, {"head_dim": 12}, "xla"),
    (GPU, {"head_dim": 192}, "xla"), (OLD_GPU, {}, "xla"), (AMD_GPU, {}, "xla"),
    (CPU, {}, "xla")])
def test_auto_takes_the_kernel_that_can_run(device, fields, want):
    assert chosen(device, **fields) is Attention(want)


@pytest.mark.parametrize("kind, device, fields, words", [
    ("splash", CPU, {}, "attention is splash, but the device is a cpu: run on a TPU, or"),
    ("splash", GPU, {}, "the device is a gpu"),
    ("splash", TPU, {"length": 200}, "rows have 200 tokens: make their length a multiple of 128"),
    ("cudnn", TPU, {}, "attention is cudnn, but the device is a tpu without cuDNN"),
    ("cudnn", AMD_GPU, {}, "without cuDNN: run on an NVIDIA GPU"),
    ("cudnn", OLD_GPU, {}, "compute capability 7.x: use one of 8.0 or later"),
    ("cudnn", GPU, {"compute_dtype": "float32"}, "float32: set it to bfloat16, or choose auto"),
    ("cudnn", GPU, {"head_dim": 12}, "head_dim is 12: it takes multiples of 8 up to 128"),
    ("cudnn", GPU, {"length": 201}, "rows have 201 tokens: make their length even")])
def test_a_kernel_asked_for_by_name_that_cannot_run_is_an_error(kind, device, fields, words):
    with pytest.raises(ValueError, match=words) as error:
        chosen(device, attention=Attention(kind), **fields)
    assert "\n" not in str(error.value)


def test_a_kernel_asked_for_by_name_is_taken_where_it_can_run():
    assert chosen(TPU, attention=Attention.SPLASH) is Attention.SPLASH
    assert chosen(GPU, attention=Attention.CUDNN) is Attention.CUDNN
    assert chosen(TPU, attention=Attention.XLA) is chosen(GPU, attention=Attention.XLA)
    assert choose(TOY, 128, None) is Attention.XLA  # what the tests run on has no kernel


def test_auto_leaves_kernels_alone_where_it_cannot_tell_for_how_many_devices(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [TPU] * 4)
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    assert choose(TOY, 128, None) is Attention.XLA
    by_name = dataclasses.replace(TOY, attention=Attention.SPLASH)
    assert choose(by_name, 128, None) is Attention.SPLASH
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert choose(TOY, 128, None) is Attention.SPLASH


# ---------------------------------------------------------------- in the decoder


@pytest.fixture
def calls(monkeypatch):
    """As if on one TPU: splash in interpret mode. Lengths of the rows it was traced for."""
    lengths = []

    def counted(q, *rest):
        lengths.append(q.shape[1])
        return KERNELS["splash"](q, *rest)
    monkeypatch.setattr(jax, "devices", lambda: [TPU])
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(attention, "splash", counted)
    return lengths


def noisy_params(config):
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: (0.3 * rng.normal(size=x.shape)).astype(np.float32), shapes)


def loss(config, params, ids_BxL, self_mask, real):
    positions = jnp.broadcast_to(jnp.arange(ids_BxL.shape[1]), ids_BxL.shape)
    hidden, _ = Decoder(config).apply({"params": params}, ids_BxL, positions, self_mask)
    logits = Decoder(config).apply({"params": params}, hidden, method="logits")
    return (jax.nn.log_softmax(logits)[..., 0] * real).sum()


IDS = packed(LENGTH)


@functools.cache
def loss_and_gradient(config, by_kernel):
    """Of a decoder over packed rows."""
    tokens = np.random.default_rng(1).integers(0, TOY.vocab_size, IDS.shape).astype(np.int32)
    self_mask = Segments(jnp.asarray(IDS)) if by_kernel else segment_mask(IDS)
    return quick_jit(jax.value_and_grad(
        lambda params: loss(config, params, tokens, self_mask, IDS > 0)))(noisy_params(TOY))


@pytest.mark.parametrize("remat", list(Remat))
@pytest.mark.parametrize("by_kernel", [False, True])
def test_no_remat_policy_changes_a_gradient(calls, by_kernel, remat):
    got = loss_and_gradient(dataclasses.replace(TOY, remat=remat), by_kernel)
    assert set(calls) == ({LENGTH} if by_kernel else set())
    want = loss_and_gradient(TOY, by_kernel=False)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(
        a, b, atol=2e-5 * np.abs(b).max()), got, want)


@pytest.mark.parametrize("kind", [Attention.AUTO, Attention.SPLASH])
def test_memories_and_plain_masks_are_read_by_xla(calls, kind):
    config = dataclasses.replace(TOY, attention=kind)
    ids = jnp.ones((2, LENGTH), jnp.int32)
    memory = page_a_row(empty_pages(TOY, 2, 4), [0, 0])

    def shape(self_mask, *memories):
        return jax.eval_shape(lambda params: Decoder(config).apply(
            {"params": params}, ids, ids, self_mask, memories)[0], noisy_params(TOY)).shape
    assert shape(causal_mask(LENGTH)) == shape(Segments(ids), memory) == (2, LENGTH, 16)
    assert calls == []
    shape(Segments(ids))
    assert set(calls) == {LENGTH}


def test_segments_without_a_kernel_are_the_segment_mask():
    ids, params = packed(12), noisy_params(TOY)
    np.testing.assert_array_equal(loss(TOY, params, ids, Segments(jnp.asarray(ids)), ids > 0),
                                  loss(TOY, params, ids, segment_mask(ids), ids > 0))


# ---------------------------------------------------------------- what is kept


def kept(config, self_mask, length):
    """Bytes from the forward pass that the backward pass reads, beside the parameters."""
    tokens = jnp.ones((2, length), jnp.int32)
    saved = jax.eval_shape(
        lambda params: jax.vjp(lambda p: loss(config, p, tokens, self_mask, 1.0), params)[1],
        noisy_params(config))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(saved))


@pytest.mark.parametrize("kernel", [False, True])
def test_policies_keep_ever_less(calls, kernel):
    ids = jnp.ones((2, LENGTH), jnp.int32)
    mask = Segments(ids) if kernel else segment_mask(ids)
    layer, dots, none = (kept(dataclasses.replace(TOY, n_layers=4, remat=remat), mask, LENGTH)
                         for remat in (Remat.LAYER, Remat.DOTS, Remat.NONE))
    # Numbers a layer and token, times 4 bytes. Every policy keeps the layer's input. DOTS adds
    # what the weights' matmuls give (q, k, v, o, gate, up; nobody needs down's), NONE at least
    # as much again.
    tokens, more = ids.size, 32 + 16 + 16 + 16 + 24 + 24
    if kernel:
        more += 32 + 4  # the kernel's output and a log-sum a head: it is not run again
    assert dots - layer == 4 * 4 * tokens * more
    assert none - dots > 4 * 4 * tokens * more


@pytest.mark.parametrize("unroll, barrier", [(1, False), (3, True), (4, True)])
def test_unrolled_layers_are_shielded_from_merging(unroll, barrier):
    """Without a loop between them, a compiler takes the second computation for the first, and
    keeps that one's results."""
    ids = np.ones((1, 8), np.int32)
    config = dataclasses.replace(TOY, n_layers=4, remat=Remat.LAYER, scan_unroll=unroll)
    text = str(jax.make_jaxpr(lambda params: loss(config, params, ids, causal_mask(8), 1.0))(
        noisy_params(config)))
    assert (f"prevent_cse={barrier}" in text) and (f"prevent_cse={not barrier}" not in text)


if __name__ == "__main__":
    compare_on_eight_devices()
