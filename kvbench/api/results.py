"""Results in Python: what `evaluate` returns, or what lies in a folder, as rows, a DataFrame, a table and a page."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from kvbench.analysis import load
from kvbench.analysis.result import Result
from kvbench.page.command import write_page
from kvbench.report.plain_text import text
from kvbench.report.render import html
from kvbench.report.table import WIDE, results_grids


class Results(load.Results):
    """Results as rows: `results[0].score`, `len(results)`, `to_pandas()`. Shown, they are the command line's table.

    They know the runs of the full cache they are compared with, and what they are made of stays in `folder`.
    """

    def __init__(
        self, rows: Iterable[Result], folder: Path, in_order: bool = True, held: TemporaryDirectory[str] | None = None
    ) -> None:
        """held: removes `folder` once nobody has the results."""
        super().__init__(rows, in_order)
        self.folder = folder
        self._held = held

    def report(self, path: str | Path) -> Path:
        """Write the page of `python -m kvbench.report`, one file that any browser opens; returns its path."""
        write_page(self, self.folder, Path(path))
        return Path(path)

    def __repr__(self) -> str:
        return "\n".join(text(grid, WIDE) for grid in results_grids(self))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return "\n".join(html(grid) for grid in results_grids(self))


def load_results(folder: str | Path, unfinished: bool = False) -> Results:
    """Every finished run in or below a folder, in the order of tables; others are left out, with a warning.

    unfinished: cells of sweeps that have no finished run are rows as well, at the end; their `state` says why.
    Raises ValueError where there is no finished run that can be read.
    """
    return Results(load.load_results(Path(folder), unfinished), Path(folder))
