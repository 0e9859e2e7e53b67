"""Safetensors folders into parameters; on 8 devices in a process of its own (run this file)."""

import functools
import json
import pathlib
import re
import shutil
import struct
import sys
import tempfile
import weakref

import hypothesis
import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from safetensors.numpy import save_file

import hf_cases
from eight_devices import run_on_eight_devices
from hf_cases import CONFIGS, DTYPES, assert_same_bits, expected_params, make_tensors, write
from rods_jax.models.decoder import init_params
from rods_jax.models.hf.config import Family
from rods_jax.models.hf.files import Weights
from rods_jax.models.hf.load import file_sharding, load
from rods_jax.models.hf.names import places, slots
from rods_jax.models.sharding import ShardingRules, make_mesh, param_shardings

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
NORM, Q0, Q1 = ("model.norm.weight", "model.layers.0.self_attn.q_proj.weight",
                "model.layers.1.self_attn.q_proj.weight")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SECOND = "model-00002-of-00003.safetensors"

# mesh sizes, rules, config: what lies split, and how
ON_MESHES = {
    "fsdp": ((1, 8, 1), ShardingRules(), "llama"),
    "both": ((2, 2, 2), ShardingRules(), "qwen2"),
    "uneven": ((1, 2, 4), ShardingRules(replicate_uneven=True), "qwen3"),
    "layers": ((2, 2, 2), ShardingRules(layers="data"), "llama"),
    "in_heads": ((2, 1, 4), ShardingRules(heads=None, kv_heads=None, head_dim="tensor"), "qwen2"),
}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_is_where_the_decoder_has_it(tmp_path, family, dtype):
    config, tensors = CONFIGS[family], make_tensors(CONFIGS[family], dtype)
    got, params = load(write(tmp_path, config, tensors, shards=3 if dtype == "F16" else 1))
    assert got.family is Family(family)
    assert_same_bits(params, expected_params(config, tensors))
    made = jax.eval_shape(functools.partial(init_params, got.model), jax.random.key(0))
    assert jax.tree.map(lambda x: x.shape, params) == jax.tree.map(lambda x: x.shape, made)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(params))


@pytest.mark.parametrize("family", CONFIGS)
def test_names_and_shapes_are_those_that_the_family_has(tmp_path, family):
    config = CONFIGS[family]
    model = load(write(tmp_path, config, make_tensors(config)))[0].model
    assert {name: slot.shape for name, (slot, _) in places(model).items()} == (
        hf_cases.shapes(config))
    assert [*places(model)][0] == EMBED and [*places(model)][-1] in (NORM, HEAD)


def test_bfloat16_keeps_its_bits(tmp_path):
    config = CONFIGS["qwen2"]
    tensors = make_tensors(config, "BF16")
    tensors[NORM][:3] = [1.0, -2.0, 3.140625]
    params = load(write(tmp_path, config, tensors))[1]
    assert params["final_norm"].dtype == "bfloat16"
    bits = np.asarray(params["final_norm"]).view(np.uint16)[:3]
    assert [f"{b:04X}" for b in bits] == ["3F80", "C000", "4049"]


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_masters_are_cast_without_loss_down_to_the_smallest_numbers(tmp_path, dtype):
    config, tensors = CONFIGS["llama"], make_tensors(CONFIGS["llama"], dtype)
    tensors[EMBED].view(np.uint16)[0, :3] = [1, 0x8001, 0x8000]  # two subnormal ones and -0
    tensors[Q0].view(np.uint16)[0, :3] = [1, 0x8001, 0x8000]
    params = load(write(tmp_path, config, tensors), dtype="float32")[1]
    assert_same_bits(params, jax.tree.map(lambda x: x.astype(np.float32),
                                          expected_params(config, tensors)))


