"""Results of `evaluate` or of a folder in Python: rows, a DataFrame, a table and a report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from kvbench.errors import ConfigError, choice
from kvbench.report.formats import html
from kvbench.report.html.report import write_report
from kvbench.report.table import pivot, results_table
from kvbench.report.text_table import text
from kvbench.results import loading, result, seeds
from kvbench.results.columns import frame
from kvbench.results.divergence import of_example
from kvbench.results.metrics import mean_kept
from kvbench.results.result import Result

if TYPE_CHECKING:
    import pandas as pd


class Results(result.Results):
    """Results as rows: `results[0].score`, `results[:3]`, `len(results)`. Printing them shows the table.

    `to_pandas()` has all numbers; `table()` and `pivot()` have the text of tables. All three are DataFrames, which
    pandas exports: `to_csv`, `to_parquet`, `to_latex`, `to_markdown`.
    """

    def __init__(
        self, rows: Iterable[Result], folder: Path, in_order: bool = True, owned: TemporaryDirectory[str] | None = None
    ) -> None:
        """folder: the folder of the runs. owned: a temporary directory, removed together with the results."""
        super().__init__(rows, in_order)
        self.folder = folder
        self._owned = owned

    def to_pandas(self, by: Sequence[str] = ()) -> pd.DataFrame:
        """A DataFrame with one row for each result and all columns, including one for each field that differs.

        by: metadata keys (task, length, depth, ...); each of their values adds a row.
        """
        return frame(self.by(by))

    def samples_df(self) -> pd.DataFrame:
        """A DataFrame with one row for each example: run, prompt hash, output, references, score, tokens and bytes.

        With task.divergence=true also the mean and largest KL, the first divergence, and the compared tokens.
        """
        import pandas as pd

        rows = []
        for row in self:
            about = {name: getattr(row, name) for name in ("run_id", "model", "task", "policy", "budget")}
            for sample in row.samples:
                known = {
                    k: v
                    for k, v in vars(sample).items()
                    if k not in ("metadata", "likelihood", "kept_tokens", "divergence")
                }
                own = {"kept_tokens": mean_kept(sample), "nll": sample.likelihood and sample.likelihood.nll}
                own |= {} if sample.divergence is None else of_example(sample.divergence)
                rows.append({**about, **sample.metadata, **known, **own})
        return pd.DataFrame(rows).dropna(axis="columns", how="all")

    def over_seeds(self) -> Results:
        """The results with runs that differ only in their seed joined: one row, with `n_seeds` and `seed_sd`."""
        return Results(seeds.over_seeds(self), self.folder, in_order=False, owned=self._owned)

    def table(self) -> pd.DataFrame:
        """The printed table: columns that differ between the rows, scores with their intervals, as text."""
        return results_table(self).frame

    def pivot(self, across: str = "task") -> pd.DataFrame:
        """Policies down, tasks (scores times 100, with their average) or budgets (scores with intervals) across."""
        choice("across", across, "task", "budget")
        return pivot(self, across).frame

    def report(self, path: str | Path) -> Path:
        """Write the HTML report of `kvbench report`, in which seeds are joined, and return its path."""
        write_report(self.over_seeds(), self.folder, Path(path))
        return Path(path)

    def __repr__(self) -> str:
        return text(results_table(self))

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        """The table in a notebook, which shows one of the two."""
        return {"text/plain": repr(self), "text/html": html(results_table(self))}


def load_results(folder: str | Path) -> Results:
    """All runs in or below a folder, in the order of tables; unfinished ones have `state` "unfinished".

    Runs that cannot be read are left out, with a warning. Raises ValueError if no run can be read.
    """
    if not isinstance(folder, str | Path):
        raise ConfigError("folder", folder if folder is None else type(folder), "a folder of runs")
    return Results(loading.load_results(Path(folder)), Path(folder))
