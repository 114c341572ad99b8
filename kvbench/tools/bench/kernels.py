"""Every kernel case of scripts/kernel_cases/, providers side by side: an answer is checked before it is timed."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os.path import expanduser
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

import kvbench
from kvbench.report.figures.curves import Chart, ChartGroup, ChartRow, Dot, Picture
from kvbench.terminal.errors import UsageError
from kvbench.tools.bench.about import ABOUT
from kvbench.tools.bench.bench import Bench, Row
from kvbench.tools.bench.clock import Clock, Spread, spread, wait_for
from kvbench.tools.bench.journal import Cell, Record, attempt, why_not
from kvbench.tools.bench.machine import lost
from kvbench.tools.bench.providers import tensors_in

FLUSHED = 2**28  # bytes written between two calls on a GPU, so that no input is still in its cache
FEWEST, MOST, SECONDS = 5, 200, 0.3  # runs of a provider: at least, at most, and for so long between them
DECODE = ("decode_attention", "quantised_attention")
DECODE_SHARE, LARGE = 0.7, 2**28  # of the copy bandwidth that they are to reach, from so many bytes on


class KernelCase(Protocol):
    """What the modules of the folder give: one size of one kernel (the fields of scripts/kernel_cases/case.py)."""

    @property
    def kernel(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def setup(self) -> Callable[[torch.device], dict[str, Any]]: ...
    @property
    def providers(self) -> Mapping[str, Callable[..., Any]]: ...
    @property
    def bytes_moved(self) -> int: ...
    @property
    def flops(self) -> int: ...
    @property
    def tolerance(self) -> float: ...
    @property
    def beside(self) -> Sequence[str]: ...


@dataclass(frozen=True)
class KernelsProtocol:
    """Cells are cases; rows are providers. It runs no model."""

    name: str = "kernels"
    about: str = ABOUT["kernels"]
    series: str = "kernels"
    model: str = ""

    def remarks(self, bench: Bench) -> list[str]:
        return [
            f"{FEWEST} to {MOST} runs, {SECONDS} s of them, after a first one that compiles; caches flushed between "
            "runs on a GPU; of the limit: bytes that must be moved over the time at a copy's bandwidth"
        ]

    def identity(self, bench: Bench) -> dict[str, Any]:
        return {}

    def cells(self, bench: Bench) -> list[Cell]:
        return [Cell(_key(case), partial(_measure, case, bench.device), foreign=True) for case in found_cases(bench)]

    def rows(self, bench: Bench, found: Mapping[str, Record]) -> list[Row]:
        return [row for case in found_cases(bench) if _key(case) in found for row in _rows(bench, case, found)]

    def picture(self, bench: Bench, rows: list[Row]) -> Picture:
        """Every case beside its floor, the time in which a copy moves its bytes: a dot per provider that has a time."""
        groups: dict[str, list[ChartRow]] = {}
        for case in found_cases(bench):
            own = [row for row in rows if row.task == _key(case)]
            if own:
                groups.setdefault(case.kernel, []).append(_chart_row(case, own))
        if not any(row.share_of_limit for row in rows):
            return []
        notes = [
            "Dashed: the floor, all inputs read and all outputs written once at the bandwidth that a copy was measured "
            "to have (right: the bytes and that time). Kernels that compute more than they move stay away from it.",
            "Lines beside the dots: 20th to 80th percentile of the runs.",
            *_without_times(rows),
        ]
        return Chart("share of a copy's bandwidth", [ChartGroup(*g) for g in groups.items()], notes, percent=True)


def cases_folder(bench: Bench) -> Path:
    """`cases=`, or scripts/kernel_cases of the checkout this package lies in."""
    if bench.settings.cases is not None:
        return Path(expanduser(bench.settings.cases))
    return Path(str(kvbench.__file__)).resolve().parent.parent / "scripts" / "kernel_cases"


def _module(folder: Path, name: str) -> ModuleType:
    try:
        module = importlib.import_module(f"{folder.name}.{name}")
    except Exception as error:  # a module of the user's, in which anything may be wrong
        raise UsageError(f"cases={folder}: {name}.py cannot be imported: {error}") from error
    if not callable(getattr(module, "cases", None)):
        raise UsageError(f"cases={folder}: {name}.py has no function cases(scale)")
    return module


def found_cases(bench: Bench) -> Iterator[KernelCase]:
    """The cases of every module in the folder. UsageError where there is none."""
    folder = cases_folder(bench)
    names = sorted(p.stem for p in folder.glob("*.py") if p.stem not in ("__init__", "case"))
    if not names:
        raise UsageError(f"cases={folder} holds no kernel cases: it is a folder of modules with cases(scale)")
    for place in (folder, folder.parent):  # modules may say `kernel_cases.case` or `case`
        if str(place) not in sys.path:
            sys.path.append(str(place))
    seen: set[str] = set()  # at a small scale, sizes fall together
    for name in names:
        for case in _module(folder, name).cases(bench.scale):
            if _key(case) not in seen:
                seen.add(_key(case))
                yield case


def _key(case: KernelCase) -> str:
    return f"{case.kernel}, {case.label}"


def _measure(case: KernelCase, device: torch.device) -> Record:
    """Every provider of a case: wrong by how much, and if not too wrong, how fast."""
    yardstick: list[Tensor] | None = None
    found: dict[str, Record] = {}
    with torch.inference_mode():
        for name, function in case.providers.items():
            inputs = case.setup(device)
            expected = None if name in case.beside else yardstick
            record, out = _provider(partial(function, **inputs), device, expected, case.tolerance)
            if "failed" in record and lost(device):  # the others cannot be measured by this process
                return {"failed": f"{name}: {record['failed']}"}
            if yardstick is None and out is not None:
                yardstick = out
            found[name] = record
            del inputs, out
    return {"providers": found, "bytes_moved": case.bytes_moved, "flops": case.flops}


def _provider(
    call: Callable[[], object], device: torch.device, yardstick: list[Tensor] | None, tolerance: float
) -> tuple[Record, list[Tensor] | None]:
    out: list[Tensor] = []

    def first() -> Record:
        clock = Clock(device)
        clock.mark()
        result = call()
        clock.mark()
        out.extend(t.clone() for t in tensors_in(result))
        return {"first_ms": clock.laps()[0]}

    record = attempt(Cell("", first, foreign=True))
    if "first_ms" not in record:
        return record, None
    error = 0.0 if yardstick is None else relative_error(out, yardstick)
    record |= {"error": error, "right": error <= tolerance}
    if record["right"]:
        record |= {"ms": time_call(call, device).as_dict()}
    return record, out


def relative_error(outputs: list[Tensor], expected: list[Tensor]) -> float:
    """|out - expected| / |expected|: the largest of the tensors a kernel gives (2 where shapes differ).

    Whole numbers and truth values must be equal: their error is the share that differs. NaN is as wrong as can be.
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
    return error if error == error else 2.0


