"""VATP against numbers computed by hand."""

import torch
from vatp import Vatp

from kvbench.policies.observation import AttentionParams, Observation, QueryWindow


def test_with_equal_attention_scores_follow_the_values() -> None:
    queries, keys = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 3, 2)  # logits 0: each of 3 tokens has weight 1/3
    values = torch.tensor([[[[3.0, -4.0], [1.0, 0.0], [6.0, 8.0]]]])  # L1 norms 7, 1, 14
    newest = torch.tensor([[2]])
    seen = Observation(
        layer=0,
        queries=queries,
        query_positions=newest,
        keys=keys,
        values=values,
        positions=torch.tensor([[[0, 1, 2]]]),
        seen=torch.tensor([3]),
        phase="prompt",
        params=AttentionParams(scaling=1.0),
        window=QueryWindow(queries, newest),
    )
    torch.testing.assert_close(Vatp(window=1).score(seen, {}), torch.tensor([[[7 / 3, 1 / 3, 14 / 3]]]))
