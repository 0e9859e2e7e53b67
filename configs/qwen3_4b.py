"""Qwen3-4B, all weights, on BFCL V3 multi-turn: 32 tasks x 16 rollouts of up to 12,288 tokens.

Plan:     python -m experiments.memory_plan --config configs/qwen3_4b.py --topology v6e:2x4
          (--topology v5p:2x2x2 --set rollout_tensor=1, for neighbours in the mesh are of two hosts)
Takes:    7 minutes on two cores; needs libtpu, and no TPU
Shows:    24.2 GB of 33.6 on each of eight v6e chips, 28 % free (30.2 of 102.8 on v5p); an update
          of 32 x 16 rollouts that fill their 12,288 tokens needs 96 x 10^15 FLOPs, and computes
          48 x 10^15 again

To train, give the folder of the model itself: --set policy.path=FOLDER.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(dict(
        seed=0,
        steps=200,
        tasks_per_step=32,
        group_size=16,
        # Two devices share a prompt, half of its tokens each, and run one rollout each at a time.
        batch=dict(rows=8, length=4096, prompts=4, alone=True),
        platform="tpu",
        mesh=dict(fsdp=4, context=2),
        tasks=dict(suite="bfcl", seeds=400, held_in=80),
        policy=dict(source="hf", path="configs/models/qwen3-4b", thinking="off",
                    compute_dtype="bfloat16", remat="layer"),
        # K/V of two prompts and nine rollouts that fill their length; most are shorter.
        sampler=dict(slots=16, max_len=12288, prompt_len=8192, max_own=4096, max_new=1024,
                     sharers=16, prompts=2, prefill=((1, 512),), extend=((8, 256),), page=128,
                     prompt_page=256, steps=64, kv_bytes=8_000_000_000),
        rollout_weights="bf16",
        rollout_tensor=4,
        update=dict(loss=dict(truncated_importance=2.0)),
        optimizer=dict(lr=1e-6),
        pool=dict(capacity=1024, p_max=400),
        eval=dict(greedy=False),
        checkpoint_every=10,
    ))
