"""Published tables in their papers' layout: rows typed here from the papers, marks found by hand."""

import csv
import math
import re
from pathlib import Path

import pytest

from kvbench.papers import published
from kvbench.papers.layout import HOLE, lay_out, layout, numbers, tables


def row(name: str, block: str, label: str) -> list[str]:
    """The cells of a row; block: the values of the first columns, joined as the papers write them."""
    table = lay_out(name)
    frame, width = table.frame, len(table.left)
    for _, cells in frame.iterrows():
        words = [*cells.iloc[: width - 1]]
        titles = [
            f"budget {w}" if c == "budget" and w[:1].isdigit() else w for c, w in zip(table.groups, words, strict=True)
        ]
        if ", ".join(filter(None, titles)) == block and cells.iloc[width - 1] == label:
            return [cell for cell in cells.iloc[width:] if cell]
    raise AssertionError(f"{name} has no row {label} in {block}")


TYPED = """\
caote/table2 | Llama-3.1-8B-Instruct, budget 2048 | H2O + CAOTE
    14.32 38.34 45.97 37.77 42.51 22.06 29.57 15.11 27.02 62.00 63.60 27.34 2.00 15.50 56.99 32.87 33.31
caote/table2 | Llama-3.2-3B-Instruct | Full
    23.76 40.23 50.09 50.69 42.29 26.84 33.09 24.30 25.21 72.50 90.11 42.58 3.00 96.50 56.22 56.52 45.87
caote/table5 | Llama-3.1-8B-Instruct | 4096
    0.330 0.538 0.568 0.286 0.298 0.292 0.360 0.392 0.420
caote/table6 |  | TREC
    46.50 53.00 56.00 59.00 65.5 72.00 62.00 64.00 71.50 64.00 63.00 71.50 64.00 65.50 71.50 67.50 67.50 71.50
cake/table1 | Llama-2-7B-Chat, budget 128 | CAKE
    15.15 16.38 32.17 25.25 31.09 7.00 19.47 21.07 20.36 48.50 80.66 37.77 4.42 9.00 51.48 48.90 29.29
cake/table10 | budget 512 | SnapKV
    91.21 90.49 90.85 4.95 33.32 19.14 43.88 45.20 44.54 55.44
cake/table13 | 31744+1024 | CAKE
    36.42 4.29 32.12 31.37
d2o/table2 | Falcon-7B | D2O
    0.94 4.27 6.50 1.72 2.16 0.79 3.01 3.22 4.75 5.32 8.36 2.47 2.05 0.85 11.25 7.32
d2o/table3 |  | Full
    97.88 94.46 97.88 94.46
d2o/table3 |  | CaM
    82.66 78.22 87.59 78.88
d2o/table12 |  | 1024+2048
    121.191 0.328 0.059 0.271
d2o/table17 | Llama-3-8B | D2O ↑
    3.07 1.96 1.13 2.15 1.96 2.41 1.96 2.49
kvec/table5 | budget 1024 | SnapKV
    23.88 38.59 46.43 55.12 42.3 27.57 27.09 23.1 24.56 53.45 84.87 39.82 2.11 84.5 10.43 8.67 37.03
kvec/table7 |  | K-VEC
    -1.1 -2.5 -4.5 -8.6
kvec/table9 |  | 2000
    2.84 3.04 5.33 5.48 7.86 7.89
ott/table1 |  | BBH (3-CoT)
    40.21 34.00 35.17 47.38 41.02 44.37 68.18 47.38 60.31 51.33 36.42 41.93
ott/table3 |  | 64
    74.00 76.88 73.69 76.42 73.24 75.36
ott/table14 | max_length = 128k | GEAR
    100 94 98 93 100 87 98.5 96.25 0.3 81.67 96.6 85.94
""".splitlines()
"""Rows re-typed from the papers' own text: table, block and label, then the digits as printed."""


@pytest.mark.parametrize(("place", "printed"), [*zip(TYPED[::2], TYPED[1::2], strict=True)])
def test_rows_stand_as_the_paper_prints_them(place: str, printed: str) -> None:
    assert [cell.rstrip("*+") for cell in row(*place.split(" | "))] == printed.split()


@pytest.mark.parametrize("name", tables())
def test_a_table_shows_each_number_once_and_lost_numbers_as_holes(name: str) -> None:
    table, own = lay_out(name), layout(name)
    cells = [str(cell) for cell in table.frame.iloc[:, len(table.left) :].to_numpy().ravel() if cell]
    twice = [n.printed for n in numbers(name) if own.repeat_full and n.method == "full"]  # beside both budgets
    printed = [*(n.printed for n in numbers(name)), *twice]
    assert sorted(cell.rstrip("*+") for cell in cells if cell != HOLE) == sorted(printed)
    assert (HOLE in cells) == bool(own.holes)
    assert any("is missing in the text of the paper" in note for note in table.notes) == bool(own.holes)


@pytest.mark.parametrize(
    "path", sorted(published.FOLDER.glob("*/*.csv")), ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_a_file_holds_what_its_columns_say_and_no_cell_twice(path: Path) -> None:
    with path.open(encoding="utf-8", newline="") as file:
        assert tuple(next(csv.reader(file))) == published.COLUMNS
        rows = list(csv.DictReader(file, published.COLUMNS))
    assert len({tuple(row[column] for column in published.COLUMNS[:8]) for row in rows}) == len(rows)
    for row in rows:
        assert (row["paper"], row["table"]) == (path.parent.name, path.stem)
        assert all(row[column] for column in ("method", "task", "metric"))
        assert math.isfinite(float(row["value"]))
        assert [*row] == [*published.COLUMNS], "no field too many"
        assert None not in row.values(), "no field too few"
        form = {"": "", "tokens_per_head": r"[1-9]\d*", "ratio": r"0\.\d*[1-9]\d*", "bits": r"[1-9]\d*(\.\d+)?"}
        assert re.fullmatch(form[row["budget_kind"]], row["budget"]), row
        assert row["method"] != "full" or not row["budget"], row