def test_parameters_may_differ_in_dtype_and_layers_take_the_wider_one(tmp_path):
    config, tensors = CONFIGS["llama"], make_tensors(CONFIGS["llama"], "BF16")
    tensors = {name: x.astype(np.float32) if "norm" in name else x for name, x in tensors.items()}
    assert_same_bits(load(write(tmp_path, config, tensors))[1], expected_params(config, tensors))
    tensors[Q1] = tensors[Q1].astype(np.float32)
    write(tmp_path, config, tensors)
    for dtype in (None, "float32"):
        params = load(tmp_path, dtype=dtype)[1]
        assert_same_bits(params["layers"]["q"][1], tensors[Q1].T.reshape(16, 4, 4))
        assert params["layers"]["q"].dtype == np.float32
    assert load(tmp_path)[1]["layers"]["k"].dtype == "bfloat16"


def test_only_files_that_the_index_names_are_opened(tmp_path):
    config, tensors = CONFIGS["qwen3"], make_tensors(CONFIGS["qwen3"])
    write(tmp_path, config, tensors, shards=3)
    for name in ("consolidated.safetensors", "model-00004-of-00004.safetensors"):
        (tmp_path / name).write_bytes(b"nothing that could be read")
    assert_same_bits(load(tmp_path)[1], expected_params(config, tensors))


def test_a_tied_head_in_the_file_must_be_the_embedding(tmp_path):
    config = CONFIGS["qwen2"]
    tensors = make_tensors(config, "BF16")
    tensors[HEAD] = tensors[EMBED].copy()
    params = load(write(tmp_path, config, tensors))[1]
    assert "head" not in params and params["embed"].shape == (40, 16)
    tensors[HEAD].view(np.uint16)[-1, -1] ^= 1
    write(tmp_path, config, tensors)
    assert f"{HEAD} in {tmp_path / WEIGHTS} differs from {EMBED}" in fault(tmp_path)
    tensors[HEAD] = tensors[EMBED].view(np.float16)  # the same bits, other numbers
    write(tmp_path, config, tensors)
    assert "differs" in fault(tmp_path)


def test_tables_that_readers_compute_are_passed_over(tmp_path):
    config = CONFIGS["llama"]
    tensors = make_tensors(config)
    extra = {"model.layers.1.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32),
             "model.rotary_emb.inv_freq": np.ones(2, np.float32)}
    params = load(write(tmp_path, config, tensors | extra))[1]
    assert_same_bits(params, expected_params(config, tensors))


# ---------------------------------------------------------------- what is not whole


def fault(folder, **options):
    with pytest.raises(ValueError) as error:
        load(folder, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def change(folder, name=WEIGHTS, **tensors):
    """Rewrites one file with some tensors replaced, or left out where None."""
    config = CONFIGS["llama"]
    found = {**make_tensors(config), **tensors}
    save_file({k: v for k, v in found.items() if v is not None}, folder / name)


def edit_index(folder, turn):
    index = json.loads((folder / INDEX).read_text())
    turn(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def put_twice(folder):
    """The first shard's embedding in the second shard as well."""
    path = folder / SECOND
    inside = json.loads((folder / INDEX).read_text())["weight_map"]
    kept = {k: v for k, v in make_tensors(CONFIGS["llama"]).items() if inside[k] == SECOND}
    save_file({**kept, EMBED: make_tensors(CONFIGS["llama"])[EMBED]}, path)


def twice_in_header(folder):
    data = (folder / WEIGHTS).read_bytes()
    length, = struct.unpack("<Q", data[:8])
    entry = json.dumps({NORM: json.loads(data[8:8 + length])[NORM]})[1:-1].encode()
    header = b"{" + entry + b"," + data[9:8 + length]
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length:])


def only(folder, *names):
    for path in folder.iterdir():
        path.unlink()
    for name in names:
        (folder / name).write_bytes(b"x")


