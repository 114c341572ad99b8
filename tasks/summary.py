"""The numbers a benchmark's own scripts print, which are often not the mean over all examples.

metadata["benchmark"] of the examples names the benchmark: a package of `kvbench.tasks`, whose modules `summary` and
`predictions` have the functions below, or a module of your own by its full name (`my_package.my_bench`), which may have
all of them.

    summary(answers)                   aggregates of scored answers by name, in the benchmark's own unit. Every answer
                                       has an output and, unless the module says NEEDS_SCORES = False, a score
    SUBSETS_BY: str                    of a benchmark that averages over subsets: the metadata key that tells them apart
    averages(subsets)                  then, which of the subsets each average of `summary` is the mean of, by its name
    heat_map(answers)                  percent by (length, depth in percent), where a cell is no mean over its examples
    score_predictions(line, **flags)   what is added to a line of recorded predictions (see `tasks.predictions`)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from statistics import fmean
from types import ModuleType

from kvbench import tasks
from kvbench.tasks.task import Scored

log = logging.getLogger(__name__)


def benchmark_module(name: str, part: str) -> ModuleType:
    """The module that has a benchmark's `part`. Raises ModuleNotFoundError where there is none of that name."""
    own = f"{tasks.__name__}.{name}"
    return import_module(f"{own}.{part}" if name.isidentifier() and find_spec(own) else name)


def benchmarks_with(part: str) -> list[str]:
    """Names of our own benchmarks that have such a part, sorted."""
    packages = sorted(module.name for module in iter_modules(tasks.__path__) if module.ispkg)
    return [name for name in packages if find_spec(f"{tasks.__name__}.{name}.{part}")]


def summary(answers: Sequence[Scored]) -> dict[str, float | None]:
    """Official aggregates of scored answers by name, in the unit of the benchmark (percent); {} where the mean is all.

    {} also while an answer has no output or no score: a mean over the others would flatter whatever failed.
    """
    module = summary_module(answers)
    if module is None or not hasattr(module, "summary") or any(answer.output is None for answer in answers):
        return {}
    if getattr(module, "NEEDS_SCORES", True) and any(answer.score is None for answer in answers):
        return {}
    found: dict[str, float | None] = module.summary(answers)
    return found


def summary_module(answers: Sequence[Scored]) -> ModuleType | None:
    """The module with the summary of the one benchmark that all answers name; None where there is none."""
    names = {answer.metadata.get("benchmark") for answer in answers}
    return _module(names.pop()) if len(names) == 1 else None


def subsets_by(answers: Sequence[Scored]) -> str | None:
    """The metadata key over whose values their benchmark averages with equal weights; None where it does not."""
    return getattr(summary_module(answers), "SUBSETS_BY", None)


@cache
def _module(benchmark: object) -> ModuleType | None:
    """The module with a benchmark's summary; None, with a warning, where it is not installed."""
    if not isinstance(benchmark, str):
        return None
    try:
        return benchmark_module(benchmark, "summary")
    except ModuleNotFoundError as error:
        log.warning("the aggregates of benchmark %s are left out: %s", benchmark, error)
        return None


def by_subset(answers: Sequence[Scored], key: str) -> dict[str, list[Scored]]:
    """The answers of each subset, in the order of their first appearance."""
    members: dict[str, list[Scored]] = {}
    for answer in answers:
        members.setdefault(answer.metadata[key], []).append(answer)
    return members


def scores_of(answers: Sequence[Scored]) -> list[float]:
    """The scores of answers that all have one."""
    return [answer.score for answer in answers if answer.score is not None]


def percent(scores: Sequence[float]) -> float | None:
    """Mean of scores from 0 to 1, in percent, as LongBench's and RULER's code rounds it; None where it prints NaN."""
    return round(100 * fmean(scores), 2) if scores else None


def means(percents: Mapping[str, float | None], averages: Mapping[str, Sequence[str]]) -> dict[str, float | None]:
    """Averages over subsets by name; none of a single subset is printed. percents: of each subset."""
    if len(percents) < 2:
        return {}
    return {name: fmean(percents[member] or 0.0 for member in members) for name, members in averages.items()}


def mean_measures(answers: Sequence[Scored]) -> dict[str, float | None]:
    """Mean of every metric that the answers have beside their score, by its name, 0 to 100."""
    measured: list[Mapping[str, float]] = [getattr(answer, "measures", None) or {} for answer in answers]
    names = dict.fromkeys(name for found in measured for name in found)
    return {name: 100 * fmean(found[name] for found in measured) for name in names}
