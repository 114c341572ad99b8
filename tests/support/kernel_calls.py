"""A call of every launcher on one layer of a model, with fake tensors: what is launched, and what is compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from kernel_launched import MODULES, Launch, launches_on

from kvbench.kernels import (
    append,
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
from kvbench.kernels.packed import Packed, Side

H_KV, GROUP, SLOTS = 8, 4, 8192
Call = Callable[[], object]


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def places(*shape: int) -> torch.Tensor:
    return numbers(*shape, dtype=torch.int32)


class Shape:
    """Calls of every launcher on a layer of 8 KV heads of `dim` numbers, 4 query heads each, and 8,192 slots."""

    def __init__(self, dim: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.dim, self.dtype = dim, dtype

    def slots(self) -> torch.Tensor:
        """As a model hands them over: heads beside each other."""
        return numbers(1, SLOTS, H_KV, self.dim, dtype=self.dtype).transpose(1, 2)

    def asking(self, queries: int) -> tuple[torch.Tensor, ...]:
        """Queries, keys, both positions and the scaling."""
        asking = numbers(1, queries, H_KV * GROUP, self.dim, dtype=self.dtype).transpose(1, 2)
        return asking, self.slots(), numbers(1, queries, dtype=torch.int64), places(1, H_KV, SLOTS).long()

    def prompt_attention(self, aligned: bool) -> Call:
        queries, keys, *positions = self.asking(SLOTS)
        call = queries, keys, self.slots(), *positions, 0.1
        return partial(prompt_attention.prompt_attention_triton, *call, aligned=aligned)

    def sums(self, launcher: Callable[..., object], aligned: bool) -> Call:
        lse = numbers(1, H_KV * GROUP, SLOTS, dtype=torch.float32)
        return partial(launcher, *self.asking(SLOTS), 0.1, log_sum_exp=lse, aligned=aligned)

    def decode(self, packed: bool) -> Call:
        queries, keys, *positions = self.asking(1)
        sums = numbers(1, H_KV, SLOTS, 1, dtype=torch.float32)
        call = queries, keys, self.slots(), *positions, 0.1
        return partial(decode_attention.decode_attention_triton, *call, packed=packed, weights=True, sums=sums)

    def decode_flat(self) -> Call:
        queries, _, asked, _ = self.asking(1)
        flat = numbers(H_KV * SLOTS, self.dim, dtype=self.dtype)
        where = numbers(1, H_KV, dtype=torch.int64)
        positions = places(H_KV * SLOTS)
        return partial(
            decode_attention_flat.decode_attention_flat_triton,
            queries,
            flat,
            flat,
            asked,
            positions,
            where,
            where,
            SLOTS,
            0.1,
            weights=True,
        )

    def quantised(self, bits: int, group: int, outliers: int = 0, channels: int = 0, per_channel: bool = False) -> Call:
        """Keys in groups of `group` tokens; values of `channels` (0: all of a token), or of tokens too (KCVC)."""

        def side(unit: int, per_token: bool) -> Side:
            entries = (SLOTS, self.dim // unit) if per_token else (SLOTS // unit, self.dim)
            scale = numbers(1, H_KV, *entries, dtype=torch.float16)
            words = places(1, H_KV, *entries, unit * bits // 32)
            tail = numbers(1, H_KV, 40, self.dim, dtype=self.dtype)
            return Side(Packed(words, scale, scale, bits, unit, per_token), tail)

        keys, values = side(group, False), side(group if per_channel else channels or self.dim, not per_channel)
        exact = (numbers(1, H_KV, outliers, self.dim, dtype=self.dtype) for _ in range(2))
        pool = quantised_attention.Outliers(*exact, places(1, H_KV, outliers)) if outliers else None
        queries, _, asked, _ = self.asking(1)
        call = queries, asked, keys, values, 0.1
        return partial(quantised_attention.quantised_attention_triton, *call, outliers=pool)

    def value_errors(self, rows: int) -> Call:
        scores = numbers(1, H_KV, rows, SLOTS, dtype=torch.float32)
        counted = numbers(1, H_KV, SLOTS, dtype=torch.bool)
        return partial(value_errors.value_errors_triton, scores, self.slots(), counted, 1e-6)

    def chosen(self) -> tuple[torch.Tensor, ...]:
        scores = numbers(1, H_KV, SLOTS, dtype=torch.float32)
        return scores, scores, places(1, H_KV, SLOTS), numbers(1, H_KV, SLOTS, dtype=torch.bool)

    def compact(self) -> Call:
        state = numbers(1, H_KV, SLOTS, 1, dtype=torch.float32)
        buffers = {"keys": self.slots(), "values": self.slots(), "positions": places(1, H_KV, SLOTS)}
        kept = numbers(1, H_KV, 1024, dtype=torch.int64), places(1, H_KV)
        return partial(compaction.compact_triton, {**buffers, "sums": state, "squares": state}, *kept, spare=1)

    def append(self) -> Call:
        flat = {name: numbers(H_KV * SLOTS, self.dim, dtype=self.dtype) for name in ("keys", "values")}
        flat |= {"positions": places(H_KV * SLOTS), "sums": numbers(H_KV * SLOTS, 1, dtype=torch.float32)}
        new = numbers(1, H_KV, 1, self.dim, dtype=self.dtype)
        tokens = {"keys": new, "values": new, "positions": numbers(1, H_KV, 1, dtype=torch.int64)}
        where = numbers(1, H_KV, dtype=torch.int64)
        return partial(append.append_triton, flat, tokens, where, where)

    def merge_one(self) -> Call:
        victims, threshold = numbers(1, H_KV, 1, dtype=torch.int64), numbers(1, H_KV, dtype=torch.float32)
        return partial(
            merge_one.merge_one_triton,
            self.slots(),
            self.slots(),
            places(1, H_KV, SLOTS),
            victims,
            threshold,
            0.7,
            False,
        )

    def quantise(self, bits: int, per_token: bool) -> Call:
        unit = self.dim if per_token else 256 // bits
        return partial(quantise.quantise_triton, self.slots(), unit, per_token, bits, torch.float16)


CALLS: dict[str, Callable[[Shape], Call]] = {
    "prompt attention": lambda shape: shape.prompt_attention(True),
    "prompt attention by position": lambda shape: shape.prompt_attention(False),
    "column sums": lambda shape: shape.sums(column_sums.column_sums_triton, True),
    "column sums by position": lambda shape: shape.sums(column_sums.column_sums_triton, False),
    "moments": lambda shape: shape.sums(attention_moments.attention_moments_triton, True),
    "moments by position": lambda shape: shape.sums(attention_moments.attention_moments_triton, False),
    "window of 32": lambda shape: partial(window_statistics.window_statistics_triton, *shape.asking(32), 0.1),
    "window of 32, largest head": lambda shape: partial(window_largest.window_largest_triton, *shape.asking(32), 0.1),
    "decode attention": lambda shape: shape.decode(True),
    "decode attention by position": lambda shape: shape.decode(False),
    "decode attention, flat": lambda shape: shape.decode_flat(),
    "quantised attention, 2 bits of 32": lambda shape: shape.quantised(2, 32, channels=32),
    "quantised attention, 2 bits of 64": lambda shape: shape.quantised(2, 64, channels=64),
    "quantised attention, 2 bits of 128": lambda shape: shape.quantised(2, 128),
    "quantised attention, 2 bits of 128, outliers": lambda shape: shape.quantised(2, 128, outliers=35),
    "quantised attention, 2 bits of 128, values per channel": lambda shape: shape.quantised(2, 128, per_channel=True),
    "quantised attention, 4 bits of 32": lambda shape: shape.quantised(4, 32, channels=32),
    "quantised attention, 4 bits of 128": lambda shape: shape.quantised(4, 128),
    "value errors": lambda shape: shape.value_errors(1),
    "value errors, 4 rows": lambda shape: shape.value_errors(GROUP),
    "select": lambda shape: partial(selection.select_triton, *shape.chosen(), 1024),
    "victim": lambda shape: partial(selection.victim_triton, *shape.chosen()),
    "kept slots": lambda shape: partial(compaction.kept_slots_triton, shape.chosen()[-1], 1024),
    "compact": lambda shape: shape.compact(),
    "append": lambda shape: shape.append(),
    "nearest": lambda shape: partial(nearest.nearest_triton, shape.slots(), shape.slots(), shape.chosen()[-1]),
    "merge one": lambda shape: shape.merge_one(),
    "quantise channels": lambda shape: shape.quantise(2, False),
    "quantise tokens": lambda shape: shape.quantise(2, True),
}


def launches(call: str, dim: int, capability: int, dtype: torch.dtype = torch.bfloat16) -> list[Launch]:
    with launches_on(capability, MODULES) as noted:
        CALLS[call](Shape(dim, dtype))()
    return noted
