"""Attention of a chunk to itself: who sees whom, the softmax, and the kernels that compute it
without its scores. What a chunk sees of earlier tokens is in models/memory.py.

    XLA     any device, dtype, length. Memory [B, H, C, C].
    SPLASH  jax's Pallas kernel for TPUs. No array of C x C numbers.
    CUDNN   jax.nn.dot_product_attention on NVIDIA GPUs. It takes packed rows only through a
            mask, which becomes a bias of [B, 1, C, C] 16-bit numbers; in older releases of jax
            (0.10) the backward pass makes a gradient of that shape too. Together that is about
            1 / H of XLA's scores.

What is proven: splash equals `attend` in interpret mode and compiles for real TPUs
(tests/aot_tpu_attention.py). The arguments given to cuDNN equal `attend` through the XLA
implementation of the same function; the cuDNN kernel itself no test of ours has run.

Dim letters: B rows, C queries of the chunk, S keys, H heads, KV key/value heads, Q = H / KV,
HD head width.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash_kernels
from jax.sharding import NamedSharding, PartitionSpec

from rods_jax.models.config import Attention, ModelConfig

# Stands in for a masked score. Finite, so that a query with nothing to attend to gets the
# plain mean of the values and finite gradients instead of NaN.
MASKED = -1e30

# Under this name remat policies find what a kernel's backward pass needs of its forward pass.
KERNEL_OUTPUT = "attention"

_LANES = 128  # of a TPU's vector unit: splash works on blocks of whole multiples
_HEADS_AXIS = "tensor"


@flax.struct.dataclass
class Segments:
    """Self-attention of packed rows, stated so that a kernel can read it: token i sees token
    j iff j <= i and both are of one segment. Segment 0 is padding: what comes out there is
    finite and otherwise differs between kernels.

    ids_BxC: int32.
    """

    ids_BxC: jax.Array


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


def choose(config: ModelConfig, length: int, activations: NamedSharding | None) -> Attention:
    """Who computes the attention of rows of `length` tokens to themselves: XLA, CUDNN or
    SPLASH. Decided while tracing, from the device the program is traced for: the mesh's where
    there is one, else the default device.

    AUTO takes splash on a TPU and cuDNN on an NVIDIA GPU wherever they can run, and XLA
    elsewhere. Without `activations` it leaves kernels alone if there is more than one device:
    they are not partitioned automatically, and tracing does not tell for how many it is.
    ValueError where a kernel asked for by name cannot run.
    """
    asked = config.attention
    if asked is Attention.XLA:
        return asked
    device = jax.devices()[0] if activations is None else activations.mesh.devices.flat[0]
    obstacles = {Attention.SPLASH: _splash_obstacle(config, length, device),
                 Attention.CUDNN: _cudnn_obstacle(config, length, device)}
    if asked is not Attention.AUTO:
        if obstacles[asked]:
            raise ValueError(f"attention is {asked.value}, but {obstacles[asked]}, "
                             "or choose auto")
        return asked
    if activations is None and jax.device_count() > 1:
        return Attention.XLA
    return next((kind for kind, why in obstacles.items() if why is None), Attention.XLA)


def _splash_obstacle(config: ModelConfig, length: int, device) -> str | None:
    if device.platform != "tpu":
        return f"the device is a {device.platform}: run on a TPU"
    if length % _LANES:
        return f"rows have {length} tokens: make their length a multiple of {_LANES}"
    return None


def _cudnn_obstacle(config: ModelConfig, length: int, device) -> str | None:
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
    if length % 2:
        return f"rows have {length} tokens: make their length even"
    return None


# ---------------------------------------------------------------- kernels


def attend_segments(q_BxCxHxHD, k, v, segments: Segments, kind: Attention,
                    activations: NamedSharding | None = None) -> jax.Array:
    """[B, C, H, HD]: a chunk's attention to itself by a kernel, CUDNN or SPLASH.

    k, v: [B, KV, C, HD]. activations: as the decoder's; on its mesh every device computes its
    own rows, and its own heads where their number divides over the tensor axis.
    """
    kernel = splash if kind is Attention.SPLASH else cudnn
    if activations is None:
        return kernel(q_BxCxHxHD, k, v, segments.ids_BxC)
    mesh, rows = activations.mesh, (*activations.spec, None)[0]
    split = _HEADS_AXIS if _HEADS_AXIS in mesh.shape and _HEADS_AXIS not in (rows or ()) else None
    heads, kv, parts = q_BxCxHxHD.shape[2], k.shape[1], mesh.shape.get(split, 1)
    if heads % parts or (kv % parts and parts % kv):
        split = None
    elif parts % kv == 0:  # one K/V head for each part
        k, v = (jnp.repeat(x, parts // kv, axis=1) for x in (k, v))
    q_spec, kv_spec = PartitionSpec(rows, None, split), PartitionSpec(rows, split)
    # Kernels do not state over which axes their outputs vary, so that is not checked.
    return jax.shard_map(
        kernel, mesh=mesh, in_specs=(q_spec, kv_spec, kv_spec, PartitionSpec(rows)),
        out_specs=q_spec, check_vma=False)(q_BxCxHxHD, k, v, segments.ids_BxC)


def splash(q_BxCxHxHD, k, v, ids_BxC, interpret: bool = False) -> jax.Array:
    """Splash attention, for C a multiple of 128. interpret: run it step by step in XLA, on
    any device and slowly."""
    _, length, heads, width = q_BxCxHxHD.shape
    # Large blocks keep the matrix unit busy. 512 is what is commonly used for all of them.
    block = next(size for size in (512, 256, _LANES) if length % size == 0)
    kernel = splash_kernels.make_splash_mha(
        splash_kernels.MultiHeadMask([splash_kernels.CausalMask((length, length))] * heads),
        block_sizes=splash_kernels.BlockSizes(
            block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block,
            block_q_dq=block, block_kv_dq=block),
        head_shards=1, q_seq_shards=1, residual_checkpoint_name=KERNEL_OUTPUT,
        interpret=interpret)

    def row(q, k, v, ids):
        return kernel(q, k, v, segment_ids=splash_kernels.SegmentIds(ids, ids))

    # The kernel takes scaled queries, heads first.
    out = jax.vmap(row)((q_BxCxHxHD * width ** -0.5).swapaxes(1, 2), k, v, ids_BxC)
    return out.swapaxes(1, 2)


def cudnn(q_BxCxHxHD, k, v, ids_BxC, implementation: str = "cudnn") -> jax.Array:
    """cuDNN's flash attention. implementation: jax's name of who computes it."""
    same = ids_BxC[:, None, :, None] == ids_BxC[:, None, None, :]
    return jax.nn.dot_product_attention(
        q_BxCxHxHD, k.swapaxes(1, 2), v.swapaxes(1, 2), mask=same, is_causal=True,
        implementation=implementation)


# ---------------------------------------------------------------- XLA


def attend(q_BxCxHxHD, k, v, mask) -> jax.Array:
    """Softmax attention of a chunk to itself; [B, C, H, HD].

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
