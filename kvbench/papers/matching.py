"""Which of our runs is about a published number, and what it measured in the paper's unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf
from statistics import fmean
from typing import Any

from kvbench.analysis.result import Result
from kvbench.analysis.statistics import stratified_interval
from kvbench.identity.labels import compressed
from kvbench.papers.protocol import SCHEDULE, Plan
from kvbench.papers.published import BASELINE
from kvbench.tasks.summary import summary

DATA = "task.data_dir"  # where the paper's own data lie on this machine
Key = tuple[str, str, int | float | None, str]
SUITES = {"longbench": "longbench_", "longbench_e": "longbench_", "ruler": "ruler_", "ruler_13": "ruler_"}
"""Runs of several tasks in turn, and what stands before the name of a task that runs alone."""


@dataclass(frozen=True)
class Measured:
    """Our value of a published number, in its unit, with its 95% interval where there is one.

    n: examples. kept, nbytes: mean tokens per layer and KV head, and bytes, held at the end of an example.
    """

    value: float
    low: float | None
    high: float | None
    n: int
    kept: float
    nbytes: float


class Runs:
    """Finished runs, by what they are about. Runs of several tasks are also about each of them."""

    def __init__(self, runs: Sequence[Result]) -> None:
        self._by_key: dict[Key, list[Result]] = {}
        for run in runs:
            prefix = SUITES.get(_preset(run, "task"))
            self._add(run, run_task(run))
            for part in run.parts("task") if prefix else []:
                self._add(part, f"{prefix}{part.subset.partition('=')[2]}")

    def _add(self, run: Result, task: str) -> None:
        self._by_key.setdefault((_preset(run, "model"), run.slug, run.budget, task), []).append(run)

    def find(self, plan: Plan) -> tuple[Result | None, str]:
        """The run with most examples that was made as planned, and a remark where others are another experiment."""
        found = self._by_key.get((plan.model, plan.policy, plan.budget, plan_task(plan)), [])
        wrong = [differences(plan, run.identity, () if run.naming is None else run.naming.changed) for run in found]
        fit = [run for run, other in zip(found, wrong, strict=True) if not other]
        others = "; one with ".join(sorted({", ".join(other) for other in wrong}))
        remark = f"not shown, another experiment: a run with {others}" if others and not fit else ""
        return max(fit, key=lambda run: len(run.samples), default=None), remark


def run_task(run: Result) -> str:
    """The task of a run as `plan_task` names it."""
    task = run.identity["task"]
    return f"lm_eval/{task['task']}" if "lm_eval" in str(task.get("class")) else _preset(run, "task")


def _preset(run: Result, what: str) -> str:
    """The preset of a run's model or task; names in tables also tell changed fields: `niah(length=512)`."""
    chosen = getattr(run if run.naming is None else run.naming, what)
    return str(chosen).partition(" ")[0].partition("(")[0]


def plan_task(plan: Plan) -> str:
    """The name that a run of the planned task has: that of its file in conf/task."""
    return plan.task if plan.task.startswith("lm_eval/") else plan.task.replace("/", "_")


def differences(plan: Plan, identity: Mapping[str, Any], changed: Sequence[str] = ()) -> list[str]:
    """Settings of a run that are not as planned, as `field=value`; papers compress prompts, questions included.

    changed: fields that are not as the presets have them.
    """
    asked = {"compress": "prompt", **plan.settings}
    found = {key: _recorded(key, identity) for key in asked}
    found = {key: value for key, value in found.items() if not _same(value, asked[key])}
    strangers = [key for key in changed if key not in asked and not _asked_for(key, plan)]
    return [f"{key}={value}" for key, value in (found | {key: _recorded(key, identity) for key in strangers}).items()]


def _asked_for(key: str, plan: Plan) -> bool:
    """Whether a changed field of a run is one that the plan sets, or one that leaves it the same experiment."""
    if key.startswith("policy.schedule"):  # which means nothing to a policy that evicts nothing
        return plan.policy == BASELINE or bool({*SCHEDULE} & {*plan.settings})
    return key in plan.settings or key == DATA or key.replace("generation.", "model.") in plan.settings


def _recorded(key: str, identity: Mapping[str, Any]) -> Any:  # noqa: ANN401 - whatever a field holds
    """What a run's identity says of a field of the command line."""
    schedule = identity["policy"].get("schedule") or {}
    if key == "schedule":
        return str(schedule.get("class")).rpartition(".")[2].lower()
    if key == "compress":
        return compressed(identity)
    if key in ("block", "decode"):
        return schedule.get({"block": "size"}.get(key, key))
    if key == "model.max_prompt_tokens":
        return identity["generation"].get("max_prompt_tokens")
    found: Any = identity
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _same(recorded: object, planned: object) -> bool:
    if planned == "inf":
        return recorded in (inf, "inf")
    if isinstance(planned, list) and isinstance(recorded, list):
        return [float(x) for x in recorded] == [float(x) for x in planned]
    return recorded == planned


def measured(plan: Plan, run: Result) -> Measured | str:
    """A run's value of a published number, or a sentence on why it has none."""
    if run.n_failed:
        return f"{run.n_failed} of {run.n} examples of {run.run_id} failed, so that it has no score"
    value, low, high = (None if x is None else plan.times * x for x in _value(plan, run))
    if value is None:
        return f"{run.run_id} has no {plan.measure.removeprefix('official ').replace('_', ' ')}"
    assert run.kept_tokens is not None
    assert run.cache_bytes is not None
    return Measured(value, low, high, run.n, run.kept_tokens, run.cache_bytes)


def _value(plan: Plan, run: Result) -> tuple[float | None, float | None, float | None]:
    """Value and ends of its interval in our unit, None where there is none."""
    if plan.measure.startswith("official "):
        samples = [s for s in run.samples if all(s.metadata.get(k) == v for k, v in plan.only.items())]
        return summary(samples).get(plan.measure.removeprefix("official ")), None, None
    if plan.measure == "score":
        return run.score, run.score_low, run.score_high
    if plan.measure == "perplexity":
        low, high = (None if end is None else exp(end) for end in (run.nll_low, run.nll_high))
        return run.perplexity, low, high
    assert plan.measure == "perplexity_gap", f"unknown measure {plan.measure}"
    return None if run.gap is None else run.gap.perplexity, None, None


def average(plans: Sequence[Plan], runs: Sequence[Result]) -> Measured | str:
    """The plain mean over tasks, each of which weighs the same, with its interval: every task is resampled."""
    found = []
    for plan, run in zip(plans, runs, strict=True):
        one = measured(plan, run)
        if isinstance(one, str):
            return one
        found.append(one)
    low, high = _interval(plans, runs)
    return replace(
        found[0],
        value=fmean(one.value for one in found),
        low=low,
        high=high,
        n=sum(one.n for one in found),
        kept=fmean(one.kept for one in found),
        nbytes=fmean(one.nbytes for one in found),
    )


def _interval(plans: Sequence[Plan], runs: Sequence[Result]) -> tuple[float | None, float | None]:
    """Ends of the 95% interval of a mean of mean scores; none of other measures, and where a task has one example."""
    scores = [[sample.score for sample in run.samples if sample.score is not None] for run in runs]
    if (
        {one.measure for one in plans} != {"score"}
        or len({one.times for one in plans}) > 1
        or min(map(len, scores)) < 2
    ):
        return None, None
    found = stratified_interval(scores)
    return plans[0].times * found.low, plans[0].times * found.high
