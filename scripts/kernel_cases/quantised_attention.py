# ruff: noqa: ANN401 - a provider takes a call by name and passes it on
"""Decode attention on packed codes: an 8B model's heads, KIVI's and OTT's groups, beside sdpa on the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from kernel_cases.case import DIM, GROUP, H_KV, H_Q, provider, scaled
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.quantised_attention import (
    Outliers,
    Packed,
    Side,
    quantised_attention_ref,
    quantised_attention_triton,
)
from kvbench.tools.bench.kernels import KernelCase

TAIL, OUTLIERS = 32, 35
SHAPES = [  # sequences, tokens, bits, group
    (1, 32_768, 2, 128),
    (1, 131_072, 2, 128),
    (8, 32_768, 2, 32),
    (8, 32_768, 2, 128),
    (8, 131_072, 2, 128),
    (64, 32_768, 2, 32),
    (64, 32_768, 2, 128),
    (8, 32_768, 4, 32),
    (8, 32_768, 4, 128),
    (8, 32_768, 8, 128),
]


def packed(device: torch.device, batch: int, tokens: int, bits: int, unit: int, per_token: bool) -> Packed:
    """Random codes, with scales at which keys and values come out about as large as normal numbers."""
    entries, groups = (tokens, DIM // unit) if per_token else (tokens // unit, DIM)
    shape = (batch, H_KV, entries, groups)
    words = torch.randint(-(2**31), 2**31, (*shape, unit * bits // 32), device=device, dtype=torch.int64)
    scale = (torch.rand(shape, device=device) + 1) * (2 / 2**bits)
    minimum = torch.randn(shape, device=device).half() - 1
    return Packed(words.to(torch.int32), scale.half(), minimum, bits, unit, per_token)


def setup(device: torch.device, batch: int, tokens: int, bits: int, unit: int, entries: int) -> dict[str, Any]:
    """`tokens` in codes of `unit` tokens or channels, a tail of TAIL; `entries` of each head exact."""
    torch.manual_seed(0)
    exact = partial(torch.randn, device=device, dtype=torch.bfloat16)
    keys, values = (
        Side(packed(device, batch, tokens, bits, unit, per_token), exact(batch, H_KV, TAIL, DIM))
        for per_token in (False, True)
    )
    keys16, values16 = (
        torch.cat([torch.cat([part.dequantised().bfloat16() for part in _parts(side.packed)]), side.tail], dim=2)
        for side in (keys, values)
    )
    outliers = None
    if entries:
        slots = torch.rand(batch, H_KV, tokens, device=device).topk(entries).indices.to(torch.int32)
        outliers = Outliers(*(exact(batch, H_KV, entries, DIM) for _ in range(2)), slots)
        where = outliers.slots.long()[..., None].expand(-1, -1, -1, DIM)
        keys16.scatter_(2, where, outliers.keys)
        values16.scatter_(2, where, outliers.values)
    return {
        "queries": exact(batch, H_Q, 1, DIM),
        "query_positions": torch.full((batch, 1), tokens + TAIL, device=device),
        "keys": keys,
        "values": values,
        "scaling": DIM**-0.5,
        "outliers": outliers,
        "keys16": keys16,
        "values16": values16,
    }


def _parts(codes: Packed) -> Iterator[Packed]:
    """A sequence at a time."""
    for words, scale, minimum in zip(*(x.split(1) for x in (codes.words, codes.scale, codes.minimum)), strict=True):
        yield replace(codes, words=words, scale=scale, minimum=minimum)


def reference(
    queries: Tensor, query_positions: Tensor, keys: Side, values: Side, scaling: float, **call: Any
) -> Tensor:
    """The definition, a sequence at a time."""
    outputs, outliers = [], call["outliers"]
    for b, (k, v) in enumerate(zip(_parts(keys.packed), _parts(values.packed), strict=True)):
        here = slice(b, b + 1)
        sides = Side(k, keys.tail[here]), Side(v, values.tail[here])
        pool = None if outliers is None else Outliers(*(x[here] for x in outliers))
        outputs.append(quantised_attention_ref(queries[here], query_positions[here], *sides, scaling, None, pool).out)
    return torch.cat(outputs)


def sdpa_bf16(queries: Tensor, keys16: Tensor, values16: Tensor, scaling: float, **_: Any) -> Tensor:
    """What the same numbers in bfloat16 cost: the reads that packing saves."""
    rows = queries.view(queries.shape[0], H_KV, GROUP, DIM)
    return F.scaled_dot_product_attention(rows, keys16, values16, scale=scaling).flatten(1, 2)[:, :, None]


def bytes_moved(batch: int, tokens: int, bits: int, unit: int, entries: int) -> int:
    """Codes, scales and minima, the tail and the pool once; queries and outputs."""
    coded = tokens * DIM * 2 * bits // 8 + 2 * tokens // unit * DIM * 4
    exact = (TAIL + entries) * DIM * 4 + 4 * entries + 2 * GROUP * DIM * 2
    return batch * H_KV * (coded + exact)


def cases(scale: int = 1) -> Iterator[KernelCase]:
    """KIVI's form (no pool) at 2, 4 and 8 bits, and OTT's at 2."""
    for sequences, whole, bits, unit in SHAPES:
        batch, tokens = max(1, sequences // scale), scaled(whole, scale)
        for entries in (0, OUTLIERS) if (bits, unit) == (2, 128) else (0,):
            sizes = {"batch": batch, "tokens": tokens, "bits": bits, "unit": unit, "entries": entries}
            pool = f", {entries} outliers" if entries else ""
            yield KernelCase(
                "quantised_attention",
                f"B={batch} H={H_KV} G={GROUP} T={tokens} D={DIM} {bits} bits of {unit}{pool}",
                partial(setup, **sizes),
                {
                    "reference": reference,
                    "triton": provider(quantised_attention_triton, attrgetter("out"), ("keys16", "values16")),
                    "sdpa_bf16": sdpa_bf16,
                },
                bytes_moved=bytes_moved(**sizes),
                flops=4 * batch * H_Q * tokens * DIM,
            )
