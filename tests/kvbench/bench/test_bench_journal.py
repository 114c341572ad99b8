"""The benchmark goes on after a kill, a lost device and a cell that fails; what does not fit is a result."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_model import CPU, prompt, refuse_to_measure, rows_of
from kv_models import tiny

from kvbench.tools.bench import generating, generation, machine
from kvbench.tools.bench.cli import main
from kvbench.tools.bench.generation import Run
from kvbench.tools.bench.journal import Cell, Journal
from kvbench.tools.bench.providers import ours


def test_a_killed_benchmark_goes_on_with_the_cell_it_was_in(tmp_path: Path) -> None:
    ran: list[str] = []

    def cell(name: str, killed: bool = False) -> Cell:
        def run() -> dict[str, Any]:
            ran.append(name)
            if killed:
                raise KeyboardInterrupt
            return {"value": len(name)}

        return Cell(name, run)

    path = tmp_path / "cells.jsonl"
    with pytest.raises(KeyboardInterrupt):
        Journal(path, {"scale": 1}).measure([cell("one"), cell("three", killed=True), cell("four")], CPU)
    path.write_text(path.read_text() + '{"cell": "four", "val')  # what a kill in the middle of a line leaves
    again = Journal(path, {"scale": 1})
    assert again.measure([cell("one"), cell("three"), cell("four")], CPU) == []
    assert ran == ["one", "three", "four", "three"], "what a process ended in comes last: it may be what ended it"
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["value"] for line in written if "value" in line] == [3, 4, 5]


def test_a_benchmark_that_is_stopped_shows_what_it_measured(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[int] = []

    def measure(*given: Any, own: Any = generation.measure) -> dict[str, object]:
        measured.append(1)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return own(*given)

    monkeypatch.setattr(generating, "measure", measure)
    arguments = [f"model={folder}", "scale=512", "device=cpu", "policies=full,h2o", "lengths=256", "rivals=none"]
    assert main(["d2o_table12", *arguments, f"out={tmp_path}"]) == 130
    assert {row["method"] for row in rows_of(tmp_path / "d2o_table12.csv")} == {"full"}
    assert "1 of 2 cells are left: the same command goes on with h2o" in capsys.readouterr().out


def test_a_cell_that_fails_takes_no_other_with_it_and_is_tried_again_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> dict[str, Any]:
        raise IndexError("too many heads")

    path = tmp_path / "cells.jsonl"
    first = Journal(path, {})
    assert first.measure([Cell("broken", broken), Cell("good", dict)], CPU) == []
    assert first.mistakes == ["broken"]
    assert first.cells["broken"]["failed"] == "IndexError: too many heads"
    assert "in broken" in capsys.readouterr().err, "where it was raised"
    ran: list[str] = []
    mended = [Cell(name, lambda name=name: ran.append(name) or {"value": 1}) for name in ("broken", "good", "new")]
    again = Journal(path, {})
    assert again.measure(mended, CPU) == []
    assert ran == ["new", "broken"]
    assert again.cells["broken"]["value"] == 1
    assert Journal(path, {}).cells["broken"]["value"] == 1, "the last line of a cell counts"


def test_a_lost_device_ends_the_process_and_the_next_one_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["d2o_table12", f"model={folder}", "scale=512", "device=cpu", "policies=full,h2o", f"out={tmp_path}"]
    arguments += ["lengths=256", "rivals=none"]
    with monkeypatch.context() as patch:
        patch.setattr("kvbench.tools.bench.journal.lost", lambda device: True)
        patch.setattr(generating, "measure", refuse_to_measure)
        assert main(arguments) == 75
        assert [main(arguments), main(arguments)] == [75, 1], "h2o, which was not tried before, then full once more"
    said = capsys.readouterr()
    assert "the device is lost to this process after 'full, 96+4 tokens" in said.err
    assert "2 of 2 cells are left" in said.out, "tables are written before the process ends"
    assert main(arguments) == 0
    assert {row["method"] for row in rows_of(tmp_path / "d2o_table12.csv") if row["value"]} == {"full", "h2o"}


def test_a_small_cell_does_not_wait_for_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = [100.0], list[str]()
    monkeypatch.setattr(machine, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(machine, "_smi", lambda query: asked.append(query) or "answer")
    states = []
    for clock[0] in (100.0, 101.0, 108.0):
        states.append(machine.momentary(torch.device("cuda")))
    assert len(asked) == 2 * 2, "two questions, once in five seconds"
    assert {state["gpu"] for state in states} == {"answer"}


def test_what_compiles_a_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own hook is called as Triton calls it when it has loaded a kernel."""
    triton = pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    loaded: list[int] = []

    def loads(run: Run) -> None:
        triton.knobs.runtime.kernel_load_end_hook(None, None, "_finish", None, "hash")
        loaded.append(run._seen if run._step else 0)

    run = Run(tiny(dtype=torch.float32), ours("full", None), prompt(50))
    assert len(run.decode(4) if run.prefill() else []) == 4
    step = run._step
    assert step is not None
    monkeypatch.setattr(run, "_step", lambda *of: (loads(run) if len(loaded) < 2 else None, step(*of))[1])
    assert len(run.decode(5)) == 3, "two of the steps loaded a kernel"
    prefills: list[int] = []

    def prefill(run: Run, own: Any = Run.prefill) -> float:
        prefills.append(1)
        if len(prefills) == 1:
            loads(run)
        return own(run) if len(prefills) == 2 else 0.0

    monkeypatch.setattr(Run, "prefill", prefill)
    assert generation._prefill_ms(run, CPU) > 0, "the first one loaded a kernel, so the second one counts"
