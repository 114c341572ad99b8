"""What every tracker (`logger=`) logs of a run. A tracker itself is one file: how it opens a run and writes to it."""

from __future__ import annotations

import logging
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from math import isfinite
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from kvbench.errors import UsageError, counted, from_extra
from kvbench.results.columns import COLUMNS
from kvbench.results.definition import folder_identity
from kvbench.results.labels import compressed, flat, moments, names
from kvbench.results.loading import read_result
from kvbench.results.metrics import mean_kept, running
from kvbench.results.result import Result, Results
from kvbench.results.samples import Sample
from kvbench.run.run import Run

_INTERVALS = 32  # number of running intervals of a run: each is a bootstrap, too slow for every example
_MEASURED = (
    *("score", "prompt_tokens", "generated_tokens", "cache_bytes", "peak_bytes", "spare_bytes", "device_peak_bytes"),
    *("prefill_seconds", "decode_seconds"),
)
_EXAMPLE = (
    *("index", "sample", "prompt_hash", "depth", "length", "prompt_tokens", "output", "references", "score", "nll"),
    *("kept_tokens", "cache_bytes", "peak_bytes", "error"),
)

Logged: TypeAlias = Run | Result
"""A run that is computed, or one that is stored."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opening:
    """What a tracker opens: a run, or a sweep's table and figures.

    run_id: of kvbench. place: the identity of the folder; equal runs of two folders are two runs of the tracker.
    title: for people. kind: the task, or "sweep". sweep: its name, None for a single run. config: the configuration as
    plain values, by path (`policy.scorer.window`).
    """

    run_id: str
    place: str
    title: str
    kind: str
    sweep: str | None
    config: Mapping[str, Any]

    def digest(self, *more: object) -> str:
        """An identity of the run and its folder, in 64 hexadecimal digits. more: what else tells runs apart."""
        return sha256(" ".join(map(str, (*more, self.place, self.run_id))).encode()).hexdigest()


class TrackerRun(ABC):
    """One run in a tracker. The values are numbers, and neither None nor NaN."""

    logged: int = 0
    """Number of examples that an interrupted process has logged already."""

    @abstractmethod
    def step(self, index: int, values: Mapping[str, Any]) -> None:
        """Log the numbers after example `index`."""

    @abstractmethod
    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log a table."""

    @abstractmethod
    def figures(self, paths: Sequence[Path]) -> None:
        """Log pictures (PNG) under their names. The files are deleted afterwards."""

    @abstractmethod
    def finish(self, summary: Mapping[str, Any], error: str | None = None, interrupted: bool = False) -> None:
        """Log the final numbers and texts, and close the run. error: why the run or some of its examples failed."""


