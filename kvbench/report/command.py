"""`kvbench results collect FOLDER`: tables of finished runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from kvbench.errors import UsageError, counted, instead
from kvbench.report.changes import changes_table
from kvbench.report.curves import at_size_table, smallest_table
from kvbench.report.divergence import divergence_table
from kvbench.report.evidence import evidence_table, has_evidence
from kvbench.report.formats import FORMATS, renamed, show
from kvbench.report.price import price_table
from kvbench.report.selection import selected, selection_options
from kvbench.report.table import chosen, results_table
from kvbench.report.table import pivot as pivoted
from kvbench.report.text_table import TextTable
from kvbench.results.columns import COLUMNS, frame
from kvbench.results.files import atomic_write
from kvbench.results.loading import load_results
from kvbench.results.result import Result
from kvbench.tasks.trust import trust_option
from kvbench.terminal.command import PATH, Command, log_to_stderr
from kvbench.terminal.escapes import visible
from kvbench.terminal.outputs import check_output, writing

TIDY = (".csv", ".parquet")
_COLLECT = """Writes one table of all runs below a folder. .csv and .parquet files are tidy: one row per run, all
columns. The other formats are for people: they have the columns that differ between rows, and a title with the
values that all rows share. Without -o such a table is printed."""


_MISSING = {
    "score": "",
    "kl": " (task.divergence=true)",
    "evidence": " (tasks with needles, RULER's niah, vt and qa, SCBench's kv and files with a column evidence do)",
}
"""The measures of --metric, and how a run gets one."""
_COLUMNS = "\n".join(f"  {column.name:20}  {column.meaning}" for column in COLUMNS)


@click.command("collect", cls=Command, help=f"{_COLLECT}\n\n\b\nColumns:\n{_COLUMNS}")
@click.argument("folder", type=PATH)
@click.option("-o", "--output", type=PATH, help=f"File to write: {', '.join((*TIDY, *FORMATS))}.")
@click.option(
    "--by", multiple=True, metavar="KEY", help="Add a row for each value of metadata: task, length, depth ..."
)
@click.option("--columns", metavar="A,B,C", help="Select columns, in this order.")
@click.option("--rename", multiple=True, metavar="OLD=NEW", help='Rename columns or policies: snapkv="SnapKV (ours)".')
@click.option("--precision", type=click.IntRange(0), metavar="DIGITS", help="Digits behind the point, at most.")
@click.option("--changes", is_flag=True, help="What each policy changes against full: answers, length, KV footprint.")
@click.option("--price", is_flag=True, help="Price of an engine's constraint: whole pages and shared token sets.")
@click.option("--at-size", is_flag=True, help="Policies without a budget against budgets, at the same mean size.")
@click.option("--smallest", is_flag=True, help="Smallest KV footprint with 90% of full's score, between budgets.")
@click.option(
    "--metric",
    type=click.Choice(list(_MISSING)),
    help="Only runs with a score, the divergence from full (task.divergence=true), or known evidence.",
)
@click.option(
    "--pivot",
    type=click.Choice(["budget", "task"]),
    help="A row per policy, a column per budget (scores with intervals) or per task (scores x 100, average).",
)
@selection_options(joined=False)
@trust_option
def collect(
    folder: Path,
    output: Path | None,
    by: Sequence[str],
    columns: str | None,
    rename: Sequence[str],
    precision: int | None,
    policy: Sequence[str],
    task: Sequence[str],
    model: Sequence[str],
    budget: Sequence[str],
    over_seeds: bool,
    metric: str | None,
    **kinds: Any,  # noqa: ANN401 - the kinds of tables
) -> None:
    """Write or print the table. Raises UsageError."""
    log_to_stderr()
    found = {"columns": columns is not None, **kinds}
    given = [
        f"--{name.replace('_', '-')}" + f" {value}" * isinstance(value, str) for name, value in found.items() if value
    ]
    if len(given) > 1:
        raise click.UsageError(f"{given[1]} is not allowed with {given[0]}")
    names = [name.strip() for name in (columns or "").split(",") if name.strip()]
    if columns is not None and not names:
        raise click.UsageError(f"--columns {columns!r} has no column name")
    tidy = output is not None and output.suffix in TIDY
    if output is not None:
        check_output(output, (*TIDY, *FORMATS))
        if any(kinds.values()) and tidy:
            raise UsageError(f"{given[0]} is for {', '.join(FORMATS)}; {output.suffix} has one row per run")
    others = dict(word.partition("=")[::2] for word in rename)
    if wrong := next((old for old, new in others.items() if not (old and new)), None):
        raise UsageError(f"--rename {wrong} must be OLD=NEW")
    wanted = {"policy": policy, "task": task, "model": model, "budget": budget, "over_seeds": over_seeds}
    rows = selected(load_results(folder), wanted).by(by)
    if metric is not None:
        rows = [row for row in rows if (has_evidence(row) if metric == "evidence" else row.measure.lower() == metric)]
        if not rows:
            raise UsageError(f"--metric {metric}: no run of {folder} has it{_MISSING[metric]}")
    known = dict.fromkeys([*(column.name for column in COLUMNS), *(key for row in rows for key in row.differs)])
    for name in names:
        if name not in known:
            raise UsageError(f"--columns {name} is not a column{instead(name, list(known))}")
    if output is not None and tidy:
        _write_tidy(rows, names, output)
        sys.stdout.write(f"{counted(len(rows), 'row')} -> {output}\n")
    else:
        special = None if given else {"kl": divergence_table, "evidence": evidence_table}.get(metric or "")
        table = _table(rows, names, **kinds) if special is None else special(rows)
        show(renamed(table, others, precision), output, counted(len(rows), "row"))


_KINDS: dict[str, Callable[[Sequence[Result]], TextTable]] = {
    "price": price_table,
    "changes": changes_table,
    "at_size": at_size_table,
    "smallest": smallest_table,
}


def _write_tidy(rows: Sequence[Result], names: Sequence[str], output: Path) -> None:
    table = frame(rows, names)
    if output.suffix == ".csv":
        table = table.astype(object).map(_inert).rename(columns=_inert)
    with writing(output), atomic_write(output) as temporary:
        (table.to_csv if output.suffix == ".csv" else table.to_parquet)(temporary, index=False)


def _inert(cell: Any) -> Any:  # noqa: ANN401 - of a table
    """A text that a spreadsheet would execute, with an apostrophe before it: all that begin like a formula but numbers.

    Spreadsheets also ignore white space and read the wide signs of Chinese and Japanese text.
    """
    if not isinstance(cell, str):
        return cell
    cell = visible(cell, "\n\t")
    begins = re.match(r"\s*[=+\-@|%＝＋－＠]|[\t\n]", cell)
    return f"'{cell}" if begins and not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", cell, re.I) else cell


def _table(rows: Sequence[Result], names: Sequence[str], pivot: str | None, **kinds: bool) -> TextTable:
    """The table for people that the options select."""
    if pivot:
        return pivoted(rows, pivot)
    for kind, make in _KINDS.items():
        if kinds[kind]:
            return make(rows)
    return chosen(rows, names) if names else results_table(rows)
