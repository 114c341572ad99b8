"""Finds the finished run of a planned number, and its value in the unit of the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf
from statistics import fmean
from typing import Any

from kvbench.errors import counted
from kvbench.papers.protocol import SCHEDULE, Plan
from kvbench.papers.published import BASELINE
from kvbench.results.labels import compressed
from kvbench.results.result import Result
from kvbench.results.statistics import stratified_interval
from kvbench.tasks.scores import summary

IGNORED = ("task.data_dir", "task.path", "dtype")  # local paths, and the precision
SCHEDULE_FIELDS = {"size": "block", "class": "schedule"}  # names of the identity -> fields of the command line
SUITES = {"longbench": "longbench_", "longbench_e": "longbench_", "ruler": "ruler_", "ruler_13": "ruler_"}
"""Tasks that consist of several tasks, and the name prefix of a single one."""


@dataclass(frozen=True)
class Measured:
    """The measured value of a published number in its unit, with its 95% interval or None.

    n: examples. kept, nbytes: mean tokens per layer and KV head, and mean bytes, held at the end of an example.
    """

    value: float
    low: float | None
    high: float | None
    n: int
    kept: float
    nbytes: float


class Runs:
    """Finished runs by model, policy, budget and task; a run of several tasks is also found by each of them."""

    def __init__(self, runs: Sequence[Result]) -> None:
        self._by_key: dict[tuple[object, ...], list[Result]] = {}
        for run in runs:
            prefix = SUITES.get(_plain(run.naming.task))
            self._add(run, run_task(run))
            for part in run.parts("task") if prefix else []:
                self._add(part, f"{prefix}{part.subset.partition('=')[2]}")

    def _add(self, run: Result, task: str) -> None:
        self._by_key.setdefault((_plain(run.naming.model), run.policy, run.budget, task), []).append(run)

    def find(self, plan: Plan) -> tuple[Result | None, str]:
        """The run of a plan with the most examples, or None and a remark about runs with different settings."""
        found = self._by_key.get((plan.model, plan.policy, plan.budget, plan_task(plan)), [])
        differ = [differences(plan, run.identity, run.naming.changed) for run in found]
        fit = [run for run, other in zip(found, differ, strict=True) if not other]
        others = "; a run with ".join(sorted({", ".join(other) for other in differ}))
        remark = f"not the planned run: a run with {others}" if others and not fit else ""
        return max(fit, key=lambda run: len(run.samples), default=None), remark


def run_task(run: Result) -> str:
    """The task name of a run, comparable with `plan_task`."""
    task = run.identity["task"]
    return f"lm_eval/{task['task']}" if "lm_eval" in str(task.get("class")) else _plain(run.naming.task)


def _plain(name: str) -> str:
    """A name without the fields after it: `niah` of `niah(length=512)`."""
    return str(name).partition(" ")[0].partition("(")[0]


def plan_task(plan: Plan) -> str:
    """The name of the task in results: that of its file in conf/task."""
    return plan.task if plan.task.startswith("lm_eval/") else plan.task.replace("/", "_")


def differences(plan: Plan, identity: Mapping[str, Any], changed: Sequence[str] = ()) -> list[str]:
    """The settings of a run that differ from the plan, as `field=value`.

    changed: the fields that differ from the presets. A plan without `compress` compresses the whole prompt.
    """
    planned = {"compress": "prompt", **plan.settings}
    found = {key: _recorded(key, identity) for key in planned}
    found = {key: value for key, value in found.items() if not _same(value, planned[key])}
    more = {key: _recorded(key, identity) for key in changed if not _is_planned(key, plan)}
    return [f"{key}={value}" for key, value in (found | more).items()]


def _is_planned(key: str, plan: Plan) -> bool:
    """Whether a run of the plan may differ from its preset in a field of the identity."""
    if key.startswith("policy.schedule"):
        name = key.removeprefix("policy.schedule").lstrip(".") or "schedule"
        name = SCHEDULE_FIELDS.get(name, name)
        replaced = name in SCHEDULE[3:] and plan.settings.get("decode") == "grow"  # grow has no `every` or `protect`
        blocks = name in ("schedule", "block") and {"schedule", "block"} & {*plan.settings}
        return bool(plan.policy == BASELINE or name in plan.settings or replaced or blocks)
    return key in plan.settings or key in IGNORED or key.replace("generation.", "model.") in plan.settings


def _recorded(key: str, identity: Mapping[str, Any]) -> Any:  # noqa: ANN401 - whatever a field holds
    """The value in a run's identity for a field of the command line."""
    schedule = identity["policy"].get("schedule") or {}
    if key == "schedule":
        return str(schedule.get("class")).rpartition(".")[2].lower()
    if key == "compress":
        return compressed(identity)
    if key in SCHEDULE:
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
        return [*map(str, map(float, recorded))] == [*map(str, map(float, planned))]
    return recorded == planned


def measured(plan: Plan, run: Result) -> Measured | str:
    """The value of a run for a published number, or the reason why it has none."""
    if run.n_failed:
        return f"{run.n_failed} of {counted(run.n, 'example')} of {run.run_id} failed"
    value, low, high = (None if x is None else plan.times * x for x in _value(plan, run))
    if value is None:
        return f"{run.run_id} has no {plan.measure.removeprefix('official ').replace('_', ' ')}"
    return Measured(value, low, high, run.n, run.kept_tokens or 0, run.cache_bytes or 0)


def _value(plan: Plan, run: Result) -> tuple[float | None, float | None, float | None]:
    """The value and its interval in kvbench's unit."""
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
    """The unweighted mean over tasks; for its interval every task is resampled separately."""
    found = [measured(plan, run) for plan, run in zip(plans, runs, strict=True)]
    values = [one for one in found if isinstance(one, Measured)]
    if len(values) < len(found):
        return next(one for one in found if isinstance(one, str))
    scores = [[sample.score for sample in run.samples if sample.score is not None] for run in runs]
    low = high = None
    if (
        {one.measure for one in plans} == {"score"}
        and len({one.times for one in plans}) == 1
        and min(map(len, scores)) > 1
    ):
        interval = stratified_interval(scores)
        low, high = plans[0].times * interval.low, plans[0].times * interval.high
    means = {name: fmean(getattr(one, name) for one in values) for name in ("value", "kept", "nbytes")}
    return replace(values[0], low=low, high=high, n=sum(one.n for one in values), **means)
