"""Time the GPU kernels and their PyTorch references: `python scripts/kernel_bench.py [WORD ...]`.

Every row has the median time with its 20th and 80th percentiles (triton.testing.do_bench), the minimum bytes to read,
and the bandwidth as a share of that of a plain copy on the same device. A WORD selects cases by name. Without a GPU
each case runs once at a small size with PyTorch, and its times are meaningless.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.decode import decode_attention, decode_attention_flat
from kvbench.kernels.group_codes import Ring
from kvbench.kernels.prompt import prompt_attention
from kvbench.kernels.query_sums import attention_moments, column_sums, window_statistics
from kvbench.kernels.references import NewTokens, attention_rows
from kvbench.policies.observation import AttentionParams
from kvbench.policies.stores.group_step import group_step
from kvbench.policies.stores.kivi import Kivi

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
SMALLER = 1 if GPU else 64
H_KV, G, D = 8, 4, 128


class Case(NamedTuple):
    """A kernel at one size: the bytes it has to read, our function and others that compute the same."""

    name: str
    nbytes: int
    ours: Callable[[], object]
    others: dict[str, Callable[[], object]]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def timed(call: Callable[[], object]) -> tuple[float, float, float]:
    """Milliseconds: 20th percentile, median, 80th percentile."""
    if GPU:
        from triton.testing import do_bench

        low, middle, high = do_bench(call, quantiles=[0.2, 0.5, 0.8])
        return low, middle, high
    start = time.perf_counter()
    call()
    return (1e3 * (time.perf_counter() - start),) * 3


def copy_rate() -> float:
    """Bytes per millisecond of a plain copy: those read and those written."""
    x = torch.empty(2**30 // SMALLER, dtype=torch.uint8, device=DEVICE)
    return 2 * x.nbytes / timed(x.clone)[1]


def decoding(batch: int, slots: int) -> Case:
    queries, (keys, values) = drawn(batch, H_KV * G, 1, D), drawn(2, batch, H_KV, slots, D)
    call: tuple[Any, ...] = queries, keys, values, None, None, D**-0.5
    others: dict[str, Callable[[], object]] = {
        "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)
    }
    try:
        import flashinfer  # FlashInfer's layout: tokens before heads
    except ImportError:
        pass
    else:
        if batch == 1:
            nhd = keys[0].transpose(0, 1).contiguous(), values[0].transpose(0, 1).contiguous()
            others["flashinfer"] = lambda: flashinfer.single_decode_with_kv_cache(queries[0, :, 0], *nhd)
    name = f"decode batch={batch} T={slots}"
    return Case(name, keys.nbytes * 2, lambda: decode_attention(*call, packed=True), others)


def with_weights(batch: int, slots: int) -> Case:
    case = decoding(batch, slots)
    queries, (keys, values) = drawn(batch, H_KV * G, 1, D), drawn(2, batch, H_KV, slots, D)
    sums = torch.zeros(batch, H_KV, slots, 1, device=DEVICE)
    call = queries, keys, values, None, None, D**-0.5
    logits = 4 * batch * H_KV * G * slots
    return Case(
        f"{case.name} with sums", case.nbytes + 2 * logits, lambda: decode_attention(*call, packed=True, sums=sums), {}
    )


def ragged(long: int, short: int, rows: int) -> Case:
    """One long sequence and many short ones in one launch."""
    counts = torch.tensor([long, *[short] * (rows - 1)], device=DEVICE)[:, None].expand(-1, H_KV).contiguous()
    starts = counts.flatten().cumsum(0).view_as(counts) - counts
    keys, values = drawn(2, int(counts.sum()), D)
    places = torch.zeros(len(keys), dtype=torch.int32, device=DEVICE)
    asked = torch.zeros(rows, 1, dtype=torch.int64, device=DEVICE)
    call = drawn(rows, H_KV * G, 1, D), keys, values, asked, places, starts, counts, long, D**-0.5
    return Case(f"decode ragged {rows} rows T={long}", keys.nbytes * 2, lambda: decode_attention_flat(*call), {})


def over_prompts(slots: int) -> Iterator[Case]:
    queries, (keys, values) = drawn(1, H_KV * G, slots, D), drawn(2, 1, H_KV, slots, D)
    places = torch.arange(slots, device=DEVICE)[None]
    call = queries, keys, places, places[:, None].expand(-1, H_KV, -1), D**-0.5
    prompt = queries, keys, values, *call[2:]
    found = prompt_attention(*prompt, aligned=True)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    rows = {"sdpa": lambda: sdpa(queries, keys, values, is_causal=True, enable_gqa=True)}
    once = queries.nbytes + 2 * keys.nbytes
    how = {"log_sum_exp": found.log_sum_exp, "aligned": True}
    yield Case(f"prompt T={slots}", once, lambda: prompt_attention(*prompt, aligned=True), rows)
    capped = {"softcap": 50.0, "aligned": True}
    yield Case(f"prompt softcap T={slots}", once, lambda: prompt_attention(*prompt, **capped), {})
    yield Case(f"column sums T={slots}", once, lambda: column_sums(*call, **how), {})
    yield Case(f"moments T={slots}", once, lambda: attention_moments(*call, **how), {})
    window = queries[:, :, -32:], keys, places[:, -32:], *call[3:]
    pytorch = {"rows": lambda: attention_rows(*window).sum(-2)}
    yield Case(f"window of 32 T={slots}", 2 * keys.nbytes, lambda: window_statistics(*window), pytorch)


def codes(bits: int, tokens: int) -> Case:
    """A step of kivi: keys per channel in groups of 128 tokens, values per token, 128 newest tokens exact."""
    codec, memory = Kivi(bits), {}
    for side, start in enumerate(("keys", "values")):
        x = drawn(1, H_KV, tokens, D)
        held = {f"{start} {name}": part for name, part in codec.encode(x, side).items()}
        memory |= {name: x.flatten(0, 2) for name, x in held.items()}
    exact, new = drawn(2, 1, H_KV, codec.most_exact, D), drawn(2, 1, H_KV, 1, D)
    ring = Ring(exact[0], exact[1], torch.zeros(exact.shape[1:4], dtype=torch.int32, device=DEVICE))
    starts = torch.arange(H_KV, device=DEVICE)[None] * tokens
    zeros = torch.zeros_like(starts)
    places = zeros[:, :1], torch.zeros(H_KV * tokens, dtype=torch.int32, device=DEVICE)
    call = NewTokens(new[0], new[1], zeros), zeros - 1, memory, ring, places, (starts, zeros + tokens), tokens
    queries, how = drawn(1, H_KV * G, 1, D), AttentionParams(D**-0.5)
    nbytes = sum(x.nbytes for x in memory.values()) + exact.nbytes
    return Case(f"codes of {bits} bits T={tokens}", nbytes, lambda: group_step(codec, queries, *call, how), {})


def cases() -> Iterator[Case]:
    for batch, slots in ((1, 1024), (32, 1024), (1, 32768), (32, 8192)):
        yield decoding(batch, slots // SMALLER)
        yield with_weights(batch, slots // SMALLER)
    yield ragged(131072 // SMALLER, 1024 // SMALLER, 36)
    for slots in (8192, 32768):
        yield from over_prompts(slots // SMALLER)
    for bits in (2, 4):
        yield codes(bits, max(128, 32768 // SMALLER))


def rows(words: list[str]) -> Iterator[dict[str, Any]]:
    """A row for every function of every case that has one of the words in its name."""
    rate = copy_rate()
    for case in cases():
        if words and not any(word in case.name for word in words):
            continue
        for method, call in {"kvbench": case.ours, **case.others}.items():
            low, middle, high = timed(call)
            share = case.nbytes / middle / rate
            yield {"case": case.name, "method": method, "ms": middle, "p20": low, "p80": high, "of copy rate": share}


if __name__ == "__main__":
    print(f"{torch.cuda.get_device_name() if GPU else 'CPU: the times mean nothing'}, {DTYPE}")
    for row in rows(sys.argv[1:]):
        times = f"{row['ms']:9.3f} ms ({row['p20']:.3f} to {row['p80']:.3f})"
        print(f"{row['case']:40} {row['method']:10} {times}  {row['of copy rate']:6.1%} of a copy", flush=True)
