"""Claims of papers (results/paper/<paper>/claims.yaml), decided from finished runs.

A claim contains pairs of policies and the fields of their runs: model, task, budgets and others. It is decided by the
paired difference of every pair at every budget on the same examples, computed as in tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import NormalDist
from typing import Any

from kvbench.config.compose import load
from kvbench.errors import UsageError, unknown
from kvbench.papers.matching import Runs
from kvbench.papers.protocol import SCHEDULE, Plan
from kvbench.papers.published import BASELINE, FOLDER
from kvbench.results.pairs import paired
from kvbench.results.result import Result
from kvbench.results.statistics import ALPHA, CONFIDENCE, FEWEST, Difference, holm

HOLDS, FAILS, UNDECIDED, NO_DATA = "holds", "fails", "cannot be decided", "no data"
PAPERS = ("caote", "cake", "kvec", "d2o", "ott", "today")


@dataclass(frozen=True)
class Claim:
    """A claim: each first policy of `pairs` has a higher score (or a lower NLL) than its baselines.

    runs: the fields of the runs, as in `kvbench`; budget may be a list. gain: the difference in score (0 to
    1; NLL: in nats per token) that must be exceeded; -0.01 allows a loss of one point. each: compare every task of a
    benchmark separately. most: the claim is about more than half of the comparisons instead of all.
    """

    name: str
    claim: str
    source: str
    pairs: Mapping[str, str | Sequence[str]]
    runs: Mapping[str, Any]
    gain: float = 0.0
    each: bool = False
    most: bool = False
    note: str = ""

    def plans(self) -> Iterator[tuple[Plan, Plan]]:
        """The two runs of every comparison."""
        budgets = self.runs.get("budget")
        budgets = budgets if isinstance(budgets, list) else [budgets]
        baselines = {policy: [of] if isinstance(of, str) else of for policy, of in self.pairs.items()}
        for (policy, others), budget in product(baselines.items(), budgets):
            for other in others:
                yield self._plan(policy, budget), self._plan(other, budget)

    def _plan(self, policy: str, budget: int | float | None) -> Plan:
        limit = None if policy == BASELINE else budget
        fields = {k: v for k, v in self.runs.items() if k not in ("model", "task", "budget")}
        settings = {k: v for k, v in fields.items() if policy != BASELINE or k not in SCHEDULE}
        return Plan(self.runs["model"], policy, limit, self.runs["task"], settings)

    @property
    def command(self) -> str:
        """The command that computes the runs."""
        policies = dict.fromkeys(plan.policy for pair in self.plans() for plan in pair)
        words = [f"policy={','.join(policies)}"]
        for key, value in self.runs.items():
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            words.append(f"{key}=[{text}]" if isinstance(value, list) and key != "budget" else f"{key}={text}")
        return f"kvbench -m {' '.join(words)}"


@dataclass(frozen=True)
class ClaimComparison:
    """A difference, positive if it supports the claim, with p after Holm's correction. gain: that of the claim."""

    where: str
    difference: Difference
    gain: float
    p: float = 1.0

    @property
    def sign(self) -> int:
        """1: above the gain, -1: below the gain, 0: not significant."""
        difference = self.difference
        if difference.n < FEWEST or self.p > ALPHA or difference.low <= self.gain <= difference.high:
            return 0
        return 1 if difference.mean > self.gain else -1


@dataclass(frozen=True)
class Verdict:
    """The verdict (holds, fails, cannot be decided, no data) with its comparisons and remarks."""

    claim: Claim
    verdict: str
    comparisons: tuple[ClaimComparison, ...] = ()
    remarks: tuple[str, ...] = field(default=())


