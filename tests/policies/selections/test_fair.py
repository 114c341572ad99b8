"""Fair eviction keeps floor(n T_1 / T) tokens of the first part and the rest of the second, each by score."""

import pytest
import torch
from kv_models import prompt, tiny

from kvbench import KVCache, make_policy
from kvbench.engine.generate import generate_tokens
from kvbench.policies.ranking import Ranking
from kvbench.policies.selections.fair import Fair


def test_each_of_two_parts_keeps_its_share() -> None:
    generator = torch.Generator().manual_seed(0)
    for tokens, first in ((30, 10), (29, 7), (12, 11), (10, 5)):
        scores = torch.rand(1, 2, tokens, generator=generator)
        scores[..., :first] += 2  # by score alone, the first part would keep everything
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
