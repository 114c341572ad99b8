"""The kernels of column_sums: interpreted on the CPU, compiled for GPUs that are not there, run on one that is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from column_cases import CASES
from kernel_compiled import LITTLE, compiled, prompt_pointers
from kernel_interpreted import Interpreter, mostly_slow
from torch import Tensor

from kvbench.kernels.column_sums import _column_sums, column_sums, column_sums_ref, column_sums_triton
from kvbench.kernels.prompt_tiles import sum_tiles

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


def check(dim: int, dtype: torch.dtype, capability: int, odd: bool = False, aligned: bool = True) -> None:
    """The kernel compiles for this GPU: tensor cores' tiles loaded ahead, nothing spilled, memory of any GPU enough.

    odd: soft-capped and sliding.
    """
    how = {"D": dim, "CAPPED": odd, "WINDOWED": odd, "ALIGNED": aligned, **sum_tiles(dim, dtype)}
    made = compiled(_column_sums, capability, how, prompt_pointers(dtype), odd and dtype == torch.float32)
    assert made.shared <= LITTLE
    assert "async_copy" in made.ttgir, "the next tile is loaded while this one is summed"
    assert odd or made.spilled == 0


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_the_kernel_compiles_for_hopper_without_spilling() -> None:
    check(128, torch.bfloat16, 90)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("odd", "aligned"), [(False, True), (False, False), (True, False)])
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.float16), (80, torch.bfloat16), (256, torch.bfloat16)])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernel_compiles_for_any_gpu_since_2020(
    capability: int, dim: int, dtype: torch.dtype, odd: bool, aligned: bool
) -> None:
    check(dim, dtype, capability, odd, aligned)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernel_compiles_in_full_precision(capability: int) -> None:
    check(80, torch.float32, capability, odd=True, aligned=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("path", [column_sums, column_sums_triton])
def test_a_cuda_device_gives_what_the_reference_gives(path: Any, name: str, cases: dict[str, Any]) -> None:
    call = {key: value.cuda() if isinstance(value, Tensor) else value for key, value in cases[name].items()}
    torch.testing.assert_close(path(**call).cpu(), column_sums_ref(**cases[name]), rtol=1e-4, atol=1e-4)
