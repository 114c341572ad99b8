"""Finished runs as one table: tidy for programs (.csv, .parquet), short or by budget for people (.md, .tex, ...)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.analysis.columns import COLUMNS, frame
from kvbench.analysis.load import load_results
from kvbench.analysis.result import Result
from kvbench.records.files import atomic_write
from kvbench.report.grid import Block, Cell, Grid, Row
from kvbench.report.pivot import by_budget
from kvbench.report.plain_text import text
from kvbench.report.render import FORMATS as FOR_PEOPLE
from kvbench.report.render import page, save
from kvbench.report.table import results_grids
from kvbench.terminal.errors import UsageError
from kvbench.terminal.outputs import check_output

if TYPE_CHECKING:
    import pandas as pd

TIDY = (".csv", ".parquet")
FORMATS = (*TIDY, *(suffix for suffix in FOR_PEOPLE if suffix not in TIDY))


@dataclass(frozen=True)
class Choice:
    """The choice of rows and columns. by: keys of the examples' metadata; each of their values adds a row.

    columns: names of the tidy table, in their order; wide: all of them that say something; pivot: "budget" for
    policies down and budgets across. At most one of the three is set; with none a table for people is short.
    """

    by: Sequence[str] = ()
    columns: Sequence[str] = ()
    wide: bool = False
    pivot: str | None = None


def collect(folder: Path, output: Path, choice: Choice | None = None) -> int:
    """Write a table of all finished runs below `folder`, one row a run, and return the number of rows.

    Cells of a sweep that have no finished run have a row too, with what became of them as their state. The suffix of
    `output` says the format. Raises UsageError for another suffix, for a column or key that does not exist, or where
    nothing was found.
    """
    choice = choice or Choice()
    _check(output, choice)
    rows = load_results(folder, unfinished=True).by(choice.by)
    if output.suffix not in TIDY:
        save(written(grids(rows, choice), output.suffix), output)
    else:
        _write_tidy(frame(rows, choice.columns), output)
    return len(rows)


def show(folder: Path, choice: Choice, width: int | None) -> str:
    """The table for people as text, its columns folded where it is wider than `width`. Raises UsageError."""
    _check(None, choice)
    rows = load_results(folder, unfinished=True).by(choice.by)
    return "\n".join(text(table, width) for table in grids(rows, choice))


def grids(rows: Sequence[Result], choice: Choice) -> list[Grid]:
    """The tables for people that were asked for."""
    if choice.pivot:
        return [by_budget(rows)]
    if not choice.columns and not choice.wide:
        return results_grids(rows)
    known = {column.name: column for column in COLUMNS if choice.columns or column.kind != "json"}
    values = {name: [column.value(row) for row in rows] for name, column in known.items()}
    said = choice.columns or [name for name, column in values.items() if any(x not in (None, "") for x in column)]
    first, *others = said
    body = [Row(_cell(values[first][i]), tuple(Cell(_cell(values[x][i])) for x in others)) for i in range(len(rows))]
    left = tuple(i for i, name in enumerate(others) if known[name].kind in ("words", "json"))
    return [Grid("", "", first, tuple((name,) for name in others), (Block("", tuple(body)),), left=left)]


def written(tables: Sequence[Grid], suffix: str) -> str:
    """Tables for people as one file's text."""
    return page(*tables) if suffix == ".html" else "\n".join(FOR_PEOPLE[suffix](table) for table in tables)


def _check(output: Path | None, choice: Choice) -> None:
    if output is not None:
        check_output(output, FORMATS)
    known = [column.name for column in COLUMNS]
    for name in choice.columns:
        if name not in known:
            raise UsageError(f"--columns {name} is no column (there are: {', '.join(known)})")
        if choice.columns.count(name) > 1:
            raise UsageError(f"--columns {','.join(choice.columns)} names {name} twice")
    if choice.pivot and output is not None and output.suffix in TIDY:
        people = ", ".join(suffix for suffix in FORMATS if suffix not in TIDY)
        raise UsageError(f"--pivot {choice.pivot} is for {people}; {output.suffix} has one row for each run")


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _write_tidy(table: pd.DataFrame, output: Path) -> None:
    try:
        with atomic_write(output) as beside:
            if output.suffix == ".csv":
                table.to_csv(beside, index=False)
            else:
                table.to_parquet(beside, index=False)
    except OSError as error:
        raise UsageError(f"-o {output} cannot be written ({error.strerror or error})") from error
    except ImportError as error:
        raise UsageError(f"-o {output} needs a library: `pip install pyarrow`, or write .csv") from error
