"""Teacher forcing: the likelihood of given tokens, while the cache holds what a policy keeps.

`score_pair` compresses a prompt and scores the tokens after it; `text_scores` scores a whole text, whose
policy evicts block by block.

Shapes: T tokens of a prompt or text, M of a continuation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache
from kvbench.cache.families import layout_of
from kvbench.engine.logits import GIVEN_TOKENS, append_given, fitting
from kvbench.engine.prefill import prefill_prompts
from kvbench.engine.scores import MostKept, Scores, joined, score
from kvbench.engine.sequence import LiveSequence, Request, script_of
from kvbench.models.devices import now
from kvbench.models.prompt import Prompt
from kvbench.models.tokens import Pair
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import PromptChoice, TextEncoder
from kvbench.policies.schedule import Blocks


@torch.inference_mode()
def score_pair(model: PreTrainedModel, pair: Pair, policy: Policy, encoder: TextEncoder | None = None) -> Scores:
    """Compress a context as generation does, then score its continuation with decoding steps.

    encoder: tokenizer for pre-passes that contain text. Raises BudgetError if the cache holds more than the policy
    allows, ValueError for an empty context or continuation.
    """
    context, continuation = (
        torch.tensor([ids], dtype=torch.long, device=model.device) for ids in (pair.context, pair.continuation)
    )
    script = script_of(context, scored=continuation)
    sequence = LiveSequence(Request(script, continuation.shape[1], encoder=encoder), policy)
    prefill_prompts(model, [[sequence]])
    if sequence.error is not None:
        raise sequence.error
    assert sequence.scores is not None
    sequence.scores.cache.audit()
    return sequence.scores


@torch.inference_mode()
def text_scores(
    model: PreTrainedModel, ids: Tensor, policy: Policy, report: Callable[[int], object] | None = None
) -> Scores:
    """Score every token of a text [1,T] except the first, while the policy evicts after every block of its schedule.

    A block is scored before its eviction, so that its tokens attend to the budget and to up to m - 1 tokens of the
    block. The last logits of a block score the first token of the next, so that each token is scored once. report:
    called with the number of scored tokens after every call.
    Raises BudgetError if the cache holds more than the policy allows, ValueError if the policy evicts nothing before
    the end of the text.
    """
    if len(ids) != 1 or ids.shape[1] < 2:
        raise ValueError(f"one text of at least two tokens is scored at a time, got {list(ids.shape)} tokens")
    check_blocks(policy)
    began = now(model)
    total = ids.shape[1]
    cache = KVCache(model.config, policy, prompt_length=total)
    most = MostKept(cache)
    block = int(policy.schedule.size) if policy.evicts and isinstance(policy.schedule, Blocks) else None
    size = min(GIVEN_TOKENS, fitting(model)) if layout_of(model.config).continues else 1
    size -= size % (block or 1) if (block or 1) <= size else 0
    scored, done = [], 0
    for out in append_given(model, cache, ids, size, None):
        done += out.shape[1]
        following = ids[0, done - out.shape[1] + 1 : done + 1]
        scored.append(score(out[0, : len(following)], following))
        if block is None or done % block == 0 or done == total:
            cache.audit()
        if report is not None:
            report(len(following))
    logprobs, greedy = joined(scored)
    return Scores(logprobs, greedy, cache, most, now(model) - began, block)


# --- examples of a task ----------------------------------------------------------------------------------------------
def policy_for(policy: Policy, prompt: Prompt) -> Policy:
    """The policy with the block size of the example's task.

    Raises ValueError if it cannot evict that way, or would evict nothing while tokens are scored.
    """
    block = None if prompt.example.reading is None else prompt.example.reading.block
    if block is not None and policy.evicts:
        try:
            policy = replace(policy, schedule=Blocks(**{**vars(policy.schedule), "size": block}))
        except ValueError as error:
            instead = " and score what follows a prompt (prompt_tokens)" if prompt.is_whole_text else ""
            raise ValueError(f"block={block}: {error}; leave block out (null){instead}") from error
    if prompt.is_whole_text:
        check_blocks(policy)
    return policy


def check_blocks(policy: Policy) -> None:
    """Raise ValueError unless the policy evicts in blocks that are scored first, or keeps all tokens of a text."""
    instead = "score what follows a prompt instead (prompt_tokens)"
    if not policy.store.exact:
        raise ValueError(f"{policy.name} stores a text in its final form only once it is a whole prompt: {instead}")
    if isinstance(policy.pre_pass, PromptChoice):
        raise ValueError(f"{policy.name} rewrites a whole prompt, so no text can be scored while it is read: {instead}")
    if policy.reader is not None:
        raise ValueError(f"{policy.name} reads less than it holds only while decoding: {instead}")
    if not policy.evicts:
        return
    schedule = policy.schedule
    if not isinstance(schedule, Blocks) or schedule.size == math.inf:
        raise ValueError(
            f"{policy.name} evicts only once the whole text is in (schedule=prompt), so every token would be scored "
            f"with nothing evicted: evict in blocks (block, schedule=blocks), or {instead}"
        )
    if schedule.order != "attend_then_evict" and schedule.size > 1:
        raise ValueError(
            f"{policy.name} evicts a block before it is scored (order=evict_then_attend), which lets later tokens of "
            f"the block decide what earlier ones see: use block=1 or order=attend_then_evict"
        )
