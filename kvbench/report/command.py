"""Finished runs: a table of them, or a figure of their NLL curves."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.analysis.columns import COLUMNS, frame
from kvbench.analysis.load import load_results
from kvbench.analysis.result import Result
from kvbench.records.files import atomic_write
from kvbench.report.frames import FORMATS, Table, text, write
from kvbench.report.table import chosen, pivot, results_table
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
    asked = _parser().parse_args(arguments)
    logging.basicConfig(format="kvbench: %(message)s", stream=sys.stderr)
    sys.stdout.write({"collect": collect_table, "curve": draw_curves}[asked.command](asked))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser("python -m kvbench.results", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")
    _add_collect(commands)
    curve = commands.add_parser(
        "curve", help="draw NLL against context length of the runs below a folder that scored given texts"
    )
    curve.add_argument("folder", type=Path, help="where the runs are, such as results/runs")
    curve.add_argument("-o", "--output", type=Path, required=True, help="picture to write: .svg, .png, .pdf")
    return parser


def _add_collect(commands: Any) -> None:  # noqa: ANN401 - argparse's class of it has no public name
    collecting = commands.add_parser(
        "collect",
        help="one table of all runs below a folder: tidy, or for people",
        usage="%(prog)s folder [-o OUTPUT] [--by KEY ...]\n  [--columns A,B,C | --wide | --pivot budget|task]",
        description="One table of all runs below a folder. .csv and .parquet are tidy: a row for each run, every "
        "column. The others are for people: columns that differ between rows, and what is the same for all in the "
        "title. Without -o such a table is printed.",
        epilog="columns:\n" + "\n".join(f"  {column.name:20}  {column.meaning}" for column in COLUMNS),
    )
    collecting.add_argument("folder", type=Path, help="where the runs are, such as results/runs")
    collecting.add_argument("-o", "--output", type=Path, help=f"file to write: {', '.join((*TIDY, *FORMATS))}")
    collecting.add_argument(
        "--by",
        nargs="+",
        default=[],
        metavar="KEY",
        help="add rows for each value of a key of the examples' metadata: task, length, depth, ...",
    )
    kinds = collecting.add_mutually_exclusive_group()
    kinds.add_argument("--columns", type=_names, default=[], metavar="A,B,C", help="these columns, in this order")
    kinds.add_argument("--wide", action="store_true", help="every column that has a value, except those of JSON")
    kinds.add_argument(
        "--pivot",
        choices=["budget", "task"],
        help="policies down; budgets across (scores with intervals) or tasks across (scores x 100, and their average)",
    )


def _names(words: str) -> list[str]:
    names = [name.strip() for name in words.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"{words!r} names no column")
    return names


def collect_table(asked: argparse.Namespace) -> str:
    """Write the table that was asked for, or return it if no file was named. Raises UsageError."""
    output = asked.output
    if output is not None:
        check_output(output, (*TIDY, *FORMATS))
        if asked.pivot and output.suffix in TIDY:
            raise UsageError(f"--pivot {asked.pivot} is for {', '.join(FORMATS)}; {output.suffix} has one row per run")
    rows = load_results(asked.folder).by(asked.by)
    known = dict.fromkeys([*(column.name for column in COLUMNS), *(key for row in rows for key in row.differs)])
    for name in asked.columns:
        if name not in known:
            raise UsageError(f"--columns {name} is no column (there are: {', '.join(known)})")
    if output is not None and output.suffix in TIDY:
        _write_tidy(frame(rows, asked.columns), output)
    else:
        table = _for_people(rows, asked)
        if output is None:
            return text(table, terminal_width())
        write(table, output)
    return f"{len(rows)} rows -> {output}\n"


def _for_people(rows: Sequence[Result], asked: argparse.Namespace) -> Table:
    if asked.pivot:
        return pivot(rows, asked.pivot)
    return chosen(rows, asked.columns) if asked.columns or asked.wide else results_table(rows)


def _write_tidy(table: pd.DataFrame, output: Path) -> None:
    try:
        with atomic_write(output) as beside:
            if output.suffix == ".csv":
                table.to_csv(beside, index=False)
            else:
                table.to_parquet(beside, index=False)
    except OSError as error:
        raise UsageError(f"-o {output} cannot be written ({error.strerror or error})") from error


def draw_curves(asked: argparse.Namespace) -> str:
    """Draw the NLL curves of all runs below `asked.folder`. Raises UsageError."""
    from kvbench.report.figures import pictures  # here: matplotlib is a second, which only figures have to wait for

    check_output(asked.output, (".svg", ".png", ".pdf"))
    (path,) = pictures.draw("nll", load_results(asked.folder), asked.output)
    return f"{path}\n"
