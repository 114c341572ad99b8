"""Who is best, and which policies the examples cannot tell from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, pvariance

from kvbench.analysis.statistics import FEWEST, Difference, paired_difference
from kvbench.page.entries import Entry
from kvbench.papers.claims.inference import ALPHA, examples_needed, holm
from kvbench.report.records import RunRecord

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


def group_of(entry: Entry) -> Group:
    """What entries share that are ranked with each other: examples, budget, schedule and decoding rule.

    The full cache has neither schedule nor rule: it evicts nothing, answers alike under all of them, and is the
    reference of every group.
    """
    return (*entry.setting, entry.budget, entry.schedule, entry.decode)


def groups(entries: Sequence[Entry]) -> dict[Group, list[Entry]]:
    """The entries of every group, in order, without the full cache, which is their reference."""
    found: dict[Group, list[Entry]] = {}
    for entry in entries:
        if not entry.is_full and entry.value is not None:
            found.setdefault(group_of(entry), []).append(entry)
    return found


def standings(entries: Sequence[Entry]) -> dict[Entry, Standing]:
    """Where every entry stands among those of its group."""
    found = {entry: Standing() for entry in entries}
    for members in groups(entries).values():
        if len(members) > 1:
            found |= _rank(members)
    return found


def _rank(members: Sequence[Entry]) -> dict[Entry, Standing]:
    best = min(members, key=_badness)
    others = [entry for entry in members if entry is not best]
    compared = [difference(best.run, entry.run) for entry in others]
    known = [one for one in compared if one is not None]
    adjusted = iter(holm([one.p for one, _ in known]))
    found = {best: Standing("best")}
    for entry, one in zip(others, compared, strict=True):
        if one is None:
            found[entry] = Standing()
            continue
        p = next(adjusted)
        place = "best" if entry.value == best.value else "worse" if p < ALPHA and one[0].n >= FEWEST else "tied"
        found[entry] = Standing(place, one[0], p, one[1])
    return found


def _badness(entry: Entry) -> float:
    assert entry.value is not None, "only what has a value is ranked"
    return entry.value if entry.reads else -entry.value


def difference(first: RunRecord, second: RunRecord) -> tuple[Difference, float] | None:
    """How much higher `second` scores (or its NLL is) on the examples both have, and its spread; None without any."""
    pairs = [(a, b) for a, b in zip(first.samples, second.samples, strict=False) if a.prompt_hash == b.prompt_hash]
    read = [(a.likelihood, b.likelihood) for a, b in pairs if a.likelihood and b.likelihood]
    if read:
        ours, theirs = [b.nll for _, b in read], [a.nll for a, _ in read]
        weights = [float(b.tokens) for _, b in read]
        return paired_difference(theirs, ours, weights=weights), _spread(theirs, ours)
    scored = [(a.score, b.score) for a, b in pairs if a.score is not None and b.score is not None]
    if not scored:
        return None
    theirs, ours = [a for a, _ in scored], [b for _, b in scored]
    return paired_difference(theirs, ours), _spread(theirs, ours)


def _spread(first: Sequence[float], second: Sequence[float]) -> float:
    return sqrt(pvariance([b - a for a, b in zip(first, second, strict=True)]))


def needed(standing: Standing, others: int) -> int | None:
    """Examples for which a difference of `EFFECT` would be seen in 80% of studies, `others` being compared."""
    return examples_needed(standing.spread, EFFECT, max(1, others)) if standing.spread else None


def half_width(entry: Entry) -> float:
    """Half of the 95% interval of an entry's value; 0 without one."""
    return 0.0 if entry.interval is None else (entry.interval[1] - entry.interval[0]) / 2


def widest(members: Sequence[Entry]) -> float:
    """The mean half width of a group's intervals."""
    return fmean(map(half_width, members))
