"""A question after its context: the policy compresses the context at its end, then the question's tokens are given.

Shapes: B batch, T tokens of a context, M of its question, V vocabulary.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache
from kvbench.cache.group import PolicyGroup
from kvbench.cache.layout import in_one_call
from kvbench.engine.pre_pass import rate_next

CALL = 512  # tokens of a question in one call of the model


class ContextCache(KVCache):
    """A cache whose prompt is a context: what follows is given, and may come several tokens at once."""

    _teacher_forced = True


def parted(ids: Tensor, context_tokens: int) -> tuple[Tensor, Tensor]:
    """Tokens [B,T+M] as contexts [B,T] and questions [B,M]. ValueError where either is empty."""
    if not 0 < context_tokens < ids.shape[1]:
        raise ValueError(
            f"compress=context needs a token before the question and one in it, got {context_tokens} tokens of context "
            f"among {ids.shape[1]} of the prompt"
        )
    return ids[:, :context_tokens], ids[:, context_tokens:]


def take_question(
    model: PreTrainedModel, cache: KVCache, question: Tensor, logits: Tensor, at_once: int = CALL
) -> Tensor:
    """Take the tokens [B,M] in behind a compressed context, at their true positions; logits [B,V] after the last.

    Each is a decoded token to the policy: kept beside the budget where decoding grows, and where decoding evicts one
    goes for each of them. cache: made as a `ContextCache`, with contexts of one length. logits
    [B,V]: those after the context's last token. at_once: so many tokens of each row go into one call at most.
    """
    place, tokens = cache.seen, question.shape[1]
    for part in question.split(min(at_once, *(_call_size(group, cache, tokens) for group in cache.groups)), dim=1):
        rate_next(cache, logits, part)
        positions = torch.arange(place, place + part.shape[1], device=part.device).expand_as(part)
        out = model(input_ids=part, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
        place, logits = place + part.shape[1], out.logits[:, -1]
    return logits


def _call_size(group: PolicyGroup, cache: KVCache, tokens: int) -> int:
    """Tokens of a question that one call takes.

    One, where each must be rated before it is appended, where a store compresses between two calls, and where the model
    would rotate all of a call by the length of the last, or begin its recurrent layers anew.
    """
    policy = group.policy
    one = policy.rates or not policy.store.exact or in_one_call(cache.config, cache.seen + tokens)
    return 1 if one else CALL
