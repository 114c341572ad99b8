"""Who stands where: policies at their budgets, ranked by mean score among those that hold no more bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from kvbench.analysis.averages import of_prompts
from kvbench.analysis.result import Result
from kvbench.analysis.statistics import (
    ALPHA,
    FEWEST,
    Difference,
    holm,
    paired_difference,
    stratified_difference,
    stratified_interval,
)
from kvbench.leaderboard.asked import Submission
from kvbench.page.rows import by_task


@dataclass(frozen=True, eq=False)
class Entry:
    """A policy of a submission at one budget: its results by task, and numbers over all of them.

    cache_bytes, share: held, mean over the tasks, and over the full cache's. rival: the best of those that score more
    in as few bytes, or as much in fewer; difference: to it. place: `best` without a rival, `tied` where the examples
    cannot tell the two apart, `worse`; "" for the full cache. alone: in each task by itself.
    """

    submission: Submission
    results: Mapping[str, Result]
    value: float
    ends: tuple[float, float]
    cache_bytes: float
    share: float
    place: str = ""
    rival: Entry | None = None
    difference: Difference | None = None
    alone: Mapping[str, Entry] = field(default_factory=dict)

    @property
    def first(self) -> Result:
        """One of its results: policy, budget and moments are those of all."""
        return next(iter(self.results.values()))


@dataclass(frozen=True)
class Board:
    """The entries of one leaderboard that share model and examples, the best first."""

    experiment: str
    model: str
    weights: str
    tasks: tuple[str, ...]
    entries: tuple[Entry, ...]

    def rank(self, entry: Entry) -> int | None:
        """By the mean score, equal ones alike; None for the full cache."""
        above = sum(other.value > entry.value for other in self.entries if other.place)
        return above + 1 if entry.place else None


def boards(runs: Sequence[tuple[Submission, Result]]) -> list[Board]:
    """A leaderboard for each experiment and model."""
    sections: dict[tuple[str, str, str, str], list[tuple[Submission, Result]]] = {}
    for submission, run in runs:
        key = submission.experiment, run.model, str(run.weights), str(run.identity["dtype"])
        sections.setdefault(key, []).append((submission, run))
    return [_board(key[0], key[1], f"{key[2]}, {key[3]}", own) for key, own in sections.items()]


def _board(experiment: str, model: str, weights: str, runs: Sequence[tuple[Submission, Result]]) -> Board:
    found: dict[tuple[Submission, str, float | None], dict[str, Result]] = {}
    for submission, run in runs:
        for part in by_task([run]):
            found.setdefault((submission, run.line, run.budget), {})[part.task] = part
    entries = [_entry(submission, own) for (submission, *_), own in found.items()]
    tasks = tuple(dict.fromkeys(task for entry in entries for task in entry.results))
    placed = _placed(entries)
    for task in tasks:
        having = [place for place, entry in enumerate(placed) if task in entry.results]
        alone = [_entry(placed[place].submission, {task: placed[place].results[task]}) for place in having]
        for place, one in zip(having, _placed(alone), strict=True):
            placed[place] = replace(placed[place], alone={**placed[place].alone, task: one})
    placed.sort(key=lambda entry: (-entry.value, entry.cache_bytes))
    return Board(experiment, model, weights, tasks, tuple(placed))


def _entry(submission: Submission, results: Mapping[str, Result]) -> Entry:
    rows = list(results.values())
    if len(rows) == 1 and rows[0].ends:
        ends = rows[0].ends
    else:
        interval = stratified_interval([_scores(row) for row in rows])
        ends = interval.low, interval.high
    held = fmean(row.cache_bytes or 0 for row in rows)
    full = fmean((row.full_cache_bytes or 0) + (row.full_position_bytes or 0) for row in rows)
    return Entry(submission, results, fmean(row.value or 0 for row in rows), ends, held, held / full)


def _placed(entries: Sequence[Entry]) -> list[Entry]:
    """The entries with their places: each is compared with the best of those that hold no more, Holm over all."""
    compared: list[tuple[Entry, Entry | None, Difference | None]] = []
    for entry in entries:
        better = [] if entry.first.is_full else [other for other in entries if _beats(other, entry)]
        rival = max(better, key=lambda e: e.value, default=None)
        compared.append((entry, rival, None if rival is None else _compared(rival, entry)))
    adjusted = iter(holm([difference.p for *_, difference in compared if difference is not None]))
    found = []
    for entry, rival, difference in compared:
        told = difference is not None and next(adjusted) < ALPHA and difference.n >= FEWEST
        alone = rival is None and entry.value > 0
        place = "" if entry.first.is_full else "best" if alone else "worse" if told or rival is None else "tied"
        found.append(replace(entry, place=place, rival=rival, difference=difference))
    return found


def _beats(other: Entry, entry: Entry) -> bool:
    more = other.value - entry.value, entry.cache_bytes - other.cache_bytes
    return min(more) >= 0 and max(more) > 0


def _compared(rival: Entry, entry: Entry) -> Difference:
    """Tasks weigh the same, each resampled by itself."""
    first, second = ([_scores(one.results[task]) for task in entry.results] for one in (rival, entry))
    return stratified_difference(first, second) if len(first) > 1 else paired_difference(first[0], second[0])


def _scores(row: Result) -> list[float]:
    return [one.score for one in of_prompts(row.samples) if one.score is not None]
