"""RODS on the embedded toolbox suite, sized for one CPU core.

Command:  make quickstart      (both arms side by side, one core each)
     or:  python -m experiments.train --config configs/quickstart.py
          ... --set synthesis_on=False        the static baseline
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(dict(
        seed=0,
        steps=60,
        tasks_per_step=32,
        group_size=8,
        minibatches=2,
        rows=16,
        tasks=dict(suite="toolbox", seeds=100, held_in=400),
        policy=dict(source="compact", d_model=128, n_layers=3, n_heads=4, d_ff=384, slots=16),
        warm_start=dict(traces=150, passes=80, batches=8, rows=4, lr=2e-3, weight_decay=0.3, hide=0.15),
        sampler=dict(slots=64, max_len=192, prompt_len=64, chunk=16, max_new=16,
                     prefill_groups=8, cache_buckets=(64, 112)),
        update=dict(),
        optimizer=dict(lr=3e-4, clip_norm=1.0),
        pool=dict(capacity=512, p_max=400),
        boundary=dict(budget=16, quota=4),
        curriculum=dict(stages=(dict(steps=None, reward="progress", synthesis=True),)),
    ))
