"""Given tokens (teacher forcing): appended in calls of several where the model and the policies allow it.

Shapes: B batch, M given tokens, n of a call, V vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache
from kvbench.engine.logits import all_logits
from kvbench.engine.pre_pass import rate_next

GIVEN_TOKENS = 512  # given tokens of one call: more is hardly faster and hides the progress


def append_given(
    model: PreTrainedModel, cache: KVCache, tokens: Tensor, size: int, logits: Tensor | None, keep: int = 0
) -> Iterator[Tensor]:
    """Append given tokens [B,M] in calls of `size` tokens; yields the logits [B,n,V] of each call.

    Each token counts as decoded: the policy evicts after every one of them if it evicts while decoding. logits [B,V]:
    before the first token, for policies that rate tokens. keep: yield only the logits after the last tokens of a call.
    """
    place = cache.seen
    for part in tokens.split(size, dim=1):
        if logits is not None:
            rate_next(cache, logits, part)
        positions = torch.arange(place, place + part.shape[1], device=part.device).expand_as(part)
        out = all_logits(model, part, positions, cache, keep)
        place, logits = place + part.shape[1], out[:, -1]
        yield out
