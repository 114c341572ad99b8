"""Compactor: leverage and non-causal attention, added up without the tokens that stay."""

import torch
from kv_crafted import Ranked, rankings
from kv_models import prompt
from kvpress_kept import FAMILIES, policy_keeps, press_scores, presses, rank_correlation, small

from kvbench import make_policy

LENGTH, FIRST, NEWEST = 90, 8, 4
INNER = slice(FIRST, LENGTH - NEWEST)


def ranked(family: str, slug: str, budget: int = 45, **fields: object) -> list[Ranked]:
    with rankings() as seen:
        policy_keeps(small(family), prompt(LENGTH), make_policy(slug, budget, **fields))
    return seen


def test_the_share_of_the_leverage_is_the_share_evicted() -> None:
    """Scores are linear in lambda, which is 1 - 45 / 90 by itself."""
    none, own, whole = (ranked("llama", "compactor", blend=blend) for blend in (0, None, 1))
    for a, b, c in zip(none, own, whole, strict=True):
        middle = (a.ranking.scores + c.ranking.scores) / 2
        torch.testing.assert_close(b.ranking.scores[..., INNER], middle[..., INNER])


def test_first_and_newest_tokens_stay_and_judge_nothing() -> None:
    """Without a share of leverage the scores are those of noncausal once it judges the same tokens."""
    kept = policy_keeps(small("llama"), prompt(LENGTH), make_policy("compactor", 20))
    assert all({*range(8), *range(86, 90)} <= set(head) for layer in kept for head in layer)
    (found, _) = ranked("llama", "compactor", blend=0)
    inner = found.ranking.scores[..., INNER]
    torch.testing.assert_close(inner.mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(inner.std(), torch.tensor(1.0), atol=1e-5, rtol=0)
    assert int((found.state["attention"] != 0).any(-1)[0, 0].sum()) == LENGTH - 12


def test_kvpress_ranks_alike() -> None:
    kvpress = presses()
    for family in FAMILIES:
        press = kvpress.CompactorPress(compression_ratio=0.5, chunk_size=32)
        theirs = press_scores(small(family), prompt(LENGTH), press)
        for mine, scores in zip(ranked(family, "compactor", chunk=32, official=True), theirs, strict=True):
            assert rank_correlation(mine.ranking.scores[0, :, INNER], scores[:, INNER]) > 0.99
