"""Attention out of the rows that a statistic sums up: that of all rows at once, and the statistic as it was."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.kernels import softmax_blocks
from kvbench.kernels.attention_moments import attention_moments, attention_moments_ref
from kvbench.kernels.attention_rows import attention_rows
from kvbench.kernels.column_sums import column_sums_blocked, column_sums_ref
from kvbench.kernels.softmax_blocks import Attended


def values_for(call: dict[str, Any], dim: int, dtype: torch.dtype) -> tuple[Tensor, Attended]:
    """Random values, and room for the output over them."""
    batch, heads, slots = call["key_positions"].shape
    values = torch.randn(batch, heads, slots, dim, generator=torch.Generator().manual_seed(slots)).to(dtype)
    return values, Attended(values, values.new_zeros(*call["queries"].shape[:3], dim))


def expected(call: dict[str, Any], values: Tensor) -> Tensor:
    return (attention_rows(**call) @ values[:, :, None].float()).flatten(1, 2)


@pytest.mark.parametrize("at_once", [1, 2**22])
def test_the_output_is_that_of_all_rows_at_once(
    name: str, cases: dict[str, Any], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax_blocks, "LOGITS_AT_ONCE", at_once)
    call = cases[name]
    values, attended = values_for(call, 24, torch.float32)
    sums = column_sums_blocked(**call, attended=attended)
    torch.testing.assert_close(attended.out, expected(call, values), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums, column_sums_ref(**call), rtol=1e-5, atol=1e-5)
    moments_of, attended = values_for(call, 24, torch.float32)
    moments = attention_moments(**call, attended=attended)
    torch.testing.assert_close(attended.out, expected(call, moments_of), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(moments, attention_moments_ref(**call), rtol=1e-5, atol=1e-5)


def test_a_block_computes_little_that_its_queries_do_not_see() -> None:
    queries, keys = torch.randn(1, 2, 700, 4), torch.randn(1, 1, 700, 4)
    places = torch.arange(700)
    blocks = list(softmax_blocks.softmax_blocks(queries, keys, places[None], places[None, None], 0.5))
    computed = sum(weights.numel() for _, weights, _ in blocks)
    assert sum(weights.shape[3] for _, weights, _ in blocks) == 700
    assert computed < 1.2 * 2 * 700 * 701 / 2  # 700 queries at once would take twice what is seen
