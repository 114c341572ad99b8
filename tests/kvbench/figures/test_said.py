"""What pictures of runs say about them, and which runs are one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from drawn_figures import lines_of, picture, said
from plotted_runs import sample, write_run

from kvbench.analysis.result import Result
from kvbench.report.figures import panels, remarks, score


def test_a_picture_says_model_task_n_and_that_schedules_are_mixed(cells: list[Result]) -> None:
    figure = picture(score.against_budget, cells)
    assert "n = 10 examples for every point. Bars, and the grey band of the full cache: 95% intervals." in said(figure)
    assert figure.axes[0].get_title("left") == "niah"
    assert "Mixed schedules, which are different experiments" in said(figure)
    names = set(lines_of(figure.axes[0]))
    assert {"snapkv (grow)", "caote_snapkv (blocks of 128)", "cake"} <= names, "what most have goes without saying"


def test_a_failed_run_is_not_drawn_but_named(tmp_path: Path) -> None:
    write_run(tmp_path, "cake", [sample(0, 1.0), sample(1, 1.0)])
    write_run(tmp_path, "tova", [sample(0, 1.0), sample(1, None)], 96)
    figure = picture(score.against_budget, panels.read(tmp_path))
    assert set(lines_of(figure.axes[0])) == {"cake"}
    assert "Not drawn, because examples failed: tova at 96 on niah (1 of 2)." in said(figure)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ([sample(i, 1.0) for i in range(3)], "n = 1 to 3 examples for a point, not the same for all"),
        ([replace(sample(0, 1.0), prompt_hash="another")], "Not the same examples for all: niah."),
    ],
)
def test_other_examples_and_other_numbers_of_them_are_said(tmp_path: Path, other: list, words: str) -> None:
    write_run(tmp_path, "cake", [sample(0, 1.0)])
    write_run(tmp_path, "tova", other)
    assert words in " ".join(remarks.notes(panels.read(tmp_path)))
