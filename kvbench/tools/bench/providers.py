"""Who is measured: kvbench's policies and, where they are installed, their rivals, behind one small face."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvbench.cache.cache import KVCache
from kvbench.config.presets import make_policy
from kvbench.inference.cuda_graph import check_graph
from kvbench.models.cache_shapes import CacheShape
from kvbench.policies.policy import Policy
from kvbench.terminal.errors import UsageError, refusing
from kvbench.tools.cache_bytes import predict


@dataclass(frozen=True)
class Provider:
    """One way to hold a cache: the attention it runs under, how its cache is made, and what surrounds its prefill.

    cache: (model, prompt length, tokens after it) -> an empty cache. policy: where it is kvbench's. budget: tokens per
    KV head, None where everything is kept. told_positions: its prefill wants the argument `cache_position`. graphed:
    our steps are replays of a CUDA graph; compiled: its steps are a compiled model's.
    """

    name: str
    attention: str
    cache: Callable[[PreTrainedModel, int, int], Cache]
    budget: int | None = None
    policy: Policy | None = None
    prefilling: Callable[[PreTrainedModel], AbstractContextManager[object]] = nullcontext
    told_positions: bool = False
    graphed: bool = False
    compiled: bool = False

    @property
    def grows(self) -> bool:
        """Whether the cache holds every token of the prompt and of the answer."""
        return self.budget is None

    def final_bytes(self, model: PreTrainedModel, length: int, batch: int) -> int | None:
        """Bytes of a cache that never evicts, once `length` tokens are in; None where that cannot be told."""
        if self.policy is None or not self.grows:
            return None
        return predict(self.policy, shape_of(model), length, batch).nbytes


def shape_of(model: PreTrainedModel) -> CacheShape:
    """The shape of a loaded model's cache."""
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return CacheShape(
        config.num_hidden_layers, heads, getattr(config, "num_key_value_heads", None) or heads, dim, model.dtype
    )


def ours(slug: str, budget: int | None, *, graphed: bool = False, **fields: Any) -> Provider:  # noqa: ANN401
    """kvbench's policy `slug`; fields as for `make_policy`. UsageError where it does not exist or cannot be timed."""
    with refusing():
        policy = make_policy(slug, budget, **fields)
    if policy.pre_pass is not None:
        raise UsageError(
            f"policies={slug} cannot be timed here: it needs more than one plain forward pass for its prompt"
        )
    if policy.needs.question:
        raise UsageError(f"policies={slug} cannot be timed here: it asks for a question, which random prompts have not")
    return Provider(
        name=slug,
        attention="kvbench",
        cache=lambda model, prompt, _: KVCache(model.config, policy, prompt_length=prompt),
        budget=budget if policy.evicts else None,
        policy=policy,
        graphed=graphed,
    )


def recordable(slug: str, budget: int | None, device: torch.device) -> bool:
    """Whether the steps of a policy can be recorded as a CUDA graph on this device."""
    policy = ours(slug, budget).policy
    assert policy is not None
    try:
        check_graph(policy, device)
    except ValueError:
        return False
    return True


def held_bytes(cache: Cache) -> int:
    """Bytes of every tensor a cache holds, over all layers; storage that several tensors share counts once."""
    if isinstance(cache, KVCache):
        return cache.nbytes
    storages: dict[int, int] = {}
    for layer in cache.layers:
        for tensor in tensors_in(vars(layer)):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def tensors_in(value: object) -> Iterator[Tensor]:
    """The plain tensors inside nested containers; a wrapper of codes and scales gives its parts."""
    if isinstance(value, Tensor):
        flatten = getattr(value, "__tensor_flatten__", None)
        if flatten is None:
            yield value
        else:
            for name in flatten()[0]:
                yield from tensors_in(getattr(value, name))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in(vars(value))
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def random_ids(model: PreTrainedModel, batch: int, length: int) -> Tensor:
    """A prompt of random tokens [B,T]: the same for every provider."""
    generator = torch.Generator(device=model.device).manual_seed(length)
    words = int(model.config.get_text_config(decoder=True).vocab_size)
    return torch.randint(words, (batch, length), generator=generator, device=model.device)
