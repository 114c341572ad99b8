"""`python -m kvbench.tables`: published tables in their papers' layout, and our runs beside them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvbench.papers import arrangement, published, render
from kvbench.papers.grid import Block, Cell, Grid, Row
from kvbench.papers.layout import grid_size, lay_out
from kvbench.terminal.errors import UsageError

LENGTH = 8192
LISTED = ("models", "methods", "budgets", "tasks", "numbers", "can be run", "what")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 2 for what cannot be done, said in one sentence."""
    asked = _parser().parse_args(arguments)
    try:
        grid = _grid(asked)
        if asked.output is not None:
            render.write(grid, asked.output)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    if asked.output is None:
        sys.stdout.write(render.text(grid))
    else:
        print(f"{grid.name}: {asked.output}")  # noqa: T201
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvbench.tables", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    listing = commands.add_parser(
        "list", help="all tables: what they are about, how large, and what of them can be run"
    )
    listing.add_argument("paper", nargs="?", help="one paper only: cake, caote, d2o, kvec, ott")
    show = commands.add_parser("show", help="a published table in its paper's layout")
    beside = commands.add_parser("compare", help="our runs beside a published table, and the commands that are missing")
    beside.add_argument(
        "--runs", type=Path, help="folder of finished runs, such as results/runs; without: all is missing"
    )
    held = commands.add_parser("bytes", help="bytes that a table's methods hold at its budgets, predicted")
    held.add_argument("--length", type=int, default=LENGTH, help=f"tokens of the prompt (default: {LENGTH})")
    run = commands.add_parser("run", help="run what is missing (not yet: says so)")
    for one in (show, beside, held, run):
        one.add_argument("table", help="such as caote/table2")
    for one in (listing, show, beside, held, run):
        what = f"file to write: {', '.join(render.FORMATS)}"
        one.add_argument("-o", "--output", type=Path, help=what)
    return parser


def _grid(asked: argparse.Namespace) -> Grid:
    if asked.command == "list":
        return listing(asked.paper)
    if asked.command == "show":
        return lay_out(asked.table)
    arrangement.numbers(asked.table)  # an unknown table is refused before runs are read
    if asked.command == "run":
        raise UsageError(
            f"run waits for the engine that plans many runs at once; `compare {asked.table}` prints the commands"
        )
    if asked.command == "bytes":
        from kvbench.papers.held import predicted

        if asked.length < 1:
            raise UsageError(f"--length {asked.length} must be a whole number of at least 1")
        return predicted(asked.table, asked.length)
    from kvbench.papers.compare import compare  # imports torch, which `show` need not wait for
    from kvbench.report.records import find_runs

    return compare(asked.table, [] if asked.runs is None else find_runs(asked.runs))


def listing(paper: str | None = None) -> Grid:
    """All printed tables, or one paper's, and how many of their numbers can be run, with the reason why some cannot."""
    from kvbench.papers.protocol import runnable

    letters: dict[str, str] = {}
    blocks = []
    for one in published.papers() if paper is None else (paper,):
        rows = []
        for name in arrangement.tables(one):
            able, reasons = runnable(name)
            notes = tuple(letters.setdefault(reason, str(len(letters) + 1)) for reason in reasons)
            size = grid_size(name)
            cells = [Cell(str(size[key])) for key in ("model", "method", "budget", "task", "numbers")]
            rows.append(Row(name, (*cells, Cell(str(able), notes=notes), Cell(arrangement.arrangement(name).title))))
        blocks.append(Block("", tuple(rows)))
    return Grid(
        name="published tables",
        title=f"{sum(len(block.rows) for block in blocks)} tables",
        corner="table",
        header=tuple((words,) for words in LISTED),
        blocks=tuple(blocks),
        left=(LISTED.index("what"),),
        notes=tuple((number, f"Cannot be run: {reason}.") for reason, number in letters.items()),
    )
