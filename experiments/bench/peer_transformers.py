"""Hugging Face transformers at its best on a CPU, run by the Python of its own environment:
`python -m experiments.bench.peer_transformers FOLDER` (see serve.py).

float32, inference mode, sdpa attention, a thread a core, the group in one batch. Tokens come
from the whole distribution at temperature 1, and no token ends a message.
"""

from __future__ import annotations

import os
import time

import torch
import transformers

from experiments.bench.serve import Commands, serve


def make(folder: str) -> tuple[dict, Commands]:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa").eval()

    def score(tokens: list[list[int]]) -> dict:
        """Log-prob of each token but the first, given those before it."""
        ids = torch.tensor(tokens)
        with torch.inference_mode():
            logprobs = model(ids).logits.log_softmax(-1)[:, :-1]
            found = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
        return {"logprobs": found.tolist()}

    greeting = {"threads": torch.get_num_threads(), "versions": {
        "torch": torch.__version__, "transformers": transformers.__version__}}
    return greeting, {
        "score": score, "run": lambda **case: _run(model, False, **case),
        "run_cached": lambda **case: _run(model, True, **case)}


def _run(model, keep_cache: bool, prompt: list[int], tools: list, group: int, new: int) -> dict:
    """One pass over a case. keep_cache: past_key_values stay over the messages, so that
    generate runs only what it has not seen; else each message starts from nothing."""
    ids, results = torch.tensor([prompt] * group), [torch.tensor(tool) for tool in tools]
    cache = transformers.DynamicCache(config=model.config) if keep_cache else None
    start = time.perf_counter()
    with torch.inference_mode():
        for message in range(len(tools) + 1):
            if message:
                ids = torch.cat([ids, results[message - 1]], dim=1)
            ids = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache,
                max_new_tokens=new, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                eos_token_id=None, pad_token_id=0)
    seconds = time.perf_counter() - start
    given = group * len(prompt) + sum(result.numel() for result in results)
    return {"seconds": seconds, "sampled": ids.numel() - given,
            "distinct": len({tuple(row) for row in ids.tolist()})}


if __name__ == "__main__":
    serve(make)
