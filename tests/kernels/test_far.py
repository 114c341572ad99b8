"""Every kernel finds what lies beyond 2^31 numbers of a tensor: offsets are of 64 bits, wherever they are put together.

Interpreted, with entries at the front of which hardly any memory exists: 32-bit offsets would wrap around here too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kernel_far import BEYOND, far, from_afar
from kernel_interpreted import Interpreter, mostly_slow
from kv_quantised import Case
from torch.utils._pytree import tree_leaves

from kvbench.kernels import (
    attention_moments,
    column_sums,
    compaction,
    decode_attention,
    decode_attention_flat,
    merge_one,
    nearest,
    prompt_attention,
    quantise,
    quantised_attention,
    selection,
    value_errors,
    window_largest,
    window_statistics,
)

SLOTS, DIM = 20, 64
Call = dict[str, Any]

torch.manual_seed(0)
keys, values = torch.randn(2, 1, 2, SLOTS, DIM).half().unbind(0)
places = torch.arange(SLOTS)
of_a_prompt: Call = {
    "queries": torch.randn(1, 4, SLOTS, DIM).half(),
    "keys": keys,
    "query_positions": places[None],
    "key_positions": places.repeat(1, 2, 1),
    "scaling": 0.125,
}
of_a_window: Call = {**of_a_prompt, "queries": of_a_prompt["queries"][:, :, -4:], "query_positions": places[None, -4:]}
of_a_step: Call = {**of_a_prompt, "queries": of_a_prompt["queries"][:, :, -1:], "query_positions": places[None, -1:]}
of_flat_slots: Call = {
    **of_a_step,
    "keys": keys.flatten(0, 2),
    "values": values.flatten(0, 2),
    "key_positions": places.repeat(2),
    "starts": torch.tensor([[0, SLOTS]]),
    "counts": torch.tensor([[SLOTS, SLOTS - 3]]),
    "most": SLOTS,
}
positions = torch.arange(SLOTS, dtype=torch.int32).repeat(1, 4, 1)
of_a_choice: Call = {
    "scores": torch.rand(1, 4, SLOTS),
    "tie_break": None,
    "positions": positions,
    "protected": positions < 2,
}
of_one_merge: Call = {
    "keys": keys,
    "values": values,
    "positions": positions[:, :2],
    "victims": torch.tensor([[[3], [19]]]),
    "threshold": None,
    "beta": 0.5,
    "average": False,
}
of_groups = Case(keys=256, values=256, tokens=270).draw(0)
of_codes = Case(keys=64, values=64, tokens=70, unit=32, value_unit=32).draw(0)


@dataclass(frozen=True)
class Far:
    """A launcher, its reference, a call, which of its arguments lie far apart, and along which dimension."""

    launcher: Callable[..., Any]
    reference: Callable[..., Any]
    call: Call
    names: tuple[str, ...]
    dim: int = 2


KERNELS = {
    "column sums": Far(column_sums.column_sums_triton, column_sums.column_sums_ref, of_a_prompt, ("queries", "keys")),
    "moments": Far(
        attention_moments.attention_moments_triton,
        attention_moments.attention_moments_ref,
        of_a_prompt,
        ("queries", "keys"),
    ),
    "prompt attention": Far(
        prompt_attention.prompt_attention_triton,
        prompt_attention.prompt_attention_ref,
        {**of_a_prompt, "values": values},
        ("queries", "keys", "values"),
    ),
    "window statistics": Far(
        window_statistics.window_statistics_triton,
        window_statistics.window_statistics_ref,
        of_a_window,
        ("queries", "keys"),
    ),
    "largest head": Far(
        window_largest.window_largest_triton, window_largest.window_largest_ref, of_a_window, ("queries", "keys")
    ),
    "decode attention": Far(
        decode_attention.decode_attention_triton,
        decode_attention.decode_attention_ref,
        {**of_a_step, "values": values},
        ("keys", "values"),
    ),
    "decode attention over flat slots": Far(
        decode_attention_flat.decode_attention_flat_triton,
        decode_attention_flat.decode_attention_flat_ref,
        of_flat_slots,
        ("keys", "values", "key_positions"),
        dim=0,
    ),
    "quantised attention": Far(
        quantised_attention.quantised_attention_triton,
        quantised_attention.quantised_attention_ref,
        of_codes,
        ("keys", "values"),
    ),
    "quantised attention on whole groups": Far(
        quantised_attention.quantised_attention_triton,
        quantised_attention.quantised_attention_ref,
        of_groups,
        ("keys", "values"),
    ),
    "value errors": Far(
        value_errors.value_errors_triton,
        value_errors.value_errors_ref,
        {"scores": torch.rand(1, 2, 1, SLOTS), "values": values, "counted": None, "eps": 1e-6},
        ("values",),
    ),
    "select": Far(selection.select_triton, selection.select_ref, {**of_a_choice, "keep": 7}, ("scores",), 1),
    "victim": Far(selection.victim_triton, selection.victim_ref, of_a_choice, ("scores", "positions", "protected"), 1),
    "kept slots": Far(
        compaction.kept_slots_triton, compaction.kept_slots_ref, {"mask": positions % 3 == 0, "most": 7}, ("mask",), 1
    ),
    "compact": Far(
        compaction.compact_triton,
        compaction.compact_ref,
        {
            "buffers": {"keys": keys, "values": values, "positions": positions[:, :2]},
            "slots": torch.tensor([[[0, 5, 19], [2, 3, 18]]]),
            "counts": torch.tensor([[3, 2]]),
            "spare": 2,
        },
        ("keys", "values"),
    ),
    "nearest": Far(
        nearest.nearest_triton,
        nearest.nearest_ref,
        {"gone": values, "own": keys, "present": torch.ones(1, 2, SLOTS, dtype=torch.bool)},
        ("gone", "own"),
    ),
    "merge one": Far(merge_one.merge_one_triton, merge_one.merge_one_ref, of_one_merge, ("keys", "values")),
    "quantise": Far(
        quantise.quantise_triton,
        quantise.quantise_ref,
        {"x": keys, "unit": 32, "per_token": True, "bits": 2, "held_in": torch.float16},
        ("x",),
    ),
}


def test_what_is_far_apart_is_the_same_and_ends_beyond_32_bits() -> None:
    there = far(keys, 2)
    assert torch.equal(there, keys)
    assert (SLOTS - 1) * there.stride(2) >= BEYOND
    assert there.stride(2) < BEYOND, "one stride alone fits 32 bits: the product of a slot with it does not"


@pytest.mark.parametrize("name", mostly_slow(KERNELS, [name for name in KERNELS if "groups" not in name]))
def test_a_kernel_reaches_beyond_32_bits(name: str, interpret: Interpreter) -> None:
    case = KERNELS[name]
    got = interpret(from_afar, launcher=case.launcher, call=case.call, names=case.names, dim=case.dim)
    expected = case.reference(**case.call)
    for mine, theirs in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-3)
