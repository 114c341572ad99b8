"""A policy that evicts nothing is the full cache: in every dtype, whatever route its attention takes.

H2O, RoCo and D2O take their attention out of rows they sum up, TOVA and CAKE out of the newest row; `full` asks
PyTorch's own kernel. In float32 the two agree to rounding. In 16 bits the weights of a row are rounded where PyTorch
may keep them wider: there a prompt is read by PyTorch's kernel for all, and logits after a newest row differ by a few
units of the last place of the values.
"""

from __future__ import annotations

import pytest
import torch
from kv_models import prompt, tiny
from kv_presets import kinds
from transformers import PreTrainedModel

from kvbench import KVCache, make_policy

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Largest difference of logits, in their standard deviation; a token that is missing moves them by about 1."""
ABOVE, LENGTH, NEW = 400, 70, 3


def logits(model: PreTrainedModel, slug: str) -> torch.Tensor:
    """Of a prompt's last token and those decoded after it."""
    ids = torch.tensor([prompt(LENGTH + NEW)])
    policy = make_policy("full") if slug == "full" else make_policy(slug, ABOVE)
    cache = KVCache(model.config, policy, prompt_length=LENGTH, question=LENGTH - 6)
    with torch.inference_mode():
        found = [model(ids[:, :LENGTH], past_key_values=cache).logits[:, -1]]
        found += [model(ids[:, i : i + 1], past_key_values=cache).logits[:, -1] for i in range(LENGTH, LENGTH + NEW)]
    return torch.cat(found).double()


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_logits_are_those_of_the_full_cache(dtype: torch.dtype) -> None:
    model = tiny("llama", dtype=dtype)
    model.set_attn_implementation("kvbench")
    expected = logits(model, "full")
    for slug in kinds():
        if make_policy(slug, ABOVE).pre_pass is None:
            apart = float((logits(model, slug) - expected).abs().max() / expected.std())
            assert apart <= TOLERANCE[dtype], f"{slug}: {apart}"