SINGLE = {
    "missing": (lambda f: change(f, **{Q1: None}), "{f} lacks the tensor " + Q1),
    "missing head": (lambda f: change(f, **{HEAD: None}),
                     "{f} lacks the tensor " + HEAD + ": .*tie_word_embeddings"),
    "unknown": (lambda f: change(f, **{"model.layers.0.mlp.experts.0.up_proj.weight":
                                       np.ones(2, np.float32)}),
                "tensor model.layers.0.mlp.experts.0.up_proj.weight in {f}/model.safetensors has "
                "no place"),
    "a layer too many": (lambda f: change(f, **{"model.layers.2.mlp.up_proj.weight":
                                                np.ones((24, 16), np.float32)}),
                         "tensor model.layers.2.mlp.up_proj.weight in .* has no place"),
    "shape": (lambda f: change(f, **{Q0: np.ones((16, 8), np.float32)}),
              "tensor " + Q0 + r" in {f}/model.safetensors has the shape \(16, 8\), config.json "
              r"asks for \(16, 16\)"),
    "transposed": (lambda f: change(f, **{EMBED: np.ones((16, 40), np.float32)}), EMBED),
    "integers": (lambda f: change(f, **{Q0: np.ones((16, 16), np.int8)}),
                 "tensor " + Q0 + " in {f}/model.safetensors is of type I8"),
    "doubles": (lambda f: change(f, **{NORM: np.ones(16, np.float64)}), NORM + " .* type F64"),
    "float8": (lambda f: change(f, **{Q0: np.ones((16, 16), ml_dtypes.float8_e4m3fn)}),
               Q0 + " .* type F8_E4M3"),
    "cut": (lambda f: cut(f / WEIGHTS, -10), "{f}/model.safetensors is not a whole safetensors"),
    "cut in header": (lambda f: cut(f / WEIGHTS, 100), "is not a whole safetensors file"),
    "empty file": (lambda f: cut(f / WEIGHTS, 0), "{f}/model.safetensors is not a whole"),
    "garbage": (lambda f: (f / WEIGHTS).write_bytes(b"\x10" + bytes(7) + b"not{json, at all" * 2),
                "{f}/model.safetensors is not a whole safetensors file"),
    "pointer": (lambda f: (f / WEIGHTS).write_bytes(b"version https://git-lfs.github.com/spec/v1"),
                "{f}/model.safetensors is a Git LFS pointer.*git lfs pull"),
    "a folder": (lambda f: ((f / WEIGHTS).unlink(), (f / WEIGHTS).mkdir()), WEIGHTS),
    "twice": (twice_in_header, "{f}/model.safetensors .*" + NORM + " is there twice"),
    "odd name": (lambda f: change(f, **{"two\nlines": np.ones(2, np.float32)}), "no name"),
    "empty folder": (lambda f: only(f), "{f} holds neither model.safetensors nor"),
    "torch": (lambda f: only(f, "config.json", "pytorch_model.bin"),
              "{f} holds PyTorch weights .*: convert them to safetensors"),
    "torch shards": (lambda f: only(f, "config.json", "pytorch_model-00001-of-00002.bin"),
                     "convert them to safetensors"),
    "no index": (lambda f: only(f, "config.json", SECOND), "{f} holds .* no " + INDEX),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json does not exist"),
}

