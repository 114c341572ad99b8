"""Draws figures of finished runs: `python -m kvbench.plot results/runs -o figures/`.

DIR is a folder of runs, or a table of `python -m kvbench.results collect` (.csv, .parquet).
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
    "budget": "score against the budget, one line per policy",
    "bytes": "score against the cache size in bytes (default if -o is a file)",
    "heatmap": "scores of needle tests by length and depth",
    "nll": "NLL against context length, for runs that scored given texts",
    "layers": "tokens in each layer",
    "all": "all kinds that have data (default if -o is a folder)",
}


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of `python -m kvbench.plot`; returns the exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(format="kvbench: %(message)s", stream=sys.stderr)
    logging.getLogger("kvbench").setLevel(logging.INFO)
    sys.stdout.write("".join(f"{path}\n" for path in plot(options)))
    return 0


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:7}  {what}" for name, what in KINDS.items())
    parser = Parser("python -m kvbench.plot", description=f"{__doc__}\nkinds:\n{listed}")
    parser.add_argument("place", type=Path, metavar="DIR", help="folder of runs, or a table")
    parser.add_argument("-o", "--output", type=Path, required=True, help="one file (.svg, .pdf, .png) or a folder")
    parser.add_argument("--kind", choices=KINDS, metavar="KIND", help="kind of figure (see above)")
    parser.add_argument("--format", choices=("svg", "pdf", "png"), help="format of files in a folder (default: svg)")
    parser.add_argument("--width", type=float, metavar="INCHES", help="width of a figure, such as 3.3 for a column")
    parser.add_argument("--font", metavar="FAMILY", help='font, such as serif or "Times New Roman"')
    parser.add_argument("--font-size", type=float, metavar="POINTS", help="size of the text (default: 9)")
    parser.add_argument(
        "--caption",
        choices=("below", "none"),
        default="below",
        help="below: title and notes are in the figure; none: they are printed instead (default: below)",
    )
    parser.add_argument(
        "--rename",
        nargs="+",
        default=[],
        metavar="POLICY=NAME",
        help='rename policies: caote_snapkv="CAOTE (ours)"',
    )
    parser.add_argument("--free-y", action="store_true", help="fit the y axis to the scores instead of 0 to 1")
    parser.add_argument("--ylim", nargs=2, type=float, metavar=("LOW", "HIGH"), help="limits of the y axis of scores")
    for field, several in ONLY.items():
        only = f"draw only these {several}"
        parser.add_argument(f"--{field}", nargs="+", default=[], metavar=field.upper(), help=only)
    return parser


def plot(options: argparse.Namespace) -> list[Path]:
    """Draw the selected figures and return their paths. Raises UsageError."""
    from kvbench.report.figures import (  # imported here: matplotlib takes a second
        panels,
        pictures,
        sheet,
    )

    if options.output.suffix:
        check_output(options.output, FORMATS, makes_folder=True)
    else:
        check_folder(options.output, True, f"-o {options.output}")
    if not options.place.exists():
        raise UsageError(f"{options.place} does not exist: choose a folder of runs or a table")
    suffix = f".{options.format or 'svg'}"
    if options.format and options.output.suffix not in ("", suffix):
        raise UsageError(f"--format {options.format} contradicts the suffix of -o {options.output}")
    pairs = [word.partition("=") for word in options.rename]
    if wrong := next((old for old, equals, new in pairs if not (old and equals and new)), None):
        raise UsageError(f"--rename {wrong} must be POLICY=NAME")
    names = {old: new for old, _, new in pairs}
    limits = None if options.ylim is None else (options.ylim[0], options.ylim[1])
    paper = sheet.Paper(
        options.width, options.caption == "below", options.font, options.font_size, names, options.free_y, limits
    )
    cells = panels.choose(
        panels.read(options.place), policy=options.policy, task=options.task, model=options.model, budget=options.budget
    )
    return pictures.draw(
        options.kind or ("bytes" if options.output.suffix else "all"), cells, options.output, suffix, paper
    )


if __name__ == "__main__":
    sys.exit(main())
