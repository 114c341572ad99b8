"""Tables of finished runs: `python -m kvbench.results collect FOLDER`.

`python -m kvbench.results check FOLDER` checks that the numbers of runs agree with their samples.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from kvbench.errors import UsageError
from kvbench.report.formats import FORMATS, write
from kvbench.report.table import chosen, pivot, results_table, text
from kvbench.results.columns import COLUMNS, frame
from kvbench.results.files import atomic_write
from kvbench.results.result import load_results
from kvbench.tasks.trust import trust
from kvbench.terminal.command import Parser, add_trust, command, terminal_width
from kvbench.terminal.outputs import check_output

TIDY = (".csv", ".parquet")
_COLLECT = """Writes one table of all runs below a folder. .csv and .parquet files are tidy: one row per run, all
columns. The other formats are for people: they have the columns that differ between rows, and a title with the
values that all rows share. Without -o such a table is printed."""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of `python -m kvbench.results`; returns the exit code."""
    options = _parser().parse_args(arguments)
    trust(options.trust)
    logging.basicConfig(format="kvbench: %(message)s", stream=sys.stderr)
    sys.stdout.write(collect_table(options))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser("python -m kvbench.results", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")
    columns = "columns:\n" + "\n".join(f"  {column.name:20}  {column.meaning}" for column in COLUMNS)
    usage = "%(prog)s folder [-o OUTPUT] [--by KEY ...]\n  [--columns A,B,C | --pivot budget|task]"
    one_table = "write one table of all runs below a folder"
    collect = commands.add_parser("collect", help=one_table, usage=usage, description=_COLLECT, epilog=columns)
    collect.add_argument("folder", type=Path, help="folder of runs, such as results/runs")
    collect.add_argument("-o", "--output", type=Path, help=f"file to write: {', '.join((*TIDY, *FORMATS))}")
    rows = "add one row for each value of a metadata key of the examples: task, length, depth, ..."
    collect.add_argument("--by", nargs="+", default=[], metavar="KEY", help=rows)
    kinds = collect.add_mutually_exclusive_group()
    kinds.add_argument("--columns", type=_names, default=[], metavar="A,B,C", help="select columns, in this order")
    across = "one row per policy, one column per budget (scores with intervals) or per task (scores x 100, average)"
    kinds.add_argument("--pivot", choices=["budget", "task"], help=across)
    add_trust(collect)
    return parser


def _names(words: str) -> list[str]:
    names = [name.strip() for name in words.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"{words!r} has no column name")
    return names


def collect_table(options: argparse.Namespace) -> str:
    """Write the table and return a message, or return the table if there is no output file. Raises UsageError."""
    output, tidy = options.output, options.output is not None and options.output.suffix in TIDY
    if output is not None:
        check_output(output, (*TIDY, *FORMATS))
    if options.pivot and tidy:
        raise UsageError(f"--pivot {options.pivot} is for {', '.join(FORMATS)}; {output.suffix} has one row per run")
    rows = load_results(options.folder).by(options.by)
    known = dict.fromkeys([*(column.name for column in COLUMNS), *(key for row in rows for key in row.differs)])
    for name in options.columns:
        if name not in known:
            raise UsageError(f"--columns {name} is not a column (allowed: {', '.join(known)})")
    if tidy:
        table = frame(rows, options.columns)
        try:
            with atomic_write(output) as temporary:
                (table.to_csv if output.suffix == ".csv" else table.to_parquet)(temporary, index=False)
        except OSError as error:
            raise UsageError(f"-o {output} cannot be written ({error.strerror or error})") from error
    else:
        wide = chosen(rows, options.columns) if options.columns else results_table(rows)
        shown = pivot(rows, options.pivot) if options.pivot else wide
        if output is None:
            return text(shown, terminal_width())
        write(shown, output)
    return f"{len(rows)} rows -> {output}\n"
