"""From printed numbers to verdicts: a sign test and an interval over the cells of a claim."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, stdev

from kvbench.analysis.statistics import ALPHA, FEWEST, examples_needed, mean_interval, sign_test
from kvbench.papers.claims.claim import Claim, Evidence, Verdict


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
        spread = stdev(cell.gain for cell in cells) if len(cells) > 1 else 0.0
        needed = examples_needed(spread, found.mean - cells[0].least)
    return Printed(**{**vars(found), "verdict": verdict, "needed": needed})


def _of_interval(low: float | None, high: float | None, least: float) -> Verdict:
    if low is None or high is None:
        return "cannot be told"
    return "holds" if low > least else "fails" if high < least else "cannot be told"
