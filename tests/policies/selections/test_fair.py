"""Fair eviction keeps floor(n T_1 / T) tokens of the first part and the rest of the second, each by its own queries."""

from typing import Any

import pytest
import torch
from kv_crafted import observed
from kv_models import prompt, tiny
from torch import Tensor
from torch.nn import functional as F

from kvbench import KVCache, make_policy
from kvbench.cache.hook import prepare
from kvbench.engine.generate import generate_tokens
from kvbench.policies.ranking import Ranking
from kvbench.policies.selections.fair import Fair


def test_each_of_two_parts_keeps_its_share() -> None:
    generator = torch.Generator().manual_seed(0)
    for tokens, first in ((30, 10), (29, 7), (12, 11), (10, 5)):
        scores = torch.rand(1, 2, tokens, generator=generator)
        scores[..., :first] += 2 if first % 2 else -2  # by score alone, one part would keep everything
        positions, nothing = torch.arange(tokens).expand(scores.shape), torch.zeros_like(scores, dtype=torch.bool)
        ranking = Ranking(scores, None, positions, nothing, torch.tensor([tokens]), packed=True, ascending=True)
        for keep in range(1, tokens):
            kept = Fair(starts=(0, first)).rank(ranking).select(keep)
            share = keep * first // tokens
            assert kept[..., :first].sum(-1).tolist() == [[share] * 2], (tokens, first, keep)
            best = scores[0, 0, first:].topk(keep - share).indices.sort().values
            assert torch.equal(kept[0, 0, first:].nonzero().flatten(), best)


def test_a_request_names_the_parts() -> None:
    model, policy = tiny(), make_policy("fair_knorm", 30, decode="grow")
    model.set_attn_implementation("kvbench")
    ids = torch.tensor([prompt(60)])
    run = generate_tokens(model, ids, policy, max_new_tokens=1, parts=(0, 20))
    assert isinstance(run.cache, KVCache)
    kept = [(layer.positions >= 0) & (layer.positions < 20) for layer in run.cache.attention_layers]
    assert {int(n) for part in kept for n in part.sum(-1).flatten()} == {10}
    with pytest.raises(ValueError, match="fewer than two"):
        generate_tokens(model, ids, policy, max_new_tokens=1)


def test_without_parts_there_is_no_share() -> None:
    x = torch.zeros(1, 1, 2)
    with pytest.raises(ValueError, match="fewer than two"):
        Fair(starts=(0,)).rank(Ranking(x, None, torch.arange(2).expand(1, 1, 2), x > 0, torch.tensor([2])))


# --- the window of queries, divided among the parts ------------------------------------------------------------------
def by_parts(queries: Tensor, keys: Tensor, first: int, keep: int, window: int, kernel: int) -> list[set[int]]:
    """The rule of the code, in float64: queries [H_q,T,D], keys [H,T,D] -> positions kept by every KV head."""
    group, tokens = len(queries) // len(keys), keys.shape[1]
    logits = queries.double() @ keys.double().repeat_interleave(group, 0).mT
    attention = logits.masked_fill(torch.ones(tokens, tokens).triu(1) > 0, -torch.inf).softmax(-1)
    own = max(1, min(window // 2, first))
    found: list[set[int]] = [set() for _ in keys]
    shares = keep * first // tokens, keep - keep * first // tokens
    for begin, end, size, share in zip(
        (0, first), (first, tokens), (own, max(1, min(window - own, tokens - first))), shares, strict=True
    ):
        voted = attention[:, end - size : end, begin : end - size].mean(1)
        if voted.shape[-1]:
            voted = F.avg_pool1d(voted[None], kernel, 1, kernel // 2)[0].unflatten(0, (-1, group)).mean(1)
        best = range(end - size, end)[:share]  # tokens of the window first
        for head, kept in enumerate(found):
            others = voted[head].topk(share - len(best)).indices if share > len(best) else torch.empty(0)
            kept |= set(best) | {begin + int(place) for place in others}
    return found


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (4, 1)])
def test_each_part_is_scored_by_the_queries_at_its_own_end(heads: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(sum(heads))
    for tokens, first, window in ((40, 17, 8), (40, 17, 7), (31, 3, 8), (31, 28, 8), (20, 10, 40), (33, 1, 4)):
        queries, keys = (torch.randn(n, tokens, 8, generator=generator, dtype=torch.float64) for n in heads)
        seen = observed(keys[None], queries[None], budgets=(64,))
        for keep in range(8, tokens, 5):
            policy = make_policy("fair_snapkv", 64, kernel=3, pool="avg", **{"scorer.window": window})
            object.__setattr__(policy.selection, "starts", (0, first))
            kept = policy.rank(seen, {}).select(keep)[0]
            found = [set(head.nonzero().flatten().tolist()) for head in kept]
            assert found == by_parts(queries, keys, first, keep, window, 3), (tokens, first, window, keep)


@pytest.mark.parametrize("slug", ["tova", "streamingllm", "h2o", "defensivekv", "ada_snapkv", "critical_snapkv", "rkv"])
def test_the_share_of_a_part_is_exact_with_every_protection(slug: str) -> None:
    model, window = tiny(), {"scorer.window": 8} if slug in ("defensivekv", "ada_snapkv", "critical_snapkv") else {}
    model.set_attn_implementation("kvbench")
    more: dict[str, Any] = {"schedule": "prompt", "decode": "grow", **window}
    policy = make_policy(f"fair_{slug}", 30, **more)
    run = generate_tokens(model, torch.tensor([prompt(60)]), policy, max_new_tokens=1, parts=(0, 20))
    assert isinstance(run.cache, KVCache)
    held = [layer.positions[0] for layer in run.cache.attention_layers]
    first = [int(((head >= 0) & (head < 20)).sum()) for layer in held for head in layer]
    assert sum(first) == 10 * len(first) if policy.allocator.per_head else set(first) == {10}


def test_decoding_keeps_the_shares() -> None:
    model = prepare(tiny())
    policy = make_policy("fair_snapkv", 30, decode="evict", window=8)
    run = generate_tokens(model, torch.tensor([prompt(60)]), policy, max_new_tokens=10, parts=(0, 20))
    assert isinstance(run.cache, KVCache)
    for layer in run.cache.attention_layers:
        for head in layer.positions[0].tolist():
            kept = {position for position in head if position >= 0}
            assert len(kept) == 30
            assert sum(position < 20 for position in kept) == 30 * 20 // 69
