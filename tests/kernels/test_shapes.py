"""Every kernel at every head size and group that models have: odd strides between NaN, half empty and empty heads.

Interpreted; the same shapes are compiled, and run on a GPU, by the tests of each kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_interpreted import Interpreter
from kv_quantised import Case
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kvbench.kernels import (
    attention_moments,
    column_sums,
    compaction,
    decode_attention,
    merge_one,
    nearest,
    prompt_attention,
    quantise,
    quantised_attention,
    value_errors,
    window_largest,
    window_statistics,
)

SHAPES = [
    (64, 1),
    (80, 2),
    (96, 3),
    (128, 4),
    (128, 5),
    (192, 7),
    (256, 6),
    (256, 8),
]  # head dim, query heads a KV head
FAST = (96, 3)
HEADS, SLOTS, QUERIES = 3, 19, 5
Call = tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]


def cut(x: Tensor) -> Tensor:
    """The same numbers with odd strides, in the middle of a tensor of NaN: whoever reads beside them shows it."""
    room = torch.full((*x.shape[:-2], x.shape[-2] + 4, x.shape[-1] + 5), torch.nan, dtype=x.dtype)
    return room[..., 1 : 1 + x.shape[-2], 2 : 2 + x.shape[-1]].copy_(x)


def calls(dim: int, group: int) -> dict[str, Call]:
    """Calls by name: half of head 1's slots are empty, all of head 2's."""
    random = torch.Generator().manual_seed(dim + group)

    def numbers(*shape: int) -> Tensor:
        return cut(torch.randn(shape, generator=random).half())

    keys, values = numbers(1, HEADS, SLOTS, dim), numbers(1, HEADS, SLOTS, dim)
    positions = torch.arange(SLOTS, dtype=torch.int32).repeat(1, HEADS, 1)
    positions[0, 1, ::2] = positions[0, 2] = -1
    present = positions >= 0
    attended: dict[str, Any] = {
        "queries": numbers(1, HEADS * group, QUERIES, dim),
        "keys": keys,
        "query_positions": torch.arange(SLOTS - QUERIES, SLOTS)[None],
        "key_positions": positions.long(),
        "scaling": dim**-0.5,
    }
    newest = attended | {"queries": attended["queries"][:, :, -1:], "query_positions": torch.tensor([[SLOTS]])}
    merged = {"keys": keys, "values": values, "positions": positions.clamp(min=0), "victims": torch.tensor([[[0]] * 3])}
    scores = torch.rand(1, HEADS, 2, SLOTS, generator=random)
    coded = Case(heads=2, group=group, dim=dim, value_dim=dim, unit=16, value_unit=dim, keys=32, values=32, tokens=35)
    return {
        "column sums": (column_sums.column_sums_triton, column_sums.column_sums_ref, attended),
        "moments": (attention_moments.attention_moments_triton, attention_moments.attention_moments_ref, attended),
        "prompt attention": (
            prompt_attention.prompt_attention_triton,
            prompt_attention.prompt_attention_ref,
            attended | {"values": values},
        ),
        "window statistics": (
            window_statistics.window_statistics_triton,
            window_statistics.window_statistics_ref,
            attended,
        ),
        "largest head": (
            window_largest.window_largest_triton,
            window_largest.window_largest_ref,
            attended | {"key_positions": positions[:, :1].expand(-1, HEADS, -1).long()},
        ),
        "decode attention": (
            decode_attention.decode_attention_triton,
            decode_attention.decode_attention_ref,
            newest | {"values": values, "weights": True},
        ),
        "quantised attention": (
            quantised_attention.quantised_attention_triton,
            quantised_attention.quantised_attention_ref,
            coded.draw(dim),
        ),
        "value errors": (
            value_errors.value_errors_triton,
            value_errors.value_errors_ref,
            {"scores": scores, "values": values, "counted": present, "eps": 1e-6},
        ),
        "compact": (
            compaction.compact_triton,
            compaction.compact_ref,
            {
                "buffers": {"keys": keys, "values": values, "positions": positions},
                "slots": torch.tensor([[[0, 5, 18], [1, 3, 0], [0, 1, 2]]]),
                "counts": torch.tensor([[3, 2, 0]]),
                "spare": 0,
            },
        ),
        "nearest": (nearest.nearest_triton, nearest.nearest_ref, {"gone": values, "own": keys, "present": present}),
        "merge one": (
            merge_one.merge_one_triton,
            merge_one.merge_one_ref,
            merged | {"threshold": None, "beta": 0.5, "average": False},
        ),
        "quantise": (
            quantise.quantise_triton,
            quantise.quantise_ref,
            {"x": keys, "unit": dim, "per_token": True, "bits": 2, "held_in": torch.float16},
        ),
    }


@pytest.mark.parametrize("name", calls(*FAST))
@pytest.mark.parametrize(
    ("dim", "group"), [pytest.param(*shape, marks=() if shape == FAST else pytest.mark.slow) for shape in SHAPES]
)
def test_a_kernel_equals_its_reference_at_every_head_size_and_group(
    dim: int, group: int, name: str, interpret: Interpreter
) -> None:
    launcher, reference, call = calls(dim, group)[name]
    got, expected = tree_leaves(interpret(launcher, **call)), tree_leaves(reference(**call))
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=4e-3, atol=4e-3)
        assert theirs.isfinite().any(), "there is something to compare"
