"""Every kernel case of scripts/kernel_cases/, providers side by side: an answer is checked before it is timed."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os.path import expanduser
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kvbench
from kvbench.report.figures.curves import Chart, ChartGroup, ChartRow, Picture
from kvbench.terminal.errors import UsageError
from kvbench.tools.bench.bench import Bench, BenchProtocol, Row
from kvbench.tools.bench.clock import COLD, FEWEST, MOST, SECONDS, Clock, sets_of_inputs, time_calls
from kvbench.tools.bench.journal import Cell, Record, attempt, why_not
from kvbench.tools.bench.machine import lost
from kvbench.tools.bench.providers import tensors_in
from kvbench.tools.bench.report import dots_of
from kvbench.tools.bench.rivals import installed

PROMISED, LARGE = {"decode_attention": 0.7, "quantised_attention": 0.6}, 2**28
"""Shares of a copy's bandwidth that our kernels are to reach, from so many bytes on."""
OURS = ("triton", "positions", "alone")
"""Providers whose failure is a mistake of ours; those of others may fail."""
MORE = ("flash_attn", "flashinfer")
"""Packages that cases compare with where they are installed."""


@dataclass(frozen=True)
class KernelCase:
    """One size of one kernel. The first provider is the yardstick of correctness; a wrong answer has no speed.

    setup makes the inputs on a device; a provider takes them by name. bytes_moved and flops are floors: every input
    read once, every output written once. tolerance bounds |out - yardstick| / |yardstick| over the whole output.
    beside: providers that compute something else, which is timed and not compared.
    """

    kernel: str
    label: str
    setup: Callable[[torch.device], dict[str, Any]]
    providers: Mapping[str, Callable[..., Any]]
    bytes_moved: int
    flops: int = 0
    tolerance: float = 1e-2
    beside: Sequence[str] = ()

    @property
    def key(self) -> str:
        return f"{self.kernel}, {self.label}"


@dataclass(frozen=True)
class KernelsProtocol(BenchProtocol):
    """Cells are cases; rows are providers. It runs no model."""

    name: str = "kernels"
    model: str = ""

    def remarks(self, bench: Bench) -> list[str]:
        absent = [package for package in MORE if not installed(package)]
        return [
            f"{FEWEST} to {MOST} runs, {SECONDS} s of them, after a first one that compiles; on a GPU the "
            "time of the device, which is kept busy until a call is launched, over inputs that take turns and are "
            f"{COLD} times its cache; floor: the bytes that must be moved, at a copy's bandwidth; of the limit: the "
            "floor over the time",
            *([f"without {' and '.join(absent)}: not installed"] if absent else []),
        ]

    def cells(self, bench: Bench) -> list[Cell]:
        return [Cell(case.key, partial(_measure, case, bench.device)) for case in found_cases(bench)]

    def rows(self, bench: Bench, found: Mapping[str, Record]) -> list[Row]:
        return [row for case in found_cases(bench) if case.key in found for row in _rows(bench, case, found)]

    def picture(self, bench: Bench, rows: list[Row]) -> Picture:
        """Every case beside its floor, the time in which a copy moves its bytes: a dot per provider that has a time."""
        groups: dict[str, list[ChartRow]] = {}
        for case in found_cases(bench):
            own = [row for row in rows if row.task == case.key]
            if own:
                groups.setdefault(case.kernel, []).append(_chart_row(case, own))
        if not any(row.share_of_limit for row in rows):
            return []
        notes = [
            "Dashed: the floor, all inputs read and all outputs written once at the bandwidth that a copy was measured "
            "to have (right: the bytes and that time). Kernels that compute more than they move stay away from it.",
            "Lines beside the dots: 20th to 80th percentile of the runs.",
            *dict.fromkeys(f"No time for {row.method}: {row.note.removesuffix('.')}." for row in rows if not row.value),
        ]
        return Chart("share of a copy's bandwidth", [ChartGroup(*g) for g in groups.items()], notes, percent=True)


# --- the cases -------------------------------------------------------------------------------------------------------
def cases_folder(bench: Bench) -> Path:
    """`cases=`, or scripts/kernel_cases of the checkout this package lies in."""
    if bench.settings.cases is not None:
        return Path(expanduser(bench.settings.cases))
    return Path(str(kvbench.__file__)).resolve().parent.parent / "scripts" / "kernel_cases"


def found_cases(bench: Bench) -> Iterator[KernelCase]:
    """The cases of every module in the folder that `only=` names. UsageError where there is none."""
    folder = cases_folder(bench)
    names = sorted(p.stem for p in folder.glob("*.py") if p.stem not in ("__init__", "case"))
    if not names:
        raise UsageError(f"cases={folder} holds no kernel cases: it is a folder of modules with cases(scale)")
    for place in (folder, folder.parent):  # modules may say `kernel_cases.case` or `case`
        if str(place) not in sys.path:
            sys.path.append(str(place))
    modules = (importlib.import_module(f"{folder.name}.{name}") for name in names)
    every = (case for module in modules for case in module.cases(bench.scale))
    seen = {case.key: case for case in every}  # at a small scale, sizes fall together
    only = bench.settings.only
    chosen = [case for key, case in seen.items() if only is None or any(word in key for word in only)]
    if not chosen:
        raise UsageError(f"only={','.join(only or ())} is in the name of no case, such as {next(iter(seen))}")
    yield from chosen


