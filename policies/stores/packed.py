"""A column as the attention kernel on packed codes reads it."""

import torch
from torch import Tensor

from kvbench.kernels.packed import Packed, Side
from kvbench.policies.stores.codes import ChannelCodes, TokenCodes
from kvbench.policies.stores.column import Column
from kvbench.policies.stores.packing import words_for


def side(column: Column) -> Side | None:
    """A column as `quantised_attention_triton` takes it; None in another form (several runs, joined heads)."""
    if len(column.runs) != 1:
        return None
    codes, tail = column.runs[0], column.tail
    if not isinstance(codes, ChannelCodes | TokenCodes) or (isinstance(codes, TokenCodes) and codes.heads is not None):
        return None
    return Side(_packed(codes, tail.view("x")), tail.view("x"), tail.counts)


def _packed(codes: ChannelCodes | TokenCodes, tail: Tensor) -> Packed:
    per_token = isinstance(codes, TokenCodes)
    unit = codes.group if isinstance(codes, TokenCodes) else codes.unit
    bits, queue = codes.quantiser.bits, codes.queue
    if queue.most:
        return Packed(
            queue.view("words"), queue.view("scale"), queue.view("minimum"),
            bits, unit, per_token, None if queue.counts is None else queue.counts * codes.unit,
        )  # fmt: skip
    batch, heads, _, dim = tail.shape
    entry = (batch, heads, 0, dim // unit if per_token else dim)
    words = tail.new_empty(*entry, words_for(unit, bits), dtype=torch.int32)
    scale = tail.new_empty(entry, dtype=codes.quantiser.held_in(tail.dtype))
    return Packed(words, scale, scale, bits, unit, per_token)
