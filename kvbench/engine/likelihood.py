"""How well a model predicts what it is given to read, and what its sample says of that.

Shapes: T tokens of a text or prompt, M of a target, n scored tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache
from kvbench.engine.reading import policy_for, reads_whole
from kvbench.engine.teacher_forcing import continuation_scores, text_scores
from kvbench.models.prompts import Prompt
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import TextEncoder
from kvbench.results.sample import Likelihood


@dataclass(frozen=True)
class Rated:
    """What came of reading one example: see `Likelihood`; the cache as it ended; tokens it was fed; seconds."""

    likelihood: Likelihood
    cache: KVCache
    fed: int
    prefill_seconds: float
    decode_seconds: float | None


def rate(
    model: PreTrainedModel,
    prompt: Prompt,
    policy: Policy,
    *,
    report: Callable[[int], None] | None = None,
    encoder: TextEncoder | None = None,
) -> Rated:
    """Read one example and rate what is to be scored of it. report: called with the tokens read so far.

    Raises BudgetError if the policy breaks its promise.
    """
    ids = prompt.ids[None].to(model.device, torch.long)
    policy = policy_for(policy, prompt)
    if reads_whole(prompt):
        text = text_scores(model, ids, policy, report=report)
        likelihood = summed_up(text.nll, 1, text.block, text.cache.most_kept)
        return Rated(likelihood, text.cache, ids.shape[1], text.seconds, None)
    if prompt.target is None:
        ids, target = ids[:, : prompt.length], ids[:, prompt.length :]
    else:
        target = prompt.target[None].to(model.device, torch.long)
    scored = continuation_scores(model, ids, target, policy, report=report, encoder=encoder)
    block = (policy.schedule.spare or None) if policy.evicts else None
    likelihood = summed_up(-scored.logprobs, ids.shape[1], block, scored.cache.most_kept)
    fed = ids.shape[1] + target.shape[1] - 1
    return Rated(likelihood, scored.cache, fed, scored.prefill_seconds, scored.decode_seconds)


def summed_up(nll: Tensor, first: int, block: int | None, most_kept: Iterable[Tensor]) -> Likelihood:
    """The likelihood of tokens with -log p `nll` [n], `first` tokens into their text; most_kept: per layer [H_kv]."""
    sums = nll.double().cumsum(0).tolist()
    end = first + len(sums)
    lengths = sorted({*(2**k for k in range(1, end.bit_length()) if first < 2**k <= end), end})
    return Likelihood(
        nll=sums[-1] / len(sums),
        tokens=len(sums),
        lengths=lengths,
        cumulative=[sums[length - first - 1] / (length - first) for length in lengths],
        block=block,
        max_kept_tokens=[heads.tolist() for heads in most_kept],
    )
