"""Attention of a chunk to itself and to a prompt that rows share: who sees whom, and the kernels
that compute it without its scores. What a chunk sees while rollouts are played is in
models/memory.py.

    XLA     any device, dtype, length: models/blockwise.py.
    SPLASH  jax's Pallas kernel for TPUs. With a shared prompt each row is one segment: what
            every query sees of its row and the prompt is then causal, but for padding.
    CUDNN   jax.nn.dot_product_attention on NVIDIA GPUs. It takes packed rows only through a
            mask, which becomes a bias of [B, 1, C, P + C] 16-bit numbers; in older releases of
            jax (0.10) the backward pass makes a gradient of that shape too. Together that is
            about 1 / H of all scores.

What is proven: splash equals `attend` in interpret mode and compiles for real TPUs
(tests/aot_tpu_attention.py). The arguments given to cuDNN equal `attend` through the XLA
implementation of the same function; the cuDNN kernel itself no test of ours has run.

Dim letters: B rows, C queries of the chunk, S keys, H heads, KV key/value heads, Q = H / KV,
HD head width, K prompts, P tokens of a prompt.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash_kernels
from jax.sharding import NamedSharding, PartitionSpec

from rods_jax.models import blockwise, sharding
from rods_jax.models.blockwise import MASKED
from rods_jax.models.config import Attention, ModelConfig

_LANES = 128  # of a TPU's vector unit: splash works on blocks of whole multiples
_HEADS_AXIS = "tensor"


@flax.struct.dataclass
class Segments:
    """Self-attention of packed rows, stated so that a kernel can read it: token i sees token
    j iff j <= i and both are of one segment. Segment 0 is padding: what comes out there is
    finite and otherwise differs between kernels.

    ids_BxC: int32. alone: no row holds more than one segment, and that from its beginning.
    """

    ids_BxC: jax.Array
    alone: bool = flax.struct.field(pytree_node=False, default=False)


@flax.struct.dataclass
class Shared:
    """A memory's `where` in training: k, v [K, KV, P, HD] are those of prompts that rows share,
    with gradients. Every token of row b sees the first length_K[prompt_B[b]] tokens of its
    prompt. On a mesh prompt_B counts within the device's part of the prompts."""

    prompt_B: jax.Array  # int32, below K
    length_K: jax.Array  # int32


def causal_mask(length: int) -> jax.Array:
    """bool [1, C, C]: query i sees key j iff j <= i. Broadcasts over B."""
    return jnp.tril(jnp.ones((1, length, length), bool))


def segment_mask(segments_BxL: jax.Array) -> jax.Array:
    """bool [B, L, L] for packed rows: causal within a segment; segment 0 is padding, which
    sees itself alone so that its softmax stays defined."""
    length = segments_BxL.shape[-1]
    same = segments_BxL[:, :, None] == segments_BxL[:, None, :]
    real = segments_BxL[:, :, None] != 0
    return (causal_mask(length) & same & real) | jnp.eye(length, dtype=bool)


# ---------------------------------------------------------------- the choice


def choose(config: ModelConfig, length: int, activations: NamedSharding | None,
           prompt: int = 0, alone: bool = True) -> Attention:
    """Who computes the attention of rows of `length` tokens to themselves and to shared prompts
    of `prompt` tokens: XLA, CUDNN or SPLASH. alone: as in Segments. Decided while tracing, from
    the device the program is traced for: the mesh's where there is one, else the default device.

    AUTO takes splash on a TPU and cuDNN on an NVIDIA GPU wherever they can run, and XLA
    elsewhere, as for prompts whose tokens are split over devices. Without `activations` it leaves
    kernels alone if there is more than one device: they are not partitioned automatically, and
    tracing does not tell for how many it is.
    ValueError where a kernel asked for by name cannot run.
    """
    asked = config.attention
    if asked is Attention.XLA:
        return asked
    if activations is not None and any(axis is not None for axis in activations.spec[1:]):
        if asked is not Attention.AUTO:
            raise ValueError(f"attention is {asked.value}, but no kernel takes sequences that are "
                             "split over a mesh axis: set mesh.context=1, or choose auto")
        return Attention.XLA
    device = jax.devices()[0] if activations is None else activations.mesh.devices.flat[0]
    obstacles = {Attention.SPLASH: _splash_obstacle(length, device, prompt, alone),
                 Attention.CUDNN: _cudnn_obstacle(config, length, device, prompt)}
    if asked is not Attention.AUTO:
        if obstacles[asked]:
            raise ValueError(f"attention is {asked.value}, but {obstacles[asked]}, "
                             "or choose auto")
        return asked
    if activations is None and jax.device_count() > 1:
        return Attention.XLA
    return next((kind for kind, why in obstacles.items() if why is None), Attention.XLA)


