"""Expected attention: tokens that queries of the same distribution, further on, would attend to."""

import math

import pytest
import torch
from kv_crafted import Crafted, drawn, rankings
from kvpress_kept import assert_same, presses
from torch import Tensor

from kvbench import make_policy

DIM, BASE = 8, 10000.0


def turned(x: Tensor, position: int, back: bool = False) -> Tensor:
    """A vector [8] rotated at a position as Llama does it, i with i + 4; back: that undone."""
    out = x.clone()
    for i in range(DIM // 2):
        angle = position / BASE ** (2 * i / DIM) * (-1 if back else 1)
        out[i] = x[i] * math.cos(angle) - x[i + 4] * math.sin(angle)
        out[i + 4] = x[i + 4] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def by_hand(q: Tensor, k: Tensor, v: Tensor, future: int, sinks: int, covariance: bool) -> list[list[float]]:
    """Scores of every KV head's tokens after the sinks, query by query and future position by position."""
    group, tokens = q.shape[0] // k.shape[0], k.shape[1]
    scores = []
    for head in range(k.shape[0]):
        shares = [0.0] * (tokens - sinks)
        for own in q[head * group : (head + 1) * group]:
            before = [turned(own[t], t, back=True) for t in range(sinks, tokens)]
            mean = torch.stack(before).mean(0)
            spread = sum(torch.outer(x - mean, x - mean) for x in before) / len(before)
            matrices = [
                torch.stack([turned(e, t) for e in torch.eye(DIM, dtype=q.dtype)], dim=1)
                for t in range(tokens, tokens + future)
            ]
            rotation = torch.stack(matrices).mean(0)
            mean, spread = rotation @ mean, rotation @ spread @ rotation.T
            logits = [float(mean @ x) / math.sqrt(DIM) for x in k[head, sinks:]]
            if covariance:
                logits = [z + float(x @ spread @ x) / (2 * DIM) for z, x in zip(logits, k[head, sinks:], strict=True)]
            total = sum(math.exp(z) for z in logits)
            shares = [share + math.exp(z) / total / group for share, z in zip(shares, logits, strict=True)]
        scores.append([share * float(x.norm()) for share, x in zip(shares, v[head, sinks:], strict=True)])
    return scores


@pytest.mark.parametrize("covariance", [True, False])
def test_scores_are_those_of_queries_with_the_same_moments_further_on(covariance: bool) -> None:
    q, k, v = drawn(19, 4, 2)
    layer = Crafted(make_policy("expected_attention", 10, future=5, covariance=covariance), 4, 2)
    with rankings() as seen:
        layer.call(q, k, v)
    for head, expected in enumerate(by_hand(q[0], k[0], v[0], 5, 4, covariance)):
        assert seen[0].scores(head=head)[4:] == pytest.approx(expected, rel=1e-4)


def test_a_decoded_query_counts_from_then_on() -> None:
    """With a budget for the whole text but one token, that is the lowest of all queries' scores."""
    q, k, v = drawn(12, 2, 1)
    layer = Crafted(make_policy("expected_attention", 11, future=3), 2, 1, prompt_length=11)
    layer.call(q[:, :, :11], k[:, :, :11], v[:, :, :11])
    layer.call(q[:, :, 11:], k[:, :, 11:], v[:, :, 11:])
    scores = by_hand(q[0], k[0], v[0], 3, 4, covariance=True)[0]
    lost = 4 + scores.index(min(scores))
    assert layer.kept() == [tuple(i for i in range(12) if i != lost)]


def test_moments_of_large_means_do_not_cancel() -> None:
    q, k, v = (x.float() for x in drawn(60, 1, 1))
    large = torch.stack([turned(turned(x, t, back=True) / 100 + 300, t) for t, x in enumerate(q[0, 0])])[None, None]
    layer = Crafted(make_policy("expected_attention", 20), prompt_length=60)
    for some in zip(*(x.split(7, 2) for x in (large, k, v)), strict=True):
        layer.call(*some)
    memory = layer.cache.group.layers[0].memory
    exact = torch.stack([turned(x.double(), t, back=True) for t, x in enumerate(large[0, 0])])[4:]
    expected = (exact - exact.mean(0)).T @ (exact - exact.mean(0))
    torch.testing.assert_close(memory["scatter"][0, 0].double(), expected, rtol=0.05, atol=1e-3)
    assert memory["count"].tolist() == [56]


def test_kvpress_keeps_the_same() -> None:
    kvpress = presses()
    cases = [
        ({}, {}),
        ({"covariance": False}, {"use_covariance": False}),
        ({"future": 32, "epsilon": 0.02}, {"n_future_positions": 32, "epsilon": 0.02}),
        ({"values": False, "sinks": 2}, {"use_vnorm": False, "n_sink": 2}),
    ]
    for ours, theirs in cases:
        assert_same("expected_attention", kvpress.ExpectedAttentionPress(**theirs), 35, 90, **ours)
