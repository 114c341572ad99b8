"""Every kernel at every head size and group that models have, and where its tensors pass 2^31 numbers.

Strides are odd, with NaN between the numbers; half of one head's slots are empty, and all of another's. Where entries
lie far apart hardly any memory exists between them: offsets of 32 bits would wrap around, interpreted as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kernel_far import from_afar
from kernel_interpreted import Interpreter
from kv_quantised import Case
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kvbench.kernels.attention_moments import attention_moments_ref, attention_moments_triton
from kvbench.kernels.column_sums import column_sums_ref, column_sums_triton
from kvbench.kernels.compaction import compact_ref, compact_triton, kept_slots_ref, kept_slots_triton
from kvbench.kernels.decode_attention import decode_attention_ref, decode_attention_triton
from kvbench.kernels.decode_attention_flat import decode_attention_flat_ref, decode_attention_flat_triton
from kvbench.kernels.merge_one import merge_one_ref, merge_one_triton
from kvbench.kernels.nearest import nearest_ref, nearest_triton
from kvbench.kernels.prompt_attention import prompt_attention_ref, prompt_attention_triton
from kvbench.kernels.quantise import quantise_ref, quantise_triton
from kvbench.kernels.quantised_attention import quantised_attention_ref, quantised_attention_triton
from kvbench.kernels.selection import select_ref, select_triton, victim_ref, victim_triton
from kvbench.kernels.value_errors import value_errors_ref, value_errors_triton
from kvbench.kernels.window_largest import window_largest_ref, window_largest_triton
from kvbench.kernels.window_statistics import window_statistics_ref, window_statistics_triton

SHAPES = [(64, 1), (80, 2), (96, 3), (128, 4), (128, 5), (192, 7), (256, 6), (256, 8)]
"""Head dim, query heads a KV head."""
FAST = (96, 3)
HEADS, SLOTS, QUERIES = 3, 19, 5


@dataclass(frozen=True)
class Kernel:
    """A launcher, its reference, and which arguments of a call may lie far apart, along which dimension."""

    launcher: Callable[..., Any]
    reference: Callable[..., Any]
    far: tuple[str, ...]
    along: int = 2


KERNELS = {
    "column sums": Kernel(column_sums_triton, column_sums_ref, ("queries", "keys")),
    "moments": Kernel(attention_moments_triton, attention_moments_ref, ("queries", "keys")),
    "prompt attention": Kernel(prompt_attention_triton, prompt_attention_ref, ("queries", "keys", "values")),
    "window statistics": Kernel(window_statistics_triton, window_statistics_ref, ("queries", "keys")),
    "largest head": Kernel(window_largest_triton, window_largest_ref, ("queries", "keys")),
    "decode attention": Kernel(decode_attention_triton, decode_attention_ref, ("keys", "values")),
    "decode attention, flat": Kernel(
        decode_attention_flat_triton, decode_attention_flat_ref, ("keys", "values", "key_positions"), along=0
    ),
    "quantised attention": Kernel(quantised_attention_triton, quantised_attention_ref, ("keys", "values")),
    "value errors": Kernel(value_errors_triton, value_errors_ref, ("values",)),
    "select": Kernel(select_triton, select_ref, ("scores",), along=1),
    "victim": Kernel(victim_triton, victim_ref, ("scores", "positions", "protected"), along=1),
    "kept slots": Kernel(kept_slots_triton, kept_slots_ref, ("mask",), along=1),
    "compact": Kernel(compact_triton, compact_ref, ("keys", "values")),
    "nearest": Kernel(nearest_triton, nearest_ref, ("gone", "own")),
    "merge one": Kernel(merge_one_triton, merge_one_ref, ("keys", "values")),
    "quantise": Kernel(quantise_triton, quantise_ref, ("x",)),
}


def cut(x: Tensor) -> Tensor:
    """The same numbers with odd strides, in the middle of a tensor of NaN: whoever reads beside them shows it."""
    room = torch.full((*x.shape[:-2], x.shape[-2] + 4, x.shape[-1] + 5), torch.nan, dtype=x.dtype)
    return room[..., 1 : 1 + x.shape[-2], 2 : 2 + x.shape[-1]].copy_(x)


def call_of(name: str, dim: int, group: int) -> dict[str, Any]:
    """Arguments: half of head 1's slots are empty, all of head 2's."""
    random = torch.Generator().manual_seed(dim + group)

    def numbers(*shape: int) -> Tensor:
        return cut(torch.randn(shape, generator=random).half())

    keys, values = numbers(1, HEADS, SLOTS, dim), numbers(1, HEADS, SLOTS, dim)
    held = torch.arange(SLOTS, dtype=torch.int32).repeat(1, HEADS, 1)
    positions = held.clone()
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
    flat = {name: x.flatten(0, 2) for name, x in (("keys", keys), ("values", values), ("key_positions", positions))}
    segments = {
        "starts": torch.tensor([[0, SLOTS, 2 * SLOTS]]),
        "counts": torch.tensor([[SLOTS, 16, 0]]),
        "most": SLOTS,
    }
    ranked = {
        "scores": torch.rand(1, HEADS, SLOTS, generator=random),
        "tie_break": None,
        "positions": held,
        "protected": held < 2,
    }
    coded = Case(heads=2, group=group, dim=dim, value_dim=dim, unit=16, value_unit=dim, keys=32, values=32, tokens=35)
    calls: dict[str, dict[str, Any]] = {
        "prompt attention": attended | {"values": values},
        "largest head": attended | {"key_positions": positions[:, :1].expand(-1, HEADS, -1).long()},
        "decode attention": newest | {"values": values, "weights": True},
        "decode attention, flat": newest | flat | segments,
        "quantised attention": coded.draw(dim),
        "value errors": {
            "scores": torch.rand(1, HEADS, 2, SLOTS, generator=random), "values": values, "counted": present,
            "eps": 1e-6,
        },
        "select": ranked | {"keep": 7},
        "victim": ranked,
        "kept slots": {"mask": held % 3 == 0, "most": 7},
        "compact": {
            "buffers": {"keys": keys, "values": values, "positions": positions},
            "slots": torch.tensor([[[0, 5, 18], [1, 3, 0], [0, 1, 2]]]),
            "counts": torch.tensor([[3, 2, 0]]),
            "spare": 0,
        },
        "nearest": {"gone": values, "own": keys, "present": present},
        "merge one": {
            "keys": keys, "values": values, "positions": positions.clamp(min=0), "victims": torch.tensor([[[0]] * 3]),
            "threshold": None, "beta": 0.5, "average": False,
        },
        "quantise": {"x": keys, "unit": dim, "per_token": True, "bits": 2, "held_in": torch.float16},
    }  # fmt: skip
    return calls.get(name, attended)


def assert_equal(got: Any, expected: Any) -> None:
    found = ([x for x in tree_leaves(some) if x is not None] for some in (got, expected))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=4e-3, atol=4e-3)
        assert theirs.isfinite().any(), "there is something to compare"


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("dim", "group"),
    [pytest.param(*shape, marks=() if shape == FAST else pytest.mark.slow("interprets kernels")) for shape in SHAPES],
)
def test_a_kernel_equals_its_reference_at_every_head_size_and_group(
    dim: int, group: int, name: str, interpret: Interpreter
) -> None:
    call = call_of(name, dim, group)
    assert_equal(interpret(KERNELS[name].launcher, **call), KERNELS[name].reference(**call))


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_reaches_beyond_32_bits(name: str, interpret: Interpreter) -> None:
    kernel, call = KERNELS[name], call_of(name, 64, 2)
    got = interpret(from_afar, launcher=kernel.launcher, call=call, names=kernel.far, dim=kernel.along)
    assert_equal(got, kernel.reference(**call))


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_without_triton_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.kernels.jit.triton", None)
    with pytest.raises(ValueError, match=r"on device cpu needs Triton, which is not installed here; use device=cpu$"):
        KERNELS[name].launcher(**call_of(name, *FAST))


COPIES = {"quantised attention", "select", "victim", "kept slots", "compact", "quantise"}


@pytest.mark.parametrize("name", [*sorted(KERNELS.keys() - COPIES), "select"])
def test_float64_is_refused_and_never_rounded(name: str) -> None:
    pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    call = {key: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
            for key, x in call_of(name, *FAST).items()}  # fmt: skip
    with pytest.raises(ValueError, match=r"takes no float64 tensors|must be float32, got torch\.float64"):
        KERNELS[name].launcher(**call)
