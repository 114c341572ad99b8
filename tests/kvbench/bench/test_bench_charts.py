"""The pictures of `targets` and `kernels`: rows beside their bar and their floor, worked by hand."""

from __future__ import annotations

from typing import Any

import pytest
from bench_model import CPU

from kvbench.report.figures.curves import Chart, ChartRow, as_json, of_json
from kvbench.tools.bench import kernels
from kvbench.tools.bench.bench import Bench
from kvbench.tools.bench.kernels import KernelCase, KernelsProtocol
from kvbench.tools.bench.settings import parse
from kvbench.tools.bench.targets import TargetsProtocol, targets

MEASURED = {
    "evicting_step, h2o": {"value": 2.2, "spread": {"p20": 1.1, "p50": 2.2, "p80": 4.4, "runs": 8}, "note": ""},
    "evicting_step, tova": {"value": 0.55, "spread": {}, "note": ""},
    "eviction_in_32k_prefill, snapkv": {"value": -0.01, "spread": {}, "note": ""},
    "peak_of_128k_prefill, snapkv": {"value": None, "note": "this device does not count its memory"},
    "decode_after_128k, cake": {"value": 0.4, "spread": {}, "note": ""},
}


def targets_chart(monkeypatch: pytest.MonkeyPatch, judged: bool) -> Chart:
    monkeypatch.setattr(Bench, "judged", judged)
    monkeypatch.setattr(Bench, "model_name", "tiny")
    bench, protocol = Bench(parse(["device=cpu"]), CPU, "unused"), TargetsProtocol()
    chart = protocol.picture(bench, protocol.rows(bench, MEASURED))
    assert isinstance(chart, Chart)
    return chart


def rows_by_title(chart: Chart) -> dict[str, list[ChartRow]]:
    return {group.title: group.rows for group in chart.groups}


def test_a_target_stands_right_of_its_bar_where_it_is_better_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = rows_by_title(targets_chart(monkeypatch, judged=True))
    twice_too_slow, half = groups["evicting_step: x a growing step, at most 1.1"]
    (dot,) = twice_too_slow.dots
    assert (dot.x, dot.low, dot.high) == pytest.approx((0.5, 0.25, 1.0))
    assert twice_too_slow.words == "2.20 (1.10 to 4.40): missed"
    assert (half.dots[0].x, half.words) == (pytest.approx(2.0), "0.550: met")
    (nothing_added,) = groups["eviction_in_32k_prefill: share of the rest of it, at most 0.02"]
    assert (nothing_added.dots[0].x, nothing_added.words) == (10.0, "-0.0100: met")
    (half_as_fast,) = groups["decode_after_128k: of its bytes' bound, at least 0.8"]
    assert (half_as_fast.dots[0].x, half_as_fast.words) == (0.5, "0.400: missed")


@pytest.mark.parametrize("target", list(targets()), ids=lambda target: target.key)
def test_a_target_is_met_exactly_from_its_bar_on(target: Any) -> None:
    for factor in (0.01, 0.5, 0.999, 1.0, 1.001, 2.0, 50.0):
        value = target.bound * factor
        assert target.met(value) == (target.times_better(value) >= 1.0)


def timed(ms: float) -> dict[str, Any]:
    return {"ms": {"p20": ms / 2, "p50": ms, "p80": 2 * ms, "runs": 5}, "error": 0.0, "first_ms": 1.0}


def test_a_kernel_stands_at_the_share_of_its_floor_and_those_without_a_time_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large, small = 2**28, 10**6
    cases = [
        KernelCase("decode_attention", "large", dict, {}, large),
        KernelCase("decode_attention", "small", dict, {}, small),
        KernelCase("select", "any", dict, {}, small),
    ]
    monkeypatch.setattr(kernels, "found_cases", lambda bench: iter(cases))
    monkeypatch.setattr(Bench, "judged", True)
    floors = {"large": large / 1e9 * 1e3, "small": 1.0, "any": 1.0}  # ms at 1e9 bytes per second
    found = {
        f"{case.kernel}, {case.label}": {
            "providers": {"triton": timed(floors[case.label] / 0.8), "pytorch": {"failed": "Error: no."}},
            "copy_bytes_per_s": 1e9,
        }
        for case in cases
    }
    bench, protocol = Bench(parse(["device=cpu"]), CPU, ""), KernelsProtocol()
    chart = protocol.picture(bench, protocol.rows(bench, found))
    assert isinstance(chart, Chart)
    groups = rows_by_title(chart)
    first, second = groups["decode_attention"]
    (dot,) = first.dots
    assert (dot.method, dot.x, dot.low, dot.high) == ("triton", *map(pytest.approx, (0.8, 0.4, 1.6)))
    assert (first.bound, second.bound, groups["select"][0].bound) == (0.7, None, None), "a promise for large sizes"
    assert first.words == "268.4 MB, 268,435.5 us; 70% met"
    assert second.words == "1.0 MB, 1,000.0 us"
    assert "No time: pytorch in 3 of 3 cases: failed: Error: no." in chart.notes
    assert of_json(as_json(chart)) == chart, "drawn again from its file, it is the same picture"
