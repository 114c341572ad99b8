"""`python -m kvbench.tables`: published tables in their papers' layout, and our runs beside them."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from kvbench.papers import arrangement, published
from kvbench.papers.choice import read_choice
from kvbench.papers.layout import lay_out
from kvbench.report import render
from kvbench.report.grid import Block, Cell, Grid, Row
from kvbench.report.plain_text import text
from kvbench.terminal.command import Parser, command
from kvbench.terminal.console import log_to_stderr, quiet, share_cores
from kvbench.terminal.errors import UsageError
from kvbench.terminal.folding import terminal_width
from kvbench.terminal.outputs import check_output

LENGTH, LONGEST = 8192, 10**9
PICTURES = (".svg", ".png", ".pdf")
_SELECTION = """key=value says what of the table, and how:
  models= methods= budgets= tasks=
                 some of it, by the names it has or those of kvbench, with commas between them
  scale=pocket   on the shipped pocket model, with shorter prompts and budgets, offline
  limit=20       examples of each run
  out= device= dtype= seed= hydra/launcher=
                 as for python -m kvbench (hydra/launcher=slurm with its fields)"""
LISTED = ("grid", "numbers", "runnable", "what")
GRID = ("model", "method", "budget", "task")


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 2 for what cannot be done, said in one sentence, 1 where runs failed."""
    asked = _asked(arguments)
    log_to_stderr()
    code = 0
    if asked.command == "bytes" and asked.output is not None and asked.output.suffix in PICTURES:
        return _picture(asked)
    if asked.output is not None:
        check_output(asked.output, tuple(render.FORMATS))  # before anything runs
    if asked.command == "run":
        found = _run(asked, sys.argv[1:] if arguments is None else arguments)
        if found is None:
            return 0
        code = found
    grid = _grid(asked)
    if asked.output is not None:
        render.write(grid, asked.output)
    if asked.output is None:
        sys.stdout.write(text(grid, terminal_width()))
    else:
        print(f"{grid.name}: {asked.output}")  # noqa: T201
    return code


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What the command line says, `key=value` before or behind the flags. Raises UsageError."""
    parser = _parser()
    asked, rest = parser.parse_known_args(arguments)
    if rest and not (hasattr(asked, "choice") and all("=" in word and word[0] != "-" for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        asked.choice = [*asked.choice, *rest]
    return asked


def _parser() -> argparse.ArgumentParser:
    parser = Parser("python -m kvbench.tables", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    listing = commands.add_parser(
        "list", help="all tables: what they are about, how large, and what of them can be run"
    )
    listing.add_argument("paper", nargs="?", help="one paper only: cake, caote, d2o, kvec, ott")
    show = commands.add_parser("show", help="a published table in its paper's layout")
    run = commands.add_parser("run", help="run what is missing of a table, then print it", description=_SELECTION)
    beside = commands.add_parser(
        "compare", help="our runs beside a published table, and the commands that are missing", description=_SELECTION
    )
    beside.add_argument(
        "--runs", type=Path, help="folder of finished runs, such as results/runs; without: all is missing"
    )
    beside.add_argument(
        "--bench", type=Path, help="for tables of seconds and memory: folder of kvbench.bench's results"
    )
    held = commands.add_parser("bytes", help="bytes that a table's methods hold at its budgets, predicted")
    held.add_argument("--length", type=int, default=LENGTH, help=f"tokens of the prompt (default: {LENGTH})")
    for one in (show, run, beside):
        one.add_argument("table", help="such as caote/table2")
    held.add_argument("table", help="such as caote/table2; a paper, such as caote, for its picture (-o FILE.svg)")
    for one in (run, beside):
        one.add_argument("choice", nargs="*", metavar="key=value", help="what of it, and how; see above")
    for one in (listing, show, run, beside, held):
        pictures = f"; a picture: {', '.join(PICTURES)}" if one is held else ""
        what = f"file to write: {', '.join(render.FORMATS)}{pictures}"
        one.add_argument("-o", "--output", type=Path, help=what)
    return parser


def _run(asked: argparse.Namespace, arguments: Sequence[str]) -> int | None:
    """Run what is asked of a table; its exit code, None where there will be nothing to print before jobs have ended."""
    choice = read_choice(asked.choice)
    arrangement.numbers(asked.table)  # an unknown table is refused before torch is imported
    share_cores()
    quiet()
    from kvbench.papers.running import OUT, run_table

    code = run_table(asked.table, choice)
    if code is None:
        beside = ["compare", asked.table, *(word for word in asked.choice if not word.startswith(("hydra", "out=")))]
        words = shlex.join(["python", "-m", "kvbench.tables", *beside, "--runs", choice.run.get("out", OUT)])
        print(f"{words}  # when they are done")  # noqa: T201
    return code


def _picture(asked: argparse.Namespace) -> int:
    """Draw what the methods of a table, or of all tables of a paper, are predicted to hold."""
    paper = asked.table in published.papers()
    tables = arrangement.tables(asked.table) if paper else (asked.table,)
    check_output(asked.output, PICTURES)
    from kvbench.papers.picture import draw  # imports matplotlib

    what = arrangement.label_of(asked.table) if paper else asked.table
    draw(what, tables, _length(asked), asked.output)
    print(f"{what}: {asked.output}")  # noqa: T201
    return 0


def _length(asked: argparse.Namespace) -> int:
    if not 1 <= asked.length <= LONGEST:
        raise UsageError(f"--length {asked.length} must be a whole number from 1 to {LONGEST}")
    return int(asked.length)


def _grid(asked: argparse.Namespace) -> Grid:
    if asked.command == "list":
        return listing(asked.paper)
    if asked.command == "show":
        return lay_out(asked.table)
    arrangement.numbers(asked.table)  # an unknown table is refused before runs are read
    if asked.command == "bytes":
        from kvbench.papers.held import predicted

        return predicted(asked.table, _length(asked))
    if asked.command == "compare" and asked.bench is not None:
        if asked.choice or asked.runs is not None:
            raise UsageError("--bench compares a whole table of seconds or bytes: --runs and key=value have no effect")
        from kvbench.papers.efficiency import beside, read_figures

        return beside(asked.table, read_figures(asked.bench))
    choice = read_choice(asked.choice)
    from kvbench.analysis.load import load_results
    from kvbench.papers.running import finished, table  # imports torch, which `show` need not wait for

    if asked.command == "run":
        return table(asked.table, choice, finished(choice))
    return table(asked.table, choice, [] if asked.runs is None else load_results(asked.runs))


def listing(paper: str | None = None) -> Grid:
    """All printed tables, or one paper's, and how many of their numbers can be run, with the reason why some cannot."""
    from kvbench.papers.protocol import refused

    letters: dict[str, str] = {}
    blocks = []
    for one in published.papers() if paper is None else (paper,):
        rows = []
        for name in arrangement.tables(one):
            numbers = arrangement.numbers(name)
            reasons = refused(numbers)
            notes = tuple(letters.setdefault(reason, str(len(letters) + 1)) for reason in reasons)
            sizes = (len({getattr(number, field) for number in numbers} - {"", None}) for field in GRID)
            able = len(numbers) - sum(map(len, reasons.values()))
            grid, count = Cell(" x ".join(map(str, sizes))), Cell(str(len(numbers)))
            title = Cell(arrangement.arrangement(name).title)
            rows.append(Row(name, (grid, count, Cell(str(able), notes=notes), title)))
        blocks.append(Block("", tuple(rows)))
    return Grid(
        name="published tables",
        title=f"{sum(len(block.rows) for block in blocks)} tables",
        corner="table",
        header=tuple((words,) for words in LISTED),
        blocks=tuple(blocks),
        left=(LISTED.index("what"),),
        notes=(
            ("", "grid: models x methods x budgets x tasks. runnable: numbers that a run of ours can be about."),
            *((number, f"Cannot be run: {reason}.") for reason, number in letters.items()),
        ),
    )
