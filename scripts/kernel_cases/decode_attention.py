# ruff: noqa: ANN401 - a provider takes a call by name and passes it on
"""Decode attention at the sizes of an 8B model: long and short, one sequence and many, dense, shuffled and ragged.

Beside PyTorch's sdpa stand flex_attention (compiled for a GPU), and flash-attn and FlashInfer where they are installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch
from kernel_cases.case import DIM, GROUP, H_KV, H_Q, call_of, dtype_name, provider, scaled
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from kvbench.kernels.attention_rows import attention_rows
from kvbench.kernels.decode_attention import decode_attention_ref, decode_attention_triton
from kvbench.kernels.decode_attention_flat import decode_attention_flat_ref, decode_attention_flat_triton
from kvbench.tools.bench.kernels import KernelCase
from kvbench.tools.bench.rivals import installed

PAGE = 16  # tokens, of FlashInfer's cache
SHAPES = [(1, 1024), (1, 8192), (1, 131_072), (8, 1024), (32, 1024), (32, 4096), (32, 8192)]


def setup(device: torch.device, batch: int, slots: int, dtype: torch.dtype) -> dict[str, Any]:
    """Slots in random order, as after overwriting in place; the newest token asks and sees them all."""
    call = call_of(device, 1, slots, DIM, dtype, batch)
    order = torch.randperm(slots, generator=torch.Generator(device).manual_seed(0), device=device).to(torch.int32)
    call["key_positions"] = order.repeat(batch, H_KV, 1)
    return {**call, "keys": call["keys"].contiguous(), "values": call["values"].contiguous()}


def setup_flat(device: torch.device, batch: int, slots: int, dtype: torch.dtype) -> dict[str, Any]:
    """Segments of 1/4 to 7/4 of `slots`, which is their mean."""
    lengths = torch.linspace(slots // 4, 2 * slots - slots // 4, H_KV).long().repeat(batch, 1)
    counts = lengths.to(device)
    starts = counts.flatten().cumsum(0).view_as(counts) - counts
    made = setup(device, batch, slots, dtype)
    flat = {name: made[name].flatten(0, 2) for name in ("keys", "values", "key_positions")}
    return {**made, **flat, "starts": starts, "counts": counts, "most": int(lengths.max())}


def setup_paged(device: torch.device, batch: int, slots: int, dtype: torch.dtype) -> dict[str, Any]:
    """The same, and its pages of tokens [pages, PAGE, H_kv, D] with FlashInfer's plan where it is installed."""
    made = setup(device, batch, slots, dtype)
    if device.type != "cuda" or not installed("flashinfer"):
        return made
    import flashinfer

    pages = [made[name].transpose(1, 2).reshape(-1, PAGE, H_KV, DIM) for name in ("keys", "values")]
    each = slots // PAGE
    plan = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(2**27, dtype=torch.uint8, device=device), "NHD")
    numbers = partial(torch.arange, dtype=torch.int32, device=device)
    last = torch.full((batch,), PAGE, dtype=torch.int32, device=device)
    plan.plan(
        numbers(0, (batch + 1) * each, each), numbers(batch * each), last, H_Q, H_KV, DIM, PAGE,
        q_data_type=dtype, kv_data_type=dtype, sm_scale=made["scaling"],
    )  # fmt: skip
    return {**made, "plan": plan, "pages": tuple(pages)}


def sdpa(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, **_: Any) -> Tensor:
    return F.scaled_dot_product_attention(queries, keys, values, scale=scaling, enable_gqa=True)


def sdpa_grouped(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, **_: Any) -> Tensor:
    """A group's query heads as rows of their KV head: what kvbench calls where Triton is missing."""
    rows = queries.reshape(queries.shape[0], H_KV, GROUP, DIM)
    return F.scaled_dot_product_attention(rows, keys, values, scale=scaling).view_as(queries)


compiled = cache(partial(torch.compile, dynamic=False))


def flex(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, **_: Any) -> Tensor:
    return compiled(flex_attention)(queries, keys, values, scale=scaling, enable_gqa=True)


def flash_attn(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, **_: Any) -> Tensor:
    from flash_attn import flash_attn_with_kvcache

    tokens = (x.transpose(1, 2) for x in (queries, keys, values))
    out: Tensor = flash_attn_with_kvcache(*tokens, softmax_scale=scaling)
    return out.transpose(1, 2)


def flashinfer(queries: Tensor, plan: Any, pages: Any, **_: Any) -> Tensor:
    out: Tensor = plan.run(queries[:, :, 0], pages)
    return out[:, :, None]


def on_gpu() -> dict[str, Callable[..., Tensor]]:
    """Rivals that run on GPUs only, where they are installed."""
    here = {"flash_attn": flash_attn, "flashinfer": flashinfer}
    found = {"flex_attention": flex, **{name: run for name, run in here.items() if installed(name)}}
    return found if torch.cuda.is_available() else {}


def two_passes(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, **call: Any) -> Tensor:
    """Output by SDPA and weights once more for the policy: what a policy beside a fused attention pays."""
    sdpa_grouped(queries, keys, values, scaling)
    return attention_rows(queries, keys, call["query_positions"], call["key_positions"], scaling)


def cases(scale: int = 1, dtype: torch.dtype = torch.bfloat16) -> Iterator[KernelCase]:
    both = {"reference": decode_attention_ref, "triton": decode_attention_triton}
    ragged = {"reference": decode_attention_flat_ref, "triton": decode_attention_flat_triton}
    out, weights = attrgetter("out"), attrgetter("weights")
    unplanned = ("plan", "pages")
    for batch, stored in SHAPES:
        slots = scaled(stored, scale)
        vectors = 2 * batch * DIM * dtype.itemsize * (H_KV * slots + H_Q)
        places, rows = 4 * batch * H_KV * slots, 4 * batch * H_Q * slots
        of = f"B={batch} H_kv={H_KV} G={GROUP} D={DIM} T={slots} {dtype_name(dtype)}"
        case = partial(KernelCase, "decode_attention", flops=4 * batch * H_Q * slots * DIM)
        setup_of = partial(partial, batch=batch, slots=slots, dtype=dtype)
        packed = {name: provider(one, out, unplanned, packed=True) for name, one in both.items()}
        packed |= {"sdpa": sdpa, "sdpa_grouped": sdpa_grouped, **on_gpu()}
        yield case(f"packed {of}", setup_of(setup_paged), packed, bytes_moved=vectors)
        placed = {name: provider(one, out) for name, one in both.items()}
        yield case(f"positions read {of}", setup_of(setup), placed, bytes_moved=vectors + places)
        scored = {name: provider(one, weights, packed=True, weights=True) for name, one in both.items()}
        scored["two_passes"] = two_passes
        yield case(f"with weights {of}", setup_of(setup), scored, bytes_moved=vectors + rows)
        flat = {name: provider(one, out) for name, one in ragged.items()}
        yield case(f"ragged {of}", setup_of(setup_flat), flat, bytes_moved=vectors + places)
