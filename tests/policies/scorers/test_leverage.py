"""Leverage: the diagonal of the matrix that projects on what a head's keys span."""

import torch
from kv_crafted import drawn, observed, rankings
from kv_models import Projects, prompt
from kvpress_kept import FAMILIES, policy_keeps, press_scores, presses, rank_correlation, small
from torch import Tensor

from kvbench import make_policy
from kvbench.policies.scorers.leverage import Leverage


def hat(keys: Tensor) -> Tensor:
    """Leverages of the centred keys [T,D] by the pseudo-inverse."""
    centred = keys - keys.mean(0)
    return (centred @ torch.linalg.pinv(centred)).diagonal()


def scores(keys: Tensor, positions: Tensor | None = None, **fields: float) -> Tensor:
    scorer = Leverage(epsilon=1e-9, **fields)
    return scorer.score(observed(keys, positions=positions, model=Projects()), {})


def test_a_sketch_as_wide_as_the_keys_changes_no_leverage() -> None:
    _, keys, _ = drawn(20, 1, 2)
    expected = torch.stack([hat(head) for head in keys[0]])
    expected = (expected - expected.mean()) / expected.std()
    for seed in (0, 1):
        torch.testing.assert_close(scores(keys, seed=seed)[0], expected, rtol=1e-4, atol=1e-4)


def test_empty_slots_explain_nothing() -> None:
    _, keys, _ = drawn(20, 1, 2)
    places = torch.arange(20).expand(1, 2, -1)
    held = torch.where(places < 15, places, -1)
    torch.testing.assert_close(scores(keys, held)[..., :15], scores(keys[:, :, :15]), rtol=1e-4, atol=1e-4)


def test_kvpress_ranks_alike() -> None:
    kvpress = presses()
    ids = prompt(90)
    for family in FAMILIES:
        model = small(family)
        theirs = press_scores(model, ids, kvpress.LeverageScorePress(compression_ratio=0.5))
        with rankings() as seen:
            policy_keeps(model, ids, make_policy("leverage", 45))
        for mine, press in zip(seen, theirs, strict=True):
            assert rank_correlation(mine.ranking.scores[0], press) > 0.99
