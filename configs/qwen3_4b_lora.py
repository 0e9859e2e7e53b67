"""Qwen3-4B by adapters, on BFCL V3 multi-turn: 32 tasks x 16 rollouts of up to 12,288 tokens.

Plan:     python -m experiments.memory_plan --config configs/qwen3_4b_lora.py --topology v5e:2x4
Takes:    6 minutes on two busy cores; needs libtpu, and no TPU
Shows:    14.0 GB of 16.9 on each of eight v5e chips, 17 % free; an update needs 78 x 10^15 FLOPs,
          and computes 48 x 10^15 again

To train, give the folder of the model itself: --set policy.path=FOLDER.
"""

from ml_collections import ConfigDict

from configs import qwen3_4b


def get_config() -> ConfigDict:
    config = qwen3_4b.get_config()
    config.policy.lora = ConfigDict(dict(rank=16, alpha=32.0))
    config.rollout_weights = "trained"  # they are bfloat16 as the file has them
    config.sampler.kv_bytes = 6_000_000_000
    config.optimizer.lr = 2e-5
    return config
