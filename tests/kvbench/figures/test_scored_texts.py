"""Curves of texts that were scored token by token."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from drawn_figures import lines_of
from plotted_runs import described, sample, write_run

from kvbench.records.sample import Likelihood
from kvbench.report.figures import measured, nll


def test_curves_of_scored_texts_begin_where_they_part() -> None:
    same = {"lengths": [2, 4, 8, 16], "nll": [9.0, 8.0, 2.0, 1.0]}
    other = {"lengths": [2, 4, 8, 16], "nll": [9.0, 8.0, 3.0, 2.0]}
    assert nll._parting([same, other]) == 4
    assert nll._parting([same, same]) == 2


def test_runs_of_one_name_that_read_with_another_window_are_two_lines_of_the_curve(tmp_path: Path) -> None:
    for window in (16, 32):
        parts = described("SnapKV")
        parts["scorer"]["window"] = window
        write_reading(tmp_path, parts=parts)
    figure = nll.curves([cell.run for cell in measured.read(tmp_path) if cell.run])
    assert sorted(lines_of(figure.axes[0])) == ["snapkv (evict), 64 window=16", "snapkv (evict), 64 window=32"]
    assert list(next(iter(lines_of(figure.axes[0]).values())).get_ydata()) == [3.0, 2.0]


def write_reading(out: Path, **about: Any) -> None:
    """A run of snapkv that scored one given text."""
    read = Likelihood(2.0, 7, [4, 8], [3.0, 2.0], 4, [[9]])
    folder = write_run(out, "snapkv", [replace(sample(0, 1.0), score=None)], **about)
    line = asdict(replace(sample(0, 1.0), score=None, output=None, likelihood=read))
    (folder / "samples.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")


def test_the_axis_of_a_panel_is_not_written_into_its_neighbour(tmp_path: Path) -> None:
    for task in ("pg19", "perplexity"):
        write_reading(tmp_path, task=task)
    figure = nll.curves([cell.run for cell in measured.read(tmp_path) if cell.run])
    figure.canvas.draw()
    first, second = figure.axes
    assert second.yaxis.label.get_window_extent().x0 > first.get_window_extent().x1 + 5
