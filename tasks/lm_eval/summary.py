"""lm-eval's results: every metric of every task, and of a group over its tasks."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from statistics import fmean
from typing import Any

from kvbench.tasks.scores import by_subset
from kvbench.tasks.task import Scored
from kvbench.tasks.trust import is_trusted

NEEDS_SCORES = False  # some metrics are only defined for all answers together


def summary(answers: Sequence[Scored]) -> dict[str, float | None]:
    """ "metric,filter" in the task's unit; of several tasks "task/metric,filter", and "group/metric,filter".

    A metric is None if a document has no value, or if the installed lm-eval does not have its function.
    """
    members = by_subset(answers, "task")
    results = {task: _task(found) for task, found in members.items()}
    group: Any = answers[0].metadata.get("group")
    if len(results) == 1 and group is None:
        return next(iter(results.values()))
    named = {f"{task}/{key}": value for task, found in results.items() for key, value in found.items()}
    for key in dict.fromkeys(key for found in results.values() for key in found) if group else ():
        by_size = group["weight_by_size"].get(key.split(",")[0])
        if by_size is None:
            continue
        values = [found[key] for found in results.values() if key in found]
        sizes = [len(members[task]) if by_size else 1 for task, found in results.items() if key in found]
        known = [value for value in values if value is not None]
        mean = fmean(known, sizes) if len(known) == len(values) else None
        named = {**named, f"{group['name']}/{key}": mean}
    return named


def _task(answers: Sequence[Scored]) -> dict[str, float | None]:
    """Every metric of one task."""
    functions = answers[0].metadata.get("aggregation", {})
    measures: list[dict[str, Any]] = [getattr(answer, "measures", None) or {} for answer in answers]
    found: dict[str, float | None] = {}
    for key in dict.fromkeys(key for measured in measures for key in measured):
        values = [measured.get(key) for measured in measures]
        function = _function(functions.get(key.split(",")[0], "mean"))
        complete = function is not None and all(value is not None for value in values)
        tuples = [tuple(value) if isinstance(value, list) else value for value in values]  # JSON has no tuples
        found[key] = float(function(tuples)) if complete else None
    return found


def _function(name: str) -> Any:  # noqa: ANN401 - a function of a list
    """An aggregation function: lm-eval's name, or `module:function` of lm-eval or a trusted module; else None."""
    if name == "mean":
        return fmean
    if ":" in name:
        module, _, function = name.partition(":")
        if not (module.startswith("lm_eval.") or is_trusted(module)):
            return None
        try:
            found = getattr(import_module(module), function)
        except (ImportError, AttributeError):
            return None
        return found if getattr(found, "__module__", None) == module else None  # not a name that it imports
    from lm_eval.api.registry import AGGREGATION_REGISTRY

    return AGGREGATION_REGISTRY.get(name, None)
