"""The centroid reader against numbers computed by hand."""

import torch
from centroid import Centroid

from kvbench.policies.readers.reader import Reading


def test_a_score_is_the_product_of_mean_key_and_mean_query() -> None:
    keys = torch.tensor([[[[1.0, 0.0], [3.0, 0.0], [0.0, 2.0], [0.0, 0.0]]]])  # the last slot is empty
    present = torch.tensor([[[[True, True], [True, False]]]])
    reader = Centroid(page=2)
    summaries = reader.summarise(keys.unflatten(2, (2, 2)), present)
    torch.testing.assert_close(summaries["mean"], torch.tensor([[[[2.0, 0.0], [0.0, 2.0]]]]))
    queries = torch.tensor([[[[1.0, 0.0]], [[0.0, 3.0]]]])  # two query heads of one KV head: their mean is (0.5, 1.5)
    positions = torch.tensor([[[0, 1, 2, -1]]])
    score = reader.score(
        Reading(0, queries, keys, positions, summaries, visible=positions >= 0, scaling=1.0, softcap=None)
    )
    torch.testing.assert_close(score, torch.tensor([[[1.0, 3.0]]]))
