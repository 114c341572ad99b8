"""The scripts about stores run, and say what they should."""

import csv
import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    """A script as from the command line."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.syspath_prepend(str(SCRIPTS))  # as `python scripts/NAME` has it
    runpy.run_path(str(SCRIPTS / name), run_name="__main__")


def test_policies_and_stores_are_compared_with_sdpa_full_and_snapkv(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "times.csv"
    sizes = ("--prompt", "300", "--tokens", "2", "--repeats", "1", "--threads", "1", "--csv", str(table))
    run(monkeypatch, "bench_overhead.py", "--policies", "h2o,kivi_g32_r32", *sizes)
    with table.open(newline="") as file:
        rows = {name: [float(figure) for figure in figures[:8]] for name, *figures in csv.reader(file)}
    assert list(rows) == ["sdpa", "full", "snapkv", "h2o", "kivi_g32_r32"]
    assert rows["sdpa"][1] == rows["full"][2] == 1.0
    assert rows["sdpa"][4] == rows["full"][5] == rows["snapkv"][6] == 1.0
    assert all(figure > 0 for figures in rows.values() for figure in figures[2:])
    assert "mean" in capsys.readouterr().out


def pocket_stores() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pocket_stores", SCRIPTS / "pocket_stores.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_published_table_is_what_its_script_makes_of_the_csv() -> None:
    folder = SCRIPTS.parent / "results" / "pocket"
    table = pocket_stores().markdown(pd.read_csv(folder / "stores.csv"))
    readme = (folder / "README.md").read_text(encoding="utf-8")
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len(lines) == 3 * 2 + 16 + 2 * 22
    assert all(line in readme for line in lines)


@pytest.mark.slow("runs commands on the pocket model")
def test_stores_of_equal_bytes_are_compared_and_a_second_run_computes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script, out = pocket_stores(), tmp_path / "stores.csv"
    for name, value in (
        ("ALONE", ("full", "kivi")),
        ("EVICTIONS", ("cake",)),
        ("SMALL", ("kivi_g32_r32",)),
        ("SHARES", (0.125,)),
    ):
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(sys, "argv", ["x", "--limit", "4", "--runs", str(tmp_path / "runs"), "-o", str(out)])
    script.main()
    table = pd.read_csv(out)
    assert table["policy"].tolist() == ["full", "kivi", "cake", "cake_kivi_g32_r32_int4", "cake_kivi_g32_r32"]
    assert table["n"].tolist() == [4, 4, 2, 2, 2]
    assert table["vs_full"][0] == table["nll_vs_full"][0] == 0
    equal = table["prompt_kib"][2:]
    assert equal.max() < 1.04 * equal.min() < 0.14 * table["prompt_kib"][0]
    assert table["budget"][2:].is_monotonic_increasing  # fewer bits, more tokens
    assert out.with_suffix(".svg").is_file()
    monkeypatch.setattr(script, "Bench", lambda limit, runs: None)  # whatever it was asked would fail
    before = out.read_bytes()
    script.main()
    assert out.read_bytes() == before