def _splash_obstacle(length: int, device, prompt: int, alone: bool) -> str | None:
    if device.platform != "tpu":
        return f"the device is a {device.platform}: run on a TPU"
    if length % _LANES:
        return f"rows have {length} tokens: make their length a multiple of {_LANES}"
    if prompt % _LANES:
        return f"prompts have {prompt} tokens: make their length a multiple of {_LANES}"
    if prompt and not alone:
        return "rows hold several rollouts behind a shared prompt: give each a row of its own"
    return None


def _cudnn_obstacle(config: ModelConfig, length: int, device, prompt: int) -> str | None:
    # "9.0" on NVIDIA GPUs; AMD's, of the same platform name, say "gfx90a" or the like.
    generation = str(getattr(device, "compute_capability", "")).partition(".")[0]
    if device.platform != "gpu" or not generation.isdigit():
        return f"the device is a {device.platform} without cuDNN: run on an NVIDIA GPU"
    if int(generation) < 8:
        return f"the GPU is of compute capability {generation}.x: use one of 8.0 or later"
    if config.compute_dtype == "float32":
        return "compute_dtype is float32: set it to bfloat16"
    if config.head_dim % 8 or config.head_dim > 128:
        return f"head_dim is {config.head_dim}: it takes multiples of 8 up to 128"
    for what, tokens in (("rows", length), ("prompts", prompt)):
        if tokens % 2:
            return f"{what} have {tokens} tokens: make their length even"
    return None


# ---------------------------------------------------------------- kernels


