"""Makes tests/fixtures/hf: tiny random models as transformers saves them, with its logits.

Run from the repository root where torch and transformers are installed; the tests need
neither:

    python -m tests.make_hf_fixtures

Each case is a folder: config.json and the weights as `save_pretrained` writes them, and
expected.npz with `ids` [2, 40] and the `logits` [2, 40, V] that transformers computes for
them in float32. Some hold old/config.json: the same model in the keys of transformers 4,
checked here to give the same logits. versions.json names what made them. A second run writes
the same bytes. released/ is not made here: config.json files of published models.
"""

import dataclasses
import json
import pathlib
import shutil

import numpy as np
import torch
import transformers

OUT = pathlib.Path(__file__).parent / "fixtures" / "hf"
BATCH, LENGTH = 2, 40

SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
         "bos_token_id": 1, "eos_token_id": 2}
# Of the eight frequencies of a head 16 wide, one or two stay, some are blended, the rest is
# divided; and within 40 tokens the division turns most of them by another angle.
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 24}
TIED = {"tie_word_embeddings": True}


@dataclasses.dataclass(frozen=True)
class Case:
    """settings: beside SMALL. old: also write config.json in the keys of transformers 4.
    shard: largest file, as transformers takes it; "" is one file."""

    name: str
    model_type: str
    settings: dict
    old: bool = False
    shard: str = ""
    dtype: torch.dtype = torch.float32


CASES = (
    Case("llama_untied", "llama", {"rms_norm_eps": 1e-5}, old=True),
    Case("llama_tied", "llama", {**TIED, "num_key_value_heads": 4}),
    Case("llama_rope_llama3", "llama", {"head_dim": 16, "rope_parameters": LLAMA3}, old=True),
    Case("llama_rope_linear", "llama", {"rope_parameters": {
        "rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}}, old=True),
    Case("llama_head_dim", "llama", {**TIED, "head_dim": 12}),
    Case("smollm2", "llama", {
        **TIED, "hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
         old=True),
    Case("qwen2_tied", "qwen2", {
        **TIED, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, old=True),
    Case("qwen2_untied", "qwen2", {}, shard="20KB"),
    Case("qwen2_head_dim", "qwen2", {**TIED, "head_dim": 12}),
    Case("qwen3_tied", "qwen3", {
        **TIED, "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
         old=True),
    Case("qwen3_untied", "qwen3", {"head_dim": 8}),
    Case("qwen3_bfloat16", "qwen3", {**TIED, "head_dim": 16}, dtype=torch.bfloat16),
)


def fill(model, seed: int) -> None:
    """Weights under which every part of the model matters: norms far from 1, biases far from
    0, attention neither flat nor one-hot."""
    rng = np.random.default_rng(seed)
    for name, weight in sorted(model.named_parameters()):
        shape = tuple(weight.shape)
        if name.endswith("bias"):
            value = rng.normal(size=shape)
        elif "norm" in name:
            value = rng.uniform(0.5, 1.5, shape)
        elif "embed_tokens" in name:
            value = rng.normal(size=shape) * 0.05  # small enough for the norms to see their eps
        else:
            value = rng.normal(size=shape) * 1.5 / shape[1] ** 0.5
        with torch.no_grad():
            weight.copy_(torch.from_numpy(value.astype(np.float32)))


def logits(folder, ids, config_folder=None) -> np.ndarray:
    """As anyone would compute them: from the files, in float32."""
    config = transformers.AutoConfig.from_pretrained(config_folder or folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.from_numpy(ids)).logits.numpy()


def in_old_keys(config: dict) -> dict:
    """config.json of transformers 5 as its version 4 wrote it."""
    new = {"rope_parameters", "dtype", "layer_types", "transformers_version"}
    old = {key: value for key, value in config.items() if key not in new}
    rope = dict(config["rope_parameters"])
    old["rope_theta"] = rope.pop("rope_theta")
    # Linear scaling is older than the key's present name.
    if rope["rope_type"] == "linear":
        rope["type"] = rope.pop("rope_type")
    old["rope_scaling"] = rope if len(rope) > 1 else None
    old["torch_dtype"] = config["dtype"]
    if "sliding_window" in old:  # a width beside a switch that is off, as Qwen's files have it
        old["sliding_window"] = 16
    return old | {"transformers_version": "4.43.0"}


def write_json(path: pathlib.Path, data) -> None:
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def make(case: Case, seed: int) -> None:
    folder = OUT / case.name
    folder.mkdir(parents=True)
    config = transformers.AutoConfig.for_model(case.model_type, **{**SMALL, **case.settings})
    model = transformers.AutoModelForCausalLM.from_config(config)
    fill(model, seed)
    model.to(case.dtype).save_pretrained(folder, max_shard_size=case.shard or "1GB")
    (folder / "generation_config.json").unlink()
    ids = np.random.default_rng(seed).integers(0, SMALL["vocab_size"], (BATCH, LENGTH))
    want = logits(folder, ids)
    np.savez(folder / "expected.npz", ids=ids.astype(np.int32), logits=want)
    if case.old:
        (folder / "old").mkdir()
        written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        write_json(folder / "old" / "config.json", in_old_keys(written))
        np.testing.assert_array_equal(logits(folder, ids, folder / "old"), want)


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for case in CASES:
        shutil.rmtree(OUT / case.name, ignore_errors=True)
    for seed, case in enumerate(CASES):
        make(case, seed)
    write_json(OUT / "versions.json", {"torch": torch.__version__,
                                       "transformers": transformers.__version__})


if __name__ == "__main__":
    main()