SHARDED = {
    "no shard": (lambda f: (f / SECOND).unlink(), "{f}/" + SECOND + ", which " + INDEX
                 + " names, is not there"),
    "not in its shard": (lambda f: edit_index(f, lambda m: m.update({EMBED: SECOND})),
                         "tensor " + EMBED + " is not in {f}/" + SECOND),
    "in no shard": (lambda f: edit_index(f, lambda m: m.update({"model.x": SECOND})),
                    "tensor model.x is not in {f}/" + SECOND),
    "unlisted": (lambda f: edit_index(f, lambda m: m.pop(EMBED)),
                 "tensor " + EMBED + " is in {f}/model-00001-of-00003.safetensors, .* no file"),
    "in two shards": (put_twice, "tensor " + EMBED + " is in {f}/" + SECOND
                      + ", .*model-00001-of-00003.safetensors too"),
    "cut": (lambda f: cut(f / SECOND, -1), "{f}/" + SECOND + " is not a whole"),
    "outside": (lambda f: edit_index(f, lambda m: m.update({EMBED: "../model.safetensors"})),
                "{f}/" + INDEX + " puts tensor " + EMBED + " into '../model.safetensors'"),
    "absolute": (lambda f: edit_index(f, lambda m: m.update({EMBED: "/tmp/x.safetensors"})),
                 "/tmp/x.safetensors"),
    "of another kind": (lambda f: edit_index(f, lambda m: m.update({EMBED: "config.json"})),
                        "'config.json'"),
    "no name": (lambda f: edit_index(f, lambda m: m.update({EMBED: 3})), EMBED + " into 3"),
    "index cut": (lambda f: cut(f / INDEX, 50), "{f}/" + INDEX + " is not JSON"),
    "index a list": (lambda f: (f / INDEX).write_text("[]"), "{f}/" + INDEX + " has no weight_map"),
    "index empty": (lambda f: (f / INDEX).write_text('{"weight_map": {}}'), "has no weight_map"),
    "index not text": (lambda f: (f / INDEX).write_bytes(b"\xff\xfe\x00"), INDEX + " is not JSON"),
    "twice in index": (lambda f: (f / INDEX).write_text(
        f'{{"weight_map": {{"{EMBED}": "{SECOND}", "{EMBED}": "{SECOND}"}}}}'),
        INDEX + " .*" + EMBED + " is there twice"),
    "odd name": (lambda f: edit_index(f, lambda m: m.update({"two\nlines": SECOND})), "no name"),
    "both": (lambda f: shutil.copy(f / SECOND, f / WEIGHTS),
             "{f} holds both model.safetensors and " + INDEX),
}


@pytest.mark.parametrize("shards, case", [(1, c) for c in SINGLE] + [(3, c) for c in SHARDED])
def test_what_is_not_whole_is_named_in_one_line(tmp_path, shards, case):
    config = CONFIGS["llama"]
    write(tmp_path, config, make_tensors(config), shards)
    damage, words = (SINGLE if shards == 1 else SHARDED)[case]
    damage(tmp_path)
    message = fault(tmp_path)
    assert re.search(words.replace("{f}", re.escape(str(tmp_path))), message), message


def test_a_wrong_folder_or_dtype_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    assert f"{tmp_path / 'file'} is a file" in fault(tmp_path / "file")
    assert "Qwen/Qwen3-4B is not a folder: download" in fault("Qwen/Qwen3-4B")
    assert "dtype 'float64' is not one of float32" in fault(tmp_path, dtype="float64")


def test_a_damaged_count_of_layers_is_no_long_list(tmp_path):
    config = {**CONFIGS["llama"], "num_hidden_layers": 10 ** 12}
    write(tmp_path, CONFIGS["llama"], make_tensors(CONFIGS["llama"]))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "lacks the tensor model.layers.999999999999." in fault(tmp_path)


def test_without_the_package_the_remedy_is_said(tmp_path, monkeypatch):
    write(tmp_path, CONFIGS["llama"], make_tensors(CONFIGS["llama"]))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert "pip install safetensors" in fault(tmp_path)


@hypothesis.settings(max_examples=60)
@hypothesis.given(st.data())
def test_damaged_bytes_give_one_line_or_a_checkpoint(data):
    config = {**CONFIGS["llama"], "num_hidden_layers": 1}
    with tempfile.TemporaryDirectory() as name:
        folder = write(pathlib.Path(name), config, make_tensors(config), shards=2)
        path = data.draw(st.sampled_from(sorted(folder.iterdir())))
        old = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, min(len(old), 2000) - 1))
        old[at] = data.draw(st.integers(0, 255))
        path.write_bytes(old)
        try:
            load(folder)
        except ValueError as error:
            assert "\n" not in str(error)


# ---------------------------------------------------------------- memory and meshes


