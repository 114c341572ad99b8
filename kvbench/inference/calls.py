"""One call of the model.

Shapes: B batch, M new tokens, V vocabulary.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache


def next_logits(model: PreTrainedModel, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: KVCache) -> Tensor:
    """The logits [B,V] after the last of some new tokens, ids [B,M] at positions [B,M]."""
    last: int | Tensor = 1
    if ids.shape[1] > 1 and any(group.policy.readers == "all" for group in cache.groups):
        last = torch.tensor([ids.shape[1] - 1], device=ids.device)  # Gemma 4's readers leave tokens out where it is 1
    out = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions.to(ids.device),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=last,
    )
    logits: Tensor = out.logits[:, -1]
    return logits
