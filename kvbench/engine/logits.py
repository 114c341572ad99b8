"""Calls of the model, and the likelihood of given tokens under its logits.

Shapes: B batch, M new tokens, T prompt tokens, V vocabulary, D hidden size.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from kvbench.cache.cache import KVCache
from kvbench.cache.pre_passes import rate

NOT_A_NUMBER = (
    "the model's logits are not numbers (NaN, infinite, or all of them -inf): its weights, or its arithmetic in this "
    "dtype, overflow"
)
"""-inf is allowed for some tokens, which a model masks; then the largest logit is finite."""
GIVEN_TOKENS = 512  # given tokens of one call: more is hardly faster and hides the progress
LOGITS_AT_ONCE = 2**24  # 64 MiB of float32: the logits of a long prompt are never in memory at once


def next_logits(model: PreTrainedModel, ids: Tensor, positions: Tensor, cache: Cache) -> Tensor:
    """The logits [B,V] after new tokens, ids [B,M] at positions [B,M]."""
    return all_logits(model, ids, positions, cache, keep=1)[:, -1]


def all_logits(model: PreTrainedModel, ids: Tensor, positions: Tensor, cache: Cache, keep: int = 0) -> Tensor:
    """The logits [B,M,V] after each of the new tokens ids [B,M] at positions [B,M]. keep: only the last ones."""
    positions = positions.to(ids.device)
    logits: Tensor = model(
        input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=keep
    ).logits
    return logits


def fitting(model: PreTrainedModel, rows: int = 1) -> int:
    """Tokens of each row of a call whose logits fit into `LOGITS_AT_ONCE`."""
    return max(1, LOGITS_AT_ONCE // (rows * int(model.config.get_text_config(decoder=True).vocab_size)))


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
            for row, sequence in enumerate(cache.sequences):
                rate(sequence, logits[row : row + 1], part[row : row + 1])
        positions = torch.arange(place, place + part.shape[1], device=part.device).expand_as(part)
        out = all_logits(model, part, positions, cache, keep)
        place, logits = place + part.shape[1], out[:, -1]
        yield out


def prompt_ratings(
    model: PreTrainedModel, output: BaseModelOutputWithPast, ids: Tensor, rate: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """The result of `rate` (logits [...,V], tokens [...]) for every token of prompts ids [B,T]: [B,T] float32.

    output: of the model's base for these prompts. A prompt's first token has no logits before it and gets 0.
    """
    hidden = output.last_hidden_state
    assert hidden is not None
    batch, columns = ids.shape
    ratings = torch.zeros(batch, columns, device=hidden.device)
    at_once = fitting(model, batch)
    for start in range(0, columns - 1, at_once):
        end = min(start + at_once, columns - 1)
        logits = head_logits(model, type(output)(last_hidden_state=hidden[:, start:end]))
        ratings[:, start + 1 : end + 1] = rate(logits, ids[:, start + 1 : end + 1])
    return ratings


def base_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its head, also for models whose `base_model` is the model itself."""
    base: PreTrainedModel = model.base_model  # type: ignore[assignment]
    if base is not model:
        return base
    return next(part for part in model.children() if isinstance(part, PreTrainedModel))


def head_logits(model: PreTrainedModel, output: BaseModelOutputWithPast) -> Tensor:
    """The logits [B,n,V] of last hidden states [B,n,D], including the model's soft cap and scale.

    output: of the same type as the output of the model's base. The model's whole `forward` runs with a base that
    returns this output, so that every head works without code for it here.
    """
    base = base_of(model)
    replaced = base.__dict__.get("forward")
    base.forward = lambda *args, **kwargs: output
    try:
        logits: Tensor = model.forward(inputs_embeds=output.last_hidden_state, use_cache=False).logits
        return logits
    finally:
        del base.forward
        if replaced is not None:
            base.forward = replaced
