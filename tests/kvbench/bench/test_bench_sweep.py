"""The benchmark of a sweep: the engine against lone runs, both ways the same answers, its arithmetic by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_model import CPU, rows_of

from kvbench.tools.bench import rivals
from kvbench.tools.bench.bench import Bench
from kvbench.tools.bench.cli import main
from kvbench.tools.bench.settings import parse
from kvbench.tools.bench.sweep import KINDS, Cost, SweepProtocol


def bench_of(folder: Path, *more: str) -> Bench:
    return Bench(parse([f"model={folder}", "device=cpu", *more]), CPU, "unused")


def test_rows_and_lone_runs_give_the_same_answers_and_hold_the_same_bytes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["scale=32", "new_tokens=192", "batches=1,3", "repeats=1", "policies=snapkv,h2o,full", "rivals=none"]
    assert main(["sweep", f"model={folder}", f"out={tmp_path}", "device=cpu", *arguments]) == 0
    assert "share_of_equal_answers" in capsys.readouterr().out
    rows = {(row["method"], row["task"], row["metric"]): row for row in rows_of(tmp_path / "sweep.csv")}
    task = "sweep_128_6"
    equal = rows["rows", task, "share_of_equal_answers"]
    assert (equal["value"], equal["note"].partition(",")[0]) == ("1", "3 of 3")  # snapkv, h2o at budget 64, full once
    held = [float(rows[side, task, "held_gib"]["value"]) for side in ("rows", "lone_runs")]
    assert held[0] == held[1] > 0
    assert float(rows["rows", task, "ratio_to_lone_runs"]["value"]) > 0
    for kind in KINDS:
        assert float(rows[kind, "step_96_rows3", "ms_per_row"]["value"]) > 0
    written = json.loads((tmp_path / "sweep.json").read_text())
    assert [curve["x"] for curve in written["curves"]] == [[1.0, 3.0]] * 2
    assert (tmp_path / "sweep.svg").exists()


def test_a_ratio_is_taken_within_a_round_and_a_step_is_divided_by_its_rows(folder: Path) -> None:
    protocol, bench = SweepProtocol(), bench_of(folder, "repeats=3", "batches=8", "rivals=none")
    found: dict[str, Any] = {}
    copied = {"copy_bytes_per_s": 1e9}
    for key, seconds in zip([cell.key for cell in protocol.cells(bench)], (10.0, 20.0, 90.0), strict=False):
        lone = {"prefill_ms": 600 * seconds, "decode_ms": 400 * seconds, "held_bytes": 2**30}
        rows = {"prefill_ms": 1000.0, "decode_ms": 3000.0, "held_bytes": 2**30}
        found[key] = {"lone_runs": lone, "rows": rows, "variants": 36, "equal_answers": 36 - seconds / 10, **copied}
    for cell in protocol.cells(bench)[3:]:
        found[cell.key] = {"step_ms": [80.0, 160.0, 240.0], "held_bytes": 1, **copied}
    values = {(row.method, row.metric): row.value for row in protocol.rows(bench, found)}
    assert values["rows", "ratio_to_lone_runs"] == pytest.approx(0.2)  # of 4/10, 4/20 and 4/90
    assert values["lone_runs", "total_seconds"] == pytest.approx(20.0)
    assert values["lone_runs", "decode_seconds"] == pytest.approx(8.0)
    assert values["rows", "share_of_equal_answers"] == 27 / 36  # the round with the fewest
    assert values[KINDS[0], "ms_per_row"] == pytest.approx(20.0)  # 160 ms of 8 rows


def test_answers_that_differ_are_not_counted() -> None:
    one = Cost(1.0, 2.0, 3, [[1, 2], [3, 4], [5, 6], [7]])
    assert one.equal_answers(Cost(1.0, 2.0, 3, [[1, 2], [3, 5], [5, 6], [7, 8]])) == 2


@pytest.mark.skipif(not rivals.installed("kvpress"), reason="kvpress is not installed")
def test_kvpress_keeps_what_our_rows_keep_and_answers_the_same(folder: Path, tmp_path: Path) -> None:
    """Lengths and budgets that do not divide evenly: kvpress rounds a share of the prompt."""
    arguments = ["scale=31", "lengths=9400", "new_tokens=192", "batches=1", "repeats=1"]
    policies = "policies=knorm,snapkv,streamingllm,ada_snapkv,tova,h2o"
    assert main(["sweep", f"model={folder}", f"out={tmp_path}", "device=cpu", *arguments, policies]) == 0
    written = [row for row in rows_of(tmp_path / "sweep.csv") if row["task"] == "kvpress_303_6"]
    rows = {(row["method"], row["metric"]): row for row in written}
    held, lone = (rows[side, "held_gib"]["value"] for side in ("rows", "kvpress_runs"))
    token = 2 * 2 * 2 * 8 * 4  # bytes: layers, heads, key and value, dimensions
    rest = (303 + 5) * token
    kept = (64 + 5) * token, (66 + 5) * token  # budgets 64 and 66
    assert float(lone) * 2**30 == pytest.approx(4 * sum(kept) + 2 * rest)  # AdaKV masks what ours frees
    assert float(held) < float(lone)
    assert float(rows["rows", "share_of_equal_answers"]["value"]) >= 0.8  # TOVA's last token
    assert rows["rows", "ratio_to_kvpress_runs"]["note"] == "10 variants"
