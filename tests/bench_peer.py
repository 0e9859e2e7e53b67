"""A peer for the rollout bench: right log-probs, from numpy and the folder's own bytes, and
made-up seconds. `python bench_peer.py SECONDS FOLDER`."""

import json
import pathlib
import re
import sys
import types

import models_reference
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from experiments.bench.serve import serve  # noqa: E402

NAMES = {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm",
         "self_attn.q_norm": "q_norm", "self_attn.k_norm": "k_norm",
         **{f"self_attn.{x}_proj": x for x in "qkvo"},
         **{f"mlp.{x}_proj": x for x in ("gate", "up", "down")}}


def read_weights(folder):
    data = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    weights = {}
    for name, entry in json.loads(data[8:8 + size]).items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "F32"
        begin, end = entry["data_offsets"]
        array = np.frombuffer(data[8 + size + begin:8 + size + end], np.float32)
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)\.weight", name)
        key = ((int(layer[1]), NAMES[layer[2]]) if layer else
               {"model.embed_tokens.weight": "embed", "model.norm.weight": "final_norm"}[name])
        weights[key] = array.reshape(entry["shape"])
    return weights


def scorer(folder):
    """score(tokens) of the weights in a folder."""
    keys, weights = json.loads((folder / "config.json").read_text()), read_weights(folder)
    config = types.SimpleNamespace(
        n_layers=keys["num_hidden_layers"], n_heads=keys["num_attention_heads"],
        n_kv_heads=keys["num_key_value_heads"], head_dim=keys["head_dim"],
        rope_theta=keys["rope_theta"], norm_eps=keys["rms_norm_eps"], rope_divisors=())

    def score(tokens):
        found = []
        for row in tokens:
            logits = models_reference.logits(weights, config, row)[:-1]
            logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            found.append(logprobs[np.arange(len(row) - 1), row[1:]].tolist())
        return {"logprobs": found}

    return score


def make(folder):
    seconds, score = float(sys.argv[1]), scorer(pathlib.Path(folder))

    def run(prompt, tools, group, new, times=1):
        assert all(len(result) == group for result in tools)
        print("what a library prints")
        return {"seconds": seconds * times, "sampled": group * new * (len(tools) + 1),
                "distinct": group}

    return {"versions": {}}, {
        "score": score, "run": run, "run_cached": lambda **case: run(**case, times=0.5),
        "need": lambda prompt, group, new: {"bytes": prompt * group * new}}


if __name__ == "__main__":
    serve(make)
