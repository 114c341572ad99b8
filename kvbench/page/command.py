"""The command line of `python -m kvbench.report`: finished runs as one page that can be opened, sent and printed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.terminal.command import Parser, command
from kvbench.terminal.errors import UsageError
from kvbench.terminal.outputs import check_output

if TYPE_CHECKING:
    from kvbench.analysis.result import Result

OUTPUT = Path("report.html")


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and say where; returns the exit code: 2 for what was asked wrongly."""
    parser = Parser("python -m kvbench.report", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="where the runs are, such as results/runs")
    parser.add_argument(
        "-o", "--output", type=Path, default=OUTPUT, metavar="FILE", help="page to write (default: %(default)s)"
    )
    asked = parser.parse_args(arguments)
    logging.basicConfig(format="kvbench: %(message)s", stream=sys.stderr)
    check_output(asked.output, (".html",))
    from kvbench.analysis.load import load_results

    results = load_results(asked.folder)
    nbytes = write_page(results, asked.folder, asked.output)
    said = "1 run" if len(results) == 1 else f"{len(results)} runs"
    sys.stdout.write(f"report: {asked.output} ({said}, {nbytes / 1e6:.1f} MB, opens in any browser)\n")
    return 0


def write_page(results: Sequence[Result], folder: Path, output: Path) -> int:
    """Write the page of results that lie below a folder; returns its bytes. Raises UsageError."""
    check_output(output, (".html",))
    from kvbench.page.render import page  # here: it imports torch and matplotlib, which `--help` need not wait for

    written = page(results, folder).encode()
    try:
        output.write_bytes(written)
    except OSError as error:
        raise UsageError(f"-o {output} cannot be written ({error.strerror or error})") from error
    return len(written)
