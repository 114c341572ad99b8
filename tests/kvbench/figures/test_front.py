"""The front of score against bytes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvbench.analysis.result import Result
from kvbench.report.figures import pareto


@given(pairs=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), min_size=1, max_size=12))
def test_none_on_the_front_is_beaten_and_all_others_are(cells: list[Result], pairs: list[tuple[int, int]]) -> None:
    made = [replace(cells[0], cache_bytes=held, score=right / 8) for held, right in pairs]
    front = {(cell.cache_bytes, cell.score) for cell in pareto.front(made)}
    for held, right in pairs:
        beaten = any((h <= held and r / 8 >= right / 8) and (h, r) != (held, right) for h, r in pairs)
        assert ((held, right / 8) in front) == (not beaten)
