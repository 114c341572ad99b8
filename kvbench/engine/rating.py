"""Rating continuations of a compressed context, and whether anything was evicted meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache
from kvbench.cache.pressed import PressedCache, kept_by_layer
from kvbench.engine.teacher_forcing import continuation_scores
from kvbench.models.tokens import Pair
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import TextEncoder


@dataclass(frozen=True)
class Rating:
    """What a model thinks of one continuation: the sum of its log p (nats), and whether greedy decoding writes it."""

    pair: Pair
    logprob: float
    greedy: bool
    cache: KVCache
    prefill_seconds: float
    decode_seconds: float


def rated(model: PreTrainedModel, pair: Pair, policy: Policy, encoder: TextEncoder | None = None) -> Rating:
    """Compress the context as a prompt, then rate its continuation on what the cache holds. Raises BudgetError."""
    context, continuation = (
        torch.tensor([ids], dtype=torch.long, device=model.device) for ids in (pair.context, pair.continuation)
    )
    found = continuation_scores(model, context, continuation, policy, encoder=encoder)
    return Rating(
        pair=pair,
        logprob=float(found.logprobs.double().sum()),
        greedy=bool(found.greedy.all()),
        cache=found.cache,
        prefill_seconds=found.prefill_seconds,
        decode_seconds=found.decode_seconds,
    )


def evicted(cache: KVCache | PressedCache, tokens: int) -> bool:
    """Whether any KV head of a cache of one sequence holds fewer than the tokens that were read, at least `tokens`."""
    return min(int(layer.min()) for layer in kept_by_layer(cache)) < max(tokens, cache.seen)
