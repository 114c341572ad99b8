"""Moments of attention: by hand, and in blocks against all rows at once."""

import math
from typing import Any

import pytest
import torch
from kernel_interpreted import Interpreter, mostly_slow
from torch import Tensor

from kvbench.kernels.attention_moments import (
    attention_moments,
    attention_moments_ref,
    attention_moments_triton,
)
from kvbench.kernels.prompt_attention import prompt_attention_ref


def inputs(queries: int, slots: int, group: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """q, k and positions of two sequences; the second has padding in front, and its slots lie in another order."""
    generator = torch.Generator().manual_seed(queries * slots)
    q = torch.randn(2, 3 * group, queries, 8, generator=generator, dtype=torch.float64).to(dtype)
    k = torch.randn(2, 3, slots, 8, generator=generator, dtype=torch.float64).to(dtype)
    rows = torch.arange(slots - queries, slots).expand(2, -1).clone()
    columns = torch.arange(slots).expand(2, 3, -1).clone()
    padding = min(2, queries - 1)
    rows[1] = torch.where(torch.arange(queries) < padding, -1, rows[1] - padding)
    columns[1] = columns[1] - padding
    columns[1] = columns[1].clamp(min=-1)[:, torch.randperm(slots, generator=generator)]
    return q, k, rows, columns


def test_moments_by_hand() -> None:
    # One KV head, two query heads, two queries: rows of head 0 are (1, 0), (1/2, 1/2), of head 1 (1, 0), (1/4, 3/4).
    queries = torch.tensor([[[[0.0], [0.0]], [[0.0], [math.log(3.0)]]]])
    keys = torch.tensor([[[[0.0], [1.0]]]])
    positions = torch.arange(2)[None]
    got = attention_moments(queries, keys, positions, positions[:, None], 1.0)
    torch.testing.assert_close(got.sums, torch.tensor([[[1 + 3 / 8, 5 / 8]]]))
    torch.testing.assert_close(got.squares, torch.tensor([[[1 + 9 / 64, 25 / 64]]]))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sliding", [None, 7])
@pytest.mark.parametrize(("queries", "slots", "group"), [(1, 5, 2), (9, 9, 1), (40, 40, 2), (33, 70, 4)])
def test_blocks_agree_with_all_rows_at_once(
    queries: int, slots: int, group: int, sliding: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbench.kernels.softmax_blocks.LOGITS_AT_ONCE", 2 * 3 * group * slots * 5)
    arguments = inputs(queries, slots, group, torch.float64)
    got = attention_moments(*arguments, 0.4, softcap, sliding)
    expected = attention_moments_ref(*arguments, 0.4, softcap, sliding)
    torch.testing.assert_close(got.sums, expected.sums)
    torch.testing.assert_close(got.squares, expected.squares)


KERNEL = (
    "grouped-float32",
    "one-kv-head-bfloat16",
    "softcap-float16",
    "sliding-window-shuffled-float16",
    "empty-slots-and-padding-float32",
    "everything-float16",
)


@pytest.mark.parametrize("case", mostly_slow(KERNEL, ["empty-slots-and-padding-float32", "everything-float16"]))
def test_the_kernel_equals_the_reference(case: str, cases: dict[str, Any], interpret: Interpreter) -> None:
    got = interpret(attention_moments_triton, **cases[case])
    torch.testing.assert_close(got, attention_moments_ref(**cases[case]), rtol=1e-5, atol=1e-5)


def test_slots_in_order_and_a_known_log_sum_exp_give_the_same(interpret: Interpreter) -> None:
    q, k, rows, columns = (x[:1] for x in inputs(70, 90, 3))
    lse = prompt_attention_ref(q, k, k, rows, columns, 0.4).log_sum_exp
    call = {"queries": q, "keys": k, "query_positions": rows * 0 - 1, "key_positions": columns * 0 - 1}
    got = interpret(attention_moments_triton, **call, scaling=0.4, log_sum_exp=lse, aligned=True)
    torch.testing.assert_close(got, attention_moments_ref(q, k, rows, columns, 0.4), rtol=1e-5, atol=1e-5)
