"""Finished runs as one table: tidy for programs (.csv, .parquet), short or by budget for people (.md, .tex, ...)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.report.columns import COLUMNS
from kvbench.report.grid import Block, Cell, Grid, Row
from kvbench.report.missing import missing_rows
from kvbench.report.pivot import by_budget
from kvbench.report.plain_text import text
from kvbench.report.records import RunRecord, find_runs, in_order, labelled, place, with_baselines
from kvbench.report.render import FORMATS as FOR_PEOPLE
from kvbench.report.render import page, save
from kvbench.report.table import results_grids
from kvbench.terminal.errors import UsageError
from kvbench.terminal.outputs import check_output

TIDY = (".csv", ".parquet")
FORMATS = (*TIDY, *(suffix for suffix in FOR_PEOPLE if suffix not in TIDY))
_TYPES = {"words": "string", "json": "string", "integer": "Int64", "number": "Float64"}


@dataclass(frozen=True)
class Choice:
    """What a table is to show. by: keys of the examples' metadata for whose values rows are added.

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
    runs, missing = gather(folder, choice.by)
    if output.suffix not in TIDY:
        save(written(grids(runs, missing, choice), output.suffix), output)
    else:
        _write_tidy(_rows(runs, missing), choice.columns or [column.name for column in COLUMNS], output)
    return len(runs) + len(missing)


def show(folder: Path, choice: Choice, width: int | None) -> str:
    """The table for people as text, its columns folded where it is wider than `width`. Raises UsageError."""
    _check(None, choice)
    return "\n".join(text(table, width) for table in grids(*gather(folder, choice.by), choice))


def gather(folder: Path, by: Sequence[str] = ()) -> tuple[list[RunRecord], list[dict[str, Any]]]:
    """Finished runs in their order, each followed by its parts, and the rows of cells that have none. UsageError."""
    runs = with_baselines(in_order(labelled(find_runs(folder))))
    keys = sorted({key for run in runs for sample in run.samples for key in sample.metadata})
    for key in by:
        if key not in keys:
            raise UsageError(f"--by {key} is in the metadata of no example (allowed: {', '.join(keys)})")
    records = [record for run in runs for record in (run, *(part for key in by for part in run.parts(key)))]
    missing = missing_rows(folder, {run.run_id for run in runs})
    return records, sorted(missing, key=lambda row: place(row, row["budget"], str(row["run_id"])))


def grids(runs: Sequence[RunRecord], missing: Sequence[Mapping[str, Any]], choice: Choice) -> list[Grid]:
    """The tables for people that were asked for."""
    if choice.pivot:
        return [by_budget(runs, missing)]
    if not choice.columns and not choice.wide:
        return results_grids(runs, missing)
    rows = _rows(runs, missing)
    said = [c.name for c in COLUMNS if c.kind != "json" and any(row[c.name] not in (None, "") for row in rows)]
    return [_raw(rows, list(choice.columns) or said)]


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


def _rows(runs: Sequence[RunRecord], missing: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the tidy table."""
    rows = [{column.name: column.value(run) for column in COLUMNS} for run in runs]
    return rows + [{column.name: row.get(column.name) for column in COLUMNS} for row in missing]


def _raw(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Grid:
    """Columns of the tidy table as they are, numbers to four digits."""
    first, *others = names
    words = [column.name for column in COLUMNS if column.kind in ("words", "json")]
    body = [Row(_cell(row[first]), tuple(Cell(_cell(row[name])) for name in others)) for row in rows]
    left = tuple(i for i, name in enumerate(others) if name in words)
    return Grid("", "", first, tuple((name,) for name in others), (Block("", tuple(body)),), left=left)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _write_tidy(rows: Sequence[Mapping[str, Any]], names: Sequence[str], output: Path) -> None:
    """All values of a column have one type (text, integers or floats), missing ones included."""
    import pandas as pd  # here, not above: `python -m kvbench` reads runs too and should start quickly

    types = {column.name: _TYPES[column.kind] for column in COLUMNS}
    frame = pd.DataFrame({name: pd.Series([row[name] for row in rows], dtype=types[name]) for name in names})
    try:
        if output.suffix == ".csv":
            frame.to_csv(output, index=False)
        else:
            frame.to_parquet(output, index=False)
    except OSError as error:
        raise UsageError(f"-o {output} cannot be written ({error.strerror or error})") from error
    except ImportError as error:
        raise UsageError(f"-o {output} needs a library: `pip install pyarrow`, or write .csv") from error