# --- what is measured ------------------------------------------------------------------------------------------------
def _measure(case: KernelCase, device: torch.device) -> Record:
    """Every provider of a case: wrong by how much, and if not too wrong, how fast."""
    yardstick: list[Tensor] | None = None
    found: dict[str, Record] = {}
    with torch.inference_mode():
        for name in case.providers:
            record, out = _provider(case, name, device, None if name in case.beside else yardstick)
            if "failed" in record and lost(device):  # the others cannot be measured by this process
                return {"failed": f"{name}: {record['failed']}"}
            yardstick = out if yardstick is None else yardstick
            found[name] = record
    measured = {"providers": found, "bytes_moved": case.bytes_moved, "flops": case.flops}
    broken = [f"{name}: {_without_time(found[name])}" for name in OURS if _broken(found.get(name, {"ms": 0}))]
    return measured | {"failed": broken[0]} if broken and runs_ours(device) else measured


def runs_ours(device: torch.device) -> bool:
    """Whether our kernels run there, so that one which has no time is a mistake."""
    return device.type == "cuda"


def _broken(provider: Record) -> bool:
    return "ms" not in provider and "out_of_memory" not in provider


def _provider(
    case: KernelCase, name: str, device: torch.device, yardstick: list[Tensor] | None
) -> tuple[Record, list[Tensor] | None]:
    out: list[Tensor] = []

    def measured() -> Record:
        call, clock = partial(case.providers[name], **case.setup(device)), Clock(device)
        clock.mark()
        result = call()
        clock.mark()
        out.extend(t.clone() for t in tensors_in(result))
        error = 0.0 if yardstick is None else relative_error(out, yardstick)
        record = {"first_ms": clock.laps()[0], "error": error, "right": error <= case.tolerance}
        if not record["right"]:
            return record
        more = range(sets_of_inputs(case.bytes_moved, device) - 1)
        calls = [call, *(partial(case.providers[name], **case.setup(device)) for _ in more)]
        return record | {"ms": time_calls(calls, device).as_dict()}

    record = attempt(Cell("", measured, foreign=name not in OURS or not runs_ours(device)))
    return record, out or None


def relative_error(outputs: list[Tensor], expected: list[Tensor]) -> float:
    """|out - expected| / |expected|: the largest of the tensors a kernel gives (2 where shapes differ).

    Whole numbers and truth values must be equal: their error is the share that differs. NaN and infinity are as wrong
    as can be.
    """
    if [t.shape for t in outputs] != [t.shape for t in expected]:
        return 2.0
    return max((_error(a, b) for a, b in zip(outputs, expected, strict=True)), default=2.0)


def _error(out: Tensor, expected: Tensor) -> float:
    if out.numel() == 0:
        return 0.0
    if not expected.is_floating_point():
        return float((out != expected).float().mean())
    a, b = out.double(), expected.double()
    same = (a == b) | (a.isnan() & b.isnan())  # infinities and holes that both have
    difference = torch.where(same, 0.0, a - b).norm()
    error = float(difference / torch.where(b.isfinite(), b, 0.0).norm().clamp(min=1e-30))
    return error if math.isfinite(error) else 2.0


# --- what it says ----------------------------------------------------------------------------------------------------
def _rows(bench: Bench, case: KernelCase, found: Mapping[str, Record]) -> Iterator[Row]:
    record, aim = found[case.key], PROMISED.get(case.kernel)
    for name, provider in record.get("providers", {"-": record}).items():
        row = partial(Row, "kvbench", "kernels", "", name, None, "", case.key, "ms")
        ms = provider.get("ms")
        if ms is None:
            yield row(None, _without_time(provider))
            continue
        floor = 1e3 * case.bytes_moved / record["copy_bytes_per_s"]
        share = floor / ms["p50"]
        flops = f", {case.flops / ms['p50'] / 1e9:.1f} TFLOP/s" if case.flops else ""
        note = f"floor {floor:.3g} ms, error {provider['error']:.1e}, first call {provider['first_ms']:.0f} ms{flops}"
        bound: dict[str, Any] = {}
        if aim is not None and name == "triton" and case.bytes_moved >= LARGE:
            bound = {"bound": f"at least {aim:.0%} of the limit", "met": share >= aim if bench.judged else None}
        yield row(ms["p50"], note, **ms, share_of_limit=share, **bound)


def _without_time(provider: Record) -> str:
    """Why a provider has no time."""
    if "error" in provider:
        return f"wrong: relative error {provider['error']:.1e}, so it has no speed"
    return why_not(provider)


def _chart_row(case: KernelCase, rows: Sequence[Row]) -> ChartRow:
    """What the providers of a case reached of the floor; a bar where one is promised."""
    floors = [1e3 * row.share_of_limit * row.value for row in rows if row.share_of_limit and row.value]
    words, aim = f"{_briefly(case.bytes_moved / 1e6)} MB", PROMISED.get(case.kernel)
    words += f", {_briefly(floors[0])} us" if floors else ""
    words += "".join(f"; {aim:.0%} {'met' if row.met else 'missed'}" for row in rows if row.met is not None)
    dots = dots_of(rows, lambda row, ms: (row.share_of_limit or 0.0) * (row.value or 0.0) / ms)
    return ChartRow(case.label, dots, words, aim if any(row.bound for row in rows) else None)


def _briefly(number: float) -> str:
    return f"{number:,.3f}" if number < 1 else f"{number:,.1f}"
