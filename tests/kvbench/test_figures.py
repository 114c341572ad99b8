"""Pictures of finished runs: what is drawn is what was measured, everything is named, nothing covers anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.text import Text
from plotted_runs import POLICIES, described, sample, write_run, write_sweep

from kvbench.plot import main
from kvbench.report.collect import Choice, collect, show
from kvbench.report.figures import bench, heatmap, measured, nll, pareto, places, remarks, score, style, tasks
from kvbench.report.figures.curves import Chart, ChartGroup, ChartRow, Curve, Dot, as_json
from kvbench.report.figures.places import Move, Spot
from kvbench.runs.labels import in_words
from kvbench.runs.sample import Likelihood
from kvbench.terminal.errors import UsageError

BUDGETS = (64, 128, 256, 512, 1024, 2048)
OTT = {**described(None), "store": {"class": "kvbench.policies.stores.ott.OTT"}}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sweep")
    write_sweep(out, BUDGETS)
    return out


@pytest.fixture(scope="module")
def cells(sweep: Path) -> list[measured.Measured]:
    return measured.read(sweep)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two policies and the full cache at two budgets."""
    out = tmp_path_factory.mktemp("small")
    write_run(out, "full", [sample(i, 1.0, 2**24) for i in range(4)], None)
    for policy in ("cake", "tova"):
        for budget in (64, 128):
            write_run(out, policy, [sample(i, float(i < budget // 64), 2**10 * budget) for i in range(4)], budget)
    return out


@pytest.fixture(autouse=True)
def _styled() -> Iterator[None]:
    with style.house_style():
        yield


def lines_of(axes: Axes) -> dict[str, Any]:
    return {str(line.get_label()): line for line in axes.get_lines() if not str(line.get_label()).startswith("_")}


def bars_of(axes: Axes) -> list[float]:
    """Lengths of the bars from the top down."""
    bars = [box for box in axes.containers if isinstance(box, BarContainer)]
    return [bar.patches[0].get_width() for bar in bars]


def words_of(figure: Figure) -> list[Text]:
    """All that is written; ticks beyond the ends of their axis are not."""
    axes = [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
    ticks = [(tick, sorted(axis.get_view_interval())) for axis in axes for tick in axis.get_major_ticks()]
    beyond = [tick.label1 for tick, (low, high) in ticks if not low <= tick.get_loc() <= high]
    return [t for t in figure.findobj(Text) if t.get_text().strip() and t.get_visible() and t not in beyond]  # type: ignore[misc]


def said(figure: Figure) -> str:
    return " ".join(" ".join(t.get_text() for t in figure.texts).split())


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of words that are drawn over each other, and words that leave the paper."""
    figure.canvas.draw()
    texts = words_of(figure)
    words = [text.get_text() for text in texts]
    boxes = np.array([text.get_window_extent().extents for text in texts])  # [words, (x0, y0, x1, y1)] in pixels
    low, high = boxes[:, None, :2], boxes[:, None, 2:]
    shared = np.minimum(high, high.swapaxes(0, 1)) - np.maximum(low, low.swapaxes(0, 1))
    pairs = np.argwhere(np.triu((shared > 1).all(-1), k=1))
    outside = (boxes[:, :2] < 0).any(-1) | (boxes[:, 2:] > figure.get_size_inches() * figure.dpi).any(-1)
    return [(words[i], words[j]) for i, j in pairs] + [(words[i], "the edge") for i in np.flatnonzero(outside)]


# --- the numbers ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["budget", "bytes"])
def test_the_drawn_numbers_are_those_of_the_table(
    kind: str, sweep: Path, cells: list[measured.Measured], tmp_path: Path
) -> None:
    collect(sweep, tmp_path / "table.csv")
    table = pd.read_csv(tmp_path / "table.csv")
    draw = score.against_budget if kind == "budget" else score.against_bytes
    ((_, figure),) = draw(cells, measured.looks(cells))
    (axes,) = figure.axes
    lines = lines_of(axes)
    bars = {tuple(map(tuple, np.round(seg, 9))) for c in axes.collections for seg in c.get_segments()}  # type: ignore[attr-defined]
    for policy in POLICIES:
        rows = table[table["policy"] == f"{policy} (evict)"].sort_values("budget")
        x = rows["budget"] if kind == "budget" else rows["cache_bytes"] / 2**10
        name = next(label for label in lines if label.partition(" ")[0] == policy)
        assert lines[name].get_xdata() == pytest.approx(x.tolist())
        assert lines[name].get_ydata() == pytest.approx(rows["score"].tolist())
        ends = zip(x, rows["score_low"], rows["score_high"], strict=True)
        assert {((round(at, 9), round(low, 9)), (round(at, 9), round(high, 9))) for at, low, high in ends} <= bars
    full = table[table["policy"] == "full"].iloc[0]
    assert set(lines["full"].get_ydata()) == {full["score"]}


def test_bytes_are_the_cache_column_of_the_table_which_leaves_out_room_to_spare(tmp_path: Path) -> None:
    mib = 2**20
    for name, held in (("full", 4 * mib), ("tova", mib)):
        examples = [replace(sample(i, 1.0, held), spare_bytes=mib // 4) for i in range(4)]
        write_run(tmp_path / "runs", name, examples, None if name == "full" else 64)
    collect(tmp_path / "runs", tmp_path / "table.csv")
    for place in (tmp_path / "runs", tmp_path / "table.csv"):
        assert {cell.policy: cell.held for cell in measured.read(place)} == {"full": 3.75 * mib, "tova": 0.75 * mib}
    ((_, figure),) = score.against_bytes(measured.read(tmp_path / "runs"), measured.looks(measured.read(place)))
    assert any("full, 3.75 MiB" in text.get_text() for text in figure.findobj(Text))
    assert "3.750" in show(tmp_path / "runs", Choice(), None)


def test_a_table_draws_the_same_picture_as_the_runs_it_was_made_of(small: Path, tmp_path: Path) -> None:
    collect(small, tmp_path / "table.csv")
    assert main([str(small), "-o", str(tmp_path / "runs.svg")]) == 0
    assert main([str(tmp_path / "table.csv"), "-o", str(tmp_path / "table.svg")]) == 0
    assert (tmp_path / "runs.svg").read_bytes() == (tmp_path / "table.svg").read_bytes()


@pytest.mark.slow
def test_drawn_again_a_picture_has_the_same_bytes_and_no_date(small: Path, tmp_path: Path) -> None:
    for suffix in (".svg", ".pdf", ".png"):
        files = [tmp_path / f"{name}{suffix}" for name in ("one", "two")]
        for file in files:
            assert main([str(small), "-o", str(file), "--kind", "budget"]) == 0
        assert files[0].read_bytes() == files[1].read_bytes()
    assert "<dc:date>" not in (tmp_path / "one.svg").read_text(encoding="utf-8")


# --- names and room ---------------------------------------------------------------------------------------------------
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


# --- what is said -----------------------------------------------------------------------------------------------------
def test_a_picture_says_model_task_n_and_that_schedules_are_mixed(cells: list[measured.Measured]) -> None:
    ((_, figure),) = score.against_budget(cells, measured.looks(cells))
    assert "n = 10 examples for every point. Bars, and the grey band of the full cache: 95% intervals." in said(figure)
    assert figure.axes[0].get_title("left") == "niah"
    assert "Mixed schedules, which are different experiments" in said(figure)
    names = set(lines_of(figure.axes[0]))
    assert {"snapkv (grow)", "caote_snapkv (blocks of 128)", "cake"} <= names, "what most have goes without saying"


def test_one_schedule_is_said_once_and_names_are_bare(cells: list[measured.Measured]) -> None:
    alike = measured.choose(cells, policy=["h2o", "cake"])
    ((_, figure),) = score.against_budget(alike, measured.looks(alike))
    assert "All that evict: evicted once the whole prompt is in; one token evicted for each decoded one." in said(
        figure
    )
    assert set(lines_of(figure.axes[0])) == {"full", "h2o", "cake"}


def test_runs_that_differ_in_a_field_are_two_lines_that_say_so(tmp_path: Path) -> None:
    for window in (16, 32):
        parts = described("SnapKV")
        parts["scorer"]["window"] = window
        write_run(tmp_path, "snapkv", [sample(0, 1.0)], parts=parts)
    assert sorted(cell.policy for cell in measured.read(tmp_path)) == ["snapkv window=16", "snapkv window=32"]


def test_tasks_of_one_name_and_other_fields_are_two_panels(tmp_path: Path) -> None:
    for length in (1024, 4096):
        write_run(tmp_path, "snapkv", [sample(0, 1.0)], task="vt", task_fields={"length": length})
    panels = measured.panels_of(measured.read(tmp_path))
    assert [panel.task for panel in panels] == ["vt length=1024", "vt length=4096"]


def test_contexts_and_prompts_are_lines_of_their_own_and_the_full_cache_is_drawn_once(tmp_path: Path) -> None:
    for compress in ("context", "prompt"):
        write_run(tmp_path, "full", [sample(0, 1.0)], None, compress=compress)
        write_run(tmp_path, "snapkv", [sample(0, 1.0)], compress=compress)
        write_run(tmp_path, "ott", [sample(0, 1.0)], None, parts=OTT, compress=compress)
    cells = measured.read(tmp_path)
    names = sorted(cell.policy for cell in cells)
    assert names == ["full", "ott compress=context", "ott compress=prompt", "snapkv", "snapkv (whole prompt)"]
    ((_, figure),) = score.against_budget(cells, measured.looks(cells))
    assert "evicted once the whole context is in, before its question; decoded tokens all kept" in said(figure)


@pytest.mark.parametrize(
    ("moment", "words"),
    [
        ("context in blocks of 64", "evicted after every block of 64 tokens of the context, before its question"),
        ("context in one block", "evicted once the whole context is in, as one block, before its question"),
    ],
)
def test_how_a_context_is_compressed_is_said_in_words(moment: str, words: str) -> None:
    assert in_words(moment) == words


def test_titles_wider_than_their_panel_are_broken(tmp_path: Path) -> None:
    for seed in range(4):
        for dtype in ("float32", "bfloat16"):
            write_run(tmp_path, "snapkv", [sample(0, 1.0)], task="ruler_niah_multikey_2", seed=seed, dtype=dtype)
    cells = measured.read(tmp_path)
    for draw in (score.against_budget, score.against_bytes):
        ((_, figure),) = draw(cells, measured.looks(cells))
        assert figure.axes[0].get_title("left").split("\n")[0] == "ruler_niah_multikey_2, pocket"
        assert overlaps(figure) == []


def test_the_same_cell_twice_is_refused(tmp_path: Path) -> None:
    for code in ("a", "b"):
        write_run(tmp_path, "snapkv", [sample(0, 1.0)], code=code)
    with pytest.raises(UsageError, match="computed by different code"):
        measured.read(tmp_path)


def test_a_failed_run_is_not_drawn_but_named(tmp_path: Path) -> None:
    write_run(tmp_path, "cake", [sample(0, 1.0), sample(1, 1.0)])
    write_run(tmp_path, "tova", [sample(0, 1.0), sample(1, None)], 96)
    runs = measured.read(tmp_path)
    ((_, figure),) = score.against_budget(runs, measured.looks(runs))
    assert set(lines_of(figure.axes[0])) == {"cake"}
    assert "Not drawn, because examples failed: tova at 96 on niah (1 of 2)." in said(figure)


def test_other_numbers_of_examples_are_said(tmp_path: Path) -> None:
    write_run(tmp_path, "cake", [sample(0, 1.0)])
    write_run(tmp_path, "tova", [sample(i, 1.0) for i in range(3)])
    assert "n = 1 to 3 examples for a point, not the same for all" in remarks.notes(measured.read(tmp_path))[0]


# --- looks ------------------------------------------------------------------------------------------------------------
def test_the_family_is_that_of_the_scorer_whatever_is_around_it() -> None:
    families = [style.family_of(slug) for slug in ("snapkv", "caote_snapkv", "fastcaote_snapkv", "ada_pyramidkv")]
    assert set(families) == {"snapkv"}
    assert style.family_of("fastcaote_h2o") == style.family_of("p2a_h2o") == "h2o"
    assert [style.family_of(slug) for slug in ("kivi_g32_r128", "cake_kivi_int4", "full")] == ["kivi", "cake", "full"]
    assert style.family_of("quanto_int2") == "quanto", "a rival is its own"


def test_policies_are_told_apart_without_colour() -> None:
    looks = style.palette({name: style.family(parts) for name, parts in POLICIES.items()})
    assert len({(look.marker, look.hollow) for look in looks.values()}) == len(POLICIES)
    assert len({look.colour for look in looks.values()}) == len(POLICIES)
    assert looks["snapkv"].colour in style.HUES


# Machado, Oliveira and Fernandes 2009: what a full lack of one kind of cone makes of linear RGB.
CONES = {
    "all": np.eye(3),
    "no M": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no L": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
}


def lab(linear: np.ndarray) -> np.ndarray:
    """CIE L*a*b* (D65) of linear RGB."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    ratio = to_xyz @ np.clip(linear, 0, 1) / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("cones", CONES)
def test_hues_are_told_apart_by_the_colour_blind(cones: str) -> None:
    """A difference of 2.3 can just be noticed (Mahy et al. 1994); the least of these is 17."""
    hues = [np.array(to_rgb(hue)) for hue in style.HUES]
    linear = [np.where(hue <= 0.04045, hue / 12.92, ((hue + 0.055) / 1.055) ** 2.4) for hue in hues]
    seen = [lab(np.array(CONES[cones]) @ colour) for colour in linear]
    assert min(float(np.linalg.norm(a - b)) for a, b in combinations(seen, 2)) > 15


# --- the front --------------------------------------------------------------------------------------------------------
@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), min_size=1, max_size=12))
def test_none_on_the_front_is_beaten_and_all_others_are(pairs: list[tuple[int, int]]) -> None:
    made = [cell_of(held, right / 8) for held, right in pairs]
    front = {(cell.held, cell.score) for cell in pareto.front(made)}
    for held, right in pairs:
        beaten = any((h <= held and r / 8 >= right / 8) and (h, r) != (held, right) for h, r in pairs)
        assert ((held, right / 8) in front) == (not beaten)


def cell_of(held: float, value: float) -> measured.Measured:
    return measured.Measured(
        *("p", "", "", "prompt", "snapkv", "m", "t"),
        budget=None,
        n=8,
        failed=0,
        score=value,
        low=None,
        high=None,
        held=held,
        source="",
        policy_fields={},
        task_fields={},
        model_fields={},
    )


def test_all_cells_are_in_the_picture_of_the_front_and_ties_are_named_together(tmp_path: Path) -> None:
    write_run(tmp_path, "cake", [sample(0, 1.0)])
    write_run(tmp_path, "tova", [sample(0, 1.0)])
    write_run(tmp_path, "h2o", [sample(0, 0.0)])
    runs = measured.read(tmp_path)
    ((_, figure),) = pareto.pareto(runs, measured.looks(runs))
    assert len([line for line in figure.axes[0].get_lines() if line.get_gid() == "dot"]) == 3
    assert [t.get_text() for t in figure.axes[0].texts if t.get_gid() == "name"] == ["cake, 64 = tova, 64"]


# --- tasks and needles ------------------------------------------------------------------------------------------------
def test_a_suite_is_taken_apart_by_task_with_bars_of_the_means(tmp_path: Path) -> None:
    samples = [sample(i, float(i < 3), task=("vt", "cwe")[i % 2]) for i in range(8)]
    write_run(tmp_path, "cake", samples, task="ruler")
    write_run(tmp_path, "full", [sample(i, 1.0, task=("vt", "cwe")[i % 2]) for i in range(8)], None, task="ruler")
    runs = measured.read(tmp_path)
    ((_, figure),) = tasks.by_task(runs, measured.looks(runs))
    widths = {axes.get_title("left"): bars_of(axes) for axes in figure.axes}
    assert widths["vt"] == [1, 0.5]  # of cake examples 0, 2 of 0, 2, 4, 6
    assert widths["cwe"] == [1, 0.25]  # example 1 of 1, 3, 5, 7
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["full", "cake"]
    assert "n = 8 examples for every run, its tasks together" in said(figure)
    assert overlaps(figure) == []


def test_needlebench_has_its_categories_by_language_and_its_own_overall_score(tmp_path: Path) -> None:
    samples = []
    for kind, needles, right in (("single_retrieval", 1, 1.0), ("multi_reasoning", 2, 0.5)):
        about = {"benchmark": "needlebench", "task": kind, "language": "en", "needles": needles, "length": 1000}
        samples += [sample(len(samples) + i, right, **about, depth=depth) for i, depth in enumerate((0, 50))]
    write_run(tmp_path, "cake", samples, task="needlebench")
    runs = measured.read(tmp_path)
    ((_, figure),) = tasks.by_task(runs, measured.looks(runs))
    assert {axes.get_title("left") for axes in figure.axes} == {"single retrieval, en", "multi reasoning, en"}
    grid = heatmap.grid_of(runs[0].run.samples)  # type: ignore[union-attr]
    assert grid == {(1000, 0): pytest.approx((0.4 * 1 + 0.3 * 0.5) / 0.7), (1000, 50): pytest.approx(0.55 / 0.7)}


def test_a_needle_map_has_the_mean_of_every_cell_with_depths_downwards(tmp_path: Path) -> None:
    scores = {(1000, 0.5): (1.0, 0.0), (1000, 1.0): (1.0, 1.0), (2000, 0.5): (0.0, 0.0)}
    samples = [
        sample(i, one, length=length, depth=depth)
        for i, ((length, depth), one) in enumerate((cell, s) for cell, both in scores.items() for s in both)
    ]
    write_run(tmp_path, "cake", samples)
    runs = measured.read(tmp_path)
    ((_, figure),) = heatmap.needle_maps(runs, {})
    (image,) = figure.axes[0].images
    drawn = np.ma.filled(image.get_array(), -1)
    assert drawn.tolist() == [[0.5, 0.0], [1.0, -1]]  # depths 50 and 100 below each other; one cell was not asked
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["50", "100"]
    assert [t.get_text() for t in figure.axes[0].texts] == [".50", "1", "0"]
    assert "White: not asked." in said(figure)


def test_prompts_of_one_length_are_one_map_with_a_line_per_policy_and_budget(tmp_path: Path) -> None:
    for policy in ("cake", "tova"):
        for budget in (64, 128):
            samples = [sample(i, float(policy == "cake"), length=2048, depth=i / 4) for i in range(5)]
            write_run(tmp_path, policy, samples, budget)
    runs = measured.read(tmp_path)
    ((_, figure),) = heatmap.needle_maps(runs, {})
    names = [t.get_text() for t in figure.axes[0].get_yticklabels()]
    assert names == ["cake, 64: 1.00", "cake, 128: 1.00", "tova, 64: 0.00", "tova, 128: 0.00"]
    assert figure.axes[0].images[0].get_array().mean(axis=1).tolist() == [1, 1, 0, 0]  # type: ignore[union-attr]
    assert overlaps(figure) == []


def test_maps_of_twelve_policies_do_not_run_into_each_other(tmp_path: Path) -> None:
    for policy in POLICIES:
        for budget in (64, 128):
            samples = [sample(i, 1.0, length=1000 * (i % 3 + 1), depth=i // 3 * 50) for i in range(6)]
            write_run(tmp_path, policy, samples, budget)
    runs = measured.read(tmp_path)
    ((_, figure),) = heatmap.needle_maps(runs, {})
    assert overlaps(figure) == []


def test_a_failed_example_leaves_no_map() -> None:
    assert heatmap.grid_of([sample(0, 1.0, length=1, depth=0), sample(1, None, length=1, depth=1)]) == {}


# --- benchmarks -------------------------------------------------------------------------------------------------------
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


def test_rows_of_a_chart_that_are_named_after_their_method_need_no_legend() -> None:
    rows = [ChartRow("h2o", [Dot("h2o", 0.5)], "2.10: missed"), ChartRow("snapkv", [], "not measurable here")]
    title = "column_sums_in_32k_prefill: a title that is longer than the labels, at most 1"
    figure = bench.draw(Chart("times better than the bar", [ChartGroup(title, rows)]), ["targets"])
    assert figure.legends == []
    assert overlaps(figure) == []
    assert {"2.10: missed", "not measurable here"} <= {t.get_text() for t in figure.axes[0].texts}


# --- the command ------------------------------------------------------------------------------------------------------
def test_a_folder_gets_every_picture_there_is_data_for(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(small), "-o", str(tmp_path / "pictures"), "--format", "png"]) == 0
    assert sorted(p.name for p in (tmp_path / "pictures").iterdir()) == ["budget.png", "bytes.png", "pareto.png"]
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere", "-o", "x.svg"], "nowhere does not exist"),
        (["{runs}", "-o", "x.jpeg"], "must end in one of .svg, .png, .pdf"),
        (["{runs}", "-o", "x.svg", "--kind", "nll"], "--kind nll has nothing to draw: no run on disk has scored"),
        (["{runs}", "-o", "x.svg", "--kind", "heatmap"], "--kind heatmap has nothing to draw"),
        (
            ["{runs}", "-o", "x.svg", "--policy", "snapvk"],
            "--policy snapvk is not among the runs (there are: cake, full, tova)",
        ),
        (["{runs}", "-o", "x.svg", "--budget", "65"], "--budget 65 is not among the runs"),
        (["{runs}", "-o", "x.svg", "--kind", "all"], "is one file, but there are 3 pictures (budget, bytes, pareto)"),
        (["{runs}", "-o", "x.svg", "--kind", "bench"], "holds no .json file with curves"),
        (["{runs}/table.csv", "-o", "x.svg"], "is not a table that `python -m kvbench.results collect` wrote"),
    ],
)
def test_what_is_asked_wrongly_is_one_sentence(
    arguments: list[str], sentence: str, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (small / "table.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    assert main([word.replace("{runs}", str(small)) for word in arguments]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("kvbench: ") == 1 + error.count("kvbench: no picture")


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


def test_other_examples_are_said(tmp_path: Path) -> None:
    write_run(tmp_path, "cake", [sample(0, 1.0)])
    write_run(tmp_path, "tova", [replace(sample(0, 1.0), prompt_hash="another")])
    assert "Not the same examples for all: niah." in remarks.notes(measured.read(tmp_path))


def test_a_store_without_a_budget_is_a_level_of_its_own_beside_shares(tmp_path: Path) -> None:
    store = {**described(None), "store": {"class": "kvbench.policies.stores.kivi.Kivi"}}
    write_run(tmp_path, "kivi", [sample(0, 1.0), sample(1, 0.0)], None, parts=store)
    for share in (0.1, 0.2):
        write_run(tmp_path, "cake", [sample(0, 1.0), sample(1, 1.0)], share)
    write_run(tmp_path, "tova", [sample(0, None)], 64, "vt")  # a task of which nothing is left to draw
    runs = measured.read(tmp_path)
    ((name, figure),) = score.against_budget(runs, measured.looks(runs))
    assert name == "budget-share"
    assert set(lines_of(figure.axes[0])["kivi"].get_ydata()) == {0.5}
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == ["10%", "20%"]
    assert len(score.against_bytes(runs, measured.looks(runs))[0][1].axes) == 1


def test_a_reduction_that_is_an_increase_is_drawn_below_zero() -> None:
    figure = bench.draw([Curve("memory", "prompt tokens", "% less", "cake", [100.0, 200.0], [-5.0, 40.0])], ["fig7"])
    assert figure.axes[0].get_yscale() == "linear"
    assert figure.axes[0].get_ylim()[0] < -5 < 40 < figure.axes[0].get_ylim()[1]
