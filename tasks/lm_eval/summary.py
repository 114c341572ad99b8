"""The results lm-eval prints: every metric of every task, and of a group over its tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from statistics import fmean
from typing import Any

from kvbench.tasks.summary import by_subset
from kvbench.tasks.task import Scored

NEEDS_SCORES = False  # some metrics are of all answers together, and none is of a single one


def summary(answers: Sequence[Scored]) -> dict[str, float | None]:
    """ "metric,filter" in the task's own unit; of several tasks "task/metric,filter", and "group/metric,filter".

    A metric that some document has no value for, or whose function the installed lm-eval does not have, is None.
    """
    members = by_subset(answers, "task")
    results = {task: _task(found) for task, found in members.items()}
    group = answers[0].metadata.get("group")
    if len(results) == 1 and group is None:
        return next(iter(results.values()))
    named = {f"{task}/{key}": value for task, found in results.items() for key, value in found.items()}
    if group is None:
        return named
    sizes = {task: len(found) for task, found in members.items()}
    return {f"{group['name']}/{key}": value for key, value in _group(results, sizes, group).items()} | named


def _task(answers: Sequence[Scored]) -> dict[str, float | None]:
    functions = answers[0].metadata.get("aggregation", {})
    measures: list[Mapping[str, Any]] = [getattr(answer, "measures", None) or {} for answer in answers]
    found = {}
    for key in dict.fromkeys(key for measured in measures for key in measured):
        values = [measured.get(key) for measured in measures]
        aggregate = _function(functions.get(key.split(",")[0], "mean"))
        missing = aggregate is None or any(value is None for value in values)
        found[key] = None if aggregate is None or missing else float(aggregate([_tuples(value) for value in values]))
    return found


def _group(
    results: Mapping[str, Mapping[str, float | None]], sizes: Mapping[str, int], group: Mapping[str, Any]
) -> dict[str, float | None]:
    """The mean over a group's tasks, which weigh by their number of documents where the group says so."""
    keys = dict.fromkeys(key for found in results.values() for key in found)
    means: dict[str, float | None] = {}
    for key in keys:
        by_size = group["weight_by_size"].get(key.split(",")[0])
        if by_size is None:
            continue
        values = {task: found[key] for task, found in results.items() if key in found}
        known = [(value, sizes[task] if by_size else 1) for task, value in values.items() if value is not None]
        whole = len(known) == len(values)
        means[key] = sum(value * size for value, size in known) / sum(size for _, size in known) if whole else None
    return means


def _function(name: str) -> Callable[[list[Any]], Any] | None:
    """The function of a name, of lm-eval's or `module:function`; None where it is not to be had."""
    if name == "mean":
        return fmean
    from lm_eval.api.registry import AGGREGATION_REGISTRY  # here: only few tasks have to wait for it

    if ":" not in name:
        known: Callable[[list[Any]], Any] | None = AGGREGATION_REGISTRY.get(name, None)
        return known
    module, _, function = name.partition(":")
    try:
        named: Callable[[list[Any]], Any] = getattr(import_module(module), function)
        return named
    except (ImportError, AttributeError):
        return None


def _tuples(value: Any) -> Any:  # noqa: ANN401 - whatever a metric is
    """Lists, which JSON makes of tuples, as the tuples lm-eval's functions take apart."""
    return tuple(value) if isinstance(value, list) else value
