"""Parameters into safetensors folders and back; on 8 devices in a process of its own (run
this file)."""

import dataclasses
import errno
import json
import os
import pathlib
import re
import resource
import stat
import tempfile
import weakref

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from safetensors import safe_open

from eight_devices import run_on_eight_devices
from hf_cases import CONFIGS, DTYPES, assert_same_bits, make_tensors, write
from rods_jax.models.attention import causal_mask
from rods_jax.models.config import LoraConfig, ModelConfig
from rods_jax.models.decoder import Decoder, init_params
from rods_jax.models.hf import export as module
from rods_jax.models.hf.config import Family, read_config
from rods_jax.models.hf.export import export
from rods_jax.models.hf.load import load
from rods_jax.models.sharding import ShardingRules, make_mesh

HEAD, EMBED, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

# mesh sizes, rules, config
ON_MESHES = {
    "fsdp": ((1, 8, 1), ShardingRules(), "llama"),
    "both": ((2, 2, 2), ShardingRules(layers="data"), "qwen2"),
    "in_heads": ((2, 1, 4), ShardingRules(heads=None, kv_heads=None, head_dim="tensor"), "qwen3"),
}


def read(folder):
    """Tensor name -> array, over all files; a name must not occur twice."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():
                assert name not in found
                found[name] = file.get_tensor(name)
    return found


def source(folder, family="llama", dtype="F32", shards=1):
    config = CONFIGS[family]
    return write(folder, config, make_tensors(config, dtype), shards)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_came_in_goes_out_byte_for_byte(tmp_path, family, dtype):
    folder = source(tmp_path / "in", family, dtype)
    kept, (_, masters) = load(folder), load(folder, "float32")
    export(tmp_path / "kept", kept[1], kept[0].model, source=folder)
    export(tmp_path / "cast", masters, kept[0].model, source=folder)
    for out in ("kept", "cast"):
        assert sorted(p.name for p in (tmp_path / out).iterdir()) == ["config.json", WEIGHTS]
        for name in ("config.json", WEIGHTS):
            assert (tmp_path / out / name).read_bytes() == (folder / name).read_bytes()
    assert_same_bits(load(tmp_path / "kept")[1], kept[1])


def test_bfloat16_goes_out_under_its_own_tag(tmp_path):
    tensors = make_tensors(CONFIGS["qwen2"], "BF16")
    tensors[NORM][:3] = [1.0, -2.0, 3.140625]
    folder = write(tmp_path / "in", CONFIGS["qwen2"], tensors)
    config, params = load(folder, "float32")
    export(tmp_path / "out", params, config.model, source=folder)
    data = (tmp_path / "out" / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8:8 + length])[NORM]
    start = 8 + length + entry["data_offsets"][0]
    assert entry["dtype"] == "BF16"
    assert data[start:start + 6] == bytes.fromhex("803f 00c0 4940")  # little-endian


def test_each_tensor_keeps_its_own_dtype(tmp_path):
    tensors = {name: x.astype(np.float32) if "norm" in name else x
               for name, x in make_tensors(CONFIGS["llama"], "BF16").items()}
    folder = write(tmp_path / "in", CONFIGS["llama"], tensors, shards=3)
    config, params = load(folder, "float32")
    export(tmp_path / "out", params, config.model, source=folder)
    assert_same_bits(read(tmp_path / "out"), tensors)


def test_a_tied_biased_model_survives_a_step_of_training(tmp_path):
    folder = source(tmp_path / "in", "qwen2")
    config, params = load(folder)
    decoder = Decoder(config.model)
    ids = np.arange(12, dtype=np.int32).reshape(2, 6)
    positions = np.broadcast_to(np.arange(6, dtype=np.int32), (2, 6))

    @jax.jit
    def gradient(params):
        def loss(params):
            hidden, _ = decoder.apply({"params": params}, ids, positions, causal_mask(6))
            logits = decoder.apply({"params": params}, hidden, method="logits")
            return -jax.nn.log_softmax(logits)[..., 3].mean()
        return jax.grad(loss)(params)

    slopes = gradient(params)
    assert [name for name in slopes if name in ("embed", "head")] == ["embed"]
    trained = jax.tree.map(lambda p, g: p - 0.1 * g, params, slopes)
    moved = [name for name in trained["layers"] if name.endswith("_bias")
             and np.any(trained["layers"][name] != params["layers"][name])]
    assert len(moved) == 3
    export(tmp_path / "out", trained, config.model, source=folder)
    assert read(tmp_path / "out").keys() == read(folder).keys()
    assert HEAD not in read(folder)
    assert_same_bits(load(tmp_path / "out")[1], jax.device_get(trained))


def test_a_head_that_a_tied_source_repeats_follows_the_embedding(tmp_path):
    tensors = make_tensors(CONFIGS["qwen2"], "BF16")
    tensors |= {HEAD: tensors[EMBED].copy(),
                "model.layers.0.self_attn.rotary_emb.inv_freq": np.arange(2, dtype=np.float32)}
    folder = write(tmp_path / "in", CONFIGS["qwen2"], tensors)
    config, params = load(folder, "float32")
    params["embed"] = params["embed"] + 1
    export(tmp_path / "out", params, config.model, source=folder)
    got = read(tmp_path / "out")
    assert got.keys() == tensors.keys()
    assert got[HEAD].tobytes() == got[EMBED].tobytes() != tensors[EMBED].tobytes()
    assert_same_bits(got["model.layers.0.self_attn.rotary_emb.inv_freq"],
                     np.arange(2, dtype=np.float32))
    load(tmp_path / "out")


@pytest.fixture(scope="module", params=[1, 4], ids=["one_file", "four_files"])
def qwen3(request, tmp_path_factory):
    folder = source(tmp_path_factory.mktemp("qwen3") / "in", "qwen3", "BF16", request.param)
    return folder, *load(folder)


@hypothesis.given(limit=st.integers(1, 60000))
@hypothesis.example(limit=8 * 10 ** 9)
def test_shards_hold_no_more_than_asked_and_the_index_finds_all(qwen3, limit):
    folder, config, params = qwen3
    with tempfile.TemporaryDirectory() as scratch:
        out = pathlib.Path(scratch, "out")
        export(out, params, config.model, source=folder, max_shard_bytes=limit)
        got = read(out)
        assert_same_bits(got, read(folder))
        files = sorted(p.name for p in out.glob("*.safetensors"))
        assert (out / INDEX).exists() == (len(files) > 1)
        if len(files) == 1:
            assert files == [WEIGHTS]
            return
        assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors"
                         for i in range(1, len(files) + 1)]
        index = json.loads((out / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in got.values())
        assert index["weight_map"].keys() == got.keys()
        for name, x in got.items():
            assert x.nbytes <= limit or list(index["weight_map"].values()).count(
                index["weight_map"][name]) == 1
        for file in files:
            names = [name for name, f in index["weight_map"].items() if f == file]
            assert sorted(names) == sorted(safe_open(out / file, framework="np").keys())
            assert sum(got[n].nbytes for n in names) <= limit or len(names) == 1


def test_shards_that_were_written_are_read(qwen3, tmp_path):
    folder, config, params = qwen3
    export(tmp_path / "out", params, config.model, source=folder, max_shard_bytes=20000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    assert_same_bits(load(tmp_path / "out")[1], jax.device_get(params))


def test_files_beside_the_weights_come_along(tmp_path):
    folder = source(tmp_path / "in")
    carried = ("generation_config.json", "tokenizer.json", "tokenizer_config.json",
               "tokenizer.model", "vocab.json", "merges.txt", "special_tokens_map.json",
               "added_tokens.json", "chat_template.jinja", "chat_template.json", "LICENSE",
               "additional_chat_templates/tool_use.jinja")
    left = ("README.md", "pytorch_model.bin", "training_args.bin", "optimizer.pt", ".gitattributes",
            "model-00001-of-00001.safetensors", "original/tokenizer.model")
    for name in carried + left:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(f"{name}\r\n\xff".encode("latin-1"))
    # As in the hub's cache, where a folder holds links to what was downloaded.
    (tmp_path / "blob").write_bytes(b"{}")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(tmp_path / "blob")
    config, params = load(folder)
    export(tmp_path / "out", params, config.model, source=folder)
    got = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*")
           if p.is_file()}
    assert got == {*carried, "config.json", WEIGHTS}
    for name in (*carried, "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
        assert not (tmp_path / "out" / name).is_symlink()
    modes = {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "out").iterdir() if p.is_file()}
    assert len(modes) == 1  # the weights may be read by whom the rest may


@pytest.mark.parametrize("family", CONFIGS)
def test_without_a_source_config_and_dtype_are_written(tmp_path, family):
    config, params = load(source(tmp_path / "in", family))
    numpy_params = jax.tree.map(np.asarray, params)  # as a GGUF file gives them
    export(tmp_path / "new", numpy_params, config.model, dtype="float16")
    again = read_config(tmp_path / "new")
    assert again.family is Family(family)
    assert again.model == config.model
    assert again.raw["torch_dtype"] == "float16"
    tensors = make_tensors(CONFIGS[family])
    assert_same_bits(read(tmp_path / "new"), {n: x.astype(np.float16) for n, x in tensors.items()})
    export(tmp_path / "default", params, config.model, family=Family(family))
    assert {str(x.dtype) for x in read(tmp_path / "default").values()} == {"bfloat16"}


def test_choices_of_a_run_and_rounding_are_no_other_model(tmp_path):
    folder = source(tmp_path / "in")
    config, params = load(folder)
    model = dataclasses.replace(config.model, compute_dtype="bfloat16", scan_unroll=2,
                                lora=LoraConfig(), norm_eps=float(np.float32(1e-6)))
    export(tmp_path / "out", params, model, source=folder)
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()


# ---------------------------------------------------------------- what is refused


def refused(*args, **options):
    with pytest.raises(ValueError) as error:
        export(*args, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_place_that_is_taken_is_refused(tmp_path):
    folder = source(tmp_path / "in")
    config, params = load(folder)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    assert "full is not empty" in refused(tmp_path / "full", params, config.model, source=folder)
    assert "is not empty" in refused(folder, params, config.model, source=folder)
    assert "is not a folder" in refused(tmp_path / "file", params, config.model, source=folder)
    export(tmp_path / "empty", params, config.model, source=folder)
    assert (tmp_path / "empty" / WEIGHTS).exists()
    assert [p.read_text() for p in (tmp_path / "full" / "notes.txt", tmp_path / "file")] == (
        ["mine", "mine"])


def without(params, name):
    return {**params, "layers": {k: v for k, v in params["layers"].items() if k != name}}


def test_parameters_that_are_not_the_models_are_named(tmp_path):
    folder = source(tmp_path / "in", "qwen2")
    config, params = load(folder)
    layers = params["layers"]
    cases = {
        "layers/q_lora_a": {**params, "layers": {**layers, "q_lora_a": jnp.ones((2, 16, 4))}},
        "lack layers/k_bias": without(params, "k_bias"),
        "parameter head ": {**params, "head": jnp.ones((16, 40))},
        r"parameter layers/up has the shape \(2, 24, 16\)":
            {**params, "layers": {**layers, "up": layers["up"].swapaxes(1, 2)}},
    }
    for words, tree in cases.items():
        assert re.search(words, refused(tmp_path / "out", tree, config.model, source=folder))
    assert "merge them first" in refused(tmp_path / "out", cases["layers/q_lora_a"], config.model)
    assert os.listdir(tmp_path) == ["in"]


def test_a_source_that_is_another_model_is_refused(tmp_path):
    folder = source(tmp_path / "in", "llama")
    config, params = load(folder)

    def words(**options):
        return refused(tmp_path / "out", params, config.model, **options)

    other = {**CONFIGS["llama"], "rope_theta": 5e5}
    write(tmp_path / "other", other, make_tensors(other))
    assert re.search(r"other is another model: its rope_theta is 500000.0, that of these weights "
                     "10000.0", words(source=tmp_path / "other"))
    assert "family llama, not qwen3" in words(source=folder, family=Family.QWEN3)
    assert "choose the family that fits" in words(family=Family.QWEN2)
    assert "none is not a folder" in words(source=tmp_path / "none")
    assert "dtype 'int8' is not one of" in words(dtype="int8")
    assert "max_shard_bytes is 0" in words(source=folder, max_shard_bytes=0)
    (tmp_path / "other" / WEIGHTS).write_bytes(b"")
    assert "not a whole safetensors file" in words(source=tmp_path / "other")
    assert sorted(os.listdir(tmp_path)) == ["in", "other"]


# ---------------------------------------------------------------- faults and memory


def test_an_interrupted_export_leaves_nothing(tmp_path, monkeypatch):
    folder = source(tmp_path / "in", dtype="BF16")
    config, params = load(folder)
    target, seen = tmp_path / "runs" / "one" / "out", []

    def stop(path, tensors):
        seen.append((path, target.exists()))
        if len(seen) == 2:
            raise KeyboardInterrupt
        write_weights(path, tensors)

    write_weights = module.write_weights
    monkeypatch.setattr(module, "write_weights", stop)
    with pytest.raises(KeyboardInterrupt):
        export(target, params, config.model, source=folder, max_shard_bytes=4000)
    assert [exists for _, exists in seen] == [False, False]
    assert seen[0][0].is_relative_to(tmp_path / "runs" / "one")  # on the same disk
    assert os.listdir(tmp_path) == ["in"]
    written = []

    def note(path, tensors):
        write_weights(path, tensors)
        written.append(path.parent.stat().st_ino)

    monkeypatch.setattr(module, "write_weights", note)
    export(target, params, config.model, source=folder, max_shard_bytes=4000)
    assert set(written) == {target.stat().st_ino}  # renamed, not copied
    assert os.listdir(tmp_path / "runs" / "one") == ["out"]


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    folder = source(tmp_path / "in")
    config, params = load(folder)
    write_weights, limits = module.write_weights, resource.getrlimit(resource.RLIMIT_FSIZE)

    def short(path, tensors):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            write_weights(path, tensors)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(module, "write_weights", short)
    with pytest.raises(OSError) as error:
        export(tmp_path / "out", params, config.model, source=folder)
    assert error.value.errno == errno.EFBIG and error.value.filename.endswith(WEIGHTS)
    assert "\n" not in str(error.value)
    assert os.listdir(tmp_path) == ["in"]


def test_a_place_that_cannot_be_made_is_an_os_error(tmp_path):
    folder = source(tmp_path / "in")
    config, params = load(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        export(tmp_path / "file" / "out", params, config.model, source=folder)
    assert sorted(os.listdir(tmp_path)) == ["file", "in"]


def test_the_host_holds_one_shard_at_a_time(tmp_path, monkeypatch):
    folder = source(tmp_path / "in", dtype="BF16")
    config, params = load(folder, "float32")
    write_weights, earlier, sizes = module.write_weights, [], []

    def watched(path, tensors):
        assert not [ref for ref in earlier if ref() is not None]
        earlier.extend(weakref.ref(x) for x in tensors.values())
        sizes.append(sum(x.nbytes for x in tensors.values()))
        write_weights(path, tensors)

    monkeypatch.setattr(module, "write_weights", watched)
    export(tmp_path / "out", params, config.model, source=folder, max_shard_bytes=2000)
    assert len(sizes) > 3 and max(sizes) <= 2000


@pytest.mark.slow
def test_eight_devices_write_what_one_does():
    done = run_on_eight_devices(__file__)
    assert done.stdout.split() == list(ON_MESHES)


def compare_on_eight_devices(root):
    for case, (sizes, rules, family) in ON_MESHES.items():
        folder = source(root / case, family, "BF16")
        config, params = load(folder, "float32", make_mesh(*sizes), rules)
        with jax.transfer_guard("disallow"):
            export(root / f"{case}_out", params, config.model, source=folder)
        assert (root / f"{case}_out" / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
        print(case)


TINY = ModelConfig(vocab_size=8, d_model=8, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=4, d_ff=8)


def test_files_of_the_caller_appear_with_the_folder_or_not_at_all(tmp_path):
    def add(folder):
        assert not (tmp_path / "out").exists()
        (folder / "tokenizer.json").write_text("{}")

    model, params = TINY, init_params(TINY, jax.random.key(0))
    export(tmp_path / "out", params, model, beside=add, max_length=77)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["max_position_embeddings"] == 77

    def fail(folder):
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        export(tmp_path / "other", params, model, beside=fail)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("value, dtype, words", [
    (1e6, "float16", "not finite in float16: name bfloat16"),
    (float("nan"), "bfloat16", "not finite in bfloat16: the training")])
def test_values_that_are_not_finite_are_refused(tmp_path, value, dtype, words):
    model, params = TINY, init_params(TINY, jax.random.key(0))
    params["final_norm"] = params["final_norm"].at[3].set(value)
    with pytest.raises(ValueError, match=f"model.norm.weight holds values that are {words}"):
        export(tmp_path / "out", params, model, dtype=dtype)
    assert not list(tmp_path.iterdir())


def test_a_dtype_of_ones_own_and_tables_as_they_are(tmp_path):
    folder = source(tmp_path / "in", "llama", "F16")
    config, params = load(folder, "float32")
    export(tmp_path / "out", params, config.model, source=folder, dtype="bfloat16")
    with safe_open(tmp_path / "out" / WEIGHTS, "np") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}
    assert (tmp_path / "out" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    with pytest.raises(ValueError, match="dtype 'int8' is not one of"):
        export(tmp_path / "no", params, config.model, source=folder, dtype="int8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        compare_on_eight_devices(pathlib.Path(scratch))
