"""`python -m kvbench.report DIR -o report.html`: all runs below a folder as one HTML file."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.errors import UsageError
from kvbench.terminal.command import Parser, command
from kvbench.terminal.outputs import check_output

if TYPE_CHECKING:
    from kvbench.results.result import Result


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report and print its path; returns the exit code."""
    parser = Parser("python -m kvbench.report", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of runs, such as results/runs")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="HTML file to write (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(format="kvbench: %(message)s", stream=sys.stderr)
    check_output(options.output, (".html",))
    from kvbench.results.load import load_results

    results = load_results(options.folder)
    nbytes = write_page(results, options.folder, options.output)
    count = "1 run" if len(results) == 1 else f"{len(results)} runs"
    sys.stdout.write(f"report: {options.output} ({count}, {nbytes / 1e6:.1f} MB, opens in any browser)\n")
    return 0


def write_page(results: Sequence[Result], folder: Path, output: Path) -> int:
    """Write the report and return its size in bytes. If writing fails, raises UsageError and keeps the old file."""
    check_output(output, (".html",))
    from kvbench.report.html.render import page  # imports torch and matplotlib, which are slow
    from kvbench.results.files import atomic_write

    written = page(results, folder).encode()
    try:
        with atomic_write(output) as temporary:
            temporary.write_bytes(written)
    except OSError as error:
        raise UsageError(f"-o {output} cannot be written ({error.strerror or error})") from error
    return len(written)
