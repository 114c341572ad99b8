"""`kvbench.generate`: generation by kvbench's loop, which supports all policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvbench.engine.generate import Generation, generate_tokens
from kvbench.engine.sampling import TokenSampler
from kvbench.errors import UsageError
from kvbench.models.given import borrowed
from kvbench.models.prompts import end_tokens, stop_test
from kvbench.models.tokens import Encoder, encode
from kvbench.policies.policy import Policy
from kvbench.run.sampling import Sampling, check_samples


def generate(
    model: PreTrainedModel,
    prompt: Tensor | str,
    policy: Policy,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    attention_mask: Tensor | None = None,
    max_new_tokens: int = 128,
    min_new_tokens: int = 0,
    stop: Sequence[str] = (),
    context_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    samples: int = 1,
    seed: int = 0,
    question: int | Sequence[int] | None = None,
) -> Generation:
    """Generate with any policy, including policies with a pre-pass, and audit the cache at the end.

    prompt: token ids [B,T], left-padded where attention_mask [B,T] is 0, or a text. tokenizer: needed for a text, for
    pre-passes with text (KVzip) and for `stop`, strings that end an answer. context_tokens: number of tokens to
    compress; the rest is a question that is appended after compression. question: number of tokens before the question
    in a prompt that is compressed as a whole, for policies that need it (FINCH); one number or one per sequence.
    temperature: above 0, tokens are sampled from the `top_k` most likely ones and the `top_p` nucleus, with separate
    random numbers for each (seed, row of the prompt, sample). samples: number of answers per row, which are adjacent in
    the result. Returns the new `tokens` and the `cache`.
    Raises ValueError for a wrong value, BudgetError if the cache exceeds the budget.
    """
    if tokenizer is None and (isinstance(prompt, str) or stop):
        raise UsageError(f"tokenizer= is missing, {'a text' if isinstance(prompt, str) else 'stop='} needs it")
    if isinstance(prompt, str):
        assert tokenizer is not None
        prompt = torch.tensor([encode(tokenizer, prompt)])
    how: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "eos_token_ids": _ends(model, tokenizer, stop),
        "stop": None if tokenizer is None else stop_test(tokenizer, stop),
        "min_new_tokens": min_new_tokens,
        "context_tokens": context_tokens,
    }
    sampling = Sampling(temperature, top_p, top_k)
    check_samples(sampling, samples)
    if not sampling.greedy:
        how["draws"] = [
            TokenSampler(sampling, seed, row, sample) for row in range(len(prompt)) for sample in range(samples)
        ]
    prompt = prompt.repeat_interleave(samples, 0)
    if isinstance(question, Sequence):
        question = [place for place in question for _ in range(samples)]
    mask = None if attention_mask is None else attention_mask.to(model.device).repeat_interleave(samples, 0)
    with borrowed(model):
        encoder = None if tokenizer is None else Encoder(tokenizer)
        return generate_tokens(
            model, prompt.to(model.device), policy, attention_mask=mask, question=question, encoder=encoder, **how
        )


def _ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, stop: Sequence[str]) -> list[int]:
    """Ids that end an answer; without a tokenizer, the ids in the model's generation config."""
    if tokenizer is not None:
        return end_tokens(model.generation_config, tokenizer, stops=stop)
    named = model.generation_config.eos_token_id if model.generation_config is not None else None
    return named if isinstance(named, list) else [] if named is None else [named]