def package(module: str, name: str, logger: str) -> ModuleType:
    """A tracker's package. Raises UsageError if it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(
            f"logger={logger} needs a package that is not installed: pip install {name} ({error})"
        ) from error


class Watch:
    """Logs runs to a tracker while they are computed; the caller catches errors.

    open_run: opens a run in the tracker. again: whether a finished run without new examples is logged again. A complete
    run stays open until its difference from the full cache is known, or until `close`.
    """

    def __init__(
        self, open_run: Callable[[Opening], TrackerRun], sweep: str | None, again: Callable[[], bool] = lambda: False
    ) -> None:
        self._open_run, self._sweep, self._again = open_run, sweep, again
        self._open: dict[str, tuple[TrackerRun, list[Sample]]] = {}  # by run_id, with the logged examples
        self._complete: list[Result] = []

    def started(self, cell: Logged, done: Sequence[Sample], total: int) -> None:
        """Open a run, or continue an interrupted one."""
        labels, evicts_decodes = names(cell.naming, cell.identity), moments(cell.identity)
        budget = [] if cell.identity["budget"] is None else [str(cell.identity["budget"])]
        config = {
            **flat({key: value for key, value in cell.identity.items() if key != "version"}),
            "run_id": cell.run_id,
            "compress": compressed(cell.identity),
            **{name: getattr(cell.naming, name) for name in ("model", "policy", "task")},
            **dict(zip(("schedule", "decode"), evicts_decodes, strict=True)),
        }
        title = " ".join([labels["model"], labels["policy"], *budget, labels["task"]])
        place = folder_identity(cell.folder.parent)
        run = self._open_run(Opening(cell.run_id, place, title, cell.naming.task, self._sweep, config))
        self._open[cell.run_id] = run, list(done[: run.logged])
        for sample in done[run.logged :]:
            self.finished(cell, sample)

    def finished(self, cell: Logged, sample: Sample) -> None:
        """Log an example."""
        run, samples = self._open[cell.run_id]
        samples.append(sample)
        run.step(len(samples) - 1, history_row(samples))

    def ended(self, cell: Logged, error: Exception | None) -> None:
        """Log the summary of a complete run, or an error."""
        if cell.run_id not in self._open:
            if error is not None or not self._again():
                return
            stored = read_result(cell.folder).samples
            self.started(cell, stored, len(stored))
        if error is not None:
            message = f"{type(error).__name__}: {error}"
            self._open.pop(cell.run_id)[0].finish({"error": message}, message)
            return
        self._complete.append(read_result(cell.folder))
        for result in Results(self._complete):
            if result.baseline is not None or result.is_full:
                self._finish(result)

    def close(self, records: Sequence[Result] = ()) -> None:
        """Close all runs. records: all runs of the sweep, to log their table and figures."""
        for result in Results([*records, *self._complete]):
            self._finish(result)
        for run, _ in self._open.values():
            run.finish({}, interrupted=True)
        self._open.clear()
        if records and self._sweep is not None:
            name, results = f"sweep-{self._sweep}", Results(records)
            place = folder_identity(results[0].folder.parent)
            run = self._open_run(Opening(name, place, name, "sweep", self._sweep, {"runs": len(results)}))
            run.table("table", [c.name for c in COLUMNS], [[c.value(row) for c in COLUMNS] for row in results])
            with tempfile.TemporaryDirectory() as folder:
                run.figures(_figures(results, Path(folder)))
                run.finish({})

    def _finish(self, result: Result) -> None:
        """Log the summary and the table of examples of a complete run and close it, once."""
        if result.run_id in self._open:
            run, _ = self._open.pop(result.run_id)
            run.table("examples", *example_table(result.samples))
            failed = f"{result.n_failed} of {counted(result.n, 'example')} failed" if result.n_failed else None
            run.finish(known((column.name, column.value(result)) for column in COLUMNS), failed)


def history_row(samples: Sequence[Sample]) -> dict[str, Any]:
    """The numbers of the last example under `example/`, and running means under the names of the tidy table.

    After a failed example there is no running score, as in the table.
    """
    n, last = len(samples), samples[-1]
    row = {f"example/{name}": getattr(last, name) for name in _MEASURED}
    row |= {"example/nll": last.likelihood and last.likelihood.nll, "example/kept_tokens": mean_kept(last)}
    row["example/kl"] = last.divergence and last.divergence.mean_kl
    row |= running(samples, bounded=n % max(1, n // _INTERVALS) == 0)
    return known({**row, "n_failed": sum(sample.error is not None for sample in samples)}.items())


def example_table(samples: Sequence[Sample]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of the table of examples; `sample` numbers several answers to one prompt."""
    columns = [name for name in _EXAMPLE if name != "sample" or any(one.sample is not None for one in samples)]
    rows = []
    for sample in samples:
        values = {**vars(sample), **{name: sample.metadata.get(name) for name in ("depth", "length")}}
        values |= {"references": " | ".join(sample.references), "kept_tokens": mean_kept(sample)}
        values["nll"] = sample.likelihood and sample.likelihood.nll
        rows.append([values[name] for name in columns])
    return columns, rows


def known(values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The values without None, NaN and infinities."""
    return {k: v for k, v in values if v is not None and not (isinstance(v, float) and not isfinite(v))}


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Only the numbers of a summary."""
    return {k: float(v) for k, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def _figures(results: Sequence[Result], folder: Path) -> list[Path]:
    """All figures that have data, written to `folder`."""
    try:
        with from_extra("report", "a figure"):
            from kvbench.report.figures import panels, pictures  # imported here: matplotlib takes a second
        return pictures.draw(pictures.ALL, panels.once(results), folder, ".png")
    except UsageError as error:
        log.info("no figure for the tracker: %s", error)
        return []
