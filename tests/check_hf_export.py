"""Exported folders read by transformers: run by hand, no test of the suite.

The first half runs where this package does and writes OUT/model and OUT/logits.npz; the
second where torch and transformers are installed, which may be another environment:

    PYTHONPATH=. python tests/check_hf_export.py write SOURCE OUT [--alone]
    python tests/check_hf_export.py compare OUT

SOURCE is a Hugging Face folder (those in tests/fixtures/hf will do). --alone exports without
it, with a config.json of our own. `compare` prints the largest difference of logits over the
largest logit and exits with 1 where it is above 1e-5, or where transformers misses a tensor or
has no use for one. Both sides compute in float32.
"""

import argparse
import pathlib
import sys

import numpy as np

TOLERANCE = 1e-5
ROWS, LENGTH = 2, 32


def write(source, out, alone):
    import jax

    from rods_jax.models.attention import causal_mask
    from rods_jax.models.decoder import Decoder
    from rods_jax.models.hf.export import export
    from rods_jax.models.hf.load import load

    config, params = load(source)
    dtype = str(params["embed"].dtype)
    params = jax.tree.map(lambda x: x.astype("float32"), params)
    decoder = Decoder(config.model)
    ids = np.random.default_rng(0).integers(
        0, config.model.vocab_size, (ROWS, LENGTH)).astype(np.int32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ids.shape)

    @jax.jit
    def run(params):
        hidden, _ = decoder.apply({"params": params}, ids, positions, causal_mask(LENGTH))
        return decoder.apply({"params": params}, hidden, method="logits")

    kept = {} if alone else {"source": source}
    export(out / "model", params, config.model, dtype=dtype, **kept)
    np.savez(out / "logits.npz", ids=ids, logits=jax.device_get(run(params)))


def compare(out):
    import torch
    import transformers

    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        out / "model", dtype=torch.float32, output_loading_info=True)
    with np.load(out / "logits.npz") as data, torch.no_grad():
        want = data["logits"]
        got = model(torch.from_numpy(data["ids"]).long()).logits.numpy()
    difference = float(np.abs(got - want).max() / np.abs(want).max())
    wrong = {kind: list(names) for kind, names in found.items() if names}
    print(f"{out}: {type(model).__name__} of transformers {transformers.__version__}, "
          f"logits differ by {difference:.1e}", *([wrong] if wrong else []))
    return 1 if wrong or difference > TOLERANCE else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    writing, comparing = actions.add_parser("write"), actions.add_parser("compare")
    writing.add_argument("source", type=pathlib.Path)
    writing.add_argument("--alone", action="store_true")
    for action in (writing, comparing):
        action.add_argument("out", type=pathlib.Path)
    args = parser.parse_args()
    if args.action == "compare":
        return compare(args.out)
    return write(args.source, args.out, args.alone)


if __name__ == "__main__":
    sys.exit(main())
