"""Published tables of five papers, compared with your runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from kvbench.config.completion import complete_overrides
from kvbench.errors import UsageError
from kvbench.papers.layout import lay_out, layout, numbers, read_yaml, tables
from kvbench.report.formats import FORMATS, show
from kvbench.report.text_table import TextTable, table_of
from kvbench.terminal.command import PATH, Command, log_to_stderr, pairs, program
from kvbench.terminal.outputs import check_output

OUT = "results/runs"
_OVERRIDES = """Overrides are those of kvbench. A value that the table has selects runs; another value replaces those of
the table.

\b
select some runs of a table:
  model=llama32_3b_instruct policy=snapkv,caote_snapkv limit=20
replace the model:
  model=smollm2 limit=10
offline, with shorter prompts and budgets (--small has such overrides for one table of each paper):
  model=pocket task=niah task.lengths=[2048] budget=512,1024 block=32"""

_table = click.argument("table", shell_complete=lambda _, __, word: [one for one in tables() if one.startswith(word)])
_overrides = click.argument("overrides", nargs=-1, metavar="[FIELD=VALUE]...", shell_complete=complete_overrides)
_small = click.option(
    "--small", "is_small", is_flag=True, help="Use the overrides of results/paper/small.yaml (offline)."
)
_output = click.option("-o", "--output", type=PATH, help=f"File to write: {', '.join(FORMATS)}.")


@click.group("tables", no_args_is_help=False)
def cli() -> None:
    """Published tables of five papers, compared with your runs."""
    log_to_stderr()


main = program(cli)


@cli.command("list", cls=Command)
@click.argument("paper", required=False)
@_output
def list_tables(paper: str | None, output: Path | None) -> None:
    """List the tables of all papers or of one: contents, size, and how many numbers can be measured."""
    _check(output)
    show(listing(paper), output)


@cli.command("show", cls=Command)
@_table
@_output
def show_table(table: str, output: Path | None) -> None:
    """Print a published table, such as caote/table2, in the layout of its paper."""
    _check(output)
    show(lay_out(table), output)


@cli.command("run", cls=Command, help=f"Compute the runs of a table, then compare them.\n\n{_OVERRIDES}")
@_table
@_overrides
@_small
@_output
def run_table(table: str, overrides: Sequence[str], is_small: bool, output: Path | None) -> int:
    """The exit code is 1 if runs failed."""
    _check(output, table)
    words = [*(small(table, overrides) if is_small else ()), *overrides]
    code = run(table, words)
    _compare(table, Path(pairs(words, "limit=5").get("out", OUT)), words, output, is_small)
    return code


@cli.command("compare", cls=Command, help=f"Compare your runs with a published table.\n\n{_OVERRIDES}")
@_table
@_overrides
@_small
@_output
@click.option("--runs", type=PATH, help=f"Folder of finished runs, such as {OUT}.")
def compare_table(table: str, overrides: Sequence[str], is_small: bool, output: Path | None, runs: Path | None) -> None:
    """Print or write the comparison."""
    _check(output, table)
    _compare(table, runs, [*(small(table, overrides) if is_small else ()), *overrides], output, is_small)


def _check(output: Path | None, table: str = "") -> None:
    """Refuse a wrong output and an unknown table before torch is imported."""
    if output is not None:
        check_output(output, tuple(FORMATS))
    if table:
        numbers(table)


def _compare(name: str, runs: Path | None, overrides: Sequence[str], output: Path | None, is_small: bool) -> None:
    """is_small: the title says that the measured numbers are not of the paper's setting."""
    from kvbench.papers.compare import compare
    from kvbench.results.loading import load_results

    model = pairs(overrides, "limit=5").get("model", "pocket")
    about = f"--small: measured on the model {model} with shorter prompts and budgets, not on the paper's. " * is_small
    made = compare(name, [] if runs is None else load_results(runs), overrides)
    show(replace(made, title=about + made.title), output)


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


def listing(paper: str | None = None) -> TextTable:
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
    columns = "table", "grid", "numbers", "runnable", "title"
    notes.insert(0, "grid: models x methods x budgets x tasks. runnable: numbers that runs of kvbench can measure.")
    return table_of(columns, rows, f"{len(rows)} published tables", left=["table", "title"], notes=notes)
