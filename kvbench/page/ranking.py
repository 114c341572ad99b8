"""Who is best, and which policies the examples cannot tell from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from kvbench.analysis.pairs import paired
from kvbench.analysis.result import Result
from kvbench.analysis.statistics import ALPHA, FEWEST, Difference, examples_needed, holm

Group = tuple[object, ...]
EFFECT = 0.05  # of the score from 0 to 1: a difference that papers make a point of


@dataclass(frozen=True)
class Standing:
    """Where an entry stands in its group: `best`, `tied` (not distinguishable from the best), `worse`, or "".

    "" for the full cache, for what has no score, and for what has nobody to be compared with. Several are best where
    their values are equal. difference: to the first of them (below 0: worse; NLLs: above 0), None for itself. p:
    adjusted by Holm for the group's other comparisons.
    """

    place: str = ""
    difference: Difference | None = None
    p: float | None = None
    spread: float = 0.0  # standard deviation per example of the difference to the best


def group_of(entry: Result) -> Group:
    """Entries are ranked with each other if they share this: examples, budget, schedule and decoding rule.

    The full cache has neither schedule nor rule: it evicts nothing, answers alike under all of them, and is the
    reference of every group.
    """
    return (*entry.setting, entry.task, entry.budget, entry.when)


def groups(entries: Sequence[Result]) -> dict[Group, list[Result]]:
    """The entries of every group, in order, without the full cache, which is their reference."""
    found: dict[Group, list[Result]] = {}
    for entry in entries:
        if not entry.is_full and entry.value is not None:
            found.setdefault(group_of(entry), []).append(entry)
    return found


def standings(entries: Sequence[Result]) -> dict[Result, Standing]:
    """Where every entry stands among those of its group."""
    found = {entry: Standing() for entry in entries}
    for members in groups(entries).values():
        if len(members) > 1:
            found |= _rank(members)
    return found


def _rank(members: Sequence[Result]) -> dict[Result, Standing]:
    best = min(members, key=_badness)
    others = [entry for entry in members if entry is not best]
    compared = [paired(best.samples, entry.samples) for entry in others]
    adjusted = iter(holm([one.difference.p for one in compared if one is not None]))
    found = {best: Standing("best")}
    for entry, one in zip(others, compared, strict=True):
        if one is None:
            found[entry] = Standing()
            continue
        p = next(adjusted)
        place = "best" if entry.value == best.value else "worse" if p < ALPHA and one.difference.n >= FEWEST else "tied"
        found[entry] = Standing(place, one.difference, p, one.spread)
    return found


def _badness(entry: Result) -> float:
    assert entry.value is not None, "only what has a value is ranked"
    return entry.value if entry.reads else -entry.value


def needed(standing: Standing, others: int) -> int | None:
    """Examples for which a difference of `EFFECT` would be seen in 80% of studies, `others` being compared."""
    return examples_needed(standing.spread, EFFECT, max(1, others)) if standing.spread else None


def half_width(members: Sequence[Result]) -> float:
    """Half of the 95% interval of a group's values, on average; 0 of what has none."""
    return fmean((high - low) / 2 for low, high in (row.ends or (0.0, 0.0) for row in members))
