"""One call of the model.

Shapes: B batch, M new tokens, V vocabulary.
"""

from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache


def next_logits(model: PreTrainedModel, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: KVCache) -> Tensor:
    """The logits [B,V] after the last of some new tokens, ids [B,M] at positions [B,M]."""
    out = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions.to(ids.device),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits: Tensor = out.logits[:, -1]
    return logits
