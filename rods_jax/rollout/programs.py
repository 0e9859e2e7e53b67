"""The device's half of the slots: the cache, and the compiled programs that work on it.

Each program has a name with its shapes, and the cache is donated to it, so it is there once.
Own pages begin few and become more as rows take them (`fit`): a step of a wave reads all that
there are, and memory follows use. On a mesh all arrays have their first axis, and pages
theirs, split over the devices.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Lowered

from rods_jax.models.decoder import Decoder, unrolled
from rods_jax.rollout import sampler
from rods_jax.rollout.sampler import Cache, Chunk, Region, Wave, WaveOutput
from rods_jax.rollout.shapes import PagePlan, SamplerConfig

AXIS = "data"  # of the mesh: each device along it has slots, pages and rows of its own
TENSOR = "tensor"  # of the mesh: weights and K/V heads are split over it


class Programs:
    """sizes: how many own pages a device may have, ascending. size: how many it has.
    shapes_only: the cache, at its full size, is shapes, for devices that are not there; programs
    can then be lowered and not run."""

    def __init__(self, decoder: Decoder, config: SamplerConfig, plan: PagePlan,
                 stop_ids: Sequence[int], mesh: Mesh | None, shapes_only: bool = False):
        if mesh is not None and not {AXIS} <= _axes(mesh) <= {AXIS, TENSOR}:
            raise ValueError(f"the rollouts' mesh has the axes {dict(mesh.shape)}: rollouts are "
                             f"divided over {AXIS!r}, weights over {TENSOR!r} and nothing else; "
                             "make it with rollout.weights.local_mesh")
        self.sizes = config.own_sizes(plan.own)
        self.size = self.sizes[-1 if shapes_only else 0]
        self.shapes_only = shapes_only
        self.devices, self._mesh = 1 if mesh is None else mesh.shape[AXIS], mesh
        stacked = () if unrolled(decoder.config) else (None,)  # an axis of layers
        self._pages = PartitionSpec(*stacked, AXIS)
        self._heads = (TENSOR,) * _splits_heads(decoder, mesh)
        region, here = Region(self._pages, self._pages, _HERE), (_HERE,)
        self._specs = cache = Cache(region, region)
        self._make = functools.partial(self._empty, decoder, config, plan)
        self._taken = functools.partial(config.kv_taken, plan)
        try:
            self._cache = self._make()
        except jax.errors.JaxRuntimeError as error:
            raise self._told(error, self.size) from None
        shape_of = "{}x{}".format
        self._prefill = {
            self._all(shape): self._program(f"prefill_{shape_of(*shape)}",
                                            sampler.make_prefill(decoder, config), region, here)
            for shape in config.prefill}
        self._extend = {
            (self._all(shape), size): self._program(f"extend_{shape_of(*shape)}_{size}",
                                                    sampler.make_extend(decoder, config),
                                                    cache, here)
            for shape in config.extend_shapes for size in self.sizes}
        self._waves = {
            (rows * self.devices, size): self._program(
                f"wave_{rows}_{size}", sampler.make_wave(decoder, config, stop_ids), cache,
                (_HERE, *[PartitionSpec()] * 3, _HERE), samples=True)
            for rows in config.row_buckets for size in self.sizes}
        self._resize = {
            (old, new): self._resizers(old, new)
            for old, new in [*itertools.pairwise(self.sizes),
                             *itertools.combinations(self.sizes[::-1], 2)]}

    def __len__(self) -> int:
        return sum(map(len, (self._prefill, self._extend, self._waves, self._resize)))

    @property
    def cache(self) -> Cache:
        """All pages; whoever runs a program donates them."""
        return self._cache

    # ------------------------------------------------------------------ runs

    def prefill(self, params, chunk: Chunk) -> None:
        program = self._prefill[chunk.tokens_RxC.shape]
        self._cache = self._cache.replace(shared=program(params, self._cache.shared, chunk))

    def extend(self, params, chunk: Chunk) -> None:
        program = self._extend[chunk.tokens_RxC.shape, self.size]
        self._cache = program(params, self._cache, chunk)

    def wave(self, params, plan: Wave, *args) -> WaveOutput:
        """args: see sampler.make_wave."""
        program = self._waves[plan.token_R.shape[0], self.size]
        self._cache, out = program(params, self._cache, plan, *args)
        return out

    def lower_prefill(self, params, chunk: Chunk) -> tuple[Lowered, Region]:
        """Like the runs, lowered and not run; and what it was given of the cache."""
        program, shared = self._prefill[chunk.tokens_RxC.shape], self._cache.shared
        return program.lower(params, shared, chunk), shared

    def lower_extend(self, params, chunk: Chunk) -> tuple[Lowered, Cache]:
        program = self._extend[chunk.tokens_RxC.shape, self.size]
        return program.lower(params, self._cache, chunk), self._cache

    def lower_wave(self, params, plan: Wave, *args) -> tuple[Lowered, Cache]:
        program = self._waves[plan.token_R.shape[0], self.size]
        return program.lower(params, self._cache, plan, *args), self._cache

    def fit(self, pages: int, kept: bool = True) -> None:
        """Makes room for so many own pages a device. The cache becomes smaller only where that
        leaves as many free again, so that it does not soon have to grow. kept: whether any page
        holds something; if none does, there is nothing to copy and the cache begins small."""
        if not kept and next(size for size in self.sizes if size >= pages) < self.size:
            self._become(self.sizes[0])
        while self.size < pages:
            self._become(self.sizes[self.sizes.index(self.size) + 1])
        fitting = next((size for size in self.sizes if size >= 2 * pages), self.size)
        if fitting < self.size:
            self._become(fitting)

    def wait(self) -> None:
        """Until all that was begun is done."""
        jax.block_until_ready(self._cache)

    def warm_up_sizes(self) -> None:
        """Goes from every size to every one that it may ever become."""
        for old, new in self._resize:
            self.fit(0)  # from where it grows size by size, past none
            self.fit(old)
            self._become(new)

    def _become(self, size: int) -> None:
        """Array by array, so that only one of them is there twice."""
        resize, resize_ids = self._resize[self.size, size]
        own = self._cache.own
        arrays, tree = jax.tree.flatten((own.k, own.v))
        ids_NxE, shared = own.ids_NxE, self._cache.shared
        del own
        self._cache = None
        try:
            for i in range(len(arrays)):
                arrays[i] = resize(arrays[i])
            k, v = jax.tree.unflatten(tree, arrays)
            self._cache = Cache(shared, Region(k, v, resize_ids(ids_NxE)))
        except BaseException as error:  # no memory, or interrupted: nothing is left to go on with
            del arrays, shared
            self._cache = self._make()
            raise self._told(error, size) from None
        self.size = size

    def _told(self, error: BaseException, size: int) -> BaseException:
        """The error, in one line where it says that memory is out."""
        if "RESOURCE_EXHAUSTED" not in str(error):
            return error
        return ValueError(f"no memory for {self._taken(size):,} bytes of K/V: lower sampler.slots, "
                          "max_len or prompts, or set sampler.kv_bytes to what may be taken")

    # ------------------------------------------------------------------ made

    def _all(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Of a program's arguments: the rows of all devices."""
        return shape[0] * self.devices, shape[1]

    def _empty(self, decoder: Decoder, config: SamplerConfig, plan: PagePlan) -> Cache:
        def make():
            return sampler.init_cache(decoder, config, plan.shared * self.devices,
                                      self.size * self.devices)
        # At once: piece by piece it would take its memory twice.
        make = jax.jit(make, out_shardings=self._placed(self._specs))
        return make.eval_shape() if self.shapes_only else make()

    def _placed(self, specs):
        """The same for jit, which is told of the axis "tensor" too."""
        def place(x):
            if not isinstance(x, Region):
                return self._at(x)
            return Region(*[self._at(x.k, *self._heads)] * 2, self._at(x.ids_NxE))
        return jax.tree.map(place, specs,
                            is_leaf=lambda x: isinstance(x, (Region, PartitionSpec)))

    def _at(self, spec: PartitionSpec, *heads: str) -> NamedSharding | None:
        return None if self._mesh is None else NamedSharding(self._mesh,
                                                             PartitionSpec(*spec, *heads))

    def _program(self, name: str, function, kept, args, samples: bool = False):
        """`function(params, kept, *args)`, compiled under this name, `kept` donated, on every
        device of the mesh with what is there of it. kept, args: how they are split."""
        out = (kept, _HERE) if samples else kept
        return self._jitted(name, function, (PartitionSpec(), kept, *args), out, self._placed(out),
                            donate_argnums=1)

    def _resizers(self, old: int, new: int):
        """Programs for an array of K or V, and for the ids."""
        def resize(x):
            return sampler.resized(x, new)
        return tuple(
            self._jitted(f"resize_{old}_{new}", resize, (spec,), spec, self._at(spec, *heads))
            for spec, heads in ((self._pages, self._heads), (_HERE, ())))

    def _jitted(self, name: str, function, ins, outs, placed, **options):
        if self._mesh is not None:
            function = jax.shard_map(function, mesh=self._mesh, axis_names={AXIS},
                                     check_vma=False, in_specs=ins, out_specs=outs)

        def program(*args):
            return function(*args)
        program.__name__ = program.__qualname__ = name
        return jax.jit(program, out_shardings=placed, **options)


_HERE = PartitionSpec(AXIS)  # of arrays with a first axis of rows, devices or pages


def _axes(mesh: Mesh) -> set[str]:
    """Those that divide anything, and AXIS. Compilers have crashed on more than two of them."""
    return {axis for axis, n in mesh.shape.items() if n > 1 or axis == AXIS}


def _splits_heads(decoder: Decoder, mesh: Mesh | None) -> bool:
    parts = 1 if mesh is None else mesh.shape.get(TENSOR, 1)
    return parts > 1 and decoder.config.n_kv_heads % parts == 0
