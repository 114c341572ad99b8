"""Runs one policy on one prompt for a diagnostic.

Shapes: B batch (always 1), L layers, H_q query heads, H_kv KV heads, T prompt tokens, M tokens of a call, D head dim.
"""

import dataclasses
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache
from kvbench.engine.prefill import prefill
from kvbench.engine.sequence import Request
from kvbench.policies.policy import Policy

Kind = TypeVar("Kind", bound=KVCache)


@dataclass(frozen=True)
class Probe:
    """A model, one prompt [1,T], a policy with its name, and the number of tokens to decode.

    question: the position of the question in the prompt, for policies that need it. request: the example as a run
    answers it. heads: measure KV heads instead of layers.
    """

    model: PreTrainedModel
    ids: Tensor
    policy: Policy
    name: str
    new_tokens: int = 16
    question: int | None = None
    request: Request | None = None
    heads: bool = False

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    def with_budget(self, budget: float) -> "Probe":
        """The same probe with another budget; raises ValueError if the policy does not allow it."""
        return dataclasses.replace(self, policy=dataclasses.replace(self.policy, budget=budget))

    @torch.inference_mode()
    def prefilled(self) -> KVCache:
        """The cache at the end of the prompt."""
        cache = self.cache_of(KVCache)
        prefill(self.model, self.ids, cache)
        return cache

    @torch.inference_mode()
    def follow(self, cache: KVCache, tokens: Tensor | None) -> Tensor:
        """Run the prompt and `tokens` [1,n] (None: greedy decoding) with a cache; returns the tokens [1,n]."""
        logits = prefill(self.model, self.ids, cache)
        fed = []
        for step in range(self.new_tokens):
            token = logits.argmax(-1, keepdim=True) if tokens is None else tokens[:, step : step + 1]
            fed.append(token)
            logits = self.model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1]
        return torch.cat(fed, dim=1)

    def cache_of(self, kind: type[Kind], policy: Policy | None = None) -> Kind:
        """A cache of this class for the prompt."""
        return kind(self.model.config, policy or self.policy, prompt_length=self.length, question=self.question)
