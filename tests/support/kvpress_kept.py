"""What a press of kvpress keeps of a prompt, and what one of our policies keeps of it: positions, layer by layer."""

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kv_models import CodePoints, prompt, tiny
from kv_oracle import Kept
from kv_runs import kept_now
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvbench import KVCache, make_policy
from kvbench.policies.policy import Policy

FAMILIES = ("llama", "qwen3")


def presses() -> Any:
    """kvpress's presses; the test is skipped where kvpress is not installed."""
    return pytest.importorskip("kvpress", reason="kvpress is not installed: its presses cannot be asked")


def small(family: str, layers: int = 2) -> PreTrainedModel:
    """A tiny random model in float32 with two query heads per KV head."""
    return tiny(family, query_heads=4, kv_heads=2, layers=layers, dtype=torch.float32)


@torch.inference_mode()
def press_keeps(model: PreTrainedModel, ids: Sequence[int], press: Any, read: Sequence[int] | None = None) -> Kept:
    """The positions that a press leaves in every layer and KV head, told by the keys that are left.

    read: the prompt with a delimiter token, which the press takes out.
    """
    kept: Kept = []
    compress = type(press).compress

    def noting(self: Any, module: Any, hidden: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Any:
        found = compress(self, module, hidden, keys, values, *rest)
        same = (found[0][0, :, :, None] == keys[0, :, None]).all(-1)  # [H_kv,kept,T]
        assert bool((same.sum(-1) == 1).all()), "two tokens have the same key"
        if getattr(module, "masked_key_indices", None) is not None:  # AdaKV's are held, and masked
            _, heads, masked = module.masked_key_indices
            same[heads, masked] = False
            module.masked_key_indices = None
        kept.append([tuple(sorted(head.nonzero()[:, 1].tolist())) for head in same])
        return found

    model.set_attn_implementation("eager" if model.config.model_type == "gemma2" else "sdpa")
    with patch.object(type(press), "compress", noting), press(model):
        # transformers no longer hands `cache_position` to attention by itself, and presses ask for it.
        new = {"cache_position": torch.arange(len(ids)), "past_key_values": DynamicCache(config=model.config)}
        model(torch.tensor([ids if read is None else read]), **new)
    return kept


@torch.inference_mode()
def policy_keeps(model: PreTrainedModel, ids: Sequence[int], policy: Policy, question: int | None = None) -> Kept:
    """The positions that a policy keeps of a prompt that comes in one call."""
    model.set_attn_implementation("kvbench")
    cache = KVCache(model.config, policy, prompt_length=len(ids), question=question)
    model(torch.tensor([ids]), past_key_values=cache)
    return kept_now(cache)[0]


def assert_same(slug: str, press: Any, budget: int, length: int, **fields: Any) -> None:
    """A preset and a press with its `compression_ratio` keep the same tokens of a prompt, in every family."""
    ids = prompt(length)
    press.compression_ratio = 1 - (budget + 0.5) / length
    for family in FAMILIES:
        model = small(family)
        assert policy_keeps(model, ids, make_policy(slug, budget, **fields)) == press_keeps(model, ids, press), family


@torch.inference_mode()
def press_scores(model: PreTrainedModel, ids: Sequence[int], press: Any) -> list[Tensor]:
    """The scores [H_kv,T] that a press gives in every layer."""
    found: list[Tensor] = []
    score = type(press).score

    def noting(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        found.append(score(self, *args, **kwargs))
        return found[-1].clone()

    with patch.object(type(press), "score", noting):
        press_keeps(model, ids, press)
    return [scores[0] for scores in found]


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Spearman's, of two vectors."""
    ranks = torch.stack([z.flatten().argsort().argsort().double() for z in (x, y)])
    return float(torch.corrcoef(ranks)[0, 1])


class _Tokenizer(CodePoints):
    """The words of a tiny model, as KVzipPress asks for them."""

    chat_template = None

    def encode(self, text: str, **how: object) -> Any:
        return torch.tensor([super().encode(text)], dtype=torch.long)


@torch.inference_mode()
def kvzip_press_keeps(family: str, ids: Sequence[int], ratio: float, **how: Any) -> list[list[list[int]]]:
    """The positions that KVzipPress does not mask, in every layer and KV head of a tiny model in float32."""
    presses()
    from kvpress.presses import kvzip_press as module

    model = tiny(family, dtype=torch.float32)
    model.config = copy.deepcopy(model.config)
    model.set_attn_implementation("sdpa")
    words = SimpleNamespace(from_pretrained=lambda name: _Tokenizer())
    with patch.object(module, "AutoTokenizer", words), module.KVzipPress(ratio, **how)(model):
        model.model(input_ids=torch.tensor([ids]), past_key_values=DynamicCache())
    return not_masked(model, len(ids))


def not_masked(model: PreTrainedModel, tokens: int) -> list[list[list[int]]]:
    """The positions that a press of kvpress left unmasked, in every layer and KV head; the mask is taken away."""
    kept, own = [], range(model.config.num_key_value_heads)
    for layer in model.model.layers:
        _, heads, masked = (x.tolist() for x in layer.self_attn.masked_key_indices)
        layer.self_attn.masked_key_indices = None
        gone = set(zip(heads, masked, strict=True))
        kept.append([[j for j in range(tokens) if (head, j) not in gone] for head in own])
    return kept
