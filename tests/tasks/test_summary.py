"""Official aggregates come from the module that the examples name."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from task_data import Answer

from kvbench.tasks.summary import summary


def test_a_module_of_ones_own_sums_up_its_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_bench.py").write_text(
        "def summary(answers):\n    return {'best': max(a.score for a in answers)}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run = [Answer(score, {"benchmark": "own_bench"}) for score in (0.25, 0.75)]
    assert summary(run) == {"best": 0.75}
    assert summary([*run, Answer(None, {"benchmark": "own_bench"})]) == {}
    assert summary([*run, Answer(1.0, {"benchmark": "ruler", "task": "vt"})]) == {}  # of two benchmarks there is none


def test_a_benchmark_that_is_not_installed_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert summary([Answer(1.0, {"benchmark": "gone_bench"})]) == {}
    assert "the aggregates of benchmark gone_bench are left out" in caplog.text
