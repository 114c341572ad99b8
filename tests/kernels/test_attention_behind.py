"""A block of queries behind older tokens reads them all, and of its own tokens those up to itself."""

import pytest
import torch
from torch import Tensor

from kvbench.kernels import masked_attention
from kvbench.kernels.masked_attention import attention_behind


def by_hand(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Query by query, head by head: a softmax over the slots up to its own."""
    out = queries.new_empty(*queries.shape[:3], values.shape[-1])
    group, older = queries.shape[1] // keys.shape[1], keys.shape[2] - queries.shape[2]
    for b, h, m in torch.cartesian_prod(*map(torch.arange, queries.shape[:3])).tolist():
        read = slice(0, older + m + 1)
        weights = (keys[b, h // group, read] @ queries[b, h, m] * scaling).softmax(-1)
        out[b, h, m] = weights @ values[b, h // group, read]
    return out


@pytest.mark.parametrize("pairs", [2**22, 64])  # at once; or in pieces of two queries
@pytest.mark.parametrize(("new", "slots"), [(5, 8), (5, 5), (1, 7)])
def test_each_query_reads_the_older_tokens_and_its_own_up_to_itself(
    monkeypatch: pytest.MonkeyPatch, new: int, slots: int, pairs: int
) -> None:
    monkeypatch.setattr(masked_attention, "PAIRS_AT_ONCE", pairs)
    torch.manual_seed(0)
    queries, keys, values = torch.randn(1, 4, new, 6), torch.randn(1, 2, slots, 6), torch.randn(1, 2, slots, 3)
    torch.testing.assert_close(attention_behind(queries, keys, values, 0.3), by_hand(queries, keys, values, 0.3))
