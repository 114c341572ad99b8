"""The arithmetic of the benchmark's figures, by hand, and the papers' tables that they stand beside."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_model import CPU, rows_of

from kvbench.cache import eviction as evicting
from kvbench.cache.state import LayerState
from kvbench.tools.bench import targets
from kvbench.tools.bench.bench import Bench
from kvbench.tools.bench.build import PUBLISHED
from kvbench.tools.bench.cli import protocols
from kvbench.tools.bench.clock import paired_ratio, spread
from kvbench.tools.bench.generating import Point, Sizes
from kvbench.tools.bench.generation import Run
from kvbench.tools.bench.kernels import relative_error
from kvbench.tools.bench.paper_tables import PROTOCOLS
from kvbench.tools.bench.settings import parse
from kvbench.tools.bench.targets import eviction_share, evictions

PAPER_TABLES = Path(__file__).parents[4] / "shared" / "paper_tables"
COPIED = {"copy_bytes_per_s": 1e9, "spare_bytes": 0}


def test_seconds_and_tokens_per_second_follow_from_prefill_and_steps() -> None:
    record = {"prefill_ms": [100.0, 300.0, 200.0], "decode_ms": [10.0, 20.0, 60.0]}
    point = Point("full", None, None, Sizes(512, 100), batch=4, timed=3, record=record)
    assert point.prefill_seconds == pytest.approx(0.2)  # the median
    assert point.ms == pytest.approx(30.0)  # the mean: a total is made of it
    assert point.seconds == pytest.approx(0.2 + 100 * 0.030)
    assert point.tokens_per_s == pytest.approx(400 / 3.2)


def test_a_spread_is_median_and_percentiles_and_ratios_are_taken_round_by_round() -> None:
    found = spread([5.0, 1.0, 2.0, 4.0, 3.0, 6.0])
    assert (found.p50, found.p20, found.p80, found.runs) == (3.5, 2.0, 5.0, 6)
    assert paired_ratio([2.0, 30.0, 4.0], [1.0, 10.0, 4.0]).p50 == 2.0  # 2, 3 and 1: the busy round counts once
    with pytest.raises(ValueError, match="at least one figure"):
        spread([])


def test_the_share_of_the_limit_is_bytes_over_bandwidth_over_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(parse([f"model={folder}", "device=cpu"]), CPU, "unused")
    monkeypatch.setattr("kvbench.tools.bench.bench.bandwidth", lambda device: 1e6)
    table = 512 * 32
    attention, mlp, norms = 2 * 32 * 32 + 2 * 32 * 16, 3 * 32 * 64, 2 * 32
    read = 4 * (2 * (attention + mlp + norms) + 32 + table)  # layers, last norm, the head's table; no embeddings
    assert bench.built.bytes_read == read
    assert bench.built.weights_bytes == read + 4 * table
    assert bench.share_of_limit(ms=1000.0, cache_bytes=500_000) == pytest.approx((read + 5e5) / 1e6)
    busier = {"copy_bytes_per_s": 2e5}  # when another process measured that cell
    assert bench.share_of_limit(1000.0, 500_000, busier) == pytest.approx((read + 5e5) / 2e5)


@pytest.mark.parametrize("protocol", [p for p in PROTOCOLS if p.paper != "kvbench"], ids=lambda p: p.name)
def test_at_scale_1_every_figure_of_the_papers_table_has_ours_beside_it(protocol: Any, folder: Path) -> None:
    """The rows of made-up records, joined with the table on everything but the model and the values."""
    if not PAPER_TABLES.exists():
        pytest.skip(f"{PAPER_TABLES} is not here")
    bench = Bench(parse([f"model={folder}", "device=cpu", "rivals=none"]), CPU, protocol.model)
    record = {
        "prefill_ms": [1.0],
        "decode_ms": [2.0],
        "held_bytes": 3,
        "peak_prefill_bytes": 5,
        "peak_decode_bytes": 4,
        **COPIED,
    }
    ours_ = [vars(row) for row in protocol.rows(bench, {cell.key: record for cell in protocol.cells(bench)})]
    on = ["paper", "table", "method", "budget", "budget_kind", "task", "metric"]
    mine = {tuple("" if row[key] is None else str(row[key]) for key in on) for row in ours_}
    theirs = {tuple(row[key] for key in on) for row in rows_of(PAPER_TABLES / protocol.paper / f"{protocol.table}.csv")}
    assert theirs - mine == set()
    known = PUBLISHED[protocol.model].paper_name
    assert {row["model"] for row in rows_of(PAPER_TABLES / protocol.paper / f"{protocol.table}.csv")} == {known}


def test_reduction_and_speed_up_are_the_full_caches_over_ours(folder: Path) -> None:
    protocol: Any = protocols()["cake_fig7"]
    bench = Bench(parse([f"model={folder}", "device=cpu", "lengths=130048", "policies=full,cake"]), CPU, protocol.model)
    record = {"prefill_ms": [1.0], "peak_prefill_bytes": 100, "peak_decode_bytes": 80, "held_bytes": 60, **COPIED}
    full, cake = protocol.cells(bench)[:2]
    found = {
        full.key: {**record, "decode_ms": [30.0]},
        cake.key: {**record, "peak_prefill_bytes": 70, "decode_ms": [3.0]},
    }
    values = {(row.method, row.metric): row.value for row in protocol.rows(bench, found)}
    assert values["cake", "peak_memory_reduction_percent"] == pytest.approx(20.0)  # 100 against the 80 of decoding
    assert values["cake", "decode_speedup_x"] == pytest.approx(10.0)


def test_an_eviction_is_timed_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only evictions and appending move: 5 an eviction, 3 each of the layers' other work."""
    clock = [0.0]

    def work(cls: Any, name: str, ms: float) -> None:
        own = getattr(cls, name)

        def slower(*given: Any, **named: Any) -> Any:
            clock[0] += ms / 1e3
            return own(*given, **named)

        monkeypatch.setattr(cls, name, slower)

    monkeypatch.setattr("kvbench.tools.bench.clock.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    work(evicting, "_evict_batch", 5)
    work(LayerState, "append", 3)
    bench = Bench(parse([f"model={folder}", "device=cpu", "scale=256"]), CPU, "unused")
    assert evictions("snapkv", bench) == [pytest.approx((2 * 5 + 2 * 3, 2 * 5))] * 3
    assert eviction_share("snapkv", bench)["value"] == pytest.approx(10 / 6)


@pytest.mark.parametrize(
    ("recorded", "note"),
    [
        (False, "eager, batch 1 after 96 tokens: 4.00 ms of the device in steps of 50.00 ms, its bytes allow 1.00 ms;"),
        (True, "graphed, batch 1 after 96 tokens: 50.00 ms, its bytes allow 1.00 ms;"),
    ],
)
def test_a_step_that_no_graph_holds_is_judged_by_the_time_the_device_was_busy(
    recorded: bool, note: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "recordable", lambda *of: recorded)
    monkeypatch.setattr(Run, "decode", lambda run, tokens: [50.0] * tokens)
    monkeypatch.setattr(Run, "profiled", lambda run, tokens: {"busy_ms": 4.0, "launches": 1430.0})
    monkeypatch.setattr(Bench, "share_of_limit", lambda bench, ms, read: 1.0 / ms)
    bench = Bench(parse([f"model={folder}", "device=cpu", "scale=512"]), CPU, "unused")
    found = targets.share_of_bound("snapkv", 1024, 8192, 1, bench)
    assert found["value"] == pytest.approx(1 / 50 if recorded else 1 / 4)
    assert found["note"].startswith(note)


def test_the_full_attention_of_a_batch_is_the_faster_of_pytorchs_two(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ms = iter([8.0, 6.0, 1.0])
    monkeypatch.setattr(targets, "time_calls", lambda calls, device: spread([next(ms)]))
    bench = Bench(parse([f"model={folder}", "device=cpu", "scale=512"]), CPU, "unused")
    assert targets.attention_of_many(bench)["value"] == 6.0


def test_a_relative_error_covers_the_whole_output() -> None:
    expected = [torch.tensor([3.0, 4.0])]
    assert relative_error([torch.tensor([3.0, 3.0])], expected) == pytest.approx(0.2)  # 1 of 5
    assert relative_error([torch.tensor([3.0, torch.nan])], expected) > 1
    assert relative_error([torch.tensor([3.0, torch.inf])], expected) == 2, "a number that JSON can hold"
    assert relative_error([torch.zeros(3)], expected) > 1
    assert relative_error([torch.tensor([1, 2, 3, 5])], [torch.tensor([1, 2, 3, 4])]) == 0.25
    assert relative_error([torch.tensor([-torch.inf, 2.0])], [torch.tensor([-torch.inf, 2.0])]) == 0
