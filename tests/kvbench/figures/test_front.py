"""The front of score against bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from drawn_figures import picture
from hypothesis import given
from hypothesis import strategies as st
from plotted_runs import sample, write_run

from kvbench.analysis.result import Result
from kvbench.report.figures import panels, pareto


@given(pairs=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), min_size=1, max_size=12))
def test_none_on_the_front_is_beaten_and_all_others_are(cells: list[Result], pairs: list[tuple[int, int]]) -> None:
    made = [replace(cells[0], cache_bytes=held, score=right / 8) for held, right in pairs]
    front = {(cell.cache_bytes, cell.score) for cell in pareto.front(made)}
    for held, right in pairs:
        beaten = any((h <= held and r / 8 >= right / 8) and (h, r) != (held, right) for h, r in pairs)
        assert ((held, right / 8) in front) == (not beaten)


def test_all_cells_are_in_the_picture_of_the_front_and_ties_are_named_together(tmp_path: Path) -> None:
    for policy, score in (("cake", 1.0), ("tova", 1.0), ("h2o", 0.0)):
        write_run(tmp_path, policy, [sample(0, score)])
    (axes,) = picture(pareto.pareto, panels.read(tmp_path)).axes
    assert len([line for line in axes.get_lines() if line.get_gid() == "dot"]) == 3
    assert [t.get_text() for t in axes.texts if t.get_gid() == "name"] == ["cake, 64 = tova, 64"]
