"""From numbers to verdicts: sign test, interval over cells, Holm's correction, examples needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import NormalDist, fmean

from scipy.special import bdtr

from kvbench.analysis.statistics import CONFIDENCE, FEWEST, mean_interval
from kvbench.papers.claims.claim import Claim, Evidence, Verdict

POWER = 0.8
ALPHA = 1 - CONFIDENCE


@dataclass(frozen=True)
class Printed:
    """What the published numbers say of a claim.

    p: two-sided sign test over cells without ties. low, high: 95% interval of the mean gain over cells, None for fewer
    than `FEWEST`. Cells of a paper share models, prompts and the authors' choice of what to print, so both are a
    description of its tables and no proof. against: the cells that contradict, worst first.
    """

    verdict: Verdict
    evidence: Evidence
    supports: int = 0
    ties: int = 0
    p: float | None = None
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    against: tuple[str, ...] = ()
    needed: int | None = None


def judge_print(claim: Claim) -> Printed:
    """The verdict on the published numbers (or on what our code computes), with the numbers it rests on."""
    evidence = claim.source.evidence()
    cells = evidence.cells
    if not cells:
        return Printed("no data", evidence)
    gains = [cell.gain for cell in cells]
    supports, contradicts = (sum(cell.sign == sign for cell in cells) for sign in (1, -1))
    interval = mean_interval(gains) if len(gains) >= FEWEST and len(set(gains)) > 1 else None
    worst = sorted((cell for cell in cells if cell.sign < 0), key=lambda cell: cell.gain - cell.least)
    found = Printed(
        verdict="cannot be told",
        evidence=evidence,
        supports=supports,
        ties=len(cells) - supports - contradicts,
        p=sign_test(supports, contradicts),
        mean=fmean(gains),
        low=None if interval is None else interval.low,
        high=None if interval is None else interval.high,
        against=tuple(f"{cell.where} {cell.gain:+.4g}" for cell in worst),
    )
    return _with_verdict(claim, found)


def _with_verdict(claim: Claim, found: Printed) -> Printed:
    cells = found.evidence.cells
    contradicts = len(found.against)
    if claim.says == "every":
        verdict: Verdict = "fails" if contradicts else "holds" if found.supports else "cannot be told"
    elif claim.says == "most":
        told = found.p is not None and found.p < ALPHA
        verdict = "cannot be told" if not told else "holds" if 2 * found.supports > len(cells) else "fails"
    else:
        verdict = _of_interval(found.low, found.high, cells[0].least)
    needed = None
    if claim.says == "average" and verdict == "cannot be told":
        assert found.mean is not None
        needed = examples_needed(_spread([cell.gain for cell in cells]), found.mean - cells[0].least)
    return Printed(**{**vars(found), "verdict": verdict, "needed": needed})


def _of_interval(low: float | None, high: float | None, least: float) -> Verdict:
    if low is None or high is None:
        return "cannot be told"
    return "holds" if low > least else "fails" if high < least else "cannot be told"


def _spread(values: Sequence[float]) -> float:
    mean = fmean(values)
    return float((sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1)) ** 0.5)


def sign_test(supports: int, contradicts: int) -> float | None:
    """Two-sided exact p of so uneven a split if either sign were as likely; None without any cell that has one."""
    n = supports + contradicts
    return None if n == 0 else min(1.0, 2 * float(bdtr(min(supports, contradicts), n, 0.5)))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values of one family, adjusted so that at most 5% of families have any false claim at 0.05, in the same order.

    Source: Holm 1979: the k-th smallest of m is multiplied by m - k + 1, and none is below one before it.
    """
    adjusted = [0.0] * len(p_values)
    least = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = least
    return adjusted


def examples_needed(spread: float, effect: float, family: int = 1) -> int | None:
    """Examples for which a mean difference of `effect` is seen in 80% of studies; None where there is nothing to see.

    spread: standard deviation of the difference per example. family: comparisons of which this is one; each is tested
    at 0.05 / family, the strictest step of Holm's. Normal approximation: n = ((z_(1-a/2) + z_0.8) spread / effect)^2.
    """
    if effect == 0:
        return None
    z = NormalDist()
    units = (z.inv_cdf(1 - ALPHA / family / 2) + z.inv_cdf(POWER)) * spread / effect
    return max(FEWEST, ceil(units**2))
