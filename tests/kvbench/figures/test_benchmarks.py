"""Curves and charts of the benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

from drawn_figures import lines_of, overlaps

from kvbench.plot import main
from kvbench.report.figures import bench
from kvbench.report.figures.curves import Curve


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
