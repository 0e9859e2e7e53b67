"""LoRA on a model in Hugging Face form (Llama 3.x, Qwen2.5, Qwen3, SmolLM2), embedded toolbox.

Command:  python -m experiments.train --config configs/hf_lora.py --set policy.path=FOLDER
          (--set platform=gpu or tpu, and policy.compute_dtype=bfloat16, where there is one;
          --set tasks.suite=bfcl for BFCL, whose prompts take up to 5,000 tokens: raise
          sampler.prompt_len to 5120 and sampler.max_len to 8192)
Needs:    pip install safetensors tokenizers jinja2
Then:     python -m experiments.export --config configs/hf_lora.py --set policy.path=FOLDER \
              --checkpoint runs/hf_lora --out FOLDER2

The policy speaks its own chat template. One that thinks before it answers (Qwen3) needs room
for it: --set sampler.max_new=1024 and more, or --set policy.thinking=off. Its weights stay in
the file's dtype; adapters on all seven projections are float32 and all that is trained, so
that the optimizer and a checkpoint hold a few per cent of the model.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(dict(
        seed=0,
        steps=100,
        tasks_per_step=16,
        group_size=8,
        batch=dict(rows=1),
        tasks=dict(seeds=200, held_in=40),
        policy=dict(source="hf", path="models/policy", lora=dict(rank=16, alpha=32.0),
                    remat="layer"),
        sampler=dict(slots=32, max_len=4096, prompt_len=3072, max_new=256, sharers=8, prompts=6,
                     prefill=((1, 512),), extend=((8, 32), (8, 256)), page=64, prompt_page=256,
                     cache_sizes=(0.125, 0.25, 0.5)),
        engine=dict(max_steps=6),
        update=dict(logit_chunk=64),
        optimizer=dict(lr=2e-5),
        pool=dict(capacity=400, p_max=200),
        eval=dict(greedy=False),
        checkpoint_every=10,
    ))
