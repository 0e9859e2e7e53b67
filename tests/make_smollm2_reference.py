"""Writes tests/fixtures/smollm2_reference.json: SmolLM2-135M-Instruct as transformers runs it.

Run by hand, where torch (CPU), transformers, gguf and accelerate are installed; no test
imports this file:

    python tests/make_smollm2_reference.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf

Weights, tokenizer and chat template come out of the GGUF file by transformers' own reader.
That reader calls the gguf package to dequantize, so the weights are first compared with the
plain numpy below, which follows the block layouts of ggml; and the log-probs are compared with
those of the same weights in float64, by tests/models_reference.py.
"""

import importlib.metadata
import json
import pathlib
import re
import sys
import types

import gguf
import models_reference
import numpy as np
import torch
import transformers

OUT = pathlib.Path(__file__).with_name("fixtures") / "smollm2_reference.json"
QUESTION = "I have 2 apples and 12 pears. Which dessert can I make of them for 4 guests tonight?"
PLAIN = ("The Amazon is the largest rainforest in the world. It covers most of Brazil and parts "
         "of Peru, and it is home to")
NEW, TOP = 32, 5
NAMES = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
         "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
         "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
         "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
         "token_embd": "embed_tokens", "output_norm": "norm"}


def dequantized(tensor):
    """float32 [rows, columns] of a ReaderTensor, from its bytes."""
    raw, kind = tensor.data, tensor.tensor_type.name
    if kind == "F32":
        return np.asarray(raw)
    rows = raw.shape[0]
    if kind == "Q8_0":  # half scale, 32 int8
        blocks = raw.reshape(rows, -1, 34)
        scale = blocks[..., :2].copy().view("<f2").astype(np.float64)
        return (scale * blocks[..., 2:].view(np.int8)).reshape(rows, -1).astype(np.float32)
    if kind == "Q4_1":  # half scale, half minimum, 16 bytes: low halves first, then high ones
        blocks = raw.reshape(rows, -1, 20)
        scale, low = (blocks[..., at:at + 2].copy().view("<f2").astype(np.float64)
                      for at in (0, 2))
        codes = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], -1)
        return (scale * codes + low).reshape(rows, -1).astype(np.float32)
    raise ValueError(f"tensor {tensor.name} has the type {kind}: write its layout here")


def reordered(weight, heads):
    """Rows as llama.cpp keeps them: component i of a head beside i + width / 2."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def check_weights(path, model):
    """Counts of tensors by type. Raises AssertionError for a weight that is not the file's."""
    heads = {"attn_q": model.config.num_attention_heads,
             "attn_k": model.config.num_key_value_heads}
    weights, kinds = model.model.state_dict(), {}
    for tensor in gguf.GGUFReader(path).tensors:
        *layer, short, _ = tensor.name.split(".")
        name = ".".join([*(("layers", layer[1]) if layer else ()), NAMES[short], "weight"])
        weight = weights.pop(name).numpy()
        if short in heads:
            weight = reordered(weight, heads[short])
        np.testing.assert_array_equal(weight, dequantized(tensor), err_msg=tensor.name)
        kinds[tensor.tensor_type.name] = kinds.get(tensor.tensor_type.name, 0) + 1
    assert not weights, weights.keys()
    return kinds


def in_float64(model, ids):
    """Log-probs [L, V] of the same weights by plain numpy."""
    c = model.config
    config = types.SimpleNamespace(
        n_layers=c.num_hidden_layers, n_heads=c.num_attention_heads, head_dim=c.head_dim,
        n_kv_heads=c.num_key_value_heads, norm_eps=c.rms_norm_eps, rope_divisors=(),
        rope_theta=c.rope_parameters["rope_theta"])
    short = {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}
    weights = {"embed": model.model.embed_tokens.weight, "final_norm": model.model.norm.weight}
    for i, layer in enumerate(model.model.layers):
        for name, value in layer.named_parameters():
            name = name.split(".")[-2]
            weights[i, short.get(name, name.removesuffix("_proj"))] = value
    logits = models_reference.logits(
        {key: value.detach().numpy() for key, value in weights.items()}, config, np.array(ids))
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def case(model, tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False).input_ids
    with torch.no_grad():
        made = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=NEW,
                              attention_mask=torch.ones(1, len(ids)))
        new = made[0, len(ids):].tolist()
        whole = ids + new[:-1]
        logprobs = torch.log_softmax(model(torch.tensor([whole])).logits[0], -1)
    last = len(ids) - 1
    assert logprobs.dtype == torch.float32
    assert logprobs[last:].argmax(-1).tolist() == new, "generate's cache and one pass disagree"
    positions = sorted({0, 1, last // 4, last // 2, 3 * last // 4, last - 1, last,
                        last + len(new) // 4, last + len(new) // 2, last + len(new) - 1})
    best = logprobs[positions].topk(TOP + 1)
    assert (best.values.diff() < -1e-3).all(), "neighbours too close to be told apart"
    first = logprobs[last:].topk(2).values
    exact = np.take_along_axis(in_float64(model, whole)[positions], best.indices.numpy(), -1)
    return {
        "text": text, "ids": ids,
        "positions": positions,  # in the prompt and the continuation behind it
        "top_ids": best.indices[:, :TOP].tolist(),
        "top_logprobs": [[round(x, 7) for x in row] for row in best.values[:, :TOP].tolist()],
        "greedy_ids": new, "greedy_text": tokenizer.decode(new),
        "greedy_least_margin": round((first[:, 0] - first[:, 1]).min().item(), 4),
        "gap_to_float64": float(np.abs(best.values.numpy() - exact).max()),
    }


def main():
    path = pathlib.Path(sys.argv[1])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, attn_implementation="eager", dtype=torch.float32)
    kinds = check_weights(path, model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}],
                                         tokenize=False, add_generation_prompt=True)
    result = {
        "made_by": pathlib.Path(__file__).name,
        "file": path.name, "tensor_types": kinds,
        "versions": {name: importlib.metadata.version(name) for name in (
            "transformers", "torch", "gguf", "tokenizers", "numpy", "accelerate")},
        "cases": {name: case(model, tokenizer, text)
                  for name, text in (("chat", chat), ("plain", PLAIN))},
    }
    OUT.parent.mkdir(exist_ok=True)
    text = json.dumps(result, indent=1, ensure_ascii=False)
    text = re.sub(r"\[[-\d., e\n]*\]", lambda numbers: "".join(numbers[0].split()), text)
    OUT.write_text(text + "\n", encoding="utf-8")
    for name, made in result["cases"].items():
        print(name, len(made["ids"]), made["gap_to_float64"], made["greedy_least_margin"],
              repr(made["greedy_text"]))


if __name__ == "__main__":
    main()
