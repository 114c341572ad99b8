"""Verdicts from our runs: every claim's comparisons on the same examples, Holm over all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import sqrt
from statistics import NormalDist, stdev

from kvbench.analysis.result import Result
from kvbench.analysis.statistics import (
    ALPHA,
    CONFIDENCE,
    FEWEST,
    Difference,
    examples_needed,
    holm,
    paired_difference,
    stratified_difference,
)
from kvbench.papers.claims.claim import Claim, Trial, Verdict
from kvbench.papers.claims.inference import Printed
from kvbench.papers.published import BASELINE
from kvbench.records.sample import Sample
from kvbench.tasks.summary import subsets_by

_Z = NormalDist()
RESOLVED = 1e-3  # ten resamples of 10,000
Groups = dict[str, tuple[list[float], list[float]]]
"""By subset: scores of the rival and of the policy on the same examples."""


@dataclass(frozen=True)
class Comparison:
    """A policy less its rival on the same examples of one or more runs, in score (0 to 1) or, of given texts, in nats.

    spread: standard deviation of the difference per example. adjusted: its p after Holm.
    """

    where: str
    difference: Difference
    spread: float
    least: float
    adjusted: float = 1.0

    @property
    def p(self) -> float:
        """Of the gain being `least`: the difference's own where that is 0, else from its interval's width.

        So is one below 0.001 of a bootstrap: 10,000 resamples cannot tell 1e-4 from 1e-9, and in a family of 500 Holm
        would leave nothing of either.
        """
        coarse = "bootstrap" in self.difference.method and self.difference.p < RESOLVED
        if self.least == 0 and not coarse:
            return self.difference.p
        error = (self.difference.high - self.difference.low) / (2 * _Z.inv_cdf((1 + CONFIDENCE) / 2))
        return 2 * (1 - _Z.cdf(abs(self.difference.mean - self.least) / max(error, 1e-12)))

    @property
    def sign(self) -> int:
        """1: shown to reach what is claimed, -1: shown not to, 0: neither."""
        found = self.difference
        if found.n < FEWEST or self.adjusted > ALPHA or found.low <= self.least <= found.high:
            return 0
        return 1 if found.mean > self.least else -1


@dataclass(frozen=True)
class Measured:
    """What our runs say of a claim. needed: examples that would tell, where these do not; for which gain: `effect`."""

    verdict: Verdict
    comparisons: tuple[Comparison, ...] = ()
    needed: int | None = None
    effect: float | None = None
    missing: str = ""


def judge_runs(
    claims: Sequence[tuple[Claim, Printed]], runs: Sequence[Result], any_budget: bool = False
) -> list[Measured]:
    """A verdict per claim; the family that Holm corrects for is every comparison made for any of these claims.

    One that several claims ask for is made once. any_budget: runs of every budget count, not only of the trial's.
    """
    made = []
    for claim, _ in claims:
        trial = claim.trial and (replace(claim.trial, budgets=()) if any_budget else claim.trial)
        made.append(_comparisons(trial, claim, runs) if trial else [])
    family = list(dict.fromkeys(one for several in made for one in several))
    adjusted = dict(zip(family, holm([one.p for one in family]), strict=True))
    found = []
    for (claim, printed), several in zip(claims, made, strict=True):
        judged = tuple(replace(one, adjusted=adjusted[one]) for one in several)
        found.append(_judge(claim, printed, judged, len(family)))
    return found


def _judge(claim: Claim, printed: Printed, comparisons: tuple[Comparison, ...], family: int) -> Measured:
    if not comparisons:
        return Measured("no data", missing=_missing(claim))
    shown, refuted = (sum(one.sign == sign for one in comparisons) for sign in (1, -1))
    n = len(comparisons)
    if claim.says == "most":
        verdict: Verdict = "holds" if 2 * shown > n else "fails" if 2 * refuted > n else "cannot be told"
    else:
        verdict = "fails" if refuted else "holds" if shown == n else "cannot be told"
    if verdict != "cannot be told":
        return Measured(verdict, comparisons)
    effects = [(one, _effect(claim, printed, one)) for one in comparisons if one.sign == 0]
    needs = [(examples_needed(one.spread, effect, family), effect) for one, effect in effects]
    needed, effect = max(((n, e) for n, e in needs if n is not None), default=(None, None))
    return Measured(verdict, comparisons, needed, effect)


def _missing(claim: Claim) -> str:
    if claim.trial is not None:
        return f"no such runs: {claim.trial.command}"
    return f"not decided by runs: {claim.elsewhere}" if claim.elsewhere else "not decided by runs"


def _effect(claim: Claim, printed: Printed, one: Comparison) -> float:
    """The gain to be seen: the published one where it is in points or accuracy and on the claimed side, else ours."""
    scale = {"points": 0.01, "accuracy": 1.0}.get(claim.source.unit)
    if scale is not None and printed.mean is not None and printed.mean * scale > one.least:
        return printed.mean * scale - one.least
    return one.difference.mean - one.least


def _comparisons(trial: Trial, claim: Claim, runs: Sequence[Result]) -> list[Comparison]:
    """All that a trial compares in these runs; one over everything where the claim is about the mean."""
    found: list[tuple[str, Groups]] = []
    for policy, rival in trial.pairs:
        matched = list(_matched(trial, policy, rival, runs))
        found += (
            _falls(matched)
            if trial.falling
            else [(_label(run, rival, trial.factor), groups) for run, groups in matched]
        )
    if trial.apart:
        found = [
            (f"{where} {subset}".rstrip(), {subset: both}) for where, all_ in found for subset, both in all_.items()
        ]
    if claim.says == "average" and len(found) > 1:
        found = [(f"{len(found)} comparisons together", {f"{w} {s}": b for w, g in found for s, b in g.items()})]
    return [_compare(where, groups, trial.least) for where, groups in found]


def _matched(trial: Trial, policy: str, rival: str, runs: Sequence[Result]) -> Iterator[tuple[Result, Groups]]:
    """Runs of the policy with the examples they share with the rival's run of the same kind."""
    for run in runs:
        if _ran(run, policy) and (not trial.budgets or run.budget in trial.budgets):
            other = next((other for other in runs if _ran(other, rival) and _alike(run, other)), None)
            if other is not None and (groups := _groups(other, run, trial.factor)):
                yield run, groups


