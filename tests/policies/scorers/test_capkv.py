"""CAPKV: leverage of weighted values, against a number worked by hand and kvpress."""

import torch
from kv_crafted import observed
from kv_models import Projects
from kvpress_kept import assert_same, presses

from kvbench.policies.scorers.capkv import CapKV


def test_leverage_among_weighted_values() -> None:
    """Cosines 1 and 0, so weights 1 and e^-5; orthogonal values of length 2: A = diag(1 + 4 w), s = 4 w / (1 + 4 w)."""
    keys, queries = torch.tensor([[[[2.0, 0], [0, 3]]]]), torch.tensor([[[[1.0, 0], [5, 0]]]])
    seen = observed(keys, queries, values=2 * torch.eye(2)[None, None], model=Projects())
    scorer = CapKV(sinks=0, epsilon=0.0)
    scorer.observe(seen, {})
    weights = torch.tensor([[[1.0, 0.0]]]).sub(1).mul(5).exp()
    torch.testing.assert_close(scorer.score(seen, {}), 4 * weights / (1 + 4 * weights))


def test_kvpress_keeps_the_same() -> None:
    kvpress = presses()
    assert_same("capkv", kvpress.CapPress(), 35, 90)
    assert_same(
        "capkv", kvpress.CapPress(tau=2.0, n_sink=2, n_future_positions=32), 50, 90, tau=2.0, sinks=2, future=32
    )
