"""The same contexts through kvpress, where it is installed: equal sets, equal answers.

Of models without sliding windows: kvpress's scores look beyond a window, and the mask of a cache that it has cut counts
slots where the model means positions.
"""

from typing import Any

import pytest
import torch
from kv_models import prompt, tiny
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvbench import make_policy
from kvbench.inference.generate import greedy

QUESTION, NEW = 20, 8
WINDOW: dict[str, Any] = {"window_size": 16, "kernel_size": 5}  # and its mean over neighbours, where ours has a maximum
CASES: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("snapkv", {"window": 16, "kernel": 5, "pool": "avg"}, "SnapKVPress", WINDOW),
    ("knorm", {}, "KnormPress", {}),
    ("streamingllm", {}, "StreamingLLMPress", {}),
]


@pytest.fixture(scope="module")
def kvpress() -> Any:
    """The package, which wraps every attention function of transformers as it is imported, ours among them."""
    return pytest.importorskip("kvpress", reason="kvpress is not installed")


@torch.inference_mode()
def pressed(model: PreTrainedModel, press: Any, ids: Tensor, context: int) -> tuple[list[Tensor], list[int]]:
    """The keys of every layer that are left of the context, [H_kv,budget,D], and the answer to the question."""
    cache = DynamicCache()
    with press(model):  # its hooks read `cache_position`, which newer versions of transformers no longer hand on
        model.model(ids[:, :context], past_key_values=cache, cache_position=torch.arange(context))
    keys, tokens, fed, at = [layer.keys[0].clone() for layer in cache.layers], [], ids[:, context:], context
    for _ in range(NEW):
        positions = torch.arange(at, at + fed.shape[1])[None]
        at, fed = at + fed.shape[1], model(fed, past_key_values=cache, position_ids=positions).logits[:, -1:].argmax(-1)
        tokens.append(int(fed))
    return keys, tokens


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
@pytest.mark.parametrize(("context", "budget"), [(160, 40), (97, 48)])
def test_a_context_compressed_here_is_the_one_compressed_there(
    context: int, budget: int, case: Any, family: str, kvpress: Any
) -> None:
    slug, fields, press, its = case
    ids = torch.tensor([prompt(context + QUESTION, seed=context)])
    theirs, ours = tiny(family), tiny(family)
    theirs.set_attn_implementation("sdpa")
    ours.set_attn_implementation("kvbench")
    made = getattr(kvpress, press)(compression_ratio=1 - (budget + 0.5) / context, **its)
    keys, answer = pressed(theirs, made, ids, context)
    done = greedy(
        ours, ids, make_policy(slug, budget, decode="grow", **fields), max_new_tokens=NEW, context_tokens=context
    )
    whole = greedy(ours, ids[:, :context], make_policy("full"), max_new_tokens=1).cache
    for layer, every, left in zip(done.cache.layers, whole.layers, keys, strict=True):
        assert layer.keys is not None
        assert every.keys is not None
        for head in range(left.shape[0]):
            positions = layer.positions[0, head]
            mine = layer.keys[0, head][(positions >= 0) & (positions < context)]
            assert len(mine) == len(left[head]) == budget
            assert torch.cdist(left[head], mine).amin(-1).max() < 1e-6
    assert done.tokens == [answer]
