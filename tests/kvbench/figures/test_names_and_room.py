"""Pictures of finished runs: everything is named, nothing covers anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn_figures import lines_of, overlaps, picture, said
from plotted_runs import sample, write_run

from kvbench.analysis.result import Result
from kvbench.report.figures import panels, pareto, score
from kvbench.report.figures.sheet import Paper


@pytest.mark.parametrize("width", [None, 3.3])
@pytest.mark.parametrize("draw", [score.against_budget, score.against_bytes, pareto.pareto])
def test_with_twelve_policies_and_six_budgets_no_words_cover_others(
    draw: Any, width: float | None, cells: list[Result]
) -> None:
    figure = picture(draw, cells, Paper(width))
    assert overlaps(figure) == []
    assert width in (None, figure.get_size_inches()[0])


def test_without_a_caption_title_and_notes_are_logged_and_not_drawn(
    cells: list[Result], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="kvbench"):
        figure = picture(score.against_budget, cells, Paper(3.3, caption=False))
    assert said(figure) == ""
    assert "caption: Score against the budget. Model: pocket. n = 10 examples for every point." in caplog.text
    assert "Mixed schedules, which are different experiments." in caplog.text


def equal(folder: Path, *policies: str) -> list[Result]:
    """Policies with half of the answers right and the same bytes, at two budgets."""
    for policy in policies:
        for budget in (64, 128):
            write_run(folder, policy, [sample(0, 1.0, 2**10 * budget), sample(1, 0.0, 2**10 * budget)], budget)
    return panels.read(folder)


def drawn_at(axes: Any, line: Any) -> np.ndarray:
    """A line's points as the paper shows them, in data coordinates: what a ruler on the axes reads."""
    return axes.transData.inverted().transform(line.get_transform().transform(line.get_xydata()))


def test_every_score_and_every_byte_is_drawn_where_it_was_measured(tmp_path: Path) -> None:
    twins = equal(tmp_path, "snapkv", "tova", "cake")
    for draw in (score.against_budget, score.against_bytes, pareto.pareto):
        figure = picture(draw, twins)
        (axes,) = figure.axes
        marks = [line for line in axes.get_lines() if line.get_gid() in ("above", "dot")]
        lines = [*lines_of(axes).values(), *marks]
        seen = np.concatenate([drawn_at(axes, line) for line in lines if line.get_xdata().size])
        assert seen[:, 1] == pytest.approx(0.5)
        if draw is not score.against_budget:
            assert sorted({round(x, 6) for x in seen[:, 0]}) == [64, 128]  # KiB


def test_lines_stand_side_by_side_at_a_budget_and_every_budget_is_a_category(tmp_path: Path) -> None:
    twins = equal(tmp_path, "snapkv", "tova", "cake")
    figure = picture(score.against_budget, twins)
    (axes,) = figure.axes
    seen = np.array([drawn_at(axes, line)[:, 0] for line in lines_of(axes).values()])  # [lines, budgets]
    assert np.round(seen).tolist() == [[0, 1]] * 3
    assert [t.get_text() for t in axes.get_xticklabels()] == ["64", "128"]
    assert seen.mean(axis=0) == pytest.approx([0, 1])
    assert np.diff(seen[:, 0]) == pytest.approx([0.1] * 2), "three lines, a tenth of the way to the next budget apart"
    assert "Budgets stand at equal steps, lines side by side." in said(figure)
