"""The page's tables as rows of words: ranking, cost, scores task by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean

from kvbench.analysis.metrics import Numbers
from kvbench.analysis.result import Result
from kvbench.identity.labels import budget_order, natural
from kvbench.page.ranking import Standing, standings
from kvbench.page.rows import NOTHING, budget_words, by_task
from kvbench.report.figures.style import byte_unit
from kvbench.report.table import unlike

MARKS = {"best": "best", "tied": "≈ best", "reference": "reference"}
PLACES = ("best", "tied", "worse", "")


@dataclass(frozen=True)
class Forest:
    """Where value, interval and the full cache's value lie on a common scale, in percent of its width."""

    value: float
    low: float
    high: float
    full: float | None


def ranking(entries: Sequence[Result], where: Mapping[Result, Standing]) -> list[Result]:
    """The runs, those of one task beside each other, the best first."""

    def order(entry: Result) -> tuple[object, ...]:
        value = entry.value if entry.value is not None else (float("inf") if entry.reads else float("-inf"))
        equal = not entry.is_full, budget_order(entry.budget), entry.when, PLACES.index(where[entry].place)
        return natural(entry.model), natural(entry.task), value if entry.reads else -value, *equal

    return sorted(entries, key=order)


def forests(entries: Sequence[Result]) -> dict[Result, Forest]:
    """Of every run that has a value."""
    scales = _scales(entries)
    return {entry: _forest(entry, scales[entry.model, entry.task]) for entry in entries if entry.value is not None}


def _scales(entries: Sequence[Result]) -> dict[tuple[str, str], tuple[float, float]]:
    """The ends of every task's scale: 0 to 1 for scores in it, else what the intervals reach."""
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for key in dict.fromkeys((e.model, e.task) for e in entries):
        own = [e for e in entries if (e.model, e.task) == key and e.value is not None]
        ends = [x for e in own for x in (e.value, *(e.ends or ())) if x is not None]
        inside = ends and not own[0].reads and min(ends) >= 0 and max(ends) <= 1
        found[key] = (0.0, 1.0) if inside or not ends else (min(ends), max(ends))
    return found


def said(standing: Standing) -> str:
    """Its difference to the best, in words."""
    found = standing.difference
    if found is None:
        return ""
    return (
        f"{found.mean:+.3f} to the best ({found.low:+.3f} to {found.high:+.3f}), p = {standing.p:.3g} after Holm, "
        f"{found.n} examples"
    )


def _forest(entry: Result, scale: tuple[float, float]) -> Forest:
    assert entry.value is not None, "only what has a value is drawn"
    low, high = entry.ends or (entry.value, entry.value)
    full = None if entry.baseline is None else entry.baseline.value
    value, low, high = (_percent(x, scale) for x in (entry.value, low, high))
    return Forest(value, low, high, None if full is None else _percent(full, scale))


def _percent(value: float, scale: tuple[float, float]) -> float:
    width = scale[1] - scale[0]
    return round(min(100.0, max(0.0, 100 * (value - scale[0]) / width if width else 50.0)), 2)


@dataclass(frozen=True)
class Cost:
    """A column of what an example costs: the measured number it shows."""

    field: str
    meaning: str

    @property
    def title(self) -> str:
        """The number's name with its unit."""
        return self.field.replace("_bytes", " MiB").replace("_seconds", " s").replace("_", " ")

    def text(self, row: Result) -> str:
        """What stands in the column; a dash where nothing was measured, such as seconds out of a shared prefill."""
        value = getattr(row, self.field)
        if self.field.endswith("_bytes"):
            return number(None if value is None else value / 2**20, ",.3f")
        return number(value, ",.1f" if self.field.endswith("_tokens") else ".3f")


def costs(rows: Sequence[Result]) -> list[Cost]:
    """The measured numbers that some run has, those of the full cache and shares aside."""
    found = [one for one in fields(Numbers) if not one.name.startswith("full_") and not one.name.endswith("_share")]
    given = [one for one in found if any(getattr(row, one.name) is not None for row in rows)]
    return [Cost(one.name, one.metadata["meaning"]) for one in given]


@dataclass(frozen=True)
class Square:
    """A score in the matrix. place: in its column among policies of the same budget, schedule and decoding rule."""

    text: str
    value: float | None
    place: str
    title: str


@dataclass(frozen=True)
class MatrixRow:
    """A policy at a budget: a square for every task, and their plain mean where none is missing."""

    entry: Result
    squares: tuple[Square | None, ...]
    mean: float | None


@dataclass(frozen=True)
class Matrix:
    """Scores of one model, task by task; runs of several tasks are taken apart."""

    model: str
    tasks: tuple[str, ...]
    rows: tuple[MatrixRow, ...]
    notes: tuple[str, ...]


def matrices(entries: Sequence[Result]) -> list[Matrix]:
    """One matrix per model with at least two tasks that have scores."""
    parts = [entry for entry in by_task(entries) if not entry.reads]
    places = standings(parts)
    found = []
    for model in dict.fromkeys(entry.model for entry in parts):
        own = [entry for entry in parts if entry.model == model]
        tasks = tuple(dict.fromkeys(entry.task for entry in own))
        if len(tasks) > 1:
            found.append(_matrix(model, tasks, own, places))
    return found


def _matrix(model: str, tasks: Sequence[str], entries: Sequence[Result], places: Mapping[Result, Standing]) -> Matrix:
    rows: dict[tuple[str, int | float | None], dict[str, Result]] = {}
    for entry in entries:
        rows.setdefault((entry.line, entry.budget), {}).setdefault(entry.task, entry)
    lines = [_matrix_row(by_name, tasks, places) for by_name in rows.values()]
    lines.sort(key=lambda row: (budget_order(row.entry.budget), not row.entry.is_full))
    return Matrix(model, tuple(tasks), tuple(lines), tuple(unlike(entries)))


def _matrix_row(own: Mapping[str, Result], tasks: Sequence[str], places: Mapping[Result, Standing]) -> MatrixRow:
    squares = tuple(None if task not in own else _square(own[task], places[own[task]]) for task in tasks)
    values = [square.value for square in squares if square is not None and square.value is not None]
    mean = fmean(values) if len(values) == len(tasks) else None
    return MatrixRow(next(iter(own.values())), squares, mean)


def _square(entry: Result, standing: Standing) -> Square:
    if entry.value is None:
        return Square("failed", None, "", f"{entry.n_failed} of {entry.n} examples failed")
    between = "" if entry.ends is None else f", {entry.ends[0]:.3f} to {entry.ends[1]:.3f}"
    title = f"{entry.line}, budget {budget_words(entry.budget)}, {entry.task}: {entry.value:.3f}{between}"
    title += f", {entry.n} examples" + (f"; {said(standing)}" if standing.difference else "")
    return Square(f"{entry.value:.2f}", entry.value, standing.place, title)


def amount(nbytes: float | None) -> str:
    """Bytes in a unit that suits them."""
    if nbytes is None:
        return NOTHING
    unit, size = byte_unit(nbytes)
    return f"{nbytes / size:,.4g} {unit}"


def number(value: float | None, how: str) -> str:
    """A number, or a dash."""
    return NOTHING if value is None else f"{value:{how}}"
