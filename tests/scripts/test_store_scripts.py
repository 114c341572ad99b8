"""The scripts about stores run, and say what they should."""

import csv
import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    """A script as from the command line."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(SCRIPTS / name), run_name="__main__")


def test_the_benchmark_compares_every_store_with_the_full_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "times.csv"
    sizes = ("--prompt", "300", "--tokens", "2", "--repeats", "1", "--threads", "1", "--csv", str(table))
    run(monkeypatch, "bench_stores.py", "--stores", "kivi_g32_r32,ott_g32_r32,zipcache", *sizes)
    with table.open(newline="") as file:
        rows = {row[0]: row for row in csv.reader(file)}
    assert list(rows) == ["full", "kivi_g32_r32", "ott_g32_r32", "zipcache"]
    assert float(rows["full"][2]) == 1.0
    assert all(float(row[1]) > 0 for row in rows.values())
    assert "flush" in capsys.readouterr().out
