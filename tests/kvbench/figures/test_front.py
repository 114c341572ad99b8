"""The front of score against bytes."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from plotted_runs import sample, write_run

from kvbench.report.figures import measured, pareto


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
