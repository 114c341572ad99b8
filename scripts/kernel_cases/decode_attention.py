"""Decode attention at the sizes of an 8B model: long and short, one sequence and many, dense, shuffled and ragged."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from kernel_cases.case import KernelCase, scaled
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.attention_rows import attention_rows
from kvbench.kernels.decode_attention import decode_attention_ref, decode_attention_triton
from kvbench.kernels.decode_attention_flat import decode_attention_flat_ref, decode_attention_flat_triton

HEADS, GROUP, DIM = 8, 4, 128
SHAPES = [(1, 1024), (1, 8192), (1, 131_072), (8, 1024), (32, 1024), (32, 4096)]


def setup(device: torch.device, batch: int, slots: int, dtype: torch.dtype) -> dict[str, Any]:
    """Slots in random order, as after overwriting in place; the newest token asks and sees them all."""
    random = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, generator=random, device=device, dtype=dtype)
    places = torch.randperm(slots, generator=random, device=device).to(torch.int32)
    return {
        "queries": draw(batch, HEADS * GROUP, 1, DIM),
        "keys": draw(batch, HEADS, slots, DIM),
        "values": draw(batch, HEADS, slots, DIM),
        "query_positions": torch.full((batch, 1), slots - 1, device=device),
        "key_positions": places.repeat(batch, HEADS, 1),
        "scaling": DIM**-0.5,
    }


def setup_flat(device: torch.device, batch: int, slots: int, dtype: torch.dtype) -> dict[str, Any]:
    """Segments of 1/4 to 7/4 of `slots`, which is their mean."""
    lengths = torch.linspace(slots // 4, 2 * slots - slots // 4, HEADS).long().repeat(batch, 1)
    counts = lengths.to(device)
    starts = counts.flatten().cumsum(0).view_as(counts) - counts
    made = setup(device, batch, slots, dtype)
    flat = {name: made[name].flatten(0, 2) for name in ("keys", "values", "key_positions")}
    return {**made, **flat, "starts": starts, "counts": counts, "most": int(lengths.max())}


def sdpa(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, **others: object) -> Tensor:
    return F.scaled_dot_product_attention(queries, keys, values, scale=scaling, enable_gqa=True)


def sdpa_grouped(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, **others: object) -> Tensor:
    """A group's query heads as rows of their KV head: what kvbench calls where Triton is missing."""
    rows = queries.view(queries.shape[0], HEADS, GROUP, DIM)
    return F.scaled_dot_product_attention(rows, keys, values, scale=scaling).view_as(queries)


def two_passes(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
) -> Tensor:
    """Output by SDPA and weights once more for the policy: what a policy beside a fused attention pays."""
    sdpa_grouped(queries, keys, values, scaling)
    return attention_rows(queries, keys, query_positions, key_positions, scaling)


def output(function: Any, **call: Any) -> Tensor:  # noqa: ANN401
    return function(**call).out


def weights(function: Any, **call: Any) -> Tensor:  # noqa: ANN401
    return function(**call, weights=True).weights


def cases(scale: int = 1, dtype: torch.dtype = torch.bfloat16) -> Iterator[KernelCase]:
    triton, reference = decode_attention_triton, decode_attention_ref
    for batch, stored in SHAPES:
        slots = scaled(stored, scale)
        vectors = batch * HEADS * slots * 2 * DIM * dtype.itemsize + 2 * batch * HEADS * GROUP * DIM * dtype.itemsize
        stored, rows = 4 * batch * HEADS * slots, 4 * batch * HEADS * GROUP * slots
        case = partial(
            KernelCase,
            kernel="decode_attention",
            setup=partial(setup, batch=batch, slots=slots, dtype=dtype),
            flops=4 * batch * HEADS * GROUP * slots * DIM,
        )
        size = f"B={batch} H_kv={HEADS} G={GROUP} D={DIM} T={slots} {str(dtype).removeprefix('torch.')}"
        packed: dict[str, Any] = {
            "reference": partial(output, reference, packed=True),
            "triton": partial(output, triton, packed=True),
            "sdpa": sdpa,
            "sdpa_grouped": sdpa_grouped,
        }
        yield case(label=f"packed {size}", providers=packed, bytes_moved=vectors)
        placed = {"reference": partial(output, reference), "triton": partial(output, triton)}
        yield case(label=f"positions read {size}", providers=placed, bytes_moved=vectors + stored)
        scored: dict[str, Any] = {
            "reference": partial(weights, reference, packed=True),
            "triton": partial(weights, triton, packed=True),
            "two_passes": two_passes,
        }
        yield case(label=f"with weights {size}", providers=scored, bytes_moved=vectors + rows)
        flat = {
            "reference": partial(output, decode_attention_flat_ref),
            "triton": partial(output, decode_attention_flat_triton),
        }
        ragged = partial(setup_flat, batch=batch, slots=slots, dtype=dtype)
        yield case(label=f"ragged {size}", providers=flat, bytes_moved=vectors + stored, setup=ragged)
