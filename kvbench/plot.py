"""Draws figures of finished runs: `kvbench plot results/runs -o figures/`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from kvbench.errors import UsageError, from_extra
from kvbench.report.selection import selected, selection_options
from kvbench.terminal.command import PATH, Command, leave, log_to_stderr, program
from kvbench.terminal.outputs import check_folder, check_output

FORMATS = (".svg", ".png", ".pdf")
_ABOUT = """Draw figures of finished runs. PLACE is a folder of runs, or a table of `kvbench results collect` (.csv,
.parquet)."""
KINDS = {
    "budget": "score against the budget, one line per policy",
    "bytes": "score against the cache size in bytes (default if -o is a file)",
    "heatmap": "scores of needle tests by length and depth",
    "nll": "NLL against context length, for runs that scored given texts",
    "kl": "divergence from full (KL) against the budget",
    "kl_bytes": "divergence from full against the cache size in bytes",
    "kl_position": "divergence from full by position in the answer",
    "evidence": "right answers, and whether the evidence of wrong ones is held",
    "layers": "tokens in each layer",
    "all": "all kinds that have data (default if -o is a folder)",
}


SIZE = click.FloatRange(0, 100, min_open=True)
_LISTED = "\n".join(f"  {name:11}  {what}" for name, what in KINDS.items())


@click.command("plot", cls=Command, help=f"{_ABOUT}\n\n\b\nKinds:\n{_LISTED}")
@click.argument("place", type=PATH)
@click.option("-o", "--output", type=PATH, required=True, help="One file (.svg, .pdf, .png) or a folder.")
@click.option("--kind", type=click.Choice(list(KINDS)), help="Kind of figure.")
@click.option("--format", "suffix", type=click.Choice(["svg", "pdf", "png"]), help="Of files in a folder (svg).")
@click.option(
    "--width",
    type=click.FloatRange(0, 100, min_open=True),
    metavar="INCHES",
    help="Width of a figure, such as 3.3 for a column.",
)
@click.option("--font", metavar="FAMILY", help='Font, such as serif or "Times New Roman".')
@click.option("--font-size", type=SIZE, metavar="POINTS", help="Size of the text (9).")
@click.option(
    "--caption", type=click.Choice(["below", "none"]), default="below", show_default=True,
    help="below: title and notes are in the figure; none: they are printed instead.",
)  # fmt: skip
@click.option("--rename", multiple=True, metavar="POLICY=NAME", help='Rename policies: caote_snapkv="CAOTE (ours)".')
@click.option("--free-y", is_flag=True, help="Fit the y axis to the scores instead of 0 to 1.")
@selection_options(joined=True)
def cli(place: Path, output: Path, suffix: str | None, rename: Sequence[str], **options: Any) -> None:  # noqa: ANN401
    """Draw the selected figures and print their paths."""
    log_to_stderr()
    logging.getLogger("kvbench").setLevel(logging.INFO)
    with from_extra("report", "a figure"):
        from kvbench.report.figures import panels, pictures, sheet  # imported here: matplotlib takes a second

    if output.suffix:
        check_output(output, FORMATS, makes_folder=True)
    else:
        check_folder(output, True, f"-o {output}")
    if not place.exists():
        raise UsageError(f"{place} does not exist: choose a folder of runs or a table")
    if suffix and output.suffix not in ("", f".{suffix}"):
        raise UsageError(f"--format {suffix} contradicts the suffix of -o {output}")
    names = dict(word.partition("=")[::2] for word in rename)
    if wrong := next((old for old, new in names.items() if not (old and new)), None):
        raise UsageError(f"--rename {wrong} must be POLICY=NAME")
    width, font, size = (options[name] for name in ("width", "font", "font_size"))
    paper = sheet.Paper(width, options["caption"] == "below", font, size, names, options["free_y"])
    rows = panels.once(selected(panels.read(place), options))
    kind = options["kind"] or ("bytes" if output.suffix else "all")
    found = pictures.draw(kind, rows, output, f".{suffix or 'svg'}", paper)
    sys.stdout.write("".join(f"{path}\n" for path in found))


main = program(cli)

if __name__ == "__main__":
    leave(main())
