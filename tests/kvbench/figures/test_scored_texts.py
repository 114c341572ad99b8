"""Curves of texts that were scored token by token."""

from __future__ import annotations

from pathlib import Path

from drawn_figures import lines_of
from plotted_runs import described, read, write_run

from kvbench.report.figures import nll, panels


def test_curves_of_scored_texts_begin_where_they_part() -> None:
    same = {"lengths": [2, 4, 8, 16], "nll": [9.0, 8.0, 2.0, 1.0]}
    other = {"lengths": [2, 4, 8, 16], "nll": [9.0, 8.0, 3.0, 2.0]}
    assert nll._parting([same, other]) == 4
    assert nll._parting([same, same]) == 2


def test_runs_of_one_name_that_read_with_another_window_are_two_lines_of_the_curve(tmp_path: Path) -> None:
    for window in (16, 32):
        write_run(tmp_path, "snapkv", [read(0, [3.0, 1.0])], parts=described("SnapKV", window=window))
    (axes,) = nll.curves(panels.read(tmp_path)).axes
    assert sorted(lines_of(axes)) == [f"snapkv(scorer.window={window}), 64" for window in (16, 32)]
    assert list(next(iter(lines_of(axes).values())).get_ydata()) == [3.0, 2.0]
