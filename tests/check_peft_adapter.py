"""LoRA adapters exchanged with PEFT: run by hand, no test of the suite.

Steps 1 and 3 run where this package does, step 2 where torch, transformers and peft are
installed, which may be another environment:

    PYTHONPATH=. python tests/check_peft_adapter.py write SOURCE OUT
    python tests/check_peft_adapter.py peft SOURCE OUT
    PYTHONPATH=. python tests/check_peft_adapter.py read SOURCE OUT

SOURCE is a Hugging Face folder (those in tests/fixtures/hf will do). `write` saves an adapter
with B not 0 and the same model merged; `peft` computes both, and makes adapters of its own;
`read` computes those, or sees that it refuses them by the name of what it does not compute.
All in float32. A line says by how much logits differ, over the largest logit; the exit status
is 1 where that is above 1e-5.
"""

import argparse
import dataclasses
import json
import pathlib
import sys

import numpy as np

TOLERANCE = 1e-5
ROWS, LENGTH = 2, 32

# Adapters that PEFT makes: arguments of its LoraConfig. The refused ones name a key.
READABLE = {
    "list": {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]},
    "pattern": {"r": 3, "lora_alpha": 3, "target_modules": r".*\.(o|down)_proj"},
    "all-linear": {"r": 5, "lora_alpha": 10, "target_modules": "all-linear"},
    "excluded": {"r": 2, "lora_alpha": 9, "target_modules": "all-linear",
                 "exclude_modules": ["gate_proj"]},
}
_PLAIN = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}
REFUSED = {
    "use_rslora": _PLAIN | {"use_rslora": True},
    "use_dora": _PLAIN | {"use_dora": True},
    "rank_pattern": _PLAIN | {"rank_pattern": {"v_proj": 2}},
    "alpha_pattern": _PLAIN | {"alpha_pattern": {"v_proj": 2}},
    "bias": _PLAIN | {"bias": "lora_only"},
    "lora_bias": _PLAIN | {"lora_bias": True},
    "modules_to_save": _PLAIN | {"modules_to_save": ["lm_head"]},
    "layers_to_transform": _PLAIN | {"layers_to_transform": [0]},
    "target_modules": _PLAIN | {"target_modules": r"model\.layers\.0\.self_attn\.q_proj"},
    "init_lora_weights": _PLAIN | {"init_lora_weights": "pissa"},
}


def gap(got, want):
    return float(np.abs(got - want).max() / np.abs(want).max())


def report(label, difference):
    print(f"{label}: logits differ by {difference:.1e}")
    return difference > TOLERANCE


def our_logits(model, params, ids):
    import jax

    from rods_jax.models.attention import causal_mask
    from rods_jax.models.decoder import Decoder

    decoder = Decoder(model)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ids.shape)

    @jax.jit
    def run(params):
        hidden, _ = decoder.apply({"params": params}, ids, positions, causal_mask(LENGTH))
        return decoder.apply({"params": params}, hidden, method="logits")
    return np.asarray(run(params))


def write(source, out):
    import jax

    from rods_jax.models import lora
    from rods_jax.models.config import LoraConfig
    from rods_jax.models.hf.adapter import save_adapter
    from rods_jax.models.hf.export import export
    from rods_jax.models.hf.load import load

    config, params = load(source, dtype="float32")
    model = dataclasses.replace(config.model, lora=LoraConfig(rank=3, alpha=4.5))
    rng = np.random.default_rng(1)
    adapters = jax.tree.map(lambda x: 0.1 * rng.normal(size=x.shape).astype(np.float32),
                            jax.eval_shape(lambda: lora.init_adapters(model, jax.random.key(0))))
    whole = lora.join(params, adapters)
    ids = rng.integers(0, model.vocab_size, (ROWS, LENGTH)).astype(np.int32)
    save_adapter(out / "ours", whole, model, str(source))
    export(out / "merged", lora.merged(whole, model), dataclasses.replace(model, lora=None),
           source=source)
    logits, plain = our_logits(model, whole, ids), our_logits(config.model, params, ids)
    print(f"ours: the adapter changes logits by {gap(logits, plain):.1e}")
    np.savez(out / "logits.npz", ids=ids, ours=logits)
    return 0


def in_peft(source, out):
    import peft
    import torch
    import transformers

    def base(folder=source):
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def logits(model):
        with torch.no_grad():
            return model(ids).logits.numpy()

    with np.load(out / "logits.npz") as data:
        ids, ours = torch.from_numpy(data["ids"]).long(), data["ours"]
    model = peft.PeftModel.from_pretrained(base(), out / "ours")
    print(f"{type(model.base_model.model).__name__}, peft {peft.__version__}, transformers "
          f"{transformers.__version__}, torch {torch.__version__}")
    failed = report("our adapter in peft", gap(logits(model), ours))
    failed |= report("our adapter merged by peft", gap(logits(model.merge_and_unload()), ours))
    failed |= report("our merged export", gap(logits(base(out / "merged")), ours))
    torch.manual_seed(0)
    for name, settings in {**READABLE, **REFUSED}.items():
        model = peft.get_peft_model(base(), peft.LoraConfig(task_type="CAUSAL_LM", **settings))
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(parameter.data, std=0.1)
        model.save_pretrained(out / "theirs" / name)
        if name in READABLE:
            np.save(out / "theirs" / f"{name}.npy", logits(model))
    return int(failed)


def read(source, out):
    from rods_jax.models import lora
    from rods_jax.models.hf.adapter import load_adapter, read_lora, save_adapter
    from rods_jax.models.hf.load import load

    config, params = load(source, dtype="float32")
    ids, failed = np.load(out / "logits.npz")["ids"], False
    for name in READABLE:
        folder = out / "theirs" / name
        model = dataclasses.replace(config.model, lora=read_lora(folder, config.model))
        whole = lora.join(params, load_adapter(folder, model))
        want = np.load(folder.with_suffix(".npy"))
        failed |= report(f"peft's {name} {model.lora}", gap(our_logits(model, whole, ids), want))
        again = out / "again" / name
        save_adapter(again, whole, model, str(source))
        if tensors(again) != tensors(folder):
            print(f"peft's {name}: tensors differ after reading and writing")
            failed = True
    for name in REFUSED:
        try:
            read_lora(out / "theirs" / name, config.model)
            print(f"peft's {name} is not refused")
            failed = True
        except ValueError as error:
            print(f"refused: {error}")
            failed |= name not in str(error)
    return int(failed)


def tensors(folder):
    """What the file says of each tensor, and its bytes."""
    data = (folder / "adapter_model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    return {name: (x["dtype"], x["shape"], data[8 + size:][slice(*x["data_offsets"])])
            for name, x in header.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = {"write": write, "peft": in_peft, "read": read}
    parser.add_argument("step", choices=steps)
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    args = parser.parse_args()
    return steps[args.step](args.source, args.out)


if __name__ == "__main__":
    sys.exit(main())
