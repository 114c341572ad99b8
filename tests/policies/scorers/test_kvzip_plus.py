"""KVzip+ keeps the sets that kvpress keeps."""

import pytest
import torch
from kv_models import CodePoints, prompt, tiny
from kv_runs import kept_now
from kvpress_kept import kvzip_press_keeps

from kvbench import make_policy
from kvbench.engine.generate import generate_tokens

LENGTH, BUDGET = 40, 16


@torch.inference_mode()
@pytest.mark.parametrize("chunk", [24, 2048])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_kept_sets_are_those_of_kvpress(family: str, chunk: int) -> None:
    how = {"kvzip_plus_normalization": True, "chunk_size": chunk}
    expected = kvzip_press_keeps(family, prompt(LENGTH), 1 - BUDGET / LENGTH, **how)
    ours, ids = tiny(family, dtype=torch.float32), torch.tensor([prompt(LENGTH)])
    ours.set_attn_implementation("kvbench")
    policy = make_policy("kvzip_plus", BUDGET, chunk=chunk)
    done = generate_tokens(ours, ids, policy, max_new_tokens=1, encoder=CodePoints())
    assert [[list(head) for head in layer] for layer in kept_now(done.cache)[0]] == expected
