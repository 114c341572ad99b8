"""A call of every launcher on one layer of a model, with fake tensors: what is launched, and what is compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

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


@dataclass(frozen=True)
class Shape:
    """Calls of every launcher on a layer of KV heads of `dim` numbers, 4 query heads each."""

    dim: int
    dtype: torch.dtype = torch.bfloat16
    batch: int = 1
    heads: int = H_KV
    slots_held: int = SLOTS

    @property
    def lead(self) -> tuple[int, int, int]:
        """Sequences, KV heads, slots."""
        return self.batch, self.heads, self.slots_held

    def slots(self) -> torch.Tensor:
        """As a model hands them over: heads beside each other."""
        return numbers(self.batch, self.slots_held, self.heads, self.dim, dtype=self.dtype).transpose(1, 2)

    def asking(self, queries: int) -> tuple[torch.Tensor, ...]:
        """Queries, keys, both positions and the scaling."""
        asking = numbers(self.batch, queries, self.heads * GROUP, self.dim, dtype=self.dtype).transpose(1, 2)
        return asking, self.slots(), numbers(self.batch, queries, dtype=torch.int64), places(*self.lead).long()

    def prompt_attention(self, aligned: bool) -> Call:
        queries, keys, *positions = self.asking(self.slots_held)
        call = queries, keys, self.slots(), *positions, 0.1
        return partial(prompt_attention.prompt_attention_triton, *call, aligned=aligned)

    def sums(self, launcher: Callable[..., object], aligned: bool) -> Call:
        lse = numbers(self.batch, self.heads * GROUP, self.slots_held, dtype=torch.float32)
        return partial(launcher, *self.asking(self.slots_held), 0.1, log_sum_exp=lse, aligned=aligned)

    def decode(self, packed: bool, biased: bool = False) -> Call:
        queries, keys, *positions = self.asking(1)
        sums = numbers(*self.lead, 1, dtype=torch.float32)
        bias = numbers(*self.lead, dtype=torch.float32) if biased else None
        call = queries, keys, self.slots(), *positions, 0.1
        return partial(
            decode_attention.decode_attention_triton, *call, packed=packed, weights=True, sums=sums, bias=bias
        )

    def decode_flat(self) -> Call:
        queries, _, asked, _ = self.asking(1)
        flat = numbers(prod(self.lead), self.dim, dtype=self.dtype)
        where = numbers(self.batch, self.heads, dtype=torch.int64)
        call = queries, flat, flat, asked, places(prod(self.lead)), where, where, self.slots_held, 0.1
        token = numbers(self.batch, self.heads, 1, self.dim, dtype=self.dtype)
        new = decode_attention.NewTokens(token, token, where)
        return partial(decode_attention_flat.decode_attention_flat_triton, *call, weights=True, new_tokens=new)

    def quantised(self, bits: int, group: int, outliers: int = 0, channels: int = 0, per_channel: bool = False) -> Call:
        """Keys in groups of `group` tokens; values of `channels` (0: all of a token), or of tokens too (KCVC)."""

        def side(unit: int, per_token: bool) -> Side:
            entries = (self.slots_held, self.dim // unit) if per_token else (self.slots_held // unit, self.dim)
            scale = numbers(self.batch, self.heads, *entries, dtype=torch.float16)
            words = places(self.batch, self.heads, *entries, unit * bits // 32)
            tail = numbers(self.batch, self.heads, 40, self.dim, dtype=self.dtype)
            return Side(Packed(words, scale, scale, bits, unit, per_token), tail)

        keys, values = side(group, False), side(group if per_channel else channels or self.dim, not per_channel)
        exact = (numbers(self.batch, self.heads, outliers, self.dim, dtype=self.dtype) for _ in range(2))
        pool = quantised_attention.Outliers(*exact, places(self.batch, self.heads, outliers)) if outliers else None
        queries, _, asked, _ = self.asking(1)
        call = queries, asked, keys, values, 0.1
        return partial(quantised_attention.quantised_attention_triton, *call, outliers=pool)

    def value_errors(self, rows: int) -> Call:
        scores = numbers(self.batch, self.heads, rows, self.slots_held, dtype=torch.float32)
        counted = numbers(*self.lead, dtype=torch.bool)
        return partial(value_errors.value_errors_triton, scores, self.slots(), counted, 1e-6)

    def chosen(self) -> tuple[torch.Tensor, ...]:
        scores = numbers(*self.lead, dtype=torch.float32)
        return scores, scores, places(*self.lead), numbers(*self.lead, dtype=torch.bool)

    def compact(self) -> Call:
        state = numbers(*self.lead, 1, dtype=torch.float32)
        buffers = {"keys": self.slots(), "values": self.slots(), "positions": places(*self.lead)}
        kept = numbers(self.batch, self.heads, 1024, dtype=torch.int64), places(self.batch, self.heads)
        return partial(compaction.compact_triton, {**buffers, "sums": state, "squares": state}, *kept, spare=1)

    def append(self) -> Call:
        flat = {name: numbers(prod(self.lead), self.dim, dtype=self.dtype) for name in ("keys", "values")}
        flat |= {"positions": places(prod(self.lead)), "sums": numbers(prod(self.lead), 1, dtype=torch.float32)}
        new = numbers(self.batch, self.heads, 1, self.dim, dtype=self.dtype)
        where = numbers(self.batch, self.heads, dtype=torch.int64)
        tokens = {"keys": new, "values": new, "positions": numbers(self.batch, self.heads, 1, dtype=torch.int64)}
        return partial(append.append_triton, flat, tokens, where, where)

    def merge_one(self) -> Call:
        victims = numbers(self.batch, self.heads, 1, dtype=torch.int64)
        threshold = numbers(self.batch, self.heads, dtype=torch.float32)
        call = self.slots(), self.slots(), places(*self.lead), victims, threshold, 0.7, False
        return partial(merge_one.merge_one_triton, *call)

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
    "decode attention with a bias": lambda shape: shape.decode(False, biased=True),
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


def launches(call: str, shape: Shape | int, capability: int, **more: Any) -> list[Launch]:
    """What a call launches; shape: or a head dim alone; more: arguments of the launcher, by name."""
    with launches_on(capability, MODULES) as noted:
        CALLS[call](shape if isinstance(shape, Shape) else Shape(shape))(**more)
    return noted
