"""No mask and no logits of all queries by all slots: a prefill's memory grows with the prompt, not with its square."""

import pytest
import torch
from kv_models import tiny
from live_bytes import Live

from kvbench import KVCache, make_policy
from kvbench.kernels import prompt, references


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks as small beside these prompts as they are beside long ones."""
    monkeypatch.setattr(prompt, "PAIRS_AT_ONCE", 2**16)
    monkeypatch.setattr(references, "LOGITS_AT_ONCE", 2**16)


def peak(family: str, slug: str, length: int, padded: bool) -> int:
    """Bytes at the peak of a prefill, beyond what is held at its end."""
    model = tiny(family, dtype=torch.float32)
    model.config.max_position_embeddings = 2**15
    model.set_attn_implementation("kvbench")
    ids = torch.randint(1, 512, (2 if padded else 1, length), generator=torch.Generator().manual_seed(0))
    mask = None
    if padded:
        mask = torch.ones_like(ids)
        mask[0, : length // 3] = 0
    cache = KVCache(model.config, make_policy(slug, 64) if slug != "full" else make_policy("full"))
    with torch.inference_mode(), Live() as live:
        model(ids, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return live.peak


@pytest.mark.parametrize(
    ("family", "slug", "padded"), [("llama", "full", True), ("gemma2", "full", False), ("mistral", "h2o", False)]
)
def test_a_prefill_takes_memory_in_proportion_to_its_length(family: str, slug: str, padded: bool) -> None:
    one, two, four = (peak(family, slug, length, padded) for length in (512, 1024, 2048))
    growth = 2.3 * max(two - one, 0) + 2**21  # twice the length, twice the memory: a square would add four times
    assert four - two < growth
    assert four < 4 * 2048 * 2048, "one float for each query and slot of one head"
