"""Figures of finished runs: `python -m kvbench.plot results/runs -o figures/` (SVG; PDF or PNG: --format).

DIR is a folder of runs, or a table that `python -m kvbench.results collect` wrote (.csv, .parquet).
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from kvbench.errors import UsageError
from kvbench.terminal.command import Parser, command
from kvbench.terminal.outputs import check_folder, check_output

FORMATS = (".svg", ".png", ".pdf")
ONLY = {"policy": "policies", "task": "tasks", "model": "models", "budget": "budgets"}
KINDS = {
    "budget": "score against the budget, a line for each policy",
    "bytes": "score against the bytes really held (the default if -o is one file)",
    "heatmap": "needle tests by length and depth",
    "nll": "NLL against context length, of runs that scored given texts",
    "layers": "tokens held by each layer",
    "all": "all there is data for (the default if -o is a folder)",
}


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of `python -m kvbench.plot`; returns the exit code."""
    asked = _parser().parse_args(arguments)
    logging.basicConfig(format="kvbench: %(message)s", stream=sys.stderr)
    logging.getLogger("kvbench").setLevel(logging.INFO)
    sys.stdout.write("".join(f"{path}\n" for path in plot(asked)))
    return 0


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:7}  {what}" for name, what in KINDS.items())
    parser = Parser("python -m kvbench.plot", description=f"{__doc__}\nkinds:\n{listed}")
    parser.add_argument("place", type=Path, metavar="DIR", help="where the runs are, such as results/runs")
    parser.add_argument("-o", "--output", type=Path, required=True, help="one file (.svg, .pdf, .png) or a folder")
    parser.add_argument("--kind", choices=KINDS, metavar="KIND", help="one of the kinds above")
    parser.add_argument("--format", choices=("svg", "pdf", "png"), help="of the files in a folder (default: svg)")
    parser.add_argument("--width", type=float, metavar="INCHES", help="of a figure, such as a column's 3.3")
    parser.add_argument("--font", metavar="FAMILY", help='such as serif or "Times New Roman"')
    parser.add_argument("--font-size", type=float, metavar="POINTS", help="of the text (default: 9)")
    parser.add_argument(
        "--caption",
        choices=("below", "none"),
        default="below",
        help="title and notes in the figure, or on the screen for a caption of your own (default: below)",
    )
    parser.add_argument(
        "--rename",
        nargs="+",
        default=[],
        metavar="POLICY=NAME",
        help='other names: caote_snapkv="CAOTE (ours)"',
    )
    parser.add_argument("--free-y", action="store_true", help="fit the y axis to the scores, instead of 0 to 1")
    parser.add_argument("--ylim", nargs=2, type=float, metavar=("LOW", "HIGH"), help="limits of the y axis of scores")
    for field, several in ONLY.items():
        only = f"draw only these {several}"
        parser.add_argument(f"--{field}", nargs="+", default=[], metavar=field.upper(), help=only)
    return parser


def plot(asked: argparse.Namespace) -> list[Path]:
    """Draw what the command line asks for and return the paths written. Raises UsageError."""
    from kvbench.report.figures import (  # here: matplotlib takes a second, which `--help` need not wait for
        panels,
        pictures,
        sheet,
    )

    if asked.output.suffix:
        check_output(asked.output, FORMATS, makes_folder=True)
    else:
        check_folder(asked.output, True, f"-o {asked.output}")
    if not asked.place.exists():
        raise UsageError(f"{asked.place} does not exist: name a folder of runs, or a table of them")
    suffix = f".{asked.format or 'svg'}"
    if asked.format and asked.output.suffix not in ("", suffix):
        raise UsageError(f"--format {asked.format} contradicts the suffix of -o {asked.output}")
    pairs = [word.partition("=") for word in asked.rename]
    if wrong := next((old for old, equals, new in pairs if not (old and equals and new)), None):
        raise UsageError(f"--rename {wrong} must be POLICY=NAME")
    names = {old: new for old, _, new in pairs}
    limits = None if asked.ylim is None else (asked.ylim[0], asked.ylim[1])
    paper = sheet.Paper(asked.width, asked.caption == "below", asked.font, asked.font_size, names, asked.free_y, limits)
    cells = panels.choose(
        panels.read(asked.place), policy=asked.policy, task=asked.task, model=asked.model, budget=asked.budget
    )
    return pictures.draw(asked.kind or ("bytes" if asked.output.suffix else "all"), cells, asked.output, suffix, paper)


if __name__ == "__main__":
    sys.exit(main())
