"""The benchmark of a sweep: the engine against lone runs, both ways the same answers, its arithmetic by hand."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_model import tiny_folder

from kvbench.tools.bench.bench import Bench
from kvbench.tools.bench.cli import main
from kvbench.tools.bench.settings import parse
from kvbench.tools.bench.sweep import KINDS, SweepProtocol

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _no_long_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bandwidth of a copy is measured on small buffers: these tests read no figure of it."""
    monkeypatch.setattr("kvbench.tools.bench.clock.COPIED", {"cpu": 2**20})


def bench_of(folder: Path, *more: str) -> Bench:
    return Bench(parse([f"model={folder}", "device=cpu", *more]), CPU, "unused")


def test_rows_and_lone_runs_give_the_same_answers_and_hold_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    arguments = ["scale=32", "new_tokens=192", "batches=1,3", "repeats=1", "policies=snapkv,h2o,full"]
    assert main(["sweep", f"model={folder}", f"out={tmp_path}", "device=cpu", *arguments]) == 0
    with (tmp_path / "sweep.csv").open(newline="") as file:
        rows = {(row["method"], row["task"], row["metric"]): row for row in csv.DictReader(file)}
    task = "sweep_128_6"
    assert rows["rows", task, "equal_answers"]["value"] == "3"  # snapkv and h2o at budget 64, and full once
    held = [float(rows[side, task, "held_gib"]["value"]) for side in ("rows", "lone_runs")]
    assert held[0] == held[1] > 0
    assert float(rows["rows", task, "ratio_to_lone_runs"]["value"]) > 0
    for kind in KINDS:
        assert float(rows[kind, "step_96_rows3", "ms_per_row"]["value"]) > 0
    written = json.loads((tmp_path / "sweep.json").read_text())
    assert [curve["x"] for curve in written["curves"]] == [[1.0, 3.0]] * 2
    assert (tmp_path / "sweep.svg").exists()


def test_a_ratio_is_taken_within_a_round_and_a_step_is_divided_by_its_rows(folder: Path) -> None:
    protocol, bench = SweepProtocol(), bench_of(folder, "repeats=3", "batches=8")
    found: dict[str, Any] = {}
    for key, seconds in zip([cell.key for cell in protocol.cells(bench)], (10.0, 20.0, 90.0), strict=False):
        lone = {"prefill_ms": 600 * seconds, "decode_ms": 400 * seconds, "held_bytes": 2**30}
        rows = {"prefill_ms": 1000.0, "decode_ms": 3000.0, "held_bytes": 2**30}
        found[key] = {"lone_runs": lone, "rows": rows, "variants": 36, "equal_answers": 36 - seconds / 10}
    for cell in protocol.cells(bench)[3:]:
        found[cell.key] = {"step_ms": [80.0, 160.0, 240.0], "held_bytes": 1}
    values = {(row.method, row.metric): row.value for row in protocol.rows(bench, found)}
    assert values["rows", "ratio_to_lone_runs"] == pytest.approx(0.2)  # of 4/10, 4/20 and 4/90
    assert values["lone_runs", "total_seconds"] == pytest.approx(20.0)
    assert values["lone_runs", "decode_seconds"] == pytest.approx(8.0)
    assert values["rows", "equal_answers"] == 27  # the round with the fewest
    assert values[KINDS[0], "ms_per_row"] == pytest.approx(20.0)  # 160 ms of 8 rows


def test_at_scale_1_it_is_six_policies_at_six_budgets(folder: Path) -> None:
    bench = bench_of(folder)
    policies = SweepProtocol()._policies(bench)
    assert len({(policy.name, policy.budget) for policy in policies}) == len(policies) == 36
    assert "36 variants" in SweepProtocol().remarks(bench)[0]


def test_rows_that_do_not_fit_are_a_result(folder: Path) -> None:
    protocol, bench = SweepProtocol(), bench_of(folder, "repeats=1", "batches=4")
    found = {cell.key: {"out_of_memory": "no room"} for cell in protocol.cells(bench)}
    rows = protocol.rows(bench, found)
    assert [(row.value, row.note) for row in rows] == [(None, "out of memory: no room")] * 3
    assert protocol.curves(bench, rows) == []
