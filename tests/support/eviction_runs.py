"""What presets keep on a tiny model, to be compared between PyTorch and kernels."""

from typing import Any

import torch
from kv_models import prompt, tiny
from kv_runs import run_generate

from kvbench import make_policy
from kvbench.kernels.jit import use_triton

SYSTEMS: dict[str, dict[str, Any]] = {
    "caote_h2o": {"block": 16},
    "caote_snapkv": {"window": 6, "schedule": "prompt", "gqa": "group_l2"},
    "fastcaote_tova": {"block": 16, "norm_domain": "candidates"},
    "d2o": {},
    "d2o_no_ema": {},
    "snapkv": {"window": 6, "decode": "evict"},
    "tova": {},
    "ada_snapkv": {"window": 6},
}


def kept(slug: str) -> dict[str, Any]:
    """Of two prompts of different lengths in one batch: what is generated and what each head holds after each call."""
    model = tiny(dtype=torch.float32)
    run = run_generate(model, [prompt(45), prompt(38, seed=1)], make_policy(slug, 20, **SYSTEMS[slug]), 5)
    return {"tokens": run.tokens, "kept": run.kept, "kernels": use_triton(model.lm_head.weight)}