class Watch:
    """Every read of a checkpoint: its size, and the bytes of all that are still alive."""

    def __init__(self):
        self.alive = self.most = 0
        self.reads = []

    def patched(self, read):
        def watched(weights, name, index=()):
            x = read(weights, name, index)
            owner = x
            while isinstance(owner.base, np.ndarray):  # what views of it keep alive
                owner = owner.base
            self.reads.append((name, x.nbytes))
            self.alive += x.nbytes
            self.most = max(self.most, self.alive)
            weakref.finalize(owner, self.freed, x.nbytes)
            return x
        return watched

    def freed(self, size):
        self.alive -= size


def deep():
    """Shards of a layer each: a parameter of all layers is larger than the largest of them."""
    config = {**CONFIGS["llama"], "num_hidden_layers": 24, "intermediate_size": 64,
              "vocab_size": 16}
    return config, make_tensors(config, "BF16")


def bounds(folder, config):
    largest = max(p.stat().st_size for p in folder.glob("*.safetensors"))
    of_a_parameter = config["num_hidden_layers"] * 2 * 64 * 16
    assert of_a_parameter > 1.3 * largest  # else the bound would show nothing
    return 1.3 * largest


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_the_host_holds_less_than_one_shard(tmp_path, monkeypatch, dtype):
    config, tensors = deep()
    write(tmp_path, config, tensors, shards=24)
    watch = Watch()
    monkeypatch.setattr(Weights, "read", watch.patched(Weights.read))
    load(tmp_path, dtype)
    assert 0 < watch.most < bounds(tmp_path, config)
    assert sorted(watch.reads) == sorted((name, x.nbytes) for name, x in tensors.items())


def test_eight_devices_hold_what_one_does():
    done = run_on_eight_devices(__file__)
    assert done.stdout.split() == [*ON_MESHES, "deep"]


def compare_on_eight_devices(root):
    plain = Weights.read
    for case, (sizes, rules, family) in ON_MESHES.items():
        config, tensors = CONFIGS[family], make_tensors(CONFIGS[family], "BF16")
        folder = write(root / case, config, tensors, shards=3)
        mesh, watch = make_mesh(*sizes), Watch()
        Weights.read = watch.patched(plain)
        with jax.transfer_guard("disallow"):
            got, params = load(folder, None, mesh, rules)
        assert_same_bits(jax.device_get(params), expected_params(config, tensors))
        shardings = param_shardings(params, mesh, rules)
        assert jax.tree.map(lambda x: x.sharding, params) == shardings
        check_parts(got.model, shardings)
        if case != "in_heads":  # where rows of whole heads are read
            whole = sum(x.nbytes for x in tensors.values())
            assert sum(size for _, size in watch.reads) == whole  # every byte once
            part = params["layers"]["up"].addressable_shards[0].data[0].nbytes
            assert {n for name, n in watch.reads if "up_proj" in name} == {part}
        print(case)
    config, tensors = deep()
    folder = write(root / "deep", config, tensors, shards=24)
    watch = Watch()
    Weights.read = watch.patched(plain)
    params = load(folder, "float32", make_mesh(1, 4, 2))[1]
    assert 0 < watch.most < bounds(folder, config)
    assert_same_bits(jax.device_get(params["layers"]["gate"]),
                     expected_params(config, tensors)["layers"]["gate"].astype(np.float32))
    print("deep")


def check_parts(model, shardings):
    """What a device reads of a tensor is what it keeps of the parameter."""
    for slot in slots(model):
        sharding = shardings
        for key in slot.parameter.split("/"):
            sharding = sharding[key]
        shape = (model.n_layers,) * slot.stacked + slot.parameter_shape
        kept = sharding.devices_indices_map(shape)
        for device, index in file_sharding(slot, sharding).devices_indices_map(slot.split).items():
            assert tuple(index[axis] for axis in slot.order) == kept[device][slot.stacked:]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        compare_on_eight_devices(pathlib.Path(scratch))
