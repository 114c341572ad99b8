"""Curves and charts of the benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from drawn_figures import lines_of, overlaps

from kvbench.plot import main
from kvbench.report.figures import bench
from kvbench.report.figures.curves import Chart, ChartGroup, ChartRow, Curve, Dot, as_json


def test_a_benchmark_is_drawn_from_the_curves_in_its_file(tmp_path: Path) -> None:
    curves = [
        Curve("ms", "prompt tokens", "ms", m, [100.0, 200.0], [1.0, k], [0.5, None], [2.0, None])
        for m, k in (("snapkv", 3.0), ("full", 4.0))
    ]
    content = {"header": ["latency: about", "a model"], "curves": [vars(curve) for curve in curves]}
    (tmp_path / "latency.json").write_text(json.dumps(content), encoding="utf-8")
    figure = bench.of_file(tmp_path / "latency.json")
    lines = lines_of(figure.axes[0])
    assert lines["snapkv"].get_ydata().tolist() == [1.0, 3.0]
    assert all(line.get_transform() == figure.axes[0].transData for line in figure.axes[0].get_lines())
    bars = [list(line.get_ydata()) for line in figure.axes[0].get_lines() if line.get_gid() == "bar"]
    assert bars == [[0.5, 2.0], [0.5, 2.0]], "one method's and the other's; nothing where it is not known"
    assert overlaps(figure) == []
    assert main([str(tmp_path), "--kind", "bench", "-o", str(tmp_path / "pictures")]) == 0
    assert (tmp_path / "pictures" / "latency.svg").exists()


def test_a_chart_has_its_dots_in_the_rows_that_name_them_and_no_words_cover_others(tmp_path: Path) -> None:
    """As many rows as a GPU's benchmark of all kernels has: two columns, whose rows stand below each other."""
    methods = ("triton", "reference", "sdpa")
    groups = [
        ChartGroup(
            f"kernel {g}",
            [
                ChartRow(
                    f"case {g}.{i} of a length that labels have: bfloat16",
                    [Dot(m, 0.1 * (k + 1) + i / 100, 0.05, 1.2) for k, m in enumerate(methods)],
                    "537.0 MB, 184.2 us; 70% missed",
                    0.7 if i == 0 else None,
                )
                for i in range(10)
            ],
        )
        for g in range(9)
    ]
    content = {"header": ["kernels: about", "a GPU"], **as_json(Chart("share", groups, ["a note"], percent=True))}
    (tmp_path / "kernels.json").write_text(json.dumps(content), encoding="utf-8")
    figure = bench.of_file(tmp_path / "kernels.json")
    assert overlaps(figure) == []
    first, second = figure.axes
    dots = [line.get_xydata()[0] for axes in (first, second) for line in axes.get_lines() if line.get_gid() == "dot"]
    assert len(dots) == 9 * 10 * 3
    labels = dict(zip(second.get_yticks(), [t.get_text() for t in second.get_yticklabels()], strict=True))
    assert labels[2] == "case 5.1 of a length that labels have: bfloat16", "five groups, then four"
    drawn = {y: x for x, y in (line.get_xydata()[0] for line in second.get_lines() if line.get_gid() == "dot")}
    assert drawn[2] == pytest.approx(0.31)
    assert sum(line.get_gid() == "bound" for line in first.get_lines()) == 5
    legend = [t.get_text() for t in figure.legends[0].get_texts()]
    assert legend == list(methods)
