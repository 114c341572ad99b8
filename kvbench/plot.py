"""Pictures of finished runs: `python -m kvbench.plot results/runs -o pictures/` (SVG; PDF or PNG: --format).

DIR is a folder of runs, a table that `python -m kvbench.results collect` wrote (.csv, .parquet), or a folder or .json
file that `python -m kvbench.bench` wrote.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from kvbench.terminal.command import Parser, command
from kvbench.terminal.errors import UsageError
from kvbench.terminal.outputs import check_folder, check_output

FORMATS = (".svg", ".png", ".pdf")
ONLY = {"policy": "policies", "task": "tasks", "model": "models", "budget": "budgets"}
WHAT = {
    "budget": "score against the budget, a line per policy",
    "bytes": "score against the bytes really held (where -o is one file and --kind is not given)",
    "tasks": "bars by task, or category of a benchmark; a picture per budget",
    "heatmap": "needle tests by length and depth",
    "pareto": "all policies by bytes and score, and the front of those that none beats",
    "nll": "NLL against context length, of runs that scored given texts",
    "bench": "latency, throughput and memory against size, of a benchmark (where DIR is its .json file)",
    "all": "all there is data for (where -o is a folder and --kind is not given)",
}


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of `python -m kvbench.plot`; returns the exit code: 2 for what was asked wrongly."""
    asked = _parser().parse_args(arguments)
    logging.basicConfig(format="kvbench: %(message)s", stream=sys.stderr)
    logging.getLogger("kvbench").setLevel(logging.INFO)
    paths = plot(asked)
    sys.stdout.write("".join(f"{path}\n" for path in paths))
    return 0


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:7}  {what}" for name, what in WHAT.items())
    parser = Parser(
        "python -m kvbench.plot",
        description=f"{__doc__}\nkinds:\n{listed}",
    )
    parser.add_argument("place", type=Path, metavar="DIR", help="where the runs are, such as results/runs")
    parser.add_argument("-o", "--output", type=Path, required=True, help="one file (.svg, .pdf, .png) or a folder")
    parser.add_argument("--kind", choices=WHAT, metavar="KIND", help="one of the kinds above")
    parser.add_argument("--format", choices=("svg", "pdf", "png"), help="of the files in a folder (default: svg)")
    parser.add_argument("--width", type=float, metavar="INCHES", help="of a picture, such as a column's 3.3")
    parser.add_argument(
        "--caption",
        choices=("below", "none"),
        default="below",
        help="title and notes in the picture, or on the screen for a caption of your own (default: below)",
    )
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
        raise UsageError(f"--format {asked.format} has no effect on -o {asked.output}, whose suffix says it")
    usual = pictures.BENCH if asked.place.suffix == ".json" else "bytes" if asked.output.suffix else "all"
    kind = asked.kind or usual
    paper = sheet.Paper(asked.width, asked.caption == "below")
    if kind == pictures.BENCH:
        if chosen := next((field for field in ONLY if getattr(asked, field)), None):
            raise UsageError(f"--{chosen} has no effect on --kind bench, which draws a benchmark whole")
        return pictures.draw_bench(_benchmarks(asked.place), asked.output, suffix, paper)
    cells = panels.choose(
        panels.read(asked.place), policy=asked.policy, task=asked.task, model=asked.model, budget=asked.budget
    )
    return pictures.draw(kind, cells, asked.output, suffix, paper)


def _benchmarks(place: Path) -> list[Path]:
    """The file itself, or every benchmark in a folder that has curves. UsageError without one."""
    if place.is_file():
        return [place]
    found = [path for path in sorted(place.glob("*.json")) if b'"curves"' in path.read_bytes()]
    if not found:
        raise UsageError(f"{place} holds no .json file with curves that `python -m kvbench.bench` wrote")
    return found


if __name__ == "__main__":
    sys.exit(main())
