"""CAKE's worked example: six tokens, an observation window of two, two query heads of one KV head.

Attention rows are given; a softmax has them where key t is the unit vector e_t and a query holds their logarithms.
"""

from dataclasses import replace

import kv_crafted
import torch
from torch import Tensor

from kvbench.policies.observation import Observation, Phase, QueryWindow

NONE = 1e-30  # stands for an attention weight of 0, which a softmax cannot give
HEADS = (
    ((1 / 2, 1 / 4, 1 / 8, 0, 1 / 8, 0), (1 / 4, 1 / 4, 1 / 4, 1 / 8, 0, 1 / 8)),
    ((0, 1 / 2, 1 / 4, 1 / 8, 1 / 8, 0), (0, 0, 1 / 2, 1 / 4, 0, 1 / 4)),
)
"""[query head][query at position 4, 5][key]"""


def observed(rows: Tensor, positions: list[int] | None = None, phase: Phase = "prompt", budget: int = 4) -> Observation:
    """One layer, one KV head, where the newest queries pay the attention rows [H_q,W,T] to tokens at positions [T]."""
    at = torch.arange(rows.shape[2]) if positions is None else torch.tensor(positions)
    queries = rows.double().clamp(min=NONE).log()[None]
    keys = torch.eye(len(at), dtype=torch.float64).expand(1, 1, -1, -1)
    seen = kv_crafted.observed(
        keys, queries, at.expand(1, 1, -1), phase=phase, budgets=(budget,), packed=True,
        ascending=positions is None or sorted(positions) == positions,
    )  # fmt: skip
    return replace(seen, window=QueryWindow(queries, seen.query_positions))


def example_a() -> Observation:
    return observed(torch.tensor(HEADS))
