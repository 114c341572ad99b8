"""lm-eval's results: every metric of every task, and of a group over its tasks.

Names of functions in samples choose from the table below and are never imported, because samples may come from others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from math import isfinite
from statistics import fmean
from typing import Any

from kvbench.errors import from_extra
from kvbench.tasks.scores import by_subset
from kvbench.tasks.task import Scored

NEEDS_SCORES = False  # some metrics are only defined for all answers together
MOST = 1000  # numbers of one measure, as the probabilities of the choices of a question


def summary(answers: Sequence[Scored]) -> dict[str, float | None]:
    """ "metric,filter" in the task's unit; of several tasks "task/metric,filter", and "group/metric,filter".

    A metric is None if a document has no value, or if its function is not one of `AGGREGATIONS`.
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
        known = AGGREGATIONS.get(str(functions.get(key.split(",")[0], "mean")))
        complete = known is not None and all(map(known[0], values))
        tuples = [tuple(value) if isinstance(value, list) else value for value in values]  # JSON has no tuples
        value = float(known[1](tuples)) if known is not None and complete else None
        found[key] = value if value is None or isfinite(value) else None
    return found


# --- the functions that may be named ---------------------------------------------------------------------------------
def _is_number(value: Any) -> bool:  # noqa: ANN401 - whatever JSON holds
    return isinstance(value, int | float) and isfinite(value)


def _are_numbers(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, list) and 0 < len(value) <= MOST and all(map(_is_number, value))


def _is_pair(value: Any) -> bool:  # noqa: ANN401
    return _are_numbers(value) and len(value) == 2


def _is_choice(value: Any) -> bool:  # noqa: ANN401
    """The right choice and the probabilities of all choices."""
    return isinstance(value, list) and len(value) == 2 and _is_number(value[0]) and _are_numbers(value[1])


def _are_texts(value: Any) -> bool:  # noqa: ANN401
    """A reference, or several, and the answer."""
    if not isinstance(value, list) or len(value) != 2:
        return False
    references = value[0] if isinstance(value[0], list) else [value[0]]
    return 0 < len(references) <= MOST and all(isinstance(one, str) for one in (*references, value[1]))


def _official(name: str) -> Callable[[Sequence[Any]], float]:
    """lm-eval's own function."""

    def aggregate(values: Sequence[Any]) -> float:
        with from_extra("lm-eval", f"the aggregate {name}"):
            from lm_eval.api import metrics  # here: imports sacrebleu

        function: Callable[[Sequence[Any]], float] = getattr(metrics, name)
        return function(values)

    return aggregate


def _of_instructions(values: Sequence[Sequence[float]]) -> float:
    """IFEval's accuracy: every instruction counts once, whatever the number in its prompt."""
    return fmean(chain.from_iterable(values))


def _of_lengths(values: Sequence[float]) -> float:
    """RULER's mean at one length: a document of another length has -1."""
    return fmean([value for value in values if value != -1] or [-1.0])


def _of_three_classes(values: Sequence[Sequence[float]]) -> float:
    """CommitmentBank's mean F1 of three classes, from pairs (answer, right one)."""
    found = []
    for label in (0, 1, 2):
        hits = sum(answer == right == label for answer, right in values)
        marked = sum((answer == label) + (right == label) for answer, right in values)
        found.append(2 * hits / marked if marked else 0.0)
    return fmean(found)


AGGREGATIONS: dict[str, tuple[Callable[[Any], bool], Callable[[Sequence[Any]], float]]] = {
    "mean": (_is_number, fmean),
    **{name: (_is_number, _official(name)) for name in ("nanmean", "median", "perplexity")},
    **{name: (_is_pair, _official(name)) for name in ("weighted_perplexity", "bits_per_byte", "matthews_corrcoef")},
    "f1": (_is_pair, _official("f1_score")),
    "brier_score": (_is_choice, _official("brier_score")),
    **{name: (_are_texts, _official(name)) for name in ("bleu", "chrf", "ter")},
    "chrf++": (_are_texts, _official("chrfpp")),
    **{
        f"lm_eval.tasks.{package}.utils:agg_inst_level_acc": (_are_numbers, _of_instructions)
        for package in ("ifeval", "ifeval.multilingual", "leaderboard.ifeval")
    },
    "lm_eval.tasks.ruler.common_utils:aggregate_metrics": (_is_number, _of_lengths),
    "lm_eval.tasks.super_glue.cb.aggregate:cb_multi_fi": (_is_pair, _of_three_classes),
}
"""By the names that `Loaded.aggregates` records: which values of a document a function takes, and the function."""
