"""Pictures of finished runs: what is drawn is what was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from drawn_figures import lines_of, picture
from matplotlib.text import Text
from plotted_runs import POLICIES, described, sample, write_run

from kvbench.analysis.load import load_results
from kvbench.analysis.result import Result
from kvbench.plot import main
from kvbench.report.command import main as results
from kvbench.report.figures import panels, score
from kvbench.report.frames import text
from kvbench.report.table import results_table


@pytest.mark.parametrize("kind", ["budget", "bytes"])
def test_the_drawn_numbers_are_those_of_the_table(kind: str, sweep: Path, cells: list[Result], tmp_path: Path) -> None:
    assert results(["collect", str(sweep), "-o", str(tmp_path / "table.csv")]) == 0
    table = pd.read_csv(tmp_path / "table.csv")
    draw = score.against_budget if kind == "budget" else score.against_bytes
    figure = picture(draw, cells)
    (axes,) = figure.axes
    lines = lines_of(axes)
    ticks = [tick.get_text() for tick in axes.get_xticklabels()]
    bars = {tuple(map(tuple, np.round(seg, 9))) for c in axes.collections for seg in c.get_segments()}  # type: ignore[attr-defined]
    for policy in POLICIES:
        rows = table[table["policy"] == policy].sort_values("budget")
        name = next(label for label in lines if label.partition(" ")[0] == policy)
        x = lines[name].get_xdata()
        if kind == "budget":
            assert [ticks[round(place)] for place in x] == [f"{budget:g}" for budget in rows["budget"]]
        else:
            assert x == pytest.approx((rows["cache_bytes"] / 2**10).tolist())
        assert lines[name].get_ydata() == pytest.approx(rows["score"].tolist())
        ends = zip(x, rows["score_low"], rows["score_high"], strict=True)
        assert {((round(at, 9), round(low, 9)), (round(at, 9), round(high, 9))) for at, low, high in ends} <= bars
    full = table[table["policy"] == "full"].iloc[0]
    assert set(lines["full"].get_ydata()) == {full["score"]}


def test_bytes_are_the_cache_column_of_the_table_which_leaves_out_room_to_spare(tmp_path: Path) -> None:
    mib = 2**20
    for name, held in (("full", 4 * mib), ("tova", mib)):
        examples = [replace(sample(i, 1.0, held - mib // 4), spare_bytes=mib // 4) for i in range(4)]
        write_run(tmp_path / "runs", name, examples, None if name == "full" else 64)
    assert results(["collect", str(tmp_path / "runs"), "-o", str(tmp_path / "table.csv")]) == 0
    for place in (tmp_path / "runs", tmp_path / "table.csv"):
        assert {cell.line: cell.cache_bytes for cell in panels.read(place)} == {"full": 3.75 * mib, "tova": 0.75 * mib}
    ((_, figure),) = score.against_bytes(panels.read(tmp_path / "runs"), panels.looks(panels.read(place)))
    assert any("full, 3.75 MiB" in text.get_text() for text in figure.findobj(Text))
    assert "3.750" in text(results_table(load_results(tmp_path / "runs")))


def test_a_table_draws_the_same_picture_as_the_runs_it_was_made_of(small: Path, tmp_path: Path) -> None:
    assert results(["collect", str(small), "-o", str(tmp_path / "table.csv")]) == 0
    assert main([str(small), "-o", str(tmp_path / "runs.svg")]) == 0
    assert main([str(tmp_path / "table.csv"), "-o", str(tmp_path / "table.svg")]) == 0
    assert (tmp_path / "runs.svg").read_bytes() == (tmp_path / "table.svg").read_bytes()
    of_old = ("spare_bytes", "n_shared", "official_intervals", "seed", "compress", "mixed", "nll_curve")
    table = pd.read_csv(tmp_path / "table.csv").drop(columns=[*of_old])
    table["policy_fields"] = table["policy_fields"].str.replace("kvbench.policies.stores.dense.", "")
    table.to_csv(tmp_path / "old.csv", index=False)
    assert main([str(tmp_path / "old.csv"), "-o", str(tmp_path / "old.svg")]) == 0
    assert (tmp_path / "runs.svg").read_bytes() == (tmp_path / "old.svg").read_bytes(), "older tables had less"


def test_a_store_without_a_budget_is_a_level_of_its_own_beside_shares(tmp_path: Path) -> None:
    store = {**described(None), "store": {"class": "kvbench.policies.stores.kivi.Kivi"}}
    write_run(tmp_path, "kivi", [sample(0, 1.0), sample(1, 0.0)], None, parts=store)
    for share in (0.1, 0.2):
        write_run(tmp_path, "cake", [sample(0, 1.0), sample(1, 1.0)], share)
    write_run(tmp_path, "tova", [sample(0, None)], 64, "vt")  # a task of which nothing is left to draw
    runs = panels.read(tmp_path)
    ((name, figure),) = score.against_budget(runs, panels.looks(runs))
    assert name == "budget-share"
    assert set(lines_of(figure.axes[0])["kivi"].get_ydata()) == {0.5}
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == ["10%", "20%"]
    assert len(score.against_bytes(runs, panels.looks(runs))[0][1].axes) == 1
