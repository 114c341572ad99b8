"""The page's tables as rows of words: ranking, cost, scores task by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from kvbench.identity.labels import budget_order, natural
from kvbench.page.entries import NOTHING, Entry, budget_words, by_task
from kvbench.page.ranking import Standing, difference, standings
from kvbench.report.figures.style import byte_unit
from kvbench.report.records import RunRecord
from kvbench.report.table import unlike

MARKS = {"best": "best", "tied": "≈ best", "worse": "", "": ""}
PLACES = ("best", "tied", "worse", "")


@dataclass(frozen=True)
class Forest:
    """Where value, interval and the full cache's value lie on a common scale, in percent of its width."""

    value: float
    low: float
    high: float
    full: float | None


@dataclass(frozen=True)
class Ranked:
    """A row of the ranking. Texts, and the numbers by which columns are sorted."""

    entry: Entry
    place: str
    mark: str
    order: int  # of the mark
    score: str
    interval: str
    when: str
    forest: Forest | None
    vs_full: str
    vs_full_interval: str
    vs_full_mean: float | None
    vs_full_claims: bool
    vs_best: str
    vs_best_mean: float | None
    vs_best_title: str
    kept: str
    used: str
    share: str
    folder: str


def ranking(entries: Sequence[Entry], where: Mapping[Entry, Standing], folder: Path) -> list[Ranked]:
    """One row per run, those of one task beside each other, the best first. folder: where runs are named from."""
    scales = _scales(entries)
    rows = [_ranked(entry, where[entry], scales[entry.model, entry.task], folder) for entry in entries]
    return sorted(rows, key=_order)


def _order(row: Ranked) -> tuple[object, ...]:
    entry = row.entry
    value = entry.value if entry.value is not None else (float("inf") if entry.reads else float("-inf"))
    worse = value if entry.reads else -value
    equal = not entry.is_full, budget_order(entry.budget), entry.schedule, entry.decode, row.order
    return natural(entry.model), natural(entry.task), worse, *equal


def _scales(entries: Sequence[Entry]) -> dict[tuple[str, str], tuple[float, float]]:
    """The ends of every task's scale: 0 to 1 for scores in it, else what the intervals reach."""
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for key in dict.fromkeys((e.model, e.task) for e in entries):
        own = [e for e in entries if (e.model, e.task) == key and e.value is not None]
        ends = [x for e in own for x in (e.value, *(e.interval or ())) if x is not None]
        inside = ends and not own[0].reads and min(ends) >= 0 and max(ends) <= 1
        found[key] = (0.0, 1.0) if inside or not ends else (min(ends), max(ends))
    return found


def _ranked(entry: Entry, standing: Standing, scale: tuple[float, float], folder: Path) -> Ranked:
    numbers = entry.run.metrics
    full = None if entry.is_full or entry.run.baseline is None else difference(entry.run.baseline, entry.run)
    vs_full = None if full is None else full[0]
    vs_best = standing.difference
    mark = "reference" if entry.is_full else MARKS[standing.place]
    return Ranked(
        entry=entry,
        place="reference" if entry.is_full else standing.place,
        mark=mark,
        order=PLACES.index(standing.place),
        score=_number(entry.value, ".3f") if entry.value is not None else f"none: {numbers['n_failed']} failed",
        interval=NOTHING if entry.interval is None else f"{entry.interval[0]:.2f} to {entry.interval[1]:.2f}",
        when=entry.when or NOTHING,
        forest=_forest(entry, scale),
        vs_full=NOTHING if vs_full is None else f"{vs_full.mean:+.3f}",
        vs_full_interval="" if vs_full is None else f"{vs_full.low:+.2f} to {vs_full.high:+.2f}",
        vs_full_mean=None if vs_full is None else vs_full.mean,
        vs_full_claims=vs_full is not None and vs_full.claims,
        vs_best=NOTHING if vs_best is None else f"{vs_best.mean:+.3f}",
        vs_best_mean=None if vs_best is None else vs_best.mean,
        vs_best_title=_said(standing),
        kept=_number(numbers["kept_tokens"], ",.1f"),
        used=amount(entry.used_bytes),
        share=_number(numbers["cache_share"], ".1%"),
        folder=entry.run.folder.relative_to(folder).as_posix(),
    )


def _said(standing: Standing) -> str:
    found = standing.difference
    if found is None:
        return ""
    return (
        f"{found.mean:+.3f} to the best ({found.low:+.3f} to {found.high:+.3f}), p = {standing.p:.3g} after Holm, "
        f"{found.n} examples"
    )


def _forest(entry: Entry, scale: tuple[float, float]) -> Forest | None:
    if entry.value is None:
        return None
    low, high = entry.interval or (entry.value, entry.value)
    base = entry.run.baseline
    full = None if base is None else (base.metrics["likelihood"]["nll"] if entry.reads else base.metrics["score"])
    value, low, high = (_percent(x, scale) for x in (entry.value, low, high))
    return Forest(value, low, high, None if full is None else _percent(full, scale))


