"""The command line of `python -m kvbench.results`: collect a table, draw curves."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from kvbench.report.collect import COLUMNS, FORMATS, collect
from kvbench.report.records import find_runs, labelled
from kvbench.terminal.errors import UsageError, refusing


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of `python -m kvbench.results`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kvbench.results", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    command = commands.add_parser(
        "collect",
        help="write one tidy table of all finished runs below a folder",
        epilog="columns: " + "; ".join(f"{column.name} ({column.meaning})" for column in COLUMNS),
    )
    command.add_argument(
        "--by",
        nargs="+",
        default=[],
        metavar="KEY",
        help="add rows for each value of a key of the examples' metadata: task, length, depth, ...",
    )
    curve = commands.add_parser(
        "curve", help="draw NLL against context length of the runs below a folder that scored given texts"
    )
    for one, what in (
        (command, f"table to write: {', '.join(FORMATS)}"),
        (curve, "picture to write: .svg, .png, .pdf"),
    ):
        one.add_argument("folder", type=Path, help="where the runs are, such as results/runs")
        one.add_argument("-o", "--output", type=Path, required=True, help=what)
    asked = parser.parse_args(arguments)
    logging.basicConfig(format="kvbench: %(message)s", stream=sys.stderr)
    try:
        if asked.command == "curve":
            done = f"{draw_curves(asked.folder, asked.output)} lines"
        else:
            done = f"{collect(asked.folder, asked.output, asked.by)} rows"
    except UsageError as error:
        sys.stderr.write(f"kvbench: {error}\n")
        return 2
    sys.stdout.write(f"{done} -> {asked.output}\n")
    return 0


def draw_curves(folder: Path, output: Path) -> int:
    """Draw the NLL curves of all finished runs below `folder` and return their number. Raises UsageError."""
    from kvbench.report.figures import nll, style  # here: matplotlib is a second, which only pictures have to wait for

    if output.suffix not in style.FORMATS:
        raise UsageError(f"-o {output} must end in one of {', '.join(style.FORMATS)}")
    runs = nll.read_runs(labelled(find_runs(folder)))
    with refusing(f"{folder}: "), style.house_style():
        figure = nll.curves(runs)
        try:
            style.save(figure, output)
        except OSError as error:
            raise UsageError(f"-o {output} cannot be written ({error.strerror or error})") from error
    return len(runs)
