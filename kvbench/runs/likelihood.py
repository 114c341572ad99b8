"""How well a model predicts what it is given to read: which policy reads it how, and what its sample says.

Shapes: T tokens of a text or prompt, M of a target, n scored tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache
from kvbench.inference.teacher_forcing import check_blocks, continuation_scores, in_blocks, text_scores
from kvbench.models.prompts import Prompt
from kvbench.policies.policy import Policy
from kvbench.policies.schedule import Blocks
from kvbench.runs.sample import Likelihood


@dataclass(frozen=True)
class Rated:
    """What came of reading one example: see `Likelihood`; the cache as it ended; tokens it was fed; seconds."""

    likelihood: Likelihood
    cache: KVCache
    fed: int
    prefill_seconds: float
    decode_seconds: float | None


def is_read(prompt: Prompt) -> bool:
    """Whether an example's tokens are given and scored, so that nothing is generated."""
    return prompt.target is not None or prompt.example.reading is not None


def reads_whole(prompt: Prompt) -> bool:
    """Whether all tokens but the first are scored, while the policy evicts block by block."""
    reading = prompt.example.reading
    return prompt.target is None and reading is not None and reading.prompt_tokens is None


def policy_for(policy: Policy, prompt: Prompt) -> Policy:
    """The policy as it reads one example: in the blocks its task asks for.

    Raises ValueError where it cannot evict that way, or would evict nothing while tokens are scored.
    """
    block = None if prompt.example.reading is None else prompt.example.reading.block
    if block is not None and policy.evicts:
        try:
            policy = in_blocks(policy, block)
        except ValueError as error:
            instead = " and score what follows a prompt (prompt_tokens)" if reads_whole(prompt) else ""
            raise ValueError(f"block={block}: {error}; leave block out (null){instead}") from error
    if reads_whole(prompt):
        check_blocks(policy)
    return policy


def label(policy: Policy) -> str:
    """What tables say behind a policy that reads whole texts: nothing is decoded, but the size of its blocks counts."""
    if not policy.evicts:
        return ""
    assert isinstance(policy.schedule, Blocks), "policy_for lets no other read a whole text"
    return f"m={policy.schedule.size:g}"


def rate(
    model: PreTrainedModel, prompt: Prompt, policy: Policy, *, report: Callable[[int], None] | None = None
) -> Rated:
    """Read one example and rate what is to be scored of it. report: called with the tokens taken in so far.

    Raises BudgetError if the policy breaks its promise.
    """
    ids = prompt.ids[None].to(model.device, torch.long)
    policy = policy_for(policy, prompt)
    if reads_whole(prompt):
        text = text_scores(model, ids, policy, report=report)
        likelihood = summed_up(text.nll, 1, text.block, text.most_kept)
        return Rated(likelihood, text.cache, ids.shape[1], text.seconds, None)
    if prompt.target is None:
        ids, target = ids[:, : prompt.length], ids[:, prompt.length :]
    else:
        target = prompt.target[None].to(model.device, torch.long)
    scored = continuation_scores(model, ids, target, policy, report=report)
    block = 1 if policy.evicts and policy.schedule.decode == "evict" else None
    likelihood = summed_up(-scored.logprobs, ids.shape[1], block, scored.most_kept)
    fed = ids.shape[1] + target.shape[1] - 1
    return Rated(likelihood, scored.cache, fed, scored.prefill_seconds, scored.decode_seconds)


def summed_up(nll: Tensor, first: int, block: int | None, most_kept: Tensor) -> Likelihood:
    """The likelihood of tokens with -log p `nll` [n], `first` tokens into their text; most_kept [L,H_kv]."""
    sums = nll.double().cumsum(0).tolist()
    end = first + len(sums)
    lengths = sorted({*(2**k for k in range(1, end.bit_length()) if first < 2**k <= end), end})
    return Likelihood(
        nll=sums[-1] / len(sums),
        tokens=len(sums),
        lengths=lengths,
        cumulative=[sums[length - first - 1] / (length - first) for length in lengths],
        block=block,
        max_kept_tokens=most_kept.tolist(),
    )
