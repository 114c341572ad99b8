"""One call of the model, and the prefill of a prompt by as many calls as its schedule asks for.

Shapes: B batch, M new tokens, T prompt columns (padding included), V vocabulary.
"""

import time
from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache
from kvbench.cache.layout import in_one_call, layout_of
from kvbench.cache.rotary import forget_lengths
from kvbench.engine.pre_pass import pre_pass
from kvbench.policies.pre_passes.pre_pass import TextEncoder


def now(model: PreTrainedModel) -> float:
    """Seconds on a monotonic clock, after the devices have finished what they were given."""
    spread = getattr(model, "hf_device_map", None)
    places: Iterable[torch.device | str | int] = spread.values() if spread else [model.device]
    for device in {torch.device(where) for where in places if where not in ("cpu", "disk")}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter()


def next_logits(model: PreTrainedModel, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: KVCache) -> Tensor:
    """The logits [B,V] after the last of some new tokens, ids [B,M] at positions [B,M]."""
    logits: Tensor = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions.to(ids.device),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits
    return logits[:, -1]


def padding(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """Which columns are real, bool [B,T]; None if all are.

    ValueError if a prompt is empty or padded on the right, where its next token would follow padding.
    """
    if input_ids.shape[1] == 0:
        raise ValueError("a prompt without a token cannot be continued")
    if attention_mask is None or bool(attention_mask.all()):
        return None
    mask = attention_mask.to(torch.bool)
    if not bool(mask[:, -1].all()) or bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise ValueError(
            "attention_mask must mark padding on the left only, so that every prompt ends in the last column"
        )
    return mask


def prefill(
    model: PreTrainedModel,
    input_ids: Tensor,
    mask: Tensor | None,
    cache: KVCache,
    encoder: TextEncoder | None = None,
) -> Tensor:
    """Append the prompt, in the blocks of the cache's schedule; returns the logits after its last column, [B,V].

    A later prompt (`cache.next_prompt`) without padding follows what the cache has seen.
    """
    total = input_ids.shape[1]
    schedule = cache.policy.schedule
    # Padding shifts the blocks of a sequence against the columns: a call would end inside a block.
    shifted = mask is not None and schedule.order == "evict_then_attend"
    whole = shifted or in_one_call(model.config, cache.seen + total)
    size = total if whole else schedule.call_size(total)
    layout = layout_of(cache.config)
    if layout.states:
        # A later prompt goes on by single tokens where several would begin anew; padding is no token of a call's own.
        size = 1 if cache.seen and not layout.continues else size if mask is None else max(2, size)
    if not cache.seen:
        forget_lengths(model)
    positions = torch.arange(cache.seen, cache.seen + total).expand(len(input_ids), -1)
    if mask is not None:
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    logits = None
    for start in range(0, total, size):
        end = min(start + size, total)
        seen = None if mask is None else mask[:, :end]
        with pre_pass(model, cache, input_ids, mask, encoder):
            logits = next_logits(model, input_ids[:, start:end], seen, positions[:, start:end], cache)
    assert logits is not None
    return logits
