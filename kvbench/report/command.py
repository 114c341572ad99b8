"""`kvbench results collect FOLDER`: tables of finished runs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from kvbench.errors import UsageError
from kvbench.report.formats import FORMATS, write
from kvbench.report.table import chosen, pivot, results_table, text
from kvbench.results.columns import COLUMNS, frame
from kvbench.results.files import atomic_write
from kvbench.results.result import load_results
from kvbench.terminal.command import PATH, Command, terminal_width
from kvbench.terminal.outputs import check_output

TIDY = (".csv", ".parquet")
_COLLECT = """Writes one table of all runs below a folder. .csv and .parquet files are tidy: one row per run, all
columns. The other formats are for people: they have the columns that differ between rows, and a title with the
values that all rows share. Without -o such a table is printed."""


_COLUMNS = "\n".join(f"  {column.name:20}  {column.meaning}" for column in COLUMNS)


@click.command("collect", cls=Command, help=f"{_COLLECT}\n\n\b\nColumns:\n{_COLUMNS}")
@click.argument("folder", type=PATH)
@click.option("-o", "--output", type=PATH, help=f"File to write: {', '.join((*TIDY, *FORMATS))}.")
@click.option(
    "--by", multiple=True, metavar="KEY", help="Add a row for each value of metadata: task, length, depth ..."
)
@click.option("--columns", metavar="A,B,C", help="Select columns, in this order.")
@click.option(
    "--pivot",
    type=click.Choice(["budget", "task"]),
    help="A row per policy, a column per budget (scores with intervals) or per task (scores x 100, average).",
)
def collect(folder: Path, output: Path | None, by: Sequence[str], columns: str | None, pivot: str | None) -> None:
    """Write or print the table. Raises UsageError."""
    logging.basicConfig(format="kvbench: %(message)s", stream=sys.stderr)
    if columns is not None and pivot is not None:
        raise click.UsageError("--pivot is not allowed with --columns")
    chosen_columns = [name.strip() for name in (columns or "").split(",") if name.strip()]
    if columns is not None and not chosen_columns:
        raise click.UsageError(f"--columns {columns!r} has no column name")
    sys.stdout.write(collect_table(folder, output, by, chosen_columns, pivot))


def collect_table(
    folder: Path, output: Path | None, by: Sequence[str], columns: Sequence[str], across: str | None
) -> str:
    """Write the table and return a message, or return the table if there is no output file. Raises UsageError."""
    tidy = output is not None and output.suffix in TIDY
    if output is not None:
        check_output(output, (*TIDY, *FORMATS))
        if across and tidy:
            raise UsageError(f"--pivot {across} is for {', '.join(FORMATS)}; {output.suffix} has one row per run")
    rows = load_results(folder).by(by)
    known = dict.fromkeys([*(column.name for column in COLUMNS), *(key for row in rows for key in row.differs)])
    for name in columns:
        if name not in known:
            raise UsageError(f"--columns {name} is not a column (allowed: {', '.join(known)})")
    if output is not None and tidy:
        table = frame(rows, columns)
        try:
            with atomic_write(output) as temporary:
                (table.to_csv if output.suffix == ".csv" else table.to_parquet)(temporary, index=False)
        except OSError as error:
            raise UsageError(f"-o {output} cannot be written ({error.strerror or error})") from error
    else:
        wide = chosen(rows, columns) if columns else results_table(rows)
        shown = pivot(rows, across) if across else wide
        if output is None:
            return text(shown, terminal_width())
        write(shown, output)
    return f"{len(rows)} rows -> {output}\n"
