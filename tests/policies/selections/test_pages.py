"""Pages of engines: the rule by hand and recorded, sets for all heads, the bytes of pages, and what is refused."""

from typing import Any

import pytest
import torch
from golden import cases
from kv_crafted import observed
from kv_models import prompt, tiny
from kv_runs import run_greedy

from kvbench import KVCache, make_policy
from kvbench.policies.ranking import Ranking, protected
from kvbench.policies.scorers.value_key_ratio import ValueKeyRatio
from kvbench.policies.selections.pages import Pages
from kvbench.policies.stores.paged import Paged


def ranked(scores: torch.Tensor, first: int = 0, newest: int = 0) -> Ranking:
    """A whole prompt with scores [H,T]."""
    tokens = scores.shape[-1]
    positions, seen = torch.arange(tokens).expand(1, *scores.shape), torch.tensor([tokens])
    stays = protected(positions, seen, [first], [newest])
    return Ranking(scores[None], None, positions, stays, seen, packed=True, ascending=True)


def kept(pages: Pages, ranking: Ranking, budget: int) -> torch.Tensor:
    """Positions that the first head keeps, of the best whole pages."""
    ranking = pages.rank(ranking)
    number = budget // pages.length if pages.rounding == "down" else -(-budget // pages.length)
    counts = pages.counts(ranking, torch.tensor([number]))
    chosen = ranking.select(counts)[0]
    assert pages.heads == "own" or bool((chosen == chosen[:1]).all())
    return chosen[0].nonzero().flatten()


def test_protected_pages_come_first_and_ties_go_to_the_older_page() -> None:
    flat = ranked(torch.zeros(2, 130), first=4, newest=20)
    held = kept(Pages(), flat, 64)
    assert sorted(set((held // 16).tolist())) == [0, 6, 7, 8]
    assert len(held) == 50  # the newest page has two tokens
    assert sorted(set((kept(Pages(), flat, 80) // 16).tolist())) == [0, 1, 6, 7, 8]
    with pytest.raises(ValueError, match="4 pages of 16 tokens hold tokens that are always kept"):
        kept(Pages(), flat, 63)


def test_layers_share_standardised_scores() -> None:
    """Layer 0 is ten times as large and would decide alone; standardised, both prefer tokens 0 and 1, then 3."""
    pages = Pages(length=1, unit="token", heads="model")
    large, small = torch.tensor([[30.0, 10, 0, 20]]), torch.tensor([[1.0, 3, 0, 0]])
    both = pages.rank_of_all([pages.rank(ranked(x)) for x in (large, small)])
    z = [(x - x.mean()) / x.std(unbiased=False) for x in (large, small)]
    torch.testing.assert_close(both[0].scores[0], (z[0] + z[1]) / 2)
    assert torch.equal(both[0].scores, both[1].scores)


def test_the_recorded_rule() -> None:
    for case in cases("pages_rule.npz"):
        pages = Pages(length=case["page"], reduce=case["reduce"], rounding=case["round"])
        ranking = ranked(case["score"], case["sinks"], case["recent"])
        own = pages.rank(ranking).scores[0, 0, :: case["page"]]
        torch.testing.assert_close(own.double(), case["page_score"], rtol=1e-5, atol=1e-5)
        held = kept(pages, ranking, case["budget"])
        assert sorted(set((held // case["page"]).tolist())) == case["kept_pages"].tolist()
        assert len(held) == int(case["kept_tokens"])


def test_chunkkv_of_kvpress_keeps_the_same_whole_pages() -> None:
    for case in cases("pages_chunkkv.npz"):
        for score, expected in zip(case["score"], case["kept"], strict=True):
            held = kept(Pages(length=case["page"]), ranked(score), case["budget"])
            assert held.tolist() == sorted(expected[0].tolist()), case["name"]


LENGTH, BUDGET, NEW = 70, 48, 40
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("paged_knorm", {}),
    ("paged_h2o", {"store.free": "page"}),
    ("paged_h2o", {"heads": "own", "store.free": "page"}),
    ("paged_knorm", {"unit": "token", "every": 1, "store.free": "page"}),
    ("paged_h2o", {"unit": "token", "heads": "own", "store.free": "page"}),
    ("paged_snapkv", {"unit": "token", "heads": "model", "window": 8}),
    ("paged_tova", {"heads": "model"}),
    ("paged_snapkv", {"rounding": "up", "window": 8}),
    ("pagedeviction", {}),
]


@pytest.mark.parametrize(("slug", "fields"), SETTINGS, ids=str)
def test_the_cache_holds_such_sets_and_counts_whole_pages(slug: str, fields: dict[str, Any]) -> None:
    model, policy = tiny(), make_policy(slug, BUDGET, **fields)
    run = run_greedy(model, [prompt(LENGTH)], policy, NEW)
    protects = slug != "paged_knorm" and slug != "paged_tova"  # else the newest page may go before it is full
    pages, store, grows = policy.selection, policy.store, policy.schedule.decode == "grow"
    assert isinstance(pages, Pages)
    assert isinstance(store, Paged)
    for call, layers in enumerate(run.of_row(0)):
        seen = LENGTH + call
        heads = [set(head) for layer in layers for head in layer]
        if pages.heads == "model":
            assert all(head == heads[0] for head in heads)
        if pages.heads == "layer":
            assert all(set(layer[0]) == set(head) for layer in layers for head in layer)
        whole = [{position // 16 for position in head} for head in heads]
        if pages.unit == "page" and (call == 0 or protects):
            assert list(map(len, heads)) == [sum(min(16, seen - 16 * page) for page in own) for own in whole]
        most = BUDGET + (policy.schedule.every - 1 if not grows else call)
        assert max(map(len, heads)) <= most
    assert isinstance(run.cache, KVCache)
    for layer, held in zip(run.cache.sequence.layers, run.of_row(0)[-1], strict=True):
        tokens = max(map(len, held))
        pages_held = -(-tokens // 16) if store.free == "compact" else len({p // 16 for head in held for p in head})
        memory = layer.store.memory
        slots = memory["keys"].shape[:3].numel()
        counted = sum(x.nbytes for x in memory.values()) - layer.spare_nbytes
        assert counted == sum(x.nbytes for x in memory.values()) // slots * 16 * pages_held * len(held)


def test_value_over_key_norm() -> None:
    keys, values = torch.tensor([[[[3.0, 4], [0, 2]]]]), torch.tensor([[[[0.0, 10], [6, 8]]]])
    assert ValueKeyRatio().score(observed(keys, values=values), {}).tolist() == [[[2.0, 5.0]]]


def test_a_budget_below_the_pages_of_protected_tokens_is_refused() -> None:
    make_policy("paged_snapkv", 48)  # 32 newest tokens may lie in three pages
    with pytest.raises(ValueError, match="in up to 3 pages"):
        make_policy("paged_snapkv", 47)