def read_claims(source: str | Path, overrides: Mapping[str, Any] | None = None) -> list[Claim]:
    """The claims of a paper (one of PAPERS) or of a YAML file. overrides: replace fields of `runs`.

    Raises UsageError for an invalid file.
    """
    path = FOLDER / source / "claims.yaml" if str(source) in PAPERS else Path(source)
    if not path.is_file():
        raise unknown("paper", str(source), PAPERS, "; or a YAML file of claims")
    try:
        found = [Claim(**given) for given in load(path)["claims"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a valid list of claims ({error})") from error
    return [replace(one, runs={**one.runs, **(overrides or {})}) for one in found]


def decide(claim: Claim, runs: Sequence[Result]) -> Verdict:
    """Decide a claim: it holds where every comparison exceeds the gain, and fails where one is below it.

    The 95% intervals are corrected with Holm's method over the comparisons of the claim. Without runs there is no data;
    some missing runs leave the claim undecided unless it fails.
    """
    known = Runs(runs)
    found: list[ClaimComparison] = []
    remarks: list[str] = []
    missing = 0
    for first, second in claim.plans():
        (run, remark), (other, other_remark) = known.find(first), known.find(second)
        remarks += filter(None, (remark, other_remark))
        if run is None or other is None:
            missing += 1
        elif run.n_failed or other.n_failed:
            missing, remarks = missing + 1, [*remarks, f"examples of {run.run_id} or {other.run_id} failed"]
        elif run.setting != other.setting:
            missing, remarks = missing + 1, [*remarks, f"{run.run_id} and {other.run_id} have different settings"]
        else:
            parts = _parts(run, other) if claim.each else [(run, other)]
            found += [one for pair in parts for one in _compared(claim, *pair)]
    if not found:
        return Verdict(claim, NO_DATA, remarks=(*dict.fromkeys(remarks), f"compute the runs with: {claim.command}"))
    if missing:
        remarks.append(f"runs of {missing} comparisons are missing: {claim.command}")
    return replace(judge(claim, found, missing), remarks=tuple(dict.fromkeys(remarks)))


def judge(claim: Claim, found: Sequence[ClaimComparison], missing: int = 0) -> Verdict:
    """The verdict from some comparisons, whose p are corrected here. missing: number of comparisons without runs."""
    adjusted = holm([_p(one) for one in found])
    comparisons = tuple(replace(one, p=p) for one, p in zip(found, adjusted, strict=True))
    signs = [one.sign for one in comparisons]
    n, holds, fails = len(signs) + missing, signs.count(1), signs.count(-1)
    if not found:
        verdict = NO_DATA
    elif claim.most:
        verdict = HOLDS if 2 * holds > n else FAILS if 2 * fails > n else UNDECIDED
    else:
        verdict = FAILS if fails else HOLDS if holds == n else UNDECIDED
    return Verdict(claim, verdict, comparisons)


def _parts(run: Result, other: Result) -> Iterator[tuple[Result, Result]]:
    """Both runs for each task of a benchmark."""
    others = {part.subset: part for part in other.parts("task")}
    return ((part, others[part.subset]) for part in run.parts("task") if part.subset in others)


def _compared(claim: Claim, run: Result, other: Result) -> Iterator[ClaimComparison]:
    pair = (other, run) if run.measure == "score" else (run, other)  # lower NLL and KL are better
    result = paired(pair[0].outcomes, pair[1].outcomes)
    if result is not None:
        subset = "" if run.subset == "all" else f" {run.subset}"
        budget = "" if run.budget is None else f" at {run.budget}"
        yield ClaimComparison(f"{run.policy} - {other.policy}{budget}{subset}", result.difference, claim.gain)


def _p(one: ClaimComparison) -> float:
    """p of the null hypothesis that the difference is the gain; for a gain other than 0, from the interval's width."""
    difference, normal = one.difference, NormalDist()
    if one.gain == 0:
        return difference.p
    error = (difference.high - difference.low) / (2 * normal.inv_cdf((1 + CONFIDENCE) / 2))
    return 2 * (1 - normal.cdf(abs(difference.mean - one.gain) / max(error, 1e-12)))
