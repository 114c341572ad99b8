"""How long the kernels take, every provider beside the others on the same tensors, each checked before it is timed.

    python scripts/bench_kernels.py [--device cuda] [--threads 2] [--seconds 1] [--csv FILE]

GFLOP/s counts one product of query and key for every pair the causal mask lets through; GB/s counts every input and
output once. Both are floors of what a provider really does, so that providers can be compared with the device's peak.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvbench.kernels.column_sums import column_sums_blocked, column_sums_ref, column_sums_triton
from kvbench.runs.environment import git_revision

REFERENCE_LIMIT = 2 * 2**30  # bytes of [H_q,M,T] logits up to which the reference is asked


@dataclass(frozen=True)
class Case:
    """The last M of T tokens of one sequence ask, all T are stored: M = T is a whole prompt, M < T a block of it."""

    H_q: int
    H_kv: int
    M: int
    T: int
    D: int
    dtype: str

    def setup(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
        random = torch.Generator().manual_seed(0)
        queries = torch.randn(1, self.H_q, self.M, self.D, generator=random)
        keys = torch.randn(1, self.H_kv, self.T, self.D, generator=random)
        dtype = getattr(torch, self.dtype)
        places = torch.arange(self.T, device=device)
        positions = places[None, self.T - self.M :], places.expand(1, self.H_kv, self.T)
        return queries.to(device, dtype), keys.to(device, dtype), *positions, self.D**-0.5

    @property
    def flops(self) -> int:
        pairs = self.M * (self.T - self.M) + self.M * (self.M + 1) // 2
        return 2 * self.D * self.H_q * pairs

    @property
    def bytes_moved(self) -> int:
        vectors = (self.H_q * self.M + self.H_kv * self.T) * self.D * getattr(torch, self.dtype).itemsize
        return vectors + 8 * (self.M + self.H_kv * self.T) + 4 * self.H_q * self.T


def sweep(device: torch.device) -> Iterator[Case]:
    """On CPUs the heads of a 12 M model in float32; on GPUs those of an 8 B model, and float32 once."""
    if device.type == "cpu":
        for dim in (32, 64):
            yield from (Case(8, 4, tokens, tokens, dim, "float32") for tokens in (1024, 4096))
            yield Case(8, 4, 128, 128 + 256, dim, "float32")
        return
    yield from (Case(32, 8, tokens, tokens, 128, "bfloat16") for tokens in (1024, 4096, 16384, 65536))
    yield from (Case(32, 8, 128, slots, 128, "bfloat16") for slots in (640, 4096, 65536))
    yield Case(32, 8, 4096, 4096, 128, "float32")


def providers(case: Case, device: torch.device) -> dict[str, Callable[..., Tensor]]:
    """The first is the yardstick of correctness: the reference, or the blocks where it would not fit."""
    found: dict[str, Callable[..., Tensor]] = {}
    if 4 * case.H_q * case.M * case.T <= REFERENCE_LIMIT:
        found["reference"] = column_sums_ref
    found["blocked"] = column_sums_blocked
    if device.type == "cuda":
        found["triton"] = column_sums_triton
    return found


def bench(call: Callable[[], object], device: torch.device, seconds: float) -> list[float]:
    """Milliseconds of at least 5 runs, and for `seconds`, after one run to warm up."""
    times: list[float] = []
    call()
    while len(times) < 5 or sum(times) < 1e3 * seconds:
        began = _now(device)
        call()
        times.append(1e3 * (_now(device) - began))
    return times


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(case: Case, device: torch.device, seconds: float) -> Iterator[dict[str, Any]]:
    """One row for each provider; AssertionError where it disagrees with the yardstick: a wrong answer has no speed."""
    inputs = case.setup(device)
    expected: Tensor | None = None
    for name, function in providers(case, device).items():
        got = function(*inputs)
        expected = got if expected is None else expected
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        times = bench(lambda function=function: function(*inputs), device, seconds)  # type: ignore[misc]
        p20, *_, p80 = statistics.quantiles(times, n=5)
        p50 = statistics.median(times)
        yield {
            "kernel": "column_sums",
            "provider": name,
            **asdict(case),
            "ms_p50": round(p50, 3),
            "ms_p20": round(p20, 3),
            "ms_p80": round(p80, 3),
            "runs": len(times),
            "gflop_per_s": round(case.flops / p50 / 1e6, 1),
            "gb_per_s": round(case.bytes_moved / p50 / 1e6, 2),
        }


def _where(device: torch.device) -> dict[str, Any]:
    """What the numbers of a row depend on besides the case."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # no wheels outside Linux
        triton = None
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": triton,
        "revision": git_revision(Path(__file__).resolve().parent.parent / "kvbench"),
    }


def _append(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        if fresh:
            writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU")
    parser.add_argument("--seconds", type=float, default=1.0, help="of timing for each provider and case")
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    where = _where(device)
    rows = [{**row, **where} for case in sweep(device) for row in measure(case, device, args.seconds)]
    table = Table("M", "T", "D", "dtype", "provider", "ms", "p20 - p80", "GFLOP/s", "GB/s")
    for row in rows:
        shape = (str(row[size]) for size in "MTD")
        spread = f"{row['ms_p20']:.2f} - {row['ms_p80']:.2f}"
        speed = f"{row['gflop_per_s']:.1f}", f"{row['gb_per_s']:.2f}"
        table.add_row(*shape, row["dtype"], row["provider"], f"{row['ms_p50']:.2f}", spread, *speed)
    console = Console()
    console.print(table)
    console.print(", ".join(f"{key} {value}" for key, value in where.items()))
    if args.csv:
        _append(args.csv, rows)


if __name__ == "__main__":
    main()
