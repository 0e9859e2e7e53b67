"""A peer for the update bench: right log-probs, from numpy and the folder's own bytes, the loss
of them by its formula, a norm and seconds as told.
`python bench_update_peer.py SECONDS NORM FOLDER`."""

import pathlib
import sys

import bench_peer
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from experiments.bench.serve import serve  # noqa: E402


def make(folder):
    seconds, norm = map(float, sys.argv[1:3])
    score = bench_peer.scorer(pathlib.Path(folder))
    work = {}

    def prepare(prompt, completions, sampler, rewards, eps, lr, rows, clip_low, clip_high,
                clip_norm):
        assert rows >= 1 and 0 < lr < 1e-3 and clip_norm == 1.0
        assert prompt and len(completions) == len(sampler) == len(rewards)
        work["logprobs"] = np.array(score([prompt + row for row in completions])["logprobs"])[
            :, len(prompt) - 1:]
        rewards = np.array(rewards)
        advantage = ((rewards - rewards.mean()) / (rewards.std() + eps))[:, None]
        ratio = np.exp(work["logprobs"] - np.array(sampler))
        held = np.clip(ratio, 1 - clip_low, 1 + clip_high)
        assert (held != ratio).any() and (held == ratio).any()
        work["loss"] = -np.minimum(ratio * advantage, held * advantage).mean(1).mean()
        return {}

    def step():
        return {"seconds": seconds, "loss": work["loss"], "grad_norm": norm,
                "logprobs": work["logprobs"].tolist()}

    return {"versions": {}}, {"prepare": prepare, "step": step}


if __name__ == "__main__":
    serve(make)
