"""RODS on the embedded toolbox suite, sized for one CPU core.

Command:  make quickstart      (both arms side by side, one core each)
     or:  python -m experiments.train --config configs/quickstart.py
          ... --set synthesis_on=False        the static baseline
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    steps, minibatches = 130, 2
    return ConfigDict(dict(
        seed=0,
        steps=steps,
        tasks_per_step=16,
        group_size=16,
        minibatches=minibatches,
        batch=dict(rows=8, prompts=4),
        tasks=dict(suite="toolbox", seeds=100, held_in=400),
        policy=dict(source="compact", d_model=128, n_layers=3, n_heads=4, n_kv_heads=4, d_ff=384,
                    slots=16),
        warm_start=dict(traces=150, wordings=16, passes=48, batches=10, rows=4, lr=2e-3,
                        weight_decay=0.3, hide=0.15),
        sampler=dict(slots=64, max_len=192, prompt_len=64, max_new=16, sharers=16, prompts=6,
                     prefill=((2, 64),), extend=((64, 16),), page=64, prompt_page=64,
                     cache_sizes=(0.5,), straggler_share=0.15),
        engine=dict(max_steps=6),
        # Hot rollouts: a policy sure of its errors shows GRPO nothing to choose from.
        update=dict(temperature=1.4),
        optimizer=dict(lr=4e-4, warmup=8, decay_steps=steps * minibatches, final_share=0.1),
        pool=dict(capacity=512, p_max=400, retire_silent=True),
        # An epoch of a hundred seeds is seven steps and grows with the pool: too few epochs fit
        # into minutes, so admission goes by steps instead.
        admit_every=2,
        curriculum=dict(stages=(dict(steps=None, reward="progress", synthesis=True),)),
        eval=dict(every=26),
    ))