def attend_segments(q_BxCxHxHD, k, v, segments: Segments, kind: Attention,
                    activations: NamedSharding | None = None, prompts=None) -> jax.Array:
    """[B, C, H, HD]: a chunk's attention to itself and to the prompts that its rows share.

    k, v: [B, KV, C, HD]. prompts: (k, v, Shared) or None. activations: as the decoder's; on its
    mesh every device computes its own rows, and its own heads where their number divides over
    the tensor axis.
    """
    kernel = {Attention.XLA: blockwise.attend, Attention.CUDNN: cudnn,
              Attention.SPLASH: splash}[kind]
    if prompts is None:
        nothing = jnp.zeros((1, k.shape[1], 0, k.shape[3]), k.dtype)
        none_B = jnp.zeros(k.shape[:1], jnp.int32)
        prompts = nothing, nothing, Shared(none_B, jnp.zeros((1,), jnp.int32))
        over = None
    else:
        over = activations and sharding.prompt_sharding(activations).spec[0]
    prompt_k, prompt_v, shared = prompts
    rows = blockwise.Rows(segments.ids_BxC, shared.prompt_B, shared.length_K)
    kv = k, v, prompt_k, prompt_v
    if activations is None:
        return kernel(q_BxCxHxHD, *kv, rows)
    mesh, (of_rows, sequence, *_) = activations.mesh, (*activations.spec, None, None)
    split = _HEADS_AXIS if _HEADS_AXIS in mesh.shape and _HEADS_AXIS not in (of_rows or ()) \
        else None
    heads, groups, parts = q_BxCxHxHD.shape[2], k.shape[1], mesh.shape.get(split, 1)
    if heads % parts or (groups % parts and parts % groups):
        split = None
    elif parts % groups == 0:  # one K/V head for each part
        kv = tuple(jnp.repeat(x, parts // groups, axis=1) for x in kv)
    spec = PartitionSpec
    own, prompt = spec(of_rows, split), spec(over, split)

    def local(q, k, v, prompt_k, prompt_v, rows):
        # Of a sequence that is split each device has some queries and all keys.
        where = {} if sequence is None else {
            "first": jax.lax.axis_index(sequence) * q.shape[1]}
        return kernel(q, k, v, prompt_k, prompt_v, rows, **where)

    # Kernels do not state over which axes their outputs vary, so that is not checked.
    return jax.shard_map(
        local, mesh=mesh, out_specs=spec(of_rows, sequence, split), check_vma=False,
        in_specs=(spec(of_rows, sequence, split), own, own, prompt, prompt,
                  blockwise.Rows(spec(of_rows), spec(of_rows), spec(over))),
    )(q_BxCxHxHD, *kv, rows)


def splash(q_BxCxHxHD, k, v, prompt_k, prompt_v, rows: blockwise.Rows,
           interpret: bool = False) -> jax.Array:
    """Splash attention, for C and P multiples of 128. interpret: run it step by step in XLA, on
    any device and slowly."""
    _, length, heads, width = q_BxCxHxHD.shape
    before = prompt_k.shape[2]
    kernel = splash_kernels.make_splash_mha(
        splash_kernels.MultiHeadMask([splash_kernels.CausalMask(
            (length, before + length), offset=before)] * heads),
        block_sizes=_block_sizes(length, before + length),
        head_shards=1, q_seq_shards=1, residual_checkpoint_name=blockwise.OUTPUT,
        interpret=interpret)
    if before:
        k, v = (jnp.concatenate([prompt[rows.prompt_B], x], axis=2)
                for prompt, x in ((prompt_k, k), (prompt_v, v)))
    # A row's one segment is number 1, and so is what it sees of its prompt.
    seen = jnp.arange(before) < rows.length_K[rows.prompt_B][:, None]
    ids_k = jnp.concatenate([seen.astype(jnp.int32), rows.ids_BxC], axis=1)

    def row(q, k, v, ids_q, ids_k):
        return kernel(q, k, v, segment_ids=splash_kernels.SegmentIds(ids_q, ids_k))

    # The kernel takes scaled queries, heads first.
    q = (q_BxCxHxHD * width ** -0.5).swapaxes(1, 2)
    return jax.vmap(row)(q, k, v, rows.ids_BxC, ids_k).swapaxes(1, 2)


def _block_sizes(queries: int, keys: int) -> splash_kernels.BlockSizes:
    """Large blocks keep the matrix unit busy. 512 is what is commonly used for all of them."""
    block_q, block_kv = (next(size for size in (512, 256, _LANES) if length % size == 0)
                         for length in (queries, keys))
    return splash_kernels.BlockSizes(
        block_q=block_q, block_kv=block_kv, block_q_dkv=block_q, block_kv_dkv=block_kv,
        block_q_dq=block_q, block_kv_dq=block_kv)


def cudnn(q_BxCxHxHD, k, v, prompt_k, prompt_v, rows: blockwise.Rows,
          implementation: str = "cudnn") -> jax.Array:
    """cuDNN's flash attention. implementation: jax's name of who computes it."""
    ids, before = rows.ids_BxC, prompt_k.shape[2]
    same = ids[:, None, :, None] == ids[:, None, None, :]
    if not before:
        return jax.nn.dot_product_attention(
            q_BxCxHxHD, k.swapaxes(1, 2), v.swapaxes(1, 2), mask=same, is_causal=True,
            implementation=implementation)
    own = same & causal_mask(ids.shape[1])[:, None]
    seen = (jnp.arange(before) < rows.length_K[rows.prompt_B][:, None])[:, None, None]
    mask = jnp.concatenate([jnp.broadcast_to(seen, (*own.shape[:3], before)), own], axis=3)
    k, v = (jnp.concatenate([prompt[rows.prompt_B], x], axis=2).swapaxes(1, 2)
            for prompt, x in ((prompt_k, k), (prompt_v, v)))
    return jax.nn.dot_product_attention(
        q_BxCxHxHD, k, v, mask=mask, implementation=implementation)


# ---------------------------------------------------------------- plainly


def attend(q_BxCxHxHD, k, v, mask) -> jax.Array:
    """Softmax attention of a chunk to itself under any mask, all scores at once; [B, C, H, HD].

    k, v: [B, KV, C, HD]; mask: bool, broadcastable to [B, C, C]. Scores are masked by
    replacement before the exponential and the softmax is taken in float32; the division by
    its sum comes last, where the array is smallest.
    """
    b, c, h, hd = q_BxCxHxHD.shape
    kv = k.shape[1]
    q = (q_BxCxHxHD * hd ** -0.5).reshape(b, c, kv, h // kv, hd).transpose(0, 2, 3, 1, 4)
    scores = jnp.einsum("bnqch,bnsh->bnqcs", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores, MASKED)
    # The peak cancels between numerator and sum.
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    out = jnp.einsum("bnqcs,bnsh->bnqch", weights.astype(v.dtype), v,
                     preferred_element_type=jnp.float32)
    out = (out / weights.sum(-1, keepdims=True)).astype(q.dtype)
    return out.transpose(0, 3, 1, 2, 4).reshape(b, c, h, hd)