def _percent(value: float, scale: tuple[float, float]) -> float:
    width = scale[1] - scale[0]
    return round(min(100.0, max(0.0, 100 * (value - scale[0]) / width if width else 50.0)), 2)


@dataclass(frozen=True)
class Cost:
    """A row of what an example costs: column by column a text and the number it is sorted by."""

    entry: Entry
    cells: tuple[tuple[str, float | None], ...]


COSTS = (
    ("prompt", "tokens of the prompt, mean per example"),
    ("answer", "tokens of the answer, mean per example"),
    ("kept / KV head", "tokens held at the end, mean over layers and KV heads"),
    ("cache MiB", "bytes in use at the end: keys, values, positions, statistics"),
    ("spare MiB", "bytes held at the end in which no token lies"),
    ("peak MiB", "most bytes the cache ever held"),
    ("device peak MiB", "most memory allocated on the device, weights included"),
    ("prefill s", "until the first token is known, evictions included"),
    ("decode s", "all later tokens"),
    ("ms / token", "decode time for each token after the first"),
)
_MIB = 2.0**-20


def costs(entries: Sequence[Entry]) -> tuple[list[tuple[str, str]], list[Cost]]:
    """Columns with their meanings, those that no run has left out, and one row per run.

    What was not measured, such as seconds out of a shared prefill, is a dash.
    """
    found = [_costs(entry.run, entry.used_bytes) for entry in entries]
    told = [i for i in range(len(COSTS)) if any(cells[i][1] is not None for cells in found)]
    rows = [Cost(e, tuple(cells[i] for i in told)) for e, cells in zip(entries, found, strict=True)]
    return [COSTS[i] for i in told], rows


def _costs(run: RunRecord, used: float | None) -> list[tuple[str, float | None]]:
    own = run.metrics
    mib = [own["spare_bytes"], own["peak_bytes"], own["device_peak_bytes"]]
    return [
        _cell(own["prompt_tokens"], ",.0f"),
        _cell(own["generated_tokens"], ",.1f"),
        _cell(own["kept_tokens"], ",.1f"),
        _cell(used, ",.3f", _MIB),
        *(_cell(value, ",.3f", _MIB) for value in mib),
        _cell(own["prefill_seconds"], ".3f"),
        _cell(own["decode_seconds"], ".3f"),
        _cell(own["decode_ms_per_token"], ".2f"),
    ]


def _cell(value: float | None, how: str, scale: float = 1.0) -> tuple[str, float | None]:
    return (NOTHING, None) if value is None else (f"{value * scale:{how}}", value)


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

    entry: Entry
    squares: tuple[Square | None, ...]
    mean: str
    mean_value: float | None


@dataclass(frozen=True)
class Matrix:
    """Scores of one model, task by task; runs of several tasks are taken apart."""

    model: str
    tasks: tuple[str, ...]
    rows: tuple[MatrixRow, ...]
    notes: tuple[str, ...]


def matrices(entries: Sequence[Entry]) -> list[Matrix]:
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


def _matrix(model: str, tasks: Sequence[str], entries: Sequence[Entry], places: Mapping[Entry, Standing]) -> Matrix:
    rows: dict[tuple[str, int | float | None], dict[str, Entry]] = {}
    for entry in entries:
        rows.setdefault((entry.line, entry.budget), {}).setdefault(entry.task, entry)
    lines = [_matrix_row(by_name, tasks, places) for by_name in rows.values()]
    lines.sort(key=lambda row: (budget_order(row.entry.budget), not row.entry.is_full))
    said = unlike([e.run for e in entries if e.schedule])
    return Matrix(model, tuple(tasks), tuple(lines), tuple(said))


def _matrix_row(own: Mapping[str, Entry], tasks: Sequence[str], places: Mapping[Entry, Standing]) -> MatrixRow:
    squares = tuple(None if task not in own else _square(own[task], places[own[task]]) for task in tasks)
    values = [square.value for square in squares if square is not None and square.value is not None]
    mean = fmean(values) if len(values) == len(tasks) else None
    return MatrixRow(next(iter(own.values())), squares, _number(mean, ".3f"), mean)


def _square(entry: Entry, standing: Standing) -> Square:
    numbers = entry.run.metrics
    if entry.value is None:
        return Square("failed", None, "", f"{numbers['n_failed']} of {numbers['n']} examples failed")
    between = "" if entry.interval is None else f", {entry.interval[0]:.3f} to {entry.interval[1]:.3f}"
    title = f"{entry.line}, budget {budget_words(entry.budget)}, {entry.task}: {entry.value:.3f}{between}"
    title += f", {numbers['n']} examples" + (f"; {said}" if (said := _said(standing)) else "")
    return Square(f"{entry.value:.2f}", entry.value, standing.place, title)


def amount(nbytes: float | None) -> str:
    """Bytes in a unit that suits them."""
    if nbytes is None:
        return NOTHING
    unit, size = byte_unit(nbytes)
    return f"{nbytes / size:,.4g} {unit}"


def _number(value: float | None, how: str) -> str:
    return NOTHING if value is None else f"{value:{how}}"
