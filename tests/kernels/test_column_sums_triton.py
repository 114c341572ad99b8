"""The kernels of column_sums: interpreted on the CPU, compiled for GPUs that are not there, run on one that is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from column_cases import CASES
from kernel_interpreted import Interpreter, mostly_slow

from kvbench.kernels.column_sums import column_sums_ref, column_sums_triton

FAST = (
    "one-query-head-per-kv-head-float16",
    "sliding-window-ending-with-a-tile-float32",
    "empty-slots-and-padding-float32",
    "everything-float16",
    "one-slot-one-query-float32",
)
FLOAT32: dict[str, Any] = {
    "rtol": 1e-5,
    "atol": 1e-5,
}  # 16-bit inputs too: their products are exact in float32, where all is summed


def in_order(batch: int, heads: int, group: int, new: int, slots: int, **more: Any) -> dict[str, Any]:
    """A call whose slots hold positions 0..slots-1, the last of which ask."""
    random = torch.Generator().manual_seed(slots)
    return {
        "queries": torch.randn(batch, heads * group, new, 24, generator=random),
        "keys": torch.randn(batch, heads, slots, 24, generator=random),
        "query_positions": torch.arange(slots - new, slots).repeat(batch, 1),
        "key_positions": torch.arange(slots).repeat(batch, heads, 1),
        "scaling": 0.3,
        "softcap": None,
        "sliding_window": None,
        **more,
    }


ALIGNED = {
    "aligned-prompt": in_order(1, 2, 2, 71, 71),
    "aligned-chunk": in_order(2, 1, 2, 45, 100),
    "aligned-window": in_order(1, 1, 1, 80, 90, sliding_window=37),
    "aligned-softcap": in_order(1, 1, 1, 9, 33, softcap=2.0),
}


def without_positions(call: dict[str, Any]) -> dict[str, Any]:
    """The call with positions that nobody may read."""
    return {**call, **{name: torch.full_like(call[name], -1) for name in ("query_positions", "key_positions")}}


@pytest.mark.parametrize("aligned", mostly_slow(ALIGNED, ["aligned-chunk", "aligned-window"]))
def test_without_a_look_at_positions_sums_of_slots_in_order_are_the_same(aligned: str, interpret: Interpreter) -> None:
    got = interpret(column_sums_triton, **without_positions(ALIGNED[aligned]), aligned=True)
    torch.testing.assert_close(got, column_sums_ref(**ALIGNED[aligned]), **FLOAT32)


@pytest.mark.parametrize("case", mostly_slow(CASES, FAST))
def test_the_kernels_equal_the_reference_and_every_query_that_sees_a_slot_gives_one(
    case: str, cases: dict[str, Any], interpret: Interpreter
) -> None:
    call = cases[case]
    got = interpret(column_sums_triton, **call)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, column_sums_ref(**call), **FLOAT32)
    sums = got.sum(-1)  # [B,H_kv,G]
    for sequence, positions in enumerate(call["query_positions"].tolist()):
        for head, stored in enumerate(call["key_positions"][sequence].tolist()):
            reach = call["sliding_window"] or 2**30
            giving = sum(any(0 <= slot <= at < slot + reach for slot in stored) for at in positions)
            expected = torch.full_like(sums[sequence, head], giving)
            torch.testing.assert_close(sums[sequence, head], expected, rtol=1e-5, atol=1e-5)
