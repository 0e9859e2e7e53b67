"""The cache grows and shrinks, and keeps what it holds; on one device and on eight."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eight_devices import run_on_eight_devices

from rods_jax.metrics import CompileCounter
from rods_jax.models.config import ModelConfig
from rods_jax.models.decoder import Decoder
from rods_jax.models.sharding import make_mesh
from rods_jax.rollout.programs import Programs
from rods_jax.rollout.sampler import resized
from rods_jax.rollout.shapes import SamplerConfig, plan_memory

CONFIG = SamplerConfig(slots=4, max_len=40, prompt_len=14, max_new=6, sharers=3, prompts=3,
                       prefill=((2, 4),), extend=((2, 4),), cache_sizes=(0.1, 0.4, 0.6), page=4)
SIZES = (4, 16, 24, 40)


def make_programs(unroll=1, mesh=None, config=CONFIG, **more):
    model = ModelConfig(vocab_size=23, d_model=8, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=6,
                        d_ff=8, scan_unroll=unroll)
    return Programs(Decoder(model), config, plan_memory(config, model), (1,), mesh, **more)


def fill(programs, seed=0):
    """Random numbers in all own pages; what they are, by array and device."""
    rng, own = np.random.default_rng(seed), programs._cache.own
    values = jax.tree.map(
        lambda x: jax.device_put((100 * rng.random(x.shape)).astype(x.dtype), x.sharding), own)
    programs._cache = programs._cache.replace(own=values)
    return pages(programs)


def pages(programs):
    """Arrays [devices, pages, ...] of the own pages, stacked layers last."""
    found = []
    for x in jax.tree.leaves(programs._cache.own):
        x = np.asarray(x)
        x = np.moveaxis(x, 0, -1) if x.ndim == 5 else x
        found.append(x.reshape(programs.devices, programs.size, *x.shape[1:]))
    return found


def test_the_size_follows_the_pages_and_does_not_swing():
    programs, sizes = make_programs(), []
    assert programs.sizes == SIZES
    # It grows at once; it shrinks where the smaller one is half empty, to the smallest such.
    for need, size in ((0, 4), (4, 4), (5, 16), (16, 16), (13, 16), (3, 16), (2, 4), (17, 24),
                       (33, 40), (21, 40), (12, 24), (9, 24), (8, 16), (40, 40), (1, 4)):
        programs.fit(need)
        sizes.append((need, programs.size))
        assert pages(programs)[0].shape[1] == size, sizes
    with pytest.raises(IndexError):
        programs.fit(41)
    for need, size in ((30, 40), (20, 24), (24, 24), (5, 16), (1, 4)):  # with nothing to keep
        programs.fit(need, kept=False)
        assert programs.size == size


def check_contents(programs):
    for old, new in programs._resize:
        programs.fit(0)
        programs.fit(old)
        before, places = fill(programs), jax.tree.map(lambda x: x.sharding, programs._cache)
        programs._become(new)
        kept = min(old, new)
        for was, now in zip(before, pages(programs), strict=True):
            np.testing.assert_array_equal(now[:, :kept], was[:, :kept])
            assert not now[:, kept:].any() and now.shape[1] == new
        assert jax.tree.map(lambda x: x.sharding, programs._cache) == places


@pytest.mark.parametrize("unroll", [1, 2])
def test_pages_keep_what_they_hold(unroll):
    programs = make_programs(unroll)
    assert set(programs._resize) == {*itertools.pairwise(SIZES),
                                     *itertools.combinations(SIZES[::-1], 2)}
    check_contents(programs)


def test_after_the_warm_up_no_size_compiles():
    programs = make_programs(2)
    with CompileCounter() as compiles:
        programs.warm_up_sizes()
        ready = compiles.counts()
        for old, new in programs._resize:
            assert ready[f"resize_{old}_{new}"] == 3  # of keys, of values and of ids
        for need in (0, 40, 9, 24, 1, 16, 17, 2, 40, 12, 0):
            programs.fit(need)
        assert not compiles.since(ready)


def test_programs_of_shapes_have_the_full_cache_and_no_memory():
    programs, made = make_programs(), make_programs(shapes_only=True)
    programs.fit(SIZES[-1])
    assert made.size == SIZES[-1] and len(made) == len(programs)
    for shape, real in zip(jax.tree.leaves(made.cache), jax.tree.leaves(programs.cache),
                           strict=True):
        assert isinstance(shape, jax.ShapeDtypeStruct)
        assert (shape.shape, shape.dtype) == (real.shape, real.dtype)


def test_without_memory_to_grow_an_empty_cache_is_left():
    programs = make_programs()
    fill(programs)
    resize, resize_ids = programs._resize[4, 16]

    def full(x):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1600 bytes.")
    calls = iter([resize, full])
    programs._resize[4, 16] = lambda x: next(calls)(x), resize_ids
    with pytest.raises(ValueError, match="no memory for [0-9,]+ bytes .* sampler.kv_bytes"):
        programs.fit(16)
    assert programs.size == 4 and not any(x.any() for x in pages(programs))
    programs._resize[4, 16] = resize, resize_ids
    programs.fit(16)
    assert programs.size == 16 and pages(programs)[0].shape[1] == 16


def test_more_than_the_machine_has_is_refused_in_one_line():
    huge = dataclasses.replace(CONFIG, max_len=10**12, cache_sizes=())
    with pytest.raises(ValueError, match=r"no memory for [\d,]{15,} .* sampler.kv_bytes") as e:
        make_programs(config=huge)
    assert "\n" not in str(e.value)


def test_an_array_is_cut_or_filled_up_at_its_pages():
    for shape in ((5, 3), (5, 2, 3, 4), (2, 5, 2, 3, 4)):
        x = jnp.ones(shape)
        at = shape.index(5)
        assert resized(x, 3).shape == (*shape[:at], 3, *shape[at + 1:])
        more = resized(x, 7)
        assert more.shape == (*shape[:at], 7, *shape[at + 1:]) and more.sum() == x.size


def test_on_eight_devices_each_keeps_its_own():
    assert run_on_eight_devices(__file__).stdout.split() == ["8", "4", "4"]


def check_other_meshes():
    for sizes in ((2, 2, 2), (1, 8, 1)):
        try:
            make_programs(mesh=make_mesh(*sizes))
        except ValueError as error:
            assert "'fsdp'" in str(error) and "local_mesh" in str(error)
        else:
            raise AssertionError(f"a mesh of {sizes} was taken")
    with pytest.raises(ValueError, match="'any': 8.*local_mesh"):
        make_programs(mesh=jax.sharding.Mesh(np.array(jax.devices()), ("any",)))


if __name__ == "__main__":
    check_other_meshes()
    for data, tensor, unroll in ((8, 1, 1), (4, 2, 1), (4, 2, 2)):
        programs = make_programs(unroll, make_mesh(data, 1, tensor))
        values = jax.tree.leaves(programs._cache.own.v)[0]
        assert values.sharding.shard_shape(values.shape)[-3] == 2 // tensor  # K/V heads
        check_contents(programs)
        print(programs.devices)
