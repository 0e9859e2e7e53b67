"""Qwen2.5-7B, all weights, on BFCL V3 multi-turn: 32 tasks x 16 rollouts of up to 12,288 tokens.

Plan:     python -m experiments.memory_plan --config configs/qwen25_7b.py --topology v5p:2x2x2
Takes:    3 minutes on two cores; needs libtpu, and no TPU
Shows:    46.2 GB of 102.8 on each of eight v5p chips, 55 % free; an update needs 126 x 10^15
          FLOPs, and computes 47 x 10^15 again

To train, give the folder of the model itself: --set policy.path=FOLDER.
"""

from ml_collections import ConfigDict

from configs import qwen3_4b


def get_config() -> ConfigDict:
    config = qwen3_4b.get_config()
    config.policy.path = "configs/models/qwen2.5-7b"
    config.policy.thinking = "template"
    config.rollout_tensor = 1  # neighbours in the mesh of a v5p:2x2x2 are of two hosts
    return config
