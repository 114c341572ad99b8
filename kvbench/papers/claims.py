"""Claims as data, each decided from finished runs: results/paper/<paper>/claims.yaml.

A claim names pairs of policies and the runs of both: model, task, budgets and further fields. It is decided by the
paired difference of every pair at every budget, on the same examples, as tables compute it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import NormalDist
from typing import Any

from kvbench.analysis.pairs import paired
from kvbench.analysis.result import Result
from kvbench.analysis.statistics import ALPHA, CONFIDENCE, FEWEST, Difference, holm
from kvbench.config.tree import load
from kvbench.papers.matching import Runs
from kvbench.papers.protocol import SCHEDULE, Plan
from kvbench.papers.published import BASELINE, FOLDER
from kvbench.terminal.errors import UsageError

HOLDS, FAILS, UNDECIDED, NO_DATA = "holds", "fails", "cannot be decided", "no data"
PAPERS = ("caote", "cake", "kvec", "d2o", "ott", "today")


@dataclass(frozen=True)
class Claim:
    """A claim: each first policy of `pairs` scores higher (of given texts: predicts better) than its rivals.

    runs: the fields of both runs, as `python -m kvbench` takes them; budget may be a list. gain: the difference in
    score (0 to 1; of given texts in nats per token) that must be exceeded; -0.01: it loses at most a point. each: every
    task of a benchmark is compared by itself. most: the claim is about more than half of the comparisons, not all.
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
        rivals = {policy: [of] if isinstance(of, str) else of for policy, of in self.pairs.items()}
        for (policy, others), budget in product(rivals.items(), budgets):
            for rival in others:
                yield self._plan(policy, budget), self._plan(rival, budget)

    def _plan(self, policy: str, budget: int | float | None) -> Plan:
        own = None if policy == BASELINE else budget
        fields = {k: v for k, v in self.runs.items() if k not in ("model", "task", "budget")}
        settings = {k: v for k, v in fields.items() if policy != BASELINE or k not in SCHEDULE}
        return Plan(self.runs["model"], policy, own, self.runs["task"], settings)

    @property
    def command(self) -> str:
        """The command that makes the runs."""
        policies = dict.fromkeys(plan.policy for pair in self.plans() for plan in pair)
        words = [f"policy={','.join(policies)}"]
        for key, value in self.runs.items():
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            words.append(f"{key}=[{text}]" if isinstance(value, list) and key != "budget" else f"{key}={text}")
        return f"python -m kvbench -m {' '.join(words)}"


@dataclass(frozen=True)
class Comparison:
    """A difference in favour of the claim, with its p after Holm's correction; gain: what the claim needs."""

    where: str
    difference: Difference
    gain: float
    p: float = 1.0

    @property
    def sign(self) -> int:
        """1: exceeds the gain, -1: is below it, 0: the examples do not decide."""
        found = self.difference
        if found.n < FEWEST or self.p > ALPHA or found.low <= self.gain <= found.high:
            return 0
        return 1 if found.mean > self.gain else -1


@dataclass(frozen=True)
class Verdict:
    """holds, fails, cannot be decided, or no data; with the comparisons it follows from and remarks."""

    claim: Claim
    verdict: str
    comparisons: tuple[Comparison, ...] = ()
    remarks: tuple[str, ...] = field(default=())


def read_claims(source: str | Path, overrides: Mapping[str, Any] | None = None) -> list[Claim]:
    """The claims of a paper (one of PAPERS) or of a YAML file. overrides: fields of `runs` with other values.

    Raises UsageError for a file that is no list of claims.
    """
    path = FOLDER / source / "claims.yaml" if str(source) in PAPERS else Path(source)
    try:
        found = [Claim(**given) for given in load(path)["claims"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} holds no list of claims ({error})") from error
    return [replace(one, runs={**one.runs, **(overrides or {})}) for one in found]


def decide(claim: Claim, runs: Sequence[Result]) -> Verdict:
    """Decide a claim: it holds where every comparison exceeds the gain, and fails where one is below it.

    The 95% intervals are corrected with Holm's method over the comparisons of the claim. Without runs there is no data;
    some missing runs leave the claim undecided unless it fails.
    """
    known = Runs(runs)
    found: list[Comparison] = []
    remarks: list[str] = []
    missing = 0
    for first, second in claim.plans():
        (own, why), (rival, why_not) = known.find(first), known.find(second)
        remarks += filter(None, (why, why_not))
        if own is None or rival is None:
            missing += 1
        elif own.n_failed or rival.n_failed:
            missing, remarks = missing + 1, [*remarks, f"examples of {own.run_id} or {rival.run_id} failed"]
        elif own.setting != rival.setting:
            missing, remarks = missing + 1, [*remarks, f"{own.run_id} and {rival.run_id} have other settings"]
        else:
            parts = _parts(own, rival) if claim.each else [(own, rival)]
            found += [one for pair in parts for one in _compared(claim, *pair)]
    if not found:
        return Verdict(claim, NO_DATA, remarks=(*dict.fromkeys(remarks), f"make the runs with: {claim.command}"))
    adjusted = holm([_p(one) for one in found])
    comparisons = tuple(replace(one, p=p) for one, p in zip(found, adjusted, strict=True))
    signs = [one.sign for one in comparisons]
    n, holds, fails = len(signs) + missing, signs.count(1), signs.count(-1)
    if claim.most:
        verdict = HOLDS if 2 * holds > n else FAILS if 2 * fails > n else UNDECIDED
    else:
        verdict = FAILS if fails else HOLDS if holds == n else UNDECIDED
    if missing:
        remarks.append(f"runs of {missing} comparisons are missing: {claim.command}")
    return Verdict(claim, verdict, comparisons, tuple(dict.fromkeys(remarks)))


def _parts(own: Result, rival: Result) -> Iterator[tuple[Result, Result]]:
    """Both runs for each task of a benchmark."""
    rivals = {part.subset: part for part in rival.parts("task")}
    return ((part, rivals[part.subset]) for part in own.parts("task") if part.subset in rivals)


def _compared(claim: Claim, own: Result, rival: Result) -> Iterator[Comparison]:
    pair = (own, rival) if own.reads else (rival, own)  # lower NLL is better
    found = paired(pair[0].samples, pair[1].samples)
    if found is not None:
        subset = "" if own.subset == "all" else f" {own.subset}"
        budget = "" if own.budget is None else f" at {own.budget}"
        yield Comparison(f"{own.slug} - {rival.slug}{budget}{subset}", found.difference, claim.gain)


def _p(one: Comparison) -> float:
    """p of the difference being the gain; for a gain other than 0 from the width of the interval."""
    found, normal = one.difference, NormalDist()
    if one.gain == 0:
        return found.p
    error = (found.high - found.low) / (2 * normal.inv_cdf((1 + CONFIDENCE) / 2))
    return 2 * (1 - normal.cdf(abs(found.mean - one.gain) / max(error, 1e-12)))
