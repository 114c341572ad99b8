"""The report's tables: runs in comparison groups, policies by tasks, and costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import NamedTuple

from kvbench.report.figures.panels import rank
from kvbench.report.figures.style import byte_unit
from kvbench.results.labels import budget_order, natural
from kvbench.results.metrics import Numbers
from kvbench.results.pairs import paired
from kvbench.results.result import Result
from kvbench.results.statistics import ALPHA, FEWEST, Difference, corrected, holm, smallest_p

NOTHING = "–"
BEST, TIED, FEW, REFERENCE = "best", "≈ best", "n too small to tell", "reference"


@dataclass(frozen=True)
class RowGroup:
    """Runs that are compared with each other: of one model, task, budget, schedule and decoding rule."""

    title: str
    rows: tuple[Result, ...]


def in_order(rows: Iterable[Result]) -> list[Result]:
    """Sorted by model, task, budget and policy."""
    return sorted(
        rows, key=lambda row: (natural(row.model_label), natural(row.task_label), budget_order(row.budget), *rank(row))
    )


def groups(rows: Sequence[Result]) -> list[RowGroup]:
    """The runs in comparison groups, the best first. Runs without eviction are a separate group."""
    found: dict[tuple[object, ...], list[Result]] = {}
    for row in in_order(rows):
        key = (*row.setting, row.task_label, row.budget, row.when, row.measure)
        found.setdefault(key, []).append(row)
    several = len({row.model_label for row in rows}) > 1
    ranked = []
    for group in found.values():
        first = group[0]
        budget = [] if first.budget is None else [f"budget {budget_text(first.budget)}"]
        model = [first.model_label] * several
        title = ", ".join([*model, first.task_label, *budget, first.when or "nothing evicted"])
        ranked.append(RowGroup(title, tuple(sorted(group, key=_badness))))
    return ranked


def _badness(row: Result) -> float:
    return float("inf") if row.value is None else -row.value if row.measure == "score" else row.value


def marks(group: RowGroup) -> dict[Result, str]:
    """Marks the best runs of a group, and the runs that do not differ significantly from them.

    Paired by example, at 5% with Holm's correction over the group. If no number of right answers could differ
    significantly with so few examples, the others are marked as such. Runs with equal values are all the best. No mark
    for a single run, or below 5 shared examples.
    """
    found = {row: REFERENCE for row in group.rows if row.is_full}
    own = [row for row in group.rows if row.value is not None and not row.is_full]
    compared = [(row, pair) for row in own[1:] if (pair := paired(own[0].outcomes, row.outcomes)) is not None]
    if len(own) < 2 or len(compared) < len(own) - 1 or any(pair.difference.n < FEWEST for _, pair in compared):
        return found
    found |= {row: BEST for row in own if row.value == own[0].value}
    if len(compared) * min(smallest_p(pair.difference) for _, pair in compared) > ALPHA:
        return {row: FEW for row, _ in compared} | found
    adjusted = holm([pair.difference.p for _, pair in compared])
    return {row: TIED for (row, _), p in zip(compared, adjusted, strict=True) if p > ALPHA} | found


def to_full(group: RowGroup) -> dict[Result, Difference]:
    """Differences from the full cache, with p corrected for the rows of the group."""
    return corrected({row: row.difference for row in group.rows if row.difference and not row.is_full})


def by_task(rows: Iterable[Result]) -> list[Result]:
    """The rows; a row with examples of several tasks or turns is split into one row for each."""
    found = []
    for row in rows:
        key = next((key for key in ("task", "turn") if any(name.startswith(f"{key}=") for name in row.groups)), None)
        for part in [] if key is None else row.parts(key):
            word = part.subset.partition("=")[2]
            task = f"{row.task_label}: {'turn ' * (key == 'turn')}{word}"
            found.append(replace(part, labels={**row.labels, "task": task}))
        found += [row] if key is None else []
    return found


class Matrix(NamedTuple):
    """Scores of one model: one row for each policy and budget, one column for each task, and their mean."""

    model: str
    tasks: tuple[str, ...]
    rows: list[tuple[Result, list[Result | None], float | None]]


def matrices(rows: Sequence[Result]) -> list[Matrix]:
    """One matrix for each model with scores of at least two tasks. A row has a mean if no task is missing."""
    parts = [row for row in by_task(in_order(rows)) if row.measure == "score"]
    found = []
    for model in dict.fromkeys(row.model_label for row in parts):
        own = [row for row in parts if row.model_label == model]
        tasks = tuple(dict.fromkeys(row.task_label for row in own))
        lines: dict[tuple[str, object], dict[str, Result]] = {}
        for row in own:
            lines.setdefault((row.line, row.budget), {}).setdefault(row.task_label, row)
        body: list[tuple[Result, list[Result | None], float | None]] = []
        for line in sorted(lines.values(), key=lambda line: budget_order(next(iter(line.values())).budget)):
            values = [cell.value for cell in line.values() if cell.value is not None]
            mean = fmean(values) if len(values) == len(tasks) else None
            body.append((next(iter(line.values())), [line.get(task) for task in tasks], mean))
        if len(tasks) > 1:
            found.append(Matrix(model, tasks, body))
    return found


def costs(rows: Sequence[Result]) -> list[tuple[str, str, str]]:
    """Name, title and meaning of the measurements that any run has, without shares and sizes of the full cache."""
    ends = ("_share", "_low", "_high")
    own = [one for one in fields(Numbers) if one.name in vars(Numbers)["__annotations__"]]  # not KL and evidence
    found = [one for one in own if not one.name.startswith("full_") and not one.name.endswith(ends)]
    units = (("_bytes", " MiB"), ("_seconds", " s"), ("_", " "))
    titles = {one.name: one.name for one in found}
    for old, new in units:
        titles = {name: title.replace(old, new) for name, title in titles.items()}
    given = [one for one in found if any(getattr(row, one.name) is not None for row in rows)]
    return [(one.name, titles[one.name], one.metadata["meaning"]) for one in given]


def cost_text(row: Result, name: str) -> str:
    """A measurement of a run, or a dash."""
    value = getattr(row, name)
    if value is not None and name.endswith("_bytes"):
        return f"{value / 2**20:,.3f}"
    return number(value, ",.1f" if name.endswith("_tokens") else ".3f")


def budget_text(budget: int | float | None) -> str:
    """A budget as text: 128, 20%, or a dash."""
    if budget is None:
        return NOTHING
    return f"{100 * budget:g}%" if isinstance(budget, float) and budget < 1 else f"{budget:g}"


def amount(nbytes: float | None) -> str:
    """Bytes with a suitable unit."""
    if nbytes is None:
        return NOTHING
    unit, size = byte_unit(nbytes)
    return f"{nbytes / size:,.4g} {unit}"


def number(value: float | None, how: str) -> str:
    """A number, or a dash."""
    return NOTHING if value is None else f"{value:{how}}"
