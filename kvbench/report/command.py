"""`python -m kvbench.results`: tables of finished runs, and figures of their NLL curves."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.report.frames import FORMATS, Table, text, write
from kvbench.report.table import chosen, pivot, results_table
from kvbench.results.columns import COLUMNS, frame
from kvbench.results.files import atomic_write
from kvbench.results.load import load_results
from kvbench.results.result import Result
from kvbench.terminal.command import Parser, command
from kvbench.terminal.errors import UsageError
from kvbench.terminal.folding import terminal_width
from kvbench.terminal.outputs import check_output

if TYPE_CHECKING:
    import pandas as pd

TIDY = (".csv", ".parquet")


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of `python -m kvbench.results`; returns the exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(format="kvbench: %(message)s", stream=sys.stderr)
    sys.stdout.write({"collect": collect_table, "curve": draw_curves}[options.command](options))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser("python -m kvbench.results", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")
    _add_collect(commands)
    curve = commands.add_parser("curve", help="draw NLL against context length, for runs that scored given texts")
    curve.add_argument("folder", type=Path, help="folder of runs, such as results/runs")
    curve.add_argument("-o", "--output", type=Path, required=True, help="file to write: .svg, .png, .pdf")
    return parser


def _add_collect(commands: Any) -> None:  # noqa: ANN401 - argparse's class of it has no public name
    collecting = commands.add_parser(
        "collect",
        help="write one table of all runs below a folder",
        usage="%(prog)s folder [-o OUTPUT] [--by KEY ...]\n  [--columns A,B,C | --wide | --pivot budget|task]",
        description="Writes one table of all runs below a folder. .csv and .parquet files are tidy: one row per run, "
        "all columns. The other formats are for people: they have the columns that differ between rows, and a title "
        "with the values that all rows share. Without -o such a table is printed.",
        epilog="columns:\n" + "\n".join(f"  {column.name:20}  {column.meaning}" for column in COLUMNS),
    )
    collecting.add_argument("folder", type=Path, help="folder of runs, such as results/runs")
    collecting.add_argument("-o", "--output", type=Path, help=f"file to write: {', '.join((*TIDY, *FORMATS))}")
    collecting.add_argument(
        "--by",
        nargs="+",
        default=[],
        metavar="KEY",
        help="add one row for each value of a metadata key of the examples: task, length, depth, ...",
    )
    kinds = collecting.add_mutually_exclusive_group()
    kinds.add_argument("--columns", type=_names, default=[], metavar="A,B,C", help="select columns, in this order")
    kinds.add_argument("--wide", action="store_true", help="all columns that have a value, except JSON columns")
    kinds.add_argument(
        "--pivot",
        choices=["budget", "task"],
        help="one row per policy, one column per budget (scores with intervals) or per task (scores x 100, average)",
    )


def _names(words: str) -> list[str]:
    names = [name.strip() for name in words.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"{words!r} has no column name")
    return names


def collect_table(options: argparse.Namespace) -> str:
    """Write the table and return a message, or return the table if there is no output file. Raises UsageError."""
    output = options.output
    if output is not None:
        check_output(output, (*TIDY, *FORMATS))
        if options.pivot and output.suffix in TIDY:
            raise UsageError(
                f"--pivot {options.pivot} is for {', '.join(FORMATS)}; {output.suffix} has one row per run"
            )
    rows = load_results(options.folder).by(options.by)
    known = dict.fromkeys([*(column.name for column in COLUMNS), *(key for row in rows for key in row.differs)])
    for name in options.columns:
        if name not in known:
            raise UsageError(f"--columns {name} is not a column (allowed: {', '.join(known)})")
    if output is not None and output.suffix in TIDY:
        _write_tidy(frame(rows, options.columns), output)
    else:
        table = _for_people(rows, options)
        if output is None:
            return text(table, terminal_width())
        write(table, output)
    return f"{len(rows)} rows -> {output}\n"


def _for_people(rows: Sequence[Result], options: argparse.Namespace) -> Table:
    if options.pivot:
        return pivot(rows, options.pivot)
    return chosen(rows, options.columns) if options.columns or options.wide else results_table(rows)


def _write_tidy(table: pd.DataFrame, output: Path) -> None:
    try:
        with atomic_write(output) as temporary:
            if output.suffix == ".csv":
                table.to_csv(temporary, index=False)
            else:
                table.to_parquet(temporary, index=False)
    except OSError as error:
        raise UsageError(f"-o {output} cannot be written ({error.strerror or error})") from error


def draw_curves(options: argparse.Namespace) -> str:
    """Draw the NLL curves of all runs below `options.folder`. Raises UsageError."""
    from kvbench.report.figures import pictures  # imported here: matplotlib takes a second

    check_output(options.output, (".svg", ".png", ".pdf"))
    (path,) = pictures.draw("nll", load_results(options.folder), options.output)
    return f"{path}\n"
