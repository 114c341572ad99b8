"""Pictures of finished runs: everything is named, nothing covers anything."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn_figures import lines_of, overlaps, said
from hypothesis import given
from hypothesis import strategies as st
from plotted_runs import POLICIES, sample, write_run, write_sweep

from kvbench.report.figures import measured, pareto, places, score, tasks
from kvbench.report.figures.places import Move, Spot


@pytest.mark.parametrize("draw", [score.against_budget, score.against_bytes, pareto.pareto])
def test_with_twelve_policies_and_six_budgets_no_words_cover_others(draw: Any, cells: list[measured.Measured]) -> None:
    ((_, figure),) = draw(cells, measured.looks(cells))
    assert overlaps(figure) == []


def test_every_line_is_named_beside_its_end_in_the_order_of_the_ends(cells: list[measured.Measured]) -> None:
    ((_, figure),) = score.against_budget(cells, measured.looks(cells))
    (axes,) = figure.axes
    names = [t for t in axes.texts if t.get_gid() == "name"]
    assert {t.get_text().partition(",")[0] for t in names} == set(lines_of(axes))
    assert len(names) == 13
    figure.canvas.draw()
    ends = {label: line.get_ydata()[-1] for label, line in lines_of(axes).items()}
    heights = sorted((t.get_window_extent().y0, ends[t.get_text().partition(",")[0]]) for t in names)
    assert [end for _, end in heights] == sorted(ends.values())


def test_many_panels_share_one_legend_below_that_names_every_line(tmp_path: Path) -> None:
    write_sweep(tmp_path, (64,), n=4, tasks=("niah", "vt"))
    several = measured.read(tmp_path)
    for draw in (score.against_budget, tasks.by_task):
        pictures = draw(several, measured.looks(several))
        for _, figure in pictures:
            assert overlaps(figure) == []
    ((_, figure),) = score.against_budget(several, measured.looks(several))
    (legend,) = figure.legends
    assert {t.get_text() for t in legend.get_texts()} == {name for axes in figure.axes for name in lines_of(axes)}
    assert len(legend.get_texts()) == 13


def test_lines_of_equal_values_stand_side_by_side_and_their_data_stays_true(tmp_path: Path) -> None:
    for policy in ("snapkv", "tova", "cake"):
        for budget in (64, 128):
            write_run(tmp_path, policy, [sample(0, 1.0), sample(1, 0.0)], budget)
    twins = measured.read(tmp_path)
    ((_, figure),) = score.against_budget(twins, measured.looks(twins))
    figure.canvas.draw()
    lines = list(lines_of(figure.axes[0]).values())
    seen = [line.get_transform().transform(np.column_stack([line.get_xdata(), line.get_ydata()])) for line in lines]
    for one, other in combinations(seen, 2):
        apart = np.abs(one - other)[0] * 72 / figure.dpi
        assert apart.max() > 2, "points of paper"
        assert apart.max() < 12
    assert all(line.get_ydata().tolist() == [0.5, 0.5] for line in lines)
    assert "are moved a little aside" in said(figure)


def test_only_lines_that_touch_are_moved() -> None:
    def at(x: float, y: float) -> Spot:
        return Spot(x, y, y - 3, y + 3)

    twins = [[at(0, 10), at(50, 10)], [at(0, 10), at(50, 10)], [at(0, 90), at(50, 90)]]
    first, second, alone = places.dodges(twins)
    assert alone == Move()
    assert first.right == -second.right != 0
    assert first.up == -second.up != 0
    crossing = places.dodges([[at(0, 10), at(50, 10)], [at(0, 10), at(50, 40)]])
    assert [move.up for move in crossing] == [0, 0], "one point in common is no segment"


@given(st.integers(1, 8))
def test_lines_at_the_height_of_a_level_stand_around_it_and_the_level_stays(many: int) -> None:
    """A level is the full cache's line: where others score the same, none may lie on it or on another."""
    at_it = [[Spot(50.0 * x, 10, 8, 12) for x in range(3)] for _ in range(many)]
    ups = [move.up for move in places.dodges(at_it, levels=[10.0])]
    heights = sorted([*ups, 0.0])
    assert len(set(heights)) == many + 1
    assert heights[-1] - heights[0] <= places.HIGHEST + 1e-9
    assert abs(sum(up > 0 for up in ups) - sum(up < 0 for up in ups)) <= 1, "above and below by turns"


def test_of_points_that_touch_the_one_with_more_bytes_stands_to_the_right() -> None:
    more, less = [Spot(12, 10, 8, 12)], [Spot(10, 10, 8, 12)]
    right = [move.right for move in places.dodges([more, less])]
    assert right[0] == -right[1] > 0


def test_no_line_covers_a_point(cells: list[measured.Measured]) -> None:
    ((_, figure),) = score.against_bytes(cells, measured.looks(cells))
    (axes,) = figure.axes
    above = [line for line in axes.get_lines() if line.get_gid() == "above"]
    assert len(above) == len(POLICIES)
    assert min(line.get_zorder() for line in above) > max(line.get_zorder() for line in lines_of(axes).values())


@given(st.lists(st.floats(-20, 120), min_size=1, max_size=9))
def test_names_keep_their_order_their_distance_and_the_panel(wanted: list[float]) -> None:
    got = places.spread(wanted, 10, 0, 100)
    assert min(got) >= -1e-9
    assert max(got) <= 100 + 1e-9
    ranked = sorted(zip(wanted, got, strict=True))
    assert all(b - a >= 10 - 1e-9 for a, b in zip(sorted(got), sorted(got)[1:], strict=False))
    assert all(one[1] < other[1] for one, other in combinations(ranked, 2) if one[0] < other[0])


def test_names_with_room_stand_where_they_are_wanted() -> None:
    assert places.spread([80, 20, 50], 10, 0, 100) == [80, 20, 50]
    assert places.spread([50, 50], 10, 0, 100) == [55, 45]  # around their place, the first above


def test_titles_wider_than_their_panel_are_broken(tmp_path: Path) -> None:
    for seed in range(4):
        for dtype in ("float32", "bfloat16"):
            write_run(tmp_path, "snapkv", [sample(0, 1.0)], task="ruler_niah_multikey_2", seed=seed, dtype=dtype)
    cells = measured.read(tmp_path)
    for draw in (score.against_budget, score.against_bytes):
        ((_, figure),) = draw(cells, measured.looks(cells))
        assert figure.axes[0].get_title("left").split("\n")[0] == "ruler_niah_multikey_2, pocket"
        assert overlaps(figure) == []
