"""Attention matching: a case by hand, the two least squares, and queries that nobody fitted."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from kv_crafted import Crafted, observed
from scipy.optimize import nnls
from torch import Tensor

from kvbench import make_policy
from kvbench.policies.mergers.attention_matching import AttentionMatching, mass_weights
from kvbench.policies.mergers.drop import Drop
from kvbench.policies.mergers.merger import Eviction, Merged


def matched(merger: AttentionMatching, keys: Tensor, values: Tensor, kept: list[int], queries: Tensor) -> Merged:
    """What the kept slots of tokens [T,D] become; queries [W,D] come right behind the tokens that are fitted."""
    tokens = keys.shape[0]
    flags = torch.zeros(1, 1, tokens, dtype=torch.bool)
    flags[..., kept] = True
    asked = queries[None, None]
    places = torch.arange(tokens - len(queries), tokens)[None]
    seen = observed(keys[None, None], asked, recent_queries=asked, recent_positions=places)
    view = 0, "prompt", keys[None, None], values[None, None], seen.positions, {}
    return merger.absorb(Eviction(*view, flags, ~flags, seen), {})


def test_three_equal_keys_become_one_with_their_mass_and_their_mean() -> None:
    """Keys 0, 1 and 2 are equal: one of them stays for all, so w = 3, b = log 3 and its value is the mean of three.

    Key 3 differs and stays: w = 1. The last key belongs to the query, which nobody moves.
    """
    keys = torch.tensor([[1.0, 0], [1, 0], [1, 0], [0, 1], [0, 0]]).double()
    values = torch.tensor([[3.0, 0], [0, 6], [0, 0], [5, 5], [7, 7]]).double()
    queries = torch.tensor([[0.3, -0.2], [-1.0, 0.7], [0.5, 1.0]]).double()
    # three queries at one position, by the query heads of a group
    seen = observed(
        keys[None, None],
        queries[None, :, None],
        recent_queries=queries[None, :, None],
        recent_positions=torch.tensor([[4]]),
    )
    kept = torch.tensor([[[False, True, False, True, True]]])
    view = 0, "prompt", keys[None, None], values[None, None], seen.positions, {}
    merger = AttentionMatching(queries=1, steps=5000, ridge=1e-9)
    found = merger.absorb(Eviction(*view, kept, ~kept, seen), {})
    assert found.slots.tolist() == [[[1, 3, 4]]]
    torch.testing.assert_close(found.bias[0, 0].exp(), torch.tensor([3.0, 1.0, 1.0]), rtol=1e-3, atol=0)
    torch.testing.assert_close(found.values[0, 0], torch.tensor([[1.0, 2], [5, 5], [7, 7]]).double(), rtol=0, atol=1e-2)
    assert torch.equal(found.keys[0, 0], keys[[1, 3, 4]])


def test_weights_are_those_of_the_non_negative_least_squares() -> None:
    """Against scipy's active set method, in the residual that both minimise."""
    random = torch.Generator().manual_seed(0)
    masses = torch.rand(1, 2, 30, 12, generator=random, dtype=torch.float64) ** 4
    real, free = torch.ones(1, 2, 30, 1, dtype=torch.float64), torch.ones(1, 2, 12, dtype=torch.bool)
    found = mass_weights(masses, real, free, steps=20_000)
    for head in (0, 1):
        best, residual = nnls(masses[0, head].numpy(), torch.ones(30).numpy())
        assert (best == 0).any()
        assert float((masses[0, head] @ found[0, head] - 1).norm()) == pytest.approx(residual, rel=1e-6)
        torch.testing.assert_close(found[0, head], torch.tensor(best), rtol=0, atol=1e-3)


def errors(budget: int, **fields: Any) -> tuple[float, float]:
    """Relative error of outputs for queries that nobody fitted, of matching and of plain eviction of the same set."""
    random, tokens, dim = torch.Generator().manual_seed(2), 200, 8
    mean = torch.randn(4, 1, dim, generator=random)
    queries = (mean + 0.5 * torch.randn(4, tokens + 20, dim, generator=random))[None].double()
    keys, values = (torch.randn(1, 2, tokens + 20, dim, generator=random).double() for _ in range(2))
    policy, outs, kept = make_policy("attention_matching", budget, **fields), [], []
    for one in (make_policy("full"), policy, replace(policy, merger=Drop())):
        layer = Crafted(one, 4, 2, prompt_length=tokens)
        layer.call(queries[:, :, :tokens], keys[:, :, :tokens], values[:, :, :tokens])
        kept.append(layer.kept())
        later = [slice(t, t + 1) for t in range(tokens, tokens + 20)]
        outs.append(torch.cat([layer.call(queries[:, :, t], keys[:, :, t], values[:, :, t]) for t in later], dim=2))
    assert kept[1] == kept[2]
    full, matching, plain = outs
    return float((matching - full).norm() / full.norm()), float((plain - full).norm() / full.norm())


@pytest.mark.parametrize("budget", [48, 64, 100])
def test_later_queries_read_less_wrongly_than_after_plain_eviction_of_the_same_tokens(budget: int) -> None:
    matching, plain = errors(budget)
    assert matching < 0.8 * plain


@pytest.mark.parametrize("every", [1, 7])
def test_tokens_that_decoding_evicts_just_go(every: int) -> None:
    """The bias of those that stay is the one that the prompt's end gave them."""
    random = torch.Generator().manual_seed(4)
    queries, keys, values = (torch.randn(1, heads, 120, 8, generator=random) for heads in (4, 2, 2))
    policy = make_policy("attention_matching", 48, decode="evict", every=every)
    layer = Crafted(policy, 4, 2, prompt_length=100)
    store, given = None, {}
    for start, end in ((0, 100), *((t, t + 1) for t in range(100, 120))):
        layer.call(*(x[:, :, start:end] for x in (queries, keys, values)))
        store = layer.cache.layers[0].states[0].store
        now = {int(p): float(b) for p, b in zip(store.positions[0, 0], store.slots.bias[0, 0], strict=True) if p >= 0}
        given = given or now
        assert now == {p: given.get(p, 0.0) for p in now}
    assert any(given.values())
    assert len(now) < 48 + every


def test_tokens_that_not_all_reference_queries_see_stay_as_they_are() -> None:
    random = torch.Generator().manual_seed(5)
    keys, values, queries = (torch.randn(n, 8, generator=random).double() for n in (30, 30, 6))
    found = matched(AttentionMatching(queries=6), keys, values, [2, 7, 11, 24, 25, 29], queries)
    still = (found.values[0, 0] == values[found.slots[0, 0]]).all(-1)
    assert still.tolist() == [False, False, False, False, True, True]  # the first query is the one at 24
    assert (found.bias[0, 0] == 0).tolist() == still.tolist()
