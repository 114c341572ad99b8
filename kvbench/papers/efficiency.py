"""Efficiency tables beside what `python -m kvbench.bench` measured: its CSVs have the columns of the papers' tables."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from kvbench.papers import arrangement
from kvbench.papers.footnotes import letter
from kvbench.papers.layout import Layout, budget_text, label
from kvbench.papers.published import BASELINE, COLUMNS, Number
from kvbench.report.grid import Block, Cell, Grid, Row
from kvbench.terminal.errors import UsageError

HEADER = ("published", "ours", "published / full", "ours / full")
KEY = COLUMNS[:8]  # paper, table, model, method, budget, budget_kind, task, metric
ABOUT = ("hardware", "dtype", "torch", "scale")
Place = tuple[str, ...]


@dataclass(frozen=True)
class Figure:
    """Our measurement of a number (None: it did not fit into memory), and its conditions."""

    value: float | None
    note: str
    about: Mapping[str, str]


def read_figures(folder: Path) -> dict[Place, Figure]:
    """Every figure of the CSVs in a folder, by the columns that say what it is about. UsageError without any."""
    if not folder.is_dir():
        raise UsageError(f"--bench {folder} is not a folder")
    found: dict[Place, Figure] = {}
    for path in sorted(folder.glob("*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            if set(COLUMNS) <= set(rows.fieldnames or ()):
                for row in rows:
                    about = {name: row[name] for name in ABOUT if row.get(name)}
                    value = float(row["value"]) if row["value"] else None
                    found[_place(row, row["budget"])] = Figure(value, row["note"], about)
    if not found:
        raise UsageError(f"--bench {folder} holds no table that `python -m kvbench.bench` wrote")
    return found


def _place(row: Mapping[str, object], budget: float | str | None) -> Place:
    """The key of a figure; its budget as a number is written."""
    return *(str(row[name]) for name in KEY if name != "budget"), f"{float(budget):g}" if budget else ""


def beside(name: str, figures: Mapping[Place, Figure]) -> Grid:
    """A published table and ours of it, and both as multiples of the full cache, which compare across hardware.

    Raises UsageError where nothing of the table was measured.
    """
    layout = Layout(arrangement.arrangement(name), arrangement.numbers(name))
    found = {number: figures.get(_place(vars(number), number.budget)) for number in layout.numbers}
    if not any(found.values()):
        raise UsageError(
            f"--bench has nothing of {name}: `python -m kvbench.bench` lists the protocols that measure it"
        )
    notes: dict[str, str] = {}
    blocks = []
    for (model, task), members in groupby(layout.numbers, key=lambda n: (n.model, n.task)):
        rows = [_row(layout, number, found, notes) for number in members]
        blocks.append(Block(", ".join(filter(None, (model, label(layout.plan, "task", task)))), tuple(rows)))
    abouts = dict.fromkeys(_said(one.about) for one in found.values() if one is not None)
    return Grid(
        name=name,
        title=f"{layout.plan.title}, ours beside the print",
        corner="method, metric",
        header=tuple((words,) for words in HEADER),
        blocks=tuple(blocks),
        notes=(
            ("", f"Published: on the paper's hardware. Ours: {'; '.join(abouts)}. Compare multiples before seconds."),
            *((mark, said) for said, mark in notes.items()),
        ),
    )


def _said(about: Mapping[str, str]) -> str:
    return ", ".join(value if name == "hardware" else f"{name} {value}" for name, value in about.items())


def _row(layout: Layout, number: Number, found: Mapping[Number, Figure | None], notes: dict[str, str]) -> Row:
    own = found[number]
    full = next((n for n in found if n.method == BASELINE and _alike(n) == _alike(number)), None)
    theirs = None if full is None else number.value / full.value
    measured = None if full is None else found[full]
    words = [
        label(layout.plan, "method", number.method),
        budget_text(number),
        label(layout.plan, "metric", number.metric),
    ]
    value = None if own is None else own.value
    multiple = value / measured.value if value is not None and measured is not None and measured.value else None
    said = "did not fit into memory" if own is not None and value is None else own.note if own is not None else ""
    marks = (notes.setdefault(said, letter(len(notes))),) if said else ()
    cells = (Cell(number.printed), _cell(value, marks), _cell(theirs), _cell(multiple))
    return Row(", ".join(filter(None, words)), cells)


def _alike(number: Number) -> tuple[str, str, str]:
    return number.model, number.task, number.metric


def _cell(value: float | None, notes: Sequence[str] = ()) -> Cell:
    return Cell("", notes=tuple(notes), hole=True) if value is None else Cell(f"{value:.3g}", notes=tuple(notes))
