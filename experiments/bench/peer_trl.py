"""One GRPO update the way TRL's GRPOTrainer does it, at its best on a CPU, run by the Python
that has transformers: `python -m experiments.bench.peer_trl FOLDER` (see serve.py).

TRL 1.16 (`_get_per_token_logps_and_entropies`, `_compute_loss`) runs each row of a group whole,
prompt + completion, scores the completion alone, and takes the clipped loss of those log-probs;
its Trainer adds up gradients over micro-batches of rows, clips their norm and steps AdamW. So
does this. TRL itself is not installed or run. Freedoms taken, each in its favour: the head is
one product over the completion (`logits_to_keep`, as in TRL's earlier releases) where 1.16 runs
it in chunks, twice in a training step; the entropies, which TRL takes only for its metrics, are
not taken; nor are other metrics, the reference model, accelerate and the data loader; the
advantages are there before the clock starts; no gradient checkpointing, which TRL turns on;
micro-batches of the rows that update_cases.py says.

float32, sdpa attention, a thread a core, AdamW fused. The loss is TRL's `loss_type="grpo"`:
the mean over rows of the mean over their tokens.
"""

from __future__ import annotations

import dataclasses
import os
import time

import torch
import transformers

from experiments.bench.serve import Commands, serve


@dataclasses.dataclass(frozen=True)
class Work:
    """What one update takes. rows: in a micro-batch."""

    ids_GxL: torch.Tensor
    sampler_GxS: torch.Tensor
    advantage_G: torch.Tensor
    rows: int
    clip: tuple[float, float]
    clip_norm: float


def make(folder: str) -> tuple[dict, Commands]:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa").train()
    at_first = {name: value.clone() for name, value in model.state_dict().items()}
    now: dict = {}

    def prepare(prompt: list[int], completions: list, sampler: list, rewards: list[float],
                eps: float, lr: float, rows: int, clip_low: float, clip_high: float,
                clip_norm: float) -> dict:
        """The weights as they were loaded, an optimizer that has seen nothing, and the work of
        every step from now on."""
        model.load_state_dict(at_first)
        now["optimizer"] = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0,
                                             fused=True)
        reward_G = torch.tensor(rewards)
        now["work"] = Work(
            torch.tensor([prompt + row for row in completions]), torch.tensor(sampler),
            (reward_G - reward_G.mean()) / (reward_G.std(correction=0) + eps), rows,
            (1 - clip_low, 1 + clip_high), clip_norm)
        return {}

    greeting = {"threads": torch.get_num_threads(), "versions": {
        "torch": torch.__version__, "transformers": transformers.__version__}}
    return greeting, {"prepare": prepare,
                      "step": lambda: _step(model, now["optimizer"], now["work"])}


def _step(model, optimizer: torch.optim.Optimizer, work: Work) -> dict:
    """One optimizer step, timed until the parameters are there."""
    group, suffix = work.sampler_GxS.shape
    total, found = torch.zeros(()), []
    start = time.perf_counter()
    optimizer.zero_grad(set_to_none=True)
    for begin in range(0, group, work.rows):
        some = slice(begin, begin + work.rows)
        ids = work.ids_GxL[some]
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False,
                       logits_to_keep=suffix + 1).logits[:, :-1]
        logp = selective_log_softmax(logits, ids[:, -suffix:])
        ratio = torch.exp(logp - work.sampler_GxS[some])
        advantage = work.advantage_G[some, None]
        terms = -torch.min(ratio * advantage, ratio.clamp(*work.clip) * advantage)
        loss = terms.mean(-1).sum() / group
        loss.backward()
        total += loss.detach()
        found.append(logp.detach())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip_norm)
    optimizer.step()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "loss": float(total), "grad_norm": float(norm),
            "logprobs": torch.cat(found).tolist()}


def selective_log_softmax(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """TRL's, in float32: the log-prob of each id, row by row."""
    chosen = logits.gather(-1, ids[..., None])[..., 0]
    return chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])


if __name__ == "__main__":
    serve(make)
