"""Sign test, Holm, power and verdicts, against numbers worked by hand."""

import pytest

from kvbench.analysis.statistics import examples_needed, holm, sign_test
from kvbench.papers.claims.claim import Cell, Claim, Evidence, Says
from kvbench.papers.claims.inference import judge_print


class Given:
    """A source whose cells are given."""

    unit = "points"

    def __init__(self, *cells: Cell) -> None:
        self.cells = cells

    def evidence(self) -> Evidence:
        return Evidence(self.cells)


def claim(says: Says, *gains: float, least: float = 0.0, most: float = float("inf")) -> Claim:
    cells = (Cell(f"cell {i}:", gain, least, most) for i, gain in enumerate(gains))
    return Claim("paper", "name", "a sentence", "1", "cells", Given(*cells), says)


def test_sign_test_counts_both_tails() -> None:
    assert sign_test(5, 0) == pytest.approx(2 / 2**5)
    assert sign_test(7, 2) == pytest.approx(2 * (1 + 9 + 36) / 2**9)
    assert sign_test(2, 7) == sign_test(7, 2)
    assert sign_test(3, 3) == 1.0
    assert sign_test(0, 0) is None


def test_holm_multiplies_the_smallest_by_all_and_never_falls_back() -> None:
    # sorted .01 .02 .03 .04 by 4, 3, 2, 1: .04 .06 .06 .04, of which the last may not be below .06
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.6]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def test_a_gain_of_5_points_at_a_spread_of_30_takes_283_examples() -> None:
    # (1.95996 + .84162)^2 (.3 / .05)^2 = 7.8489 * 36 = 282.6
    assert examples_needed(0.3, 0.05) == 283
    assert examples_needed(0.3, -0.05) == 283
    # one of ten comparisons: z of .9975 is 2.80703: (2.80703 + .84162)^2 * 36 = 479.3
    assert examples_needed(0.3, 0.05, family=10) == 480
    assert examples_needed(0.3, 0.0) is None
    assert examples_needed(0.01, 0.9) == 5, "below five examples nothing is claimed at all"


def test_every_means_that_one_cell_against_is_too_many() -> None:
    found = judge_print(claim("every", 1.0, 2.0, -0.5, 0.0, -3.0))
    assert (found.verdict, found.supports, found.ties, found.against) == ("fails", 2, 1, ("cell 4: -3", "cell 2: -0.5"))
    assert found.mean == pytest.approx(-0.1)
    assert judge_print(claim("every", 1.0, 2.0, 0.0)).verdict == "holds"
    assert judge_print(claim("every", 0.0)).verdict == "cannot be told"


def test_most_means_more_than_half_of_the_cells_and_more_than_chance_would_give() -> None:
    """Two-sided sign test: 6 of 6 cells on one side have p = 2 / 64, 5 of 5 p = 2 / 32; 9 of 16 p = 0.80."""
    assert judge_print(claim("most", *[1.0] * 6)).verdict == "holds"
    assert judge_print(claim("most", *[1.0] * 5)).verdict == "cannot be told"
    assert judge_print(claim("most", *[1.0] * 9, *[-1.0] * 7)).verdict == "cannot be told"
    assert judge_print(claim("most", *[-1.0] * 6)).verdict == "fails"
    assert judge_print(claim("most", *[1.0] * 6, *[0.0] * 6)).verdict == "fails", "a tie is no support"


def test_a_mean_is_told_by_its_interval_and_not_of_fewer_than_five_cells() -> None:
    assert judge_print(claim("average", 1.0, 1.2, 0.9, 1.1, 0.8)).verdict == "holds"
    assert judge_print(claim("average", -1.0, -1.2, -0.9, -1.1, -0.8)).verdict == "fails"
    assert judge_print(claim("average", 1.0, 1.2, 0.9, 1.1)).verdict == "cannot be told"
    wide = judge_print(claim("average", 2.0, -1.0, 1.0, -1.5, 1.0))
    # mean .3; squares 4 + 1 + 1 + 2.25 + 1 = 9.25, less 5 * .09: variance 8.8 / 4
    assert wide.verdict == "cannot be told"
    assert wide.needed == pytest.approx(7.8489 * (8.8 / 4) / 0.09, abs=1)
