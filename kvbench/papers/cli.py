"""Published tables of five papers, compared with your runs."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from kvbench.errors import UsageError
from kvbench.papers import published
from kvbench.papers.layout import lay_out, layout, numbers, read_yaml, tables
from kvbench.report.formats import FORMATS, write
from kvbench.report.table import Table, text
from kvbench.terminal.command import Parser, command, log_to_stderr, pairs, terminal_width
from kvbench.terminal.outputs import check_output

OUT = "results/runs"
_OVERRIDES = """Overrides are those of python -m kvbench. A value that the table has selects runs; another
value replaces those of the table.

select some runs of a table:
  model=llama32_3b_instruct policy=snapkv,caote_snapkv limit=20
replace the model:
  model=smollm2 limit=10
offline, with shorter prompts and budgets (--small has such overrides for one table of each paper):
  model=pocket task=niah task.lengths=[2048] budget=512,1024 block=32"""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 2 for a wrong value, 1 if runs failed."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and not (hasattr(options, "overrides") and all("=" in word and word[0] != "-" for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # overrides after an option
        options.overrides = [*options.overrides, *rest]
    log_to_stderr()
    if options.output is not None:
        check_output(options.output, tuple(FORMATS))
    code = 0
    if options.command == "list":
        table = listing(options.paper)
    elif options.command == "show":
        table = lay_out(options.table)
    else:
        numbers(options.table)  # an unknown table is refused before torch is imported
        if options.small:
            options.overrides = [*small(options.table, options.overrides), *options.overrides]
        from kvbench.papers.compare import compare
        from kvbench.results.result import load_results

        folder = options.runs if options.command == "compare" else pairs(options.overrides, "limit=5").get("out", OUT)
        if options.command == "run":
            code = run(options.table, options.overrides)
        table = compare(options.table, [] if folder is None else load_results(Path(folder)), options.overrides)
    if options.output is None:
        sys.stdout.write(text(table, terminal_width()))
    else:
        write(table, options.output)
        sys.stdout.write(f"{options.output}\n")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser("python -m kvbench.tables", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    listed = commands.add_parser("list", help="list all tables: contents, size, and how many numbers can be measured")
    listed.add_argument("paper", nargs="?", help=f"one paper: {', '.join(published.papers())}")
    show = commands.add_parser("show", help="print a published table in the layout of its paper")
    start = commands.add_parser("run", help="compute the runs of a table, then compare", description=_OVERRIDES)
    compared = commands.add_parser("compare", help="compare your runs with a published table", description=_OVERRIDES)
    compared.add_argument("--runs", type=Path, help=f"folder of finished runs, such as {OUT}")
    for one in (show, start, compared):
        one.add_argument("table", help="name of a table, such as caote/table2")
    for one in (start, compared):
        one.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of python -m kvbench")
        one.add_argument("--small", action="store_true", help="use the overrides of results/paper/small.yaml (offline)")
    for one in (listed, show, start, compared):
        one.add_argument("-o", "--output", type=Path, help=f"file to write: {', '.join(FORMATS)}")
    return parser


def small(name: str, given: Sequence[str]) -> list[str]:
    """The overrides of results/paper/small.yaml for a table, without keys that the user has given."""
    known = read_yaml("small.yaml")
    if name not in known:
        raise UsageError(
            f"{name} has no --small overrides (tables with --small: {', '.join(known)}): give overrides instead"
        )
    keys = {word.partition("=")[0] for word in given}
    return [word for word in known[name] if word.partition("=")[0] not in keys]


def run(name: str, overrides: Sequence[str]) -> int:
    """Run the experiment of a table; returns the exit code. Raises UsageError for overrides that do not fit it."""
    from kvbench.papers.compare import Choice
    from kvbench.papers.protocol import refused

    reasons = refused(numbers(name))
    if len(numbers(name)) == sum(map(len, reasons.values())):
        raise UsageError(f"{name} cannot be run: {'; '.join(reasons)}")
    Choice(name, overrides)
    return subprocess.run([sys.executable, "-m", "kvbench", f"experiment={name}", *overrides], check=False).returncode


def listing(paper: str | None = None) -> Table:
    """All printed tables, or those of one paper with the reasons why some numbers cannot be measured."""
    from kvbench.papers.protocol import refused

    rows, notes = [], []
    for name in tables(paper):
        own, reasons = numbers(name), refused(numbers(name))
        sizes = (
            len({getattr(number, key) for number in own} - {"", None}) for key in ("model", "method", "budget", "task")
        )
        able = len(own) - sum(map(len, reasons.values()))
        rows.append((name, " x ".join(map(str, sizes)), str(len(own)), str(able), layout(name).title))
        notes += [f"{name}: {len(of)} numbers cannot be measured, {reason}." for reason, of in reasons.items() if paper]
    frame = pd.DataFrame(rows, columns=["table", "grid", "numbers", "runnable", "title"])
    notes.insert(0, "grid: models x methods x budgets x tasks. runnable: numbers that runs of kvbench can measure.")
    return Table(frame, f"{len(rows)} published tables", notes, left=["table", "title"])
