"""Attention out of the rows that a statistic sums up: that of all rows at once, and the statistic as it was."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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


@pytest.mark.parametrize("at_once", [1, 2**12, 2**22])
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once_at_the_end(dtype: torch.dtype) -> None:
    call: dict[str, Any] = {
        "queries": torch.randn(1, 4, 40, 8, generator=torch.Generator().manual_seed(1)).to(dtype),
        "keys": torch.randn(1, 2, 40, 8, generator=torch.Generator().manual_seed(2)).to(dtype),
        "query_positions": torch.arange(40)[None],
        "key_positions": torch.arange(40).expand(1, 2, -1),
        "scaling": 0.4,
    }
    values, attended = values_for(call, 8, dtype)
    column_sums_blocked(**call, attended=attended)
    assert attended.out.dtype == dtype
    torch.testing.assert_close(attended.out, expected(call, values).to(dtype))


@settings(max_examples=30)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_whatever_the_call_queries_that_see_nothing_give_zero(data: st.DataObject, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    new, slots = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 50))
    call: dict[str, Any] = {
        "queries": torch.randn(2, 6, new, 5, generator=random),
        "keys": torch.randn(2, 3, slots, 5, generator=random),
        "query_positions": torch.randint(-1, 60, (2, new), generator=random),
        "key_positions": torch.randint(-1, 60, (2, 3, slots), generator=random),
        "scaling": data.draw(st.floats(0.05, 3.0)),
        "softcap": data.draw(st.none() | st.floats(0.5, 50.0)),
        "sliding_window": data.draw(st.none() | st.integers(1, 60)),
    }
    values, attended = values_for(call, 7, torch.float32)
    column_sums_blocked(**call, attended=attended)
    rows = attention_rows(**call).sum(-1).flatten(1, 2)
    torch.testing.assert_close(attended.out, expected(call, values), rtol=1e-4, atol=1e-5)
    assert (attended.out[rows == 0] == 0).all()
