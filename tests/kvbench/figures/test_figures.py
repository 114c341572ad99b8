"""Figures of finished runs: what is drawn is what was measured, and nothing covers anything."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from plotted_runs import POLICIES, described, read, sample, write_run

from kvbench.plot import main
from kvbench.report.figures import heatmap, layers, nll, panels, score
from kvbench.report.figures.sheet import Paper
from kvbench.results.__main__ import main as results
from kvbench.results.result import Result


def lines_of(axes: Axes) -> dict[str, Any]:
    return {str(line.get_label()): line for line in axes.get_lines() if not str(line.get_label()).startswith("_")}


def drawn(draw: Any, rows: list[Result], paper: Paper | None = None) -> Figure:
    """The only figure of its kind that these runs make."""
    ((_, figure),) = draw(rows, panels.looks(rows), paper or Paper())
    return figure


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of words that are drawn over each other, and words that leave the paper."""
    figure.canvas.draw()
    axes = [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
    ticks = [(tick, sorted(axis.get_view_interval())) for axis in axes for tick in axis.get_major_ticks()]
    beyond = [tick.label1 for tick, (low, high) in ticks if not low <= tick.get_loc() <= high]
    texts = [t for t in figure.findobj(Text) if t.get_text().strip() and t.get_visible() and t not in beyond]
    boxes = np.array([text.get_window_extent().extents for text in texts])  # [words, (x0, y0, x1, y1)] in pixels
    low, high = boxes[:, None, :2], boxes[:, None, 2:]
    shared = np.minimum(high, high.swapaxes(0, 1)) - np.maximum(low, low.swapaxes(0, 1))
    pairs = np.argwhere(np.triu((shared > 1).all(-1), k=1))
    outside = (boxes[:, :2] < 0).any(-1) | (boxes[:, 2:] > figure.get_size_inches() * figure.dpi).any(-1)
    words = [text.get_text() for text in texts]
    return [(words[i], words[j]) for i, j in pairs] + [(words[i], "the edge") for i in np.flatnonzero(outside)]


@pytest.mark.parametrize("kind", ["budget", "bytes"])
def test_the_drawn_numbers_are_those_of_the_table(kind: str, sweep: Path, cells: list[Result], tmp_path: Path) -> None:
    assert results(["collect", str(sweep), "-o", str(tmp_path / "table.csv")]) == 0
    table = pd.read_csv(tmp_path / "table.csv")
    (axes,) = drawn(score.against_budget if kind == "budget" else score.against_bytes, cells).axes
    lines = lines_of(axes)
    if kind == "budget":
        assert {tick.get_text() for tick in axes.get_xticklabels()} == {f"{b:g}" for b in table["budget"].dropna()}
    bars = {tuple(map(tuple, np.round(seg, 9))) for c in axes.collections for seg in c.get_segments()}
    for policy in POLICIES:
        rows = table[table["policy"] == policy].sort_values("budget")
        name = next(label for label in lines if label.partition(" ")[0] == policy)
        x = lines[name].get_xdata()
        if kind == "budget":
            assert list(x) == rows["budget"].tolist()  # shifts are in points, less than halfway on
            (shift, _) = lines[name].get_transform().transform((1, 0)) - axes.transData.transform((1, 0))
            places = axes.transData.transform([(budget, 0) for budget in sorted(set(table["budget"].dropna()))])[:, 0]
            assert abs(shift) < np.diff(places).min() / 2
        else:
            assert x == pytest.approx((rows["cache_bytes"] / 2**10).tolist())
        assert lines[name].get_ydata() == pytest.approx(rows["score"].tolist())
        ends = zip(x, rows["score_low"], rows["score_high"], strict=True)
        assert {((round(at, 9), round(low, 9)), (round(at, 9), round(high, 9))) for at, low, high in ends} <= bars
    full = table[table["policy"] == "full"].iloc[0]
    assert set(lines["full"].get_ydata()) == {full["score"]}


@pytest.mark.parametrize("width", [None, 3.3])
@pytest.mark.parametrize("draw", [score.against_budget, score.against_bytes])
def test_with_twelve_policies_and_six_budgets_no_words_cover_others(
    draw: Any, width: float | None, cells: list[Result]
) -> None:
    figure = drawn(draw, cells, Paper(width))
    assert overlaps(figure) == []
    assert width in (None, figure.get_size_inches()[0])


def test_a_table_and_the_runs_it_was_made_of_give_the_same_bytes(small: Path, tmp_path: Path) -> None:
    assert results(["collect", str(small), "-o", str(tmp_path / "table.csv")]) == 0
    assert main([str(small), "-o", str(tmp_path / "runs.svg")]) == 0
    assert main([str(tmp_path / "table.csv"), "-o", str(tmp_path / "table.svg")]) == 0
    assert (tmp_path / "runs.svg").read_bytes() == (tmp_path / "table.svg").read_bytes()


def test_a_needle_map_has_the_mean_of_every_cell_and_the_mean_over_examples_in_its_title(tmp_path: Path) -> None:
    scores = {(1000, 0.5): (1.0, 0.0), (1000, 1.0): (1.0, 1.0), (2000, 0.5): (0.0,)}
    asked = [(cell, one) for cell, own in scores.items() for one in own]
    write_run(tmp_path, "cake", [sample(i, s, length=n, depth=depth) for i, ((n, depth), s) in enumerate(asked)])
    (axes, _) = drawn(heatmap.needle_maps, panels.read(tmp_path)).axes
    assert np.ma.filled(axes.images[0].get_array(), -1).tolist() == [[0.5, 0.0], [1.0, -1]]  # one cell has no example
    assert [t.get_text() for t in axes.get_yticklabels()] == ["50", "100"]
    assert [t.get_text() for t in axes.texts] == [".50", "1", "0"]
    assert axes.get_title("left") == "cake, 64: 0.60"  # 3 of 5, not the mean of three cells
    assert heatmap.grid_of([sample(0, 1.0, length=1, depth=0), sample(1, None, length=1, depth=1)]) == {}


def test_needlebench_weighs_its_kinds_in_a_cell() -> None:
    """Single retrieval (1 + 0) / 2 with 0.4, multi reasoning 1 with 0.3, multi retrieval absent: 0.5 / 0.7."""
    about = {"benchmark": "needlebench", "length": 1000, "depth": 50}
    asked = (("single_retrieval", "en", 1), ("single_retrieval", "zh", 1), ("multi_reasoning", "en", 2))
    samples = [
        sample(i, (1.0, 0.0, 1.0)[i], **about, task=task, language=language, needles=needles)
        for i, (task, language, needles) in enumerate(asked)
    ]
    assert heatmap.grid_of(samples) == {(1000, 50): pytest.approx(0.5 / 0.7)}


def test_layer_budgets_are_means_over_heads_and_examples_of_policies_that_share_unequally(tmp_path: Path) -> None:
    held = ([[10, 20], [60, 70]], [[20, 30], [40, 50]])
    write_run(tmp_path, "cake", [replace(sample(i, 1.0), kept_tokens=one) for i, one in enumerate(held)])
    write_run(tmp_path, "full", [replace(sample(0, 1.0), kept_tokens=[[99, 99], [99, 99]])], None)
    for policy in ("tova", "h2o"):  # equal layers are one line with both names
        write_run(tmp_path, policy, [replace(sample(0, 1.0), kept_tokens=[[9, 9], [9, 9]])])
    (axes,) = drawn(layers.layer_budgets, panels.read(tmp_path)).axes
    drawn_lines = {name: list(line.get_ydata()) for name, line in lines_of(axes).items()}
    assert drawn_lines == {"cake": [20.0, 55.0], "h2o, tova": [9.0, 9.0]}
    write_run(tmp_path / "even", "tova", [replace(sample(0, 1.0), kept_tokens=[[9, 9], [9, 9]])])
    even = panels.read(tmp_path / "even")
    assert layers.layer_budgets(even, panels.looks(even), Paper()) == []


def test_nll_curves_begin_where_they_part_and_each_run_is_a_line(tmp_path: Path) -> None:
    same = {"lengths": [2, 4, 8, 16], "nll": [9.0, 8.0, 2.0, 1.0]}
    other = {"lengths": [2, 4, 8, 16], "nll": [9.0, 8.0, 3.0, 2.0]}
    assert (nll.parting([same, other]), nll.parting([same, same])) == (4, 2)
    for window in (16, 32):
        write_run(tmp_path, "snapkv", [read(0, [3.0, 1.0])], parts=described("SnapKV", window=window))
    (axes,) = drawn(nll.curves, panels.read(tmp_path)).axes
    assert len(lines_of(axes)) == 2
    assert all("window" in label for label in lines_of(axes))
    assert list(next(iter(lines_of(axes).values())).get_ydata()) == [3.0, 2.0]


def test_a_folder_gets_every_figure_there_is_data_for(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(small), "-o", str(tmp_path / "made"), "--format", "png", "--font", "serif"]) == 0
    assert sorted(p.name for p in (tmp_path / "made").iterdir()) == ["budget.png", "bytes.png"]
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "-o", "x.svg"], "nowhere does not exist"),
        (["{runs}", "-o", "x.jpeg"], "must end in one of .svg, .png, .pdf"),
        (["{runs}", "-o", "x.svg", "--kind", "nll"], "--kind nll has nothing to draw: no run has scored"),
        (
            ["{runs}", "-o", "x.svg", "--policy", "snapvk"],
            "snapvk is not a value of any run (allowed: cake, full, tova)",
        ),
        (["{runs}", "-o", "x.svg", "--width", "1"], "--width 1 is too narrow for this figure, which needs 2.1 inches"),
        (["{runs}", "-o", "x.svg", "--rename", "cake"], "--rename cake must be POLICY=NAME"),
    ],
)
def test_a_wrong_request_is_one_message(
    arguments: list[str], message: str, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.replace("{runs}", str(small)) for word in arguments]) == 2
    assert message in capsys.readouterr().err
