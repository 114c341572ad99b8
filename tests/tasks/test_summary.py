"""Official aggregates come from the module that the examples name."""

import sys
from pathlib import Path

import pytest
from task_data import Answer

from kvbench.tasks.scores import summary
from kvbench.tasks.trust import trust


def test_a_module_of_ones_own_sums_up_its_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_bench.py").write_text(
        "def summary(answers):\n    return {'best': max(a.score for a in answers)}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run = [Answer(score, {"benchmark": "own_bench"}) for score in (0.25, 0.75)]
    assert summary(run) == {}, "a module that only an example names is not imported"
    assert "own_bench" not in sys.modules
    trust(["own_bench"])
    assert summary(run) == {"best": 0.75}
    assert summary([*run, Answer(None, {"benchmark": "own_bench"})]) == {}
    assert summary([*run, Answer(1.0, {"benchmark": "ruler", "task": "vt"})]) == {}  # of two benchmarks there is none
