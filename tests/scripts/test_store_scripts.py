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


def test_the_diagnostic_writes_a_table_and_a_picture_and_more_bits_lose_less(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = SCRIPTS.parent / "kvbench" / "pocket"
    out = tmp_path / "errors"
    sizes = ("--length", "256", "--prompts", "1", "--counts", "0,8", "--group", "32", "--threads", "1", "-o", str(out))
    run(monkeypatch, "reconstruction_error.py", str(folder), "--stores", "kivi_g32_r32,kivi_g32_r32_int4", *sizes)
    assert out.with_suffix(".svg").read_text().startswith("<?xml")
    with out.with_suffix(".csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    layers = {row["layer"] for row in rows}
    assert len(rows) == (2 + 3 * 2) * len(layers)
    for layer in layers:
        for column in ("key_error", "value_error", "attention_error"):
            two, four = (float(r[column]) for r in rows if r["layer"] == layer and r["exact_tokens"] == "-1")
            assert 0 < 2 * four < two < 1
    unchosen = {(r["name"], r["attention_error"]) for r in rows if r["exact_tokens"] == "0" and r["layer"] == "0"}
    assert len({error for _, error in unchosen}) == 1  # with no exact tokens there is nothing to choose