def time_call(call: Callable[[], object], device: torch.device) -> Spread:
    """Milliseconds of a call that was made before, from a cold cache on a GPU."""
    slow = _few(call, device, None, runs=1)
    if slow[0] > 1e3 * SECONDS:
        return spread(slow)  # so long that no cache matters, and one run has to do
    flush = torch.empty(FLUSHED, dtype=torch.uint8, device=device) if device.type == "cuda" else None
    times: list[float] = []
    while len(times) < FEWEST or (len(times) < MOST and sum(times) < 1e3 * SECONDS):
        times += _few(call, device, flush, runs=FEWEST)
    return spread(times)


def _few(call: Callable[[], object], device: torch.device, flush: Tensor | None, runs: int) -> list[float]:
    """A few runs, between which the device is not waited for: the flush hides what a launch costs."""
    clocks = [Clock(device) for _ in range(runs)]
    for clock in clocks:
        if flush is not None:
            flush.zero_()
        clock.mark()
        call()
        clock.mark()
    wait_for(device)
    return [clock.laps()[0] for clock in clocks]


def _rows(bench: Bench, case: KernelCase, found: Mapping[str, Record]) -> Iterator[Row]:
    record = found[_key(case)]
    for name, provider in record.get("providers", {"-": record}).items():
        fields = ("kvbench", "kernels", "", name, None, "", _key(case))
        ms = provider.get("ms")
        if ms is None:
            yield Row(*fields, "ms", None, _without_time(provider))
            continue
        share = case.bytes_moved / record["copy_bytes_per_s"] / (1e-3 * ms["p50"])
        aimed = case.kernel.split(",")[0] in DECODE and name == "triton" and case.bytes_moved >= LARGE
        yield Row(
            *fields,
            "ms",
            ms["p50"],
            f"error {provider['error']:.1e}, first call {provider['first_ms']:.0f} ms"
            + (f", {case.flops / ms['p50'] / 1e9:.1f} TFLOP/s" if case.flops else ""),
            p20=ms["p20"],
            p50=ms["p50"],
            p80=ms["p80"],
            runs=ms["runs"],
            share_of_limit=share,
            bound=f"at least {DECODE_SHARE:.0%} of the limit" if aimed else "",
            met=share >= DECODE_SHARE if aimed and bench.judged else None,
        )


def _chart_row(case: KernelCase, rows: Sequence[Row]) -> ChartRow:
    """What the providers of a case reached of the floor; a bar where one is promised."""
    timed = [row for row in rows if row.share_of_limit and row.value]
    words = f"{_briefly(case.bytes_moved / 1e6)} MB"
    if timed:
        words += f", {_briefly(1e3 * (timed[0].share_of_limit or 0.0) * (timed[0].value or 0.0))} us"
    judged = [row for row in timed if row.met is not None]
    words += "".join(f"; {DECODE_SHARE:.0%} {'met' if row.met else 'missed'}" for row in judged)
    bound = DECODE_SHARE if any(row.bound for row in rows) else None
    return ChartRow(case.label, [_dot(row) for row in timed], words, bound)


def _briefly(number: float) -> str:
    return f"{number:,.3f}" if number < 1 else f"{number:,.1f}"


def _dot(row: Row) -> Dot:
    share, ms = row.share_of_limit or 0.0, row.value or 0.0
    low, high = (None if side is None else share * ms / side for side in (row.p80, row.p20))
    return Dot(row.method, share, low, high)


def _without_times(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each reason why providers have no time."""
    of = Counter(row.method for row in rows)
    without = Counter((row.note, row.method) for row in rows if row.value is None)
    for reason in dict.fromkeys(note for note, _ in without):
        who = [
            f"{method} in {count} of {of[method]} cases" for (note, method), count in without.items() if note == reason
        ]
        yield f"No time: {', '.join(who)}: {reason.removesuffix('.')}."


def _without_time(provider: Record) -> str:
    """Why a provider has no time."""
    if "error" in provider:
        return f"wrong: relative error {provider['error']:.1e}, so it has no speed"
    return why_not(provider)
