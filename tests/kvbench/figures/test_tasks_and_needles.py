"""A suite task by task, and maps of where needles were found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from drawn_figures import bars_of, overlaps, picture, said
from plotted_runs import sample, write_run

from kvbench.report.figures import heatmap, panels, tasks


def test_a_suite_is_taken_apart_by_task_with_bars_of_the_means(tmp_path: Path) -> None:
    samples = [sample(i, float(i < 3), task=("vt", "cwe")[i % 2]) for i in range(8)]
    write_run(tmp_path, "cake", samples, task="ruler")
    write_run(tmp_path, "full", [sample(i, 1.0, task=("vt", "cwe")[i % 2]) for i in range(8)], None, task="ruler")
    runs = panels.read(tmp_path)
    figure = picture(tasks.by_task, runs)
    widths = {axes.get_title("left"): bars_of(axes) for axes in figure.axes}
    assert widths["vt"] == [1, 0.5]  # of cake examples 0, 2 of 0, 2, 4, 6
    assert widths["cwe"] == [1, 0.25]  # example 1 of 1, 3, 5, 7
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["full", "cake"]
    assert "n = 8 examples for every run, its tasks together" in said(figure)
    assert overlaps(figure) == []


def test_a_needle_map_has_the_mean_of_every_cell_with_depths_downwards(tmp_path: Path) -> None:
    scores = {(1000, 0.5): (1.0, 0.0), (1000, 1.0): (1.0, 1.0), (2000, 0.5): (0.0, 0.0)}
    samples = [
        sample(i, one, length=length, depth=depth)
        for i, ((length, depth), one) in enumerate((cell, s) for cell, both in scores.items() for s in both)
    ]
    write_run(tmp_path, "cake", samples)
    runs = panels.read(tmp_path)
    figure = picture(heatmap.needle_maps, runs)
    (image,) = figure.axes[0].images
    drawn = np.ma.filled(image.get_array(), -1)
    assert drawn.tolist() == [[0.5, 0.0], [1.0, -1]]  # depths 50 and 100 below each other; one cell was not asked
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["50", "100"]
    assert [t.get_text() for t in figure.axes[0].texts] == [".50", "1", "0"]
    assert "White: not asked." in said(figure)


def test_the_mean_above_a_map_is_the_tables_over_examples_and_not_over_cells(tmp_path: Path) -> None:
    """One example right in the first cell, four wrong in the second: 1 of 5, where the mean of cells is 1/2."""
    for lengths in ((1000, 1000), (1000, 2000)):  # strips, and maps
        folder = tmp_path / str(lengths[1])
        samples = [sample(0, 1.0, length=lengths[0], depth=0)]
        samples += [sample(i, 0.0, length=lengths[1], depth=50) for i in range(1, 5)]
        write_run(folder, "cake", samples)
        figure = picture(heatmap.needle_maps, panels.read(folder))
        words = [figure.axes[0].get_title("left"), *(t.get_text() for t in figure.axes[0].get_yticklabels())]
        assert "cake, 64: 0.20" in words


def test_needlebench_weighs_its_kinds_in_a_cell_and_its_bars_are_by_language(tmp_path: Path) -> None:
    """Single retrieval (1 + 0) / 2 with 0.4, multi reasoning 1 with 0.3, multi retrieval not asked: 0.5 / 0.7."""
    about = {"benchmark": "needlebench", "length": 1000, "depth": 50}
    asked = (("single_retrieval", "en", 1), ("single_retrieval", "zh", 1), ("multi_reasoning", "en", 2))
    samples = [
        sample(i, (1.0, 0.0, 1.0)[i], **about, task=task, language=language, needles=needles)
        for i, (task, language, needles) in enumerate(asked)
    ]
    assert heatmap.grid_of(samples) == {(1000, 50): pytest.approx(0.5 / 0.7)}
    write_run(tmp_path, "cake", samples, task="needlebench")
    titles = {axes.get_title("left") for axes in picture(tasks.by_task, panels.read(tmp_path)).axes}
    assert {"single retrieval, en", "single retrieval, zh", "multi reasoning, en"} <= titles


def test_a_failed_example_leaves_no_map() -> None:
    assert heatmap.grid_of([sample(0, 1.0, length=1, depth=0), sample(1, None, length=1, depth=1)]) == {}
