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
    add = parser.add_argument
    add("place", type=Path, metavar="DIR", help="folder of runs, or a table")
    add("-o", "--output", type=Path, required=True, help="one file (.svg, .pdf, .png) or a folder")
    add("--kind", choices=KINDS, metavar="KIND", help="kind of figure (see above)")
    add("--format", choices=("svg", "pdf", "png"), help="format of files in a folder (default: svg)")
    add("--width", type=float, metavar="INCHES", help="width of a figure, such as 3.3 for a column")
    add("--font", metavar="FAMILY", help='font, such as serif or "Times New Roman"')
    add("--font-size", type=float, metavar="POINTS", help="size of the text (default: 9)")
    caption = "below: title and notes are in the figure; none: they are printed instead (default: below)"
    add("--caption", choices=("below", "none"), default="below", help=caption)
    rename = 'rename policies: caote_snapkv="CAOTE (ours)"'
    add("--rename", nargs="+", default=[], metavar="POLICY=NAME", help=rename)
    add("--free-y", action="store_true", help="fit the y axis to the scores instead of 0 to 1")
    for field, several in ONLY.items():
        add(f"--{field}", nargs="+", default=[], metavar=field.upper(), help=f"draw only these {several}")
    return parser


def plot(options: argparse.Namespace) -> list[Path]:
    """Draw the selected figures and return their paths. Raises UsageError."""
    from kvbench.report.figures import panels, pictures, sheet  # imported here: matplotlib takes a second

    output = options.output
    if output.suffix:
        check_output(output, FORMATS, makes_folder=True)
    else:
        check_folder(output, True, f"-o {output}")
    if not options.place.exists():
        raise UsageError(f"{options.place} does not exist: choose a folder of runs or a table")
    suffix = f".{options.format or 'svg'}"
    if options.format and output.suffix not in ("", suffix):
        raise UsageError(f"--format {options.format} contradicts the suffix of -o {output}")
    names = dict(word.partition("=")[::2] for word in options.rename)
    if wrong := next((old for old, new in names.items() if not (old and new)), None):
        raise UsageError(f"--rename {wrong} must be POLICY=NAME")
    paper = sheet.Paper(
        options.width, options.caption == "below", options.font, options.font_size, names, options.free_y
    )
    rows = panels.choose(panels.read(options.place), **{field: getattr(options, field) for field in ONLY})
    kind = options.kind or ("bytes" if output.suffix else "all")
    return pictures.draw(kind, rows, output, suffix, paper)


if __name__ == "__main__":
    sys.exit(main())
