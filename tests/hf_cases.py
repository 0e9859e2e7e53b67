"""Tiny checkpoints in Hugging Face form, made with numpy alone, and what they must load to.

Names and axes are written out here once more, apart from the product's own table of them.
"""

import json

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}

_COMMON = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
           "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
           "rope_theta": 10000.0, "hidden_act": "silu"}

CONFIGS = {
    "llama": {**_COMMON, "model_type": "llama", "architectures": ["LlamaForCausalLM"],
              "tie_word_embeddings": False},
    "qwen2": {**_COMMON, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"],
              "tie_word_embeddings": True},
    # head_dim is not hidden_size / heads
    "qwen3": {**_COMMON, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"],
              "hidden_size": 64, "head_dim": 32, "tie_word_embeddings": True},
}


def head_dim(config):
    return config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])


def shapes(config):
    """Tensor name -> shape in the file."""
    d, f, hd = config["hidden_size"], config["intermediate_size"], head_dim(config)
    q, kv = config["num_attention_heads"] * hd, config["num_key_value_heads"] * hd
    found = {"model.embed_tokens.weight": (config["vocab_size"], d)}
    for i in range(config["num_hidden_layers"]):
        layer = {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,),
                 "self_attn.q_proj.weight": (q, d), "self_attn.k_proj.weight": (kv, d),
                 "self_attn.v_proj.weight": (kv, d), "self_attn.o_proj.weight": (d, q),
                 "mlp.gate_proj.weight": (f, d), "mlp.up_proj.weight": (f, d),
                 "mlp.down_proj.weight": (d, f)}
        if config["model_type"] == "qwen2":
            layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,),
                      "self_attn.v_proj.bias": (kv,)}
        if config["model_type"] == "qwen3":
            layer |= {"self_attn.q_norm.weight": (hd,), "self_attn.k_norm.weight": (hd,)}
        found |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    found["model.norm.weight"] = (d,)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], d)
    return found


def make_tensors(config, dtype="F32", seed=0):
    """Random numbers, none of which occurs twice in a tensor of float32."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(DTYPES[dtype])
            for name, shape in shapes(config).items()}


def write(folder, config, tensors, shards=1):
    """config.json and the weights, in `shards` files of equally many tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    note = {"format": "pt"}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata=note)
        return folder
    names, home = list(tensors), {}
    for part in range(shards):
        file = f"model-{part + 1:05d}-of-{shards:05d}.safetensors"
        inside = names[part * len(names) // shards:(part + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in inside}, folder / file, metadata=note)
        home |= dict.fromkeys(inside, file)
    size = sum(t.nbytes for t in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": home}))
    return folder


def expected_params(config, tensors):
    """The decoder's tree of numpy arrays."""
    d, hd = config["hidden_size"], head_dim(config)
    h, kv = config["num_attention_heads"], config["num_key_value_heads"]

    def stack(name, turn):
        return np.stack([turn(tensors[f"model.layers.{i}.{name}"])
                         for i in range(config["num_hidden_layers"])])

    layers = {
        "attn_norm": stack("input_layernorm.weight", lambda w: w),
        "mlp_norm": stack("post_attention_layernorm.weight", lambda w: w),
        "q": stack("self_attn.q_proj.weight", lambda w: w.T.reshape(d, h, hd)),
        "k": stack("self_attn.k_proj.weight", lambda w: w.T.reshape(d, kv, hd)),
        "v": stack("self_attn.v_proj.weight", lambda w: w.T.reshape(d, kv, hd)),
        "o": stack("self_attn.o_proj.weight", lambda w: w.T.reshape(h, hd, d)),
        "gate": stack("mlp.gate_proj.weight", lambda w: w.T),
        "up": stack("mlp.up_proj.weight", lambda w: w.T),
        "down": stack("mlp.down_proj.weight", lambda w: w.T),
    }
    if config["model_type"] == "qwen2":
        layers |= {f"{x}_bias": stack(f"self_attn.{x}_proj.bias", lambda b: b.reshape(-1, hd))
                   for x in "qkv"}
    if config["model_type"] == "qwen3":
        layers |= {f"{x}_norm": stack(f"self_attn.{x}_norm.weight", lambda w: w) for x in "qk"}
    params = {"embed": tensors["model.embed_tokens.weight"],
              "final_norm": tensors["model.norm.weight"], "layers": layers}
    if not config["tie_word_embeddings"]:
        params["head"] = tensors["lm_head.weight"].T
    return params


def assert_same_bits(got, want):
    """Two trees: same keys, dtypes, shapes and bytes."""
    if isinstance(want, dict):
        assert got.keys() == want.keys()
        for name in want:
            assert_same_bits(got[name], want[name])
        return
    got, want = np.asarray(got), np.asarray(want)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert got.tobytes() == want.tobytes()