def _ran(run: Result, policy: str) -> bool:
    """Whether a run is one of the policy as its preset has it; when it evicts may be otherwise."""
    changed = () if run.naming is None else run.naming.changed
    return run.slug == policy and all(key.startswith("policy.schedule") for key in changed if key.startswith("policy."))


def _alike(run: Result, other: Result) -> bool:
    """Same model, task, seed and generation; same budget and schedule too, which the full cache does not have."""
    if run.setting != other.setting:
        return False
    if other.slug == BASELINE:
        return True
    schedules = [one.identity["policy"].get("schedule") for one in (run, other)]
    return run.budget == other.budget and schedules[0] == schedules[1]


def _groups(rival: Result, run: Result, factor: float) -> Groups:
    """Pairs of scores by subset, the rival's times `factor`; {} where any example of either failed."""
    groups: Groups = {}
    for theirs, ours in zip(rival.samples, run.samples, strict=False):
        first, second = _value(theirs), _value(ours)
        if first is None or second is None:
            return {}
        if theirs.prompt_hash == ours.prompt_hash:
            key = subsets_by([ours])
            both = groups.setdefault("" if key is None else str(ours.metadata.get(key, "")), ([], []))
            both[0].append(factor * first)
            both[1].append(second)
    return groups


def _value(sample: Sample) -> float | None:
    """Higher is better: the score, or minus the nats per token of a given text."""
    return sample.score if sample.likelihood is None else -sample.likelihood.nll


def _falls(matched: list[tuple[Result, Groups]]) -> list[tuple[str, Groups]]:
    """Gains at a budget against gains at the next larger one, on the same examples."""
    found = []
    by_size = sorted(matched, key=lambda pair: (*pair[0].setting, pair[0].budget))
    for (small, low), (large, high) in pairwise(by_size):
        sizes = [{key: len(both[0]) for key, both in groups.items()} for groups in (low, high)]
        if small.setting == large.setting and sizes[0] == sizes[1]:
            where = f"{_label(small, 'gain')} to {large.budget}"
            found.append((where, {key: (_gains(high[key]), _gains(low[key])) for key in low}))
    return found


def _gains(both: tuple[list[float], list[float]]) -> list[float]:
    return [second - first for first, second in zip(*both, strict=True)]


def _label(run: Result, rival: str, factor: float = 1.0) -> str:
    budget = "" if run.budget is None else f" at {run.budget}"
    times = "" if factor == 1 else f"{factor:g} * "
    return f"{run.model}, {run.task}{budget}: {run.slug} - {times}{rival}"


def _compare(where: str, groups: Groups, least: float) -> Comparison:
    """One group, or one too small to be resampled by itself: all examples weigh the same; else all groups do."""
    firsts, seconds = ([both[side] for both in groups.values()] for side in (0, 1))
    if len(groups) > 1 and min(map(len, firsts)) > 1:
        difference = stratified_difference(firsts, seconds)
        spread = _spread(difference)
    else:
        first, second = ([value for group in side for value in group] for side in (firsts, seconds))
        difference = paired_difference(first, second)
        gains = _gains((first, second))
        spread = (stdev(gains) if len(gains) > 1 else 0.0) or _spread(difference)
    return Comparison(where, difference, spread, least)


def _spread(difference: Difference) -> float:
    """Per example, from the interval's width: for means of groups, and where all examples agree so far."""
    return (difference.high - difference.low) / (2 * _Z.inv_cdf((1 + CONFIDENCE) / 2)) * sqrt(difference.n)
