"""A question after its context: the policy compresses the context at its end, then the question's tokens are given.

Shapes: B batch, T tokens of a context, M of its question, V vocabulary.
"""

import copy

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.kv_cache import KVCache
from kvbench.cache.rotary import beyond, uniform_length
from kvbench.cache.rows import RowsCache
from kvbench.inference.surprisal import surprisal
from kvbench.policies.policy import Policy

CALL = 512  # tokens of a question in one call of the model


class ContextCache(KVCache):
    """A cache whose prompt is a context: what follows is given, and may come several tokens at once."""

    teacher_forced = True


def check_context(policy: Policy) -> None:
    """ValueError where a policy cannot compress a context before it has seen anything of the question.

    All others can. What is decided from the last tokens of a prompt (observation windows, TOVA's row, GemFilter's
    choice) is then decided from the last tokens of the context; SirLLM is told the surprisal of the question's tokens.
    """
    if policy.schedule.late:
        raise ValueError(
            f"compress=context compresses before the question is read, but {policy.name} evicts only once a token "
            "after the prompt has attended to all of it (late=true): use compress=prompt"
        )


def parted(ids: Tensor, mask: Tensor | None, context_tokens: int) -> tuple[Tensor, Tensor]:
    """Tokens [B,T+M] as contexts [B,T] and questions [B,M]. ValueError where either is empty, or for padding."""
    if mask is not None:
        raise ValueError("compress=context takes prompts without padding, whose contexts are all of one length")
    if not 0 < context_tokens < ids.shape[1]:
        raise ValueError(
            f"compress=context needs a token before the question and one in it, got {context_tokens} tokens of context "
            f"among {ids.shape[1]} of the prompt"
        )
    return ids[:, :context_tokens], ids[:, context_tokens:]


def forked(cache: KVCache) -> KVCache:
    """The same cache once more, with tensors of its own: each of the two can be asked another question."""
    return copy.deepcopy(cache, {id(part): part for part in (cache.config, cache.policy, cache.error)})


def take_question(
    model: PreTrainedModel, cache: KVCache | RowsCache, question: Tensor, logits: Tensor, at_once: int = CALL
) -> Tensor:
    """Take the tokens [B,M] in behind a compressed context, at their true positions; logits [B,V] after the last.

    Each is a decoded token to the policy: kept beside the budget where decoding grows, and where decoding evicts one
    goes for each of them. cache: of `ContextCache`s all that it stands for, whose contexts are of one length. logits
    [B,V]: those after the context's last token. at_once: so many tokens of each row go into one call at most.
    """
    caches = cache.caches if isinstance(cache, RowsCache) else [cache]
    place = caches[0].seen
    for part in question.split(min(at_once, *(_call_size(one, question.shape[1]) for one in caches)), dim=1):
        for one in caches:
            if one.policy.needs_surprisal:
                one.tell_surprisal(surprisal(logits[:, None], part))
        positions = torch.arange(place, place + part.shape[1], device=part.device).expand_as(part)
        out = model(input_ids=part, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
        place, logits = place + part.shape[1], out.logits[:, -1]
    return logits


def _call_size(cache: KVCache, tokens: int) -> int:
    """Tokens of a question that one call takes.

    One, where each must be rated before it is taken in, where a store compresses between two calls, and where the model
    would rotate all of a call by the length of the last.
    """
    policy, alike = cache.policy, uniform_length(cache.config)
    one = policy.needs_surprisal or not policy.store.exact or beyond(alike, cache.seen + tokens)
    return 1 if one else CALL
